"""Count how often `ssl_kd compare` judges, abstains and is wrong, on two embeddings of one set.

    python -m benchmarks.abstention --features FOLDER --cifar FOLDER   # ten minutes

A set is up to 700 samples with several embeddings: pixels, colors and EfficientNet of photographs,
or else the features, also with 4 components, whitened, projected at random, with noise, and a third
of the columns. Each is clustered by k-means, spectral clustering and communities with K given, and
by k-means with 0.6 K and 1.6 K. A question is a pair of clusterings of two embeddings: which has
the higher AMI with the labels? The limits were chosen on the sets in CHOSEN_ON.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_mutual_info_score, adjusted_rand_score

from benchmarks.turns import table_head, table_line
from ssl_kd.vision.cache import nearest_neighbors
from ssl_kd.vision.data import open_dataset
from ssl_kd.vision.graph import Graph, fuzzy_graph
from ssl_kd.vision.graph.kmeans import kmeans
from ssl_kd.vision.graph.levels import communities
from ssl_kd.vision.graph.spectral import on_sphere, spectral_coordinates
from ssl_kd.vision.teachers import load_teacher
from ssl_kd_explore.compare import judgement

ROWS, RESAMPLES = 700, 60
CHOSEN_ON = ("cifar", "digits", "usps_small", "cub10_googlenet", "irmas_audio51")
CHOSEN_ON += ("trash6_lite2", "webkb4_wordllama")
REPORTED = ("flowers5_lite2", "frogs_mfcc", "gtzan_librosa57", "landuse21", "letter26")
REPORTED += ("monkeys10_lite1", "spokendigits_mfcc", "umist")
Arrays = dict[str, NDArray]


@dataclass(frozen=True)
class Question:
    """Two clusterings of one set, what the judgement says of them, and what the labels say."""

    of: str
    stated: float  # probability that A is better
    interval: tuple[float, float]
    covered: float  # share of the samples with a common neighbor
    gain: float  # AMI of A minus that of B

    @property
    def is_judged_without_limits(self) -> bool:
        return max(self.stated, 1 - self.stated) >= judgement.SURE

    @property
    def abstention(self) -> str:
        """The limit that is exceeded; empty if none is."""
        if self.covered < judgement.LEAST_COVERED:
            return "few samples have a common neighbor"
        low, high = self.interval
        return "the interval is wide" if high - low > judgement.WIDEST_INTERVAL else ""

    @property
    def is_wrong(self) -> bool:
        return (self.stated > 0.5) != (self.gain > 0)


def of_photographs(folder: Path) -> tuple[Arrays, NDArray]:
    """Embed photographs by pixels, colors, and EfficientNet at two sizes and with noise."""
    data: Any = open_dataset(str(folder), "train", labels="folders")
    rows = np.random.default_rng(0).permutation(len(data))[:ROWS]
    images = [data.image(row).convert("RGB") for row in rows.tolist()]
    histograms = [np.reshape(image.histogram(), (3, 16, 16)).sum(2).ravel() for image in images]
    x = {"colors": np.stack(histograms).astype(np.float64)}
    for name, teacher, size in (
        ("pixels", "pixels", 32),
        ("small pixels", "pixels", 16),
        ("EfficientNet, 64 px", "efficientnet_lite0", 64),
        ("EfficientNet, 112 px", "efficientnet_lite0", 112),
    ):
        network = load_teacher(teacher, image_size=size)
        batches = torch.stack([network.preprocess(image) for image in images]).split(100)
        with torch.no_grad():
            x[name] = torch.cat([network.embed(batch).float() for batch in batches]).numpy()
    centered = x[name] - x[name].mean(0)
    noise = np.random.default_rng(0).normal(size=centered.shape)
    return x | {"EfficientNet, noise": centered + 3 * centered.std() * noise}, data.labels[rows]


def of_features(x: NDArray, rng: np.random.Generator) -> Arrays:
    """Return features `[n, d]` and six worse versions of them."""
    centered, (n, d) = x - x.mean(0), x.shape
    left, lengths, _ = np.linalg.svd(centered, full_matrices=False)
    return {
        "features": x,
        "4 components": left[:, :4] * lengths[:4],
        "whitened": left[:, :64][:, lengths[:64] > 1e-6 * lengths[0]],
        "projected": centered @ rng.normal(size=(d, min(10, d // 2))),
        "noise": centered + 1.5 * centered.std() * rng.normal(size=(n, d)),
        "more noise": centered + 4 * centered.std() * rng.normal(size=(n, d)),
        "third": x[:, rng.permutation(d)[: max(2, d // 3)]],
    }


def partitions(x: NDArray, k: int) -> list[NDArray]:
    """Cluster rows of length 1, `[n, d]`, in five ways."""
    near = nearest_neighbors(torch.from_numpy(x), 15).numpy()
    graph = fuzzy_graph(near, np.linalg.norm(x[near] - x[:, None], axis=2))
    vectors = on_sphere(spectral_coordinates(graph, int(1.25 * k) + 1))
    return [
        kmeans(x, k, 0, n_init=3),
        kmeans(vectors, k, 0, n_init=3),
        *communities(Graph(graph), k, (0.3,)),
        kmeans(x, max(2, int(0.6 * k)), 0, n_init=2),
        kmeans(x, int(1.6 * k), 0, n_init=2),
    ]


def questions(name: str, spaces: Arrays, y: NDArray) -> Iterator[Question]:
    """Yield all pairs of clusterings of two embeddings that share enough pairs of neighbors."""
    n, k = len(y), len(np.unique(y))
    unit = {
        s: x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        for s, x in spaces.items()
    }
    rows = {space: x.astype(np.float32) for space, x in unit.items()}
    clusters = {
        space: [np.unique(c, return_inverse=True)[1] for c in partitions(x, k)]
        for space, x in rows.items()
    }
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    for space_a, space_b in itertools.combinations(rows, 2):
        pairs = judgement.common_neighbors(rows[space_a], rows[space_b])
        if pairs.shape[1] < judgement.FEWEST_PAIRS:
            continue
        for a, b in itertools.product(clusters[space_a], clusters[space_b]):
            apart = max(1 - adjusted_rand_score(a, b), judgement.LEAST_DISAGREEMENT)
            gains = [
                judgement.value(pairs, a, weight) - judgement.value(pairs, b, weight)
                for weight in (None, *weights)
            ]
            stated, *resampled = judgement.probability(np.array(gains) / apart)
            low, high = np.quantile(resampled, judgement.INTERVAL)
            scores = [adjusted_mutual_info_score(y, clustering) for clustering in (a, b)]
            covered = len(np.unique(pairs[0])) / n
            yield Question(name, stated, (low, high), covered, scores[0] - scores[1])


def sets(args: argparse.Namespace) -> Iterator[tuple[str, Arrays, NDArray]]:
    """Yield the name, embeddings and labels of the available sets."""
    if args.cifar:
        yield "cifar", *of_photographs(args.cifar)
    files = {file.stem: file for folder in args.features for file in folder.glob("*.npz")}
    for name in (*CHOSEN_ON, *REPORTED):
        if name == "digits":
            digits: Any = load_digits()
            x, y = digits.data, digits.target
        elif name in files:
            x, y = np.load(files[name])["x"], np.load(files[name])["y"]
        else:
            continue
        rng = np.random.default_rng(sum(map(ord, name)))
        rows = rng.permutation(len(x))[:ROWS]
        yield name, of_features(x[rows].astype(np.float64), rng), y[rows]


def counts(of: list[Question]) -> list[str]:
    """Return the cells of a table: questions, judged, wrong, and by 5 points of AMI or more."""
    judged = [question for question in of if question.is_judged_without_limits]
    wrong = [question for question in judged if question.is_wrong]
    far = sum(abs(question.gain) >= 0.05 for question in wrong)
    shares = [f"{n} ({100 * n / max(len(judged), 1):.0f} %)" for n in (len(wrong), far)]
    return [f"{len(of):,}", f"{len(judged):,}", *shares]


def main() -> None:
    parser = argparse.ArgumentParser(description="Count judgements, abstentions and errors.")
    parser.add_argument("--features", type=Path, nargs="+", default=[], help="NAME.npz with x, y")
    parser.add_argument("--cifar", type=Path, help="folder with a folder of images per class")
    args = parser.parse_args()
    every = [question for one in sets(args) for question in questions(*one)]
    print(table_head(["questions", "n", "a better one named", "wrong", "wrong by 5 points of AMI"]))
    for title, names in (("chosen on", CHOSEN_ON), ("others", REPORTED)):
        group = [question for question in every if question.of in names]
        print(table_line([f"{title}, without limits", *counts(group)]))
        for reason in dict.fromkeys(sorted(question.abstention for question in group)):
            part = [question for question in group if question.abstention == reason]
            label = f"abstained: {reason}" if reason else "judged"
            print(table_line([f"{title}, {label}", *counts(part)]))
    for name in dict.fromkeys(question.of for question in every):
        of_set = [question for question in every if question.of == name]
        kept = [question for question in of_set if not question.abstention]
        print(table_line([name, *counts(of_set), *counts(kept)]))


if __name__ == "__main__":
    main()
