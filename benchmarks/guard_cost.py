"""Measure the cost of looking for NaN: the guard and other ways, against the same loop without.

    python -m benchmarks.guard_cost

All ways take turns in one process, step by step, and each ratio is the median over pairs with the
bare loop, so that a machine whose speed drifts does not matter. The bare loop still computes each
head's gradient norm, since it clips by it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.turns import header, middle_half, row
from ssl_kd.guard import Precision
from ssl_kd.guard.health import Health
from ssl_kd.guard.parts import SNAPSHOT_EVERY, RowParts
from ssl_kd.guard.update import part_norms
from ssl_kd.heads import HeadBank, TEMIHead
from ssl_kd.vision import step as guarded
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.step import HeadTrainer

Way = Callable[[], contextlib.AbstractContextManager[object]]


@contextlib.contextmanager
def without_guard() -> Iterator[None]:
    """Remove the guard's work from the training loop inside a `with` block."""
    healthy = Health.fresh(10_000).streak.to(torch.int8)
    no_rows = torch.zeros(2, 10_000, dtype=torch.bool)
    with (
        patch.object(guarded, "only_healthy", lambda healthy, *tensors: contextlib.nullcontext()),
        patch.object(guarded, "bad_samples", lambda views: no_rows[:, : views.shape[1]]),
        patch.object(Health, "judge", lambda self, loss, *rest: healthy[: len(loss)]),
        patch.object(Health, "record_", lambda *all: None),
    ):
        yield


@contextlib.contextmanager
def per_tensor(sizes: list[int]) -> Iterator[None]:
    """`isfinite().all().item()` of each head's gradient of each parameter."""

    def looking(gradients: Tensor) -> Tensor:
        for head in gradients:
            for piece in head.split(sizes):
                if not torch.isfinite(piece).all().item():
                    raise FloatingPointError
        return part_norms(gradients)

    with without_guard(), patch.object(guarded, "part_norms", looking):
        yield


@contextlib.contextmanager
def anomaly() -> Iterator[None]:
    """`torch.autograd.detect_anomaly`."""
    with without_guard(), torch.autograd.set_detect_anomaly(True):
        yield


class _EveryOutput(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and not torch.isfinite(out).all():
            raise FloatingPointError(str(func))
        return out


@contextlib.contextmanager
def dispatch() -> Iterator[None]:
    """`isfinite` on the output of every operation."""
    with without_guard(), _EveryOutput():
        yield


def hooks(dim: int, clusters: int, heads: int, views: Tensor) -> tuple[Callable, Callable]:
    """The same heads as modules, one by one, forward and backward: bare, and with hooks."""

    def build(hooked: bool) -> Callable[[], None]:
        modules = [TEMIHead(dim, clusters) for _ in range(heads)]

        def look(module: object, given: object, out: Tensor) -> None:
            if not torch.isfinite(out).all().item():
                raise FloatingPointError(type(module).__name__)

        def step() -> None:
            for head in modules:
                head.zero_grad()
                head(views.flatten(0, 1)).square().mean().backward()

        for head in modules if hooked else ():
            for module in head.modules():
                module.register_forward_hook(look)
        return step

    return build(False), build(True)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the guard costs, beside other ways.")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--shape", type=int, nargs=4, default=(512, 384, 10, 50))
    parser.add_argument("--only_guard", action="store_true", help="leave the other ways out")
    args = parser.parse_args()
    batch, dim, clusters, heads = args.shape

    bank = HeadBank(lambda: TEMIHead(dim, clusters), heads)
    trainer = HeadTrainer(bank, VisionSettings(), Precision.for_device("cpu"), clusters)
    views = torch.randn(2, batch, dim, generator=torch.Generator().manual_seed(0))
    sizes = [p.numel() for p in TEMIHead(dim, clusters).parameters()]
    ways: dict[str, Way] = {"the guard": contextlib.nullcontext}
    if not args.only_guard:
        ways |= {
            "`isfinite().all().item()` per tensor": lambda: per_tensor(sizes),
            "`detect_anomaly`": anomaly,
            "`isfinite` on every output (dispatch mode)": dispatch,
        }

    def seconds(way: Way) -> float:
        with way():
            began = time.perf_counter()
            trainer.step(views, 1e-4)
            done = time.perf_counter() - began
            if way is without_guard:
                return done
            began = time.perf_counter()
            parts = trainer.recovery.parts
            assert isinstance(parts, RowParts)
            parts.snapshot(slice(heads), torch.ones(heads, dtype=torch.bool), 0)
            return done + (time.perf_counter() - began) / SNAPSHOT_EVERY

    for way in (without_guard, *ways.values()):
        seconds(way)  # warm up
    found: dict[str, list[float]] = {name: [] for name in ways}
    bare = []
    for pair in range(args.pairs):
        for name, way in ways.items():
            # Which goes first alternates too.
            order = (without_guard, way) if pair % 2 else (way, without_guard)
            first, second = seconds(order[0]), seconds(order[1])
            plain, looked = (first, second) if pair % 2 else (second, first)
            bare.append(plain)
            found[name].append(looked / plain - 1)

    if not args.only_guard:
        plain, hooked = hooks(dim, clusters, heads, views)
        name = "forward hooks (the heads as modules, beside them without hooks)"
        found[name] = []
        for _ in range(max(3, args.pairs // 4)):
            times = []
            for step in (plain, hooked):
                began = time.perf_counter()
                step()
                times.append(time.perf_counter() - began)
            found[name].append(times[1] / times[0] - 1)

    print(
        f"{heads} heads of {dim} -> 512 -> 256 -> {clusters}, batch {batch}, {args.pairs} pairs, "
        f"{torch.get_num_threads()} threads; a step without looking: "
        f"{1000 * statistics.median(bare):.0f} ms\n"
    )
    header("way of looking", "share of the step (middle half of the pairs)")
    for name, ratios in found.items():
        row(name, middle_half((100 * ratio for ratio in ratios), ".1f", " %"))


if __name__ == "__main__":
    main()
