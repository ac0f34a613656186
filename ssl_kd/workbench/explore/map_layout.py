"""Lay out every sample of a run in the plane."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssl_kd.errors import InputError
from ssl_kd.evaluate.layout import embedding_map
from ssl_kd.evaluate.sample import random_rows
from ssl_kd.files import CorruptFileError, load_tensors, remove_orphans, save_tensors
from ssl_kd.guard.finite import safe_normalize
from ssl_kd.store.neighbors import search_on
from ssl_kd.training.clock import Progress
from ssl_kd.vision.samples import Samples

logger = logging.getLogger(__name__)

LANDMARKS, NEAREST, BLOCK = 5000, 10, 8192
FILE = "map.pt"
Blocks = Callable[[], Iterable[tuple[int, Tensor]]]


def map_of(
    samples: Samples, seed: int = 0, progress: Progress | None = None
) -> NDArray[np.float32]:
    """Return the place of every sample `[n, 2]`, within [-1, 1].

    It is stored as `map.pt` in the run's folder and used again for the same embeddings and seed.

    Raises:
        FileNotFoundError, RunFolderError: the embeddings are missing, or belong to other samples.
    """
    stores = [(rows.start, samples.store(split)) for split, rows in samples.splits.items()]
    if len({store.dim for _, store in stores}) > 1:
        raise InputError(f"the splits of {samples.path} have embeddings of different widths")
    identity = " ".join([*(store.digest for _, store in stores), str(seed), str(LANDMARKS), "1"])
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
        logger.warning("the map is computed again: %s", error)

    def blocks() -> Iterable[tuple[int, Tensor]]:
        for first, store in stores:
            for start, x in store.blocks(BLOCK):
                yield first + start, x

    rows = random_rows(len(samples), LANDMARKS, seed)
    places = lay_out(blocks, samples.embeddings(rows), rows, len(samples), seed, progress=progress)
    try:
        save_tensors(path, {"places": torch.from_numpy(places), "key": key})
    except OSError as error:
        logger.warning("the map cannot be stored for the next time: %s", error)
    return places


def lay_out(
    blocks: Blocks,
    landmarks: Tensor,
    rows: NDArray[np.int64],
    n: int,
    seed: int = 0,
    *,
    progress: Progress | None = None,
) -> NDArray[np.float32]:
    """Lay out landmarks by t-SNE, and put every other sample among its nearest landmarks.

    Such a sample gets the mean place of those of its nearest landmarks that are on the same island
    of the map, plus a random shift of the size of the gaps there, so that none hides another.
    Memory is that of the result and a block; time grows with n.

    Args:
        blocks: yields the number of the first row, and rows `[b, d]`, of all samples.
        landmarks: embeddings of some samples `[m, d]`.
        rows: their numbers `[m]`, ascending.
        n: number of samples.
        seed: seed of the layout and the shifts.
        progress: called with (`map`, rows done, n, {}).

    Returns:
        `[n, 2]` float32, within [-1, 1].

    References:
        van der Maaten and Hinton, "Visualizing Data using t-SNE", 2008, section 5, lays out
        landmarks alone; Poličar et al., "openTSNE", 2024, starts others where their neighbours are.
    """
    units = safe_normalize(landmarks.float())
    _, laid = embedding_map(units.numpy(), seed, max_points=len(units))
    places = np.empty((n, 2), np.float32)
    if len(rows) < n:
        random = np.random.default_rng(seed)
        search, k = search_on(torch.device("cpu")), min(NEAREST, len(units))
        gaps = _gaps(laid)
        for start, x in blocks():
            closeness, nearest = search(safe_normalize(x.float()), units, k)
            at = _mean_places(closeness.numpy(), nearest.numpy(), laid, gaps)
            shift = random.standard_normal(at.shape, np.float32)
            places[start : start + len(x)] = at + shift * gaps[nearest[:, :1].numpy()] / 2
            if progress is not None:
                progress("map", start + len(x), n, {})
    places[rows] = laid
    return places / max(1.0, float(np.abs(places).max()))


def _gaps(laid: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the distance of each landmark to the nearest other on the map `[m]`, clipped."""
    points = torch.from_numpy(laid)
    near = torch.empty(len(points))
    for start in range(0, len(points), 1024):
        distances = torch.cdist(points[start : start + 1024], points)
        near[start : start + 1024] = distances.topk(2, largest=False).values[:, 1]
    return near.clamp(max=near.quantile(0.9)).numpy()


def _mean_places(
    closeness: NDArray, nearest: NDArray, laid: NDArray[np.float32], gaps: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the mean place of the nearest landmarks `[b, k]` that are near the nearest one."""
    places = laid[nearest]
    far = np.linalg.norm(places - places[:, :1], axis=2) > 8 * np.median(gaps)
    distance = 1 - closeness  # half the squared distance of unit rows
    scale = np.maximum(distance.mean(1, keepdims=True) - distance[:, :1], 1e-6)
    weight = np.where(far, 0, np.exp(-2 * (distance - distance[:, :1]) / scale))
    weight = weight / weight.sum(1, keepdims=True)
    return np.einsum("bk,bkd->bd", weight, places).astype(np.float32)
