"""Compare a linear probe on selected samples with one on random samples.

    python -m benchmarks.selection --shelf choose --features FOLDER
    python -m benchmarks.selection --memory 1000000x64

Of each set, at most 2,500 rows, a quarter is held out. Of the others, --share is chosen by each
method of `ssl_kd select`; logistic regression learns their labels. Random is the mean over ten
draws. A covering radius is the distance sqrt(2 - 2 cos) within which every sample has a chosen one;
half of the distance at which `diverse` chooses its last sample is a bound that no choice of as many
samples undercuts.

`--memory` chooses 1,000 of random rows, and prints seconds and the largest memory of the process.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from statistics import fmean
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

from benchmarks.regret import MOST_ROWS, sets
from benchmarks.sets import Shelf, Sources
from benchmarks.turns import header, row
from ssl_kd_explore.curate import selection

DRAWS = 10


def accuracy(x: NDArray, y: NDArray, chosen: NDArray, test_x: NDArray, test_y: NDArray) -> float:
    """Return the accuracy of logistic regression on the chosen rows, 0 for a single class."""
    if len(np.unique(y[chosen])) < 2:
        return 0.0
    probe = LogisticRegression(max_iter=300)
    return float(probe.fit(x[chosen], y[chosen]).score(test_x, test_y))


def compare(x: NDArray, y: NDArray, share: float) -> dict[str, float]:
    """Return accuracies of probes in percent, and covering radii, of one set."""
    rng = np.random.default_rng(0)
    rows = rng.permutation(len(y))[:MOST_ROWS]
    x, y = x[rows].astype(np.float32), np.unique(y[rows], return_inverse=True)[1]
    x -= x.mean(0)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    parts = train_test_split(x, y, test_size=0.25, random_state=0)
    x, test_x, y, test_y = map(np.asarray, parts)
    scale = np.sqrt(x.shape[1])
    test = test_x * scale, test_y
    n, every = max(2, round(share * len(y))), np.arange(len(y))
    units = torch.from_numpy(x)
    chosen = {
        "typical": selection.typical(units, n, allowed=every).rows,
        "diverse": (far := selection.diverse(units, n, allowed=every)).rows,
    }
    drawn = [rng.choice(len(y), n, replace=False) for _ in range(DRAWS)]
    found = {name: 100 * accuracy(x * scale, y, rows, *test) for name, rows in chosen.items()}
    found["random"] = fmean(100 * accuracy(x * scale, y, rows, *test) for rows in drawn)
    found["radius"] = selection.covering_radius(units, chosen["diverse"].tolist())
    found["random radius"] = fmean(selection.covering_radius(units, r.tolist()) for r in drawn)
    found["bound"] = float(far.scores[-1]) / 2
    return found


def print_memory(shape: str, n: int) -> None:
    """Print the time and memory of choosing among random rows."""
    rows, dim = map(int, shape.split("x"))
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(0))
    x /= x.norm(dim=1, keepdim=True)
    header("method", "rows", "chosen", "seconds", "largest memory of the process, GiB")
    for choose in (selection.diverse, selection.typical):
        began = time.perf_counter()
        choose(x, n, allowed=np.arange(rows))
        seconds = time.perf_counter() - began
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        row(choose.__name__, shape, f"{n}", f"{seconds:.0f}", f"{largest:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shelf", choices=get_args(Shelf), default="choose")
    parser.add_argument("--features", type=Path, nargs="+", default=[])
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--memory", metavar="ROWSxDIM", help="measure this instead")
    Sources.add_flags(parser)
    args = parser.parse_args()
    if args.memory:
        return print_memory(args.memory, 1000)
    header("set", "typical", "diverse", "random", "radius", "of random", "least possible")
    ahead = dict.fromkeys(("typical", "diverse"), 0)
    total = 0
    for name, (x, y) in sets("natural", args.shelf, args.features, Sources.of(args)):
        found = compare(x, y, args.share)
        numbers = (f"{found[m]:.1f}" for m in ("typical", "diverse", "random"))
        radii = (f"{found[m]:.3f}" for m in ("radius", "random radius", "bound"))
        row(name, *numbers, *radii)
        for method in ahead:
            ahead[method] += found[method] > found["random"]
        total += 1
    for method, n in ahead.items():
        print(f"\n`{method}` is ahead of random on {n} of {total} sets.")


if __name__ == "__main__":
    main()
