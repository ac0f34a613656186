"""Load the data sets of the other benchmarks by name, as embeddings with true classes.

Every set is the same in every run. The Bayes error of each synthetic set is below 5 %; k-means is
much worse.

A set is on one of two shelves: a hash of the name of its source decided which one, before anything
was run. Candidates, constants and rules are chosen on the shelf `choose` alone. The published
tables show the shelf `report`, which is run once, when nothing is left to choose.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits, make_moons

from ssl_kd.core.precision import Precision
from ssl_kd.vision.data import ArrayDataset, DatasetUnavailable, ImageDataset, open_dataset
from ssl_kd.vision.data.catalog import Split
from ssl_kd.vision.extract import Extraction
from ssl_kd.vision.teachers import load_teacher
from ssl_kd.vision.teachers.base import TeacherUnavailable

Labeled = tuple[NDArray, NDArray]
Shelf = Literal["choose", "report"]
SAME_SOURCE = {"speakers": "spokendigits"}  # the same recordings by voice, and by digit


class Absent(Exception):
    """Raised if the data of a set is missing; the message names the flag that provides it."""


@dataclass(frozen=True)
class Sources:
    """The locations of the data."""

    data_dir: Path = Path("data")  # torchvision's, with Fashion-MNIST
    cifar: Path | None = None  # train/<class>/*.png
    teacher_weights: Path | None = None  # of EfficientNet-Lite0; None: the package's
    cache: Path = Path("data/embeddings/benchmarks")  # of embeddings

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--data_dir", type=Path, default=Sources.data_dir)
        parser.add_argument("--cifar", type=Path, help="CIFAR-10 as a folder train/<class>/*.png")
        parser.add_argument("--teacher_weights", type=Path, help="EfficientNet-Lite0 weights")
        parser.add_argument("--cache", type=Path, default=Sources.cache, help="embeddings cache")

    @classmethod
    def of(cls, args: argparse.Namespace) -> Sources:
        return cls(args.data_dir, args.cifar, args.teacher_weights, args.cache)


def source_of(name: str) -> str:
    """Return the source of a set: the leading letters of its name, or another with the same data.

    Raises:
        ValueError: If the name does not begin with a small letter.
    """
    letters = re.match("[a-z]+", name)
    if letters is None:
        raise ValueError(
            f"the set {name!r} has no source: its name must begin with small letters, "
            "such as coil20_clip; rename its file"
        )
    return SAME_SOURCE.get(letters[0], letters[0])


def shelf_of(name: str) -> Shelf:
    """Return the shelf of a set.

    All sets of a source are on the same shelf, such as `cifar10_resnet18_pca50` and
    `cifar_efficientnet_lt10`.

    Raises:
        ValueError: If the name does not begin with a small letter.
    """
    return get_args(Shelf)[hashlib.sha256(source_of(name).encode()).digest()[0] % 2]


# --- Images ---------------------------------------------------------------------------------------


def _digits(sources: Sources) -> Labeled:
    digits: Any = load_digits()
    return digits.data[:1437].astype(np.float32), digits.target[:1437]


def open_or_absent(
    name: str, flag: str, root: Path = Sources.data_dir, split: Split = "train"
) -> Any:
    try:
        return open_dataset(name, split, root=root, labels="folders")
    except DatasetUnavailable as error:
        raise Absent(f"{error}; use another folder with {flag} FOLDER") from error


def _fashion_images(sources: Sources, n: int) -> ArrayDataset:
    whole = open_or_absent("fashion_mnist", "--data_dir", sources.data_dir)
    return ArrayDataset(whole.name, "train", whole.arrays[:n], whole.labels[:n], None)


def _fashion(sources: Sources, n: int = 60_000) -> Labeled:
    dataset: Any = _fashion_images(sources, n)
    return dataset.arrays.reshape(n, -1).astype(np.float32) / 255, dataset.labels


def _cifar_images(sources: Sources, split: Split = "train") -> ImageDataset:
    if sources.cifar is None:
        raise Absent("CIFAR-10 is missing: --cifar FOLDER, with train/<class>/*.png in it")
    return open_or_absent(str(sources.cifar), "--cifar", split=split)


def _embedded(sources: Sources, dataset: ImageDataset, name: str, image_size: int) -> Labeled:
    """Return a set embedded with EfficientNet-Lite0, from the cache after the first call."""
    try:
        weights = sources.teacher_weights
        teacher = load_teacher("efficientnet_lite0", weights=weights, image_size=image_size)
    except (TeacherUnavailable, FileNotFoundError) as error:
        raise Absent(f"{error}; set its weights file with --teacher_weights FILE") from error
    precision = Precision.for_device("cpu")
    store = Extraction(
        dataset, teacher, sources.cache / name, split="train", precision=precision
    ).store()
    assert store.labels is not None
    return store.tensor().numpy(), store.labels.numpy()


def _fashion_efficientnet(sources: Sources) -> Labeled:
    return _embedded(sources, _fashion_images(sources, 10_000), "fashion10k_efficientnet", 96)


def _cifar_efficientnet(sources: Sources) -> Labeled:
    return _embedded(sources, _cifar_images(sources), "cifar_efficientnet", 224)


# --- Long tails -----------------------------------------------------------------------------------


def long_tailed(x: NDArray, y: NDArray, imbalance: float, seed: int = 0) -> Labeled:
    """Return the largest subset with `n_max * imbalance^(-k / (K - 1))` samples in class k.

    `seed` draws the order of the classes (`y`, none empty) and the samples of each.
    """
    rng = np.random.default_rng(seed)
    counts = np.bincount(y)
    share = imbalance ** -np.linspace(0, 1, len(counts))[rng.permutation(len(counts))]
    sizes = np.maximum(1, np.floor((counts / share).min() * share + 1e-9)).astype(int)
    rows = [rng.choice(np.flatnonzero(y == k), size, False) for k, size in enumerate(sizes)]
    subset = np.sort(np.concatenate(rows))
    return x[subset], y[subset]


def _tail(sources: Sources, of: str, imbalance: float) -> Labeled:
    return long_tailed(*SETS[of](sources), imbalance)


# --- Synthetic ------------------------------------------------------------------------------------


def _blobs(
    seed: int, sizes: NDArray, dim: int, apart: float, spread: NDArray, long: float, rank: int
) -> Labeled:
    """Return Gaussians of `sizes` `[K]` around random centers, with deviations `spread` `[K]`.

    `apart` is the deviation of the centers; `rank` random directions are stretched by `long`.
    """
    rng, parts = np.random.default_rng(seed), []
    for size, width in zip(sizes, spread, strict=True):
        axes = np.linalg.qr(rng.normal(size=(dim, rank)))[0]
        z = rng.normal(size=(size, dim))
        z += (long - 1) * (z @ axes) @ axes.T
        parts.append(apart * rng.normal(size=dim) + width * z)
    order = rng.permutation(sizes.sum())
    y = np.repeat(np.arange(len(sizes)), sizes)
    return np.concatenate(parts).astype(np.float32)[order], y[order]


def _unequal(sources: Sources) -> Labeled:
    """Return 12 blobs in 32 dimensions; sizes differ by a factor of 20, spreads by 4."""
    share = np.geomspace(1, 20, 12)
    sizes = np.round(6000 * share / share.sum()).astype(int)
    sizes[-1] += 6000 - sizes.sum()
    spread = np.geomspace(0.5, 2, 12)[np.random.default_rng(0).permutation(12)]
    return _blobs(0, sizes, 32, 0.8, spread, 1.0, 1)


def _many(sources: Sources) -> Labeled:
    """Return 200 ellipsoids of 50 points in 64 dimensions."""
    return _blobs(1, np.full(200, 50), 64, 1.0, np.ones(200), 4.0, 4)


def _two(sources: Sources) -> Labeled:
    """Return two moons in 32 dimensions, off the origin so that cosine keeps their shape."""
    rng = np.random.default_rng(2)
    plane, y = map(np.asarray, make_moons(3000, noise=0.1, random_state=2))
    x = 0.1 * rng.normal(size=(3000, 32))
    x[:, :2] += plane
    x[:, 2] += 3
    turn = np.linalg.qr(rng.normal(size=(32, 32)))[0]
    return (x @ turn).astype(np.float32), y


def _rare(sources: Sources) -> Labeled:
    """Return 9 ellipsoids of 550 points and one of 50 in 32 dimensions."""
    return _blobs(3, np.r_[np.full(9, 550), 50], 32, 0.5, np.full(10, 0.6), 4.0, 2)


SETS: dict[str, Callable[[Sources], Labeled]] = {
    "digits": _digits,
    "fashion": _fashion,
    "fashion10k": partial(_fashion, n=10_000),
    "fashion10k_efficientnet": _fashion_efficientnet,
    "cifar_efficientnet": _cifar_efficientnet,
    **{
        f"{of}_lt{imbalance}": partial(_tail, of=of, imbalance=imbalance)
        for of in ("digits", "fashion10k", "fashion10k_efficientnet")
        for imbalance in (10, 100)
    },
    "unequal": _unequal,
    "many": _many,
    "two": _two,
    "rare": _rare,
}
"""Maps a name to a loader of `(x float32 [n, d], y int [n])`, which raises `Absent`."""
