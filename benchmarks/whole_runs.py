"""How good whole runs of `train.py` are over seeds, held-out samples too, and how long they take.

    python -m benchmarks.whole_runs                                   # digits, five seeds
    python -m benchmarks.whole_runs --seeds 3 --dataset fashion_mnist # flags of train.py follow

Each seed is one `python train.py` in a process of its own, timed from outside: imports, extraction,
neighbours, graph, training, consensus, baselines and report. Labels are read at the very end, for
the scores.
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

ROWS = [
    "consensus",
    "best head (unsupervised)",
    "mean over heads",
    "graph partition",
    "k-means",
    "spectral clustering",
    "best head with labels (upper bound)",
]


def one_run(folder: Path, seed: int, flags: list[str]) -> tuple[dict, float]:
    """`metrics.json` of one run, and its wall time in seconds."""
    words = [sys.executable, "train.py", "--seed", str(seed), "--runs_dir", str(folder / "runs")]
    words += ["--embeddings_dir", str(folder / "embeddings"), "--run_name", f"seed{seed}", *flags]
    began = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    return json.loads((folder / "runs" / f"seed{seed}" / "metrics.json").read_text()), seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description="ACC over seeds, beside the lines to beat.", allow_abbrev=False
    )
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first_seed", type=int, default=0)
    args, flags = parser.parse_known_args()
    runs, times = [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            metrics, seconds = one_run(Path(folder), seed, flags)
            runs.append(metrics)
            times.append(seconds)
            acc = {row["name"]: row["acc"] for row in metrics["table"] if row["split"] == "train"}
            scores = ", ".join(f"{name} {100 * acc[name]:.1f}" for name in ROWS if name in acc)
            print(f"seed {seed}: {scores}; {seconds:.0f} s", file=sys.stderr, flush=True)

    print(f"\n{' '.join(flags) or 'digits'}, {args.seeds} seeds, {statistics.median(times):.0f} s")
    print(
        "\n| answer | split | ACC median (lowest to highest) | NMI | ARI |\n|---|---|---|---|---|"
    )
    splits = dict.fromkeys(row["split"] for row in runs[0]["table"])
    for split in splits:
        for name in ROWS:
            rows = [r for m in runs for r in m["table"] if (r["name"], r["split"]) == (name, split)]
            if not rows or any(row["acc"] is None for row in rows):
                continue
            acc, nmi, ari = (
                sorted(100 * row[key] for row in rows) for key in ("acc", "nmi", "ari")
            )
            print(
                f"| {name} | {split} | {statistics.median(acc):.1f} ({acc[0]:.1f} to {acc[-1]:.1f})"
                f" | {statistics.median(nmi):.1f} | {statistics.median(ari):.1f} |"
            )
    print(f"\nwhole runs: {', '.join(f'{seconds:.0f}' for seconds in times)} s")


if __name__ == "__main__":
    main()
