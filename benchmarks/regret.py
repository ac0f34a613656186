"""Measure how far each method is behind the best one, over many data sets and random draws.

    pip install evoc igraph leidenalg umap-learn
    python -m benchmarks.regret --shelf choose --features FOLDER --json choose.jsonl  # can resume
    python -m benchmarks.regret --shelf choose --kind tails --features FOLDER
    python -m benchmarks.regret --shelf choose --variants method=heads --features FOLDER
    python -m benchmarks.regret --shelf choose --unknown --draws 3 --features FOLDER
    python -m benchmarks.regret --shelf report --json report.jsonl --draws 0  # only print

The shelf `choose` is for developing a method, `report` for the published tables
(`benchmarks.sets`). The kinds of sets have separate tables:

- natural: sets as they were collected
- tails: subsets of these, in which class sizes fall by a constant factor
- folders: a few random classes of these, with uneven sizes
- tables: small tables with few columns, each scaled to mean 0 and deviation 1
- synthetic: random groups of known shape

A draw is a random four fifths of a set, at most 2,500 rows. All methods get the same rows and K;
except for tables, rows have unit length. A method's noise is assigned to the nearest clusters.
Regret is the distance to the best method in the same draw, in points of a score. Labels are used
for scoring only.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_breast_cancer, load_iris, load_wine

from benchmarks.peers import METHODS, OURS, Method, installed, variant, warm_up, without_noise
from benchmarks.sets import SETS, Absent, Labeled, Shelf, Sources, long_tailed, shelf_of
from benchmarks.turns import PAGE, README, table_head, table_line, write_section
from ssl_kd import MultiHeadClusterer
from ssl_kd.vision import evaluate

Kind = Literal["natural", "tails", "folders", "tables", "synthetic"]
MOST_ROWS = 2500
MOST_OF_A_TABLE = (1000, 50)  # rows and columns
NATURAL = ("digits", "fashion10k", "fashion10k_efficientnet", "cifar_efficientnet")
SYNTHETIC = ("unequal", "two", "rare")
TABLES: dict[str, Callable[..., Any]] = {
    "iris": load_iris,
    "wine": load_wine,
    "breast_cancer": load_breast_cancer,
}
TAILED = (*NATURAL[:3], "handwritten_mfeat", "usps_small", "cifar10_resnet18_pca50")
FOLDERS = {
    "cifar_efficientnet": [(3, 90), (10, 400)],
    "fashion10k_efficientnet": [(2, 60), (6, 200)],
}  # numbers of classes and rows
SCORES = ("acc", "nmi", "ari", "balanced")  # balanced: balanced accuracy
UNKNOWN = " without K"  # suffix of a method's name
Row = dict[str, Any]


def read_features(file: Path) -> Labeled:
    """Read `x` and `y` from an NPZ file."""
    with np.load(file) as arrays:
        return arrays["x"], arrays["y"]


def loaders_of(
    kind: Kind, features: Iterable[Path], sources: Sources
) -> dict[str, Callable[[], Labeled]]:
    """Return a loader for each set of a kind, or for the set that it is cut from.

    Raises:
        ValueError: If two files of the folders `features` have the same name.
    """
    if kind == "synthetic":
        return {name: partial(SETS[name], sources) for name in SYNTHETIC}
    loaders: dict[str, Callable[[], Labeled]] = {}
    if kind == "tables":
        loaders |= {name: partial(load, return_X_y=True) for name, load in TABLES.items()}
    else:
        loaders |= {name: partial(SETS[name], sources) for name in NATURAL}
    files = {file: file.stem.lower() for folder in features for file in folder.glob("*.npz")}
    for file, name in sorted(files.items(), key=lambda item: item[1]):
        if name in loaders:
            raise ValueError(f"two sets have the name {name}: rename {file}")
        loaders[name] = partial(read_features, file)
    cut = {"tails": TAILED, "folders": FOLDERS}.get(kind, loaders)
    return {name: load for name, load in loaders.items() if name in cut}


def sets(
    kind: Kind, shelf: Shelf, features: Iterable[Path], sources: Sources, only: Sequence[str] = ()
) -> Iterator[tuple[str, Labeled]]:
    """Yield the available sets of a kind and shelf by name; print the missing ones to stderr.

    `only` lists the sets, or the sets that they are cut from; no names mean all.

    Raises:
        ValueError: If a name in `only` is not on this shelf.
    """
    loaders = loaders_of(kind, features, sources)
    loaders = {name: load for name, load in loaders.items() if shelf_of(name) == shelf}
    if unknown := sorted(set(only) - loaders.keys()):
        raise ValueError(
            f"no sets of kind {kind} on the shelf {shelf} have the names {', '.join(unknown)}; "
            f"expected some of {', '.join(loaders)}: change --sets, or add a folder to --features"
        )
    for name in only or loaders:
        try:
            x, y = loaders[name]()
        except Absent as error:
            print(f"{name} is skipped: {error}", file=sys.stderr)
            continue
        if kind == "tables" and any(np.array(x.shape) > MOST_OF_A_TABLE):
            size = "a small table has at most {} rows and {} columns".format(*MOST_OF_A_TABLE)
            print(f"{name} is skipped: {len(x)} x {x.shape[1]}; {size}", file=sys.stderr)
        elif kind == "tails":
            for imbalance in (10, 100):
                yield f"{name}_lt{imbalance}", long_tailed(x, y, imbalance)
        elif kind == "folders":
            for k, n in FOLDERS[name]:
                yield f"{name}_folder_{k}_{n}", (x, y)
        else:
            yield name, (x, y)


def standardized(x: NDArray) -> NDArray:
    """Return `x` `[n, d]` with columns of mean 0 and deviation 1; constant columns become 0."""
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


def _rows_of_folder(name: str, y: NDArray, random: np.random.Generator) -> NDArray:
    k, n = map(int, name.split("_")[-2:])
    classes = random.choice(np.unique(y), k, replace=False)
    sizes = np.maximum(4, (n * random.dirichlet(np.full(k, 5.0))).astype(int))
    parts = [
        random.permutation(np.flatnonzero(y == c))[:size]
        for c, size in zip(classes, sizes, strict=True)
    ]
    return random.permutation(np.concatenate(parts))


def draw_of(kind: Kind, name: str, x: NDArray, y: NDArray, seed: int) -> Labeled:
    """Return a random draw of a set, scaled, with contiguous class labels."""
    random = np.random.default_rng(seed)
    if kind == "folders":
        rows = _rows_of_folder(name, y, random)
    else:
        rows = random.permutation(len(x))[: min(int(0.8 * len(x)), MOST_ROWS)]
    drawn = x[rows].astype(np.float64)
    if kind == "tables":
        drawn = standardized(drawn)
    else:
        drawn /= np.maximum(np.linalg.norm(drawn, axis=1, keepdims=True), 1e-12)
    return drawn.astype(np.float32), np.unique(y[rows], return_inverse=True)[1]


def balanced_accuracy(y: NDArray, clusters: NDArray) -> float:
    """Return the mean class recall for the best one-to-one matching of clusters and classes."""
    sizes = np.bincount(y)
    recall = evaluate.contingency(y, clusters)[sizes > 0] / sizes[sizes > 0, None]
    return float(recall[linear_sum_assignment(recall, maximize=True)].sum() / len(recall))


def scores_of(y: NDArray, clusters: NDArray) -> dict[str, float]:
    """Return the scores of clusters `[n]` for labels `y` `[n]`, in percent."""
    scores = evaluate.clustering_scores(y, clusters)
    scores["balanced"] = balanced_accuracy(y, clusters)
    return {key: round(100 * (scores[key] or 0.0), 2) for key in SCORES}


def without_k(method: str, x: NDArray, seed: int) -> tuple[NDArray, Row]:
    """Return a method's clusters `[n]` without K, and the interval of K that ours reports."""
    if method != OURS:
        return METHODS[method].run(x, None, seed), {}
    clusterer = MultiHeadClusterer(None, random_state=seed).fit(x)
    assert clusterer.number_ is not None
    return clusterer.labels_, {"interval": clusterer.number_.interval}


