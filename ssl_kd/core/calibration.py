"""Compare the confidence of predictions with the share of them that is correct."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

BINS = 15
SURE = 0.9


class Reliability:
    """Accumulate confidence and correctness of samples in 15 bins of confidence.

    Bins are open below and closed above, ((m - 1) / 15, m / 15]; sums are float64.

    References:
        Guo et al., On calibration of modern neural networks, ICML 2017.
    """

    def __init__(self) -> None:
        self._sums = np.zeros((3, BINS))  # samples, sum of confidence, number correct

    def add(self, confidence: ArrayLike, right: ArrayLike) -> None:
        """Add n samples, given `confidence` in [0, 1] and `right`: 1 where correct, else 0."""
        confidence, right = np.asarray(confidence, np.float64), np.asarray(right, np.float64)
        place = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
        for sums, weights in zip(self._sums, (None, confidence, right), strict=True):
            sums += np.bincount(place, weights, BINS)

    @property
    def ece(self) -> float | None:
        """Expected calibration error, in [0, 1] (equation 3); None without samples.

        `sum_b n_b / n |mean confidence_b - share right_b|`
        """
        n, confidence, right = self._sums
        return float(np.abs(right - confidence).sum() / n.sum()) if n.any() else None

    @property
    def bins(self) -> list[dict[str, Any]]:
        """A dict for each bin that is not empty, as in `calibration`."""
        return [
            _bin(b / BINS, (b + 1) / BINS, *sums) for b, sums in enumerate(self._sums.T) if sums[0]
        ]


def _bin(low: float, high: float, n: float, confidence: float, right: float) -> dict[str, Any]:
    means = {"confidence": float(confidence / n), "right": float(right / n)}
    return {"low": low, "high": high, "n": int(n), **means}


def calibration(confidence: ArrayLike, right: ArrayLike) -> dict[str, Any]:
    """Compute the expected calibration error of a confidence, and the bins it comes from.

    Args:
        confidence: `[n]` in [0, 1], n at least 1.
        right: `[n]` bool, whether each sample is correct.

    Returns:
        `ece`, the expected calibration error in [0, 1]; `bins`, a dict for each of 15 bins of equal
        width that is not empty (`low`, `high`, samples `n`, mean `confidence`, share `right`
        correct); `sure`, such a dict for all samples with a confidence of at least 0.9, or None if
        there are no such samples.

    Example:
        >>> calibration([0.9, 0.9, 0.9, 0.9], [True, True, True, False])["ece"]
        0.15
    """
    confidence, right = np.asarray(confidence, np.float64), np.asarray(right, bool)
    reliability = Reliability()
    reliability.add(confidence, right)
    assert reliability.ece is not None, "there is a sample"
    sure, bin_of_sure = confidence >= SURE, None
    if n := int(sure.sum()):
        bin_of_sure = _bin(SURE, 1.0, n, confidence[sure].sum(), right[sure].sum())
    return {"ece": round(reliability.ece, 6), "sure": bin_of_sure, "bins": reliability.bins}
