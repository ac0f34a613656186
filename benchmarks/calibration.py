"""Measure how well confidence is calibrated, and how well outlier scores detect new classes.

    python -m benchmarks.calibration --sets digits,cifar_efficientnet --cifar FOLDER

Labels are used only for scoring. Per data set: the expected calibration error (15 bins) of the
heads' raw and calibrated vote, the accuracy on samples with confidence 0.9 or more, and the ROC AUC
of the outlier score with one class at a time left out of training and two fifths of the other
classes held out.

`--strange` prints another table: the ROC AUC of the outlier score between held-out samples and
invalid inputs (dead and constant inputs, noise, negated samples, another data set), and in
parentheses the share of these inputs above 0.99. `--features FOLDER` adds each NAME.npz in FOLDER.
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

CLASSES = 10  # left out one at a time; only the first ten of a set with more
TRAINED = 0.6


def confidences(x: NDArray, y: NDArray, seed: int) -> dict[str, Any]:
    """Return the accuracy of one fit and the calibration `before` and `after` scaling its vote."""
    fitted = MultiHeadClusterer(n_clusters=len(np.unique(y)), random_state=seed).fit(x)
    right = evaluate.rightly_placed(y, fitted.labels_)
    model, calibrations = fitted.model_, {}
    for name, temperature in (("before", 1.0), ("after", model.options["answer_temperature"])):
        model.options["answer_temperature"] = temperature
        calibrations[name] = evaluate.calibration(fitted.predict_proba(x).max(1), right)
    return {"acc": right.mean(), **calibrations}


def detection(x: NDArray, y: NDArray, seed: int) -> tuple[float, float]:
    """Return the mean ROC AUC for a class left out, and the share of known classes above 0.95."""
    trained = np.random.default_rng(seed).random(len(x)) < TRAINED
    areas, above = [], []
    for c in np.unique(y)[:CLASSES]:
        train = torch.from_numpy(x[trained & (y != c)])
        projection = Projection.fit(train, VisionSettings.pca_dim)
        origin = projection(torch.zeros(1, x.shape[1]))[0]
        novelty = Novelty.fit(projection(train[:REFERENCE_ROWS]), origin)  # in random order
        test = ~trained | (y == c)
        scores = novelty.score(projection(torch.from_numpy(x[test]))).numpy()
        new = y[test] == c
        areas.append(roc_auc_score(new, scores))
        above.append((scores[~new] > 0.95).mean())
    return float(np.mean(areas)), float(np.mean(above))


def invalid_inputs(
    x: NDArray, other: NDArray, rng: np.random.Generator, n: int = 400
) -> dict[str, NDArray]:
    """Return invalid inputs `[n, d]` by kind, most of them scaled to the mean norm of `x`."""
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
        "normal per column": rng.normal(x.mean(0), x.std(0), (n, dim)),
        "negative": -rows,
        "another set": foreign * length / np.linalg.norm(foreign, axis=1).mean(),
    }


def strangeness(x: NDArray, other: NDArray, seed: int) -> dict[str, tuple[float, float]]:
    """Return the ROC AUC against held-out samples and the share above 0.99, per kind of input."""
    rng = np.random.default_rng(seed)
    trained = rng.random(len(x)) < TRAINED
    train = torch.from_numpy(x[trained])
    clusterer = MultiHeadClusterer(2, method="heads", max_steps=1, n_heads=1).fit(train)
    usual = clusterer.outlier_scores(x[~trained])
    rates = {"held out": (0.5, float((usual > 0.99).mean()))}
    for kind, rows in invalid_inputs(x[trained], other, rng).items():
        scores = clusterer.outlier_scores(rows.astype(np.float32))
        truth = np.repeat([0, 1], [len(usual), len(scores)])
        area = float(roc_auc_score(truth, np.concatenate([usual, scores])))
        rates[kind] = area, float((scores > 0.99).mean())
    return rates


def print_strangeness(sets: dict[str, NDArray], seed: int) -> None:
    names = list(sets)
    for index, name in enumerate(names):
        rates = strangeness(sets[name], sets[names[index - 1]], seed)
        if index == 0:
            print(table_line(["set", *rates]), "|---" * (len(rates) + 1) + "|", sep="\n")
        cells = [f"{100 * area:.1f} ({100 * above:.0f} %)" for area, above in rates.values()]
        print(table_line([name, *cells]), flush=True)


def bins(scores: dict[str, Any]) -> str:
    """Return the confidence, accuracy and sample count of each bin."""
    return ", ".join(f"{b['confidence']:.2f}: {b['right']:.2f} ({b['n']})" for b in scores["bins"])


def confident(scores: dict[str, Any]) -> str:
    sure = scores["sure"]
    return "none" if sure is None else f"{100 * sure['right']:.1f} of {sure['n']}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure calibration and outlier scores.")
    parser.add_argument("--sets", type=lambda text: names_of(SETS, text), default=list(SETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strange", action="store_true", help="score invalid inputs instead")
    parser.add_argument("--features", type=Path, help="folder of more data sets, NAME.npz")
    Sources.add_flags(parser)
    args = parser.parse_args()
    if args.strange:
        sets = {name: SETS[name] for name in args.sets if name in SETS}
        embeddings = {name: x for name, x, _ in loaded(sets, Sources.of(args))}
        files = sorted(args.features.glob("*.npz")) if args.features else []
        embeddings |= {file.stem: np.load(file)["x"] for file in files}
        print_strangeness(embeddings, args.seed)
        return
    head = ["set", "accuracy", "ECE, raw", "ECE, calibrated", "correct at 0.9 or more, raw"]
    head += ["correct at 0.9 or more, calibrated", "AUROC, unseen class", "held out above 0.95"]
    lines, diagrams = [table_line(head), "|---" * len(head) + "|"], []
    for name, x, y in loaded({name: SETS[name] for name in args.sets}, Sources.of(args)):
        scores = confidences(x, y, args.seed)
        before, after, (area, above) = scores["before"], scores["after"], detection(x, y, args.seed)
        cells = [name, *(f"{100 * v:.1f}" for v in (scores["acc"], before["ece"], after["ece"]))]
        cells += [confident(before), confident(after), f"{100 * area:.1f}", f"{100 * above:.1f}"]
        lines.append(table_line(cells))
        print(lines[-1], file=sys.stderr, flush=True)
        diagrams.append(f"- {name}, raw: {bins(before)}; calibrated: {bins(after)}")
    print("\n".join([*lines, "", "Confidence: accuracy (samples) per bin:", "", *diagrams]))


if __name__ == "__main__":
    main()
