"""The command `ssl_kd compare`: show the clusters of two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from ssl_kd.cli.flags import FlagParser
from ssl_kd.core.errors import OK, InputError, printable
from ssl_kd.core.settings.early import home_resolved, run_folder
from ssl_kd_explore.output_files import refuse_existing


def compare(argv: Sequence[str]) -> int:
    """Write the page and its numbers, and print a summary."""
    about = "Compares two runs on the files that both have, after all decisions."
    parser = FlagParser(prog="ssl_kd compare", description=about)
    for name in ("RUN_A", "RUN_B"):
        parser.add_argument(name, help="folder of a finished clustering run")
    page = (
        "new page, with its numbers in a .json beside it; default: compare-RUN_B.html in RUN_A, "
        "which is replaced"
    )
    parser.add_argument("--out", type=home_resolved, metavar="FILE", help=page)
    flags = parser.parse_args(argv)
    folders = [run_folder(folder) for folder in (flags.RUN_A, flags.RUN_B)]

    if flags.out is not None:
        if flags.out.suffix != ".html":
            raise InputError(f"--out is {str(flags.out)!r}; expected a name that ends in .html")
        for path in (flags.out, flags.out.with_suffix(".json")):
            refuse_existing(path, "remove it")

    from ssl_kd.cli.screen import open_screen

    open_screen()
    from ssl_kd.vision.samples import Samples
    from ssl_kd_explore.compare import compare_runs, summary, write_comparison

    a, b = map(Samples, folders)
    comparison = compare_runs(a, b)
    page = flags.out or a.path / f"compare-{b.path.name}.html"
    write_comparison(comparison, a, b, page)
    print(f"A: {a.path}\nB: {b.path}")
    print("\n".join(printable(line) for line in summary(comparison)))
    print(f"Page: {page}\nNumbers: {page.with_suffix('.json')}")
    return OK
