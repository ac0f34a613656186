"""What extraction costs beyond the bare forward passes of the same model on the same batches.

Both run in this process, in turn, on the same images: `bare` has them decoded and normalised in
memory and only calls the network; `extract` starts from the files and ends with a verified cache.
On a CPU, where nothing runs beside the network, the forward passes inside `extract` are timed too:
that ratio does not suffer when the machine's speed drifts between the two sides of a pair.

    python benchmarks/extraction.py --data FOLDER --teacher timm:resnet18 --image_size 128
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
from torch import Tensor

from ssl_kd.datasets import ImageDataset, open_dataset
from ssl_kd.guard.precision import Precision
from ssl_kd.teachers import Network, load_teacher
from ssl_kd.vision.extract import extract

TARGET = 1.05


def bare(teacher: Network, batches: list[Tensor], precision: Precision) -> float:
    """Seconds for the network alone; each result is waited for only at the end."""
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


def whole(
    dataset: ImageDataset, teacher: Network, precision: Precision, batch_size: int, workers: int
) -> float:
    """Seconds for the extraction into an empty folder, fsync and checksums included."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        extract(
            dataset,
            teacher,
            folder,
            split="train",
            precision=precision,
            batch_size=batch_size,
            workers=workers,
        )
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True, help="a data set by name, or a folder")
    parser.add_argument("--split", default="train", choices=("train", "test"))
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--teacher", default="efficientnet_lite0")
    parser.add_argument("--teacher_weights")
    parser.add_argument("--dinov2_model", default="dinov2_vits14")
    parser.add_argument("--image_size", type=int)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    precision = Precision.for_device(options.device)
    dataset = open_dataset(options.data, options.split, root=options.data_dir)
    teacher = load_teacher(
        options.teacher,
        dinov2_model=options.dinov2_model,
        weights=options.teacher_weights,
        image_size=options.image_size,
        device=precision.device,
        dataset=dataset,
    )
    if not isinstance(teacher, Network) or not isinstance(dataset, ImageDataset):
        parser.error("this measures a network on images")
    images = torch.stack([teacher.preprocess(dataset.image(i)) for i in range(len(dataset))])
    batches = [
        teacher.transform.normalise(part.to(precision.device))
        for part in images.split(options.batch_size)
    ]
    print(f"{len(dataset)} images, {teacher.name}, {teacher.transform_id}")
    print(f"batch {options.batch_size}, {torch.get_num_threads()} threads, {precision}")
    bare(teacher, batches[:2], precision)  # warm up

    ratios, inside = [], []
    passes: list[float] = []
    features = teacher.features

    def timed(batch: Tensor) -> Tensor:
        began = time.perf_counter()
        found = features(batch)
        passes.append(time.perf_counter() - began)
        return found

    if precision.device.type == "cpu":
        teacher.features = timed
    sides = {
        "bare": lambda: bare(teacher, batches, precision),
        "whole": lambda: whole(dataset, teacher, precision, options.batch_size, options.workers),
    }
    for _ in range(options.rounds):
        wall, cpu = {}, {}
        for side, seconds in sides.items():
            passes.clear()
            began = time.process_time()
            wall[side] = seconds()
            cpu[side] = time.process_time() - began
            if side == "whole" and passes:
                inside.append(wall[side] / sum(passes))
        sides = dict(reversed(sides.items()))  # so that a machine that slows down favours neither
        alone, full, cpu_alone, cpu_full = wall["bare"], wall["whole"], cpu["bare"], cpu["whole"]
        ratios.append(full / alone)
        print(
            f"bare {alone:7.2f} s   extract {full:7.2f} s   {ratios[-1]:.3f}x   "
            f"{len(dataset) / full:.0f} images/s   (processor time {cpu_full / cpu_alone:.3f}x)",
            flush=True,
        )
    middle = statistics.median(ratios)
    said = "within" if middle <= TARGET else "OVER"
    print(f"median {middle:.3f}x: {said} the target of {TARGET}x")
    if inside:
        low, middle, high = min(inside), statistics.median(inside), max(inside)
        print(f"against its own forward passes {middle:.3f}x ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
