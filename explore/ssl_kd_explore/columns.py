"""Filter and sort the samples of a run by their columns, and compare columns between clusters."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any, TypeAlias

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from pyarrow import compute as _compute
from pyarrow import types

from ssl_kd.core.errors import InputError, printable
from ssl_kd.core.settings import nearest
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.decisions import Curation
from ssl_kd_explore.metadata import metadata

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
FREQUENT = 8  # values of a category that a chart shows; the others are counted together
MOST_VALUES = 1000  # of a category; texts with more different values are not grouped
CHARACTERS = 1000  # at most, of a filter and of a text in a cell
DECIDED = ("cluster", "checked", "excluded")  # columns that decisions change
TEXTS = ("text", "category", "media")  # kinds of columns
_OF_RUN = {"cluster": "cluster", "label": "category", "confidence": "number",
           "outlier": "number", "split": "category"}  # fmt: skip
_COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
                "": operator.eq, "=": operator.eq, "!=": operator.ne}  # fmt: skip
_NUMBER = r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
_COMPARISON = re.compile(rf"\s*(<=?|>=?|!?=|)\s*{_NUMBER}\s*", re.ASCII)
_RANGE = re.compile(rf"\s*{_NUMBER}\s*\.\.\s*{_NUMBER}\s*", re.ASCII)
Column: TypeAlias = arrow.Array | arrow.ChunkedArray
compute: Any = _compute  # pyright does not know its functions, which are made on import


class Columns:
    """The columns of a run's samples after all decisions: filters, sorting, cells and charts.

    `kinds` has name -> kind, in the order of a table: `number`; `category`, texts with few
    different values; `text`; `cluster`, numbers of clusters; or `media`, texts that stand for what
    a sample is, such as addresses of pictures.
    """

    def __init__(self, samples: Samples, curation: Curation) -> None:
        self._curation = curation
        self._n = len(samples)
        table = samples.table
        own = {
            name: _comparable(column)
            for name, column in metadata(samples).items()
            if not types.is_nested(column.type)
        }
        media = (samples.media or {}).get("column") if own else None
        kinds = {"file": "text"} | ({media: "media"} if media in own else {})
        kinds |= {name: kind for name, kind in _OF_RUN.items() if name in table.column_names}
        kinds |= {name: _kind(column) for name, column in own.items() if name != media}
        kinds |= {"checked": "category", "excluded": "category"}
        levels = [name for name in (*samples.levels, "second") if name in table.column_names]
        self.kinds = kinds | dict.fromkeys(levels, "cluster")
        self._columns = {
            name: _normalize(own[name] if name in own else table[name], kind)
            for name, kind in self.kinds.items()
            if name not in DECIDED
        }
        self._order = functools.lru_cache(8)(self._sort)

    def column(self, name: str) -> Column:
        """Return a column, with null where a value is missing, or raise InputError."""
        if name == "cluster":
            clusters = self._curation.clusters
            return arrow.array(clusters, mask=clusters < 0)
        if name in DECIDED:
            flags = self._curation.checked if name == "checked" else self._curation.excluded
            return arrow.DictionaryArray.from_arrays(flags.astype(np.int32), ["", "yes"])
        if name not in self.kinds:
            known = printable(", ".join(list(self.kinds)[:20]))
            hint = printable(nearest(name[:CHARACTERS], self.kinds))
            raise InputError(f"there is no column {short(name)}; expected {known}.{hint}")
        return self._columns[name]

    def find(
        self, filter: Mapping[str, str], sort: str | None = None, descending: bool = False
    ) -> NDArray[np.int64]:
        """Return the rows of the samples that pass all filters (`Run.find` explains them)."""
        mask = np.ones(self._n, bool)
        for name, text in filter.items():
            _check_text(name, text)
            if text:
                mask &= self._passes(name, text) if name else self._passes_anywhere(text)
        if sort is None:
            return np.flatnonzero(mask)
        order = (self._sort if sort in DECIDED else self._order)(sort, descending)
        return order[mask[order]].astype(np.int64)

    def cells(self, rows: Sequence[int], columns: Sequence[str]) -> list[list[Any]]:
        """Return the values of `columns` for each of the `rows`; None where missing."""
        for row in rows:
            if not 0 <= row < self._n:
                raise InputError(f"there is no sample {row}; expected 0 to {self._n - 1}")
        parts = [self.column(name).take(arrow.array(rows)).to_pylist() for name in columns]
        return [list(map(_cell, values)) for values in zip(*parts, strict=True)]

    def chart(self, name: str) -> dict[str, Any]:
        """Return quantiles of a column of numbers, or counts of values, for each cluster."""
        column, clusters = self.column(name), self._curation.clusters
        if self.kinds[name] == "number":
            return _quantiles(np.asarray(column, np.float64), clusters)
        if self.kinds[name] == "cluster":
            column = categories(column.cast(arrow.string()))
        if not isinstance(column, arrow.DictionaryArray):
            raise InputError(
                f"column {short(name)} has texts, which have no chart; expected a column of "
                "numbers or categories, such as confidence"
            )
        return _count_values(column, clusters)

    def _passes(self, name: str, text: str) -> NDArray[np.bool_]:
        """Return whether each sample passes the filter of one column, `[n]`."""
        column = self.column(name)
        if self.kinds[name] in TEXTS:
            return _match(column, text)
        mask = _compare(np.asarray(column, np.float64), text)
        if mask is not None:
            return mask
        if name == "cluster":
            return self._has_name(text)
        raise InputError(
            f"the filter of column {short(name)} is {short(text)}; expected a number, such as 3, "
            "<0.5, >=2 or 0.2..0.5"
        )

    def _passes_anywhere(self, text: str) -> NDArray[np.bool_]:
        """Return whether any text of each sample passes, `[n]`; for `!=`, whether all do."""
        names = [name for name, kind in self.kinds.items() if kind in TEXTS]
        masks = [self._passes(name, text) for name in names if name not in DECIDED]
        combine = np.logical_and if text.startswith("!=") else np.logical_or
        return combine.reduce([*masks, self._has_name(text)])

    def _has_name(self, text: str) -> NDArray[np.bool_]:
        """Return whether the name of each sample's cluster passes, `[n]`."""
        names, numbers = self._curation.names, [-1, *self._curation.sizes]
        texts = arrow.array([names.get(number) for number in numbers], arrow.string())
        return np.isin(self._curation.clusters, np.array(numbers)[_match(texts, text)])

    def _sort(self, name: str, descending: bool) -> NDArray[np.uint32]:
        """Return all rows sorted by a column: equal ones in row order, missing ones last."""
        order = "descending" if descending else "ascending"
        return np.asarray(compute.array_sort_indices(self.column(name), order=order), np.uint32)


