"""What each part of the search for a partition is worth, without heads, in points of accuracy.

    python -m benchmarks.ablation --sets digits,unequal,rare,two

Each variant clusters the same random four fifths of each set, `--draws` times, so that what two
variants differ by is not the luck of one sample. Labels are read for the scores alone. Few samples
of each class: `--share 0.1 --variants "as it is,5 neighbours,10 neighbours,25 neighbours"`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.quality import names_of
from benchmarks.sets import SETS, Sources, loaded
from ssl_kd import evaluate
from ssl_kd.graph import Graph, Partition, best_partitions, search
from ssl_kd.store import nearest_neighbours
from ssl_kd.vision import partition
from ssl_kd.vision.projection import Projection

ALL = (0, 1, 2)
# Name -> neighbours, views (cosine, Euclidean, half-whitened), and constants that are replaced.
VARIANTS: dict[str, tuple[int, tuple[int, ...], dict[Any, dict[str, Any]]]] = {
    "as it is": (15, ALL, {}),
    "cosine alone": (15, (0,), {}),
    "Euclidean alone": (15, (1,), {}),
    "half-whitened alone": (15, (2,), {}),
    "not half-whitened": (15, (0, 1), {}),
    "5 neighbours": (5, ALL, {}),
    "10 neighbours": (10, ALL, {}),
    "25 neighbours": (25, ALL, {}),
    "alpha 0, information alone": (15, ALL, {search: {"ALPHA": 0.0, "SAME_ALPHA": 1.0}}),
    "alpha 0.3": (15, ALL, {search: {"ALPHA": 0.3, "SAME_ALPHA": 1.0}}),
    "alpha 0.5": (15, ALL, {search: {"SAME_ALPHA": 1.0}}),
    "alpha 0.7": (15, ALL, {search: {"ALPHA": 0.7, "SAME_ALPHA": 1.0}}),
    "slope 5": (15, ALL, {search: {"SLOPE": 5.0}}),
    "slope 10": (15, ALL, {search: {"SLOPE": 10.0}}),
    "no merging down": (15, ALL, {search: {"DESCENTS": (), "LEAST_DESCENT": 0}}),
    "no split and merge": (15, ALL, {search: {"ROUNDS": 0}}),
    "no consensus": (15, ALL, {search: {"CONSENSUS": ()}}),
}


def graphs(x: NDArray, k: int) -> list[Any]:
    """The graphs of all views with k neighbours."""
    rows = torch.from_numpy(x)
    projected = Projection.fit(rows, 256)(rows)
    with mock.patch.object(partition, "GRAPH_NEIGHBOURS", k):
        near = nearest_neighbours(rows, k)
        cpu = torch.device("cpu")
        return list(partition.graph_views(near, rows.__getitem__, projected, cpu))


def ranked(views: Sequence[Any], n_clusters: int, changes: dict) -> list[Partition]:
    """All partitions of the sum of some graphs, with some constants changed."""
    patches = [mock.patch.multiple(module, **values) for module, values in changes.items()]
    for patch in patches:
        patch.start()
    try:
        total: Any = sum(views[1:], views[0])
        return best_partitions(Graph(total.tocsr()), n_clusters)
    finally:
        for patch in patches:
            patch.stop()


def chosen_on_others(table: dict[str, list[float]], left_out: int) -> float:
    """Accuracy on one set of the variant that has the best mean on all others."""
    means = {v: np.mean(np.delete(accuracies, left_out)) for v, accuracies in table.items()}
    return table[max(means, key=means.__getitem__)][left_out]


def choice_table(choice: dict[str, list[tuple[float, float]]]) -> str:
    """How well the criterion ranked its candidates on each set: medians over the draws."""
    head = "| set | rank correlation with accuracy | points behind the best candidate |"
    lines = ["", head, "|---" * 3 + "|"]
    for name, pairs in {**choice, "all": sum(choice.values(), [])}.items():
        ranks, regrets = zip(*pairs, strict=True)
        lines.append(f"| {name} | {np.nanmedian(ranks):.2f} | {np.median(regrets):.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The search's parts, one by one.", allow_abbrev=False
    )
    parser.add_argument("--sets", type=lambda text: names_of(SETS, text), default=list(SETS))
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.8, help="of the samples, in each draw")
    parser.add_argument("--variants", type=lambda t: names_of(VARIANTS, t), default=list(VARIANTS))
    Sources.add_flags(parser)
    args = parser.parse_args()
    variants = {name: VARIANTS[name] for name in args.variants}
    names, table = [], {variant: [] for variant in variants}
    choice: dict[str, list[tuple[float, float]]] = {}
    for name, x, y in loaded({name: SETS[name] for name in args.sets}, Sources.of(args)):
        names.append(name)
        found: dict[str, list[float]] = {variant: [] for variant in variants}
        for draw in range(args.draws):
            rows = np.random.default_rng(draw).permutation(len(x))[: int(args.share * len(x))]
            labels = np.unique(y[rows], return_inverse=True)[1]
            k = int(labels.max()) + 1
            by_k = {
                size: graphs(np.ascontiguousarray(x[rows], np.float32), size)
                for size in {v[0] for v in variants.values()}
            }
            for variant, (size, which, changes) in variants.items():
                parts = ranked([by_k[size][i] for i in which], k, changes)
                acc = [100 * evaluate.accuracy(labels, part.clusters) for part in parts]
                found[variant].append(acc[0])
                if variant == "as it is":
                    rank: Any = spearmanr([part.value for part in parts], acc)[0]
                    choice.setdefault(name, []).append((rank, max(acc) - acc[0]))
        for variant, values in found.items():
            table[variant].append(float(np.mean(values)))
        print(name, {v: round(a[-1], 1) for v, a in table.items()}, flush=True)
    print("\n| variant |", " | ".join(names), "| mean |\n|---|" + "---|" * (len(names) + 1))
    for variant, values in table.items():
        cells = " | ".join(f"{value:.1f}" for value in values)
        print(f"| {variant} | {cells} | {np.mean(values):.1f} |")
    left_out = [chosen_on_others(table, i) for i in range(len(names))]
    cells = " | ".join(f"{value:.1f}" for value in left_out)
    print(f"| the variant best on the other sets | {cells} | {np.mean(left_out):.1f} |")
    if choice:
        print(choice_table(choice))


if __name__ == "__main__":
    main()
