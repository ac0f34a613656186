"""Choose the labels of a table or of a file of arrays, and convert labels to class numbers."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssl_kd.core.errors import InputError, printable
from ssl_kd.vision.data.tables import LABELS, MAYBE_LABELS, as_text, check_column
from ssl_kd.vision.data.usage import LeftOut

NO_LABELS = "none"
"""Value of LABELS, and name of a column for `find_labels`: use no labels."""
FEW = 10
"""Up to this many different values may always be classes, unless all rows differ."""
ROWS_PER_CLASS = 2
"""Rows that a class must have on average, for a column that is called `label` or alike."""
ROWS_PER_VALUE = 5
"""The same for names such as `target` and `y`, which may also be measurements or coordinates."""


class Labels(NamedTuple):
    """The column that was chosen as labels, and the columns of such names that were not."""

    name: str | None = None
    values: Any = None
    left_out: tuple[LeftOut, ...] = ()


def find_labels(
    source: str | Path,
    names: Sequence[str],
    read: Callable[[str], Any],
    chosen: str | None = None,
    *,
    features: str | None = None,
    class_names: tuple[str, ...] | None = None,
) -> Labels:
    """Choose the labels among columns (or arrays) with one value per row.

    A column is chosen by its name: `label`, `class` and alike (`LABELS`), or `target` and `y`
    (`MAYBE_LABELS`), which must have few values that are integers or text. `y` beside a column `x`
    is a coordinate, unless `x` has the features.

    Args:
        source: name of the data in messages.
        names: names of the columns.
        read: returns the values of a column, `[n]`.
        chosen: the column to use, which LABEL_COLUMN names; `none` for no labels.
        features: name of the column with the features, if there is one.
        class_names: classes of the training split; counts are then not checked.

    Raises:
        InputError: `chosen` does not exist or does not hold classes, or a column called `label` or
            alike contains fractions.
    """
    if chosen == NO_LABELS:
        return Labels()
    if chosen is not None:
        check_column(Path(source), chosen, names)
        values = read(chosen)
        try:
            n_known, n_values = _count(values)
        except InputError as error:
            raise InputError(f"LABEL_COLUMN is {chosen!r}, but in {source} {error}") from error
        if n_known > 1 and n_known == n_values and class_names is None:
            raise InputError(
                f"LABEL_COLUMN is {chosen!r}, but its {n_known:,} values in {source} are all "
                "different; expected classes, which rows share"
            )
        if not n_known:
            raise InputError(f"LABEL_COLUMN is {chosen!r}, but it has no values in {source}")
        return Labels(chosen, values)
    is_pair = features in ("x", "X")
    left_out: list[LeftOut] = []
    for name in _candidates(names):
        values, is_certain = read(name), name.lower() in LABELS
        if name.lower() == "y" and not is_pair and _has_x(names, read, values):
            reason = f"with the column x it holds coordinates; {_insist(name)}"
        else:
            try:
                reason = _why_not(name, values, is_certain or is_pair, class_names)
            except InputError as error:
                if is_certain:
                    raise InputError(
                        f"{source}: column {printable(name)}: {error}. Name the column with the "
                        "classes by --label_column, or use no labels by --labels none"
                    ) from error
                left_out.append(LeftOut(f"column {name} as labels", str(error)))
                continue
        if not reason:
            return Labels(name, values, tuple(left_out))
        left_out.append(LeftOut(f"column {name} as labels", reason))
    return Labels(left_out=tuple(left_out))


def _candidates(names: Sequence[str]) -> list[str]:
    """Return the columns whose names are those of labels, the most certain first."""
    known = (*LABELS, *MAYBE_LABELS)
    exact = [name for name in known if name in names]
    return exact + [other for name in known for other in names if other.lower() == name != other]


def _count(values: Any) -> tuple[int, int]:
    """Return how many labels are known, and how many of them differ."""
    classes, names = class_numbers(values)
    return int((classes >= 0).sum()), len(names)


def _insist(name: str) -> str:
    return f"if it holds classes, add --label_column {name}"


def _why_not(name: str, values: Any, is_certain: bool, class_names: tuple[str, ...] | None) -> str:
    """Return why the values of a column are not used as classes; an empty string if they are."""
    n_known, n_values = _count(values)
    if not n_known:
        return "it has no values"
    if class_names is not None:
        return ""
    rows_per_class = ROWS_PER_CLASS if is_certain else ROWS_PER_VALUE
    if 1 < n_known == n_values and n_values * ROWS_PER_CLASS > len(values):
        return f"its {n_values:,} values are all different"
    if n_values > FEW and n_values * rows_per_class > len(values):
        return f"it has {n_values:,} different values in {len(values):,} rows; {_insist(name)}"
    return ""


def _has_x(names: Sequence[str], read: Callable[[str], Any], y: Any) -> bool:
    """Return whether there is a column `x` of numbers beside `y`, both with one number per row."""
    x = next((name for name in names if name.lower() == "x"), None)
    return x is not None and _is_numeric(y) and _is_numeric(read(x))


def _is_numeric(values: Any) -> bool:
    values = np.asarray(values)
    if values.dtype == object:
        return all(v is None or isinstance(v, numbers.Number) for v in values.tolist())
    return values.ndim == 1 and values.dtype.kind in "iuf"


def class_numbers(
    labels: np.ndarray | Sequence[Any], class_names: tuple[str, ...] | None = None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Convert labels to class numbers int64 `[n]` from 0 to C-1 in sorted order, and class names.

    Negative numbers, NaN, None and empty strings are unknown and become -1. However, -1 is a class
    if all numbers are -1 or 1, or if `class_names`, the order of another split, contains it.

    >>> class_numbers(["dog", "", "cat"])
    (array([ 1, -1,  0]), ('cat', 'dog'))
    """
    values, known = _numbers_or_text(np.asarray(labels))
    if values.dtype.kind in "biuf":
        values, known = _integers(values, known, class_names)
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
    classes = np.full(len(values), -1, dtype=np.int64)
    classes[known] = inverse
    return classes, names


