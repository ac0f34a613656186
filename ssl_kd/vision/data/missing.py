"""Find the rows of an array of features that hold no embedding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ssl_kd.core.files import release_pages

DENSE = 0.9
"""Share of the other rows' values that differ from zero, above which a row of zeros is missing."""
VALUES_PER_BLOCK = 1 << 22
LOOKED_AT = 10_000
"""Rows that are enough to measure that share."""


def missing_rows(features: np.ndarray) -> dict[int, str]:
    """Return row -> reason, in order, for the rows of `[n, d]` that hold no embedding.

    These are rows with NaN or infinity in float32, and rows of zeros, with which many programs fill
    in for what they could not embed. Two rows of zeros or more are missing if zeros are rare
    elsewhere: at least 90 % of the other values differ from zero, and some have a fraction. In
    counts, bits, pixels and sparse features a row of zeros may be a sample like any other.
    """
    reasons: dict[int, str] = {}
    zeros: list[int] = []
    for start, block in _blocks(features):
        is_finite = np.isfinite(block).all(1)
        for at in np.flatnonzero(~is_finite).tolist():
            reasons[start + at] = _why_not_finite(block[at])
        zeros += (start + np.flatnonzero(~block.any(1))).tolist()
    if len(zeros) > 1 and _is_dense(features):
        reasons |= dict.fromkeys(zeros, "all features are zero, as of a missing embedding")
    return dict(sorted(reasons.items()))


def _why_not_finite(row: np.ndarray) -> str:
    is_nan = np.isnan(row)
    if is_nan.all():
        return "features are NaN or missing"
    return "features contain NaN" if is_nan.any() else "features contain infinity"


def _is_dense(features: np.ndarray) -> bool:
    """Return whether zeros are rare in the rows that are not all zero, and fractions occur."""
    rows = n_values = n_nonzero = 0
    has_fractions = False
    for _, block in _blocks(features):
        block = block[block.any(1) & np.isfinite(block).all(1)]
        rows, n_values = rows + len(block), n_values + block.size
        n_nonzero += np.count_nonzero(block)
        has_fractions = has_fractions or bool((np.trunc(block) != block).any())
        if rows >= LOOKED_AT:
            break
    return has_fractions and n_nonzero >= DENSE * n_values


def _blocks(features: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first row of each block, and its values in float32, as they are clustered."""
    rows = max(1, VALUES_PER_BLOCK // features.shape[1])
    for start in range(0, len(features), rows):
        with np.errstate(over="ignore"):  # too large for float32: infinity
            yield start, np.asarray(features[start : start + rows], dtype=np.float32)
        release_pages(features)
