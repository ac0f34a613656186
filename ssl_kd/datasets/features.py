"""Features from a file: the user's, or an embedding cache of this library."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ssl_kd.datasets.images import digest_array
from ssl_kd.errors import InputError, MissingPackage

__all__ = ["FEATURE_FILES", "FeatureDataset", "class_numbers", "open_features"]

FEATURE_FILES = (".npy", ".npz", ".pt", ".pth", ".safetensors", ".parquet")
_FEATURES = ("features", "embeddings", "x", "X", "data")
_LABELS = ("labels", "label", "targets", "target", "y", "Y")
_IDS = ("ids", "id", "file", "path")


class FeatureDataset:
    """Rows of numbers with names and, where known, classes.

    Attributes:
        name: what the user called the data set.
        split: `train` or `test`.
        features: `[n, d]`, floats or integers; perhaps memory-mapped.
        ids: one name per row.
        labels: int64 `[n]`, -1 where unknown; None when nothing is labelled.
        class_names: name of each class, or None.
    """

    def __init__(
        self,
        name: str,
        split: str,
        features: np.ndarray,
        labels: np.ndarray | Sequence[Any] | None = None,
        ids: Sequence[Any] | None = None,
        class_names: tuple[str, ...] | None = None,
    ) -> None:
        if features.ndim != 2 or not len(features) or features.dtype.kind not in "fiub":
            raise InputError(
                f"{name}: features must be numbers [samples, dimensions] with at least one row, "
                f"got {features.dtype} {list(features.shape)}"
            )
        for what, values in (("labels", labels), ("ids", ids)):
            if values is not None and len(values) != len(features):
                raise InputError(f"{name}: {len(features)} rows of features, {len(values)} {what}")
        self.name = name
        self.split = split
        self.features = features
        self.ids = [str(i) for i in (range(len(features)) if ids is None else ids)]
        self.labels: np.ndarray | None = None
        self.class_names: tuple[str, ...] | None = None
        if labels is not None:
            try:
                numbers, names = class_numbers(labels, class_names)
            except InputError as error:
                raise InputError(f"{name}: {error}") from error
            if names:
                self.labels, self.class_names = numbers, names

    def __len__(self) -> int:
        return len(self.features)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the content, see `digest_array`."""
        return digest_array(self.features, self.labels)

    @property
    def older_fingerprint(self) -> str:
        """What `fingerprint` was in versions up to 0.1, which took a sample of a large set."""
        return digest_array(self.features, self.labels, sampled=True)


def class_numbers(
    labels: np.ndarray | Sequence[Any], class_names: tuple[str, ...] | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Number classes 0 to C-1 in sorted order, whatever the labels were.

    Negative numbers, NaN, None and empty strings are unknown and become -1.

    Args:
        labels: numbers or strings `[n]`.
        class_names: the order to keep, when another split has set it.

    Returns:
        int64 `[n]`, and the class names.

    Raises:
        ValueError: labels of the wrong shape, or a class that `class_names` lacks.

    >>> class_numbers(["dog", "", "cat"])
    (array([ 1, -1,  0]), ('cat', 'dog'))
    """
    values: Any = np.asarray(labels)
    if values.ndim != 1 or values.dtype.kind not in "biufUSO":
        raise InputError(f"labels must be [samples], got {values.dtype} {list(values.shape)}")
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8")
    if values.dtype.kind in "OU":
        known = np.array([v is not None and v == v and str(v) != "" for v in values], dtype=bool)
        values = values.astype(str)
    else:
        known = np.isfinite(values) & (values >= 0)
        if not np.equal(np.trunc(values[known]), values[known]).all():
            raise InputError("labels must be whole numbers or strings, got fractions")
        values = np.where(known, values, -1).astype(np.int64)
    found, inverse = np.unique(values[known], return_inverse=True)
    names = tuple(str(v) for v in found)
    if class_names is not None:
        unknown = sorted(set(names) - set(class_names))
        if unknown:
            raise InputError(f"classes {unknown[:5]} are not among {list(class_names)[:10]}")
        inverse = np.array([class_names.index(n) for n in names], dtype=np.int64)[inverse]
        names = class_names
    numbers = np.full(len(values), -1, dtype=np.int64)
    numbers[known] = inverse
    return numbers, names


def _pick(table: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((table[name] for name in names if name in table), None)


def _array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return value


def open_features(
    path: str | os.PathLike[str],
    split: str = "train",
    class_names: tuple[str, ...] | None = None,
) -> FeatureDataset:
    """Read features from a file.

    Args:
        path: `.npy` (an array; labels may lie beside it in `NAME_labels.npy`), `.npz`, `.pt` or
            `.safetensors` (arrays named `features`, `embeddings` or `x`, and perhaps `labels` or
            `y`, `ids`), or `.parquet` (one list column of such a name or many number columns).
        split: what to call it.
        class_names: the order of classes to keep, when another split has set it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file cannot be read or has no features; the message says what it has.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        table = _read(path)
    except (ImportError, FileNotFoundError):
        raise
    except Exception as error:  # each format has its own exceptions for a broken file
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path} is not a readable {path.suffix} file: {reason}") from error
    features = _array(_pick(table, _FEATURES))
    if features is None:
        raise InputError(
            f"{path} holds {list(table)[:10]}; its features must be called one of {_FEATURES}"
        )
    labels, ids = _array(_pick(table, _LABELS)), _array(_pick(table, _IDS))
    return FeatureDataset(str(path), split, np.asanyarray(features), labels, ids, class_names)


def _read(path: Path) -> Mapping[str, Any]:
    kind = path.suffix.lower()
    if kind == ".npy":
        table = {"features": np.load(path, mmap_mode="r", allow_pickle=False)}
        labels = path.with_name(path.stem + "_labels.npy")
        if labels.is_file():
            table["labels"] = np.load(labels, allow_pickle=False)
        return table
    if kind == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    if kind in (".pt", ".pth"):
        # weights_only: a pickle that carries code is refused, not run.
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return value if isinstance(value, Mapping) else {"features": value}
    if kind == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return _read_parquet(path)


def _read_parquet(path: Path) -> Mapping[str, Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingPackage(f"{path}: reading parquet needs `pip install pyarrow`") from error
    frame = parquet.read_table(path)
    columns = {name: frame.column(name) for name in frame.column_names}
    table: dict[str, Any] = {}
    for names in (_LABELS, _IDS):
        column = _pick(columns, names)
        if column is not None:
            table[names[0]] = np.asarray(column.to_pylist())
    wide = _pick(columns, _FEATURES)
    if wide is not None and hasattr(wide.type, "value_type"):
        table["features"] = np.stack([np.asarray(row) for row in wide.to_pylist()])
        return table
    kinds = {n: c.type.to_pandas_dtype() for n, c in columns.items() if n not in _LABELS + _IDS}
    numbers = [n for n, kind in kinds.items() if np.issubdtype(np.dtype(kind), np.number)]
    if numbers:
        table["features"] = np.stack([columns[n].to_numpy() for n in numbers], axis=1)
    return table
