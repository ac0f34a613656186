"""The picture of a terminal shows what the commands print."""

import re

import pytest

from benchmarks.terminal import FILE, draw, transcript


@pytest.mark.slow
def test_the_picture_is_that_of_a_new_run():
    lines = transcript()
    assert any(line.startswith("cause") and "sigmoids underflowed to 0" in line for line in lines)
    assert any(line.startswith("cause") and "T² for a temperature of 2" in line for line in lines)
    assert FILE.read_text(encoding="utf-8") == draw(lines), "run: python -m benchmarks.terminal"


def test_a_line_of_the_terminal_is_escaped_and_keeps_its_spaces():
    picture = draw(["cause      a < b & c", "", "$ python -m x"])
    assert re.findall(r">([^<>\n]+)</text>", picture) == [
        "cause      a < b & c".replace("<", "&lt;").replace("& ", "&amp; ").replace(" ", "\u00a0"),
        "$ python -m x".replace(" ", "\u00a0"),
    ]
