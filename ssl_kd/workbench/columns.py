"""Filter and sort the samples of a run by their columns, and compare columns between clusters."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from pyarrow import compute
from typing_extensions import Self

from ssl_kd.errors import InputError, printable
from ssl_kd.settings import nearest
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.decisions import Curation
from ssl_kd.workbench.metadata import metadata

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
FREQUENT = 8  # values of a category that a chart shows; the others are counted together
MOST_VALUES = 1000  # of a category; texts with more different values are not grouped
CHARACTERS = 1000  # at most, of a filter and of a text in a cell
DECIDED = ("cluster", "checked", "excluded")  # columns that decisions change
TEXTS = ("text", "category", "media")  # kinds of columns
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
        curation: the decisions of the run, which change `cluster`, `checked` and `excluded`.

    Attributes:
        kinds: name -> kind, in the order in which a table shows the columns: `number`; `category`,
            texts with few different values; `text`; `cluster`, numbers of clusters; or `media`,
            texts that stand for what a sample is, such as addresses of pictures.
    """

    def __init__(self, samples: Samples, curation: Curation) -> None:
        self._curation, self._n, table = curation, len(samples), samples.table
        kinds = {"file": "text", "cluster": "cluster", "label": "category", "confidence": "number",
                 "outlier": "number", "split": "category"}  # fmt: skip
        kinds |= dict.fromkeys((*samples.levels, "second"), "cluster")
        self.kinds = {name: kind for name, kind in kinds.items() if name in table.column_names}
        self._columns: dict[str, Any] = {
            name: Categories.of(table[name]) if kind == "category" else table[name]
            for name, kind in self.kinds.items()
        }
        own = metadata(samples)
        media = (samples.media or {}).get("column") if own else None
        for name, column in own.items():
            classified = ("media", column) if name == media else _classify(column)
            self.kinds[name], self._columns[name] = classified
        self.kinds |= {"checked": "category", "excluded": "category"}
        self._order = functools.lru_cache(8)(self._sort)
        self._ranks = functools.lru_cache(4)(self._rank)

    @property
    def names(self) -> list[str]:
        """Names of all columns."""
        return list(self.kinds)

    def values(self, name: str) -> NDArray[Any] | Categories | arrow.ChunkedArray:
        """Return a column: an array of numbers (clusters: -1 where missing), categories or texts.

        Raises:
            InputError: there is no such column.
        """
        if name not in self.kinds:
            known = printable(", ".join(self.names[:20]))
            hint = printable(nearest(name[:CHARACTERS], self.kinds))
            raise InputError(f"there is no column {short(name)}; expected {known}.{hint}")
        if name == "cluster":
            return self._curation.clusters
        if name in DECIDED:
            flags = self._curation.checked if name == "checked" else self._curation.excluded
            return Categories(flags.astype(np.int32), ["", "yes"])
        if self.kinds[name] == "cluster":
            return self._columns[name].fill_null(-1).to_numpy()
        is_number = self.kinds[name] == "number"
        return self._columns[name].to_numpy() if is_number else self._columns[name]

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
        """Return the values of `columns` for each of the `rows`; None where missing.

        Raises:
            InputError: there is no such row or column.
        """
        for row in rows:
            if not 0 <= row < self._n:
                raise InputError(f"there is no sample {row}; expected 0 to {self._n - 1}")
        parts = [self._take(name, np.asarray(rows, np.int64)) for name in columns]
        return [list(cells) for cells in zip(*parts, strict=True)]

    def chart(self, name: str) -> dict[str, Any]:
        """Return quantiles of a column of numbers, or counts of values, for each cluster.

        Raises:
            InputError: there is no such column, or it has texts.
        """
        values, clusters = self.values(name), self._curation.clusters
        if isinstance(values, Categories):
            return _count_values(values, clusters)
        if isinstance(values, arrow.ChunkedArray):
            raise InputError(
                f"column {short(name)} has texts, which have no chart; expected a column of "
                "numbers or categories, such as confidence"
            )
        if self.kinds[name] == "cluster":
            return _count_values(Categories.of_clusters(values), clusters)
        return _quantiles(values, clusters)

    def _passes(self, name: str, text: str) -> NDArray[np.bool_]:
        """Return whether each sample passes the filter of one column, `[n]`."""
        values = self.values(name)
        if isinstance(values, Categories):
            return _match(arrow.array([*values.values, ""]), text)[values.codes]
        if isinstance(values, arrow.ChunkedArray):
            return _match(values, text)
        mask = _compare(values, self._missing(name, values), text)
        if mask is not None:
            return mask
        if name == "cluster":
            return self._has_name(values, text)
        raise InputError(
            f"the filter of column {short(name)} is {short(text)}; expected a number, such as 3, "
            "<0.5, >=2 or 0.2..0.5"
        )

    def _passes_anywhere(self, text: str) -> NDArray[np.bool_]:
        """Return whether any text of each sample passes, `[n]`; for `!=`, whether all do."""
        names = [name for name, kind in self.kinds.items() if kind in TEXTS]
        masks = [self._passes(name, text) for name in names if name not in DECIDED]
        masks.append(self._has_name(self._curation.clusters, text))
        combine = np.logical_and if text.startswith("!=") else np.logical_or
        return combine.reduce(masks)

    def _has_name(self, clusters: NDArray[Any], text: str) -> NDArray[np.bool_]:
        """Return whether the name of each sample's cluster passes, `[n]`."""
        names = self._curation.names
        numbers = [-1, *self._curation.sizes]
        texts = arrow.array([names.get(number, "") for number in numbers], arrow.string())
        return np.isin(clusters, np.array(numbers)[_match(texts, text)])

    def _missing(self, name: str, numbers: NDArray[Any]) -> NDArray[np.bool_]:
        """Return where the numbers of a column (codes or ranks if it has texts) are missing."""
        return np.isnan(numbers) if self.kinds[name] == "number" else numbers < 0

    def _sort(self, name: str, descending: bool) -> NDArray[np.uint32]:
        """Return all rows sorted by a column: equal ones in row order, missing ones last."""
        keys = self.values(name)
        if isinstance(keys, Categories):
            keys = keys.codes
        elif isinstance(keys, arrow.ChunkedArray):
            keys = self._ranks(name)
        missing = self._missing(name, keys)
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
        ranks = compute.call_function("rank", [texts], compute.RankOptions(tiebreaker="dense"))
        return np.where(_match(texts, "="), -1, np.asarray(ranks).astype(np.int32))

    def _take(self, name: str, rows: NDArray[np.int64]) -> list[Any]:
        """Return the values of a column in some rows for JSON; None where missing."""
        values = self.values(name)
        if isinstance(values, Categories):
            texts = [*values.values, None]
            return [texts[code] for code in values.codes[rows]]
        if isinstance(values, arrow.ChunkedArray):
            texts = values.take(arrow.array(rows)).to_pylist()
            return [text and text[:CHARACTERS] for text in texts]
        is_cluster = self.kinds[name] == "cluster"
        return [None if is_cluster and x < 0 else x for x in plain(values[rows])]


