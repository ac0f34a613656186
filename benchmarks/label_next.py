"""What a linear probe gains by labelling the samples that are asked for, not random ones.

    python -m benchmarks.label_next --data_dir data --cifar FOLDER
    python -m benchmarks.label_next --run runs/latest
    pip install --target peers --no-deps scikit-activeml makefun
    PYTHONPATH=peers python -m benchmarks.label_next --cifar FOLDER --budgets 20,100 --seeds 5

Each seed draws four fifths of a set, to choose from, and random samples of those. The probe is a
logistic regression of standardised embeddings, judged on all that were not labelled; so are the
votes of the 5 nearest labelled samples. Peers are scikit-activeml's, as they come, on rows of
length 1; they are left out where it is not installed. `chosen` are the sets that settings were
chosen on, `judged` those that were looked at once, afterwards.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, normalize

from benchmarks.curate import stored
from benchmarks.quality import _line
from benchmarks.sets import SETS, Absent, Labelled, Sources, _embedded, loaded, long_tailed
from ssl_kd import Run
from ssl_kd.curate import label_next
from ssl_kd.datasets import ImageDataset, open_dataset
from ssl_kd.datasets.named import Split

SHARE, FIRST, THEN, PEERS = 0.8, 20, 80, ("TypiClust", "ProbCover", "MaxHerding")
Made = Callable[[Sources], Labelled]


def _rows(of: str, rows: slice, imbalance: float = 1.0) -> Made:
    """Some rows of a set, with a long tail where it is asked for."""

    def made(sources: Sources) -> Labelled:
        x, y = SETS[of](sources)
        return long_tailed(x[rows], y[rows], imbalance) if imbalance > 1 else (x[rows], y[rows])

    return made


def _cifar(sources: Sources, split: Split, size: int) -> Labelled:
    if sources.cifar is None:
        raise Absent(f"there is no CIFAR-10: --cifar FOLDER, with {split}/<class>/*.png in it")
    dataset = open_dataset(str(sources.cifar), split, labels="folders")
    assert isinstance(dataset, ImageDataset)
    return _embedded(sources, dataset, f"cifar_{split}_{size}", size)


CHOSEN: dict[str, Made] = {
    "digits": SETS["digits"],
    "CIFAR, EfficientNet at 96": partial(_cifar, split="train", size=96),
    "CIFAR, EfficientNet at 160": partial(_cifar, split="train", size=160),
    "Fashion, EfficientNet, first 2,000": _rows("fashion10k_efficientnet", slice(2000)),
    "Fashion, pixels, first 2,000": _rows("fashion10k", slice(2000)),
    "Fashion, pixels, tail 100 : 1": _rows("fashion10k", slice(10_000), 100),
    "unequal": _rows("unequal", slice(2000)),
    "two": _rows("two", slice(2000)),
    "rare": _rows("rare", slice(2000)),
}
JUDGED: dict[str, Made] = {
    "CIFAR, EfficientNet at 224": SETS["cifar_efficientnet"],
    "CIFAR, 500 of test at 224": partial(_cifar, split="test", size=224),
    "Fashion, EfficientNet, 2,000 to 4,000": _rows("fashion10k_efficientnet", slice(2000, 4000)),
    "Fashion, EfficientNet, tail 10 : 1": _rows("fashion10k_efficientnet", slice(4000, 10_000), 10),
    "Fashion, pixels, 2,000 to 4,000": _rows("fashion10k", slice(2000, 4000)),
}


def accuracies(x: NDArray, y: NDArray, labelled: NDArray) -> NDArray[np.float64]:
    """Of the samples that have no label: of the probe, and of the nearest."""
    rest = np.setdiff1d(np.arange(len(y)), labelled)
    # PCA of all dimensions turns the rows alone: the probe is the same, and sooner found
    probe = make_pipeline(StandardScaler(), PCA(), LogisticRegression(max_iter=200, tol=1e-3))
    near = make_pipeline(KNeighborsClassifier(min(5, len(labelled)), weights="distance"))
    found = []
    for model, z in ((probe, x), (near, normalize(x))):
        if len(np.unique(y[labelled])) == 1:
            found.append(100 * float(np.mean(y[rest] == y[labelled[0]])))
        else:
            found.append(100 * float(model.fit(z[labelled], y[labelled]).score(z[rest], y[rest])))
    return np.array(found)


def peer(name: str, x: NDArray, y: NDArray, n: int, seed: int) -> NDArray[np.int64]:
    """What scikit-activeml asks for; ProbCover is told the number of classes, as in its paper."""
    from skactiveml import pool  # pyright: ignore[reportMissingImports]

    more: dict[str, Any] = {"n_classes": len(np.unique(y))} if name == "ProbCover" else {}
    strategy = getattr(pool, name)(random_state=seed, **more)
    return strategy.query(normalize(x), np.full(len(x), np.nan), batch_size=n)


def one_seed(x: NDArray, y: NDArray, budgets: list[int], peers: list[str], seed: int) -> dict:
    """(way, labels) -> its two accuracies, all from one draw of the set."""
    rng = np.random.default_rng(seed)
    kept = np.sort(rng.choice(len(y), int(SHARE * len(y)), replace=False))
    x, y = x[kept], y[kept]
    store, chance, found = stored(x), rng.permutation(len(y)), {}
    asked = label_next(store, max(budgets)).rows
    for n in budgets:
        found["random", n] = accuracies(x, y, chance[:n])
        found["asked for", n] = accuracies(x, y, asked[:n])
        found |= {(name, n): accuracies(x, y, peer(name, x, y, n, seed)) for name in peers}
    for way, first in (("random", chance[:FIRST]), ("asked for", label_next(store, FIRST).rows)):
        more = label_next(store, THEN, labelled=np.isin(np.arange(len(y)), first)).rows
        found[f"{way}, then asked for", FIRST + THEN] = accuracies(x, y, np.r_[first, more])
    return found


def compared(name: str, runs: list[dict], budgets: list[int], peers: list[str]) -> list[list[str]]:
    """Lines of both tables."""
    lines = []
    twice = ["random, then asked for", "asked for, then asked for"]
    for n in budgets:
        chance = np.array([run["random", n] for run in runs])
        gain = {w: np.array([r[w, n] for r in runs]) - chance for w, m in runs[0] if m == n}
        ours = gain["asked for"]
        ahead = [f"{int((g > 0).sum())} of {len(g)}" for g in ours.T]
        cells = [f"{ours[:, 0].mean():+.1f}", ahead[0], f"{ours[:, 1].mean():+.1f}", ahead[1]]
        cells += [f"{gain[w][:, 0].mean():+.1f}" for w in peers]
        cells += [f"{gain[w][:, 0].mean():+.1f}" if w in gain else "" for w in twice]
        lines.append([name, str(n), f"{chance[:, 0].mean():.1f}", *cells])
    return lines


def of_run(folder: str, budgets: list[int]) -> None:
    """With the clusters of a finished run and without."""
    run = Run.open(folder)
    store = run.samples.store()
    assert store.labels is not None
    x, y = store.tensor().numpy(), store.labels.numpy()
    print(_line(["labels", "the run's clusters", "without"]))
    for n in budgets:
        ways = run.label_next(n), label_next(store, n)
        print(_line([str(n), *(f"{accuracies(x, y, way.rows)[0]:.1f}" for way in ways)]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Labels that were asked for against random ones.")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--budgets", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--sets", choices=("chosen", "judged"), default="judged")
    parser.add_argument("--run", help="a finished run whose samples have labels, instead")
    parser.set_defaults(budgets=[10, 20, 50, 100, 200])
    Sources.add_flags(parser)
    args = parser.parse_args()
    if args.run is not None:
        return of_run(args.run, args.budgets)
    peers = list(PEERS) if find_spec("skactiveml") else []
    head = ["set", "labels", "random", "gain", "ahead", "5-NN", "ahead", *peers]
    head += [f"{FIRST} random + {THEN}", f"{FIRST} + {THEN}"]
    print(_line(head), "|---" * len(head) + "|", sep="\n", flush=True)
    for name, x, y in loaded(CHOSEN if args.sets == "chosen" else JUDGED, Sources.of(args)):
        budgets = [n for n in args.budgets if n <= len(y) // 4]
        runs = [one_seed(x, y, budgets, peers, seed) for seed in range(args.seeds)]
        for cells in compared(name, runs, budgets, peers):
            print(_line(cells), flush=True)


if __name__ == "__main__":
    main()
