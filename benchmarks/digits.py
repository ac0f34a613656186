"""Cluster random splits of the digits with both methods, and with settings of an older guide.

python -m benchmarks.digits
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from benchmarks.turns import header, row
from ssl_kd import MultiHeadClusterer
from ssl_kd.vision.evaluate import accuracy

OLDER = {"beta": 0.5, "teacher_temp": 0.05, "batch_size": 128}
CHOICES: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "`method=heads`": {"method": "heads"},
    "heads, `beta=0.5`, `teacher_temp=0.05`, `batch_size=128`": {"method": "heads", **OLDER},
    "these, `learning_rate=5e-5`": {"method": "heads", **OLDER, "learning_rate": 5e-5},
}
STARTS: Any = 10  # scikit-learn's stubs allow only a string


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=8)
    args = parser.parse_args()
    data: Any = load_digits()
    x, y = data.data.astype(np.float32), data.target
    ways: dict[str, Callable[[], Any]] = {
        "k-means": partial(KMeans, 10, n_init=STARTS, random_state=0)
    }
    for name, settings in CHOICES.items():
        ways[name] = partial(MultiHeadClusterer, 10, **settings)
    header("settings", "training, mean", "lowest", "held out, mean", "lowest")
    for name, make in ways.items():
        scores = []
        for split in range(args.splits):
            train, test, y_train, y_test = train_test_split(x, y, test_size=0.2, random_state=split)
            clusterer = make().fit(train)
            scores.append(
                [accuracy(y_train, clusterer.labels_), accuracy(y_test, clusterer.predict(test))]
            )
        mean, lowest = 100 * np.mean(scores, 0), 100 * np.min(scores, 0)
        row(name, *(f"{value:.1f}" for pair in zip(mean, lowest, strict=True) for value in pair))


if __name__ == "__main__":
    main()
