"""What to label next: samples to which many others are alike, as no labelled one is."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssl_kd.errors import InputError
from ssl_kd.store import EmbeddingStore
from ssl_kd.workbench.curate.ranked import Ranked
from ssl_kd.workbench.curate.spacing import check_finite, units

ROWS = 8192  # compared with one another at once: 256 MiB
ASKED = 4  # of so many rows one is asked for at most, while there are that many
LABELLED = 50_000  # that are compared with the others; of more, so many at random
SHARPNESS = 2.0  # exp(2 (cos - 1)): a Gaussian of half the median distance, as cos is 0 on average
BLOCK = 256  # rows at once


def label_next(
    store: EmbeddingStore,
    n: int = 100,
    *,
    labelled: NDArray[np.bool_] | None = None,
    parents: NDArray[np.integer] | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Ranked:
    """Which samples to label next, so that every other one is alike to a labelled one.

    Directions are centred: `u = x / |x| - mean`, and `k = exp(2 (cos(u, u') - 1))` says how alike
    two are. A sample is covered as far as it is alike to its most alike labelled one. Each time
    the sample is asked for that adds most to what is covered of all. So what is asked for first is
    also the best choice of fewer, and a second round goes on where the first one stopped, while the
    same rows are compared: at most 8,192 without a label, in the same `parents`.

    Args:
        store: m embeddings.
        n: how many, 1 ... the samples that have no label.
        labelled: `[m]`, which have a label already; None: those of the store that have one, and
            none where all have.
        parents: `[m]`, clusters of a run, at the level of the tree nearest below n. Samples of two
            cover each other not at all, those of one at least by half.
        device: where all pairs are compared.
        seed: draws the rows that are compared, where more than 8,192 have no label.

    Returns:
        n samples in the order to label them; the score is the share of the samples without a label
        that each newly covers.

    Raises:
        InputError: fewer samples are without a label than were asked for, `labelled` or `parents`
            of another length, or a row that is not finite.

    References:
        Bae et al., Generalized coverage for more robust low-budget active learning, ECCV 2024
        (MaxHerding); Minoux, Accelerated greedy algorithms for maximizing submodular set functions,
        1978; Mirzasoleiman et al., Distributed submodular maximization, NeurIPS 2013 (parts).
    """
    for name, given in (("labelled", labelled), ("parents", parents)):
        if given is not None and len(given) != store.n:
            raise InputError(
                f"{name} has {len(given)} values for {store.n} samples; expected one of each"
            )
    free = without_label(store) if labelled is None else np.flatnonzero(~np.asarray(labelled, bool))
    if not 1 <= n <= len(free):
        raise InputError(
            f"{n} samples to label were asked for; expected 1 to {len(free)}, those that have no "
            "label"
        )
    rng = np.random.default_rng(seed)
    done = _drawn(np.setdiff1d(np.arange(store.n), free), LABELLED, rng)
    centre = _directions(store, _drawn(np.arange(store.n), ROWS, rng)).mean(0)
    groups = np.zeros(store.n, np.int64) if parents is None else np.asarray(parents)

    def alike(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.float32]:
        """How far a label of each of b covers each of a, `[a, b]`, 0 ... 1."""
        u, v = (_directions(store, rows, centre).to(device) for rows in (a, b))
        found = (u @ v.T).sub_(1).mul_(SHARPNESS).exp_().cpu().numpy()
        for start in range(0, len(a), BLOCK) if parents is not None else ():
            some = slice(start, start + BLOCK)
            found[some] = np.where(groups[a[some], None] == groups[b], (1 + found[some]) / 2, 0)
        return found

    count = -(-min(len(free), max(ROWS, ASKED * n)) // ROWS)
    parts = np.array_split(rng.permutation(free)[: count * ROWS], count)
    rows, gains = [], []
    for part, share in zip(map(np.sort, parts), np.array_split(np.arange(n), count), strict=True):
        best = np.zeros(len(part), np.float32)
        for start in range(0, len(done), ROWS):
            best = np.maximum(best, alike(part, done[start : start + ROWS]).max(1))
        places, gain = _greedy(alike(part, part), best, len(share))
        rows.append(part[places])
        gains.append(gain)
    return Ranked(store.ids, np.concatenate(rows), np.concatenate(gains))


def without_label(store: EmbeddingStore) -> NDArray[np.int64]:
    """The rows of a store that have no label; all of them where all have one."""
    known = np.zeros(store.n, bool) if store.labels is None else store.labels.numpy() >= 0
    return np.flatnonzero(known if known.all() else ~known)


def _drawn(rows: NDArray[np.int64], most: int, rng: np.random.Generator) -> NDArray[np.int64]:
    return rows if len(rows) <= most else np.sort(rng.choice(rows, most, replace=False))


def _directions(
    store: EmbeddingStore, rows: NDArray[np.int64], centre: Tensor | None = None
) -> Tensor:
    """Of some rows, `[b, d]` float32; from the centre, if there is one."""
    wanted = torch.from_numpy(rows)
    u = units(store.gather(wanted))
    check_finite(u, store, wanted)
    return (u if centre is None else units(u - centre)).float()


def _greedy(
    alike: NDArray[np.float32], best: NDArray[np.float32], n: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Places of n rows and what each adds: a gain only falls, so an old one is a bound."""
    starts = range(0, len(alike), BLOCK)
    gains = np.concatenate([np.maximum(alike[s : s + BLOCK] - best, 0).mean(1) for s in starts])
    places: list[int] = []
    worth: list[float] = []
    while len(places) < n:
        place = int(gains.argmax())
        gains[place] = np.maximum(alike[place] - best, 0).mean()
        if gains[place] < gains.max():
            continue
        places.append(place)
        worth.append(float(gains[place]))
        gains[place] = -np.inf
        best = np.maximum(best, alike[place])
    return np.array(places), np.array(worth)
