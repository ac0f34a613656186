"""Seconds until digits are clustered five points better than by k-means, beside the official TEMI.

    python -m benchmarks.time_to_accuracy --official PATH_OF_A_CHECKOUT

Both start from the same cached pixels and neighbours, in one process. Labels only stop the clock:
after every `--every` steps the answer that each side would give without labels is scored (ours by
the vote of the best heads, theirs by the head of lowest loss). The peer runs with its own defaults
(16 heads of 512 -> 256, batch 1,024, k = 50) and gets `--patience` times our time.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.official_temi import OfficialTEMI
from ssl_kd import evaluate
from ssl_kd.datasets import ArrayDataset, open_dataset
from ssl_kd.guard import Precision
from ssl_kd.store import nearest_neighbours
from ssl_kd.training.schedule import learning_rate_at
from ssl_kd.vision.fit import form_answer, make_plan, make_trainer
from ssl_kd.vision.pairs import PairSampler
from ssl_kd.vision.projection import Projection
from ssl_kd.vision.settings import VisionSettings


def ours(x: torch.Tensor, labels: np.ndarray, goal: float, every: int, seed: int):
    """Seconds to the goal and the accuracy there; the last ones where it is not reached."""
    settings = VisionSettings(n_clusters=10, seed=seed, method="heads", n_heads=48, max_steps=800)
    projection = Projection.fit(x, settings.pca_dim)
    projected = projection(x)
    trainer = make_trainer(settings, projection.dim, 10, Precision.for_device("cpu"))
    neighbours = nearest_neighbours(x, settings.neighbours)
    gather = projected.__getitem__
    plan = make_plan(settings, trainer, neighbours, gather)
    sampler, steps = plan.sampler, plan.steps
    spent, acc = 0.0, 0.0
    for step in range(steps):
        began = time.perf_counter()
        views = projected[torch.stack(sampler(step))]
        rate = learning_rate_at(step, steps, settings.learning_rate, settings.warmup_fraction)
        trainer.step(views, rate)
        if (step + 1) % every == 0 or step + 1 == steps:
            model, _, _ = form_answer(settings, trainer, neighbours, gather, projection)
            clusters = model.predict(x).numpy()
        else:
            clusters = None
        spent += time.perf_counter() - began  # forming the answer is part of our time
        if clusters is not None:
            acc = evaluate.accuracy(labels, clusters)
            if acc >= goal:
                break
    return spent, acc


def official(x, labels, goal: float, every: int, checkout: Path, budget: float):
    """The same for the official code, up to `budget` seconds."""
    batch = 1024
    peer = OfficialTEMI(
        checkout, in_dim=x.shape[1], n_clusters=10, n_heads=16, batch_size=batch,
        learning_rate=1e-4 * batch / 256,
    )  # fmt: skip
    neighbours = nearest_neighbours(x, 50)
    everyone = torch.ones_like(neighbours, dtype=torch.bool)
    sampler = PairSampler(neighbours, everyone, batch, 0)
    spent, acc, step, losses = 0.0, 0.0, 0, torch.zeros(16)
    while spent < budget and acc < goal:
        began = time.perf_counter()
        losses = 0.9 * losses + 0.1 * peer.step(x[torch.stack(sampler(step))])
        spent += time.perf_counter() - began
        step += 1
        if step % every == 0:
            acc = evaluate.accuracy(labels, peer.predict(x, losses).numpy())
    return spent, acc


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to k-means + 5 points on digits.")
    parser.add_argument("--official", type=Path, required=True, help="checkout of the peer")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=50, help="steps between two looks")
    parser.add_argument("--patience", type=float, default=10.0)
    args = parser.parse_args()

    dataset = open_dataset("digits", "train")
    assert isinstance(dataset, ArrayDataset)
    assert dataset.arrays is not None and dataset.labels is not None
    x = torch.from_numpy(dataset.arrays).flatten(1).float() / 255
    labels = dataset.labels
    kmeans = evaluate.kmeans(x.numpy(), 10).clusters
    assert kmeans is not None
    goal = evaluate.accuracy(labels, kmeans) + 0.05
    print(f"goal: k-means + 5 points = {100 * goal:.1f}\n")
    print("| seed | ours s | ours ACC | official s | official ACC | times shorter |")
    print("|---|---|---|---|---|---|")
    for seed in range(args.seeds):
        seconds, acc = ours(x, labels, goal, args.every, seed)
        torch.manual_seed(seed)
        budget = args.patience * seconds
        peer, peer_acc = official(x, labels, goal, args.every, args.official, budget)
        more = "" if peer_acc >= goal else "more than "
        print(
            f"| {seed} | {seconds:.1f} | {100 * acc:.1f} | {peer:.0f} | {100 * peer_acc:.1f} "
            f"| {more}{peer / seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
