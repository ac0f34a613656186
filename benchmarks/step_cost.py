"""Measure time and memory of one training step of the heads, relative to the official TEMI code.

    python -m benchmarks.step_cost --official PATH_OF_A_CHECKOUT

The official code (https://github.com/HHU-MMBS/TEMI-official-BMVC2023) trains the same number of
full-size heads (512 -> 256) on the same batch. Both sides alternate in one process, and the ratio
is the median over pairs, so a drift in the machine's speed cancels out. Memory is the growth of the
peak resident set over two steps, with each side in a separate process.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import statistics
import sys
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path
from timeit import timeit
from typing import Any

import torch
from torch import Tensor

from benchmarks.turns import header, memory, number_of, row
from ssl_kd.heads import HeadBank, TEMIHead
from ssl_kd.precision import Precision
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.step import HeadTrainer

FULL = (512, 256)  # hidden and bottleneck
DEFAULT = (VisionSettings().hidden_dim, VisionSettings().bottleneck_dim)
PAIRS = 5
Shape = tuple[int, int, int, int]
SHAPES: list[Shape] = [(512, 384, 10, 50), (512, 384, 1000, 50), (1024, 768, 1000, 50)]


def ours(shape: Shape, half: bool = False):
    """Return our training step as a function of the views."""
    batch, dim, clusters, heads = shape
    trainer = HeadTrainer(
        HeadBank(lambda: TEMIHead(dim, clusters, *FULL), heads),
        VisionSettings(batch_size=batch, instance_weight="mean"),
        Precision.for_device("cpu", use_fp16=half),
        clusters,
    )
    return lambda views: trainer.step(views, 1e-4)


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


def paired(a, b, views) -> tuple[float, float, float]:
    """Return the median seconds of a and b, and the median of b / a over alternating pairs."""
    times: list[tuple[float, float]] = []
    for _ in range(PAIRS + 1):
        first, second = (timeit(partial(step, views), number=1) for step in (a, b))
        times.append((first, second))
    del times[0]  # it warmed up
    first, second = zip(*times, strict=True)
    ratio = statistics.median(y / x for x, y in times)
    return statistics.median(first), statistics.median(second), ratio


def versions(*packages: str) -> str:
    """Return the versions of Python, torch and the installed ones of `packages`."""
    installed = {package.name.lower().replace("_", "-") for package in distributions()}
    names = [f"{name} {version(name)}" for name in ("torch", *packages) if name in installed]
    return ", ".join([f"Python {platform.python_version()}", *names])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--official", type=Path, required=True, help="official checkout")
    parser.add_argument("--memory-of", choices=["ours", "official"], help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        shape, is_ours = SHAPES[args.shape], args.memory_of == "ours"
        step = ours(shape) if is_ours else OfficialTEMI(args.official, shape).step
        views, before = torch.randn(2, *shape[:2]), memory()["VmHWM"]
        step(views)
        step(views)
        print(memory()["VmHWM"] - before)
        return

    print(Precision.for_device("cpu", use_fp16=True), versions(), sep="; ")
    print(f"{torch.get_num_threads()} threads, {PAIRS} pairs, instance weight 'mean'")
    columns = ["batch, dim, K, heads", "official s", "ours s", "times faster", "ours half s"]
    header(*columns, "times faster", "MiB official", "MiB ours")
    for index, shape in enumerate(SHAPES):
        views = torch.randn(2, *shape[:2], generator=torch.Generator().manual_seed(0))
        peer = OfficialTEMI(args.official, shape).step
        full, full_peer, ratio = paired(ours(shape), peer, views)
        half, _, half_ratio = paired(ours(shape, half=True), peer, views)
        sides = [["--memory-of", side, "--shape", str(index)] for side in ("official", "ours")]
        peaks = [f"{number_of('step_cost', *flags):.0f}" for flags in sides]
        cells = [f"{x:.2f}" for x in (full_peer, full, ratio, half, half_ratio)]
        row(", ".join(map(str, shape)), *cells, *peaks)


if __name__ == "__main__":
    main()
