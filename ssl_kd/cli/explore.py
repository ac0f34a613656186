"""`ssl_kd explore RUN`: look at a run's samples in a browser, and decide about its clusters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ssl_kd.cli.flags import FlagParser, check_first
from ssl_kd.errors import OK, InputError
from ssl_kd.settings.early import run_folder

PROG, PORT = "ssl_kd explore", 8090
_HELP = f"""RUN is the folder of a finished clustering run, as runs/latest.

  Without flags the page is served to the browsers of this machine; Ctrl-C ends it.

  --port PORT
      where it is served on 127.0.0.1; 0: any that is free. Default: {PORT}
  --static DIR
      write explore.html, index.html and their data into the new folder DIR instead, for any
      web server
  --pictures N
      samples that have a picture in DIR, about 2 KB each. Default: 10,000
  --apply FILE
      add the decisions of FILE, a curation.jsonl of the page or of a copy, to the run's
  --undo [ID]
      undo the last decision of the run, or that one"""


def explore(argv: Sequence[str]) -> int:
    """Run the command; return the exit code.

    Args:
        argv: The run first, then flags.

    Raises:
        SettingsError, InputError: invalid flags or paths.
    """
    if not argv or {"-h", "--help"} & set(argv):
        print(f"usage: {PROG} RUN [flags]\n\n{_HELP}")
        return OK
    check_first(argv, PROG, "the run")
    parser = FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--port", type=int)
    parser.add_argument("--pictures", type=int)
    for name in ("static", "apply"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--undo", nargs="?", const="")
    given, rest = parser.parse_known_args(argv[1:])
    if rest:
        raise InputError(f"There is no flag {rest[0]}; {PROG} --help lists those there are.")
    wanted = [f"--{name}" for name in ("static", "apply", "undo") if vars(given)[name] is not None]
    if len(wanted) > 1 or (wanted and given.port is not None):
        raise InputError(f"{' and '.join([*wanted, '--port'][:2])} came: give one of them")
    if given.pictures is not None and (given.static is None or given.pictures < 0):
        raise InputError(
            f"--pictures is {given.pictures}; expected 0 or more, and --static DIR beside it"
        )
    run_folder(argv[0])

    from ssl_kd.cli.screen import ProgressBars, open_screen

    screen = open_screen()
    from ssl_kd.workbench.explore import serve, write_site
    from ssl_kd.workbench.explore.site import PICTURES
    from ssl_kd.workbench.finished import Curation, Samples

    samples = Samples(argv[0])
    if given.apply is not None:
        found = Curation(samples).apply(given.apply)
        print(f"{len(found)} new decisions in {samples.path / 'curation.jsonl'}")
        return OK
    if given.undo is not None:
        line = Curation(samples).undo(given.undo or None)
        print(f"The decision {line.what['of']} is undone in {samples.path / 'curation.jsonl'}")
        return OK
    with ProgressBars(screen) as progress:
        if given.static is not None:
            most = PICTURES if given.pictures is None else given.pictures
            page = write_site(samples, given.static, pictures=most, progress=progress)
            print(f"Page: {page}\nAny web server serves it: python -m http.server -d {page.parent}")
            return OK
        port = PORT if given.port is None else given.port
        serve(samples, port, progress=progress, opened=_say)
    return OK


def _say(url: str) -> None:
    print(f"Explore: {url}  (Ctrl-C ends it)", flush=True)
