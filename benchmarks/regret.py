"""Measure how far each method is behind the best one, over many data sets and random draws.

    pip install evoc igraph leidenalg umap-learn
    python -m benchmarks.regret --features FOLDER --json regret.jsonl   # can resume
    python -m benchmarks.regret --unknown --draws 3 ...                 # also without K
    python -m benchmarks.regret --draws 0 --json regret.jsonl           # only print the tables

A draw is a random four fifths of a set (at most 2,500 rows) or, for `_folder_` sets, some random
classes with uneven sizes. All methods get the same unit-length rows and K; a method's noise is
assigned to the nearest clusters. Regret is the distance to the best other method in the same draw,
in points of a score, negative if the method is ahead. "Refitted" is the consensus with its one
fitted rule (two evenness thresholds that decide which partitions vote) fitted for each family of
sets on all other families. The list of partitions itself was chosen once, on three draws of
these sets.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from benchmarks.peers import METHODS, OURS, installed, warm_up, without_noise
from benchmarks.sets import SETS, Absent, Labelled, Sources, long_tailed
from benchmarks.turns import table_head, table_line
from ssl_kd import MultiHeadClusterer, evaluate
from ssl_kd.graph import form_ensemble
from ssl_kd.graph.ensemble import EVEN, UNEVEN, Kind, kind_of, vote
from ssl_kd.store import nearest_neighbors
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.partition import views

MOST_ROWS = 2500
BOTH = ("digits", "fashion10k", "fashion10k_efficientnet")
TAILED = (*BOTH, "handwritten_mfeat", "usps_small", "cifar10_resnet18_pca50")
OWN = (*BOTH, "cifar_efficientnet", "unequal", "two", "rare")  # from `benchmarks.sets`
FOLDERS = {"cifar_efficientnet": [(3, 90), (10, 400)]}
FOLDERS["fashion10k_efficientnet"] = [(2, 60), (6, 200)]
SCORES = {"acc": "ACC", "nmi": "NMI", "ari": "ARI", "balanced": "balanced ACC"}
CROWD: dict[Kind, str] = {
    "even": "only the voters for even clusters",
    "between": "only peaks and communities",
    "uneven": "only the voters for uneven clusters",
}
UNKNOWN = " without K"  # suffix of a method's name
THRESHOLDS = np.arange(0.86, 0.98, 0.01)
PEERS = set(METHODS) - {OURS}
Row = dict[str, Any]


def family(name: str) -> str:
    """Return the family of a set; its sets are left out together."""
    for images in ("fashion", "cifar"):
        if images in name:
            return images
    return name.split("_lt")[0]


def sets(features: Path | None, sources: Sources) -> Iterator[tuple[str, Labelled]]:
    """Yield the available data sets by name; print the missing ones to stderr."""
    files = sorted(features.glob("*.npz")) if features else []
    makers: dict[str, Callable[[Sources], Labelled]] = {
        file.stem: lambda _, file=file: (np.load(file)["x"], np.load(file)["y"]) for file in files
    }
    for name, make in (makers | {name: SETS[name] for name in OWN}).items():
        try:
            x, y = make(sources)
        except Absent as error:
            print(f"{name} is skipped: {error}", file=sys.stderr)
            continue
        yield name, (x, y)
        if name in TAILED:
            for imbalance in (10, 100):
                yield f"{name}_lt{imbalance}", long_tailed(x, y, imbalance)
        for k, n in FOLDERS.get(name, []):
            yield f"{name}_folder_{k}_{n}", (x, y)


def draw_of(name: str, x: NDArray, y: NDArray, seed: int) -> Labelled:
    """Return a random draw of a set with contiguous class labels."""
    random = np.random.default_rng(seed)
    if "_folder_" in name:
        k, n = map(int, name.split("_")[-2:])
        classes = random.choice(np.unique(y), k, replace=False)
        sizes = np.maximum(4, (n * random.dirichlet(np.full(k, 5.0))).astype(int))
        parts = [
            random.permutation(np.flatnonzero(y == c))[:size]
            for c, size in zip(classes, sizes, strict=True)
        ]
        rows = random.permutation(np.concatenate(parts))
    else:
        rows = random.permutation(len(x))[: min(int(0.8 * len(x)), MOST_ROWS)]
    unit: NDArray = x[rows] / np.maximum(np.linalg.norm(x[rows], axis=1, keepdims=True), 1e-12)
    return unit.astype(np.float32), np.unique(y[rows], return_inverse=True)[1]


def balanced_accuracy(y: NDArray, clusters: NDArray) -> float:
    """Return the mean class recall for the best one-to-one matching of clusters and classes."""
    sizes = np.bincount(y)
    recall = evaluate.contingency(y, clusters)[sizes > 0] / sizes[sizes > 0, None]
    return float(recall[linear_sum_assignment(recall, maximize=True)].sum() / len(recall))


def scores_of(y: NDArray, clusters: NDArray) -> dict[str, float]:
    scores = evaluate.clustering_scores(y, clusters)
    scores["balanced"] = balanced_accuracy(y, clusters)
    return {key: round(100 * (scores[key] or 0.0), 2) for key in SCORES}


def crowd_of(x: NDArray, n_clusters: int) -> dict[str, Any]:
    """Return the votes of the ensemble on unit rows `[n, d]`, and the evenness that selects one."""
    rows = torch.from_numpy(x)
    near = nearest_neighbors(rows, min(20, len(x) - 1))
    projected = Projection.fit(rows, 256)(rows)
    by_metric = views(near, rows.__getitem__, projected, torch.device("cpu"))
    crowd = form_ensemble(*by_metric, n_clusters)
    partitions = {kind: vote(crowd.candidates, kind, n_clusters) for kind in CROWD}
    return {**partitions, "evenness": crowd.evenness}


def without_k(method: str, x: NDArray, seed: int) -> tuple[NDArray, Row]:
    """Return a method's clusters `[n]` without K, and the interval of K that ours reports."""
    if method != OURS:
        return METHODS[method].run(x, None, seed), {}
    clusterer = MultiHeadClusterer(None, random_state=seed).fit(x)
    assert clusterer.number_ is not None
    return clusterer.labels_, {"interval": clusterer.number_.interval}


