"""Measure a training step of the heads: what its checks cost, or against the official TEMI code.

    python -m benchmarks.step_cost    # the guard and other checks, relative to a step without
    python -m benchmarks.step_cost --official PATH_OF_A_CHECKOUT

Both sides of a comparison alternate in one process, and ratios are medians over pairs, so that a
drift in the machine's speed cancels out. The step without checks still computes the gradient norm
of each head, because it clips with it.

The official code (https://github.com/HHU-MMBS/TEMI-official-BMVC2023) trains the same number of
full-size heads (512 -> 256) on the same batch. Memory is the growth of the peak resident set over
two steps, with each side in a separate process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path
from timeit import timeit
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.nan_tools import TOOLS
from benchmarks.turns import header, in_pairs, memory, middle_half, number_of, row
from firstnan.faults import Observation
from firstnan.health import Health
from firstnan.parts import SNAPSHOT_EVERY
from ssl_kd.core.precision import Precision
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train import step as guarded
from ssl_kd.vision.train.heads import HeadBank, TEMIHead
from ssl_kd.vision.train.rows import RowParts, part_norms
from ssl_kd.vision.train.step import HeadTrainer

FULL = (512, 256)  # hidden and bottleneck
DEFAULT = (VisionSettings().hidden_dim, VisionSettings().bottleneck_dim)
Shape = tuple[int, int, int, int]
SHAPES: list[Shape] = [(512, 384, 10, 50), (512, 384, 1000, 50), (1024, 768, 1000, 50)]


def trainer_of(
    shape: Shape,
    widths: tuple[int, int] = FULL,
    device: torch.device | str = "cpu",
    half: bool = False,
    weight: str = "mean",
) -> HeadTrainer:
    """Return heads to train by guarded steps; the default is the paper's instance weight."""
    batch, dim, clusters, heads = shape
    bank = HeadBank(lambda: TEMIHead(dim, clusters, *widths), heads)
    settings = VisionSettings(batch_size=batch, instance_weight=weight)
    return HeadTrainer(bank, settings, Precision.for_device(device, use_fp16=half), clusters)


@contextlib.contextmanager
def without_guard(norms: Callable[[Tensor], Tensor] = part_norms) -> Iterator[None]:
    """Remove the guard's work from the training loop, which clips by `norms` of the gradients."""
    healthy = Health.fresh(10_000).streak.to(torch.int8)
    no_rows = torch.zeros(2, 10_000, dtype=torch.bool)
    with (
        patch.object(guarded, "only_healthy", lambda healthy, *tensors: contextlib.nullcontext()),
        patch.object(guarded, "bad_samples", lambda views: no_rows[:, : views.shape[1]]),
        patch.object(Observation, "stage", lambda self: healthy[: len(self.loss)]),
        patch.object(Health, "record_", lambda *all: None),
        patch.object(guarded, "part_norms", norms),
    ):
        yield


def checked_norms(gradients: Tensor, sizes: list[int]) -> Tensor:
    """Call `isfinite().all().item()` on the gradient of each parameter of each head."""
    for head in gradients:
        for piece in head.split(sizes):
            if not torch.isfinite(piece).all().item():
                raise FloatingPointError
    return part_norms(gradients)


def print_checks(pairs: int) -> None:
    """Print what the guard and other checks cost, relative to a step without checks."""
    batch, dim, clusters, heads = shape = SHAPES[0]
    trainer = trainer_of(shape, weight="none")
    views = torch.randn(2, batch, dim, generator=torch.Generator().manual_seed(0))
    sizes = [p.numel() for p in TEMIHead(dim, clusters).parameters()]

    def unguarded(tool: str = "none", norms: Callable[[Tensor], Tensor] = part_norms) -> float:
        with without_guard(norms), TOOLS[tool](torch.nn.Identity()):
            return timeit(lambda: trainer.step(views, 1e-4), number=1)

    def guard() -> float:
        seconds = timeit(lambda: trainer.step(views, 1e-4), number=1)
        parts = trainer.recovery.parts
        assert isinstance(parts, RowParts)
        began = time.perf_counter()
        parts.snapshot(slice(heads), torch.ones(heads, dtype=torch.bool), 0)
        return seconds + (time.perf_counter() - began) / SNAPSHOT_EVERY

    print(
        f"{heads} heads of {dim} -> 512 -> 256 -> {clusters}, batch {batch}, {pairs} pairs, ",
        end="",
    )
    print(f"{torch.get_num_threads()} threads\n")
    header("check", "share of step time (middle half of the pairs)")
    ways = {
        "the guard": guard,
        "`isfinite().all().item()` per tensor": partial(
            unguarded, norms=partial(checked_norms, sizes=sizes)
        ),
        "`detect_anomaly`": partial(unguarded, "anomaly mode"),
        "`isfinite` on every output (dispatch mode)": partial(unguarded, "dispatch mode"),
    }
    for name, way in ways.items():
        shares = [100 * (ratio - 1) for ratio in in_pairs(unguarded, way, pairs)[2]]
        row(name, middle_half(shares, ".1f", " %"))


