"""Compare our default with the published scores of CLUBench, 24 algorithms with many settings.

    git clone https://github.com/xiaofeng-github/CLUBench
    python -m benchmarks.clubench CLUBench                 # sets on the shelf `choose`
    python -m benchmarks.clubench CLUBench --shelf report  # or `both`

Runs on the data sets in that repository and on four others that scikit-learn contains, with its
preprocessing: all rows, each column scaled to mean 0 and deviation 1, the number of clusters given.
`mnist64` is the images of 0 to 5 in `load_digits` (1,083 here and 1,082 there); of
`letter_recognition` there are 10,000 rows here and 9,992 there.

A published algorithm has two scores: with a fixed setting, which is the one with the highest mean
accuracy on all 131 sets, and with the setting that has the highest accuracy on each set, which
takes the labels of that set. "k-means here" is scikit-learn's with ten starts, to check the
preprocessing against the published k-means.

References:
    CLUBench: A Clustering Benchmark, KDD 2026, arXiv 2605.29933.
"""

from __future__ import annotations

import argparse
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine

from benchmarks.peers import METHODS, OURS
from benchmarks.regret import read_features, standardized
from benchmarks.sets import Labeled, Shelf, shelf_of
from benchmarks.turns import table_head, table_line, write_section
from ssl_kd.vision import evaluate

SCIKIT_LEARN: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "iris": ("iris", partial(load_iris, return_X_y=True)),
    "wine": ("wine", partial(load_wine, return_X_y=True)),
    "breast_cancer_wisconsin_prognostic": (
        "breast_cancer",
        partial(load_breast_cancer, return_X_y=True),
    ),
    "mnist64": ("digits", partial(load_digits, n_class=6, return_X_y=True)),
}
"""Maps a name in CLUBench to scikit-learn's name, which decides the shelf, and a loader."""

FILES = {"Letter": "letter_recognition"}  # files that have another name in the list of sets
RUN_HERE = {OURS: "**ssl_kd**", "kmeans": "k-means here"}  # by key of `benchmarks.peers.METHODS`
WITHOUT_K = ("dbscan", "meanshift")  # algorithms that are not given the number of clusters


