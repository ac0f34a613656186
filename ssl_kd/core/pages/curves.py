"""Prepare curves over the training steps: means over intervals, and axes for them."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

MAX_POINTS = 60  # a single step says little; a mean over an interval shows the trend
SIZE = (5.6, 3.5)


def interval_text(n: int) -> str:
    """Return a sentence on what a point of a curve of `n` logged steps is."""
    size = _per_interval(n)
    return f"Each point is the mean of {size} logged steps." if size > 1 else ""


def _per_interval(n: int) -> int:
    return max(1, -(-n // MAX_POINTS))


def interval_means(steps: Sequence[float], values: NDArray) -> tuple[NDArray, NDArray]:
    """Return the last step and the means of each interval, for values `[step, curve]`.

    Values that are not finite are left out; an interval without others is NaN.
    """
    size = _per_interval(len(steps))
    starts = np.arange(0, len(steps), size)
    is_known = np.isfinite(values)
    sums = np.add.reduceat(np.where(is_known, values, 0.0), starts)
    counts = np.add.reduceat(is_known.astype(float), starts)
    means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    ends = np.minimum(starts + size, len(steps)) - 1
    return np.asarray(steps, float)[ends], means


def axes_over_steps(figure: Figure, values: NDArray | None = None) -> Axes:
    """Return axes over the steps; a single spike in `values` does not stretch the y axis."""
    axes = figure.subplots()
    axes.set_xlabel("step", loc="right")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    known = np.array([]) if values is None else values[np.isfinite(values)]
    if known.size:
        low, high = known.min(), np.percentile(known, 99.5)
        pad = 0.05 * (high - low) or 0.5
        axes.set_ylim(low - pad, high + pad)
    return axes
