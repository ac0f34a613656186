"""Compute a two-dimensional map of all samples of a run."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import KDTree
from torch import Tensor

from firstnan.finite import safe_normalize
from ssl_kd.core.errors import InputError
from ssl_kd.core.files import CorruptFileError, load_tensors, remove_orphans, save_tensors
from ssl_kd.core.runs.clock import Progress, no_progress
from ssl_kd.vision.cache.neighbors import search_on
from ssl_kd.vision.evaluate.layout import embedding_map
from ssl_kd.vision.evaluate.sample import random_rows
from ssl_kd.vision.samples import Samples

logger = logging.getLogger(__name__)

# Samples that t-SNE lays out; nearest landmarks of each other sample; rows that are read at once.
LANDMARKS = 5000
NEAREST = 10
BLOCK = 8192
FILE, SEED = "map.pt", 0


def map_of(samples: Samples, progress: Progress = no_progress) -> NDArray[np.float32]:
    """Return the coordinates of all samples on the map, `[n, 2]` within [-1, 1].

    The map is stored as `map.pt` in the run's folder, and read from there if the embeddings are the
    same.
    """
    stores = [(rows.start, samples.store(split)) for split, rows in samples.splits.items()]
    if len({store.dim for _, store in stores}) > 1:
        raise InputError(
            f"the splits of {samples.path} have embeddings of different widths, so there is no "
            "common map: train again, with all splits embedded by the same teacher"
        )
    identity = " ".join([*(store.digest for _, store in stores), str(SEED), str(LANDMARKS), "1"])
    key, path = hashlib.sha256(identity.encode()).hexdigest(), samples.path / FILE
    remove_orphans(path)
    try:
        stored = load_tensors(path)
        places = stored["places"]
        is_valid = places.shape == (len(samples), 2) and places.dtype == torch.float32
        if stored["key"] == key and is_valid and bool((places.abs() <= 1).all()):
            return places.numpy()
    except FileNotFoundError:
        pass
    except (CorruptFileError, KeyError, TypeError, AttributeError) as error:
        logger.warning("the stored map cannot be used, so it is computed again: %s", error)

    blocks = ((first + start, x) for first, store in stores for start, x in store.blocks(BLOCK))
    rows = random_rows(len(samples), LANDMARKS, SEED)
    places = lay_out(blocks, samples.embeddings(rows), rows, len(samples), progress)
    try:
        save_tensors(path, {"places": torch.from_numpy(places), "key": key})
    except OSError as error:
        logger.warning("the map cannot be stored in %s: %s", path, error)
    return places


def lay_out(
    blocks: Iterable[tuple[int, Tensor]],
    landmarks: Tensor,
    rows: NDArray[np.int64],
    n: int,
    progress: Progress = no_progress,
) -> NDArray[np.float32]:
    """Return coordinates `[n, 2]` within [-1, 1]: landmarks by t-SNE, others near their landmarks.

    Other samples are placed at the weighted mean of their nearest landmarks; a random shift of
    about the distance between landmarks keeps them from hiding each other. `blocks` yields the
    number of the first row and embeddings `[b, d]`; the landmarks `[m, d]` are the samples in
    `rows` `[m]`, ascending.

    References:
        van der Maaten and Hinton, "Visualizing Data using t-SNE", 2008, section 5 (landmarks).
        Poličar et al., "openTSNE", 2024 (new samples start at the place of their neighbors).
    """
    units = safe_normalize(landmarks.float())
    _, laid = embedding_map(units.numpy(), SEED, max_points=len(units))
    places = np.empty((n, 2), np.float32)
    if len(rows) < n:
        random = np.random.default_rng(SEED)
        search, k = search_on(torch.device("cpu")), min(NEAREST, len(units))
        gaps = _gaps(laid)
        for start, x in blocks:
            closeness, nearest = search(safe_normalize(x.float()), units, k)
            at = _mean_places(closeness.numpy(), nearest.numpy(), laid, gaps)
            shift = random.standard_normal(at.shape, np.float32)
            places[start : start + len(x)] = at + shift * gaps[nearest[:, :1].numpy()] / 2
            progress("map", start + len(x), n, {})
    places[rows] = laid
    return places / max(1.0, float(np.abs(places).max()))


def _gaps(laid: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the distance of each landmark to the nearest other one on the map, clipped, `[m]`."""
    distances: Any = KDTree(laid).query(laid, 2)[0]  # the nearest one is the landmark itself
    return np.minimum(distances[:, 1], np.quantile(distances[:, 1], 0.9))


def _mean_places(
    closeness: NDArray, nearest: NDArray, laid: NDArray[np.float32], gaps: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Return the weighted mean of the nearest landmarks that are close on the map, `[b, 2]`."""
    places = laid[nearest]
    far = np.linalg.norm(places - places[:, :1], axis=2) > 8 * np.median(gaps)
    distance = 1 - closeness  # half the squared distance of unit rows
    scale = np.maximum(distance.mean(1, keepdims=True) - distance[:, :1], 1e-6)
    weight = np.where(far, 0, np.exp(-2 * (distance - distance[:, :1]) / scale))
    weight = weight / weight.sum(1, keepdims=True)
    return np.einsum("bk,bkd->bd", weight, places).astype(np.float32)