def categories(texts: Column) -> arrow.DictionaryArray:
    """Encode texts with few different values, which are sorted; null where a text is missing."""
    values = arrow.array(sorted({*texts.unique().to_pylist()} - {None, ""}), arrow.string())
    codes = np.asarray(compute.index_in(texts, value_set=values).fill_null(-1))
    return arrow.DictionaryArray.from_arrays(codes, values, mask=codes < 0)


def codes_of(column: Column) -> NDArray[np.integer]:
    """Return numbers of clusters, or places of categories in their dictionary; -1 if missing."""
    codes = column.indices if isinstance(column, arrow.DictionaryArray) else column
    return np.asarray(codes.fill_null(-1))


def group_rows(clusters: NDArray[np.integer], rows: NDArray[np.integer]) -> dict[int, NDArray[Any]]:
    """Return cluster -> its rows among `rows`, in their order, for the clusters `[n]`."""
    rows = rows[clusters[rows] >= 0]
    rows = rows[np.argsort(clusters[rows], kind="stable")]
    numbers, starts = np.unique(clusters[rows], return_index=True)
    return dict(zip(numbers.tolist(), np.split(rows, starts[1:]), strict=False))


def _comparable(column: arrow.ChunkedArray) -> arrow.ChunkedArray:
    """Return a column as numbers or texts: times and truth values become texts."""
    kind = column.type
    if types.is_temporal(kind) or types.is_boolean(kind) or types.is_null(kind):
        return column.cast(arrow.string())
    return column.cast(arrow.float64()) if types.is_decimal(kind) else column


