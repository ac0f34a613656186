"""`ssl_kd export RUN --to FORMAT`: a finished run in another program's format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssl_kd.cli.flags import flags_after, listed
from ssl_kd.errors import OK, InputError
from ssl_kd.settings.early import home_resolved, run_folder

_HELP = {
    "to": "the format; see below",
    "out": "file or folder to write, which is not there yet; default: export/ in the run's folder",
    "split": "splits that go out, with commas between: train,test; default: all",
    "clusters": "clusters that go out, with commas between: 3,7; default: all",
    "names": "name the clusters and keep that in the run: files, or a table of captions (CSV, "
    "TSV, JSON, JSONL, Parquet)",
    "columns": "table (CSV, Parquet) with a row for each sample of the run, in its order: its "
    "columns go out, too; x and y are a map",
    "link": "of folders: symlink, hardlink or copy; default: symlink",
    "url": "of label-studio: where the folder of pictures is served",
    "push": "put the model on the Hugging Face hub under this name, user/name",
}
_SWITCHES = {
    "skip_missing": "go on without pictures that are gone",
    "force": "replace the file that is there, once the new one is whole; never a folder",
    "private": "of --push: a repository that others do not see",
}
_OWN = ("link", "url")
PROG = "ssl_kd export"


def export(argv: Sequence[str]) -> int:
    """Run the command; return the exit code.

    Args:
        argv: the run first, then flags.

    Raises:
        InputError: invalid flags or paths.
    """
    if not argv or {"-h", "--help"} & set(argv):
        print(_usage())
        return OK
    given, rest = flags_after(argv, PROG, "the run", _HELP, _SWITCHES)
    if rest:
        raise InputError(f"There is no flag {rest[0]}; {PROG} --help lists all")
    if given.to is None and given.names is None and given.push is None:
        raise InputError(f"--to is required, e.g. {PROG} {argv[0]} --to parquet")
    options: dict[str, Any] = {name: getattr(given, name) for name in _OWN}
    options = {name: value for name, value in options.items() if value is not None}
    if given.skip_missing:
        options["skip_missing"] = True
    _refuse(home_resolved(argv[0]), given, options)
    return _export(argv[0], given, options)


def _refuse(run: Path, given: Any, options: dict[str, Any]) -> None:
    """Refuse what needs neither torch nor the run to be refused."""
    from ssl_kd.workbench.export.registry import place_of

    if given.to is not None:
        place_of(run, given.to, given.out, options, force=given.force)
    run_folder(run)
    files = (given.columns, None if given.names == "files" else given.names)
    for file in (Path(file).expanduser() for file in files if file is not None):
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {file}")


def _export(word: str, given: Any, options: dict[str, Any]) -> int:
    from ssl_kd.cli.screen import open_screen

    open_screen()
    from ssl_kd.workbench.export import Content, export, push_run
    from ssl_kd.workbench.export.registry import format_of
    from ssl_kd.workbench.finished import Samples, name_samples

    samples = Samples(word)
    chosen = [_number(part) for part in _parts(given.clusters)]
    columns = None if given.columns is None else _columns(Path(given.columns).expanduser())
    if given.names is not None:
        captions = None if given.names == "files" else given.names
        names = name_samples(samples, captions)
        found = sum(len(of) for of in names.levels.values())
        print(f"Names: {names.save(samples.path)} ({found} clusters of all levels have one)")
    if given.to is not None:
        splits = _parts(given.split)
        content = Content.of(samples, splits=splits, clusters=chosen, columns=columns)
        path = export(content, given.to, given.out, force=given.force, **options)
        print(f"{given.to}: {path}")
        if how := format_of(given.to).reads(content, path):
            print(f"Read it by: {how}")
    if given.push is not None:
        print(f"Hub: {push_run(samples, given.push, private=given.private or None)}")
    return OK


def _usage() -> str:
    from ssl_kd.workbench.export.registry import FORMATS

    formats = "\n".join(f"  {name:<16} {of.what}" for name, of in FORMATS.items())
    flags = listed(_HELP, _SWITCHES)
    return f"usage: {PROG} RUN --to FORMAT [flags]\n\n{flags}\n\nFORMAT is one of\n{formats}"


def _parts(word: str | None) -> list[str]:
    return [part.strip() for part in (word or "").split(",") if part.strip()]


def _number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise InputError(f"--clusters has {word!r}, expected numbers: --clusters 3,7") from None


def _columns(path: Path) -> dict[str, Any]:
    import pyarrow as arrow
    from pyarrow import csv, parquet

    try:
        lines = csv.ParseOptions(newlines_in_values=True)
        is_csv = path.suffix != ".parquet"
        table = csv.read_csv(path, None, lines) if is_csv else parquet.read_table(path)
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if twice := [name for name, times in Counter(table.column_names).items() if times > 1]:
        raise InputError(f"{path} has the column {twice[0]!r} twice: take one of them out")
    return {name: table.column(name).to_numpy() for name in table.column_names}
