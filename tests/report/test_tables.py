"""The tables on the screen."""

import io

from rich.console import Console

from ssl_kd.report.tables import results_table


def test_a_table_without_labels_shows_dashes_and_no_title():
    screen = Console(file=io.StringIO(), width=120)
    screen.print(results_table({"table": [{"name": "[k]-means", "note": "no labels"}]}))
    screen.print(results_table({}))
    assert isinstance(screen.file, io.StringIO)
    assert "[k]-means" in screen.file.getvalue()
