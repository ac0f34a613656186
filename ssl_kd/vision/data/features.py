"""Read features from a file: embeddings of a user, or a shard of an embedding cache."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ssl_kd.core.errors import InputError
from ssl_kd.core.files import load_tensors
from ssl_kd.vision.data.digests import digest_array
from ssl_kd.vision.data.labels import NO_LABELS, Labels, class_numbers, find_labels
from ssl_kd.vision.data.media import PictureTable, Rows, SampleTable, n_classes, row_names
from ssl_kd.vision.data.missing import missing_rows
from ssl_kd.vision.data.samples import NOUNS
from ssl_kd.vision.data.shards import Part, shards_of
from ssl_kd.vision.data.tables import (
    FEATURES,
    IDS,
    Table,
    check_column,
    is_text,
    one_line_errors,
    open_table,
)
from ssl_kd.vision.data.usage import LeftOut, Usage, counted

__all__ = ["FeatureDataset", "class_numbers", "open_features"]

logger = logging.getLogger(__name__)


class FeatureDataset:
    """A data set of feature vectors `[n, d]` with names and, if known, classes.

    `labels` are int64 `[n]`, -1 where unknown, or None if no row is labeled. `rows` shows what the
    rows are, `missing` are the rows without features, which are not clustered, and `usage` says
    what of the file is used.
    """

    kind = "features"

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
            if values is not None:
                check_length(name, what, values, len(features))
        self.name = name
        self.split = split
        self.features = features
        self.ids = row_names(len(features), ids)
        self.labels, self.class_names = labels_of(name, labels, class_names)
        self._source = usage or Usage("")

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

    @cached_property
    def missing(self) -> dict[int, str]:
        """Row -> reason, for the rows without features (`ssl_kd.vision.data.missing`)."""
        return missing_rows(self.features)

    @cached_property
    def usage(self) -> Usage:
        """What of the file is used, and what is not."""
        n, dim = self.features.shape
        rows_of: dict[str, list[str]] = {}
        for row, reason in self.missing.items():
            name = self.ids[row]
            shown = f"row {row}" if name == str(row) else f"row {row} ({name})"
            rows_of.setdefault(reason, []).append(shown)
        used = f"{counted(n - len(self.missing), 'row')} of features, {dim:,} wide"
        parts = [used, self._source.used, n_classes(self.class_names)]
        missing = [LeftOut(f"{len(r):,} of {n:,} rows", why, r) for why, r in rows_of.items()]
        return Usage("; ".join(filter(None, parts)), [*missing, *self._source.left_out])


def check_length(name: str, what: str, values: Sized, n: int) -> None:
    """Raise InputError unless there are `n` values, one per row."""
    if len(values) != n:
        raise InputError(f"{name} has {len(values)} {what}; expected {n}, one per row")


def labels_of(
    name: str, labels: Any, class_names: tuple[str, ...] | None
) -> tuple[np.ndarray | None, tuple[str, ...] | None]:
    """Return class numbers and names of the labels of a data set, or None if none are known."""
    if labels is None:
        return None, None
    try:
        classes, names = class_numbers(labels, class_names)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    unknown = int((classes < 0).sum())
    if 0 < unknown < len(classes):
        text = "%s: %d of %d samples have no label (negative, NaN or empty) and are not scored"
        logger.info(text, name, unknown, len(classes))
    if names[:2] == ("-1", "1"):
        logger.info("%s: the labels -1 and 1 are used as two classes", name)
    return (classes, names) if names else (None, None)


def open_features(
    path: str | os.PathLike[str],
    split: str = "train",
    class_names: tuple[str, ...] | None = None,
    column: str | None = None,
    label_column: str | None = None,
) -> FeatureDataset:
    """Read features from a file.

    - `.npy`: one array. Labels may be in `NAME_labels.npy` in the same folder.
    - `.npz`, `.pt`, `.safetensors`: an array named `features`, `embeddings` or `x`, and optionally
      labels and `ids`.
    - `.parquet`, or a folder written by `save_to_disk` of Hugging Face's `datasets`: a list column
      (with one of these names, if there are several). A column of pictures, or of image paths
      relative to the folder of the file, provides the images of the rows. All shards of a file
      called `NAME-00000-of-00002.parquet` are read.
    - `.h5ad` of AnnData: a matrix of `obsm`, by default `X_pca` or `X_scVI`.

    Args:
        path: the file or folder.
        split: name of the split, for messages.
        class_names: order of the classes, if they are those of another split.
        column: name of the array or list column with the features.
        label_column: name of the array or column with the labels, or `none` to use no labels.
            None: by its name, `label`, `class` and alike; or `target` and `y`, if they have few
            values that are integers or text (`ssl_kd.vision.data.labels`).

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: the file is damaged, holds no features, or a column does not fit.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"the feature file {path} does not exist")
    with one_line_errors(path):
        part = Part(path, shards_of(path))
    dataset = open_part(part, split, class_names, column, label_column)
    if not isinstance(dataset, FeatureDataset):
        raise InputError(
            f"{path} holds {NOUNS[dataset.kind]}s, but no features: open it with "
            "ssl_kd.vision.data.open_dataset, and embed it with a teacher"
        )
    return dataset


