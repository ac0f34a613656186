"""Evaluate frozen embeddings by a linear probe (logistic regression)."""

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssl_kd.vision.evaluate.sample import labeled_sample

logger = logging.getLogger(__name__)

INVERSE_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
# Beyond rows x features x classes of this product a sample of the rows is used, so that the search
# takes at most about a minute on one core.
BUDGET = 10_000_000_000


def linear_probe(
    train_x: NDArray,
    train_y: NDArray,
    test_x: NDArray | None = None,
    test_y: NDArray | None = None,
    seed: int = 0,
    *,
    max_iter: int = 200,
) -> dict[str, Any]:
    """Compute the accuracy of logistic regression on standardized embeddings.

    The inverse penalty C is chosen from 1e-4 to 10 by the accuracy on a fifth of the training data;
    then the classifier is fitted on all training data. Held-out data is used only for the accuracy.
    Without held-out data, a quarter of the training data is held out.

    Args:
        train_x: `[n, d]` embeddings.
        train_y: `[n]` integer labels; samples with label -1 (unknown) are left out.
        test_x: `[m, d]` held-out embeddings, or None.
        test_y: `[m]` labels of the held-out embeddings.
        seed: Seed of the splits and of the random subset of a large set.
        max_iter: Largest number of L-BFGS steps per fit.

    Returns:
        A dict: `accuracy` and `C` (both None with fewer than two classes or ten labeled samples),
        `rows`, the number of training rows, `converged`, whether the final fit converged, and
        `note`, one sentence on deviations from this procedure, or None.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    train_y = np.asarray(train_y)
    n_classes = len(np.unique(train_y[train_y >= 0]))
    max_rows = max(2_000, BUDGET // (train_x.shape[1] * max(n_classes, 1)))
    parts = probe_parts(train_x, train_y, test_x, test_y, max_rows=max_rows, seed=seed)
    nothing = {"accuracy": None, "C": None, "rows": parts.rows, "converged": True}
    if parts.problem is not None:
        return nothing | {"note": parts.problem}
    notes, y, held_y = [*parts.notes], parts.y, parts.held_y
    scaler = StandardScaler().fit(parts.x)
    x, held_x = (np.asarray(scaler.transform(z)) for z in (parts.x, parts.held_x))
    options = {"tol": 1e-3, "max_iter": max_iter}
    penalty = _choose_penalty(LogisticRegression(warm_start=True, **options), x, y, seed)
    classifier = LogisticRegression(C=penalty, **options)
    converged = fit_quietly(classifier, x, y)
    if not converged:
        notes.append(f"the final fit stopped after {max_iter} steps without convergence")
    return {
        "accuracy": float(classifier.score(held_x, held_y)),
        "C": penalty,
        "rows": parts.rows,
        "converged": converged,
        "note": "; ".join(notes) or None,
    }


@dataclass(frozen=True)
class ProbeParts:
    """The labeled samples that a probe is trained on, and those that it is tested on."""

    x: NDArray  # float32 `[rows, d]`
    y: NDArray  # `[rows]`
    held_x: NDArray
    held_y: NDArray
    notes: tuple[str, ...]  # deviations from training on all rows and testing on given ones
    problem: str | None = None  # why there can be no probe

    @property
    def rows(self) -> int:
        """Number of training samples."""
        return len(self.y)


def probe_parts(
    train_x: NDArray,
    train_y: NDArray,
    test_x: NDArray | None,
    test_y: NDArray | None,
    *,
    max_rows: int,
    seed: int,
) -> ProbeParts:
    """Return the training and test samples of a probe; see `linear_probe` for the arguments.

    At most `max_rows` random rows of each part are used. Without held-out data, a quarter of the
    training data is held out.
    """
    if (test_x is None) != (test_y is None):
        raise ValueError(
            "one of test_x and test_y is None; expected both, or neither to hold out training data"
        )
    n_known = int((np.asarray(train_y) >= 0).sum())
    x, y = labeled_sample(train_x, train_y, max_rows, seed)
    notes = [f"fitted on a random {len(y)} of {n_known} samples"] if len(y) < n_known else []
    n_classes = len(np.unique(y))
    if n_classes < 2 or len(y) < 10:
        counts = f"{n_classes} classes and {len(y)} labeled samples"
        problem = f"no probe: {counts}; expected at least 2 and 10"
        return ProbeParts(x, y, x[:0], y[:0], (), problem)
    if test_x is None or test_y is None:
        x, held_x, y, held_y = stratified_split(x, y, 0.25, seed)
        notes.append("tested on a held-out quarter of the training data")
    else:
        held_x, held_y = labeled_sample(test_x, test_y, max_rows, seed)
    problem = None if len(held_y) else "no probe: no held-out sample has a label"
    return ProbeParts(x, y, held_x, held_y, tuple(notes), problem)


def _choose_penalty(classifier: Any, x: NDArray, y: NDArray, seed: int) -> float:
    """Return the inverse penalty C with the highest accuracy on a fifth of the data."""
    fit_x, choose_x, fit_y, choose_y = stratified_split(x, y, 0.2, seed)
    scores: list[float] = []
    for penalty in INVERSE_PENALTIES:
        classifier.set_params(C=penalty)
        fit_quietly(classifier, fit_x, fit_y)
        scores.append(float(classifier.score(choose_x, choose_y)))
        if len(scores) > 2 and max(scores[-2:]) < max(scores) - 0.002:
            break  # weaker penalties only cost time from here
    return INVERSE_PENALTIES[int(np.argmax(scores))]


def fit_quietly(classifier: Any, x: NDArray, y: NDArray) -> bool:
    """Fit a logistic regression without warnings, and return whether L-BFGS converged."""
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        classifier.fit(x, y)
    return not any(issubclass(w.category, ConvergenceWarning) for w in caught)


def stratified_split(x: NDArray, y: NDArray, share: float, seed: int) -> list[NDArray]:
    """Split at random, stratified by class if every class is large enough on both sides."""
    from sklearn.model_selection import train_test_split

    _, inverse, counts = np.unique(y, return_inverse=True, return_counts=True)
    smaller_side = int(np.ceil(share * len(y)))
    stratify = inverse if counts.min() >= 2 and smaller_side >= len(counts) else None
    parts = train_test_split(x, y, test_size=share, random_state=seed, stratify=stratify)
    return [np.asarray(part) for part in parts]
