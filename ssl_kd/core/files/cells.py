r"""Escape text for CSV files and lists, so that no name breaks a row or becomes a formula.

Spreadsheets interpret a cell that begins with `= + - @`, a tab or a line break as a formula, even
if the CSV file quotes it. Such a cell gets a leading apostrophe when it is written, and loses the
apostrophe when it is read. Text that begins with apostrophes before such a character also gets one,
so that every text is restored exactly.
"""

from __future__ import annotations

import json
import re

import pyarrow as arrow

_FORMULA = re.compile(r"'*(?![-+]?\d+(\.\d+)?\Z)[=+\-@\t\r\n＝＋－＠]")
_QUOTED = re.compile(r'[",\r\n]')
_NO_LINE = re.compile(r'[\x00-\x1f\x7f-\x9f\u2028\u2029]|\A"')


def to_cell(text: str) -> str:
    """Escape a text for a CSV cell; numbers are not changed.

    >>> to_cell("=1+1.jpg"), to_cell("a=b.jpg"), to_cell("-1"), to_cell("'=x")
    ("'=1+1.jpg", 'a=b.jpg', '-1', "''=x")
    """
    return f"'{text}" if _FORMULA.match(text) else text


def from_cell(text: str) -> str:
    """Restore the text that `to_cell` has escaped; other texts are not changed.

    >>> from_cell("'=1+1.jpg"), from_cell("'tis.jpg")
    ('=1+1.jpg', "'tis.jpg")
    """
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def csv_field(text: str) -> str:
    """Escape a text for a field of a CSV line, with quotes if necessary."""
    cell = to_cell(text)
    return '"{}"'.format(cell.replace('"', '""')) if _QUOTED.search(cell) else cell


def to_cells(table: arrow.Table) -> arrow.Table:
    """Escape all string columns of a table by `to_cell`."""
    for place, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if arrow.types.is_string(column.type):
            cells = [None if text is None else to_cell(text) for text in column.to_pylist()]
            table = table.set_column(place, name, arrow.array(cells, arrow.string()))
    return table


def from_cells(column: arrow.ChunkedArray) -> arrow.ChunkedArray:
    """Restore the texts of a column that was escaped by `to_cell`."""
    texts = [None if cell is None else from_cell(cell) for cell in column.to_pylist()]
    return arrow.chunked_array([arrow.array(texts, arrow.string())])


def one_line(name: str) -> str:
    r"""Format a name as one line, as a JSON string if it contains control characters.

    >>> print(one_line("a b.jpg"), one_line("a\nb.jpg"), one_line('"c".jpg'))
    a b.jpg "a\nb.jpg" "\"c\".jpg"
    """
    return json.dumps(name) if _NO_LINE.search(name) else name
