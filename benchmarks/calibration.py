"""Whether the confidence is what it says, and whether outlier scores find what is new.

    python -m benchmarks.calibration --sets digits,cifar_efficientnet --cifar FOLDER

Of each set two tables' rows, labels read only to score: the expected calibration error (15 bins) of
the heads' vote as it is and of the calibrated one, and how many of the samples with confidence 0.9
or more are right; and the area under the ROC curve of the outlier score, where each class in turn
is left out of the training and two fifths of the others are held out beside it.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from benchmarks.quality import _line, names_of
from benchmarks.sets import SETS, Sources, loaded
from ssl_kd import MultiHeadClusterer, evaluate
from ssl_kd.vision.novelty import REFERENCE_ROWS, Novelty
from ssl_kd.vision.projection import Projection
from ssl_kd.vision.settings import VisionSettings

CLASSES = 10  # left out one by one; the first of more
TRAINED = 0.6


def confidences(x: NDArray, y: NDArray, seed: int) -> dict[str, Any]:
    """Accuracy of one fit, and the reliability of its vote `before` and `after`."""
    fitted = MultiHeadClusterer(n_clusters=len(np.unique(y)), random_state=seed).fit(x)
    right = evaluate.rightly_placed(y, fitted.labels_)
    model, found = fitted.model_, {}
    for name, temperature in (("before", 1.0), ("after", model.options["answer_temperature"])):
        model.options["answer_temperature"] = temperature
        found[name] = evaluate.calibration(fitted.predict_proba(x).max(1), right)
    return {"acc": right.mean(), **found}


def detection(x: NDArray, y: NDArray, seed: int) -> tuple[float, float]:
    """Mean area under the ROC curve for a class left out, and the share of held-out above 0.95."""
    trained = np.random.default_rng(seed).random(len(x)) < TRAINED
    areas, above = [], []
    for c in np.unique(y)[:CLASSES]:
        train = torch.from_numpy(x[trained & (y != c)])
        projection = Projection.fit(train, VisionSettings.pca_dim)
        novelty = Novelty.fit(projection(train[:REFERENCE_ROWS]))  # the sets are in random order
        asked = ~trained | (y == c)
        scores = novelty.score(projection(torch.from_numpy(x[asked]))).numpy()
        new = y[asked] == c
        areas.append(roc_auc_score(new, scores))
        above.append((scores[~new] > 0.95).mean())
    return float(np.mean(areas)), float(np.mean(above))


def bins(found: dict[str, Any]) -> str:
    """Confidence, share right and number of samples of each bin."""
    return ", ".join(f"{b['confidence']:.2f}: {b['right']:.2f} ({b['n']})" for b in found["bins"])


def sure(found: dict[str, Any]) -> str:
    some = found["sure"]
    return "none" if some is None else f"{100 * some['right']:.1f} of {some['n']}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Calibration of the confidence; outlier scores.")
    parser.add_argument("--sets", type=lambda text: names_of(SETS, text), default=list(SETS))
    parser.add_argument("--seed", type=int, default=0)
    Sources.add_flags(parser)
    args = parser.parse_args()
    head = ["set", "accuracy", "ECE, the vote", "ECE, calibrated", "right from 0.9 on, the vote"]
    head += ["right from 0.9 on, calibrated", "AUROC, a class left out", "held out above 0.95"]
    lines, diagrams = [_line(head), "|---" * len(head) + "|"], []
    for name, x, y in loaded({name: SETS[name] for name in args.sets}, Sources.of(args)):
        found = confidences(x, y, args.seed)
        before, after, (area, above) = found["before"], found["after"], detection(x, y, args.seed)
        cells = [name, f"{100 * found['acc']:.1f}"]
        cells += [f"{100 * some['ece']:.1f}" for some in (before, after)]
        cells += [sure(before), sure(after), f"{100 * area:.1f}", f"{100 * above:.1f}"]
        lines.append(_line(cells))
        print(lines[-1], file=sys.stderr, flush=True)
        diagrams.append(f"- {name}, the vote: {bins(before)}; calibrated: {bins(after)}")
    print("\n".join([*lines, "", "Confidence: share right (samples), by bin:", "", *diagrams]))


if __name__ == "__main__":
    main()
