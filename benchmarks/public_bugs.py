"""Run the guard on twenty-five public bugs, and write what it says into docs/bugs.md.

    python -m benchmarks.public_bugs

Each bug of `firstnan.tests.public_bugs` runs as under `python -m firstnan`, and again with
`--every-op` if the report asks for it. What its thread took is read from the page itself.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

from firstnan.diagnosis import Cause
from firstnan.script import ScriptWatch
from firstnan.tests.public_bugs import BUGS, Bug

PAGE = Path(__file__).parents[1] / "docs" / "bugs.md"


def explain(bug: Bug, every_op: bool = False) -> str:
    """Return the report of a run; empty without one."""
    reports: list[str] = []
    torch.manual_seed(0)
    watch = ScriptWatch(every_op=every_op, report=reports.append)
    with watch.watching(), contextlib.suppress(SystemExit, RuntimeError):
        bug.run()
    return "".join(reports[:1])


def explain_all(bug: Bug) -> tuple[str, str]:
    """Return the reports of the first run and of the last: with `--every-op` if the first asks."""
    first = explain(bug)
    return first, explain(bug, every_op=True) if "--every-op" in first else first


def is_right(bug: Bug, report: str) -> bool:
    """Return whether a report names the operation of a bug, its cause, and what is true of it."""
    cause = re.search(rf"^cause +{re.escape(bug.cause.value)}: .+$", report, re.M)
    text = report if bug.cause == Cause.POISONED_WEIGHT else cause and cause[0]  # in its note
    return f"aten.{bug.op}," in report and cause is not None and bug.why in (text or "")


def updated(page: str) -> str:
    """Return the page with what the guard says now in each row, and with their count."""
    n_right = n_twice = n_at_once = 0
    for bug in BUGS:
        first, report = explain_all(bug)
        n_twice += report != first
        n_at_once += report != first and f"aten.{bug.op}," in first
        lines = dict(re.findall(r"^(first bad|cause|note) +(.+)$", report, re.M))
        lines_shown = [re.sub(r"/\S+/", "", text).replace("|", "\\|") for text in lines.values()]
        says = "<br>".join(f"`{text}`" for text in lines_shown) or "nothing"
        link = f"https://github.com/{re.sub('[#!]', '/issues/', bug.thread)}"
        head = f"| [{bug.thread}]({link}) | {' '.join((bug.run.__doc__ or '').split())} | "
        row = re.compile(rf"^\| \[{re.escape(bug.thread)}\].*? \| .*? \| (.*?) \| .*$", re.M)
        n_right += (right := is_right(bug, report))
        tail = f" | {says} | {'yes' if right else 'no'} |"
        page = row.sub(lambda match, new=(head, tail): new[0] + match[1] + new[1], page)
    page = re.sub(r"names \d+ of these \d+", f"names {n_at_once} of these {n_twice}", page)
    return re.sub(r"\*\*\d+ of \d+\*\*", f"**{n_right} of {len(BUGS)}**", page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
