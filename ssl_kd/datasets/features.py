"""Features from a file: the user's, or an embedding cache of this library."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from ssl_kd.datasets.decode import UnreadableImage, decode
from ssl_kd.datasets.images import EXTENSIONS, digest_array
from ssl_kd.datasets.lazy_strings import LazyStrings
from ssl_kd.errors import InputError, printable
from ssl_kd.files import CorruptFileError, load_tensors

__all__ = ["FeatureDataset", "class_numbers", "open_features"]

logger = logging.getLogger(__name__)

_FEATURES = ("features", "embeddings", "x", "X", "data")
_LABELS = ("labels", "label", "targets", "target", "y", "Y")
_IDS = ("ids", "id", "file", "path")
_LOOKED_AT = 20  # rows, to know a column of image paths
_INDEX = re.compile(r"__index_level_\d+__$")  # what pandas calls an index without a name


class FeatureDataset:
    """Rows of numbers with names and, where known, classes.

    Attributes:
        name: what the user called the data set.
        split: `train` or `test`.
        features: `[n, d]`, floats or integers; perhaps memory-mapped.
        ids: one name per row, made when it is asked for.
        labels: int64 `[n]`, -1 where unknown; None when nothing is labelled.
        class_names: name of each class, or None.
        root: the folder that `paths` are relative to.
        paths: the image file of each row, where the file of features names them, or None.
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
                f"{name}: features must be numbers [samples, dimensions] with at least one row, "
                f"got {features.dtype} {list(features.shape)}"
            )
        self.root, self.paths = root, paths
        for what, values in (("labels", labels), ("ids", ids)):
            if values is not None and len(values) != len(features):
                raise InputError(f"{name}: {len(features)} rows of features, {len(values)} {what}")
        self.name = name
        self.split = split
        self.features = features
        named = range(len(features)) if ids is None else ids
        self.ids = LazyStrings(len(named), lambda row: _text(str(named[row])))
        self.labels: np.ndarray | None = None
        self.class_names: tuple[str, ...] | None = None
        if labels is not None:
            try:
                numbers, names = class_numbers(labels, class_names)
            except InputError as error:
                raise InputError(f"{name}: {error}") from error
            unknown = int((numbers < 0).sum())
            if 0 < unknown < len(numbers):
                logger.info(
                    "%s: %d of %d samples have no label (negative, NaN, empty): not scored",
                    name,
                    unknown,
                    len(numbers),
                )
            if names[:2] == ("-1", "1"):
                logger.info("%s: the labels -1 and 1 are taken as two classes", name)
            if names:
                self.labels, self.class_names = numbers, names

    def __len__(self) -> int:
        return len(self.features)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the content, see `digest_array`."""
        return digest_array(self.features, self.labels)

    @property
    def pictured(self) -> bool:
        """Whether the rows have pictures."""
        return self.paths is not None

    def image(self, i: int) -> Image.Image:
        """Decode the picture of row `i` to mode `L` or `RGB`; raises UnreadableImage."""
        path = self._path(i)
        if path is None or path.suffix.lower() not in EXTENSIONS or not os.path.isfile(path):
            raise UnreadableImage(self.ids[i], f"no image file {printable(str(path))}")
        return decode(path, self.ids[i])

    def image_file(self, i: int) -> Path | None:
        """Return where the picture of row `i` lies; only what decodes as an image is given out."""
        if self.paths is not None:
            self.image(i)
        return self._path(i)

    def _path(self, i: int) -> Path | None:
        path = None if self.paths is None else self.paths[i]
        return self.root / path if isinstance(path, str) else None


def class_numbers(
    labels: np.ndarray | Sequence[Any], class_names: tuple[str, ...] | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Number classes 0 to C-1 in sorted order, whatever the labels were.

    Negative numbers, NaN, None and empty strings are unknown and become -1. But -1 is a class where
    the numbers are -1 and 1, both of them and no other, or where `class_names` has it.

    Args:
        labels: numbers, strings or bytes (UTF-8) `[n]`.
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
    if values.dtype.kind in "SOU":
        values = np.array([_text(v) for v in values.tolist()], dtype=object)
    if values.dtype.kind == "O":
        known = np.array([v is not None and v == v and str(v) != "" for v in values], dtype=bool)
        values = values.astype(str)
    else:
        finite = np.isfinite(values)
        signs = set(np.unique(values[finite]).tolist()) == {-1, 1}
        low = -1 if signs or "-1" in (class_names or ()) else 0
        known = finite & (values >= low)
        if not np.equal(np.trunc(values[known]), values[known]).all():
            raise InputError("labels must be whole numbers or strings, got fractions")
        if known.any() and float(values[known].max()) >= 2.0**63:
            raise InputError(f"labels must be below 2**63, got {values[known].max()}")
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


def _text(value: Any) -> Any:
    """Bytes as text, and text as what UTF-8 can hold; anything else as it is."""
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

    Args:
        path: `.npy` (an array; labels may lie beside it in `NAME_labels.npy`), `.npz`, `.pt` or
            `.safetensors` (arrays named `features`, `embeddings` or `x`, and perhaps `labels` or
            `y`, `ids`), or `.parquet` (one list column, of such a name where there are several, or
            columns of numbers or booleans; any other column is left out with a warning, a pandas
            index silently). A column of paths of image files, relative to the file's folder, has
            the pictures of the samples.
        split: what to call it.
        class_names: the order of classes to keep, when another split has set it.
        column: the array or list column that holds the features; None: as above.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file cannot be read or has no features; the message says what it has.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        read = _READERS[path.suffix.lower()](path, column)
        features, labels, ids = (_array(value) for value in read[:3])
        features = np.asanyarray(features)
    except (ImportError, FileNotFoundError, InputError):
        raise
    except CorruptFileError as error:
        raise InputError(str(error)) from error
    except Exception as error:  # each format has its own exceptions for a broken file
        reason = " ".join(str(error).split())[:200]
        if "allow_pickle" in reason:  # NumPy advises to set it
            reason = "it holds Python objects, not numbers or text; they were not loaded"
        raise InputError(f"{path} is not a readable {path.suffix} file: {reason}") from error
    return FeatureDataset(
        str(path), split, features, labels, ids, class_names, path.parent, read.paths
    )


class Columns(NamedTuple):
    """What a file holds; None for what is not there."""

    features: Any
    labels: Any = None
    ids: Any = None
    paths: Sequence[str | None] | None = None


def _array(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout != torch.strided or value.is_quantized:
        kind = "quantised" if value.is_quantized else "sparse"
        way = "dequantize()" if value.is_quantized else "to_dense()"
        raise ValueError(f"a {kind} tensor: save its {way} instead")
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise ValueError("an expanded tensor, one value for many: save its clone() instead")
    return as_numpy(value)


def as_numpy(value: torch.Tensor) -> np.ndarray:
    """A dense tensor as an array; in float32 where NumPy lacks its type (bfloat16, float8)."""
    value = value.detach().cpu().resolve_neg()
    known = value.dtype in (torch.float16, torch.float32, torch.float64)
    return (value.float() if value.is_floating_point() and not known else value).numpy()


def _first(known: Sequence[str], names: Container[str]) -> str | None:
    """The first known name that a file has."""
    return next((name for name in known if name in names), None)


def _columns(
    path: Path, names: Sequence[str], get: Callable[[str], Any], column: str | None
) -> Columns:
    """The columns by their names in the file; nothing else of it is read."""
    if column is not None:
        _check_column(path, column, names)
    rest = [name for name in names if name != column]
    wanted = [column or _first(_FEATURES, rest), _first(_LABELS, rest), _first(_IDS, rest)]
    if wanted[0] is None:
        raise InputError(
            f"{path} holds {list(names)[:10]}; its features must be called one of {_FEATURES}, or "
            "be named by --column NAME"
        )
    return Columns(*(None if name is None else get(name) for name in wanted))


def _check_column(path: Path, column: str, names: Sequence[str]) -> None:
    """Raise InputError where a file has no column of that name."""
    if column not in names:
        texts = [str(name) for name in names]
        close = difflib.get_close_matches(column, texts, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        shown = ", ".join(texts[:10]) + (", ..." if len(texts) > 10 else "")
        raise InputError(
            f"{path} has no column {printable(column)!r}, only {printable(shown)}{printable(hint)}"
        )


def _refuse_column(path: Path, column: str | None) -> None:
    if column is not None:
        raise InputError(
            f"COLUMN is {column!r}, but {path} holds one array without a name: leave --column out"
        )


def _read_npy(path: Path, column: str | None) -> Columns:
    _refuse_column(path, column)
    features = np.load(path, mmap_mode="r", allow_pickle=False)
    labels = path.with_name(path.stem + "_labels.npy")
    return Columns(features, np.load(labels, allow_pickle=False) if labels.is_file() else None)


def _read_npz(path: Path, column: str | None) -> Columns:
    with np.load(path, allow_pickle=False) as file:
        if {"indptr", "format", "shape"} <= set(file.files):
            raise InputError(
                f"{path} is a sparse matrix of SciPy: save its rows as an array, "
                f"np.save('x.npy', scipy.sparse.load_npz({str(path)!r}).toarray())"
            )
        return _columns(path, file.files, file.__getitem__, column)


def _read_pt(path: Path, column: str | None) -> Columns:
    value = load_tensors(path, mmap=True)
    if not isinstance(value, Mapping):
        _refuse_column(path, column)
        return Columns(value)
    return _columns(path, list(value), value.__getitem__, column)


def _read_safetensors(path: Path, column: str | None) -> Columns:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return _columns(path, list(file.keys()), file.get_tensor, column)


def _read_parquet(path: Path, column: str | None) -> Columns:
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path)  # not read_table, which adds columns out of the folders' names
    schema = file.schema_arrow
    kinds = {field.name: field.type for field in schema}
    if len(kinds) < len(schema):
        raise ValueError(f"two columns of one name, among {schema.names[:10]}")
    lists = [name for name, kind in kinds.items() if _is_list(kind)]
    if column is not None:
        _check_column(path, column, list(kinds))
        if column not in lists:
            raise InputError(
                f"{path}: its column {column!r} is {kinds[column]}, expected lists of numbers"
            )
    rest = [name for name in kinds if name != column]
    taken = [_first(known, rest) for known in (_LABELS, _IDS)]
    labels, ids = (
        None if name is None else np.asarray(file.read([name]).column(name).to_pylist())
        for name in taken
    )
    for what, name in zip(("labels", "ids"), taken, strict=True):
        if name is not None:
            logger.info("%s: its column %s is taken for the %s, not a feature", path, name, what)
    named = _picture_column(path, file)
    paths = None if named is None else file.read([named]).column(named).to_pylist()
    lists = [name for name in lists if name not in taken]
    wide = column or _first([*_FEATURES, *(lists if len(lists) == 1 else [])], lists)
    if wide is None and lists:
        raise InputError(
            f"{path} has {len(lists)} columns of lists, {', '.join(lists[:10])}: name the one that "
            f"holds the features, --column {lists[0]}"
        )
    if wide is not None:
        features = _stacked(path, wide, file.read([wide]).column(wide))
    else:
        features = _side_by_side(path, file, [*(name for name in taken if name), named])
    return Columns(features, labels, ids, paths)


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return hasattr(kind, "value_type") and not types.is_dictionary(kind)


def _picture_column(path: Path, file: Any) -> str | None:
    """Return the column whose first rows, where they have a text, are paths of image files."""
    from pyarrow import types

    texts = []
    for field in file.schema_arrow:
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        texts += [field.name] if types.is_string(kind) or types.is_large_string(kind) else []
    batch = next(file.iter_batches(_LOOKED_AT, columns=texts), None) if texts else None
    head = {} if batch is None else batch.to_pydict()
    for name in head:
        values = [value for value in head[name] if value]
        if not values or any(Path(v).suffix.lower() not in EXTENSIONS for v in values):
            continue
        if any(os.path.isfile(path.parent / value) for value in values):
            logger.info("%s: its column %s has the pictures", path, name)
            return name
        logger.info(
            "%s: no picture is shown, for its column %s names no files below %s, the first is %s",
            path,
            name,
            path.parent,
            printable(values[0]),
        )
    return None


def _side_by_side(path: Path, file: Any, taken: Sequence[str | None]) -> np.ndarray:
    """The columns of numbers as features `[n, d]`, without those that are `taken`."""
    from pyarrow import float64, types

    schema = file.schema_arrow
    kinds = {field.name: field.type for field in schema}
    # A range index is no column; pandas describes it by an object.
    index = (schema.pandas_metadata or {}).get("index_columns", [])
    index_names = [n for n in index if isinstance(n, str)]
    passed = {*_LABELS, *_IDS, *index_names, *taken}
    asked = {n: kind for n, kind in kinds.items() if n not in passed and not _INDEX.match(n)}
    is_number = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
    numbers = [n for n, kind in asked.items() if any(is_it(kind) for is_it in is_number)]
    if left_out := [f"{n} ({kind})" for n, kind in asked.items() if n not in numbers]:
        logger.warning(
            "%s: %d columns are not numbers and are left out of the features: %s. Labels are read "
            "from a column called one of %s",
            path,
            len(left_out),
            ", ".join(left_out[:10]) + (", ..." if len(left_out) > 10 else ""),
            ", ".join(_LABELS),
        )
    if not numbers:
        raise InputError(
            f"{path} holds {schema.names[:10]}; expected columns of numbers, or a list column "
            f"called one of {_FEATURES}"
        )
    if unused := [n for n in kinds if n in {*_LABELS, *_IDS} - {*taken, *index_names}]:
        logger.warning(
            "%s: left out of the features, for they are called like labels or ids: %s. Rename "
            "what is a feature",
            path,
            ", ".join(unused),
        )
    frame = file.read(numbers)
    if gaps := [n for n in numbers if frame.column(n).null_count]:
        raise InputError(
            f"{path}: {len(gaps)} columns have nulls, the first is {gaps[0]} with "
            f"{frame.column(gaps[0]).null_count}: fill them, or take those rows out"
        )
    exact = [n for n in numbers if types.is_decimal(kinds[n])]
    columns = [frame.column(n).cast(float64()) if n in exact else frame.column(n) for n in numbers]
    return np.stack([column.to_numpy() for column in columns], axis=1)


def _stacked(path: Path, name: str, column: Any) -> np.ndarray:
    """The rows of a list column `[n, d]`, in its dtype."""
    from pyarrow import compute

    column = column.cast(getattr(column.type, "storage_type", column.type))
    lengths = compute.call_function("list_value_length", [column]).unique()
    rows = [chunk.flatten() for chunk in column.chunks]
    if column.null_count or len(lengths) > 1 or any(row.null_count for row in rows):
        raise InputError(
            f"{path}: the rows of its column {name} are of several lengths or null; expected "
            "lists of numbers of one length: take the others out"
        )
    flat = [row.to_numpy(zero_copy_only=False) for row in rows]
    return np.concatenate(flat or [np.empty(0)]).reshape(len(column), -1 if len(column) else 0)


_READERS: Mapping[str, Callable[[Path, str | None], Columns]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".pt": _read_pt,
    ".pth": _read_pt,
    ".safetensors": _read_safetensors,
    ".parquet": _read_parquet,
}
