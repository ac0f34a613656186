"""A place in the plane for every sample of a run."""

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
from ssl_kd.store.neighbours import search_on
from ssl_kd.training.clock import Progress
from ssl_kd.vision.samples import Samples

logger = logging.getLogger(__name__)

LANDMARKS, NEAREST, BLOCK = 5000, 10, 8192
FILE = "map.pt"
Blocks = Callable[[], Iterable[tuple[int, Tensor]]]


def map_of(
    samples: Samples, seed: int = 0, progress: Progress | None = None
) -> NDArray[np.float32]:
    """Places `[n, 2]` of every sample, within [-1, 1]; kept in the run's folder as `map.pt`.

    What is kept is used for the same embeddings and seed, and computed anew for any other.

    Raises:
        FileNotFoundError, RunFolderError: the embeddings are gone, or are others by now.
    """
    stores = [(rows.start, samples.store(split)) for split, rows in samples.splits.items()]
    if len({store.dim for _, store in stores}) > 1:
        raise InputError(f"the splits of {samples.path} have embeddings of different widths")
    identity = " ".join([*(store.digest for _, store in stores), str(seed), str(LANDMARKS), "1"])
    key, path = hashlib.sha256(identity.encode()).hexdigest(), samples.path / FILE
    remove_orphans(path)
    try:
        kept = load_tensors(path)
        same = kept["key"] == key and kept["places"].shape == (len(samples), 2)
        if (
            same
            and kept["places"].dtype == torch.float32
            and bool((kept["places"].abs() <= 1).all())
        ):
            return kept["places"].numpy()
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
        logger.warning("the map is not kept for the next time: %s", error)
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
    """Lay out some samples by t-SNE, and put each other one among those that are like it.

    A sample that is no landmark gets the mean place of its nearest landmarks, as far as those lie
    on one island of the map, plus a shift of the size of the gaps there, so that none hides
    another. Memory is that of the result and a block; time grows with n.

    Args:
        blocks: gives the number of the first row, and rows `[b, d]`, of all samples.
        landmarks: `[m, d]`, some of them.
        rows: `[m]`, which, ascending.
        n: how many there are.
        seed: starts the layout and shifts the places.
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
            at = _among(closeness.numpy(), nearest.numpy(), laid, gaps)
            shift = random.standard_normal(at.shape, np.float32)
            places[start : start + len(x)] = at + shift * gaps[nearest[:, :1].numpy()] / 2
            if progress is not None:
                progress("map", start + len(x), n, {})
    places[rows] = laid
    return places / max(1.0, float(np.abs(places).max()))


def _gaps(laid: NDArray[np.float32]) -> NDArray[np.float32]:
    """How far each landmark is from the nearest other on the map `[m]`; none of the longest."""
    points = torch.from_numpy(laid)
    near = torch.empty(len(points))
    for start in range(0, len(points), 1024):
        distances = torch.cdist(points[start : start + 1024], points)
        near[start : start + 1024] = distances.topk(2, largest=False).values[:, 1]
    return near.clamp(max=near.quantile(0.9)).numpy()


def _among(
    closeness: NDArray, nearest: NDArray, laid: NDArray[np.float32], gaps: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The mean place of the nearest landmarks `[b, k]` that lie by the nearest one's side."""
    found = laid[nearest]
    far = np.linalg.norm(found - found[:, :1], axis=2) > 8 * np.median(gaps)
    distance = 1 - closeness  # of unit rows: half its square
    scale = np.maximum(distance.mean(1, keepdims=True) - distance[:, :1], 1e-6)
    weight = np.where(far, 0, np.exp(-2 * (distance - distance[:, :1]) / scale))
    weight = weight / weight.sum(1, keepdims=True)
    return np.einsum("bk,bkd->bd", weight, found).astype(np.float32)