def open_part(
    part: Part,
    split: str,
    class_names: tuple[str, ...] | None,
    column: str | None,
    label_column: str | None,
    left_out: Sequence[LeftOut] = (),
) -> FeatureDataset | SampleTable:
    """Open a file of features, or a table of samples that a teacher embeds.

    `left_out` are parts of the data set that are in other files.
    """
    path = part.path
    with one_line_errors(path):
        table = open_table(path, part.files)
        if table is None:
            chosen = _Chosen(column, label_column, class_names)
            return _READERS[path.suffix.lower()](path, chosen).dataset(path, split, class_names)
        rows = Rows(table, column, label_column=label_column, class_names=class_names)
        labels = None if rows.labels.name is None else rows.labels.values
        if rows.embedded is not None:
            numbers, names = labels_of(str(path), labels, class_names)
            kind = PictureTable if rows.kind == "image" else SampleTable
            return kind(rows, split, numbers, names, left_out)
        if rows.features is None:
            raise _no_features(table)
        features = _stacked(path, rows.features, table.read(rows.features))
    used = "; ".join(filter(None, [f"features from column {rows.features}", rows.used]))
    usage = Usage(used, [*rows.left_out, *left_out])
    return FeatureDataset(str(path), split, features, labels, rows.ids, class_names, rows, usage)


class _Chosen(NamedTuple):
    """The arrays that a user chose."""

    column: str | None
    label_column: str | None
    class_names: tuple[str, ...] | None


class _Arrays(NamedTuple):
    """Arrays of a feature file."""

    features: Any
    labels: Labels = Labels()
    ids: Any = None
    used: str = ""

    def dataset(
        self, path: Path, split: str, class_names: tuple[str, ...] | None
    ) -> FeatureDataset:
        features, ids = np.asanyarray(as_array(self.features)), as_array(self.ids)
        source, labels = Usage(self.used, self.labels.left_out), self.labels.values
        name = str(path)
        return FeatureDataset(name, split, features, labels, ids, class_names, None, source)


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


def _arrays(
    path: Path, names: Sequence[str], get: Callable[[str], Any], chosen: _Chosen
) -> _Arrays:
    """Choose features, labels and ids among named arrays; no other array is read."""
    column = chosen.column
    if column is not None:
        check_column(path, column, names)
    known = [name for name in FEATURES if name in names]
    if column is None and not known:
        raise InputError(
            f"{path} contains {list(names)[:10]}; expected features with one of the names "
            f"{FEATURES}: choose another name with --column"
        )
    arrays = functools.cache(lambda name: as_array(get(name)))
    # One number per row is a coordinate, if another array can have the features.
    matrices = (name for name in known if np.ndim(arrays(name)) == 2)
    feature_name = column or next(matrices, known[0])
    features = arrays(feature_name)
    rest = [name for name in names if name != feature_name]

    def read(name: str) -> Any:
        values = arrays(name)
        if np.ndim(values) == 1 and np.ndim(features) == 2:
            check_length(str(path), "labels", values, len(features))
        return values

    labels = find_labels(
        path,
        rest,
        read,
        chosen.label_column,
        features=feature_name,
        class_names=chosen.class_names,
    )
    ids = next((name for name in IDS if name in rest), None)
    used = [f"features from array {feature_name}"]
    used += [f"labels from array {labels.name}"] if labels.name is not None else []
    used += [f"names from array {ids}"] if ids is not None else []
    return _Arrays(features, labels, None if ids is None else arrays(ids), "; ".join(used))


