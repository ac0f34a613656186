"""Read features from a file: embeddings of a user, or a shard of an embedding cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ssl_kd.datasets.images import digest_array
from ssl_kd.datasets.media import Rows, row_names
from ssl_kd.datasets.tables import (
    FEATURES,
    IDS,
    LABELS,
    Table,
    as_text,
    check_column,
    one_line_errors,
    open_table,
    readable_values,
)
from ssl_kd.datasets.usage import Usage, counted
from ssl_kd.errors import InputError
from ssl_kd.files import load_tensors

__all__ = ["FeatureDataset", "class_numbers", "open_features"]

logger = logging.getLogger(__name__)


class FeatureDataset:
    """A data set of feature vectors `[n, d]` with names and, if known, classes.

    `labels` are int64 `[n]`, -1 where unknown, or None if no row is labeled. `rows` shows what the
    rows are, and `usage` says what of the file is used.
    """

    def __init__(
        self,
        name: str,
        split: str,
        features: np.ndarray,
        labels: np.ndarray | Sequence[Any] | None = None,
        ids: Sequence[Any] | None = None,
        class_names: tuple[str, ...] | None = None,
        rows: Rows | None = None,
        usage: Usage | None = None,
    ) -> None:
        if features.ndim != 2 or not features.size or features.dtype.kind not in "fiub":
            raise InputError(
                f"{name}: features are {features.dtype} {list(features.shape)}; expected numbers "
                "[samples, dimensions] with at least one row"
            )
        self.rows = rows
        for what, values in (("labels", labels), ("ids", ids)):
            if values is not None and len(values) != len(features):
                raise InputError(
                    f"{name} has {len(values)} {what}; expected {len(features)}, one per row"
                )
        self.name = name
        self.split = split
        self.features = features
        self.ids = row_names(len(features), ids)
        n, width = features.shape
        self.usage = usage or Usage(f"{counted(n, 'row')} of features, {width:,} wide")
        self.labels: np.ndarray | None = None
        self.class_names: tuple[str, ...] | None = None
        if labels is not None:
            self._set_labels(labels, class_names)

    def _set_labels(self, labels: Any, class_names: tuple[str, ...] | None) -> None:
        try:
            numbers, names = class_numbers(labels, class_names)
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from error
        unknown = int((numbers < 0).sum())
        if 0 < unknown < len(numbers):
            text = "%s: %d of %d samples have no label (negative, NaN or empty) and are not scored"
            logger.info(text, self.name, unknown, len(numbers))
        if names[:2] == ("-1", "1"):
            logger.info("%s: the labels -1 and 1 are used as two classes", self.name)
        if names:
            self.labels, self.class_names = numbers, names

    def __len__(self) -> int:
        return len(self.features)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of features and labels."""
        return digest_array(self.features, self.labels)

    @property
    def pictured(self) -> bool:
        """Whether the rows have pictures."""
        return self.rows is not None and self.rows.pictured


def class_numbers(
    labels: np.ndarray | Sequence[Any], class_names: tuple[str, ...] | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Convert labels to class numbers int64 `[n]` from 0 to C-1 in sorted order, and class names.

    Negative numbers, NaN, None and empty strings are unknown and become -1. However, -1 is a class
    if all numbers are -1 or 1, or if `class_names`, the order of another split, contains it.

    >>> class_numbers(["dog", "", "cat"])
    (array([ 1, -1,  0]), ('cat', 'dog'))
    """
    values: Any = np.asarray(labels)
    if values.ndim != 1 or values.dtype.kind not in "biufUSO":
        raise InputError(f"labels are {values.dtype} {list(values.shape)}; expected [samples]")
    if values.dtype.kind in "SOU":
        values = np.array([as_text(v) for v in values.tolist()], dtype=object)
        known = np.array([v is not None and v == v and str(v) != "" for v in values], dtype=bool)
        values = values.astype(str)
    else:
        finite = np.isfinite(values)
        signs = set(np.unique(values[finite]).tolist()) == {-1, 1}
        low = -1 if signs or "-1" in (class_names or ()) else 0
        known = finite & (values >= low)
        if not np.equal(np.trunc(values[known]), values[known]).all():
            raise InputError("labels contain fractions; expected integers or strings")
        if known.any() and float(values[known].max()) >= 2.0**63:
            raise InputError(f"a label is {values[known].max()}; expected numbers below 2**63")
        values = np.where(known, values, -1).astype(np.int64)
    classes, inverse = np.unique(values[known], return_inverse=True)
    names = tuple(str(v) for v in classes)
    if class_names is not None:
        unknown = sorted(set(names) - set(class_names))
        if unknown:
            raise InputError(
                f"labels contain the classes {unknown[:5]}; expected classes of the other split, "
                f"{list(class_names)[:10]}"
            )
        inverse = np.array([class_names.index(n) for n in names], dtype=np.int64)[inverse]
        names = class_names
    numbers = np.full(len(values), -1, dtype=np.int64)
    numbers[known] = inverse
    return numbers, names


def open_features(
    path: str | os.PathLike[str],
    split: str = "train",
    class_names: tuple[str, ...] | None = None,
    column: str | None = None,
) -> FeatureDataset:
    """Read features from a file.

    - `.npy`: one array. Labels may be in `NAME_labels.npy` in the same folder.
    - `.npz`, `.pt`, `.safetensors`: an array named `features`, `embeddings` or `x`, and optionally
      `labels` or `y`, and `ids`.
    - `.parquet`, or a folder written by `save_to_disk` of Hugging Face's `datasets`: a list column
      (with one of these names, if there are several). A column of pictures, or of image paths
      relative to the folder of the file, provides the images of the rows.
    - `.h5ad` of AnnData: a matrix of `obsm`, by default `X_pca` or `X_scVI`.

    `column` names the array or list column with the features.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"the feature file {path} does not exist")
    with one_line_errors(path):
        table = open_table(path)
        if table is None:
            columns = _READERS[path.suffix.lower()](path, column)
        else:
            columns = _read_table(table, column)
        features, labels, ids = (as_array(value) for value in columns[:3])
        features = np.asanyarray(features)
    return FeatureDataset(str(path), split, features, labels, ids, class_names, columns.rows)


