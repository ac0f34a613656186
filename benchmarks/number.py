"""Choose the rule that finds the number of clusters, on the shelf `choose` alone.

    python -m benchmarks.number --features FOLDER --json number.jsonl           # can resume
    python -m benchmarks.number --draws 0 --features FOLDER --json number.jsonl # only print

A task is a draw of a set, as in `benchmarks.regret`, or of a random half of its classes ("half").
For each task and number of clusters K the file has the ingredients of all rules: modularity Q of
communities, mean agreement F of the families that vote, agreement A of two random halves of the
samples, and the accuracy of the consensus at some K.
A rule is a score and a share: the smallest K with this share of the highest score is used. "Source
left out" applies to each source the rule that loses least on all other sources.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.regret import draw_of, sets
from benchmarks.sets import Sources, source_of
from benchmarks.turns import table_head, table_line
from ssl_kd.vision import evaluate
from ssl_kd.vision.cache import nearest_neighbors
from ssl_kd.vision.graph import Graph, consensus, summed
from ssl_kd.vision.graph.criterion import adjusted_rand_index, one_hot
from ssl_kd.vision.graph.ensemble import mutual_agreement
from ssl_kd.vision.graph.levels import levels, modularity
from ssl_kd.vision.graph.number import (
    MIN_SIZE,
    MOST,
    NEARLY_BEST,
    PLAUSIBLE,
    Families,
    apart,
    likely_numbers,
    smoothed,
)
from ssl_kd.vision.graph.spectral import on_sphere
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.partition import views

HALVINGS = 4
SHARES = (1.0, 0.98, 0.97, 0.96, 0.95, 0.94, 0.93, 0.9, 0.85)
MEASURED = (0.4, 0.65, 1.0, 1.5, 2.2)  # K over classes, where accuracy is measured
Row = dict[str, Any]
Rule = tuple[str, float]  # name of a score, and share of its maximum

# The ingredients are arrays over K.
SCORES: dict[str, Callable[[dict[str, NDArray]], NDArray]] = {
    "Q F": lambda v: v["Q"] * v["F"],
    "Q F^(1/2)": lambda v: v["Q"] * np.sqrt(v["F"]),
    "F": lambda v: v["F"],
    "Q": lambda v: v["Q"],
    "Q A^(1/3)": lambda v: v["Q"] * np.cbrt(v["A"]),
    "Q F A": lambda v: v["Q"] * v["F"] * v["A"],
}
SHIPPED: Rule = ("Q F", NEARLY_BEST)


def agreement_of_halves(graph: Graph, most: int, random: np.random.Generator) -> dict[int, float]:
    """Return how well partitions of random halves of the samples agree, for each K up to `most`.

    Clusters of one half are carried along the edges to the other half and compared there.

    References:
        Tibshirani & Walther, Cluster validation by prediction strength, 2005.
    """
    order = random.permutation(graph.n)
    halves = [np.sort(order[: graph.n // 2]), np.sort(order[graph.n // 2 :])]
    seed = int(random.integers(2**31))
    parts = [levels(Graph(graph.matrix[rows][:, rows].tocsr()), most, seed) for rows in halves]
    across = graph.matrix[halves[0]][:, halves[1]].tocsr()
    agreed = {}
    for k in set(parts[0]) & set(parts[1]):
        scores = []
        for source, target, edges in ((0, 1, across.T), (1, 0, across)):
            carried = (edges @ one_hot(parts[source][k], k)).toarray()
            tied = carried.any(1)
            pair = parts[target][k][tied], carried[tied].argmax(1)
            scores.append(adjusted_rand_index(*pair))
        agreed[k] = fmean(scores)
    return agreed


def ingredients(x: NDArray, y: NDArray) -> Row:
    """Return the ingredients of all rules for unit rows `[n, d]` with classes `y` `[n]`."""
    rows = torch.from_numpy(x)
    near = nearest_neighbors(rows, min(20, len(x) - 1))
    by_metric = views(near, rows.__getitem__, Projection.fit(rows, 256)(rows), torch.device("cpu"))
    cosine, euclidean, _ = by_metric
    graph, classes = Graph(summed(*by_metric)), int(y.max()) + 1
    densities = [density for view in (cosine, euclidean) for density in view.densities]
    families = Families(graph, [cosine.rows, on_sphere(euclidean.rows)], densities)
    most = min(MOST, graph.n // MIN_SIZE)
    partitions = levels(graph, most, seed=0)
    numbers = apart(partitions)
    halves = [
        agreement_of_halves(graph, most, np.random.default_rng([0, h])) for h in range(HALVINGS)
    ]
    measured = {min(numbers, key=lambda k: abs(math.log(k / (f * classes)))) for f in MEASURED}
    row: Row = {"K": numbers, "Q": [], "F": [], "A": [], "accuracy": {}}
    for k in numbers:
        candidates = families.candidates(partitions[k], k)
        row["Q"].append(modularity(graph, partitions[k], k))
        row["F"].append(mutual_agreement(candidates))
        row["A"].append(fmean(halving.get(k, 0.0) for halving in halves))
        if k in measured:
            scores = evaluate.clustering_scores(y[families.rows], consensus(candidates, k))
            row["accuracy"][k] = 100 * (scores["acc"] or 0.0)
    return row


def half_of_classes(x: NDArray, y: NDArray, seed: int) -> tuple[NDArray, NDArray]:
    """Return the samples of a random half of the classes."""
    classes = np.unique(y)
    kept = np.random.default_rng(seed).choice(classes, -(-len(classes) // 2), replace=False)
    rows = np.isin(y, kept)
    return x[rows], y[rows]


def tasks(args: argparse.Namespace) -> Iterator[tuple[str, int, Callable[[], tuple]]]:
    """Yield the name and draw of each task, and a function that returns its rows and classes."""
    every = list(sets("natural", "choose", args.features, Sources.of(args), args.sets))
    for draw in range(args.draws):
        for name, (x, y) in every:
            yield name, draw, lambda n=name, x=x, y=y, d=draw: draw_of("natural", n, x, y, d)
        for name, (x, y) in every:
            if len(np.unique(y)) >= 5:
                half = half_of_classes(x, y, draw)
                yield (
                    f"{name}, half",
                    draw,
                    lambda n=name, h=half, d=draw: draw_of("natural", n, *h, d),
                )


def number_by(rule: Rule, row: Row) -> int:
    """Return the number of clusters that a rule finds in a task."""
    return row["K"][int(np.argmax(_relative(rule, row) >= rule[1]))]


def _relative(rule: Rule, row: Row) -> NDArray:
    """Return the smoothed score of a rule, as a share of its highest value."""
    score = SCORES[rule[0]]({key: np.maximum(row[key], 0) for key in "QFA"})
    score = smoothed(row["K"], score)
    return score / max(score.max(), 1e-12)


def interval_by(rule: Rule, row: Row) -> tuple[int, int]:
    """Return the interval around the number that a rule finds in a task."""
    shares = zip(row["K"], _relative(rule, row), strict=True)
    likely = likely_numbers(number_by(rule, row), [k for k, share in shares if share >= PLAUSIBLE])
    return likely[0], likely[-1]


def lost(row: Row, number: int) -> float:
    """Return the points of accuracy that are lost against the number of classes."""
    known = sorted((int(k), accuracy) for k, accuracy in row["accuracy"].items())
    places, values = np.log([k for k, _ in known]), [accuracy for _, accuracy in known]
    at_classes, at_number = np.interp(np.log([row["classes"], number]), places, values)
    return float(at_classes - at_number)


def summary(rows: Sequence[Row], rules: Sequence[Rule]) -> list[float]:
    """Return the columns of the table for a rule per task: means over sources of their means."""
    of_source: dict[str, list[list[float]]] = {}
    for row, rule in zip(rows, rules, strict=True):
        number, (low, high) = number_by(rule, row), interval_by(rule, row)
        columns = [
            100.0 * (0.8 <= number / row["classes"] <= 1.2),
            100.0 * (low <= row["classes"] <= high),
            high / low,
            lost(row, number),
        ]
        of_source.setdefault(source_of(row["set"]), []).append(columns)
    return np.mean([np.mean(columns, 0) for columns in of_source.values()], 0).tolist()


def best_rule(rows: Sequence[Row], scores: Iterable[str] = SCORES) -> Rule:
    """Return the rule that loses least accuracy, as a mean over sources."""
    points = {
        rule: summary(rows, [rule] * len(rows))[-1] for rule in itertools.product(scores, SHARES)
    }
    return min(points, key=points.__getitem__)


def report(rows: Sequence[Row]) -> str:
    """Return Markdown tables of the rules and of each task."""
    sources = sorted({source_of(row["set"]) for row in rows})
    rules = {rule for name in SCORES for rule in ((name, 1.0), best_rule(rows, [name]))}
    chosen = {f"{name}, {share:g}": [(name, share)] * len(rows) for name, share in sorted(rules)}
    if len(sources) > 1:
        others = {s: [row for row in rows if source_of(row["set"]) != s] for s in sources}
        left_out = {source: best_rule(of_others) for source, of_others in others.items()}
        chosen["source left out"] = [left_out[source_of(row["set"])] for row in rows]
    name, share = SHIPPED
    chosen[f"**shipped: {name}, {share:g}**"] = [SHIPPED] * len(rows)
    head = ["score, share", "within a fifth, %", "interval holds, %", "its ratio", "points lost"]
    lines = [f"{len(rows)} tasks of {len(sources)} sources", "", table_head(head)]
    for title, per_task in chosen.items():
        close, held, ratio, points = summary(rows, per_task)
        cells = [title, f"{close:.0f}", f"{held:.0f}", f"{ratio:.1f}", f"{points:.1f}"]
        lines.append(table_line(cells))
    head = ["task", "classes", "found", "interval", "points lost", "by Q A^(1/3)"]
    lines += ["", table_head(head)]
    for row in sorted(rows, key=lambda row: (row["set"], row["draw"])):
        number = number_by(SHIPPED, row)
        ends = "{} to {}".format(*interval_by(SHIPPED, row))
        before = number_by(("Q A^(1/3)", 1.0), row)
        cells = [row["set"], row["classes"], number, ends, f"{lost(row, number):.1f}", before]
        lines.append(table_line([str(cell) for cell in cells]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose the rule for the number of clusters.")
    parser.add_argument("--features", type=Path, nargs="+", default=[], help="folders of NPZ files")
    parser.add_argument("--sets", type=lambda text: text.split(","), default=[], help="only these")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True, help="file of rows to resume from")
    Sources.add_flags(parser)
    args = parser.parse_args()
    rows: list[Row] = []
    if args.json.exists():
        rows = [json.loads(line) for line in args.json.read_text().splitlines()]
    done = {(row["set"], row["draw"]) for row in rows}
    for name, draw, load in tasks(args):
        if (name, draw) not in done:
            x, y = load()
            about = {"set": name, "draw": draw, "n": len(x), "classes": int(y.max()) + 1}
            rows.append(json.loads(json.dumps({**about, **ingredients(x, y)})))
            print(name, draw, file=sys.stderr, flush=True)
            with args.json.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(report(rows))


if __name__ == "__main__":
    main()
