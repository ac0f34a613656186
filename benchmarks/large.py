"""A million embeddings from disk: resident memory, and the cost of a step as N grows.

    python -m benchmarks.large                 # 1,000,000 x 768, about 3 GB in a temporary folder

Writes synthetic embeddings (50 clusters) through the store, then trains on them without ever
holding them. Each size runs in a process of its own. Exact neighbours of a million rows are hours
of CPU time and not what is measured: a sample's neighbours are rows of its own cluster, by
construction.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.step_cost import peak_mib
from ssl_kd.guard import Precision
from ssl_kd.store import EmbeddingStore, EmbeddingWriter, Fingerprint
from ssl_kd.training.schedule import learning_rate_at
from ssl_kd.vision.fit import make_trainer
from ssl_kd.vision.pairs import PairSampler
from ssl_kd.vision.projection import Projection
from ssl_kd.vision.settings import VisionSettings

CLUSTERS = 50


def write(folder: Path, n: int, dim: int) -> None:
    """Row i belongs to cluster i % 50."""
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(CLUSTERS, dim, generator=g)
    fingerprint = Fingerprint("synthetic", "none", "none", "float32", f"{n} x {dim}")
    ids = [str(i) for i in range(n)]
    with EmbeddingWriter(folder, "train", fingerprint, n, dim, ids=ids) as writer:
        for rows in torch.arange(n).split(20_000):
            noise = torch.randn(len(rows), dim, generator=g)
            writer.append(centres[rows % CLUSTERS] + noise, rows)
        writer.close()


def measure(folder: Path, steps: int) -> dict[str, float]:
    """Train from disk; median seconds of gather and of step, and the peak resident set."""
    store = EmbeddingStore.open(folder, "train", verify=False)
    settings = VisionSettings(n_clusters=CLUSTERS, method="heads", n_heads=48)
    projection = Projection.fit(store.gather(torch.arange(10_000)), settings.pca_dim)
    precision = Precision.for_device("cpu")
    trainer = make_trainer(settings, projection.dim, CLUSTERS, precision)
    offsets = torch.arange(1, settings.neighbours + 1) * CLUSTERS
    neighbours = ((torch.arange(store.n).unsqueeze(1) + offsets) % store.n).int()
    allowed = torch.ones_like(neighbours, dtype=torch.bool)
    sampler = PairSampler(neighbours, allowed, settings.batch_size, 0)
    gathers, whole = [], []
    for step in range(steps):
        rows, partners = sampler(step)
        began = time.perf_counter()
        x = store.gather(torch.cat([rows, partners]))
        gathers.append(time.perf_counter() - began)
        rate = learning_rate_at(step, steps, settings.learning_rate, settings.warmup_fraction)
        trainer.step(projection(x).unflatten(0, (2, len(rows))), rate)
        whole.append(time.perf_counter() - began)
    return {
        "gather": 1e3 * statistics.median(gathers),
        "step": 1e3 * statistics.median(whole),
        "peak": peak_mib(),
        "neighbours": neighbours.numel() * 4 / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A million embeddings from disk.")
    parser.add_argument("--rows", type=int, nargs="+", default=[50_000, 1_000_000])
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="on a disk with room; default: a temporary one")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.steps)))
        return
    print("| rows | dim | gather ms | step ms | peak resident MiB | of these neighbours MiB |")
    print("|---|---|---|---|---|---|")
    for n in args.rows:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            write(Path(folder), n, args.dim)
            words = [sys.executable, "-m", "benchmarks.large", "--measure", folder]
            words += ["--steps", str(args.steps)]
            run = subprocess.run(words, check=True, capture_output=True, text=True)
        m = json.loads(run.stdout)
        print(
            f"| {n:,} | {args.dim} | {m['gather']:.1f} | {m['step']:.1f} | {m['peak']:.0f} "
            f"| {m['neighbours']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
