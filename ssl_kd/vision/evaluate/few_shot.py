"""Evaluate frozen embeddings by probes that see a few labeled samples of each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssl_kd.core.errors import first_few
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
    class_names: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Compute the accuracy of logistic regression on a few samples of each class.

    For every number of shots, samples are drawn at random `draws` times; each time, logistic
    regression with C = 1 is fitted on them alone. Before, the mean of all training embeddings is
    subtracted, and all are divided by one number, their root mean square: distances keep their
    proportions, and no label is needed. Without held-out data, the accuracy is that on the training
    samples that were not drawn. A class with too few labeled samples for a number of shots (as many
    as the shots, and one more without held-out data) is left out of its training and test samples.

    Args:
        train_x: `[n, d]` embeddings.
        train_y: `[n]` integer labels; samples with label -1 (unknown) are left out.
        test_x: `[m, d]` held-out embeddings, or None.
        test_y: `[m]` labels of the held-out embeddings.
        shots: Samples of each class, at least 1.
        draws: Number of draws for each number of shots, at least 1.
        seed: Seed of the draws.
        class_names: Names of the labels 0, 1, ...; None: the labels themselves.

    Returns:
        For each number of shots a dict: `shots`, `accuracy` (mean over the draws), `deviation`
        (standard deviation of a draw, None for one), `draws`, `left_out` (names of the classes with
        too few labeled samples), and `note`: None, why there is no accuracy (fewer than two classes
        are left, or no held-out sample has a label of them), which classes are left out, or how
        many fits did not converge.
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
    names = list(map(str, classes if class_names is None else np.array(class_names)[classes]))
    found = []
    for n in shots:
        needed = n if held_out is not None else n + 1
        used = classes[counts >= needed]
        left_out = [name for name, count in zip(names, counts, strict=True) if count < needed]
        row: dict[str, Any] = {"shots": n, "accuracy": None, "deviation": None, "draws": draws}
        row |= {"left_out": left_out, "note": None}
        found.append(row)
        if len(used) < 2:
            which = f"{len(used)} of {len(classes)} classes" if len(classes) else "no class"
            row["note"] = f"{which} with {needed} or more labeled samples; expected at least 2"
            continue
        of_used = np.isin(y, used)
        sample_x, sample_y = x[of_used], y[of_used]
        test = held_out
        if test is not None:
            of_used = np.isin(test[1], used)
            test = test[0][of_used], test[1][of_used]
            if not len(test[0]):
                row["note"] = "no held-out sample has a label of a class that is not left out"
                continue
        scores, stopped = [], 0
        classifier = LogisticRegression(max_iter=_MAX_ITER)
        for draw in range(draws):
            rng = np.random.default_rng([seed, n, draw])
            chosen = np.concatenate(
                [rng.choice(np.flatnonzero(sample_y == k), n, replace=False) for k in used]
            )
            stopped += not fit_quietly(classifier, sample_x[chosen], sample_y[chosen])
            if test is None:
                others = np.setdiff1d(np.arange(len(sample_y)), chosen)
                rows = rng.permutation(others)[:MAX_TEST]
                scores.append(float(classifier.score(sample_x[rows], sample_y[rows])))
            else:
                scores.append(float(classifier.score(*test)))
        row["accuracy"] = float(np.mean(scores))
        row["deviation"] = float(np.std(scores, ddof=1)) if draws > 1 else None
        notes = []
        if left_out:
            some = ", ".join(first_few(left_out, 10))
            notes.append(
                f"{len(left_out)} of {len(classes)} classes have fewer than {needed} labeled "
                f"samples and are left out: {some}"
            )
        if stopped:
            what = f"{stopped} of {draws} fits stopped after {_MAX_ITER} steps"
            notes.append(f"{what} without convergence")
        row["note"] = "; ".join(notes) or None
    return found