def _kind(column: arrow.ChunkedArray) -> str:
    """Return the kind of a column of numbers or texts."""
    if not types.is_string(column.type):
        return "number"
    n_values = len(column.unique())
    return "category" if n_values <= min(MOST_VALUES, 1 + len(column) // 2) else "text"


def _normalize(column: arrow.ChunkedArray, kind: str) -> Column:
    """Return a column with null where a value is missing, with categories encoded."""
    if kind == "category":
        return categories(column)
    if kind == "cluster":
        is_missing = compute.less(column, 0)
    elif kind != "number":
        is_missing = compute.equal(column, "")
    else:
        if types.is_floating(column.type):  # as decimals, so that =0.3 finds 0.3 in float32
            column = column.cast(arrow.string()).cast(arrow.float64())
        is_missing = compute.is_nan(column)
    return compute.if_else(is_missing, arrow.scalar(None, column.type), column)


def _cell(value: Any) -> Any:
    """Return a value for JSON: long texts cut, with their length; None for infinite numbers."""
    if isinstance(value, str):
        cut = f"{value[:CHARACTERS]}… ({len(value):,} characters)"
        return value if len(value) <= CHARACTERS else cut
    return None if isinstance(value, float) and math.isinf(value) else value


def _quantiles(numbers: NDArray[np.float64], clusters: NDArray[np.int64]) -> dict[str, Any]:
    """Return the number of finite numbers of each cluster, and five quantiles of them."""
    entries = []
    for cluster, rows in group_rows(clusters, np.flatnonzero(np.isfinite(numbers))).items():
        quantiles = np.quantile(numbers[rows], QUANTILES, method="nearest").tolist()
        entries.append({"cluster": cluster, "n": len(rows), "quantiles": quantiles})
    return {"kind": "number", "clusters": entries}


def _count_values(column: arrow.DictionaryArray, clusters: NDArray[np.int64]) -> dict[str, Any]:
    """Return the most frequent values, and how often they and all others occur in each cluster."""
    codes = codes_of(column)
    present = np.flatnonzero(codes >= 0)
    sizes = np.bincount(codes[present], minlength=len(column.dictionary))
    order = np.argsort(-sizes, kind="stable")
    places = np.minimum(np.argsort(order), FREQUENT)  # of each value
    values = column.dictionary.take(arrow.array(order[:FREQUENT])).to_pylist()
    values += ["other"] if len(order) > FREQUENT else []
    entries = []
    for cluster, rows in group_rows(clusters, present).items():
        counts = np.bincount(places[codes[rows]], minlength=len(values)).tolist()
        entries.append({"cluster": cluster, "n": len(rows), "counts": counts})
    return {"kind": "category", "values": values, "clusters": entries}


def _check_text(name: str, text: Any) -> None:
    is_text = isinstance(text, str) and text.encode(errors="ignore").decode() == text
    if not is_text or len(text) > CHARACTERS:
        raise InputError(
            f"the filter of column {short(name)} is {short(text)}; expected a text of at most "
            f"{CHARACTERS} characters, such as '<0.5' or '=cat'"
        )


def _compare(numbers: NDArray[np.float64], text: str) -> NDArray[np.bool_] | None:
    """Return which numbers pass a comparison, `[n]`; None if the text is not a comparison."""
    if text.strip() in ("=", "!="):
        return np.isnan(numbers) == (text.strip() == "=")
    if match := _RANGE.fullmatch(text):
        low, high = sorted(map(float, match.groups()))
        return (numbers >= low) & (numbers <= high)
    match = _COMPARISON.fullmatch(text)
    return None if match is None else _COMPARISONS[match[1]](numbers, float(match[2]))


def _match(texts: Column, text: str) -> NDArray[np.bool_]:
    """Return which texts contain `text`, or equal it if it begins with `=`, or not with `!=`."""
    if isinstance(texts, arrow.DictionaryArray):
        values = arrow.array([*texts.dictionary.to_pylist(), None], arrow.string())
        return _match(values, text)[codes_of(texts)]
    if text.startswith(("=", "!=")):
        wanted = text.removeprefix("!").removeprefix("=").strip()
        mask = np.asarray(compute.equal(texts, wanted).fill_null(not wanted))
        return ~mask if text.startswith("!") else mask
    return np.asarray(compute.match_substring(texts, text, ignore_case=True).fill_null(False))
