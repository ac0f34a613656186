"""Insert duplicates, wrong labels and outliers into real images, and measure how many are found.

    pip install --target peers --no-deps cleanlab imagededup termcolor PyWavelets
    PYTHONPATH=peers python -m benchmarks.curate --data_dir data --cifar FOLDER

Beside cleanlab (labels, outliers) and imagededup (copies) on the same data in the same run; one
that is not installed is left out. Of each: the precision at 100, or at as many as were put in where
they are fewer, and the average precision. `--tables outliers labels` leaves the copies out.

- Copies: images at 96 pixels, and 200 of them once more: as they are, as JPEG of quality 60, made
  smaller by a third and large again, cropped by four pixels on each side, brighter by a quarter.
- Outliers, among 2,000 images by EfficientNet: a hundred of another data set; as many
  broken ones (noisy, blurred, inverted, half lost, nothing but noise, blank); and twelve images of
  which no two are of a kind.
- Labels: one in twenty becomes another class, at random, or the next; cleanlab has our classifier.

Outliers and labels: mean and standard error of five seeds, which draw the images, what is put in
and which labels are wrong.
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
from sklearn.datasets import load_sample_image
from sklearn.metrics import average_precision_score

from benchmarks.regret import table_line
from benchmarks.sets import SETS, Absent, Labelled, Sources, _embedded, _fashion_images
from ssl_kd.datasets import ArrayDataset, ImageDataset, open_dataset
from ssl_kd.datasets.catalog import Split
from ssl_kd.store import EmbeddingStore, EmbeddingWriter, Fingerprint
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.novelty import Novelty
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.workbench.curate import mislabelled, near_duplicates, outliers
from ssl_kd.workbench.curate.wrong_labels import _by_regression

COPIES, SIDE, FLIPPED, STRANGE, ROWS, SEEDS = 200, 96, 0.05, 100, 2000, 5
SICK = 60  # images that are broken, and not among the sound ones
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
    """Write rows into a new embeddings cache, and open it."""
    n, folder = len(x), Path(tempfile.mkdtemp())
    of = Fingerprint("features", "none", "none", "float32", "made for a benchmark")
    with EmbeddingWriter(
        folder, "train", of, n, x.shape[1], ids=[str(row) for row in range(n)]
    ) as writer:
        writer.append(torch.from_numpy(np.asarray(x, np.float32)), torch.arange(n))
        return writer.close()


def precision(wanted: NDArray, score: NDArray, total: int) -> tuple[float, float]:
    """Return the precision at 100 (or `total`) and the average precision over `total` positives."""
    first = np.argsort(-score, kind="stable")[: min(100, total)]
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
    """Return pairs that imagededup finds within a Hamming distance of 20 bits, and minus it."""
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
    """Return a table line for each method."""
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


def _photos(sources: Sources, split: Split) -> Labelled:
    """Return the images of CIFAR-10 `[n, 32, 32, 3]` and their classes."""
    if sources.cifar is None:
        raise Absent("there is no CIFAR-10: --cifar FOLDER, with train/<class>/*.png in it")
    folder = open_dataset(str(sources.cifar), split, labels="folders")
    assert isinstance(folder, ImageDataset) and folder.labels is not None
    images = [np.asarray(folder.image(i).convert("RGB")) for i in range(len(folder))]
    return np.stack(images), folder.labels


class Host(NamedTuple):
    """A set by a teacher, and what does not belong to it by the same at the same size.

    Args:
        x: `[n, d]` embeddings.
        y: `[n]` classes.
        elsewhere: `[m, d]`, of another data set.
        broken: `[kind, m, d]`, of images of the same source that are no longer sound.
        single: `[m, d]`, of images each of a kind of its own.
    """

    x: NDArray
    y: NDArray
    elsewhere: NDArray
    broken: NDArray
    single: NDArray


def broken(images: NDArray) -> list[NDArray]:
    """Return each image noisy, blurred, inverted, half lost, as pure noise, and blank."""
    rng, light = np.random.default_rng(0), images.astype(np.float64)
    rows, side = len(images), images.shape[1]
    half = light.copy()
    half[:, side // 2 :] = 128
    soft = [Image.fromarray(i).filter(ImageFilter.GaussianBlur(side / 8)) for i in images]
    shade = rng.uniform(0, 255, (rows, *[1] * (images.ndim - 1)))
    found = [light + rng.normal(0, 80, light.shape), np.stack([np.asarray(i) for i in soft])]
    found += [255 - light, half, rng.uniform(0, 255, light.shape), np.zeros_like(light) + shade]
    return [values.clip(0, 255).astype(np.uint8) for values in found]


def single(side: int = 96) -> NDArray:
    """Return photographs, a digit and drawings, all different, `[12, side, side, 3]` uint8."""
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
    """Of photographs and of clothes, both through EfficientNet at 96 pixels."""

    def embedded(name: str, images: NDArray, y: NDArray | None = None) -> Labelled:
        y = np.zeros(len(images), np.int64) if y is None else y
        dataset = ArrayDataset(name, "train", images, y, None)
        return _embedded(sources, dataset, f"strange_{name}", SIDE)

    (seen, named), (unseen, others) = (_photos(sources, split) for split in ("train", "test"))
    photos = np.concatenate([seen, unseen]), np.concatenate([named, others])
    fashion = _fashion_images(sources, len(photos[0]))
    assert fashion.arrays is not None and fashion.labels is not None
    strange = embedded("single", single())[0]
    rows = np.random.default_rng(0).permutation(len(photos[0]))
    found, sick = {}, {}
    for name, (x, y) in {"cifar": photos, "fashion": (fashion.arrays, fashion.labels)}.items():
        found[name] = embedded(name, x[rows[SICK:]], y[rows[SICK:]])
        damaged = broken(x[rows[:SICK]])
        sick[name] = np.stack([embedded(f"{name}{k}", x)[0] for k, x in enumerate(damaged)])
    for name, other in (("cifar", "fashion"), ("fashion", "cifar")):
        yield name, Host(found[name][0], found[name][1], found[other][0], sick[name], strange)


def strange(host: Host, rng: np.random.Generator) -> Iterator[tuple[str, NDArray, Scores]]:
    """What was put in, `[n]` True for it, and of each method how far out each row lies."""
    x = host.x[rng.choice(len(host.x), ROWS, False)]
    sick = host.broken[:, rng.choice(SICK, -(-STRANGE // len(host.broken)), False)]
    for kind, others in (
        ("a group from elsewhere", host.elsewhere[rng.choice(len(host.elsewhere), STRANGE, False)]),
        ("single strange images", host.single),
        ("broken images", sick.reshape(-1, x.shape[1])),
    ):
        both = np.concatenate([x, others])
        yield kind, np.arange(len(both)) >= len(x), far_out(both)


def far_out(x: NDArray) -> Scores:
    """Return the outlier score of each row, by method."""
    found = outliers(stored(x))
    ours = np.empty(len(x))
    ours[found.rows] = found.columns["distance"]
    rows = torch.from_numpy(x)
    seen = Projection.fit(rows, VisionSettings.pca_dim)(rows)
    ranked = {"ours": ours, "ours, score of a run": Novelty.fit(seen).score(seen).numpy()}
    try:
        from cleanlab.outlier import (  # pyright: ignore[reportMissingImports]
            OutOfDistribution,
        )
    except ImportError:
        return ranked
    return ranked | {"cleanlab": -OutOfDistribution().fit_score(features=x, verbose=False)}


def doubted(
    x: NDArray, y: NDArray, rng: np.random.Generator
) -> Iterator[tuple[str, NDArray, Scores]]:
    """How labels were changed, `[n]` True for these, and of each method how wrong each looks."""
    rows = rng.choice(len(x), min(ROWS, len(x) * 9 // 10), False)
    x, y = x[rows], y[rows]
    n_classes, wrong = int(y.max()) + 1, rng.choice(len(y), int(FLIPPED * len(y)), False)
    for kind, step in (("any", rng.integers(1, n_classes, len(wrong))), ("the next", 1)):
        given, ours = y.copy(), np.empty(len(y))
        given[wrong] = (y[wrong] + step) % n_classes
        store = stored(x)
        found = mislabelled(store, given)
        ours[found.rows] = found.scores
        ranked = {"ours": ours}
        try:
            from cleanlab import rank  # pyright: ignore[reportMissingImports]
        except ImportError:
            pass
        else:  # with the classifier that is one half of ours
            chances = _by_regression(store, np.arange(len(y)), given, n_classes, 0)
            for method in ("self_confidence", "normalized_margin"):
                quality = rank.get_label_quality_scores(given, chances, method=method)
                ranked[f"cleanlab, {method}"] = -quality
        yield f"labels of {kind} class", given != y, ranked


def averaged(
    name: str, cases: Callable[[np.random.Generator], Iterator[tuple[str, NDArray, Scores]]]
) -> list[list[str]]:
    """Return a line for each kind and method: precision and average precision over the seeds."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for seed in range(SEEDS):
        for kind, wanted, ranked in cases(np.random.default_rng(seed)):
            for method, score in ranked.items():
                values = precision(wanted, score, int(wanted.sum()))
                found.setdefault((kind, method), []).append(values)
    lines = []
    for (kind, method), values in sorted(found.items(), key=lambda item: item[0][0]):
        (at, average), spread = np.mean(values, 0), np.std(values, 0, ddof=1) / SEEDS**0.5
        cells = [f"{at:.3f} ± {spread[0]:.3f}", f"{average:.3f} ± {spread[1]:.3f}"]
        lines.append([f"{name}: {kind}", method, *cells])
    return lines