def run(args: argparse.Namespace, methods: Mapping[str, Method], rows: list[Row]) -> None:
    """Measure the missing rows; append each to the file immediately."""
    done = {(row["kind"], row["set"], row["draw"], row["method"]) for row in rows}
    methods = installed(methods)
    given_k = [name for name, method in methods.items() if method.takes_k]
    finding_k = [name for name, method in methods.items() if method.finds_k and args.unknown]
    for name in given_k:
        warm_up(methods[name])

    def add(row: Row) -> None:
        rows.append(row)
        line = json.dumps(row)
        print(line, file=sys.stderr, flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(line + "\n")

    every = list(sets(args.kind, args.shelf, args.features, Sources.of(args), args.sets))
    for draw in range(args.draws):
        for name, (x, y) in every:
            x, y = draw_of(args.kind, name, x, y, draw)
            k = int(y.max()) + 1
            about = {"kind": args.kind, "set": name, "draw": draw, "n": len(x), "classes": k}
            about["constant"] = round(100 * np.bincount(y).max() / len(y), 2)  # ACC of one cluster
            for method in given_k:
                if (args.kind, name, draw, method) not in done:
                    began = time.perf_counter()
                    clusters = methods[method].run(x, k, draw)
                    seconds = round(time.perf_counter() - began, 2)
                    scores = scores_of(y, without_noise(x, clusters))
                    add({**about, "method": method, "seconds": seconds, **scores})
            for method in finding_k:
                if (args.kind, name, draw, method + UNKNOWN) not in done:
                    clusters, more = without_k(method, x, draw)
                    more["found"] = int(clusters.max()) + 1
                    scores = scores_of(y, without_noise(x, clusters))
                    add({**about, "method": method + UNKNOWN, **more, **scores})


class Scores:
    """Scores of the methods that are given K, and their regrets, averaged over the draws of a set.

    A draw counts if all these methods have run on it.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        draws: dict[tuple[str, int], dict[str, Row]] = {}
        for row in rows:
            if not row["method"].endswith(UNKNOWN):
                draws.setdefault((row["set"], row["draw"]), {})[row["method"]] = row
        self.methods = list(dict.fromkeys(method for draw in draws.values() for method in draw))
        self.n_incomplete = sum(len(draw) < len(self.methods) for draw in draws.values())
        self.draws = {key: draw for key, draw in draws.items() if len(draw) == len(self.methods)}
        self.sets = sorted({name for name, _ in self.draws})

    def _by_set(self, value: Callable[[dict[str, Row]], float]) -> dict[str, float]:
        return {
            name: fmean(value(draw) for (of, _), draw in self.draws.items() if of == name)
            for name in self.sets
        }

    def mean(self, method: str, key: str) -> dict[str, float]:
        """Return the mean score of a method for each set."""
        return self._by_set(lambda draw: draw[method][key])

    def regret(self, method: str, key: str = "acc") -> dict[str, float]:
        """Return the mean regret of a method for each set, not negative.

        The best of a draw is the best of the other packages, our default and the method itself;
        other variants of ours do not count.
        """
        rivals = [name for name in self.methods if name in METHODS or name == method]
        return self._by_set(
            lambda draw: max(draw[name][key] for name in rivals) - draw[method][key]
        )


def title_of(method: str) -> str:
    return METHODS[method].title if method in METHODS else f"**{method}**"


def table_of_methods(scores: Scores) -> list[str]:
    """Return a table of the regrets of each method over all sets, the lowest mean first."""
    columns = ["method", "mean regret", "median", "worst", "mean, NMI", "mean, ARI"]
    lines = [table_head([*columns, "best on", "median seconds"])]
    regrets = {method: scores.regret(method) for method in scores.methods}
    means = {method: scores.mean(method, "acc") for method in scores.methods}
    for method in sorted(regrets, key=lambda method: fmean(regrets[method].values())):
        values = regrets[method]
        worst = max(values, key=values.__getitem__)
        best_on = sum(
            means[method][name] == max(of[name] for of in means.values()) for name in scores.sets
        )
        seconds = [draw[method]["seconds"] for draw in scores.draws.values()]
        cells = [
            title_of(method),
            f"{fmean(values.values()):.1f}",
            f"{median(values.values()):.1f}",
        ]
        cells.append(f"{values[worst]:.1f} ({worst})")
        cells += [f"{fmean(scores.regret(method, key).values()):.1f}" for key in ("nmi", "ari")]
        lines.append(table_line([*cells, str(best_on), f"{median(seconds):.1f}"]))
    return lines


def best_peer(scores: Scores, name: str) -> tuple[str, float]:
    """Return the other method with the highest mean accuracy on a set, and that accuracy."""
    means = {m: scores.mean(m, "acc")[name] for m in scores.methods if m in METHODS and m != OURS}
    peer = max(means, key=means.__getitem__)
    return peer, means[peer]


def table_of_sets(scores: Scores) -> list[str]:
    """Return a table of our scores and those of the best peer on each set, losses first."""
    rows = []
    for name in scores.sets:
        about = next(draw[OURS] for (of, _), draw in scores.draws.items() if of == name)
        peer, accuracy = best_peer(scores, name)
        ahead = {key: scores.mean(OURS, key)[name] - scores.mean(peer, key)[name] for key in SCORES}
        cells = [name, f"{about['n']:,}", str(about["classes"]), f"{about['constant']:.0f}"]
        cells += [title_of(peer), f"{accuracy:.1f}", f"{accuracy + ahead['acc']:.1f}"]
        cells += [f"{ahead[key]:+.1f}" for key in ("acc", "nmi", "balanced")]
        rows.append((ahead["acc"], cells))
    columns = ["set", "rows", "classes", "one cluster", "best peer", "its ACC", "our ACC"]
    head = table_head([*columns, "ahead", "ahead, NMI", "ahead, balanced ACC"])
    return [head, *(table_line(cells) for _, cells in sorted(rows, key=lambda row: row[0]))]


def ranks(values: Mapping[str, float], method: str) -> str:
    return f"{1 + sum(v < values[method] for v in values.values())} of {len(values)}"


def claim(scores: Scores) -> str:
    """Return one sentence about our default: its regret, ranks, and lead over the next method."""
    regrets = {m: scores.regret(m) for m in scores.methods if m in METHODS}
    means = {method: fmean(values.values()) for method, values in regrets.items()}
    medians = {method: median(values.values()) for method, values in regrets.items()}
    worst = max(regrets[OURS], key=regrets[OURS].__getitem__)
    peer = min(means.keys() - {OURS}, key=lambda method: (means[method], method))
    ahead = np.array([regrets[peer][name] - regrets[OURS][name] for name in scores.sets])
    resampled = np.random.default_rng(0).choice(ahead, (10_000, len(ahead))).mean(1)
    low, high = np.percentile(resampled, [5, 95])
    return (
        f"On average, ssl_kd is {means[OURS]:.1f} points of accuracy behind the best method of a "
        f"set, rank {ranks(means, OURS)} (median {medians[OURS]:.1f}, rank {ranks(medians, OURS)}; "
        f"worst {regrets[OURS][worst]:.1f}, {worst}), and its mean lead over "
        f"{METHODS[peer].title}, the best other method, is {ahead.mean():.1f} "
        f"(90 % bootstrap interval over sets: {low:.1f} to {high:.1f})."
    )


def short_table(scores: Scores) -> list[str]:
    """Return the table of the README: the regrets of each method, the lowest mean first."""
    regrets = {m: list(scores.regret(m).values()) for m in scores.methods if m in METHODS}
    lines = [table_head(["method", "mean", "median", "worst"])]
    for method in sorted(regrets, key=lambda method: fmean(regrets[method])):
        values = regrets[method]
        numbers = (fmean(values), median(values), max(values))
        lines.append(table_line([METHODS[method].title, *(f"{v:.1f}" for v in numbers)]))
    return lines


def tables_without_k(rows: Sequence[Row]) -> list[str]:
    """Return tables of the cluster counts found without K."""
    free = [row for row in rows if row["method"].endswith(UNKNOWN)]
    with_k = {(row["set"], row["draw"]): row["acc"] for row in rows if row["method"] == OURS}
    methods = [name for name in METHODS if any(row["method"] == name + UNKNOWN for row in free)]
    if not methods:
        return []
    shown = [METHODS[name].title for name in methods]
    lines = [table_head(["set", "classes", *shown, "our intervals"])]
    for name in sorted({row["set"] for row in free}):
        of_set = [row for row in free if row["set"] == name]
        found = [[r["found"] for r in of_set if r["method"] == m + UNKNOWN] for m in methods]
        counts = [", ".join(map(str, numbers)) for numbers in found]
        ends = ["{} to {}".format(*row["interval"]) for row in of_set if "interval" in row]
        lines.append(table_line([name, str(of_set[0]["classes"]), *counts, ", ".join(ends)]))
    columns = ["method", "within 20 %", "draws", "mean points behind known K", "worst set"]
    lines += ["", table_head(columns)]
    for method in methods:
        mine = [row for row in free if row["method"] == method + UNKNOWN]
        close = sum(0.8 <= row["found"] / row["classes"] <= 1.2 for row in mine)
        cells = [METHODS[method].title, str(close), str(len(mine)), "", ""]
        lost = [
            (row["set"], with_k[row["set"], row["draw"]] - row["acc"])
            for row in mine
            if method == OURS and (row["set"], row["draw"]) in with_k
        ]
        if lost:
            names = dict.fromkeys(name for name, _ in lost)
            means = {name: fmean(points for of, points in lost if of == name) for name in names}
            worst = max(means, key=means.__getitem__)
            cells[3:] = [f"{fmean(means.values()):.1f}", f"{means[worst]:.1f} ({worst})"]
        lines.append(table_line(cells))
    mine = [row for row in free if "interval" in row]
    if not mine:
        return lines
    held = sum(row["interval"][0] <= row["classes"] <= row["interval"][1] for row in mine)
    narrow = sum(row["interval"][1] <= 3 * row["interval"][0] for row in mine)
    text = f"The interval contains the true K in {held} of {len(mine)} draws"
    return [*lines, "", f"{text}, and its ends differ by a factor of at most 3 in {narrow}."]


def origin(shelf: Shelf, rows: Sequence[Row]) -> str:
    """Return a sentence that says what the rows were measured on."""
    n_sets, n_draws = len({row["set"] for row in rows}), len({row["draw"] for row in rows})
    text = f"Shelf `{shelf}`, sets: {n_sets}, draws of each: {n_draws}. "
    if shelf == "report":
        return text + "Nothing was chosen by looking at results on these sets."
    return text + "The method was chosen on these sets: expect larger regrets on others."


def report(kind: Kind, shelf: Shelf, rows: Sequence[Row]) -> dict[str, str]:
    """Return Markdown by name of its section: a kind's tables; `unknown` without K; `readme`.

    The natural sets of the shelf `choose` have one table of methods, the section `choose`.
    """
    sections = {}
    scores = Scores(rows)
    if scores.sets:
        lines = [origin(shelf, [draw[m] for draw in scores.draws.values() for m in draw])]
        if scores.n_incomplete:
            lines[0] += (
                f" Draws left out because not every method ran on them: {scores.n_incomplete}."
            )
        lines += ["", *table_of_methods(scores)]
        if (kind, shelf) == ("natural", "choose"):
            return {"choose": "\n".join(lines)}
        if OURS in scores.methods and len(scores.methods) > 1:
            lines += ["", "Each set, the largest losses first:", "", *table_of_sets(scores)]
        if OURS in scores.methods and len(scores.methods) > 1 and kind == "natural":
            text = textwrap.fill(f"{lines[0]} {claim(scores)}", 110, break_on_hyphens=False)
            sections["readme"] = "\n".join([text, "", *short_table(scores)])
        sections[kind] = "\n".join(lines)
    if lines := tables_without_k(rows):
        free = [row for row in rows if row["method"].endswith(UNKNOWN)]
        sections["unknown"] = "\n".join([origin(shelf, free), "", *lines])
    return sections


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure regret over many data sets.")
    parser.add_argument("--shelf", choices=get_args(Shelf), required=True)
    parser.add_argument("--kind", choices=get_args(Kind), default="natural")
    parser.add_argument(
        "--features", type=Path, nargs="+", default=[], help="folders of NAME.npz with x and y"
    )
    split = {"type": lambda text: text.split(","), "default": []}
    parser.add_argument("--sets", help="only these, and what is cut from them: NAME,NAME", **split)
    parser.add_argument("--methods", help=f"only these of {','.join(METHODS)}", **split)
    parser.add_argument(
        "--variants", nargs="+", default=[], help="ours with other settings: method=heads,n_heads=9"
    )
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--unknown", action="store_true", help="also measure without K")
    parser.add_argument("--json", type=Path, help="file of rows to resume from and append to")
    parser.add_argument(
        "--write", action="store_true", help="write the tables into README.md and docs/results.md"
    )
    Sources.add_flags(parser)
    args = parser.parse_args()
    if args.unknown and args.kind != "natural":
        parser.error("--unknown is for --kind natural alone: leave one of them out")
    chosen = {name: METHODS[name] for name in args.methods or METHODS}
    chosen |= {f"{OURS}, {settings}": variant(settings) for settings in args.variants}
    rows: list[Row] = []
    if args.json and args.json.exists():
        rows = [json.loads(line) for line in args.json.read_text().splitlines()]
    if args.draws:
        run(args, chosen, rows)
    rows = [
        row
        for row in rows
        if row["method"].removesuffix(UNKNOWN) in chosen
        and (row["kind"], shelf_of(row["set"])) == (args.kind, args.shelf)
    ]
    sections = report(args.kind, args.shelf, rows)
    for name, text in sections.items():
        if args.write:
            write_section(name, text + "\n", README if name == "readme" else PAGE)
        else:
            print(f"## {name}\n\n{text}\n")


if __name__ == "__main__":
    main()
