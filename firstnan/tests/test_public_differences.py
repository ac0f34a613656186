"""`firstnan diff` on two runs of public threads, as docs/bugs.md quotes it."""

import ast
import re
from pathlib import Path

import pytest
import torch

from benchmarks.public_differences import PAGE, compare, is_right
from firstnan.tests import public_differences
from firstnan.tests.public_differences import THREADS

# The operation runs before the first module is called, where nothing is recorded.
WRONG = {"huggingface/transformers!29285"}


@pytest.mark.parametrize("thread", THREADS.values(), ids=lambda thread: thread.name)
def test_the_difference_of_a_thread_is_named_and_quoted(thread, tmp_path):
    """`python -m benchmarks.public_differences` writes the page."""
    found = compare(thread, tmp_path)
    assert is_right(thread, found) != (thread.name in WRONG), found
    page = PAGE.read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| [{thread.name}]("))
    assert row.endswith("| no |" if thread.name in WRONG else "| yes |")
    if torch.__version__.startswith(re.search(r"torch ([\d.]+)\)", page)[1]):
        assert found is not None and f"<br>`{found.cause}` |" in row


def test_a_script_is_short_and_the_page_has_their_count():
    tree = ast.parse(Path(public_differences.__file__).read_text(encoding="utf-8"))
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    assert all(lengths[thread.run.__name__] <= 40 for thread in THREADS.values())
    count = f"**{len(THREADS) - len(WRONG)} of {len(THREADS)} differences**"
    assert count in re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))
