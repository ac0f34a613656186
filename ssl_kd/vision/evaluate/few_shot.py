"""Evaluate frozen embeddings by probes that see a few labeled samples of each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssl_kd.vision.evaluate.probe import fit_quietly
from ssl_kd.vision.evaluate.sample import labeled_sample

SHOTS = (1, 5, 10)
DRAWS = 10
MAX_TEST = 10_000  # held-out rows
_MAX_ITER = 200  # L-BFGS steps per fit


def few_shot_probes(
    train_x: NDArray,
    train_y: NDArray,
    test_x: NDArray | None = None,
    test_y: NDArray | None = None,
    *,
    shots: Sequence[int] = SHOTS,
    draws: int = DRAWS,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Compute the accuracy of logistic regression on a few samples of each class.

    For every number of shots, samples are drawn at random `draws` times; each time, logistic
    regression with C = 1 is fitted on them alone. Before, the mean of all training embeddings is
    subtracted, and all are divided by one number, their root mean square: distances keep their
    proportions, and no label is needed. Without held-out data, the accuracy is that on the training
    samples that were not drawn.

    Args:
        train_x: `[n, d]` embeddings.
        train_y: `[n]` integer labels; samples with label -1 (unknown) are left out.
        test_x: `[m, d]` held-out embeddings, or None.
        test_y: `[m]` labels of the held-out embeddings.
        shots: Samples of each class, at least 1.
        draws: Number of draws for each number of shots, at least 1.
        seed: Seed of the draws.

    Returns:
        For each number of shots a dict: `shots`, `accuracy` (mean over the draws), `deviation`
        (standard deviation of a draw, None for one), `draws`, and `note`: None, why there is no
        accuracy (a class has fewer labeled samples, or no held-out sample has a label), or how many
        fits did not converge.
    """
    from sklearn.linear_model import LogisticRegression

    x, y = labeled_sample(train_x, train_y, len(train_y), seed)
    classes, counts = np.unique(y, return_counts=True)
    held_out = None
    if test_x is not None and test_y is not None:
        held_out = labeled_sample(test_x, test_y, MAX_TEST, seed)
    if len(x):
        center = x.mean(0, dtype=np.float64)
        scale = max(np.sqrt(np.square(x - center).mean()), np.finfo(np.float32).tiny)
        x = ((x - center) / scale).astype(np.float32)
        if held_out is not None:
            held_out = ((held_out[0] - center) / scale).astype(np.float32), held_out[1]
    if held_out is not None and not len(held_out[0]):
        why = "no held-out sample has a label"
        return [
            {"shots": n, "accuracy": None, "deviation": None, "draws": draws, "note": why}
            for n in shots
        ]
    found = []
    for n in shots:
        row: dict[str, Any] = {"shots": n, "accuracy": None, "deviation": None, "draws": draws}
        needed = n if held_out is not None else n + 1
        if len(classes) < 2 or counts.min() < needed:
            least = f"{counts.min()} labeled samples" if len(classes) else "no label"
            found.append(row | {"note": f"a class has {least}; expected at least {needed}"})
            continue
        scores, stopped = [], 0
        classifier = LogisticRegression(max_iter=_MAX_ITER)
        for draw in range(draws):
            rng = np.random.default_rng([seed, n, draw])
            chosen = np.concatenate(
                [rng.choice(np.flatnonzero(y == k), n, replace=False) for k in classes]
            )
            test = held_out
            if test is None:
                others = np.setdiff1d(np.arange(len(y)), chosen)
                rows = rng.permutation(others)[:MAX_TEST]
                test = x[rows], y[rows]
            stopped += not fit_quietly(classifier, x[chosen], y[chosen])
            scores.append(float(classifier.score(*test)))
        deviation = float(np.std(scores, ddof=1)) if draws > 1 else None
        row |= {"accuracy": float(np.mean(scores)), "deviation": deviation}
        note = f"{stopped} of {draws} fits stopped after {_MAX_ITER} steps without convergence"
        found.append(row | {"note": note if stopped else None})
    return found