def run(args: argparse.Namespace, rows: list[Row]) -> None:
    """Measure the missing rows; append each to the file immediately."""
    done = {(row["set"], row["draw"], row["method"]) for row in rows}
    names = installed(METHODS)
    methods = [name for name in names if METHODS[name].takes_k]
    free = [name for name in names if METHODS[name].finds_k] if args.unknown else []
    for name in methods:
        warm_up(name, 5)

    def add(row: Row) -> None:
        rows.append(row)
        line = json.dumps(row)
        print(line, file=sys.stderr, flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(line + "\n")

    every = list(sets(args.features, Sources.of(args)))
    for draw in range(args.draws):
        for name, (x, y) in every:
            if args.sets and name not in args.sets:
                continue
            x, y = draw_of(name, x, y, draw)
            k = int(y.max()) + 1
            about = {"set": name, "draw": draw, "n": len(x), "classes": k}
            for method in methods:
                if (name, draw, method) not in done:
                    began = time.perf_counter()
                    clusters = METHODS[method].run(x, k, draw)
                    seconds = round(time.perf_counter() - began, 2)
                    scores = scores_of(y, without_noise(x, clusters))
                    add({**about, "method": method, "seconds": seconds, **scores})
            if (name, draw, "even") not in done:
                crowd = crowd_of(x, k)
                for part in CROWD:
                    scores = scores_of(y, crowd[part])
                    add({**about, "method": part, "evenness": crowd["evenness"], **scores})
            for method in free:
                if "_lt" in name or "_folder" in name or (name, draw, method + UNKNOWN) in done:
                    continue
                clusters, more = without_k(method, x, draw)
                more["found"] = int(clusters.max()) + 1
                scores = scores_of(y, without_noise(x, clusters))
                add({**about, "method": method + UNKNOWN, **more, **scores})


class Regrets:
    """Regrets of a method against the best peer in each draw, averaged over the draws."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.by_draw: dict[tuple[str, int], dict[str, Row]] = {}
        for row in rows:
            self.by_draw.setdefault((row["set"], row["draw"]), {})[row["method"]] = row
        complete = {OURS, *CROWD}
        self.by_draw = {key: d for key, d in self.by_draw.items() if complete <= d.keys()}
        self.sets = sorted({name for name, _ in self.by_draw})

    def of(self, method: str | Callable[[str, dict[str, Row]], Row], key: str) -> dict[str, float]:
        """Return the regret per set of a method: its name, or a function of set name and draw."""
        regrets: dict[str, list[float]] = {}
        for (name, _), draw in self.by_draw.items():
            row = draw[method] if isinstance(method, str) else method(name, draw)
            peers = [draw[m][key] for m in PEERS & draw.keys() if m != method]
            regrets.setdefault(name, []).append(max(peers) - row[key])
        return {name: float(np.mean(regrets[name])) for name in self.sets}

    def left_out(self) -> Callable[[str, dict[str, Row]], Row]:
        """Return the rule with the thresholds of lowest mean ACC regret on other families."""
        pairs = [(a, b) for a in THRESHOLDS for b in THRESHOLDS if a <= b]
        table = {p: self.of(lambda _, draw, p=p: row_of_rule(draw, *p), "acc") for p in pairs}
        best = {}
        for left in {family(name) for name in self.sets}:
            others = [name for name in self.sets if family(name) != left]
            best[left] = (UNEVEN, EVEN)  # if there are no other families
            if others:
                best[left] = min(table, key=lambda t: np.mean([table[t][name] for name in others]))
        return lambda name, draw: row_of_rule(draw, *best[family(name)])


def row_of_rule(draw: dict[str, Row], uneven: float, even: float) -> Row:
    row = draw["even"]
    return draw[kind_of(row["evenness"], row["classes"], uneven, even)]


def numbers(rows: Sequence[Row]) -> list[str]:
    """Return tables of the cluster counts found without K."""
    free = [row for row in rows if row["method"].endswith(UNKNOWN)]
    with_k = {(row["set"], row["draw"]): row["acc"] for row in rows if row["method"] == OURS}
    methods = [name for name in METHODS if any(row["method"] == name + UNKNOWN for row in free)]
    if not methods:
        return []
    shown = [METHODS[name].title for name in methods]
    lines = ["", table_head(["set", "classes", *shown])]
    for name in sorted({row["set"] for row in free}):
        of_set = [row for row in free if row["set"] == name]
        found = [[r["found"] for r in of_set if r["method"] == m + UNKNOWN] for m in methods]
        counts = [", ".join(map(str, numbers)) for numbers in found]
        lines.append(table_line([name, str(of_set[0]["classes"]), *counts]))
    head = ["method", "within 20 %", "draws", "mean points behind known K", "worst set"]
    lines += ["", table_head(head)]
    for method in methods:
        mine = [row for row in free if row["method"] == method + UNKNOWN]
        close = sum(0.8 <= row["found"] / row["classes"] <= 1.2 for row in mine)
        cells = [METHODS[method].title, str(close), str(len(mine)), "", ""]
        if method == OURS:
            lost = [(row["set"], with_k[row["set"], row["draw"]] - row["acc"]) for row in mine]
            names = dict.fromkeys(name for name, _ in lost)
            means = {name: fmean(points for of, points in lost if of == name) for name in names}
            worst = max(means, key=means.__getitem__)
            cells[3:] = [f"{fmean(means.values()):.1f}", f"{means[worst]:.1f} ({worst})"]
        lines.append(table_line(cells))
    mine = [row for row in free if "interval" in row]
    held = sum(row["interval"][0] <= row["classes"] <= row["interval"][1] for row in mine)
    return [*lines, "", f"The interval contains the true K in {held} of {len(mine)} draws."]


def report(rows: Sequence[Row]) -> str:
    """Return Markdown tables of the methods over all sets and of each set, worst first."""
    regrets = Regrets(rows)
    titles: dict[str, Any] = {METHODS[name].title: name for name in METHODS}
    present = {m for draw in regrets.by_draw.values() for m in draw}
    methods = {title: name for title, name in titles.items() if name in present}
    methods |= {
        "consensus, rule refitted": regrets.left_out(),
        f"consensus, rule as shipped ({UNEVEN}, {EVEN})": lambda _, d: row_of_rule(d, UNEVEN, EVEN),
        **{title: name for name, title in CROWD.items()},
    }
    head = ["method", "mean regret", "worst", "median", "mean, NMI", "mean, ARI", "median seconds"]
    lines = [f"{len(regrets.sets)} sets, {len(regrets.by_draw)} draws", "", table_head(head)]
    for title, method in methods.items():
        acc = regrets.of(method, "acc")
        others = [np.mean(list(regrets.of(method, key).values())) for key in ("nmi", "ari")]
        worst = max(acc, key=acc.__getitem__)
        values = list(acc.values())
        cells = [title, f"{np.mean(values):.1f}", f"{acc[worst]:.1f} ({worst})"]
        cells += [f"{np.median(values):.1f}", *(f"{value:.1f}" for value in others)]
        timed = [d[method] for d in regrets.by_draw.values() if isinstance(method, str)]
        seconds = [row["seconds"] for row in timed if "seconds" in row]
        cells.append(f"{np.median(seconds):.1f}" if seconds else "")
        lines.append(table_line(cells))
    head = ["set", "best peer", "its ACC", "ours", "rule refitted", "ours, balanced ACC"]
    lines += ["", table_head(head)]
    ours, balanced = regrets.of(OURS, "acc"), regrets.of(OURS, "balanced")
    left = regrets.of(regrets.left_out(), "acc")
    for name in sorted(regrets.sets, key=lambda name: -ours[name]):
        draws = [draw for (of, _), draw in regrets.by_draw.items() if of == name]
        peers = [m for m in METHODS if m in PEERS & draws[0].keys()]
        means = {m: np.mean([draw[m]["acc"] for draw in draws]) for m in peers}
        peer = max(means, key=means.__getitem__)
        behind = [f"{-of[name]:+.1f}" for of in (ours, left, balanced)]
        lines.append(table_line([name, METHODS[peer].title, f"{means[peer]:.1f}", *behind]))
    return "\n".join(lines + numbers(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure regret over many data sets.")
    parser.add_argument("--features", type=Path, help="folder of NAME.npz files with x and y")
    parser.add_argument("--sets", type=lambda text: text.split(","), help="only these")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--unknown", action="store_true", help="also measure without K")
    parser.add_argument("--json", type=Path, help="file of rows to resume from and append to")
    Sources.add_flags(parser)
    args = parser.parse_args()
    rows: list[Row] = []
    if args.json and args.json.exists():
        rows = [json.loads(line) for line in args.json.read_text().splitlines()]
    if args.draws:
        run(args, rows)
    print(report(rows))


if __name__ == "__main__":
    main()
