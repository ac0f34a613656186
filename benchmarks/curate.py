"""Insert duplicates, wrong labels and outliers into real images, and measure how many are found.

    pip install --target peers --no-deps cleanlab imagededup termcolor PyWavelets
    PYTHONPATH=peers python -m benchmarks.curate --data_dir data --cifar FOLDER

Runs cleanlab (labels, outliers) and imagededup (copies) on the same data; a package that is not
installed is skipped. Reports average precision and precision at 100, or at the number of inserted
items if that is smaller. `--tables outliers labels` skips the copies.

- Copies: images of 96 pixels plus 200 copies: identical, as JPEG of quality 60, shrunk by a third
  and enlarged again, cropped by four pixels on each side, or brighter by a quarter.
- Outliers among 2,000 images embedded with EfficientNet: 100 images of another data set, 100 broken
  images (noisy, blurred, inverted, half lost, pure noise, blank), or 12 images that all differ.
- Labels: 5 % become a random other class or the next class. cleanlab scores the probabilities of
  our classifier.

Outliers and labels: mean and standard error over five seeds. A seed draws the images, the inserted
items and the wrong labels.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter
from scipy.spatial.distance import pdist, squareform
from sklearn.datasets import load_sample_image
from sklearn.metrics import average_precision_score

from benchmarks.sets import (
    SETS,
    Absent,
    Labeled,
    Sources,
    _cifar_images,
    _embedded,
    _fashion_images,
)
from benchmarks.turns import header, table_line
from ssl_kd.core.shards import Fingerprint
from ssl_kd.vision.cache import EmbeddingStore, EmbeddingWriter
from ssl_kd.vision.data import ArrayDataset
from ssl_kd.vision.data.catalog import Split
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.novelty import Novelty
from ssl_kd.vision.settings import VisionSettings
from ssl_kd_explore.curate import mislabeled, near_duplicates, outliers
from ssl_kd_explore.curate.wrong_labels import _by_regression

COPIES, SIDE, FLIPPED, STRANGE, ROWS, SEEDS = 200, 96, 0.05, 100, 2000, 5
SICK = 60  # images to break; they are not among the intact ones
BILINEAR = Image.Resampling.BILINEAR
Scores = dict[str, NDArray]


def jpeg(image: Image.Image, quality: int = 60) -> Image.Image:
    """Return an image as it is after a program has saved it as a JPEG of lower quality."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


