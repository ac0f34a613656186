"""Answer the explorer's requests for rows, cells, charts and clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ssl_kd.errors import InputError
from ssl_kd.files import strict_json
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.cluster_pages import ClusterPages
from ssl_kd.workbench.columns import Columns
from ssl_kd.workbench.decisions import Curation
from ssl_kd.workbench.explore.page_data import as_json

CELL_ROWS = 1000  # rows of one request for cells
Answer = tuple[bytes, str]  # content and its type


class DataRoutes:
    """The paths below `api/` that return data about the samples and clusters of a run."""

    def __init__(self, samples: Samples, curation: Curation) -> None:
        self.columns = Columns(samples, curation)
        self._pages = ClusterPages(samples, curation, self.columns)

    @property
    def table(self) -> list[dict[str, str]]:
        """Names and kinds of the columns, for `meta.json`."""
        return [{"name": name, "kind": kind} for name, kind in self.columns.kinds.items()]

    def answer(self, path: str, query: dict[str, str]) -> Answer | None:
        """Return the answer to a request; None if there is no such path.

        Raises:
            InputError: the query is not valid.
        """
        if path == "api/rows":
            rows = self.columns.find(
                _filter(query.get("filter", "{}")),
                query.get("sort") or None,
                query.get("descending", "0") not in ("", "0", "false"),
            )
            return rows.astype("<u4").tobytes(), "application/octet-stream"
        value = self._value(path, query)
        return None if value is None else (as_json(value), "application/json")

    def _value(self, path: str, query: dict[str, str]) -> Any:
        """Return the content of an answer in JSON; None if there is no such path."""
        if path == "api/cells":
            names = _column_names(query.get("columns", ""), self.columns.names)
            return {"columns": names, "rows": self.columns.cells(_rows(query), names)}
        if path == "api/chart":
            return self.columns.chart(query.get("column", ""))
        if path == "api/clusters":
            return self._pages.list_clusters()
        cluster = path.removeprefix("api/cluster/")
        if cluster != path and _is_number(cluster):
            return self._pages.describe_cluster(int(cluster))
        return None


def _filter(text: str) -> dict[str, str]:
    try:
        filter = strict_json(text.encode("utf-8", "replace"))
    except ValueError as error:
        raise InputError(f"the filter is not valid JSON: {error}") from error
    if not isinstance(filter, dict):
        raise InputError('the filter is not a JSON object; expected {"column": "text"}')
    return filter


def _rows(query: dict[str, str]) -> list[int]:
    texts = query.get("rows", "").split(",")
    if len(texts) > CELL_ROWS or not all(map(_is_number, texts)):
        raise InputError(
            f"`rows` has {len(texts)} entries; expected 1 to {CELL_ROWS:,} numbers of samples, "
            "such as rows=1,5,9"
        )
    return [int(text) for text in texts]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 12


def _column_names(text: str, known: Sequence[str]) -> list[str]:
    """Split names at commas, except within the name of a known column."""
    parts, names = text.split(","), []
    most = 1 + max(name.count(",") for name in known)
    while parts:
        joined = [",".join(parts[:size]) for size in range(1, most + 1)]
        name = next((name for name in joined if name in known), parts[0])
        names.append(name)
        del parts[: name.count(",") + 1]
    return names
