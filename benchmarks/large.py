"""Measure whole runs on ten million embeddings: memory, and the time of each stage.

    python -m benchmarks.large --rows 1000000 --dim 64              # both methods
    python -m benchmarks.large --rows 10000000 --dim 64 --methods heads --folder DISK

Writes a mixture of Gaussians to the disk, a block at a time: 50 classes of 20 modes each, whose
noise falls off with the dimension as the spectrum of real features does. Then `train.py` runs on
that file: extraction into the store, neighbours, training, answer, judge, report. Nothing is made
up for it. Memory is watched from outside, twenty times a second: anonymous pages (RssAnon: what the
process itself holds) and pages of files that are mapped (RssFile: what the system may take back at
any time) apart, and their sum.

The disk has to hold the features three times: as given, in the store, and, while neighbours are
searched, twice in float16; and the neighbours twice.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

CLASSES, MODES = 50, 20
ROWS_PER_BLOCK = 50_000
GIB = 2**30


def write(path: Path, n: int, dim: int) -> None:
    """`path`, float32 [n, dim], and its labels beside it."""
    g = np.random.default_rng(0)
    centres = g.normal(size=(CLASSES, 1, dim)) + 0.6 * g.normal(size=(CLASSES, MODES, dim))
    centres = centres.reshape(CLASSES * MODES, dim).astype(np.float32)
    spread = np.arange(1, dim + 1) ** -0.5
    spread = (0.6 * spread / np.sqrt(np.mean(spread**2))).astype(np.float32)
    labels = np.empty(n, np.int64)
    with open(path, "wb") as file:
        about = {"descr": "<f4", "fortran_order": False, "shape": (n, dim)}
        np.lib.format.write_array_header_1_0(file, about)
        for start in range(0, n, ROWS_PER_BLOCK):
            mode = g.integers(len(centres), size=min(ROWS_PER_BLOCK, n - start))
            noise = g.standard_normal((len(mode), dim), np.float32) * spread
            file.write((centres[mode] + noise).data)
            labels[start : start + len(mode)] = mode // MODES
    np.save(path.with_name(f"{path.stem}_labels.npy"), labels)


def resident(process: int) -> dict[str, int]:
    """Bytes of a process that are resident now: its own, those of files, and both."""
    text = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    kept = {name: 1024 * int(kib) for name, kib in re.findall(r"(Rss\w+|VmRSS):\s+(\d+)", text)}
    return {name: kept.get(name, 0) for name in ("RssAnon", "RssFile", "VmRSS")}


def watched(words: list[str], log: Path, threads: int) -> tuple[float, dict[str, int]]:
    """Return the seconds of a command, and its peak resident memory."""
    peak: dict[str, int] = {}
    began = time.perf_counter()
    with open(log, "w", encoding="utf-8") as out:
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=env)
        while process.poll() is None:
            for name, size in resident(process.pid).items():
                peak[name] = max(size, peak.get(name, 0))
            time.sleep(0.05)
    seconds = time.perf_counter() - began
    if process.returncode:
        sys.exit(f"{' '.join(words)} ended with {process.returncode}:\n{log.read_text()[-2000:]}")
    return seconds, peak


def whole(features: Path, method: str, threads: int, flags: list[str]) -> dict[str, Any]:
    """Run `train.py` on a file of features."""
    folder = features.parent
    words = [sys.executable, "train.py", "--dataset", str(features), "--method", method]
    words += ["--embeddings_dir", str(folder / "store"), "--runs_dir", str(folder / "runs")]
    words += ["--run_name", method, *flags]
    seconds, peak = watched(words, folder / f"{method}.log", threads)
    run = folder / "runs" / method
    metrics = json.loads((run / "metrics.json").read_text())
    scores = {(row["name"], row["split"]): row["acc"] for row in metrics["table"]}
    return {
        "method": method,
        "acc": scores["consensus", "train"],
        "kmeans": scores.get(("k-means", "train")),
        "steps": metrics["steps"],
        "neighbours": metrics["neighbours"],
        "seconds": {
            **metrics["seconds"],
            "start and report": seconds - metrics["seconds"]["total"],
        },
        "peak": peak,
    }


def beside_exact(n: int, found: dict[str, Any]) -> str:
    """The search beside that of all pairs, which was timed on the rows that it is tuned by."""
    rows, seconds = 2 * found["queries"], sum(found["seconds"].values())
    exact = found["seconds"]["exact"] * n / rows
    return (
        f"neighbours: {seconds:,.0f} s, recall {found['recall']:.3f}; all pairs {exact:,.0f} s, "
        f"{n:,} / {rows:,} x {found['seconds']['exact']:.1f} s: x {exact / seconds:.0f}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Whole runs from disk; flags of train.py may follow.", allow_abbrev=False
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--methods", nargs="+", default=["heads", "graph"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, help="on a disk with room; default: a temporary one")
    args, flags = parser.parse_known_args()
    work = Path(tempfile.mkdtemp(dir=args.folder, prefix="large-"))
    try:
        features = work / "features.npy"
        began = time.perf_counter()
        write(features, args.rows, args.dim)
        print(
            f"{args.rows:,} x {args.dim} written in {time.perf_counter() - began:.0f} s", flush=True
        )
        runs = [whole(features, method, args.threads, flags) for method in args.methods]
    finally:
        shutil.rmtree(work)
    for run in runs:
        print(json.dumps(run))
        stages = ", ".join(f"{name} {value:,.0f} s" for name, value in run["seconds"].items())
        peak = {name: size / GIB for name, size in run["peak"].items()}
        print(
            f"METHOD {run['method']}: ACC {100 * run['acc']:.2f} %, {run['steps']:,} steps; "
            f"{stages}; resident at most {peak['VmRSS']:.2f} GiB, of its own "
            f"{peak['RssAnon']:.2f} GiB, of mapped files {peak['RssFile']:.2f} GiB\n"
        )
        if run["neighbours"]["index"] != "exact":
            print(beside_exact(args.rows, run["neighbours"]))


if __name__ == "__main__":
    main()
