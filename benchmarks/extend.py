"""New data: does a class that was never seen become a cluster, and does nothing else?

    python -m benchmarks.extend                          # digits and 10,000 of Fashion-MNIST
    python -m benchmarks.extend --predict 1000000        # memory of predicting rows of a file

Four fifths of a set without some classes are clustered, and the last fifth, all classes, is added
by `partial_fit`. A row tells of the known classes' samples how many keep the cluster that the
model gave them before, of the unseen ones' how many are in an offered cluster, how pure these are,
and how many training samples would change theirs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.sets import SETS, Absent, Sources
from benchmarks.step_cost import peak_mib
from ssl_kd import MultiHeadClusterer

UNSEEN: tuple[tuple[int, ...], ...] = ((), (9,), (3,))
DIM, CLUSTERS = 64, 10


def measure(x: np.ndarray, y: np.ndarray, unseen: tuple[int, ...], seed: int) -> str:
    """One row of the table, for a random split."""
    order = np.random.default_rng(seed).permutation(len(x))
    old, new = np.split(order, [len(x) * 4 // 5])
    old = old[~np.isin(y[old], unseen)]
    clusterer = MultiHeadClusterer(len(np.unique(y[old])), random_state=seed).fit(x[old])
    before, old_labels = clusterer.predict(x[new]), clusterer.labels_
    began = time.perf_counter()
    after = clusterer.partial_fit(x[new]).labels_
    seconds = time.perf_counter() - began
    is_new, known = np.isin(y[new], unseen), clusterer.model_.options["n_clusters"]
    found = [np.bincount(y[new][after == k]) for k in clusterer.new_clusters_]
    pure = sum(int(counts.max()) for counts in found), sum(int(c.sum()) for c in found)
    purity = f"{pure[0]} of {pure[1]}" if found else "-"
    kept = (after == before)[~is_new]
    moved = (clusterer.predict(x[old]) != old_labels).sum()
    return (
        f"{', '.join(map(str, unseen)) or 'none'} | {len(old):,} | {len(new):,} "
        f"| {kept.sum()} of {len(kept)} | {(after[is_new] >= known).sum()} of {is_new.sum()} "
        f"| {len(found)} | {purity} | {moved} | {seconds:.1f} |"
    )


def predict(folder: Path) -> dict[str, float]:
    """Memory of predicting the rows of a mapped file by an extended model."""
    clusterer = MultiHeadClusterer.from_pretrained(folder / "model")
    x = np.load(folder / "rows.npy", mmap_mode="r")
    clusterer.predict(x[:5000])
    start, began = peak_mib(), time.perf_counter()
    clusters = clusterer.predict(x)
    seconds = time.perf_counter() - began
    memory = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mapped = int(memory["RssFile"].split()[0]) / 1024
    found = {"start": start, "peak": peak_mib(), "mapped": mapped}
    return found | {"seconds": seconds, "n": len(clusters)}


def write(folder: Path, n: int) -> None:
    """A model that knows a cluster from later, and a file of n rows."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CLUSTERS + 1, DIM))
    x = (centres[np.arange(6600) % (CLUSTERS + 1)] + rng.normal(size=(6600, DIM))).astype("f4")
    new = np.arange(6600) % (CLUSTERS + 1) == CLUSTERS
    clusterer = MultiHeadClusterer(CLUSTERS, max_steps=100).fit(x[:5500][~new[:5500]])
    clusterer.partial_fit(x[5500:]).save_pretrained(folder / "model")
    rows = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.float32, (n, DIM))
    for block in np.array_split(np.arange(n), max(1, n // 20_000)):
        rows[block] = centres[block % (CLUSTERS + 1)] + rng.normal(size=(len(block), DIM))
    rows.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="New data for finished clusters.")
    parser.add_argument("--sets", nargs="+", default=["digits", "fashion10k"], choices=list(SETS))
    parser.add_argument("--folder", type=Path, help="of NAME.npz, as benchmarks.sets writes them")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--predict", type=int, metavar="ROWS")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    Sources.add_flags(parser)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(predict(args.measure)))
        return
    if args.predict:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), args.predict)
            words = [sys.executable, "-m", "benchmarks.extend", "--measure", folder]
            run = subprocess.run(words, check=True, capture_output=True, text=True)
        m = json.loads(run.stdout)
        print(
            f"{m['n']:,} x {DIM} rows in {m['seconds']:.0f} s. MiB resident: {m['start']:.0f} "
            f"before, {m['peak']:.0f} at the most, {m['mapped']:.0f} of them pages of files, which "
            "the system takes back at will"
        )
        return
    columns = "data, unseen, trained on, new, known: cluster kept, unseen: in an offered cluster, "
    columns += "offered, of their own class, old that would move, s"
    print("| " + columns.replace(", ", " | ") + " |\n" + "|---" * 10 + "|")
    for name in args.sets:
        try:
            if args.folder:
                loaded = np.load(args.folder / f"{name}.npz")
                x, y = loaded["x"], loaded["y"]
            else:
                x, y = SETS[name](Sources.of(args))
        except Absent as error:
            print(f"{name} is left out: {error}")
            continue
        for seed in range(args.seeds):
            for unseen in UNSEEN:
                print(f"| {name} | {measure(x, y, unseen, seed)}", flush=True)


if __name__ == "__main__":
    main()
