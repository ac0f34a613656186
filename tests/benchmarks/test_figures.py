"""The figures of docs/results.md are drawn from the tables of the page."""

import re

import pytest
from matplotlib.patches import Rectangle

from benchmarks.figures import FIGURES, draw, number, table_with
from benchmarks.turns import PAGE

TABLE = """\
| method | mean | note |
|---|---|---|
| **ours** | 1,234.5 (1,200 to 1,300) | `a` |
| theirs | -2 | |
"""


def test_a_table_is_found_by_its_columns_and_loses_its_markup():
    table = table_with(f"A text.\n\n{TABLE}\nMore.\n", "method", "mean")
    assert table.rows[0] == {"method": "ours", "mean": "1,234.5 (1,200 to 1,300)", "note": "a"}
    assert [number(row["mean"]) for row in table.rows] == [1234.5, -2]


@pytest.mark.parametrize("page", ["", f"{TABLE}\n{TABLE}"], ids=["none", "two"])
def test_a_missing_or_ambiguous_table_is_refused(page):
    with pytest.raises(ValueError, match="expected 1"):
        table_with(page, "method", "mean")


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_from_the_page_and_shown_on_it(name):
    page = PAGE.read_text(encoding="utf-8")
    figure = draw(name, page)
    assert figure.axes
    assert all(axes.has_data() and axes.get_xlabel() for axes in figure.axes)
    assert re.search(rf"!\[[^]]+\]\(figures/{name}\.svg\)", page)


def test_a_figure_follows_its_table():
    page = PAGE.read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| **guard** |"))
    changed = page.replace(row, row.replace(row.split("|")[2], " 12.0 "))
    widths = [
        {
            round(bar.get_width(), 1)
            for bar in draw("guard", text).axes[0].patches
            if isinstance(bar, Rectangle)
        }
        for text in (page, changed)
    ]
    assert 12.0 in widths[1] - widths[0]
