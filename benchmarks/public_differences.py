"""Compare two runs of ten public threads, and write what `firstnan diff` says into docs/bugs.md.

    python -m benchmarks.public_differences

Both runs of each thread of `firstnan.tests.public_differences` are recorded one after the other,
in this process or in ranks. What a thread took is read from the page itself.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch

from firstnan.diff import Comparison, Difference, Recording
from firstnan.tests.public_differences import THREADS, Thread
from firstnan.trace import Trace, lines_file, write_about
from tests.ranks import run_ranks

PAGE = Path(__file__).parents[1] / "docs" / "bugs.md"


def compare(thread: Thread, folder: Path) -> Difference | None:
    """Record both runs of a thread into a folder, and return their first difference."""
    runs = []
    for fixed in (True, False):
        out = folder / ("fixed" if fixed else "faulty")
        out.mkdir()
        write_about(out, thread.name)
        if thread.ranks == 1:
            _record(0, thread.name, fixed, out)
        else:
            run_ranks(_record, thread.ranks, thread.name, fixed, out)
        runs.append(Recording.read(out, 0))
    return Comparison(*runs).first()


def _record(rank: int, name: str, fixed: bool, out: Path) -> None:
    torch.manual_seed(0)
    with Trace(lines_file(out, rank)).recording():
        THREADS[name].run(fixed)


def is_right(thread: Thread, found: Difference | None) -> bool:
    """Return whether a report names the operation of a thread, and what is true of it."""
    if found is None:
        return False
    ops = [str(op) for op in (found.a, found.b) if op is not None]
    is_named = any(re.search(thread.op, op) for op in ops)
    return is_named and re.search(thread.why, found.cause) is not None


def updated(page: str) -> str:
    """Return the page with what `firstnan diff` says now of each thread, and with the count."""
    n_right = 0
    for thread in THREADS.values():
        with tempfile.TemporaryDirectory() as folder:
            found = compare(thread, Path(folder))
        lines = re.findall(r"^(first|A|B|cause) +(.+)$", f"{found}", re.M)
        said = [text if name in ("first", "cause") else f"{name}: {text}" for name, text in lines]
        says = "<br>".join(f"`{text.replace('|', chr(92) + '|')}`" for text in said) or "nothing"
        link = f"https://github.com/{re.sub('[#!]', '/issues/', thread.name)}"
        head = f"| [{thread.name}]({link}) | {' '.join((thread.run.__doc__ or '').split())} | "
        n_right += (right := is_right(thread, found))
        tail = f" | {says} | {'yes' if right else 'no'} |"
        row = re.compile(rf"^\| \[{re.escape(thread.name)}\].*? \| .*? \| (.*?) \| .*$", re.M)
        page = row.sub(lambda match, new=(head, tail): new[0] + match[1] + new[1], page)
    count = f"**{n_right} of {len(THREADS)} differences**"
    return re.sub(r"\*\*\d+ of \d+ differences\*\*", count, page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
