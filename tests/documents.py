"""Read the pages and notebooks of the documentation, and run their code blocks."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
PAGES += [ROOT / folder / "README.md" for folder in ("firstnan", "explore")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
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
        page: path of its file.
        line: first line, from 1; in a notebook the index of the cell.
        kind: python, sh, ...
        body: the code.
        needs: what the block needs and this machine may lack: a package, "pip install NAME",
            without which nothing of the block is run, or something else, when only its imports are.
        printed: the output that the page shows; None where it shows none.
    """

    page: Path
    line: int
    kind: str
    body: str
    needs: str | None = None
    printed: str | None = None


def blocks(page: Path, *kinds: str) -> list[Block]:
    """Return the blocks of the given kinds in a page, from the top."""
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
    """Run a Python block in the namespace `names`, and compare its output with the page."""
    tree = ast.parse(block.body)
    package = re.fullmatch(r"pip install (\w+)", block.needs or "")
    if package and find_spec(package[1]) is None:
        return
    if block.needs is not None and not package:
        tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    if block.page.suffix != ".ipynb":
        ast.increment_lineno(tree, block.line - 1)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        if package:
            warnings.simplefilter("ignore")  # those of a package that is not under test
        exec(compile(tree, str(block.page), "exec"), names)
    want = block.printed
    if want is not None:
        same = _OUTPUT.check_output(want, out.getvalue(), ELLIPSIS | NORMALIZE_WHITESPACE)
        assert same, f"{block.page}:{block.line} shows\n{want}but prints\n{out.getvalue()}"


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the arguments of each command of a shell block."""
    for line in block.body.replace("\\\n", " ").splitlines():
        words = shlex.split(line.replace("[", "").replace("]", ""), comments=True)
        if words:
            yield words
