"""Measure how often `ssl_kd compare` picks the better clustering, and whether it knows how often.

    python -m benchmarks.compare --features FOLDER --cifar FOLDER --pool FOLDER   # can resume

A set is up to 900 samples with several embeddings: different teachers for images, different
descriptors where a set has them, and otherwise the features, also with 4 dimensions, whitened,
projected at random, with noise, and a third of the columns. Each embedding is clustered by the
consensus, k-means, spectral clustering and communities with K given, and by k-means with 0.6 K and
1.6 K. Each pair of clusterings of a set is a question: which has the higher AMI with the labels?
Criterion and constants were chosen on the sets in FITTED; the table is about all others.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.metrics import adjusted_mutual_info_score

from benchmarks.regret import ensemble_of
from benchmarks.sets import SETS, Sources, long_tailed
from benchmarks.turns import table_head, table_line
from ssl_kd.datasets import ImageDataset, open_dataset
from ssl_kd.graph.kmeans import kmeans
from ssl_kd.teachers import Network, Transform, load_teacher
from ssl_kd.workbench.compare.judgement import common_neighbors, evidence, probability

ROWS, MOST_CLASSES = 900, 60  # of a set with more classes, 40 are drawn
TAILED = ("usps_small", "cifar10_resnet18_pca50", "mouse_bladder")
SYNTHETIC = ("two", "rare", "unequal")
IMAGES: dict[str, Literal["train", "test"]] = {
    "digits": "train",
    "fashion": "test",
    "cifar": "train",
}
DESCRIPTORS = {"handwritten_mfeat": (216, 76, 64, 6, 240, 47), "landuse21": (20, 59, 40)}
FITTED = ("banking77_tfidf", "coil20", "digits", "fashion", "handwritten_mfeat", "landuse21")
FITTED += ("palm100", "two", "unequal")
BINS = ((0.5, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 1.0))
Arrays = dict[str, NDArray]


def by_teachers(data: ImageDataset, rows: NDArray, sources: Sources) -> Arrays:
    """Embed images by pixels, a random network, and EfficientNet at two sizes and with noise."""
    import timm

    torch.manual_seed(0)
    net = timm.create_model("resnet18", pretrained=False, num_classes=0)
    name, weights = "efficientnet_lite0", sources.teacher_weights
    teachers = {
        "pixels": load_teacher("pixels", image_size=16),
        "random": Network("random", net, net, Transform(size=64, resize=64)),
        "eff64": load_teacher(name, weights=weights, image_size=64),
        "eff112": load_teacher(name, weights=weights, image_size=112),
    }
    images, x = [data.image(row).convert("RGB") for row in rows.tolist()], Arrays()
    for name, teacher in teachers.items():
        batches = torch.stack([teacher.preprocess(image) for image in images]).split(100)
        with torch.no_grad():
            x[name] = torch.cat([teacher.embed(batch).float() for batch in batches]).numpy()
    centered = x["eff112"] - x["eff112"].mean(0)
    noise = np.random.default_rng(0).normal(size=centered.shape)
    return x | {"noise": centered + 3 * centered.std() * noise}


def embeddings_of(name: str, x: NDArray, rng: np.random.Generator) -> Arrays:
    """Return the descriptors that features `[n, d]` consist of, or else degrade the features."""
    n, d = x.shape
    if name in DESCRIPTORS:
        ends = np.cumsum(DESCRIPTORS[name])[:-1]
        parts = {f"part{i}": part for i, part in enumerate(np.split(x, ends, 1))}
        return parts | {"all": (x - x.mean(0)) / (x.std(0) + 1e-9)}
    centered = x - x.mean(0)
    left, lengths, _ = np.linalg.svd(centered, full_matrices=False)
    return {
        "features": x,
        "4 components": left[:, :4] * lengths[:4],
        "whitened": left[:, :64][:, lengths[:64] > 1e-6 * lengths[0]],
        "projected": centered @ rng.normal(size=(d, min(10, d // 2))),
        "noise": centered + 1.5 * centered.std() * rng.normal(size=(n, d)),
        "third": x[:, rng.permutation(d)[: max(2, d // 3)]],
    }


def partitions(x: NDArray, k: int) -> Arrays:
    """Cluster rows of length 1, `[n, d]`, by six methods."""
    ensemble = ensemble_of(x, k)
    first = {c.family: c.clusters for c in reversed(ensemble.candidates)}
    return {
        "consensus": ensemble.clusters,
        **{name: first[name] for name in ("spectral", "communities")},
        "k-means": kmeans(x, k, 0, n_init=3),
        "fewer": kmeans(x, max(2, int(0.6 * k)), 0, n_init=2),
        "more": kmeans(x, int(1.6 * k), 0, n_init=2),
    }


def pools(args: argparse.Namespace) -> Iterator[tuple[str, Arrays]]:
    """Yield labels `y`, embeddings `x/NAME` and clusters `c/NAME/METHOD` of each set."""
    files = {file.stem: file for file in sorted(args.features.glob("*.npz"))}
    for name in (*IMAGES, *files, *SYNTHETIC, *(f"{name}_lt10" for name in TAILED)):
        path = args.pool / f"{name}.npz"
        if not path.exists():
            y, x = _load(name, files, args, np.random.default_rng(sum(map(ord, name))))
            pool = {"y": np.unique(y, return_inverse=True)[1]}
            for of, rows in x.items():
                unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
                pool[f"x/{of}"] = unit.astype(np.float32)
                clusters = partitions(pool[f"x/{of}"], int(pool["y"].max()) + 1)
                pool |= {f"c/{of}/{method}": one for method, one in clusters.items()}
            np.savez(path, **pool)  # pyright: ignore[reportArgumentType]
            print(name, file=sys.stderr, flush=True)
        yield name, dict(np.load(path))


def _load(
    name: str, files: dict[str, Path], args: argparse.Namespace, rng: np.random.Generator
) -> tuple[NDArray, Arrays]:
    sources = Sources.of(args)
    if name in IMAGES:
        of = {"fashion": "fashion_mnist", "cifar": str(args.cifar)}.get(name, name)
        data = open_dataset(of, IMAGES[name], root=args.data_dir, labels="folders")
        assert isinstance(data, ImageDataset) and data.labels is not None
        rows = rng.permutation(len(data))[:ROWS]
        return np.asarray(data.labels)[rows], by_teachers(data, rows, sources)
    if name in SYNTHETIC:
        x, y = SETS[name](sources)
    else:
        file = np.load(files[name.removesuffix("_lt10")])
        x, y = file["x"], file["y"]
        if name.endswith("_lt10"):
            x, y = long_tailed(x, y, 10)
    rows = rng.permutation(len(x))
    if len(np.unique(y)) > MOST_CLASSES:
        rows = rows[np.isin(y[rows], rng.choice(np.unique(y), 40, replace=False))]
    rows = rows[:ROWS]
    return y[rows], embeddings_of(name, x[rows].astype(np.float64), rng)


def questions(name: str, pool: Arrays) -> Iterator[tuple[str, str, float, float]]:
    """Yield set, kind, difference in value (over disagreement) and in AMI of pairs."""
    ids = [key for key in pool if key.startswith("c/")]
    clusters = {key: np.unique(pool[key], return_inverse=True)[1] for key in ids}
    ami = {key: adjusted_mutual_info_score(pool["y"], clusters[key]) for key in ids}
    spaces = [key.removeprefix("x/") for key in pool if key.startswith("x/")]
    for space_a, space_b in itertools.combinations_with_replacement(spaces, 2):
        pairs = common_neighbors(pool[f"x/{space_a}"], pool[f"x/{space_b}"])
        for a, b in itertools.combinations(ids, 2):
            (_, of_a, how_a), (_, of_b, how_b) = a.split("/"), b.split("/")
            if (of_a, of_b) != (space_a, space_b) or ami[a] == ami[b]:
                continue
            other_k = how_a != how_b and {"fewer", "more"} & {how_a, how_b}
            kind = "one teacher" if of_a == of_b else "two teachers"
            kind = "different K" if other_k else kind
            if kind == "two teachers" and how_a == how_b == "consensus":
                kind = "two teachers, both consensus"
            yield name, kind, evidence(pairs, clusters[a], clusters[b]), ami[a] - ami[b]


def report(rows: list[tuple[str, str, float, float]]) -> str:
    """Fit the constants on the sets in FITTED, and return a table of the other sets."""
    names, kinds, evidences, better = (np.array(column) for column in zip(*rows, strict=True))
    fitted = np.isin(names, FITTED)
    cells = np.unique(np.char.add(names, kinds), return_inverse=True)[1]
    weights = 1 / np.bincount(cells)[cells]  # each kind of each set counts once
    right = np.sign(evidences) == np.sign(better)

    def loss(constants: NDArray) -> float:
        sure = probability(np.abs(evidences), constants[0], abs(constants[1]))
        return -np.average(np.log(np.where(right, sure, 1 - sure))[fitted], weights=weights[fitted])

    slope, floor = minimize(loss, [10.0, 0.1], method="Nelder-Mead").x
    sure = np.asarray(probability(np.abs(evidences)))
    head = table_head(["pairs", "n", "stated", "right", "right if AMI differs by 5"])
    lines = [f"slope {slope:.1f}, floor {abs(floor):.3f}", "", head]
    ranges = {f"stated {100 * a:.0f} to {100 * b:.0f} %": (a <= sure) & (sure < b) for a, b in BINS}
    groups = ranges | {kind: kinds == kind for kind in np.unique(kinds)}
    groups |= {name: names == name for name in np.unique(names[~fitted])}
    for group, mask in groups.items():
        mask = mask & ~fitted
        large = mask & (np.abs(better) >= 0.05)
        shares = []
        for values, of in ((sure, mask), (right, mask), (right, large)):
            share = np.average(values[of], weights=weights[of]) if of.any() else np.nan
            shares.append(f"{100 * share:.0f}")
        lines.append(table_line([group, f"{mask.sum():,}", *shares]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Calibrate the judgement of ssl_kd compare.")
    parser.add_argument("--features", type=Path, required=True, help="folder of NAME.npz")
    parser.add_argument("--pool", type=Path, required=True, help="keeps the clusterings")
    Sources.add_flags(parser)
    args = parser.parse_args()
    args.pool.mkdir(parents=True, exist_ok=True)
    print(report([row for name, pool in pools(args) for row in questions(name, pool)]))


if __name__ == "__main__":
    main()
