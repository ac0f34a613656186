"""Seconds and memory of one training step, beside its bare matrix products or the official code.

    python -m benchmarks.step_cost
    python -m benchmarks.step_cost --compiled
    python -m benchmarks.step_cost --official PATH_OF_A_CHECKOUT

The bare products are what no step can do without: forward and backward of the students, forward of
the teachers where there are any, as batched products over the same chunks of heads. The official
TEMI code trains the same number of full-size heads (512 -> 256) on the same batch. The two sides
take turns in one process, and the ratio is the median over pairs, so that a machine whose speed
drifts does not matter. Memory is the growth of the peak resident set over one step, each side in a
process of its own.
"""

from __future__ import annotations

import argparse
import platform
import re
import statistics
import subprocess
import sys
import time
from importlib.metadata import distributions, version
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.official_temi import OfficialTEMI
from ssl_kd.guard import Precision
from ssl_kd.heads import HeadBank, TEMIHead
from ssl_kd.losses import InstanceWeight
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.step import HeadTrainer, head_chunks

FULL = (512, 256)  # hidden and bottleneck
DEFAULT = (VisionSettings.hidden_dim, VisionSettings.bottleneck_dim)
SHAPES = [(512, 384, 10, 50), (512, 384, 1000, 50), (1024, 768, 1000, 50)]
# batch, dim, K, heads; widths; whether the targets are given, as with METHOD graph
BESIDE_PRODUCTS = [
    ((256, 64, 10, 16), DEFAULT, True),  # the defaults on digits
    ((256, 64, 10, 48), DEFAULT, False),
    ((512, 384, 10, 50), FULL, False),
    ((512, 384, 1000, 16), FULL, True),
    ((512, 384, 1000, 50), FULL, False),
]


def ours(
    batch: int,
    dim: int,
    clusters: int,
    heads: int,
    half: bool = False,
    weight: InstanceWeight = "none",
    widths: tuple[int, int] = FULL,
    given: bool = False,
    fast: bool = False,
):
    """A step of ours, as a function of views; `fast`: compiled."""
    trainer = HeadTrainer(
        HeadBank(lambda: TEMIHead(dim, clusters, *widths), heads),
        VisionSettings(batch_size=batch, instance_weight=weight, compile=fast),
        Precision.for_device("cpu", use_fp16=half),
        clusters,
    )
    targets = None
    if given:
        targets = functional.one_hot(torch.randint(clusters, (2, batch)), clusters).float()
    return lambda views: trainer.step(views, 1e-4, given=targets)


def products(batch: int, dim: int, clusters: int, heads: int, widths: tuple[int, int], given: bool):
    """The matrix products of such a step and nothing else, as a function of views."""
    hidden, bottleneck = widths
    bank = HeadBank(lambda: TEMIHead(dim, clusters, hidden, bottleneck), heads)
    sizes = [(dim, hidden), (hidden, bottleneck), (bottleneck, clusters)]
    weights = [torch.randn(heads, wide, narrow) for narrow, wide in sizes]
    biases = [torch.randn(heads, 1, width) for width in widths]
    chunks = head_chunks(
        heads, 4 * (2 * batch * bank.width + bank.n_parameters), torch.device("cpu")
    )

    def forward(rows: slice, x: torch.Tensor):
        first, second, third = (weight[rows].mT for weight in weights)
        h = torch.baddbmm(biases[0][rows], x, first)
        z = torch.baddbmm(biases[1][rows], h, second)
        return h, z, torch.bmm(z, third)

    def step(views: torch.Tensor) -> None:
        for rows in chunks:
            _, second, third = (weight[rows] for weight in weights)
            x = views.flatten(0, 1).expand(len(second), -1, -1)
            if not given:
                forward(rows, x)
            h, z, logits = forward(rows, x)
            of_z, _ = torch.bmm(logits, third), torch.bmm(logits.mT, z)
            of_h, _ = torch.bmm(of_z, second), torch.bmm(of_z.mT, h)
            torch.bmm(of_h.mT, x)

    return step


