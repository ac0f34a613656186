"""The command `ssl_kd export`: write a finished run in a format that other programs read."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssl_kd.cli.flags import FlagParser
from ssl_kd.errors import OK, InputError
from ssl_kd.settings.early import home_resolved, run_folder

_FLAGS = {
    "to": "the format; see below",
    "out": "new file or folder to write; default: export/ in the run's folder",
    "split": "splits to export, separated by commas: train,test; default: all",
    "clusters": "clusters to export, separated by commas: 3,7; default: all",
    "names": "name clusters by a table of captions (CSV, Parquet); save the names in the run",
    "columns": "add the columns of a table (CSV, Parquet) with one row per sample of the run, in "
    "its order",
    "link": "for --to folders: symlink or copy; default: symlink",
    "url": "for --to label-studio: the address that serves the folder of pictures",
    "push": "upload the model to the Hugging Face Hub under this name, user/name",
}
_SWITCHES = {
    "skip_missing": "leave out pictures that no longer exist",
    "force": "replace an existing file once the new one is complete; never a folder",
    "private": "for --push: create a private repository",
}
_OPTIONS = ("link", "url", "skip_missing")  # which only some formats take
PROG = "ssl_kd export"


def export(argv: Sequence[str]) -> int:
    """Name the clusters, write the run in a format, upload its model: whatever the flags ask."""
    flags = _parser().parse_args(argv)
    if flags.to is None and flags.names is None and flags.push is None:
        raise InputError(f"--to is required, for example: {PROG} {flags.run} --to parquet")
    options = {name: value for name in _OPTIONS if (value := getattr(flags, name))}
    _check_paths(flags, options)
    splits = _parts(flags.split)
    clusters = [_cluster(part) for part in _parts(flags.clusters)]
    columns = None if flags.columns is None else _read_columns(home_resolved(flags.columns))

    from ssl_kd.cli.screen import open_screen

    open_screen()
    from ssl_kd.vision.samples import Samples
    from ssl_kd.workbench.export import FORMATS, export
    from ssl_kd.workbench.export.cards import push_run
    from ssl_kd.workbench.export.content import Content
    from ssl_kd.workbench.naming import name_samples

    samples = Samples(flags.run)
    if flags.names is not None:
        names = name_samples(samples, flags.names)
        n_named = sum(map(len, names.levels.values()))
        print(f"Names: {names.save(samples.path)} (named {n_named} clusters, counting all levels)")
    if flags.to is not None:
        content = Content.of(samples, splits=splits, clusters=clusters, columns=columns)
        path = export(content, flags.to, flags.out, force=flags.force, **options)
        print(f"{flags.to}: {path}")
        if how_to_read := FORMATS[flags.to].how_to_read:
            print(f"Read it with: {how_to_read.format(out=str(path))}")
    if flags.push is not None:
        print(f"Hub: {push_run(samples, flags.push, private=flags.private or None)}")
    return OK


def _parser() -> FlagParser:
    from ssl_kd.workbench.export.registry import FORMATS

    formats = "\n".join(f"  {name:<16} {of.what}" for name, of in FORMATS.items())
    parser = FlagParser(
        prog=PROG,
        epilog=f"FORMAT is one of\n{formats}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="folder of a finished clustering run")
    for name, about in _FLAGS.items():
        parser.add_argument(f"--{name}", help=about)
    for name, about in _SWITCHES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=about)
    return parser


def _check_paths(flags: argparse.Namespace, options: dict[str, Any]) -> None:
    """Raise an error for invalid paths and formats; runs before torch is imported."""
    from ssl_kd.workbench.export.registry import checked_path

    if flags.to is not None:
        checked_path(home_resolved(flags.run), flags.to, flags.out, options, force=flags.force)
    run_folder(flags.run)
    for file in (flags.columns, flags.names):
        if file is not None and not home_resolved(file).is_file():
            raise FileNotFoundError(f"There is no file {file}")


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _cluster(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"--clusters has {text!r}; expected numbers, as in --clusters 3,7"
        ) from None


def _read_columns(path: Path) -> dict[str, Any]:
    import pyarrow as arrow
    from pyarrow import csv, parquet

    try:
        multiline = csv.ParseOptions(newlines_in_values=True)
        is_parquet = path.suffix == ".parquet"
        table = parquet.read_table(path) if is_parquet else csv.read_csv(path, None, multiline)
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise InputError(
            f"--columns {path} cannot be read as CSV or Parquet: {' '.join(str(error).split())}"
        ) from error
    if repeated := [name for name, n in Counter(table.column_names).items() if n > 1]:
        raise InputError(f"--columns {path} has two columns {repeated[0]!r}: rename one of them")
    return {name: table.column(name).to_numpy() for name in table.column_names}