ALTERED: tuple[Callable[[Image.Image], Image.Image], ...] = (
    lambda image: image,
    jpeg,
    lambda i: i.resize((i.width * 2 // 3, i.height * 2 // 3), BILINEAR).resize(i.size, BILINEAR),
    lambda i: i.crop((4, 4, i.width - 4, i.height - 4)).resize(i.size, BILINEAR),
    lambda i: ImageEnhance.Brightness(i).enhance(1.25),
)


def stored(x: NDArray) -> EmbeddingStore:
    """Write rows to a new embeddings cache and open it."""
    n, folder = len(x), Path(tempfile.mkdtemp())
    fingerprint = Fingerprint("features", "none", "none", "float32", "made for a benchmark")
    ids = list(map(str, range(n)))
    with EmbeddingWriter(folder, "train", fingerprint, n, x.shape[1], ids=ids) as writer:
        writer.append(torch.from_numpy(np.asarray(x, np.float32)), torch.arange(n))
        return writer.close()


def precision(truth: NDArray, score: NDArray, total: int) -> tuple[float, float]:
    """Return precision at min(100, `total`) and average precision over `total` positives."""
    first = np.argsort(-score, kind="stable")[: min(100, total)]
    average = average_precision_score(truth, score) * truth.sum() / total if truth.any() else 0
    return float(truth[first].mean()), float(average)


# --- Copies ---------------------------------------------------------------------------------------


def copied(images: NDArray) -> tuple[NDArray, NDArray]:
    """Return images `[n + 200, 96, 96(, 3)]`, the last 200 copies, and the copied rows `[200]`."""
    large = [Image.fromarray(i).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for i in images]
    rows = np.random.default_rng(0).choice(len(large), COPIES, False)
    copies = [ALTERED[i % len(ALTERED)](large[row]) for i, row in enumerate(rows)]
    return np.stack([np.asarray(image) for image in [*large, *copies]]), rows


def hashed(images: NDArray, method: str) -> dict[tuple[int, int], float] | None:
    """Return imagededup's pairs within a Hamming distance of 20 bits, with negated distances."""
    try:
        from imagededup import methods  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    hasher: Any = getattr(methods, method)()
    codes = [int(hasher.encode_image(image_array=image), 16) for image in images]
    bits = np.array([[code >> bit & 1 for bit in range(64)] for code in codes], np.float32)
    distance = squareform(pdist(bits, "cityblock"))
    rows, others = np.nonzero(np.triu(distance <= 20, 1))
    pairs = zip(rows.tolist(), others.tolist(), strict=True)
    return dict(zip(pairs, (-distance[rows, others]).tolist(), strict=True))


def duplicates(name: str, images: NDArray, x: NDArray, rows: NDArray) -> list[list[str]]:
    """Return a table row for each method."""
    n = len(images) - len(rows)
    truth = {(int(row), n + i) for i, row in enumerate(rows)}
    start = time.monotonic()
    candidates = near_duplicates(stored(x))
    seconds = time.monotonic() - start
    pairs = list(zip(candidates.first.tolist(), candidates.second.tolist(), strict=True))
    certain = candidates.pairs()
    hits = sum(pair in truth for pair, sure in zip(pairs, certain, strict=True) if sure)
    auto = f"{certain.sum()} pairs, {hits} of {len(rows)} copies ({seconds:.0f} s)"
    ranked = {"ours": dict(zip(pairs, -np.arange(len(pairs), dtype=float), strict=True))}
    ranked["cosine alone"] = dict(zip(pairs, candidates.similarity, strict=True))
    for method in ("PHash", "DHash"):
        if (hashes := hashed(images, method)) is not None:
            ranked[f"imagededup, {method}"] = hashes
    lines = []
    for method, scores in ranked.items():
        is_copy = np.array([pair in truth for pair in scores])
        at_100, average = precision(is_copy, np.array(list(scores.values())), len(rows))
        cell = auto if method == "ours" else ""
        lines.append([name, method, f"{at_100:.2f}", f"{average:.3f}", cell])
    return lines


# --- Labels and outliers --------------------------------------------------------------------------


def _photos(sources: Sources, split: Split = "train") -> Labeled:
    """Return the images of CIFAR-10 `[n, 32, 32, 3]` and their classes."""
    folder = _cifar_images(sources, split)
    images = [np.asarray(folder.image(i).convert("RGB")) for i in range(len(folder))]
    return np.stack(images), np.asarray(folder.labels)


def _fashion(sources: Sources, n: int) -> Labeled:
    """Return the first images of Fashion-MNIST `[n, 28, 28]` and their classes."""
    dataset = _fashion_images(sources, n)
    return np.asarray(dataset.arrays), np.asarray(dataset.labels)


class Host(NamedTuple):
    """A data set and its outliers, embedded with one teacher at one image size."""

    x: NDArray  # [n, d] embeddings
    y: NDArray  # [n] classes
    elsewhere: NDArray  # [m, d], of another data set
    broken: NDArray  # [kind, m, d], of damaged images of the same data set
    single: NDArray  # [m, d], of images that all differ


def broken(images: NDArray) -> list[NDArray]:
    """Return all images noisy, blurred, inverted, half lost, as pure noise, and blank."""
    rng, light = np.random.default_rng(0), images.astype(np.float64)
    rows, side = len(images), images.shape[1]
    half = light.copy()
    half[:, side // 2 :] = 128
    soft = [Image.fromarray(i).filter(ImageFilter.GaussianBlur(side / 8)) for i in images]
    shade = rng.uniform(0, 255, (rows, *[1] * (images.ndim - 1)))
    damaged = [light + rng.normal(0, 80, light.shape), np.stack([np.asarray(i) for i in soft])]
    damaged += [255 - light, half, rng.uniform(0, 255, light.shape), np.zeros_like(light) + shade]
    return [values.clip(0, 255).astype(np.uint8) for values in damaged]


def single(side: int = 96) -> NDArray:
    """Return 12 different photos, digits and drawings, `[12, side, side, 3]` uint8."""
    digit = SETS["digits"](Sources())[0][0].reshape(8, 8) * 15.9
    x, y = np.meshgrid(np.arange(side), np.arange(side))
    circle = np.hypot(x - side / 2, y - side / 2)
    dotted = np.random.default_rng(0).random((side, side)) < 0.05
    masks = [(x + y) % 12 < 4, (x // 8 + y // 8) % 2 > 0, circle % 10 < 4, circle < 12, dotted]
    drawn = [np.where(mask, 255, 40 * k) for k, mask in enumerate(masks)] + [2 * x, x * y % 255]
    images = [Image.fromarray(np.uint8(values)) for values in [digit, *drawn]]
    images += [Image.fromarray(load_sample_image(f"{name}.jpg")) for name in ("china", "flower")]
    images.append(images[-1].crop((0, 0, 80, 80)))
    text = Image.new("RGB", (side, side), "navy")
    ImageDraw.Draw(text).text((8, 40), "image not found", fill="yellow")
    images.append(text)
    return np.stack([np.asarray(i.convert("RGB").resize((side, side))) for i in images])


def hosts(sources: Sources) -> Iterator[tuple[str, Host]]:
    """Yield CIFAR-10 and Fashion-MNIST, embedded with EfficientNet at 96 pixels."""

    def embedded(name: str, images: NDArray, y: NDArray | None = None) -> Labeled:
        y = np.zeros(len(images), np.int64) if y is None else y
        dataset = ArrayDataset(name, "train", images, y, None)
        return _embedded(sources, dataset, f"strange_{name}", SIDE)

    splits = _photos(sources), _photos(sources, "test")
    photos = tuple(np.concatenate(parts) for parts in zip(*splits, strict=True))
    fashion = _fashion(sources, len(photos[0]))
    strange = embedded("single", single())[0]
    rows = np.random.default_rng(0).permutation(len(photos[0]))
    intact, sick = {}, {}
    for name, (x, y) in {"cifar": photos, "fashion": fashion}.items():
        intact[name] = embedded(name, x[rows[SICK:]], y[rows[SICK:]])
        damaged = broken(x[rows[:SICK]])
        sick[name] = np.stack([embedded(f"{name}{k}", x)[0] for k, x in enumerate(damaged)])
    for name, other in (("cifar", "fashion"), ("fashion", "cifar")):
        x, y = intact[name]
        yield name, Host(x, y, intact[other][0], sick[name], strange)


def strange(host: Host, rng: np.random.Generator) -> Iterator[tuple[str, NDArray, Scores]]:
    """Yield the kind of outliers, a mask `[n]` of them, and the outlier scores of each method."""
    x = host.x[rng.choice(len(host.x), ROWS, False)]
    sick = host.broken[:, rng.choice(SICK, -(-STRANGE // len(host.broken)), False)]
    elsewhere = host.elsewhere[rng.choice(len(host.elsewhere), STRANGE, False)]
    kinds = {"a group from elsewhere": elsewhere, "single strange images": host.single}
    for kind, others in (kinds | {"broken images": sick.reshape(-1, x.shape[1])}).items():
        both = np.concatenate([x, others])
        yield kind, np.arange(len(both)) >= len(x), far_out(both)


def far_out(x: NDArray) -> Scores:
    """Return the outlier score of each row, by method."""
    ranking = outliers(stored(x))
    ours = np.empty(len(x))
    ours[ranking.rows] = ranking.columns["distance"]
    rows = torch.from_numpy(x)
    projected = Projection.fit(rows, VisionSettings.pca_dim)(rows)
    of_run = Novelty.fit(projected).score(projected).numpy()
    scores = {"ours": ours, "ours, score of a run": of_run}
    try:
        from cleanlab.outlier import OutOfDistribution  # pyright: ignore[reportMissingImports]
    except ImportError:
        return scores
    return scores | {"cleanlab": -OutOfDistribution().fit_score(features=x, verbose=False)}


def doubted(
    x: NDArray, y: NDArray, rng: np.random.Generator
) -> Iterator[tuple[str, NDArray, Scores]]:
    """Yield the kind of change, a mask `[n]` of wrong labels, and the scores of each method."""
    rows = rng.choice(len(x), min(ROWS, len(x) * 9 // 10), False)
    x, y = x[rows], y[rows]
    n_classes, wrong = int(y.max()) + 1, rng.choice(len(y), int(FLIPPED * len(y)), False)
    for kind, step in (("any", rng.integers(1, n_classes, len(wrong))), ("the next", 1)):
        labels, ours = y.copy(), np.empty(len(y))
        labels[wrong] = (y[wrong] + step) % n_classes
        store = stored(x)
        ranking = mislabeled(store, labels)
        ours[ranking.rows] = ranking.scores
        ranked = {"ours": ours}
        try:
            from cleanlab import rank  # pyright: ignore[reportMissingImports]
        except ImportError:
            pass
        else:  # with one of our two classifiers
            probabilities = _by_regression(store, np.arange(len(y)), labels, n_classes)
            for method in ("self_confidence", "normalized_margin"):
                quality = rank.get_label_quality_scores(labels, probabilities, method=method)
                ranked[f"cleanlab, {method}"] = -quality
        yield f"labels of {kind} class", labels != y, ranked


def averaged(
    name: str, cases: Callable[[np.random.Generator], Iterator[tuple[str, NDArray, Scores]]]
) -> list[list[str]]:
    """Return table rows for all kinds and methods, averaged over the seeds."""
    precisions: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for seed in range(SEEDS):
        for kind, truth, scores in cases(np.random.default_rng(seed)):
            for method, score in scores.items():
                values = precision(truth, score, int(truth.sum()))
                precisions.setdefault((kind, method), []).append(values)
    lines = []
    for (kind, method), values in sorted(precisions.items(), key=lambda item: item[0][0]):
        (at_100, average), spread = np.mean(values, 0), np.std(values, 0, ddof=1) / SEEDS**0.5
        cells = [f"{at_100:.3f} ± {spread[0]:.3f}", f"{average:.3f} ± {spread[1]:.3f}"]
        lines.append([f"{name}: {kind}", method, *cells])
    return lines


def copies(sources: Sources) -> Iterator[list[list[str]]]:
    """Yield the rows of the duplicates table, per data set."""
    sets = {"cifar": _photos(sources), "fashion": _fashion(sources, 5000)}
    for name, (small, y) in sets.items():
        images, rows = copied(small)
        dataset = ArrayDataset(name, "train", images, np.concatenate([y, y[rows]]), None)
        x, _ = _embedded(sources, dataset, f"{name}_dup96", SIDE)
        yield duplicates(f"{name}, EfficientNet: copies", images, x, rows)
        tiny = [Image.fromarray(i).resize((32, 32), Image.Resampling.BOX) for i in images]
        pixels = np.stack([np.asarray(image, np.float32) for image in tiny]) / 255
        yield duplicates(f"{name}, pixels: copies", images, pixels.reshape(len(tiny), -1), rows)


def strays(sources: Sources) -> Iterator[list[list[str]]]:
    """Yield the rows of the outliers table, per data set."""
    yield from (averaged(name, partial(strange, host)) for name, host in hosts(sources))


def labels(sources: Sources) -> Iterator[list[list[str]]]:
    """Yield the rows of the wrong labels table, per data set."""
    sets = {name: (host.x, host.y) for name, host in hosts(sources)}
    for name, (x, y) in (sets | {"digits": SETS["digits"](sources)}).items():
        yield averaged(name, partial(doubted, x, y))


COLUMNS = ["inserted", "method", "precision at 100", "average precision"]
TABLES = {"copies": copies, "outliers": strays, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description="Find inserted copies, wrong labels and outliers.")
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES))
    Sources.add_flags(parser)
    args = parser.parse_args()
    for name in args.tables:
        print()
        header(*COLUMNS, *(["auto"] if name == "copies" else []))
        try:
            for rows in TABLES[name](Sources.of(args)):
                print(*map(table_line, rows), sep="\n", flush=True)
        except Absent as error:
            raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
