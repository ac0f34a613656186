"""Whether a confidence is what it says: of the samples with confidence 0.9, how many are right."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ssl_kd.evaluate.clustering import match

BINS = 15
SURE = 0.9


def rightly_placed(labels: ArrayLike, clusters: ArrayLike) -> NDArray[np.bool_]:
    """Whether each sample is in the cluster that is paired with its class, as `accuracy` counts.

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
    partner = np.full(clusters.max() + 2, -2)  # of each cluster; the last place is noise's
    for cluster, label in match(labels, clusters).items():
        partner[cluster] = label
    return partner[clusters] == labels


def calibration(confidence: ArrayLike, right: ArrayLike) -> dict[str, Any]:
    """The reliability of a confidence in fifteen bins of equal width, and its expected error.

    `ece = sum_b n_b / n |mean confidence_b - share right_b|`

    Args:
        confidence: `[n]` in [0, 1], n at least 1.
        right: `[n]` bool.

    Returns:
        `ece` in [0, 1]; `bins`, those with samples, each with its bounds `low` and `high`, the
        number of samples `n`, their mean `confidence` and the share `right`; `sure`, the same of
        all samples from a confidence of 0.9 on, None where there are none.

    References:
        Guo et al., On calibration of modern neural networks, ICML 2017, eq. 3.

    Example:
        >>> calibration([0.9, 0.9, 0.9, 0.9], [True, True, True, False])["ece"]
        0.15
    """
    confidence, right = np.asarray(confidence, np.float64), np.asarray(right, bool)
    number = np.minimum((confidence * BINS).astype(int), BINS - 1)

    def part(inside: NDArray[np.bool_], low: float, high: float) -> dict[str, Any]:
        mean, share = float(confidence[inside].mean()), float(right[inside].mean())
        return {
            "low": low,
            "high": high,
            "n": int(inside.sum()),
            "confidence": mean,
            "right": share,
        }

    bins = [part(number == b, b / BINS, (b + 1) / BINS) for b in np.unique(number).tolist()]
    ece = sum(b["n"] * abs(b["confidence"] - b["right"]) for b in bins) / len(right)
    sure = confidence >= SURE
    return {
        "ece": round(ece, 6),
        "sure": part(sure, SURE, 1.0) if sure.any() else None,
        "bins": bins,
    }
