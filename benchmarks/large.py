"""Measure whole runs on up to ten million embeddings: memory and the time of each stage.

    python -m benchmarks.large --rows 1000000 --dim 64              # both methods
    python -m benchmarks.large --rows 10000000 --dim 64 --methods heads --folder DISK
    python -m benchmarks.large --rows 60000 --dim 256 --classes 1000 --modes 1 --peers --methods

Writes a mixture of Gaussians to disk block by block: 50 classes with 20 modes each; the noise
decays over the dimensions like the spectrum of real features. `--peers` first clusters the same
rows by `fit` of our estimator, by spherical k-means (FAISS, 25 iterations) and by minibatch k-means
(scikit-learn), with as many threads. Then `train.py` runs on that file as
usual: extraction into the store, neighbors, training, prediction, evaluation, report. Memory is
sampled twenty times a second from outside the process: anonymous pages (RssAnon, its own memory),
pages of mapped files (RssFile, reclaimable by the system at any time), and their sum.

The disk must hold the features twice, in the input and in the store.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import MiniBatchKMeans
from sklearn.preprocessing import normalize
from threadpoolctl import threadpool_limits

from benchmarks.turns import memory
from ssl_kd import MultiHeadClusterer
from ssl_kd.vision.cache.neighbors import load_faiss
from ssl_kd.vision.evaluate import accuracy

CLASSES, MODES = 50, 20
ROWS_PER_BLOCK = 50_000


def write(path: Path, n: int, dim: int, classes: int = CLASSES, modes: int = MODES) -> None:
    """Write float32 embeddings `[n, dim]` to `path`, and their labels to a file beside it."""
    g = np.random.default_rng(0)
    centers = g.normal(size=(classes, 1, dim)) + 0.6 * g.normal(size=(classes, modes, dim))
    centers = centers.reshape(classes * modes, dim).astype(np.float32)
    spread = np.arange(1, dim + 1) ** -0.5
    spread = (0.6 * spread / np.sqrt(np.mean(spread**2))).astype(np.float32)
    labels = np.empty(n, np.int64)
    with open(path, "wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (n, dim)}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, n, ROWS_PER_BLOCK):
            mode = g.integers(len(centers), size=min(ROWS_PER_BLOCK, n - start))
            noise = g.standard_normal((len(mode), dim), np.float32) * spread
            file.write((centers[mode] + noise).data)
            labels[start : start + len(mode)] = mode // modes
    np.save(path.with_name(f"{path.stem}_labels.npy"), labels)


def run(command: list[str], log: Path, threads: int) -> tuple[float, dict[str, float]]:
    """Run a command; return its seconds and the peaks of its memory in GiB."""
    peak = {"RssAnon": 0.0, "RssFile": 0.0, "VmRSS": 0.0}
    began = time.perf_counter()
    with open(log, "w", encoding="utf-8") as out:
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        while process.poll() is None:
            sizes = memory(process.pid)  # empty once the process has ended
            peak = {name: max(size, sizes.get(name, 0)) for name, size in peak.items()}
            time.sleep(0.05)
    seconds = time.perf_counter() - began
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-2000:]}")
    return seconds, {name: round(size / 1024, 2) for name, size in peak.items()}


def spherical_kmeans(x: NDArray, n_clusters: int) -> NDArray:
    """Cluster rows `[n, d]` by spherical k-means of FAISS."""
    faiss = load_faiss()
    unit = normalize(x)
    kmeans = faiss.Kmeans(x.shape[1], n_clusters, niter=25, spherical=True, seed=0)
    kmeans.cp.max_points_per_centroid = len(x)
    kmeans.train(unit)
    return kmeans.index.search(unit, 1)[1].ravel()


def minibatch_kmeans(x: NDArray, n_clusters: int) -> NDArray:
    """Cluster rows `[n, d]` by minibatch k-means of scikit-learn."""
    starts: Any = 3  # scikit-learn's stubs allow only a string
    return MiniBatchKMeans(n_clusters, n_init=starts, random_state=0).fit_predict(x)


def peer(name: str, features: Path, n_clusters: int) -> dict[str, Any]:
    """Run one of `PEERS` on a file of features."""
    x, y = np.load(features), np.load(features.with_name(f"{features.stem}_labels.npy"))
    began = time.perf_counter()
    cpu_began = time.process_time()
    clusters = PEERS[name](x, n_clusters)
    return {
        "method": name,
        "acc": accuracy(y, clusters),
        "seconds": time.perf_counter() - began,
        "CPU seconds": time.process_time() - cpu_began,
        "peak GiB so far": memory()["VmHWM"] / 1024,
    }


def fit(x: NDArray, n_clusters: int) -> NDArray:
    """Cluster rows `[n, d]` by our estimator."""
    return MultiHeadClusterer(n_clusters).fit(x).labels_


PEERS = {"fit": fit, "spherical k-means": spherical_kmeans, "minibatch k-means": minibatch_kmeans}


def whole(features: Path, method: str, threads: int, flags: list[str]) -> dict[str, Any]:
    """Run `train.py` on a file of features."""
    folder = features.parent
    command = [sys.executable, "train.py", "--dataset", str(features), "--method", method]
    command += ["--embeddings_dir", str(folder / "store"), "--runs_dir", str(folder / "runs")]
    command += ["--run_name", method, *flags]
    seconds, peak = run(command, folder / f"{method}.log", threads)
    metrics = json.loads((folder / "runs" / method / "metrics.json").read_text())
    scores = {(row["name"], row["split"]): row["acc"] for row in metrics["table"]}
    return {
        "method": method,
        "acc": scores["consensus", "train"],
        "steps": metrics["steps"],
        "neighbors": metrics["neighbors"],
        "seconds": metrics["seconds"] | {"start and report": seconds - metrics["seconds"]["total"]},
        "peak GiB": peak,
    }


def main() -> None:
    about = "Measure whole runs; other flags go to train.py."
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--classes", type=int, default=CLASSES)
    parser.add_argument("--modes", type=int, default=MODES, help="Gaussians of a class")
    parser.add_argument("--peers", action="store_true", help="also our fit, and two of k-means")
    parser.add_argument("--methods", nargs="*", default=["heads", "consensus"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, help="on a disk with space; default: temporary")
    args, flags = parser.parse_known_args()
    work = Path(tempfile.mkdtemp(dir=args.folder, prefix="large-"))
    try:
        features = work / "features.npy"
        write(features, args.rows, args.dim, args.classes, args.modes)
        for name in PEERS if args.peers else ():
            with threadpool_limits(args.threads):
                print(json.dumps(peer(name, features, args.classes)), flush=True)
        runs = [whole(features, method, args.threads, flags) for method in args.methods]
    finally:
        shutil.rmtree(work)
    for result in runs:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
