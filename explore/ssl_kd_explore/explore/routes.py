"""Answer the explorer's requests for rows, cells, charts and clusters."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from ssl_kd.core.errors import InputError
from ssl_kd.core.files import strict_json
from ssl_kd_explore.cluster_pages import ClusterPages

CELL_ROWS = 1000  # rows of one request for cells


def answer(pages: ClusterPages, path: str, query: dict[str, str]) -> Any:
    """Return bytes or a value for JSON; None if there is no such path."""
    columns = pages.columns
    if path == "api/rows":
        filter = parse_json(query.get("filter", "{}").encode("utf-8", "replace"), "the filter")
        if not isinstance(filter, dict):
            raise InputError('the filter is not a JSON object; expected {"column": "text"}')
        is_descending = query.get("descending", "0") not in ("", "0", "false")
        return columns.find(filter, query.get("sort"), is_descending).astype("<u4").tobytes()
    if path == "api/cells":
        names = split_names(query.get("columns", ""), columns.kinds)
        return {"columns": names, "rows": columns.cells(_rows(query.get("rows", "")), names)}
    if path == "api/chart":
        return columns.chart(query.get("column", ""))
    if path == "api/clusters":
        return pages.list_clusters()
    cluster = path.removeprefix("api/cluster/")
    is_page = cluster != path and is_number(cluster)
    return pages.describe_cluster(int(cluster)) if is_page else None


def parse_json(text: bytes, what: str) -> Any:
    """Parse JSON that a client sent; raise InputError if it is not valid."""
    try:
        return strict_json(text)
    except ValueError as error:
        raise InputError(f"{what} is not valid JSON: {error}") from error


def is_number(text: str) -> bool:
    """Return whether a text is a whole number from 0 that fits into 64 bits."""
    return text.isascii() and text.isdecimal() and len(text) < 12


def split_names(text: str, known: Collection[str]) -> list[str]:
    """Split names at commas, except within the name of a known column."""
    names = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))  # longest first
    return re.findall(rf"(?:^|,)({names}|[^,]*)(?=,|$)", text)


def _rows(text: str) -> list[int]:
    numbers = text.split(",")
    if len(numbers) > CELL_ROWS or not all(map(is_number, numbers)):
        raise InputError(
            f"`rows` has {len(numbers)} entries; expected 1 to {CELL_ROWS:,} numbers of samples, "
            "such as rows=1,5,9"
        )
    return list(map(int, numbers))
