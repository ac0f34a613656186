"""Whole runs on ten million embeddings: resident memory, the time of each stage, and 10⁹ rows.

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

from ssl_kd.store.approximate import CELLS_PER_ROOT, MOST_CELLS

CLASSES, MODES = 50, 20
ROWS_PER_BLOCK = 50_000
GIB = 2**30
TARGET = 10**9


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
    """Seconds of a command, and the most that it had resident."""
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
    """One run of `train.py` on a file of features."""
    folder = features.parent
    words = [sys.executable, "train.py", "--dataset", str(features), "--method", method]
    words += ["--embeddings_dir", str(folder / "store"), "--runs_dir", str(folder / "runs")]
    words += ["--run_name", method, *flags]
    seconds, peak = watched(words, folder / f"{method}.log", threads)
    run = folder / "runs" / method
    metrics = json.loads((run / "metrics.json").read_text())
    scores = {(row["name"], row["split"]): row["acc"] for row in metrics["table"]}
    files = {p.name: p.stat().st_size for p in run.iterdir() if p.is_file()}
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
        "assignments": next(size for name, size in files.items() if "assignments" in name),
    }


def beside_exact(n: int, found: dict[str, Any]) -> str:
    """The search beside that of all pairs, which was timed on the rows that it is tuned by."""
    rows, seconds = 2 * found["queries"], sum(found["seconds"].values())
    exact = found["seconds"]["exact"] * n / rows
    return (
        f"neighbours: {seconds:,.0f} s, recall {found['recall']:.3f}; all pairs {exact:,.0f} s, "
        f"{n:,} / {rows:,} x {found['seconds']['exact']:.1f} s: x {exact / seconds:.0f}\n"
    )


def projected(n: int, dim: int, run: dict[str, Any]) -> list[str]:
    """What the stages of a run of n rows come to at 10⁹, each with its arithmetic."""
    found, seconds, times = run["neighbours"], run["seconds"], TARGET / n
    lines = [
        f"| cost at 10⁹ rows x {dim}, METHOD {run['method']} | | arithmetic |",
        "|---|---|---|",
    ]

    def line(what: str, value: float, unit: str, why: str) -> None:
        lines.append(f"| {what} | {value:,.1f} {unit} | {why} |")

    def hours(what: str, measured: float, factor: float, why: str) -> None:
        line(what, measured * factor / 3600, "h", f"{measured:,.1f} s x {why} = x {factor:,.0f}")

    linear = f"(10⁹ / {n:,})"
    hours("extraction and its checks", seconds["extract"], times, linear)
    if found["index"] != "exact":
        cells = min(CELLS_PER_ROOT * round(TARGET**0.5), MOST_CELLS)
        more, part = cells / found["nlist"], found["seconds"]
        cell = f"({cells:,} / {found['nlist']:,} cells)"
        hours("index: k-means", part["train"], more**2, f"{cell}²")
        hours("index: rows into cells", part["add"], times * more, f"{linear} x {cell}")
        hours("exact neighbours to tune by", part["exact"] + part["tune"], times, linear)
        hours("search", part["search"], times**2 / more, f"{linear}² / {cell}")
        index, pairs = 2 * (2 * dim + 8), 2 * 4 * 20
        why = f"2 x (2 x {dim} + 8) + 2 x 4 x 20 B"
        line("disk for the search", TARGET * (index + pairs) / 2**40, "TiB", why)
    hours("training, as many steps", seconds["train"], 1, "1")
    hours("answer and its file", seconds["answer"], times, linear)
    line("judge: of 100,000 rows", seconds["judge"] / 3600, "h", f"{seconds['judge']:,.1f} s x 1")
    bytes_a_row = run["assignments"] / n
    line("assignments", bytes_a_row * TARGET / GIB, "GiB", f"{bytes_a_row:.1f} B a row")
    lines.append("")
    lines.append("Memory that grows with the rows, bytes each, at 10⁹ (1 B = 0.93 GiB):")
    lines += ["", "| structure | B a row | GiB at 10⁹ |", "|---|---|---|"]
    for what, size in (
        ("store: labels and places in the data set", 16),
        ("pairs: which neighbours are mutual, of 20", 20),
        ("pairs: order of the epoch", 8),
        ("answer: TOP_K 3 with probabilities, cluster, outlier score", 3 * 8 + 8),
        ("answer: each level of the tree (METHOD graph)", 4),
        ("scores of the whole answer by scikit-learn, while they are computed", 64),
    ):
        lines.append(f"| {what} | {size} | {size * TARGET / GIB:,.0f} |")
    return lines


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
        print("\n".join(projected(args.rows, args.dim, run)), "\n")


if __name__ == "__main__":
    main()