class OfficialTEMI:
    """The official student, EMA teacher, loss and AdamW on two views of embeddings.

    Heads, loss and optimizer step (`train_one_epoch` in `train_main.py`) are those of the checkout,
    except for the copies to a GPU.
    """

    def __init__(self, checkout: Path, shape: Shape) -> None:
        batch_size, in_dim, n_clusters, n_heads = shape
        if not (checkout / "losses" / "multihead_losses.py").is_file():
            raise SystemExit(f"{checkout} is not a checkout of the official TEMI code")
        sys.path.insert(0, str(checkout))
        try:
            self._utils = importlib.import_module("utils")
            loss_class = importlib.import_module("losses").TEMI
            # The package's __init__ needs CLIP; the module with the heads does not.
            file = checkout / "model_builders" / "multi_head.py"
            spec = importlib.util.spec_from_file_location("official_multi_head", file)
            assert spec is not None and spec.loader is not None
            heads = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(heads)
        finally:
            sys.path.remove(str(checkout))

        def build() -> Any:
            return heads.MultiHeadClassifier(
                "precomputed",
                embed_dim=in_dim,
                out_dim=n_clusters,
                nlayers=2,
                hidden_dim=FULL[0],
                bottleneck_dim=FULL[1],
                num_heads=n_heads,
            )

        self.student, self.teacher = build(), build()
        self.teacher.load_state_dict(self.student.state_dict())
        for p in self.teacher.parameters():
            p.requires_grad = False
        self.loss = loss_class(
            num_heads=n_heads,
            beta=0.6,
            out_dim=n_clusters,
            batchsize=batch_size,
            warmup_teacher_temp=0.1,
            teacher_temp=0.1,
            warmup_teacher_temp_epochs=1,
            nepochs=1000,
        )
        groups = self._utils.get_params_groups(self.student.head)
        groups[0]["weight_decay"] = 1e-4
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4)

    def step(self, views: Tensor) -> Tensor:
        """Train one step on views `[2, batch, dim]`; return the loss of each head."""
        images = list(views)
        teacher_out, student_out = self.teacher(images), self.student(images)
        head_losses = self.loss(student_out, teacher_out, epoch=0)
        loss = head_losses.mean()
        if not torch.isfinite(loss).item():
            raise FloatingPointError(f"the official code's loss is {loss.item()}, not finite")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            pairs = zip(self.student.head.parameters(), self.teacher.head.parameters(), strict=True)
            for q, k in pairs:
                k.data.mul_(0.996).add_(0.004 * q.detach().data)
        return head_losses.detach()


def versions(*packages: str) -> str:
    """Return the versions of Python, torch and the installed ones of `packages`."""
    installed = {package.name.lower().replace("_", "-") for package in distributions()}
    names = [f"{name} {version(name)}" for name in ("torch", *packages) if name in installed]
    return ", ".join([f"Python {platform.python_version()}", *names])


def print_official(checkout: Path, pairs: int) -> None:
    """Print time and memory of a step relative to the official code."""
    print(Precision.for_device("cpu", use_fp16=True), versions(), sep="; ")
    print(f"{torch.get_num_threads()} threads, {pairs} pairs, instance weight 'mean'")
    columns = ["batch, dim, K, heads", "official s", "ours s", "times faster", "ours half s"]
    header(*columns, "times faster", "MiB official", "MiB ours")
    for index, shape in enumerate(SHAPES):
        views = torch.randn(2, *shape[:2], generator=torch.Generator().manual_seed(0))
        peer = OfficialTEMI(checkout, shape).step
        cells: list[float] = []
        for half in (False, True):
            trainer = trainer_of(shape, half=half)
            sides = (partial(trainer.step, views, 1e-4), partial(peer, views))
            mine, theirs = (partial(timeit, side, number=1) for side in sides)
            ours, official, ratios = map(statistics.median, in_pairs(mine, theirs, pairs))
            cells += [ours, ratios] if half else [official, ours, ratios]
        peaks = [
            f"{number_of('step_cost', '--memory-of', side, '--shape', str(index)):.0f}"
            for side in ("official", "ours")
        ]
        row(", ".join(map(str, shape)), *(f"{x:.2f}" for x in cells), *peaks)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--official", type=Path, help="official checkout")
    parser.add_argument("--pairs", type=int, help="default: 20, or 5 with --official")
    parser.add_argument("--memory-of", choices=["ours", "official"], help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        shape = SHAPES[args.shape]
        step: Callable[[Tensor], object] = partial(trainer_of(shape).step, learning_rate=1e-4)
        if args.memory_of == "official":
            step = OfficialTEMI(args.official, shape).step
        views, before = torch.randn(2, *shape[:2]), memory()["VmHWM"]
        step(views)
        step(views)
        print(memory()["VmHWM"] - before)
    elif args.official:
        print_official(args.official, args.pairs or 5)
    else:
        print_checks(args.pairs or 20)


if __name__ == "__main__":
    main()