class _Columns(NamedTuple):
    """Columns of a feature file."""

    features: Any
    labels: Any = None
    ids: Any = None
    rows: Rows | None = None


def as_array(X: Any) -> Any:
    """Convert a dense tensor to a NumPy array; return any other value unchanged.

    Dtypes that NumPy lacks, such as bfloat16, become float32.
    """
    if not isinstance(X, torch.Tensor):
        return X
    if X.layout != torch.strided or X.is_quantized or X.is_meta:
        raise TypeError(
            "the tensor is sparse, quantized or on the meta device: pass a dense tensor with values"
        )
    X = X.detach().cpu().resolve_neg()
    known = X.dtype in (torch.float16, torch.float32, torch.float64)
    return (X.float() if X.is_floating_point() and not known else X).numpy()


def _first(known: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in known if name in names), None)


def _columns(
    path: Path, names: Sequence[str], get: Callable[[str], Any], column: str | None
) -> _Columns:
    if column is not None:
        check_column(path, column, names)
    rest = [name for name in names if name != column]
    wanted = [column or _first(FEATURES, rest), _first(LABELS, rest), _first(IDS, rest)]
    if wanted[0] is None:
        raise InputError(
            f"{path} contains {list(names)[:10]}; expected features with one of the names "
            f"{FEATURES}: choose another name with --column"
        )
    return _Columns(*(None if name is None else get(name) for name in wanted))


def _refuse_column(path: Path, column: str | None) -> None:
    if column is not None:
        raise InputError(
            f"COLUMN is {column!r}, but {path} contains one array without a name: remove --column"
        )


def _read_npy(path: Path, column: str | None) -> _Columns:
    _refuse_column(path, column)
    features = np.load(path, mmap_mode="r", allow_pickle=False)
    labels = path.with_name(path.stem + "_labels.npy")
    return _Columns(features, np.load(labels, allow_pickle=False) if labels.is_file() else None)


def _read_npz(path: Path, column: str | None) -> _Columns:
    with np.load(path, allow_pickle=False) as file:
        return _columns(path, file.files, file.__getitem__, column)


def _read_pt(path: Path, column: str | None) -> _Columns:
    value = load_tensors(path, mmap=True)
    if not isinstance(value, Mapping):
        _refuse_column(path, column)
        return _Columns(value)
    return _columns(path, list(value), value.__getitem__, column)


def _read_safetensors(path: Path, column: str | None) -> _Columns:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return _columns(path, list(file.keys()), file.get_tensor, column)


def _read_table(table: Table, column: str | None) -> _Columns:
    chosen, label, _ = table.roles(column).values()
    if not table.lists:
        raise InputError(
            f"{table.path} has the columns {list(table.kinds)[:10]}; expected a column with a list "
            "of numbers in each row: in pandas, frame.assign(features=[*frame[columns].to_numpy()])"
        )
    if chosen is None:
        raise InputError(
            f"{table.path} has {len(table.lists)} columns of lists, {', '.join(table.lists[:10])}: "
            f"choose the one with the features, --column {table.lists[0]}"
        )
    labels = None if label is None else np.asarray(readable_values(table.read(label)))
    rows = Rows(table, column)
    return _Columns(_stacked(table.path, chosen, table.read(chosen)), labels, rows.ids, rows)


def _stacked(path: Path, name: str, column: Any) -> np.ndarray:
    from pyarrow import compute

    column = column.cast(getattr(column.type, "storage_type", column.type))
    lengths = compute.call_function("list_value_length", [column]).unique()
    rows = [chunk.flatten() for chunk in column.chunks]
    if column.null_count or len(lengths) > 1 or any(row.null_count for row in rows):
        raise InputError(
            f"{path}: the lists in the column {name} contain nulls or differ in length; expected "
            "numbers in lists of one length: remove the other rows"
        )
    flat = [row.to_numpy(zero_copy_only=False) for row in rows]
    return np.concatenate(flat or [np.empty(0)]).reshape(len(column), -1 if len(column) else 0)


_READERS: Mapping[str, Callable[[Path, str | None], _Columns]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".pt": _read_pt,
    ".pth": _read_pt,
    ".safetensors": _read_safetensors,
}