class _Plain(pickle.Unpickler):
    """Load numbers, texts, lists and dicts; refuse everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"expected numbers alone, found {module}.{name}")


class Published:
    """The published accuracies, in percent.

    Args:
        folder: A checkout of the repository.

    Raises:
        FileNotFoundError: If the folder is no such checkout.
        ValueError: If an algorithm does not have one score for each set.
    """

    def __init__(self, folder: Path) -> None:
        config = folder / "CLUBench" / "configs.py"
        files = sorted((folder / "performance_matrix" / "all_hpcs").glob("*.p"))
        if not config.exists() or not files:
            raise FileNotFoundError(
                f"{folder} has no CLUBench/configs.py or no performance_matrix/all_hpcs/*.p: "
                "clone https://github.com/xiaofeng-github/CLUBench and give its path"
            )
        self.names = re.findall(r"^ *'(.+)\.npz'", config.read_text(encoding="utf-8"), re.M)
        self.accuracy: dict[str, NDArray] = {}  # algorithm -> [setting, set]
        for file in files:
            if file.stem in WITHOUT_K:
                continue
            with file.open("rb") as opened:
                table = np.array(list(_Plain(opened).load()["acc"].values()))
            if table.shape[1:] != (len(self.names),):
                raise ValueError(f"{file} has {table.shape[1:]} sets, expected {len(self.names)}")
            self.accuracy[file.stem] = 100 * table

    def fixed(self, algorithm: str) -> NDArray:
        """Return the scores `[set]` of the setting with the highest mean over all sets."""
        table = self.accuracy[algorithm]
        return table[table.mean(1).argmax()]

    def with_labels(self, algorithm: str) -> NDArray:
        """Return the scores `[set]` of the best setting of each set."""
        return self.accuracy[algorithm].max(0)


def sets(folder: Path, names: Iterable[str], shelf: str) -> dict[str, Labeled]:
    """Return the available sets of a shelf, or of `both`, by their names in CLUBench.

    Raises:
        ValueError: If a set is not in `names`, the sets with published scores.
    """
    loaders = dict(SCIKIT_LEARN)
    for file in sorted((folder / "CLUBench" / "datasets").glob("*.npz")):
        name = FILES.get(file.stem, file.stem)
        loaders[name] = (file.stem.lower(), partial(read_features, file))
    if missing := sorted(loaders.keys() - set(names)):
        raise ValueError(
            f"CLUBench has no scores of {', '.join(missing)}: add their names to FILES"
        )
    chosen = {}
    for name, (source, load) in loaders.items():
        if shelf in (shelf_of(source), "both"):
            x, y = load()
            x = standardized(np.asarray(x, np.float32))
            chosen[name] = (x, np.unique(y, return_inverse=True)[1])
    return chosen


def run(every: Mapping[str, Labeled], seeds: int) -> dict[str, dict[str, float]]:
    """Return the mean accuracy in percent of each method run here, by set."""
    accuracy: dict[str, dict[str, float]] = {method: {} for method in RUN_HERE}
    for name, (x, y) in every.items():
        for method, of_sets in accuracy.items():
            runs = [METHODS[method].run(x, int(y.max()) + 1, seed) for seed in range(seeds)]
            of_sets[name] = 100 * fmean(evaluate.accuracy(y, clusters) for clusters in runs)
            print(f"{name}: {method} {of_sets[name]:.1f}", file=sys.stderr, flush=True)
    return accuracy


def report(
    published: Published, here: Mapping[str, Mapping[str, float]], every: Mapping[str, Labeled]
) -> str:
    """Return Markdown tables: the mean over these sets, and each set, the largest losses first."""
    places = [published.names.index(name) for name in every]
    fixed = {name: published.fixed(name)[places] for name in published.accuracy}
    labels = {name: published.with_labels(name)[places] for name in published.accuracy}
    best = max(published.accuracy, key=lambda name: published.fixed(name).mean())
    ours = np.array([here[OURS][name] for name in every])
    any_best = np.max([*labels.values()], 0)

    lines = [table_head(["method", "mean ACC, fixed setting", "mean ACC, setting by labels"])]
    means = [(RUN_HERE[method], fmean(of.values()), None) for method, of in here.items()]
    means += [(n.replace("_", " "), fixed[n].mean(), labels[n].mean()) for n in fixed]
    for title, with_fixed, with_labels in sorted(means, key=lambda row: -row[1]):
        chosen = "" if with_labels is None else f"{with_labels:.1f}"
        lines.append(table_line([title, f"{with_fixed:.1f}", chosen]))
    lines.append(table_line(["best of all published for each set", "", f"{any_best.mean():.1f}"]))

    columns = ["set", "rows", "columns", "classes", *RUN_HERE.values()]
    title = best.replace("_", " ")
    columns += [f"{title}, fixed", f"{title}, by labels", "best of all, by labels"]
    lines += [
        "",
        "Each set, the largest losses to the fixed setting first:",
        "",
        table_head(columns),
    ]
    names = list(every)
    for place in np.argsort(ours - fixed[best]):
        name = names[place]
        x, y = every[name]
        cells = [name, f"{len(x):,}", str(x.shape[1]), str(int(y.max()) + 1)]
        numbers = [here[method][name] for method in RUN_HERE]
        numbers += [of[place] for of in (fixed[best], labels[best], any_best)]
        lines.append(table_line([*cells, *(f"{number:.1f}" for number in numbers)]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare ours with the scores of CLUBench.")
    parser.add_argument("folder", type=Path, help="a checkout of xiaofeng-github/CLUBench")
    parser.add_argument("--shelf", choices=[*get_args(Shelf), "both"], default="choose")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the tables to docs/results.md")
    args = parser.parse_args()
    published = Published(args.folder)
    every = sets(args.folder, published.names, args.shelf)
    shelf = "both shelves" if args.shelf == "both" else f"the shelf `{args.shelf}`"
    text = f"Sets of {shelf}: {len(every)}.\n\n"
    text += report(published, run(every, args.seeds), every)
    if args.write:
        write_section("clubench", text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
