"""Copies, wrong labels and outliers put into real images: how many of the first hundred are found.

    pip install --target peers --no-deps cleanlab imagededup termcolor PyWavelets
    PYTHONPATH=peers python -m benchmarks.curate --data_dir data --cifar FOLDER

Beside cleanlab (labels, outliers) and imagededup (copies) on the same data in the same run; one
that is not installed is left out. Of each: the precision at 100, and the average precision.

- Copies: images at 96 pixels, and 200 of them once more: as they are, as JPEG of quality 60, made
  smaller by a third and large again, cropped by four pixels on each side, brighter by a quarter.
- Labels: one in twenty becomes another class, at random.
- Outliers: a hundred embeddings of another data set by the same teacher.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import KFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.quality import _line
from benchmarks.sets import SETS, Absent, Sources, _embedded, _fashion_images, _open
from ssl_kd.curate import mislabelled, near_duplicates, outliers
from ssl_kd.datasets import ArrayDataset
from ssl_kd.store import EmbeddingStore, EmbeddingWriter, Fingerprint

COPIES, SIDE, FLIPPED, STRANGE, ROWS = 200, 96, 0.05, 100, 2000
Scores = dict[str, NDArray]


def jpeg(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=60)
    return Image.open(file)


def smaller(image: Image.Image) -> Image.Image:
    size = (image.width * 2 // 3, image.height * 2 // 3)
    return image.resize(size, Image.Resampling.BILINEAR).resize(
        image.size, Image.Resampling.BILINEAR
    )


def cropped(image: Image.Image) -> Image.Image:
    inside = image.crop((4, 4, image.width - 4, image.height - 4))
    return inside.resize(image.size, Image.Resampling.BILINEAR)


def brighter(image: Image.Image) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(1.25)


KINDS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "equal": lambda image: image,
    "JPEG": jpeg,
    "smaller": smaller,
    "cropped": cropped,
    "brighter": brighter,
}


def stored(x: NDArray) -> EmbeddingStore:
    """Rows as a cache of their own."""
    n, folder = len(x), Path(tempfile.mkdtemp())
    of = Fingerprint("features", "none", "none", "float32", "made for a benchmark")
    with EmbeddingWriter(
        folder, "train", of, n, x.shape[1], ids=[str(row) for row in range(n)]
    ) as writer:
        writer.append(torch.from_numpy(np.asarray(x, np.float32)), torch.arange(n))
        return writer.close()


def precision(wanted: NDArray, score: NDArray, total: int) -> tuple[float, float]:
    """Precision at 100, and average precision where all `total` should have been found."""
    first = np.argsort(-score, kind="stable")[:100]
    average = average_precision_score(wanted, score) * wanted.sum() / total if wanted.any() else 0
    return float(wanted[first].mean()), float(average)


# --- Copies ---------------------------------------------------------------------------------------


def copied(images: NDArray) -> tuple[NDArray, NDArray]:
    """Images `[n + 200, 96, 96(, 3)]`, the last 200 copies; and the rows `[200]` they are of."""
    large = [Image.fromarray(i).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for i in images]
    rows = np.random.default_rng(0).choice(len(large), COPIES, False)
    alter = list(KINDS.values())
    copies = [alter[i % len(alter)](large[row]) for i, row in enumerate(rows)]
    return np.stack([np.asarray(image) for image in [*large, *copies]]), rows


def hashed(images: NDArray, method: str) -> dict[tuple[int, int], float] | None:
    """Pairs of imagededup up to a Hamming distance of 20 of 64, and minus it."""
    try:
        from imagededup import methods  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    hasher: Any = getattr(methods, method)()
    codes = [int(hasher.encode_image(image_array=image), 16) for image in images]
    bits = np.array([[code >> bit & 1 for bit in range(64)] for code in codes], np.float32)
    ones = bits.sum(1)
    found = {}
    for row in range(len(bits) - 1):
        distance = ones[row] + ones[row + 1 :] - 2 * bits[row + 1 :] @ bits[row]
        for other in np.flatnonzero(distance <= 20):
            found[row, row + 1 + int(other)] = -float(distance[other])
    return found


def duplicates(name: str, images: NDArray, x: NDArray, rows: NDArray) -> list[list[str]]:
    """A line for each method."""
    n = len(images) - len(rows)
    truth = {(int(row), n + i) for i, row in enumerate(rows)}
    start = time.monotonic()
    found = near_duplicates(stored(x))
    seconds = time.monotonic() - start
    pairs = list(zip(found.first.tolist(), found.second.tolist(), strict=True))
    certain = found.pairs()
    hits = sum(pair in truth for pair, sure in zip(pairs, certain, strict=True) if sure)
    auto = f"{certain.sum()} pairs, {hits} of {len(rows)} copies ({seconds:.0f} s)"
    ranked: dict[str, dict[tuple[int, int], float]] = {}
    ranked["ours"] = dict(zip(pairs, -np.arange(len(pairs), dtype=float), strict=True))
    ranked["cosine alone"] = dict(zip(pairs, found.similarity, strict=True))
    for method in ("PHash", "DHash"):
        if (hashes := hashed(images, method)) is not None:
            ranked[f"imagededup, {method}"] = hashes
    lines = []
    for method, scores in ranked.items():
        wanted = np.array([pair in truth for pair in scores])
        at, average = precision(wanted, np.array(list(scores.values())), len(rows))
        said = auto if method == "ours" else ""
        lines.append([name, method, f"{at:.2f}", f"{average:.3f}", said])
    return lines


# --- Labels and outliers --------------------------------------------------------------------------


def flipped(name: str, x: NDArray, y: NDArray) -> list[list[str]]:
    """A line for each method."""
    rng, n_classes, given = np.random.default_rng(0), int(y.max()) + 1, y.copy()
    rows = rng.choice(len(y), int(FLIPPED * len(y)), False)
    given[rows] = (y[rows] + rng.integers(1, n_classes, len(rows))) % n_classes
    ours = mislabelled(stored(x), given)
    score = np.empty(len(y))
    score[ours.rows] = ours.scores
    ranked = {"ours": score}
    try:
        from cleanlab import rank  # pyright: ignore[reportMissingImports]
    except ImportError:
        pass
    else:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=1e-3, max_iter=200, tol=1e-3))
        folds = KFold(5, shuffle=True, random_state=0)
        probability = cross_val_predict(model, x, given, cv=folds, method="predict_proba")
        for method in ("self_confidence", "normalized_margin"):
            quality = rank.get_label_quality_scores(given, probability, method=method)
            ranked[f"cleanlab, {method}"] = -quality
    return _lines(name, ranked, np.isin(np.arange(len(y)), rows))


def strange(name: str, x: NDArray, others: NDArray) -> list[list[str]]:
    """A line for each method."""
    both = np.concatenate([x, others[:STRANGE]])
    ours = outliers(stored(both))
    score = np.empty(len(both))
    score[ours.rows] = ours.columns["distance"]
    ranked = {"ours": score}
    try:
        from cleanlab.outlier import (  # pyright: ignore[reportMissingImports]
            OutOfDistribution,
        )
    except ImportError:
        pass
    else:
        ranked["cleanlab"] = -OutOfDistribution().fit_score(features=both, verbose=False)
    return _lines(name, ranked, np.arange(len(both)) >= len(x))


def _lines(name: str, ranked: Scores, wanted: NDArray) -> list[list[str]]:
    lines = []
    for method, score in ranked.items():
        at, average = precision(wanted, score, int(wanted.sum()))
        lines.append([name, method, f"{at:.2f}", f"{average:.3f}", ""])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Copies, wrong labels and outliers put in.")
    Sources.add_flags(parser)
    sources = Sources.of(parser.parse_args())
    lines = [_line(["data", "method", "precision at 100", "average precision", "auto"])]
    lines.append("|---" * 5 + "|")

    def told(rows: list[list[str]]) -> None:
        lines.extend(_line(row) for row in rows)
        print("\n".join(_line(row) for row in rows), file=sys.stderr, flush=True)

    try:
        folder = _open(str(sources.cifar), "--cifar")
        photos = [np.asarray(folder.image(i).convert("RGB")) for i in range(len(folder))]
        fashion = _fashion_images(sources, 5000)
        assert (
            fashion.arrays is not None and fashion.labels is not None and folder.labels is not None
        )
        for name, small, y in (
            ("cifar", np.stack(photos), folder.labels),
            ("fashion", fashion.arrays, fashion.labels),
        ):
            images, rows = copied(small)
            labels = np.concatenate([y, y[rows]])
            dataset = ArrayDataset(name, "train", images, labels, None)
            x, _ = _embedded(sources, dataset, f"{name}_dup96", SIDE)
            told(duplicates(f"{name}, EfficientNet: copies", images, x, rows))
            tiny = [Image.fromarray(i).resize((32, 32), Image.Resampling.BOX) for i in images]
            pixels = np.stack([np.asarray(image, np.float32) for image in tiny]) / 255
            told(duplicates(f"{name}, pixels: copies", images, pixels.reshape(len(tiny), -1), rows))
        sets = {name: SETS[name](sources) for name in ("cifar_efficientnet", "digits")}
        sets["fashion10k_efficientnet"] = SETS["fashion10k_efficientnet"](sources)
    except Absent as error:
        raise SystemExit(str(error)) from error
    sets = {name: (x[:ROWS], y[:ROWS]) for name, (x, y) in sets.items()}
    a, b = sets["cifar_efficientnet"][0], sets["fashion10k_efficientnet"][0]
    told(strange("cifar: fashion among it", a, b))
    told(strange("fashion: cifar among it", b, a))
    for name, (x, y) in sets.items():
        told(flipped(f"{name}: labels", x, y))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
