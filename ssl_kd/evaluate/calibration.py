"""Calibration: how many of the samples with confidence 0.9 are correct."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ssl_kd.evaluate.clustering import match

BINS = 15
SURE = 0.9


def rightly_placed(labels: ArrayLike, clusters: ArrayLike) -> NDArray[np.bool_]:
    """Return whether each sample is in the cluster paired with its class, as in `accuracy`.

    Args:
        labels: `[n]` integers, -1 where unknown.
        clusters: `[n]` integers from 0, -1 for noise.

    Returns:
        `[n]` bool; False where the label is unknown, for noise, and in clusters without a partner.

    Raises:
        ValueError: as `match`.

    Example:
        >>> rightly_placed([0, 0, 1, 1], [1, 1, 0, 1]).tolist()
        [True, True, True, False]
    """
    labels, clusters = np.asarray(labels), np.asarray(clusters)
    partner = np.full(clusters.max() + 2, -2)  # of each cluster; noise (-1) uses the last entry
    for cluster, label in match(labels, clusters).items():
        partner[cluster] = label
    return partner[clusters] == labels


class Reliability:
    """The reliability of a confidence in fifteen bins of equal width, updated batch by batch.

    Bins are open below and closed above, ((m - 1) / 15, m / 15]; sums are float64.

    References:
        Guo et al., On calibration of modern neural networks, ICML 2017.
    """

    def __init__(self) -> None:
        self._sums = np.zeros((3, BINS))  # samples, sum of confidence, number correct

    def add(self, confidence: ArrayLike, right: ArrayLike) -> None:
        """Add samples: confidence `[n]` in [0, 1], and `[n]` 1 where correct, else 0."""
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
        """The bins with samples: `low`, `high`, samples `n`, mean `confidence`, share `right`."""
        return [
            _bin(b / BINS, (b + 1) / BINS, *sums) for b, sums in enumerate(self._sums.T) if sums[0]
        ]


def _bin(low: float, high: float, n: float, confidence: float, right: float) -> dict[str, Any]:
    means = {"confidence": float(confidence / n), "right": float(right / n)}
    return {"low": low, "high": high, "n": int(n), **means}


def calibration(confidence: ArrayLike, right: ArrayLike) -> dict[str, Any]:
    """Compute the reliability of a confidence, and its expected error.

    Args:
        confidence: `[n]` in [0, 1], n at least 1.
        right: `[n]` bool.

    Returns:
        `ece` and `bins` as in `Reliability`; `sure`, a bin of all samples with a confidence of at
        least 0.9, None if there are none.

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
