"""Start the tables that commands print."""

from rich.box import SIMPLE_HEAD
from rich.table import Table


def new_table(title: str | None, first_column: str) -> Table:
    """Return an empty table with its first column."""
    table = Table(
        title=title, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column(first_column, no_wrap=True)
    return table
