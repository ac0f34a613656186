"""What the heads' settings are worth once the partition is found: steps, batch, widths, how many.

    python -m benchmarks.heads --sets digits,many,fashion10k_efficientnet

The graph of a random four fifths of each set is partitioned once; then heads with other settings
learn that partition. Accuracy of their vote on those samples and on the held-out fifth, the steps
that they took, and the seconds of training. Labels are read for the scores alone.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.quality import names_of
from benchmarks.sets import SETS, Sources, loaded
from ssl_kd import evaluate
from ssl_kd.guard import Precision
from ssl_kd.store import nearest_neighbours
from ssl_kd.vision.fit import form_answer, make_plan, make_trainer
from ssl_kd.vision.partition import partition_of
from ssl_kd.vision.projection import Projection
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train import train

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is: until they have converged": {},
    "50 steps": {"max_steps": 50},
    "100 steps": {"max_steps": 100},
    "200 steps": {"max_steps": 200},
    "800 steps": {"max_steps": 800},
    "4 heads": {"n_heads": 4},
    "16 heads": {"n_heads": 16},
    "batch 512": {"batch_size": 512},
    "batch 1024": {"batch_size": 1024},
    "half as wide": {"hidden_dim": 48, "bottleneck_dim": 24},
    "2.7 times as wide": {"hidden_dim": 256, "bottleneck_dim": 128},
    "pairs that need not be mutual": {"mutual_neighbours": False},
    "10 neighbours to pair with": {"neighbours": 10},
}


def rows_of(x: NDArray, y: NDArray, variants: list[str]) -> dict[str, list[float]]:
    """Of each variant: accuracy in percent, held out, steps and seconds."""
    order, cut = np.random.default_rng(0).permutation(len(x)), int(0.8 * len(x))
    features = torch.from_numpy(np.ascontiguousarray(x[order], np.float32))
    labels = np.unique(y[order], return_inverse=True)[1]
    seen, held = features[:cut], features[cut:]
    n_clusters, cpu = int(labels.max()) + 1, Precision.for_device("cpu")
    projection = Projection.fit(seen, VisionSettings.pca_dim)
    gather = projection(seen).__getitem__
    near = nearest_neighbours(seen, VisionSettings.neighbours)
    found = partition_of(n_clusters, near, seen.__getitem__, projection(seen), cpu.device)
    rows = {}
    for name in variants:
        settings = VisionSettings(n_clusters=n_clusters, **VARIANTS[name])
        neighbours = near[:, : settings.neighbours]
        trainer = make_trainer(settings, projection.dim, n_clusters, cpu)
        plan = make_plan(settings, trainer, neighbours, gather)
        began = time.perf_counter()
        steps = train(
            trainer, plan.sampler, gather, plan.steps, until=plan.until, clusters=found.clusters
        )
        seconds = time.perf_counter() - began
        model, _, _ = form_answer(settings, trainer, neighbours, gather, projection, found)
        acc = [
            100 * (evaluate.accuracy(true, model.predict(part).numpy()) or 0.0)
            for true, part in ((labels[:cut], seen), (labels[cut:], held))
        ]
        rows[name] = [*acc, steps, seconds]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="The heads' settings, one by one.")
    parser.add_argument("--sets", type=lambda text: names_of(SETS, text), default=["digits"])
    parser.add_argument("--variants", type=lambda t: names_of(VARIANTS, t), default=list(VARIANTS))
    Sources.add_flags(parser)
    args = parser.parse_args()
    for name, x, y in loaded({name: SETS[name] for name in args.sets}, Sources.of(args)):
        print(
            f"\n### {name}\n\n| heads | ACC | held out | steps | seconds |\n|---|---|---|---|---|"
        )
        for variant, (acc, held, steps, seconds) in rows_of(x, y, args.variants).items():
            print(f"| {variant} | {acc:.1f} | {held:.1f} | {steps:.0f} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
