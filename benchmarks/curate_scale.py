"""Time and memory of finding copies among very many rows, with 600 copies in each 50,000.

    python -m benchmarks.curate_scale FOLDER --rows 1000000 --dim 64

Start it twice: the first time writes the rows, so that their memory does not count, and stops.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import torch

from ssl_kd.curate import near_duplicates
from ssl_kd.store import EmbeddingStore, EmbeddingWriter, Fingerprint, find_neighbours

BLOCK = 50_000
NEAR, EQUAL = 500, 100  # in each block; the equal ones are all of the block's first row


def write(folder: Path, n: int, dim: int) -> None:
    """Rows around a thousand centres, float16; the last of each block are copies of its first."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(1000, dim, generator=generator)
    of = Fingerprint("features", "none", "none", "float32", f"{n} x {dim}, made up")
    ids = [str(row) for row in range(n)]
    with EmbeddingWriter(folder, "train", of, n, dim, ids=ids, dtype=torch.float16) as writer:
        for start in range(0, n, BLOCK):
            own = torch.randint(1000, (BLOCK,), generator=generator)
            x = centres[own] + torch.randn(BLOCK, dim, generator=generator)
            x[-NEAR:] = x[:NEAR] + 0.05 * torch.randn(NEAR, dim, generator=generator)
            x[-NEAR - EQUAL : -NEAR] = x[0]
            writer.append(x, torch.arange(start, start + BLOCK))
        writer.close()


def peak() -> float:
    """Most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Copies among very many rows.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000, help=f"a multiple of {BLOCK:,}")
    parser.add_argument("--dim", type=int, default=64)
    args = parser.parse_args()
    if not (args.folder / "embeddings_train.json").is_file():
        write(args.folder, args.rows, args.dim)
        return
    store = EmbeddingStore.open(args.folder, "train")
    print(f"{store.n:,} x {store.dim}, opened: {peak():.0f} MiB", flush=True)
    start = time.monotonic()
    find_neighbours(store, 20)
    print(f"neighbours: {time.monotonic() - start:.0f} s, {peak():.0f} MiB", flush=True)
    start = time.monotonic()
    found = near_duplicates(store)
    print(f"pairs: {time.monotonic() - start:.0f} s, {peak():.0f} MiB", flush=True)
    start = time.monotonic()
    gone = int((~found.kept()).sum())
    print(
        f"{len(found):,} pairs; {gone:,} rows go, {store.n // BLOCK * (NEAR + EQUAL):,} copies "
        f"were put in: {time.monotonic() - start:.1f} s, {peak():.0f} MiB"
    )


if __name__ == "__main__":
    main()
