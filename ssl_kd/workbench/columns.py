"""Filter and sort the samples of a run by their columns, and compare columns between clusters."""

from __future__ import annotations

import functools
import operator
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from pyarrow import compute
from typing_extensions import Self

from ssl_kd.errors import InputError
from ssl_kd.settings import nearest
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.decisions import Curation
from ssl_kd.workbench.metadata import metadata

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
FREQUENT = 8  # values of a category that a chart shows; the others are counted together
MOST_VALUES = 1000  # of a category; texts with more different values are not grouped
CHARACTERS = 1000  # at most, of a filter and of a text in a cell
DECIDED = ("cluster", "checked", "excluded")  # columns that decisions change
_COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
                "": operator.eq, "=": operator.eq, "!=": operator.ne}  # fmt: skip
_NUMBER = r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
_COMPARISON = re.compile(rf"\s*(<=?|>=?|!?=|)\s*{_NUMBER}\s*", re.ASCII)
_RANGE = re.compile(rf"\s*{_NUMBER}\s*\.\.\s*{_NUMBER}\s*", re.ASCII)


@dataclass(frozen=True)
class Categories:
    """A column of texts with few different values."""

    codes: NDArray[np.int32]  # `[n]`, places in `values`; -1 where the text is missing or empty
    values: list[str]  # sorted

    @classmethod
    def of(cls, texts: arrow.ChunkedArray) -> Self:
        """Encode a column of strings."""
        chunks = texts.dictionary_encode().unify_dictionaries().chunks
        known = chunks[0].dictionary.to_pylist() if chunks else []
        values = sorted({text for text in known if text})
        places = {text: place for place, text in enumerate(values)}
        table = np.array([*(places.get(text, -1) for text in known), -1], np.int32)
        codes = [table[chunk.indices.fill_null(-1).to_numpy()] for chunk in chunks]
        return cls(np.concatenate([*codes, table[:0]]), values)

    @classmethod
    def of_clusters(cls, clusters: NDArray[np.integer]) -> Self:
        """Encode numbers of clusters; negative ones are missing."""
        used = np.flatnonzero(np.bincount(clusters[clusters >= 0]))
        codes = np.where(clusters < 0, -1, np.searchsorted(used, clusters))
        return cls(codes.astype(np.int32), [str(number) for number in used])