def _classify(column: arrow.ChunkedArray) -> tuple[str, arrow.ChunkedArray | Categories]:
    """Return the kind of a column of numbers or strings, and its content."""
    if not arrow.types.is_string(column.type):
        return "number", column
    n_values = compute.call_function("count_distinct", [column]).as_py()
    if n_values <= min(MOST_VALUES, 1 + len(column) // 2):
        return "category", Categories.of(column)
    return "text", column


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
    return dict(zip(numbers.tolist(), parts[: len(numbers)], strict=True))


def plain(numbers: NDArray[Any]) -> list[Any]:
    """Convert numbers for JSON: the shortest decimals, and None if not finite."""
    if numbers.dtype.kind != "f":
        return numbers.tolist()
    return [float(str(x)) if np.isfinite(x) else None for x in numbers]


def _quantiles(numbers: NDArray[Any], clusters: NDArray[np.int64]) -> dict[str, Any]:
    """Return the number of finite numbers of each cluster, and five quantiles of them."""
    entries = []
    for cluster, rows in group_rows(clusters, np.flatnonzero(np.isfinite(numbers))).items():
        quantiles = np.quantile(numbers[rows], QUANTILES, method="nearest")
        entries.append({"cluster": cluster, "n": len(rows), "quantiles": plain(quantiles)})
    return {"kind": "number", "clusters": entries}


def _count_values(column: Categories, clusters: NDArray[np.int64]) -> dict[str, Any]:
    """Return the most frequent values, and how often they and all others occur in each cluster."""
    present = np.flatnonzero(column.codes >= 0)
    sizes = np.bincount(column.codes[present], minlength=len(column.values))
    order = np.argsort(-sizes, kind="stable")
    values = [column.values[code] for code in order[:FREQUENT]]
    values += ["other"] if len(order) > FREQUENT else []
    places = np.empty(len(order), np.int64)
    places[order] = np.minimum(np.arange(len(order)), FREQUENT)
    entries = []
    for cluster, rows in group_rows(clusters, present).items():
        counts = np.bincount(places[column.codes[rows]], minlength=len(values)).tolist()
        entries.append({"cluster": cluster, "n": len(rows), "counts": counts})
    return {"kind": "category", "values": values, "clusters": entries}


def _check_text(name: str, text: object) -> None:
    is_valid = isinstance(text, str) and len(text) <= CHARACTERS
    if not is_valid or f"{name}{text}".encode("utf-8", "replace").decode() != f"{name}{text}":
        raise InputError(
            f"the filter of column {short(name)} is {short(text)}; expected a text of at most "
            f"{CHARACTERS} characters, such as '<0.5' or '=cat'"
        )


def _compare(
    numbers: NDArray[Any], missing: NDArray[np.bool_], text: str
) -> NDArray[np.bool_] | None:
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


def _match(texts: arrow.Array | arrow.ChunkedArray, text: str) -> NDArray[np.bool_]:
    """Return which texts contain `text`, or equal it if it begins with `=`, or not with `!=`."""
    if text.startswith(("=", "!=")):
        wanted = text.removeprefix("!").removeprefix("=").strip()
        mask = compute.call_function("equal", [texts, arrow.scalar(wanted)])
        mask = np.asarray(mask.fill_null(not wanted))
        return ~mask if text.startswith("!") else mask
    options = compute.MatchSubstringOptions(text, ignore_case=True)
    mask = compute.call_function("match_substring", [texts], options)
    return np.asarray(mask.fill_null(False))