def copies(sources: Sources) -> Iterator[list[list[str]]]:
    """Return the table of duplicates as lines."""
    fashion = _fashion_images(sources, 5000)
    assert fashion.arrays is not None and fashion.labels is not None
    for name, small, y in (
        ("cifar", *_photos(sources, "train")),
        ("fashion", fashion.arrays, fashion.labels),
    ):
        images, rows = copied(small)
        dataset = ArrayDataset(name, "train", images, np.concatenate([y, y[rows]]), None)
        x, _ = _embedded(sources, dataset, f"{name}_dup96", SIDE)
        yield duplicates(f"{name}, EfficientNet: copies", images, x, rows)
        tiny = [Image.fromarray(i).resize((32, 32), Image.Resampling.BOX) for i in images]
        pixels = np.stack([np.asarray(image, np.float32) for image in tiny]) / 255
        yield duplicates(f"{name}, pixels: copies", images, pixels.reshape(len(tiny), -1), rows)


def strays(sources: Sources) -> Iterator[list[list[str]]]:
    """Return the table of outliers as lines."""
    for name, host in hosts(sources):
        yield averaged(name, partial(strange, host))


def labels(sources: Sources) -> Iterator[list[list[str]]]:
    """Return the table of wrong labels as lines."""
    sets = {name: (host.x, host.y) for name, host in hosts(sources)}
    for name, (x, y) in (sets | {"digits": SETS["digits"](sources)}).items():
        yield averaged(name, partial(doubted, x, y))


COLUMNS = ["put in", "method", "precision at 100", "average precision"]
TABLES = {"copies": copies, "outliers": strays, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description="Copies, wrong labels and outliers put in.")
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES))
    Sources.add_flags(parser)
    args = parser.parse_args()
    for name in args.tables:
        head = [*COLUMNS, "auto"] if name == "copies" else COLUMNS
        print("\n".join(["", table_line(head), "|---" * len(head) + "|"]), flush=True)
        try:
            for rows in TABLES[name](Sources.of(args)):
                print("\n".join(table_line(row) for row in rows), flush=True)
        except Absent as error:
            raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
