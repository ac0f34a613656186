"""The pages that people read, and the code in them."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>.+?) -->\n\n)?^```(?P<kind>\w+)\n(?P<body>.*?)^```\n"
    r"(?:\n```text\n(?P<printed>.*?)^```)?",
    re.M | re.S,
)
_OUTPUT = OutputChecker()


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: the file it is in.
        line: where, from 1; in a notebook its cell.
        kind: python, sh, ...
        body: what it is.
        needs: what this machine may not have, so that it is read and not run; None for nothing.
        printed: what it says it prints; None where it says nothing.
    """

    page: Path
    line: int
    kind: str
    body: str
    needs: str | None = None
    printed: str | None = None


def blocks(page: Path, *kinds: str) -> list[Block]:
    """The blocks of these kinds in a page, from the top."""
    if page.suffix == ".ipynb":
        cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
        code = [(i, "".join(c["source"])) for i, c in enumerate(cells) if c["cell_type"] == "code"]
        return [Block(page, i, "python", body) for i, body in code if "python" in kinds]
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, m.start("body")) + 1,
            m["kind"],
            m["body"],
            m["needs"],
            m["printed"],
        )
        for m in BLOCK.finditer(text)
        if m["kind"] in kinds
    ]


def run(block: Block, names: dict[str, Any]) -> None:
    """Run a block of Python in these names and compare what it prints with what it says.

    Of a block that needs something only the imports are run.
    """
    tree = ast.parse(block.body)
    if block.needs is not None:
        tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    if block.page.suffix != ".ipynb":
        ast.increment_lineno(tree, block.line - 1)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(tree, str(block.page), "exec"), names)
    want = block.printed
    if want is not None:
        same = _OUTPUT.check_output(want, out.getvalue(), ELLIPSIS | NORMALIZE_WHITESPACE)
        assert same, f"{block.page}:{block.line} says\n{want}and printed\n{out.getvalue()}"


def commands(block: Block) -> Iterator[list[str]]:
    """The words of every line of a block of shell."""
    for line in block.body.replace("\\\n", " ").splitlines():
        words = shlex.split(line.replace("[", "").replace("]", ""), comments=True)
        if words:
            yield words
