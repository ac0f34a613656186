"""What a linear probe gains by labelling the samples that are asked for, not random ones.

    python -m benchmarks.label_next --data_dir data --cifar FOLDER

The probe is a logistic regression of standardised embeddings, judged on all samples that were not
labelled; random ones are drawn anew for each seed, and k-means' start is, too.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.curate import stored
from benchmarks.quality import _line
from benchmarks.sets import SETS, Sources, loaded
from ssl_kd.curate import label_next

NAMES = ("digits", "cifar_efficientnet", "fashion10k_efficientnet")
ROWS = 2000  # of each set


def accuracy(x: NDArray, y: NDArray, labelled: NDArray) -> float:
    """Of the samples that have no label."""
    rest = np.setdiff1d(np.arange(len(y)), labelled)
    regression = LogisticRegression(max_iter=200, tol=1e-3)
    model = make_pipeline(StandardScaler(), regression).fit(x[labelled], y[labelled])
    return 100 * float(model.score(x[rest], y[rest]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Labels that were asked for against random ones.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budgets", type=lambda text: [int(n) for n in text.split(",")])
    parser.set_defaults(budgets=[20, 50, 100])
    Sources.add_flags(parser)
    args = parser.parse_args()
    head = ["set", "labels", "random", "asked for", "gain", "seeds ahead"]
    lines = [_line(head), "|---" * len(head) + "|"]
    for name, x, y in loaded({name: SETS[name] for name in NAMES}, Sources.of(args)):
        x, y = x[:ROWS], y[:ROWS]
        store = stored(x)
        for budget in args.budgets:
            ours, chance = [], []
            for seed in range(args.seeds):
                ours.append(accuracy(x, y, label_next(store, budget, seed=seed).rows))
                rng = np.random.default_rng(seed)
                chance.append(accuracy(x, y, rng.choice(len(y), budget, replace=False)))
            gains = np.subtract(ours, chance)
            cells = [f"{np.mean(v):.1f} ± {np.std(v):.1f}" for v in (chance, ours)]
            ahead = f"{(gains > 0).sum()} of {len(gains)}"
            lines.append(_line([name, str(budget), *cells, f"{gains.mean():+.1f}", ahead]))
            print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