def _refuse_names(path: Path, chosen: _Chosen) -> None:
    for setting, value in (("column", chosen.column), ("label_column", chosen.label_column)):
        if value is not None and value != NO_LABELS:
            raise InputError(
                f"{setting.upper()} is {value!r}, but {path} contains one array without a name: "
                f"remove --{setting}"
            )


def _read_npy(path: Path, chosen: _Chosen) -> _Arrays:
    _refuse_names(path, chosen)
    features = np.load(path, mmap_mode="r", allow_pickle=False)
    file = path.with_name(path.stem + "_labels.npy")
    if chosen.label_column == NO_LABELS or not file.is_file():
        return _Arrays(features)
    labels = Labels(file.name, np.load(file, allow_pickle=False))
    return _Arrays(features, labels, used=f"labels from {file.name}")


def _read_npz(path: Path, chosen: _Chosen) -> _Arrays:
    with np.load(path, allow_pickle=False) as file:
        return _arrays(path, file.files, file.__getitem__, chosen)


def _read_pt(path: Path, chosen: _Chosen) -> _Arrays:
    value = load_tensors(path, mmap=True)
    if not isinstance(value, Mapping):
        _refuse_names(path, chosen)
        return _Arrays(value)
    return _arrays(path, list(value), value.__getitem__, chosen)


def _read_safetensors(path: Path, chosen: _Chosen) -> _Arrays:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return _arrays(path, list(file.keys()), file.get_tensor, chosen)


def _no_features(table: Table) -> InputError:
    if table.lists:
        return InputError(
            f"{table.path} has {len(table.lists)} columns of lists, {', '.join(table.lists[:10])}: "
            f"choose the one with the features, --column {table.lists[0]}"
        )
    texts = [name for name, kind in table.kinds.items() if is_text(kind)]
    way = f", or of texts, such as --column {texts[0]}" if texts else ", texts or sound files"
    return InputError(
        f"{table.path} has the columns {list(table.kinds)[:10]}; expected a column with a list "
        "of numbers in each row (in pandas, frame.assign(features=[*frame[columns].to_numpy()])), "
        f"or a column of pictures{way}"
    )


def _stacked(path: Path, name: str, column: Any) -> np.ndarray:
    """Return a column of lists as an array `[n, d]`; a missing list is a row of NaN."""
    from pyarrow import compute

    column = column.cast(getattr(column.type, "storage_type", column.type))
    lengths = compute.call_function("list_value_length", [column]).combine_chunks()
    widths = sorted({length for length in lengths.unique().to_pylist() if length})
    if len(widths) != 1:
        found = f"have the lengths {widths[:5]}" if widths else "are empty"
        raise InputError(
            f"{path}: the lists in the column {name} {found}; expected numbers in lists of one "
            "length: remove the other rows, or choose another --column"
        )
    rows = [chunk.flatten() for chunk in column.chunks]  # without missing and empty lists
    flat = np.concatenate([row.to_numpy(zero_copy_only=False) for row in rows])
    known = lengths.fill_null(0).to_numpy(zero_copy_only=False) > 0
    values = flat.reshape(-1, widths[0])
    if known.all():
        return values
    stacked = np.full((len(known), widths[0]), np.nan, np.result_type(values, np.float32))
    stacked[known] = values
    return stacked


_READERS: Mapping[str, Callable[[Path, _Chosen], _Arrays]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".pt": _read_pt,
    ".pth": _read_pt,
    ".safetensors": _read_safetensors,
}