def beside_products(runs: int) -> None:
    """Print the ratio of the step to its bare products, for each of `BESIDE_PRODUCTS`."""
    columns = ["batch, dim, K, heads", "widths", "targets", "products ms", "step ms", "times"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for shape, widths, given in BESIDE_PRODUCTS:
        views = torch.randn(2, shape[0], shape[1], generator=torch.Generator().manual_seed(0))
        bare, whole, ratio = paired(
            products(*shape, widths=widths, given=given),
            ours(*shape, widths=widths, given=given),
            views,
            runs,
        )
        print(
            f"| {', '.join(map(str, shape))} | {', '.join(map(str, widths))} "
            f"| {'given' if given else 'of teachers'} "
            f"| {1000 * bare:.1f} | {1000 * whole:.1f} | {ratio:.2f} |",
            flush=True,
        )


def beside_compiled(runs: int) -> None:
    """Print what COMPILE is worth, and after how many steps it has paid back."""
    columns = ["batch, dim, K, heads", "targets", "plain ms", "compiled ms", "times", "compiling s"]
    print(f"| {' | '.join(columns)} | pays back after steps |\n|{'---|' * 7}")
    for shape, widths, given in BESIDE_PRODUCTS:
        views = torch.randn(2, shape[0], shape[1], generator=torch.Generator().manual_seed(0))
        torch.compiler.reset()
        fast = ours(*shape, widths=widths, given=given, fast=True)
        began = time.perf_counter()
        fast(views)
        fast(views)
        cold = time.perf_counter() - began
        compiled, plain, ratio = paired(fast, ours(*shape, widths=widths, given=given), views, runs)
        pays = f"{cold / (plain - compiled):,.0f}" if compiled < plain else "never"
        print(
            f"| {', '.join(map(str, shape))} | {'given' if given else 'of teachers'} "
            f"| {1000 * plain:.1f} | {1000 * compiled:.1f} | {ratio:.2f} | {cold:.0f} | {pays} |",
            flush=True,
        )


def official(batch: int, dim: int, clusters: int, heads: int, checkout: Path):
    """A step of the official code, as a function of views."""
    peer = OfficialTEMI(checkout, in_dim=dim, n_clusters=clusters, n_heads=heads, batch_size=batch)
    return peer.step


def paired(a, b, views, runs: int) -> tuple[float, float, float]:
    """Median seconds of a, of b, and the median of b / a over alternating pairs."""
    times: list[tuple[float, float]] = []
    for run in range(runs + 1):
        pair = []
        for step in (a, b):
            began = time.perf_counter()
            step(views)
            pair.append(time.perf_counter() - began)
        if run:  # the first pair warms up
            times.append((pair[0], pair[1]))
    first, second = zip(*times, strict=True)
    ratio = statistics.median(y / x for x, y in times)
    return statistics.median(first), statistics.median(second), ratio


def peak_growth(build, views) -> float:
    """MiB by which the peak resident set grows in two steps."""
    step = build()
    before = peak_mib()
    step(views)
    step(views)
    return peak_mib() - before


def versions(*packages: str) -> str:
    """Python, torch and those packages that are installed, with their versions."""
    installed = {found.name.lower().replace("_", "-") for found in distributions()}
    said = [f"{name} {version(name)}" for name in ("torch", *packages) if name in installed]
    return ", ".join([f"Python {platform.python_version()}", *said])


def peak_mib() -> float:
    """Peak resident set of this process so far, in MiB (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status).group(1)) / 1024  # type: ignore[union-attr]


def main() -> None:
    parser = argparse.ArgumentParser(description="One step, beside its bare products or a peer.")
    parser.add_argument("--official", type=Path, help="checkout of the official TEMI code")
    parser.add_argument("--compiled", action="store_true", help="beside the compiled step")
    parser.add_argument("--runs", type=int, default=5, help="pairs per shape")
    parser.add_argument("--weight", default="mean", choices=["none", "own", "mean"])
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.official is None:
        print(f"{versions()}, {torch.get_num_threads()} threads, {args.runs} pairs")
        (beside_compiled if args.compiled else beside_products)(args.runs)
        return
    if args.memory_of:
        shape = SHAPES[args.shape]
        views = torch.randn(2, shape[0], shape[1])
        build = {
            "ours": lambda: ours(*shape, half=False, weight=args.weight),
            "official": lambda: official(*shape, checkout=args.official),
        }[args.memory_of]
        print(peak_growth(build, views))
        return

    def memory(side: str, index: int) -> float:
        words = [
            sys.executable,
            "-m",
            "benchmarks.step_cost",
            "--official",
            str(args.official),
            "--memory-of",
            side,
        ]
        words += ["--shape", str(index), "--weight", args.weight]
        return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)

    print(Precision.for_device("cpu", use_fp16=True))
    print(f"{torch.get_num_threads()} threads, {args.runs} pairs, instance weight {args.weight!r}")
    columns = ["batch, dim, K, heads", "official s", "ours s", "times faster", "ours half s"]
    columns += ["times faster", "MiB official", "MiB ours"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for index, shape in enumerate(SHAPES):
        views = torch.randn(2, shape[0], shape[1], generator=torch.Generator().manual_seed(0))
        peer = official(*shape, checkout=args.official)
        full, full_peer, ratio = paired(
            ours(*shape, half=False, weight=args.weight), peer, views, args.runs
        )
        half, _, half_ratio = paired(
            ours(*shape, half=True, weight=args.weight), peer, views, args.runs
        )
        print(
            f"| {', '.join(map(str, shape))} | {full_peer:.2f} | {full:.2f} | {ratio:.2f} "
            f"| {half:.2f} | {half_ratio:.2f} | {memory('official', index):.0f} "
            f"| {memory('ours', index):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
