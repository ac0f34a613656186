"""Read features from a file: embeddings of a user, or a shard of an embedding cache."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from ssl_kd.datasets.decode import UnreadableImage, decode
from ssl_kd.datasets.images import EXTENSIONS, digest_array
from ssl_kd.datasets.spill import LazyStrings
from ssl_kd.errors import InputError, printable
from ssl_kd.files import CorruptFileError, load_tensors

__all__ = ["FeatureDataset", "class_numbers", "open_features"]

logger = logging.getLogger(__name__)

_FEATURES = ("features", "embeddings", "x", "X", "data")
_LABELS = ("labels", "label", "targets", "target", "y", "Y")
_IDS = ("ids", "id", "file", "path")
_PREVIEW_ROWS = 20  # rows in which a column of image paths is detected


class FeatureDataset:
    """A data set of feature vectors `[n, d]` with names and, if known, classes.

    `labels` are int64 `[n]`, -1 where unknown, or None if no row is labeled. `paths` are the image
    files of the rows, relative to `root`.
    """

    def __init__(
        self,
        name: str,
        split: str,
        features: np.ndarray,
        labels: np.ndarray | Sequence[Any] | None = None,
        ids: Sequence[Any] | None = None,
        class_names: tuple[str, ...] | None = None,
        root: Path = Path(),
        paths: Sequence[str | None] | None = None,
    ) -> None:
        if features.ndim != 2 or not features.size or features.dtype.kind not in "fiub":
            raise InputError(
                f"{name}: features are {features.dtype} {list(features.shape)}; expected numbers "
                "[samples, dimensions] with at least one row"
            )
        self.root, self.paths = root, paths
        for what, values in (("labels", labels), ("ids", ids)):
            if values is not None and len(values) != len(features):
                raise InputError(
                    f"{name} has {len(values)} {what}; expected {len(features)}, one per row"
                )
        self.name = name
        self.split = split
        self.features = features
        names = range(len(features)) if ids is None else ids
        self.ids = LazyStrings(len(names), lambda row: _text(str(names[row])))
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
            logger.info(
                "%s: %d of %d samples have no label (negative, NaN or empty) and are not scored",
                self.name,
                unknown,
                len(numbers),
            )
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
        """Whether the rows have images."""
        return self.paths is not None

    def image(self, i: int) -> Image.Image:
        """Decode the image of row `i` to mode `L` or `RGB`; raise UnreadableImage."""
        path = self._path(i)
        if path is None or path.suffix.lower() not in EXTENSIONS or not os.path.isfile(path):
            raise UnreadableImage(self.ids[i], f"{printable(str(path))} is not an image file")
        return decode(path, self.ids[i])

    def image_file(self, i: int) -> Path | None:
        """Return the image file of row `i`, or None; raise UnreadableImage if it is no image."""
        if self.paths is not None:
            self.image(i)
        return self._path(i)

    def _path(self, i: int) -> Path | None:
        path = None if self.paths is None else self.paths[i]
        return self.root / path if isinstance(path, str) else None


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
        values = np.array([_text(v) for v in values.tolist()], dtype=object)
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


def _text(value: Any) -> Any:
    if isinstance(value, str):
        value = value.encode("utf-8", "backslashreplace")
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


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
    - `.parquet`: a list column (with one of these names, if there are several). A column of image
      paths, relative to the folder of the file, provides the images of the rows.

    `column` names the array or list column with the features.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"the feature file {path} does not exist")
    try:
        columns = _READERS[path.suffix.lower()](path, column)
        features, labels, ids = (as_array(value) for value in columns[:3])
        features = np.asanyarray(features)
    except (ImportError, FileNotFoundError, InputError):
        raise
    except CorruptFileError as error:
        raise InputError(str(error)) from error
    except Exception as error:  # each format has its own exceptions for a broken file
        reason = " ".join(str(error).split())[:200]
        if "allow_pickle" in reason:  # NumPy's message recommends setting it
            reason = "it contains Python objects, which are not loaded; expected numbers or text"
        raise InputError(f"{path} cannot be read as a {path.suffix} file: {reason}") from error
    return FeatureDataset(
        str(path), split, features, labels, ids, class_names, path.parent, columns.paths
    )


class _Columns(NamedTuple):
    """Columns of a feature file."""

    features: Any
    labels: Any = None
    ids: Any = None
    paths: Sequence[str | None] | None = None


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
        _check_column(path, column, names)
    rest = [name for name in names if name != column]
    wanted = [column or _first(_FEATURES, rest), _first(_LABELS, rest), _first(_IDS, rest)]
    if wanted[0] is None:
        raise InputError(
            f"{path} contains {list(names)[:10]}; expected features with one of the names "
            f"{_FEATURES}: choose another name with --column"
        )
    return _Columns(*(None if name is None else get(name) for name in wanted))


def _check_column(path: Path, column: str, names: Sequence[str]) -> None:
    if column not in names:
        texts = [str(name) for name in names]
        close = difflib.get_close_matches(column, texts, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        shown = ", ".join(texts[:10]) + (", ..." if len(texts) > 10 else "")
        raise InputError(
            f"{path} has no column {printable(column)!r}; expected one of {printable(shown)}"
            f"{printable(hint)}"
        )


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


def _read_parquet(path: Path, column: str | None) -> _Columns:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)  # read_table would add columns from folder names
    kinds = {field.name: field.type for field in file.schema_arrow}
    lists = [name for name, kind in kinds.items() if _is_list(kind)]
    if column is not None:
        _check_column(path, column, list(kinds))
        if column not in lists:
            raise InputError(
                f"COLUMN is {column!r}, whose type in {path} is {kinds[column]}; expected lists of "
                "numbers"
            )
    rest = [name for name in kinds if name != column]
    names = [_first(known, rest) for known in (_LABELS, _IDS)]
    labels, ids = (
        None if name is None else np.asarray(file.read([name]).column(name).to_pylist())
        for name in names
    )
    path_column = _path_column(path, file)
    paths = None if path_column is None else file.read([path_column]).column(0).to_pylist()
    lists = [name for name in lists if name not in names]
    if not lists:
        raise InputError(
            f"{path} has the columns {list(kinds)[:10]}; expected a column with a list of numbers "
            "in each row: in pandas, frame.assign(features=[*frame[columns].to_numpy()])"
        )
    chosen = column or _first([*_FEATURES, *(lists if len(lists) == 1 else [])], lists)
    if chosen is None:
        raise InputError(
            f"{path} has {len(lists)} columns of lists, {', '.join(lists[:10])}: choose the one "
            f"with the features, --column {lists[0]}"
        )
    if others := [name for name in kinds if name not in (chosen, path_column, *names)]:
        logger.info("%s: these columns are not read: %s", path, ", ".join(others[:10]))
    features = _stacked(path, chosen, file.read([chosen]).column(0))
    return _Columns(features, labels, ids, paths)


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return hasattr(kind, "value_type") and not types.is_dictionary(kind)


def _path_column(path: Path, file: Any) -> str | None:
    """Return the name of the first column that contains paths of images, or None."""
    from pyarrow import types

    texts = [field.name for field in file.schema_arrow if types.is_string(field.type)]
    batch = next(file.iter_batches(_PREVIEW_ROWS, columns=texts), None) if texts else None
    for name, values in ({} if batch is None else batch.to_pydict()).items():
        values = [value for value in values if value]
        if not values or any(Path(v).suffix.lower() not in EXTENSIONS for v in values):
            continue
        if any(os.path.isfile(path.parent / value) for value in values):
            logger.info("%s: the column %s contains the image paths", path, name)
            return name
        logger.info(
            "%s: no images are shown, since the column %s names no files in %s; the first is %s",
            path,
            name,
            path.parent,
            printable(values[0]),
        )
    return None


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
    ".parquet": _read_parquet,
}
