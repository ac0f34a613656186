"""The command `ssl_kd watch`: add the new pictures of a folder to a run, again and again."""

from __future__ import annotations

import argparse
import re
import shlex
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ssl_kd.cli.failures import guarded, print_failure
from ssl_kd.cli.flags import FlagParser, integer_from, resolve_settings
from ssl_kd.core.errors import OK, InputError, Interrupted, UserError, printable

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SET_BY_WATCH = {"dataset", "extend", "resume", "run_name"}


def watch(argv: Sequence[str]) -> int:
    """Train on the pictures of a folder, then extend the run by new ones in rounds."""
    return guarded(
        partial(_watch, argv), shlex.join(["ssl_kd", "watch", *argv]), kept="finished rounds"
    )


def _watch(argv: Sequence[str]) -> int:
    about = (
        "Trains on the pictures in FOLDER (flags of ssl_kd train; --n_clusters auto by default), "
        "then adds new pictures in rounds. The page RUNS_DIR/NAME/round-N/watch.html says what is "
        "new and what drifted."
    )
    parser = FlagParser(prog="ssl_kd watch", description=about)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="pictures, at any depth")
    parser.add_argument("--run", metavar="NAME", help="name of the watch; default: watch-FOLDER")
    parser.add_argument("--once", action="store_true", help="do one round and exit, as for cron")
    pause = "pause between rounds, such as 30s or 2h; default: 10m"
    parser.add_argument("--every", type=_duration, default="10m", metavar="TIME", help=pause)
    least = "new pictures that a round needs; default: 1"
    parser.add_argument("--at-least", type=integer_from(1), default=1, metavar="N", help=least)
    flags, rest = parser.parse_known_args(argv)
    if not flags.folder.is_dir():
        raise InputError(f"FOLDER is {str(flags.folder)!r}, which is not a folder of pictures")

    from ssl_kd.cli.screen import ProgressBars, open_screen
    from ssl_kd.vision.settings import AUTO, VisionSettings

    settings, given = resolve_settings(VisionSettings, rest, Path("config.py"), prog="ssl_kd watch")
    if refused := sorted(_SET_BY_WATCH & given.keys()):
        raise InputError(f"--{refused[0]} is set by ssl_kd watch: leave the flag out")
    settings = settings.replace(n_clusters=settings.n_clusters or AUTO)
    place = Path(settings.runs_dir) / (flags.run or f"watch-{flags.folder.resolve().name}")
    screen = open_screen()
    from ssl_kd_explore.watch import Watch

    watched = Watch(flags.folder, place, settings, given)

    def do_round() -> None:
        try:
            with ProgressBars(screen) as progress:
                _show(*watched.advance(flags.at_least, progress), flags.at_least)
        except Interrupted as stopped:  # the same command continues, not --resume
            raise Interrupted(stopped.signal, None) from None

    do_round()
    while not flags.once:
        time.sleep(flags.every)
        try:
            do_round()
        except (UserError, OSError) as error:  # such as a network drive that will be back
            print_failure(error)
    return OK


def _duration(text: str) -> int:
    """Parse a time such as `30s`, `10m` or `1h` to seconds."""
    if not re.fullmatch(r"[1-9]\d{0,5}[smhd]", text):
        raise argparse.ArgumentTypeError(f"expected a time such as 30s, 10m or 1h, got {text}")
    return int(text[:-1]) * _SECONDS[text[-1]]


def _show(summary: dict[str, Any], is_new: bool, at_least: int) -> None:
    """Print the result of a round: only one line if nothing changed."""
    if summary["run"] is None:
        text = f"No run yet: {len(summary['new'])} new pictures, but --at_least is {at_least}"
    elif not is_new:
        text = f"Nothing has changed since round {summary['rounds'][-1]['round']}"
    else:
        newest, run = summary["rounds"][-1], summary["run"]
        text = f"Round {newest['round']}: {'. '.join(newest['sentences'])}."
        for what in ("new", "waiting", "replaced", "deleted"):
            if files := [printable(file) for file in summary[what]]:
                more = ", ..." if len(files) > 3 else ""
                text += f"\n{what.capitalize()}: {len(files)} ({', '.join(files[:3])}{more})"
        text += f"\nPage: {run}/watch.html\nNext: ssl_kd explore {shlex.quote(run)}"
    print(time.strftime("%Y-%m-%d %H:%M"), text, flush=True)
