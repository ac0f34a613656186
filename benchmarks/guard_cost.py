"""Measure the cost of NaN checks: the guard and other ways, relative to the same loop without.

    python -m benchmarks.guard_cost

All ways alternate with the bare loop step by step in one process; ratios are medians over pairs, so
a drift in the machine's speed cancels out. The bare loop still computes each head's gradient norm,
because it clips with it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from timeit import timeit
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.turns import header, middle_half, row
from firstnan.faults import Observation
from firstnan.health import Health
from firstnan.parts import SNAPSHOT_EVERY
from firstnan.watch import Watch
from ssl_kd.heads import HeadBank, TEMIHead
from ssl_kd.precision import Precision
from ssl_kd.vision import step as guarded
from ssl_kd.vision.rows import RowParts, part_norms
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.step import HeadTrainer

PAIRS, SHAPE = 20, (512, 384, 10, 50)  # batch, dim, K, heads
Way = Callable[[], contextlib.AbstractContextManager[object]]


@contextlib.contextmanager
def without_guard() -> Iterator[None]:
    """Remove the guard's work from the training loop inside a `with` block."""
    healthy = Health.fresh(10_000).streak.to(torch.int8)
    no_rows = torch.zeros(2, 10_000, dtype=torch.bool)
    with (
        patch.object(guarded, "only_healthy", lambda healthy, *tensors: contextlib.nullcontext()),
        patch.object(guarded, "bad_samples", lambda views: no_rows[:, : views.shape[1]]),
        patch.object(Observation, "stage", lambda self: healthy[: len(self.loss)]),
        patch.object(Health, "record_", lambda *all: None),
    ):
        yield


@contextlib.contextmanager
def per_tensor(sizes: list[int]) -> Iterator[None]:
    """Call `isfinite().all().item()` on the gradient of each parameter of each head."""

    def checked_norms(gradients: Tensor) -> Tensor:
        for head in gradients:
            for piece in head.split(sizes):
                if not torch.isfinite(piece).all().item():
                    raise FloatingPointError
        return part_norms(gradients)

    with without_guard(), patch.object(guarded, "part_norms", checked_norms):
        yield


@contextlib.contextmanager
def anomaly() -> Iterator[None]:
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
    """Call `isfinite` on the output of every operation."""
    with without_guard(), _EveryOutput():
        yield


def hooks(dim: int, clusters: int, heads: int, views: Tensor) -> tuple[Callable, Callable]:
    """Return steps of the same heads as separate modules: without hooks, and with forward hooks."""

    def build(hooked: bool) -> Callable[[], None]:
        modules = [TEMIHead(dim, clusters) for _ in range(heads)]

        def check(module: object, args: object, out: Tensor) -> None:
            if not torch.isfinite(out).all().item():
                raise FloatingPointError(type(module).__name__)

        def step() -> None:
            for head in modules:
                head.zero_grad()
                head(views.flatten(0, 1)).square().mean().backward()

        for head in modules if hooked else ():
            for module in head.modules():
                module.register_forward_hook(check)
        return step

    return build(False), build(True)


def recorder_cost(model: nn.Module, x: Tensor, pairs: int) -> dict[str, list[float]]:
    """Return the cost of a `Watch`, of one that records, and of anomaly mode, for each pair."""
    optimizer = torch.optim.AdamW(model.parameters())

    def seconds(way: str) -> float:
        watch = Watch(model, record=way == "recorder") if way in ("watch", "recorder") else None
        took = []
        for _ in range(2):  # the first warms up
            began = time.process_time()
            with torch.autograd.set_detect_anomaly(way == "anomaly"):
                optimizer.zero_grad()
                model(x).square().mean().backward()
            if watch is not None:
                watch.forget()
            optimizer.step()
            took.append(time.process_time() - began)
        if watch is not None:
            watch.close()
        return took[-1]

    overheads: dict[str, list[float]] = {"watch": [], "recorder": [], "anomaly": []}
    for pair in range(pairs):
        for way, ratios in overheads.items():
            times = {name: seconds(name) for name in (("", way) if pair % 2 else (way, ""))}
            ratios.append(times[way] / times[""] - 1)
    return overheads


def main() -> None:
    batch, dim, clusters, heads = SHAPE
    bank = HeadBank(lambda: TEMIHead(dim, clusters), heads)
    trainer = HeadTrainer(bank, VisionSettings(), Precision.for_device("cpu"), clusters)
    views = torch.randn(2, batch, dim, generator=torch.Generator().manual_seed(0))
    sizes = [p.numel() for p in TEMIHead(dim, clusters).parameters()]
    ways: dict[str, Way] = {
        "the guard": contextlib.nullcontext,
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
    overheads: dict[str, list[float]] = {name: [] for name in ways}
    bare = []
    for pair in range(PAIRS):
        for name, way in ways.items():
            order = (without_guard, way) if pair % 2 else (way, without_guard)
            times = {id(of): seconds(of) for of in order}
            plain, checked = times[id(without_guard)], times[id(way)]
            bare.append(plain)
            overheads[name].append(checked / plain - 1)

    name = "forward hooks (heads as modules, relative to the same without hooks)"
    overheads[name] = []
    steps = hooks(dim, clusters, heads, views)
    for _ in range(PAIRS // 4):
        plain, hooked = (timeit(step, number=1) for step in steps)
        overheads[name].append(hooked / plain - 1)

    print(
        f"{heads} heads of {dim} -> 512 -> 256 -> {clusters}, batch {batch}, {PAIRS} pairs, "
        f"{torch.get_num_threads()} threads; a step without checks: "
        f"{1000 * statistics.median(bare):.0f} ms\n"
    )
    header("check", "share of step time (middle half of the pairs)")
    for name, ratios in overheads.items():
        row(name, middle_half((100 * ratio for ratio in ratios), ".1f", " %"))

    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True, norm_first=True)
    mlp = [x for _ in range(4) for x in (nn.Linear(1024, 1024), nn.ReLU())]
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    shapes = {"transformer": (encoder, (8, 128, 256)), "MLP": (nn.Sequential(*mlp), (512, 1024))}
    for name, (model, shape) in shapes.items():
        for way, ratios in recorder_cost(model, torch.randn(shape), PAIRS).items():
            row(f"{way} of a {name}", middle_half((100 * ratio for ratio in ratios), ".1f", " %"))


if __name__ == "__main__":
    main()