class Columns:
    """The columns of a run's samples, for filters, sorting, cells and charts.

    Args:
        samples: the samples of the run.
        curation: the decisions of the run, which change the columns `cluster`, `checked` and
            `excluded`.

    Attributes:
        kinds: name -> kind, in the order in which a table shows the columns: `number`; `category`,
            texts with few different values; `text`; or `cluster`, numbers of clusters.
    """

    def __init__(self, samples: Samples, curation: Curation) -> None:
        self._curation, self._n, table = curation, len(samples), samples.table
        kinds = {"file": "text", "cluster": "cluster", "label": "category", "confidence": "number",
                 "outlier": "number", "split": "category"}  # fmt: skip
        kinds |= dict.fromkeys((*samples.levels, "second"), "cluster")
        self.kinds = {name: kind for name, kind in kinds.items() if name in table.column_names}
        self._columns: dict[str, arrow.ChunkedArray | Categories] = {
            name: Categories.of(table[name]) if kind == "category" else table[name]
            for name, kind in self.kinds.items()
        }
        for name, column in metadata(samples).items():
            self.kinds[name], self._columns[name] = "number", column
            if arrow.types.is_string(column.type):
                n_values = compute.count_distinct(column).as_py()
                is_category = n_values <= min(MOST_VALUES, self._n // 2)
                self.kinds[name] = "category" if is_category else "text"
                self._columns[name] = Categories.of(column) if is_category else column
        self.kinds |= {"checked": "category", "excluded": "category"}
        self._order = functools.lru_cache(8)(self._sort)
        self._ranks = functools.lru_cache(4)(self._rank)

    @property
    def names(self) -> list[str]:
        """Names of all columns."""
        return list(self.kinds)

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
        self.check(sort)
        order = (self._sort if sort in DECIDED else self._order)(sort, descending)
        return order[mask[order]].astype(np.int64)

    def cells(self, rows: Sequence[int], columns: Sequence[str]) -> list[list[Any]]:
        """Return the values of `columns` for each of the `rows`; None where missing.

        Raises:
            InputError: there is no such row or column.
        """
        self.check(*columns)
        for row in rows:
            if not 0 <= row < self._n:
                raise InputError(f"there is no sample {row}; expected 0 to {self._n - 1}")
        numbers = np.asarray(rows, np.int64)
        parts = [
            _take(self.values(name), numbers, self.kinds[name] == "cluster") for name in columns
        ]
        return [list(cells) for cells in zip(*parts, strict=True)]

    def chart(self, name: str) -> dict[str, Any]:
        """Return quantiles of a column of numbers, or counts of values, for each cluster.

        Raises:
            InputError: there is no such column, or it has texts.
        """
        self.check(name)
        values, clusters = self.values(name), self._curation.clusters
        if isinstance(values, arrow.ChunkedArray):
            raise InputError(
                f"column {name!r} has texts, which have no chart; expected a column of numbers or "
                "categories, such as confidence"
            )
        if self.kinds[name] == "number":
            assert isinstance(values, np.ndarray)
            groups = group_rows(clusters, np.flatnonzero(np.isfinite(values)))
            return {"kind": "number", "clusters": [
                {"cluster": cluster, "n": len(rows), "quantiles": plain(
                    np.quantile(values[rows], QUANTILES, method="nearest"))}
                for cluster, rows in groups.items()]}  # fmt: skip
        categories = Categories.of_clusters(values) if isinstance(values, np.ndarray) else values
        rows = np.flatnonzero(categories.codes >= 0)
        sizes = np.bincount(categories.codes[rows], minlength=len(categories.values))
        order = np.argsort(-sizes, kind="stable")
        shown = [categories.values[place] for place in order[:FREQUENT]]
        places = np.empty(len(order), np.int64)
        places[order] = np.minimum(np.arange(len(order)), FREQUENT)
        shown += ["other"] if len(order) > FREQUENT else []
        counts = {
            cluster: np.bincount(places[categories.codes[members]], minlength=len(shown)).tolist()
            for cluster, members in group_rows(clusters, rows).items()
        }
        return {"kind": "category", "values": shown, "clusters": [
            {"cluster": cluster, "n": sum(n), "counts": n} for cluster, n in counts.items()
        ]}  # fmt: skip

    def check(self, *names: str) -> None:
        """Raise InputError if there is no column of one of these names."""
        for name in names:
            if name not in self.kinds:
                hint = nearest(name[:CHARACTERS], self.kinds)
                known = ", ".join(self.kinds)
                raise InputError(f"there is no column {_short(name)}; expected {known}.{hint}")

    def values(self, name: str) -> NDArray[Any] | Categories | arrow.ChunkedArray:
        """Return a column: an array of numbers, categories, or texts."""
        if name == "cluster":
            return self._curation.clusters
        if name in DECIDED:
            flags = self._curation.checked if name == "checked" else self._curation.excluded
            return Categories(flags.astype(np.int32), ["", "yes"])
        column = self._columns[name]
        if self.kinds[name] == "cluster":
            return column.fill_null(-1).to_numpy()
        return column.to_numpy() if self.kinds[name] == "number" else column

    def _passes(self, name: str, text: str) -> NDArray[np.bool_]:
        """Return whether each sample passes the filter of one column, `[n]`."""
        self.check(name)
        values = self.values(name)
        if isinstance(values, Categories):
            return _contains(arrow.array([*values.values, ""]), text)[values.codes]
        if isinstance(values, arrow.ChunkedArray):
            return _contains(values, text)
        missing = values < 0 if self.kinds[name] == "cluster" else np.isnan(values)
        mask = _compare(values, missing, text)
        if mask is not None:
            return mask
        if name == "cluster":
            return self._has_name(values, text)
        raise InputError(
            f"the filter of column {_short(name)} is {_short(text)}; expected a number, such as 3, "
            "<0.5, >=2 or 0.2..0.5"
        )

    def _passes_anywhere(self, text: str) -> NDArray[np.bool_]:
        """Return whether any text of each sample passes, `[n]`; for `!=`, whether all do."""
        names = [name for name, kind in self.kinds.items() if kind in ("text", "category")]
        masks = [self._passes(name, text) for name in names if name not in DECIDED]
        masks.append(self._has_name(self._curation.clusters, text))
        combine = np.logical_and if text.startswith("!=") else np.logical_or
        return combine.reduce(masks)

    def _has_name(self, clusters: NDArray[Any], text: str) -> NDArray[np.bool_]:
        """Return whether the name of each sample's cluster passes, `[n]`."""
        names = self._curation.names
        passes = _contains(arrow.array([*names.values(), ""]), text)
        chosen = [number for number, is_in in zip(names, passes[:-1], strict=True) if is_in]
        unnamed = ~np.isin(clusters, list(names)) if passes[-1] else False
        return np.isin(clusters, chosen) | unnamed

    def _sort(self, name: str, descending: bool) -> NDArray[np.uint32]:
        """Return all rows sorted by a column: equal ones in row order, missing ones last."""
        keys = self.values(name)
        if isinstance(keys, Categories):
            keys = keys.codes
        elif isinstance(keys, arrow.ChunkedArray):
            keys = self._ranks(name)
        missing = np.isnan(keys) if self.kinds[name] == "number" else keys < 0
        rows = np.flatnonzero(~missing)
        keys = keys[rows]
        if keys.dtype.kind == "i" and len(rows) and 0 <= keys.min() and keys.max() < 1 << 16:
            keys = keys.astype(np.uint16)  # sorted in linear time
        if descending:
            keys = -keys if keys.dtype.kind == "f" else ~keys
        rows = rows[np.argsort(keys, kind="stable")]
        return np.concatenate([rows, np.flatnonzero(missing)]).astype(np.uint32)

    def _rank(self, name: str) -> NDArray[np.int32]:
        """Return the rank of each text in a column, equal for equal texts; -1 where missing."""
        texts = self._columns[name]
        ranks = np.asarray(compute.rank(texts, tiebreaker="dense")).astype(np.int32)
        return np.where(_contains(texts, "="), -1, ranks)


def group_rows(clusters: NDArray[np.int64], rows: NDArray[Any]) -> dict[int, NDArray[Any]]:
    """Return cluster -> its rows among `rows`, in their order, for the clusters `[n]`."""
    rows = rows[clusters[rows] >= 0]
    of_rows = clusters[rows]
    sizes = np.bincount(of_rows)
    numbers = np.flatnonzero(sizes)
    codes = np.searchsorted(numbers, of_rows)
    if len(numbers) < 1 << 16:
        codes = codes.astype(np.uint16)  # sorted in linear time
    parts = np.split(rows[np.argsort(codes, kind="stable")], np.cumsum(sizes[numbers])[:-1])
    return dict(zip(numbers.tolist(), parts, strict=True)) if len(numbers) else {}


def plain(numbers: NDArray[Any]) -> list[Any]:
    """Convert numbers for JSON: the shortest decimals, and None if not finite."""
    if numbers.dtype.kind != "f":
        return numbers.tolist()
    return [float(str(x)) if np.isfinite(x) else None for x in numbers]


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or len(text) > CHARACTERS or not _is_unicode(name + text):
        raise InputError(
            f"the filter of column {_short(name)} is {_short(text)}; expected a text of at most "
            f"{CHARACTERS} characters, such as '<0.5' or '=cat'"
        )


def _is_unicode(text: str) -> bool:
    return text.encode("utf-8", "replace").decode() == text


def _compare(numbers: NDArray[Any], missing: NDArray[np.bool_], text: str) -> Any:
    """Return which numbers pass a comparison, `[n]`; None if the text is not a comparison."""
    if text.strip() in ("=", "!="):
        return missing == (text.strip() == "=")
    with np.errstate(over="ignore"):  # 1e300 is infinite in float32
        if match := _RANGE.fullmatch(text):
            low, high = sorted(map(float, match.groups()))
            return (numbers >= low) & (numbers <= high) & ~missing
        if match := _COMPARISON.fullmatch(text):
            mask = _COMPARISONS[match[1]](numbers, float(match[2]))
            return mask | missing if match[1] == "!=" else mask & ~missing
    return None


def _contains(texts: arrow.Array | arrow.ChunkedArray, text: str) -> NDArray[np.bool_]:
    """Return which texts contain `text`, or are (not) equal to it if it begins with `=` (`!=`)."""
    if text.startswith(("=", "!=")):
        wanted = text.removeprefix("!").removeprefix("=").strip()
        mask = np.asarray(compute.equal(texts, wanted).fill_null(wanted == ""))
        return ~mask if text.startswith("!") else mask
    return np.asarray(compute.match_substring(texts, text, ignore_case=True).fill_null(False))


def _short(value: object) -> str:
    return reprlib.repr(value)


def _take(values: Any, rows: NDArray[np.int64], is_cluster: bool) -> list[Any]:
    """Return the values in some rows for JSON; None where missing."""
    if isinstance(values, Categories):
        texts = [*values.values, None]
        return [texts[code] for code in values.codes[rows]]
    if isinstance(values, arrow.ChunkedArray):
        return [text and text[:CHARACTERS] for text in values.take(arrow.array(rows)).to_pylist()]
    return [None if is_cluster and value < 0 else value for value in plain(values[rows])]
