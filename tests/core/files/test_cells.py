"""Cells and lists of names: no formula, no forged line, and every name round-trips."""

import csv
import io

import pyarrow as arrow
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import csv as arrow_csv

from ssl_kd.core.files.cells import csv_field, from_cell, from_cells, one_line, to_cell, to_cells
from tests.faults.matrix import row as fault

NAMES = st.text(st.one_of(st.sampled_from("'=+-@\t\r\n\",1.=＝ a"), st.characters(codec="utf-8")))
NAMES = NAMES.filter(lambda name: "\0" not in name)


@fault(172)
@given(NAMES)
@example("'=x")
@example("''=x")
@example("-1")
@example("'-1")
@example("-1\n")
@example("＝1+1")
def test_formulas_are_escaped_in_cells_and_names_restored(name):
    cell = to_cell(name)
    assert from_cell(cell) == name
    assert (
        not cell
        or cell[0] not in "=+-@\t\r\n＝＋－＠"
        or cell.lstrip("+-").replace(".", "").isdigit()
    )


@fault(172)
@given(st.lists(NAMES, min_size=1))
def test_lines_of_csv_give_the_names_back_to_any_reader(names):
    text = "n,file\n" + "".join(f"{i},{csv_field(name)}\n" for i, name in enumerate(names))
    read = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [from_cell(line["file"]) for line in read] == names
    kinds = arrow_csv.ConvertOptions(column_types={"file": arrow.string()})
    parsed = arrow_csv.ParseOptions(newlines_in_values=True)
    table = arrow_csv.read_csv(io.BytesIO(text.encode()), None, parsed, kinds)
    assert from_cells(table["file"]).to_pylist() == names
    written = to_cells(arrow.table({"file": names, "n": list(range(len(names)))}))
    assert from_cells(written["file"]).to_pylist() == names


@fault(172)
@given(st.lists(NAMES, min_size=1, unique=True))
@example(["a\nb", '"a\\nb"', "a\\nb"])
def test_a_list_has_one_line_for_each_name_and_no_two_are_the_same(names):
    lines = [one_line(name) for name in names]
    assert "\n".join(lines).splitlines() == lines or "" in lines
    assert len(set(lines)) == len(names)


@pytest.mark.parametrize("name", ["IMG 1.jpg", "é/a=b.png", "'tis.jpg", "a-b.png", ".x", "c\\xe9"])
def test_ordinary_names_stay_as_they_are(name):
    assert to_cell(name) == csv_field(name) == one_line(name) == name
