"""Measure the cost of a guard that agrees across ranks, relative to the same loop without it.

    torchrun --nproc_per_node 2 -m benchmarks.ranks

All loops alternate step by step under `DistributedDataParallel` (gloo on CPUs, NCCL on GPUs), and
each ratio is the median over pairs with the bare loop. The bare loop clips by the global gradient
norm, as the guard does.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.turns import header, in_turns, row
from firstnan import Guard

WIDTH, DEPTH, BATCH, STEPS = 768, 8, 128, 60
Step = Callable[[Tensor], None]


class TwoTerms(nn.Module):
    """An MLP with two loss terms on its output."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the features `[batch, width]` and each loss term."""
        features = self.layers(x)
        return features, {"ce": features.square().mean(), "kd": (features - x).abs().mean()}


def step_of(
    device: torch.device, guarded: bool, terms: bool = False, through: bool = False
) -> Step:
    """Return a training step on inputs `[batch, width]`, on one loss or on two terms."""
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoTerms().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    guard = Guard(model, optimizer, clip_grad=1.0, snapshot_every=0) if guarded else None

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        features, losses = model(x)
        total = sum(losses.values(), torch.zeros((), device=device))
        if guard is None:
            total.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            guard.backward(losses if terms else total, features if through else None)
            guard.step()

    return step


def measure(step: Step, x: Tensor) -> tuple[float, int]:
    """Return the seconds of one step and the count of its all-reduces besides averaging."""
    count, real = 0, dist.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return real(*args, **options)

    with patch.object(dist, "all_reduce", counted):
        dist.barrier()
        began = time.perf_counter()
        step(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began, count


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("needs torchrun: torchrun --nproc_per_node 2 -m benchmarks.ranks")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    x = torch.randn(BATCH, WIDTH, device=device)
    steps = {
        "bare": step_of(device, guarded=False),
        "guard, one loss": step_of(device, guarded=True),
        "guard, two terms": step_of(device, guarded=True, terms=True),
        "guard, two terms, through=": step_of(device, guarded=True, terms=True, through=True),
    }
    timers = {name: partial(measure, step, x) for name, step in steps.items()}
    in_turns(timers, 5)  # warms up
    measured = in_turns(timers, STEPS)
    if dist.get_rank() == 0:
        weights = sum(p.numel() for p in TwoTerms().parameters())
        print(f"{dist.get_world_size()} ranks, {device.type}, {weights:,} weights, batch", end=" ")
        print(f"{BATCH} per rank\n")
        header("loop", "ms per step", "relative to bare", "extra all-reduces")
        for name, pairs in measured.items():
            seconds, counts = (statistics.median(column) for column in zip(*pairs, strict=True))
            turns = zip(pairs, measured["bare"], strict=True)
            over = statistics.median(mine / bare for (mine, _), (bare, _) in turns)
            row(name, f"{1000 * seconds:.2f}", f"{over:.2f}", f"{counts:g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
