"""The command `ssl_kd explore`: show a run in a browser; name, merge and split its clusters."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ssl_kd.cli.failures import print_failure
from ssl_kd.cli.flags import FlagParser, resolve_settings
from ssl_kd.cli.vision import train_and_report
from ssl_kd.core.errors import OK, InputError, Interrupted
from ssl_kd.core.settings.early import home_resolved, is_run

_SET_BY_EXPLORE = {"dataset", "extend", "resume", "run_name"}


def explore(argv: Sequence[str]) -> int:
    """Serve the page or write it to a folder, or apply or undo decisions."""
    about = "Serves the page to browsers on this machine until Ctrl-C, or does one of these:"
    parser = FlagParser(prog="ssl_kd explore", description=about)
    what = "a finished clustering run, or data to cluster first; flags of train.py may follow then"
    parser.add_argument("run", metavar="RUN|DATA", help=what)
    media = "column to show: texts, links, or paths of images or sounds"
    parser.add_argument("--media", metavar="COLUMN", help=media)
    table = "CSV or Parquet file with more columns, and a column file, id or path"
    parser.add_argument("--metadata", metavar="FILE", type=home_resolved, help=table)
    parser.add_argument("--by", metavar="NAME", help="who decides, for the history")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--port", type=int, default=8090, help="port on 127.0.0.1; 0: any free port; default: 8090")
    add("--static", type=Path, metavar="DIR", help="write a read-only page to the new folder DIR")
    add("--apply", type=Path, metavar="FILE", help="add the decisions of another curation.jsonl")
    undo = "undo the last decision, or the one with this ID"
    add("--undo", nargs="?", const="", metavar="ID", help=undo)
    flags, of_train = parser.parse_known_args(argv)
    if is_run(flags.run):
        parser.parse_args(argv)  # refuses unknown flags
    elif code := _cluster(flags, of_train):
        return code

    from ssl_kd.cli.screen import ProgressBars, open_screen

    screen = open_screen()
    from ssl_kd.vision.samples import Samples
    from ssl_kd_explore.decisions import Curation
    from ssl_kd_explore.explore import serve, write_site

    if flags.metadata is not None:
        from ssl_kd_explore.metadata import join_table

        samples = Samples(flags.run)
        matched = join_table(samples, flags.metadata)
        print(f"{flags.metadata}: rows for {matched:,} of {len(samples):,} samples")
    samples = Samples(flags.run, flags.media)
    if flags.apply is not None:
        curation = Curation(samples, flags.by)
        added = curation.apply(flags.apply)
        print(f"{len(added)} new decisions in {curation.path}")
    elif flags.undo is not None:
        curation = Curation(samples, flags.by)
        line = curation.undo(flags.undo or None)
        print(f"Undid decision {line['of']} in {curation.path}")
    else:
        with ProgressBars(screen) as progress:
            if flags.static is None:
                serve(samples, flags.port, by=flags.by, progress=progress, opened=_print_url)
            else:
                page = write_site(samples, flags.static, progress=progress)
                server = f"python -m http.server -d {page.parent}"
                print(f"Page: {page}\nServe it with any web server: {server}")
    return OK


def _cluster(flags: Namespace, of_train: Sequence[str]) -> int:
    """Cluster the data of `flags.run`, unless that was done before; replace it by the run."""
    from ssl_kd.vision.settings import AUTO, VisionSettings
    from ssl_kd_explore.clustered import settings_of

    data, prog = flags.run, "ssl_kd explore DATA"
    settings, typed = resolve_settings(VisionSettings, of_train, Path("config.py"), prog=prog)
    if refused := sorted(_SET_BY_EXPLORE & typed.keys()):
        raise InputError(f"--{refused[0]} is set by ssl_kd explore: leave the flag out")
    if "n_clusters" not in typed:
        settings = settings.replace(n_clusters=AUTO)
    media = flags.media if flags.metadata is None else None  # else the table may have it
    settings, folder = settings_of(data, settings, media)
    flags.run = str(folder)
    if (folder / "metrics.json").is_file():
        print(f"{data} was clustered before: {folder}")
        return OK
    how = "continuing the interrupted run" if settings.resume else "clustering it into"
    print(f"{data} is data: {how} {folder}", flush=True)
    try:
        return train_and_report(settings)
    except Interrupted as stop:
        print_failure(f"Stopped; the same command continues with the checkpoint in {folder}")
        return 128 + stop.signal


def _print_url(url: str) -> None:
    print(f"Explore: {url}  (Ctrl-C ends it)", flush=True)