def _numbers_or_text(values: np.ndarray) -> tuple[np.ndarray, NDArray[np.bool_]]:
    """Return labels as an array of numbers or of text, and which of them are known.

    Numbers beside None stay numbers, so that a missing label does not change the others.
    """
    if values.ndim != 1 or values.dtype.kind not in "biufUSO":
        raise InputError(f"labels are {values.dtype} {list(values.shape)}; expected [samples]")
    if values.dtype.kind in "biuf":
        return values, np.isfinite(values)
    texts = [as_text(value) for value in values.tolist()]
    known = np.array([v is not None and v == v and str(v).strip() != "" for v in texts], bool)
    present = [text for text, is_known in zip(texts, known, strict=True) if is_known]
    if not present or not all(isinstance(value, numbers.Number) for value in present):
        return np.array(texts, dtype=object).astype(str), known
    is_whole = all(isinstance(value, numbers.Integral) for value in present)
    array = np.array(present, dtype=None if is_whole else np.float64)
    if array.dtype == object:
        raise InputError(f"a label is {max(present)}; expected numbers below 2**63")
    filled = np.zeros(len(values), array.dtype)
    filled[known] = array
    return filled, known & np.isfinite(filled)


def _integers(
    values: np.ndarray, known: NDArray[np.bool_], class_names: tuple[str, ...] | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return numbers as int64, and which of them are classes; raise InputError for fractions."""
    has_signs = set(np.unique(values[known]).tolist()) == {-1, 1}
    low = -1 if has_signs or "-1" in (class_names or ()) else 0
    fractions = np.flatnonzero(known & (np.trunc(values) != values))
    if len(fractions):
        row = fractions[0]
        raise InputError(
            f"labels contain fractions, such as {values[row]:.6g} in row {row}; expected integers "
            "or text"
        )
    known = known & (values >= low)
    if known.any() and float(values[known].max()) >= 2.0**63:
        raise InputError(f"a label is {values[known].max()}; expected numbers below 2**63")
    return np.where(known, values, -1).astype(np.int64), known
