"""The command `ssl_kd select`: choose samples to look at or to label, or hold some out."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ssl_kd.cli.flags import FlagParser, integer_from
from ssl_kd.core.errors import OK, InputError
from ssl_kd.core.settings.early import home_resolved, run_folder
from ssl_kd_explore.selection_methods import METHODS


def select(argv: Sequence[str]) -> int:
    """Write a table of the chosen samples, and print a summary."""
    flags = _parser().parse_args(argv)
    folder = run_folder(flags.run)
    _check(flags)
    name = "held_out.csv" if flags.validation is not None else "selected.csv"
    out: Path = folder / name if flags.out is None else flags.out
    if out.exists() and not flags.force:
        raise InputError(f"{out} exists: give another file with --out, or replace it with --force")
    from pyarrow import csv

    from ssl_kd.cli.screen import open_screen, print_result
    from ssl_kd.core.files import atomic_write
    from ssl_kd.core.files.cells import to_cells
    from ssl_kd.core.runs.ranks import refuse_ranks
    from ssl_kd_explore.run import Run

    open_screen()
    refuse_ranks()
    run = Run.open(folder)
    if flags.split not in run.samples.splits:
        known = ", ".join(run.samples.splits)
        raise InputError(f"--split is {flags.split!r}; expected one of {known}")
    if flags.validation is not None:
        table = run.held_out(flags.validation, flags.split, seed=flags.seed)
        summary = f"{len(table):,} samples to hold out, none with a copy among the others"
    else:
        table = run.select(
            flags.n,
            flags.by,
            flags.split,
            near=flags.near,
            start=_names(flags.start),
            seed=flags.seed,
        )
        summary = f"{len(table):,} samples by {flags.by}"
    atomic_write(out, partial(csv.write_csv, to_cells(table)))
    print_result(f"{summary}.", {"Table": out})
    return OK


def _parser() -> FlagParser:
    about = "Chooses samples of a run, or holds a part of them out, and writes a CSV file of them."
    methods = "; ".join(f"{name}: {what}" for name, what in METHODS.items())
    parser = FlagParser(prog="ssl_kd select", description=about)
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a finished run, such as runs/latest")
    add("--n", type=integer_from(1), help="number of samples")
    add("--by", choices=METHODS, default="typical", help=methods)
    add("--near", help="name of the sample (its column file) to which others are similar")
    add("--start", type=home_resolved, help="CSV file of an earlier selection, to continue it")
    held = "hold out this share instead, such as 0.1, equally of all clusters; copies stay together"
    add("--validation", type=_share, help=held)
    add("--split", default="train", help="split to choose from; default: train")
    add("--seed", type=integer_from(0), default=0, help="seed of random choices; default: 0")
    add("--out", type=home_resolved, help="file to write; default: selected.csv in the run")
    add("--force", action="store_true", help="replace the file")
    return parser


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ArgumentTypeError(f"expected a number between 0 and 1, got {text}")
    return share


def _check(flags: Namespace) -> None:
    """Raise InputError if flags contradict each other."""
    if (flags.n is None) == (flags.validation is None):
        raise InputError("Give either --n, the number of samples, or --validation, a share")
    if (flags.by == "near") != (flags.near is not None):
        raise InputError("--by near and --near NAME belong together: give both, or neither")
    if flags.validation is not None and flags.start is not None:
        raise InputError("--start continues a selection of --n samples: leave it out")


def _names(file: Path | None) -> list[str]:
    """Return the names in the column `file` of an earlier selection."""
    if file is None:
        return []
    from pyarrow import ArrowInvalid, csv

    from ssl_kd.core.files.cells import from_cell

    try:
        table = csv.read_csv(file)
    except ArrowInvalid as error:
        raise InputError(f"{file} is not a CSV file: {error}") from error
    if "file" not in table.column_names:
        raise InputError(f"{file} has no column file: give a table that ssl_kd select wrote")
    return [from_cell(str(name)) for name in table["file"].to_pylist()]
