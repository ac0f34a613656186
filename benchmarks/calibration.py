"""Measure how well confidence is calibrated, and how well outlier scores find new classes.

    python -m benchmarks.calibration --sets digits,cifar_efficientnet --cifar FOLDER

`--strange` shows another table instead: the area under the ROC curve of the outlier score between
held-out samples and what is no sample at all (dead and constant inputs, noise, negatives, another
data set), and in brackets the share of these above 0.99. `--features FOLDER` adds its NAME.npz.

Of each set two tables' rows, labels read only to score: the expected calibration error (15 bins) of
the heads' vote as it is and of the calibrated one, and how many of the samples with confidence 0.9
or more are right; and the area under the ROC curve of the outlier score, where each class in turn
is left out of the training and two fifths of the others are held out beside it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from benchmarks.regret import table_line
from benchmarks.sets import SETS, Sources, loaded, names_of
from ssl_kd import MultiHeadClusterer, evaluate
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.novelty import REFERENCE_ROWS, Novelty
from ssl_kd.vision.settings import VisionSettings

CLASSES = 10  # left out one by one; the first of more
TRAINED = 0.6


def confidences(x: NDArray, y: NDArray, seed: int) -> dict[str, Any]:
    """Return the accuracy of one fit, and the calibration of its vote `before` and `after`."""
    fitted = MultiHeadClusterer(n_clusters=len(np.unique(y)), random_state=seed).fit(x)
    right = evaluate.rightly_placed(y, fitted.labels_)
    model, found = fitted.model_, {}
    for name, temperature in (("before", 1.0), ("after", model.options["answer_temperature"])):
        model.options["answer_temperature"] = temperature
        found[name] = evaluate.calibration(fitted.predict_proba(x).max(1), right)
    return {"acc": right.mean(), **found}


def detection(x: NDArray, y: NDArray, seed: int) -> tuple[float, float]:
    """Return the mean ROC AUC for a class left out, and the share of held-out above 0.95."""
    trained = np.random.default_rng(seed).random(len(x)) < TRAINED
    areas, above = [], []
    for c in np.unique(y)[:CLASSES]:
        train = torch.from_numpy(x[trained & (y != c)])
        projection = Projection.fit(train, VisionSettings.pca_dim)
        origin = projection(torch.zeros(1, x.shape[1]))[0]
        novelty = Novelty.fit(projection(train[:REFERENCE_ROWS]), origin)  # in random order
        asked = ~trained | (y == c)
        scores = novelty.score(projection(torch.from_numpy(x[asked]))).numpy()
        new = y[asked] == c
        areas.append(roc_auc_score(new, scores))
        above.append((scores[~new] > 0.95).mean())
    return float(np.mean(areas)), float(np.mean(above))


def inputs_that_are_none(
    x: NDArray, other: NDArray, rng: np.random.Generator, n: int = 400
) -> dict[str, NDArray]:
    """Rows `[n, d]` by kind, none of which is a sample of the set of `x`; as long as its own."""
    dim, length = x.shape[1], np.linalg.norm(x, axis=1).mean()
    rows = x[rng.permutation(len(x))[:n]]
    foreign = np.zeros((min(n, len(other)), dim))
    width = min(dim, other.shape[1])
    foreign[:, :width] = other[rng.permutation(len(other))[:n], :width]
    return {
        "zeros": np.zeros((1, dim)),
        "the mean everywhere": np.full((1, dim), x.mean()),
        "constant": rng.uniform(x.min(), x.max(), (n, 1)) * np.ones(dim),
        "one-hot": np.eye(dim)[rng.integers(dim, size=n)] * length,
        "uniform": rng.uniform(x.min(), x.max(), (n, dim)),
        "normal": rng.normal(x.mean(), x.std(), (n, dim)),
        "normal, each column's": rng.normal(x.mean(0), x.std(0), (n, dim)),
        "negative": -rows,
        "another set": foreign * length / np.linalg.norm(foreign, axis=1).mean(),
    }


def strangeness(x: NDArray, other: NDArray, seed: int) -> dict[str, tuple[float, float]]:
    """Return, for each kind, the ROC AUC against held-out samples and the share above 0.99."""
    rng = np.random.default_rng(seed)
    trained = rng.random(len(x)) < TRAINED
    train = torch.from_numpy(x[trained])
    clusterer = MultiHeadClusterer(2, method="heads", max_steps=1, n_heads=1).fit(train)
    usual = clusterer.outlier_scores(x[~trained])
    found = {"held out": (0.5, float((usual > 0.99).mean()))}
    for kind, rows in inputs_that_are_none(x[trained], other, rng).items():
        scores = clusterer.outlier_scores(rows.astype(np.float32))
        truth = np.repeat([0, 1], [len(usual), len(scores)])
        area = float(roc_auc_score(truth, np.concatenate([usual, scores])))
        found[kind] = area, float((scores > 0.99).mean())
    return found


def print_strangeness(sets: dict[str, NDArray], seed: int) -> None:
    names = list(sets)
    for place, name in enumerate(names):
        found = strangeness(sets[name], sets[names[place - 1]], seed)
        if place == 0:
            print(table_line(["set", *found]), "|---" * (len(found) + 1) + "|", sep="\n")
        cells = [f"{100 * area:.1f} ({100 * above:.0f} %)" for area, above in found.values()]
        print(table_line([name, *cells]), flush=True)


def bins(found: dict[str, Any]) -> str:
    """Return confidence, share of correct samples and number of samples of each bin."""
    return ", ".join(f"{b['confidence']:.2f}: {b['right']:.2f} ({b['n']})" for b in found["bins"])


def sure(found: dict[str, Any]) -> str:
    some = found["sure"]
    return "none" if some is None else f"{100 * some['right']:.1f} of {some['n']}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Calibration of the confidence; outlier scores.")
    parser.add_argument("--sets", type=lambda text: names_of(SETS, text), default=list(SETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strange", action="store_true", help="what is no sample, instead")
    parser.add_argument("--features", type=Path, help="folder of more sets, NAME.npz with x and y")
    Sources.add_flags(parser)
    args = parser.parse_args()
    if args.strange:
        sets = {name: SETS[name] for name in args.sets if name in SETS}
        found = {name: x for name, x, _ in loaded(sets, Sources.of(args))}
        files = sorted(args.features.glob("*.npz")) if args.features else []
        print_strangeness(found | {file.stem: np.load(file)["x"] for file in files}, args.seed)
        return
    head = ["set", "accuracy", "ECE, the vote", "ECE, calibrated", "right from 0.9 on, the vote"]
    head += ["right from 0.9 on, calibrated", "AUROC, a class left out", "held out above 0.95"]
    lines, diagrams = [table_line(head), "|---" * len(head) + "|"], []
    for name, x, y in loaded({name: SETS[name] for name in args.sets}, Sources.of(args)):
        found = confidences(x, y, args.seed)
        before, after, (area, above) = found["before"], found["after"], detection(x, y, args.seed)
        cells = [name, f"{100 * found['acc']:.1f}"]
        cells += [f"{100 * some['ece']:.1f}" for some in (before, after)]
        cells += [sure(before), sure(after), f"{100 * area:.1f}", f"{100 * above:.1f}"]
        lines.append(table_line(cells))
        print(lines[-1], file=sys.stderr, flush=True)
        diagrams.append(f"- {name}, the vote: {bins(before)}; calibrated: {bins(after)}")
    print("\n".join([*lines, "", "Confidence: share right (samples), by bin:", "", *diagrams]))


if __name__ == "__main__":
    main()
