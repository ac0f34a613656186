"""Measure all GPU figures in one command, each next to its target, and run the tests on the GPU.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --official PATH_OF_A_CHECKOUT --out DIR

Times are wall times, synchronized with the device at both ends; medians over rounds. Writes
`gpu.md` and `gpu.json` to --out. A measurement that fails becomes a row with the reason, and the
others still run. `--device cpu` only tests this code at tiny shapes; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks import trl_trainer as language
from benchmarks.step_cost import DEFAULT, FULL, OfficialTEMI, Shape, trainer_of, versions
from benchmarks.turns import table_head, table_line
from ssl_kd.core.precision import Precision
from ssl_kd.vision.data import ImageDataset, open_dataset
from ssl_kd.vision.extract import Extraction
from ssl_kd.vision.teachers import Network
from ssl_kd.vision.teachers.network import Transform


@dataclass(frozen=True)
class Row:
    """A row of the table: a figure, its measured value with the unit, and its target."""

    what: str
    value: str
    target: str = ""
    met: bool | None = None  # None without a target


@dataclass(frozen=True)
class Size:
    """The sizes of the measurements."""

    large: Shape  # of the large vision step
    default: Shape  # of the defaults on digits
    steps: int  # per round
    rounds: int
    images: int  # to extract
    side: int  # height and width of the network's input, in pixels
    text: tuple[str, str, int, int, int]  # teacher, student as LAYERSxDIM; V, batch, length


WIDE = ("24x1024", "12x768", 128_256, 8, 1024)
WHOLE = Size((512, 768, 1000, 50), (256, 64, 10, 48), 100, 5, 4000, 224, WIDE)
TINY = Size((32, 16, 5, 4), (16, 8, 3, 2), 2, 2, 12, 32, ("1x64", "1x64", 500, 2, 16))
BATCH = 64  # images
PARTS = ("vision", "sync", "extraction", "language", "tests")
# Seconds; ratio to the official step; share of the pace of forward passes; ratio to our step.
TARGETS = {"large": 3e-3, "default": 0.5e-3, "official": 50.0, "extraction": 0.95, "language": 1.0}


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(step: Callable[[], object], size: Size, device: torch.device) -> float:
    """Return the median seconds of a step over rounds; the first round warms up."""
    times = []
    for _ in range(size.rounds + 1):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(size.steps):
            step()
        synchronize(device)
        times.append((time.perf_counter() - began) / size.steps)
    return statistics.median(times[1:])


def vision_rows(size: Size, device: torch.device, official: Path | None) -> Iterator[Row]:
    """Measure the step of the heads per precision of its products, and the official step."""
    for name, shape, widths in (("large", size.large, FULL), ("default", size.default, DEFAULT)):
        target, best, views = TARGETS[name], float("inf"), torch.empty(0)
        for products in ("fp32", "half"):
            trainer = trainer_of(shape, widths, device, products == "half")
            views = torch.randn(2, *shape[:2]).to(device)
            median = seconds(lambda: trainer.step(views, 1e-4), size, device)  # noqa: B023
            best = min(best, median)
            what = f"vision step {shape}, {products}"
            yield Row(what, f"{1e3 * median:.3f} ms", f"{1e3 * target:g} ms", median <= target)
        if official is None:
            continue
        peer = OfficialTEMI(official, shape)
        for module in (peer.student, peer.teacher, peer.loss):
            module.to(device)
        ratio = seconds(lambda: peer.step(views), size, device) / best  # noqa: B023
        target = TARGETS["official"]
        what = f"official TEMI {shape}, 512 -> 256, relative to our fastest"
        yield Row(what, f"{ratio:.1f} times our time", f"{target:g} times", ratio >= target)
    if official is None:
        yield Row("official TEMI", "not measured: set --official CHECKOUT", "50 times", False)


def sync_rows(size: Size, device: torch.device) -> Iterator[Row]:
    """Fail if a vision step synchronizes with the device, as CUDA's sync debug mode reports it."""
    if device.type != "cuda":
        return
    trainer = trainer_of(size.large, FULL, device)
    views = torch.randn(2, *size.large[:2]).to(device)
    trainer.step(views, 1e-4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.step(views, 1e-4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    yield Row("a vision step synchronizes with the device", "never", "never", True)


def bare(teacher: Network, batches: list[Tensor], precision: Precision) -> float:
    """Return the seconds of the forward passes alone, synchronized once at the end."""
    began = time.perf_counter()
    half = precision.teacher != torch.float32
    with (
        torch.inference_mode(),
        torch.autocast(precision.device.type, dtype=precision.teacher, enabled=half),
    ):
        for batch in batches:
            teacher.features(batch)
    if precision.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def whole(dataset: ImageDataset, teacher: Network, precision: Precision) -> float:
    """Return the seconds of an extraction into an empty folder, with fsync and checksums."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        options: Any = {"split": "train", "precision": precision, "workers": 8}
        Extraction(dataset, teacher, folder, batch_size=BATCH, **options).store()
        return time.perf_counter() - began


def extraction_rows(size: Size, device: torch.device) -> Iterator[Row]:
    """Compare an extraction to a verified cache with the forward passes of the same network."""
    from torchvision.models import vit_b_16

    precision = Precision.for_device(device)
    model = vit_b_16(image_size=size.side, weights=None)
    model.heads = torch.nn.Sequential()
    teacher = Network("vit_b_16, random", model, model, Transform(size.side, size.side)).to(device)
    with tempfile.TemporaryDirectory() as folder:
        generator = np.random.default_rng(0)
        for i in range(size.images):
            pixels = generator.integers(256, size=(size.side, size.side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(Path(folder) / f"{i}.jpg")
        dataset = open_dataset(folder, "train")
        assert isinstance(dataset, ImageDataset)
        images = [teacher.preprocess(dataset.image(row)) for row in range(len(dataset))]
        batches = torch.stack(images).split(BATCH)
        batches = [teacher.transform.normalize(batch.to(device)) for batch in batches]
        bare(teacher, batches[:2], precision)
        shares = [
            bare(teacher, batches, precision) / whole(dataset, teacher, precision)
            for _ in range(size.rounds)
        ]
    share, target = statistics.median(shares), TARGETS["extraction"]
    what = f"extraction, {size.images} JPEGs of {size.side} px, ViT-B/16, {precision}"
    value = f"{100 * share:.1f} % of the pace of forward passes alone"
    yield Row(what, value, f"{100 * target:g} %", share >= target)


def language_rows(size: Size, device: torch.device) -> Iterator[Row]:
    """Compare a step of whole trainings with TRL's trainers, if TRL is installed."""
    teacher_size, student_size, vocabulary, batch, length = size.text
    args = argparse.Namespace(batch=batch, length=length, device=device.type, models=None)
    args.steps, args.prompt, args.url = min(size.steps, 5), 1, ""
    teacher = language.random_llama(teacher_size, vocabulary, 0)
    student = language.random_llama(student_size, vocabulary, 1)
    shape = f"{teacher_size} to {student_size}, V {vocabulary:,}, {batch} x {length}, fp32"
    times: dict[str, float] = {}
    for name, make in language.METHODS["off"].items():
        if name == "ours, ssl_kd distill":  # compares the Trainers
            continue
        if not name.startswith("ours") and importlib.util.find_spec("trl") is None:
            yield Row(f"language step, {name}", "not measured: run pip install trl", "", False)
            continue
        run = make(args, teacher, copy.deepcopy(student))
        rounds = [language.seconds_of(run)[0] for _ in range(size.rounds + 1)]
        times[name] = median = statistics.median(rounds[1:])
        pace = f"{1e3 * median:.1f} ms, {batch * (length - 1) / median:,.0f} tokens/s"
        if name.startswith("ours"):
            yield Row(f"language step {shape}, ours", pace)
            continue
        ratio, target = median / next(iter(times.values())), TARGETS["language"]
        value = f"{pace}: {ratio:.2f} times our time"
        yield Row(f"language step, {name}", value, "our time or longer", ratio >= target)


def test_rows(tests: str) -> Iterator[Row]:
    """Run the tests on this machine."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests.split()]
    result = subprocess.run(command, capture_output=True, text=True)
    lines = result.stdout.strip().splitlines() or [result.stderr.strip()[-200:]]
    yield Row(f"pytest {tests}".rstrip(), lines[-1].strip("= "), "all pass", result.returncode == 0)


def collected(parts: dict[str, Callable[[], Iterator[Row]]]) -> list[Row]:
    """Return the rows of all parts; a part that fails keeps its rows and adds the error."""
    rows = []
    for name, part in parts.items():
        try:
            for row in part():
                rows.append(row)
                print(f"{row.what}: {row.value}", file=sys.stderr, flush=True)
        except Exception as error:  # noqa: BLE001 - the other parts are still measured
            message = " ".join(str(error).split())[:300]
            rows.append(Row(name, f"failed: {type(error).__name__}: {message}", "", False))
    return rows


def table(rows: list[Row], heading: str) -> str:
    """Return the table in Markdown."""
    verdicts = {True: "yes", False: "**no**", None: ""}
    cells = [[row.what, row.value, row.target, verdicts[row.met]] for row in rows]
    lines = [heading, "", table_head(["what", "measured", "target", "met"])]
    return "\n".join([*lines, *map(table_line, cells)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--official", type=Path, help="checkout of the official TEMI code")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the table")
    parser.add_argument("--tests", default="tests", help="arguments of pytest")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.gpu needs a CUDA device, and torch sees none: run it on a GPU machine "
            "(--device cpu only tests its code at tiny shapes)"
        )
    warnings.filterwarnings("ignore")  # TRL warns that its trainers are experimental
    device, real = torch.device(args.device), args.device == "cuda"
    size = WHOLE if real else TINY
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "vision": lambda: vision_rows(size, device, args.official),
        "sync": lambda: sync_rows(size, device),
        "extraction": lambda: extraction_rows(size, device),
        "language": lambda: language_rows(size, device),
        "tests": lambda: test_rows(args.tests),
    }
    parts = {name: part for name, part in parts.items() if name in args.only}
    rows = collected(parts)
    name = torch.cuda.get_device_name() if real else "CPU, tiny shapes: these figures mean nothing"
    if not real:
        rows = [Row(row.what, row.value, row.target) for row in rows]
    written = table(rows, f"{name}; {versions('triton', 'transformers', 'trl')}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu.md").write_text(written)
    (args.out / "gpu.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(written)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
