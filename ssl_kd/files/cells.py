r"""Text of a data set in tables and lists: no name breaks a row, or is a formula in a spreadsheet.

A spreadsheet takes a cell that begins with `= + - @`, a tab or a line break for a formula, even
where the CSV quotes it. Such a cell gets an apostrophe in front, in every CSV that we write; what
reads one takes it off again. So does an apostrophe before such a text, and both ways are exact.
"""

from __future__ import annotations

import json
import re

import pyarrow as arrow

_FORMULA = re.compile(r"'*(?![-+]?\d+(\.\d+)?\Z)[=+\-@\t\r\n＝＋－＠]")
_QUOTED = re.compile(r'[",\r\n]')
_NO_LINE = re.compile(r'[\x00-\x1f\x7f-\x9f\u2028\u2029]|\A"')


def to_cell(text: str) -> str:
    """Return the text as the value of a cell; a number stays one.

    >>> to_cell("=1+1.jpg"), to_cell("a=b.jpg"), to_cell("-1"), to_cell("'=x")
    ("'=1+1.jpg", 'a=b.jpg', '-1', "''=x")
    """
    return f"'{text}" if _FORMULA.match(text) else text


def from_cell(text: str) -> str:
    """Return the text that `to_cell` made a cell of; any other as it is.

    >>> from_cell("'=1+1.jpg"), from_cell("'tis.jpg")
    ('=1+1.jpg', "'tis.jpg")
    """
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def csv_field(text: str) -> str:
    """Return a cell as it stands in a line of CSV: in quotes where something in it needs them."""
    cell = to_cell(text)
    return '"{}"'.format(cell.replace('"', '""')) if _QUOTED.search(cell) else cell


def to_cells(table: arrow.Table) -> arrow.Table:
    """Return a table whose columns of text are cells."""
    for place, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if arrow.types.is_string(column.type):
            cells = [None if text is None else to_cell(text) for text in column.to_pylist()]
            table = table.set_column(place, name, arrow.array(cells, arrow.string()))
    return table


def from_cells(column: arrow.ChunkedArray) -> arrow.ChunkedArray:
    """Return the original text of a column of cells."""
    texts = [None if cell is None else from_cell(cell) for cell in column.to_pylist()]
    return arrow.chunked_array([arrow.array(texts, arrow.string())])


def one_line(name: str) -> str:
    r"""Return a name as a line of a list; in JSON's quotes where it could break or forge a line.

    >>> print(one_line("a b.jpg"), one_line("a\nb.jpg"), one_line('"c".jpg'))
    a b.jpg "a\nb.jpg" "\"c\".jpg"
    """
    return json.dumps(name) if _NO_LINE.search(name) else name
