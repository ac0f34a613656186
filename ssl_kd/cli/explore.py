"""The command `ssl_kd explore`: show a run in a browser; name, merge and split its clusters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ssl_kd.cli.flags import FlagParser
from ssl_kd.errors import OK
from ssl_kd.settings.early import run_folder


def explore(argv: Sequence[str]) -> int:
    """Serve the page or write it to a folder, or apply or undo decisions."""
    about = "Serves the page to browsers on this machine until Ctrl-C, or does one of these:"
    parser = FlagParser(prog="ssl_kd explore", description=about)
    parser.add_argument("run", metavar="RUN", help="folder of a finished clustering run")
    parser.add_argument("--by", metavar="NAME", help="who decides, for the history")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--port", type=int, default=8090, help="port on 127.0.0.1; 0: any free port; default: 8090")
    add("--static", type=Path, metavar="DIR", help="write a read-only page to the new folder DIR")
    add("--apply", type=Path, metavar="FILE", help="add the decisions of another curation.jsonl")
    add(
        "--undo",
        nargs="?",
        const="",
        metavar="ID",
        help="undo the last decision, or the one with this ID",
    )
    flags = parser.parse_args(argv)
    run_folder(flags.run)

    from ssl_kd.cli.screen import ProgressBars, open_screen

    screen = open_screen()
    from ssl_kd.vision.samples import Samples
    from ssl_kd.workbench.decisions import Curation
    from ssl_kd.workbench.explore import serve, write_site

    samples = Samples(flags.run)
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


def _print_url(url: str) -> None:
    print(f"Explore: {url}  (Ctrl-C ends it)", flush=True)
