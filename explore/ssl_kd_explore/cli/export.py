"""The command `ssl_kd export`: write a finished run in a format that other programs read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ssl_kd.cli.flags import FlagParser
from ssl_kd.core.errors import OK, InputError
from ssl_kd.core.settings.early import home_resolved, run_folder

_FLAGS = {
    "to": "the format; see below",
    "out": "new file or folder to write; default: export/ in the run's folder",
    "split": "splits to export, separated by commas: train,test; default: all",
    "clusters": "clusters to export, separated by commas: 3,7; default: all",
    "link": "for --to folders: symlink or copy; default: symlink",
    "url": "for --to label-studio: the address that serves the folder of pictures",
}
_SWITCHES = {
    "skip_missing": "leave out pictures that no longer exist",
    "force": "replace an existing file once the new one is complete; never a folder",
}
_OPTIONS = ("link", "url", "skip_missing")  # which only some formats take
PROG = "ssl_kd export"


def export(argv: Sequence[str]) -> int:
    """Write the run in a format."""
    from ssl_kd_explore.export.registry import checked_path

    flags = _parser().parse_args(argv)
    if flags.to is None:
        raise InputError(f"--to is required, for example: {PROG} {flags.run} --to parquet")
    options = {name: value for name in _OPTIONS if (value := getattr(flags, name))}
    # Invalid paths and formats are refused before torch is imported.
    checked_path(home_resolved(flags.run), flags.to, flags.out, options, force=flags.force)
    run_folder(flags.run)
    clusters = [_cluster(part) for part in _parts(flags.clusters)]

    from ssl_kd.cli.screen import open_screen

    open_screen()
    from ssl_kd.vision.samples import Samples
    from ssl_kd_explore.export import FORMATS, export
    from ssl_kd_explore.export.content import Content

    content = Content.of(Samples(flags.run), splits=_parts(flags.split), clusters=clusters)
    path = export(content, flags.to, flags.out, force=flags.force, **options)
    print(f"{flags.to}: {path}")
    if how_to_read := FORMATS[flags.to].how_to_read:
        print(f"Read it with: {how_to_read.format(out=str(path))}")
    return OK


def _parser() -> FlagParser:
    from ssl_kd_explore.export.registry import FORMATS

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


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _cluster(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"--clusters has {text!r}; expected numbers, as in --clusters 3,7"
        ) from None
