"""Prepare curves over the training steps: means over intervals, axes, and marks of events."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from ssl_kd.core.pages.figures import CARD, WARNING
from ssl_kd.core.pages.wording import amount, finite

MAX_POINTS = 60  # a single step says little; a mean over an interval shows the trend
SIZE = (5.6, 3.5)
_MARKS = 100  # places along the steps where events have marks of their own


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


def log_if_wide(axes: Axes, values: Sequence[float] | NDArray) -> None:
    """Make the y axis logarithmic if the largest value is more than five times the smallest."""
    if min(values) > 0 and max(values) > 5 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: amount(v)))


def mark_events(
    axes: Axes,
    events: Sequence[dict[str, Any]],
    steps: NDArray,
    values: NDArray,
    column_of_part: Mapping[str, int] | None = None,
) -> None:
    """Mark the guard's events on drawn curves.

    An event is on the curve of its part, or on the median of all curves; where that has a gap, on
    the axis. Events of a curve that are closer than a hundredth of the steps share a mark.

    Args:
        axes: has the curves.
        events: lines of `events.jsonl`.
        steps: `[step]` of the curves.
        values: `[step, curve]`; NaN where unknown.
        column_of_part: part -> its curve; the others are on the median.
    """
    columns = column_of_part or {}
    curves: dict[int | None, NDArray] = {None: medians(values)}
    marks: dict[tuple[int | str | None, int], tuple[float, float]] = {}
    low, high = axes.get_ylim()
    for event in events:
        column, step = columns.get(str(event.get("part"))), event.get("step")
        if not finite(step):
            continue
        curve = curves.setdefault(column, values[:, column or 0])
        height = float(np.interp(step, steps, curve))  # NaN beside a value that is
        where: int | str | None = column
        if not finite(height):
            where, height = "axis", low
        place = where, round(_MARKS * step / max(steps[-1], 1))
        marks.setdefault(place, (step, min(max(height, low), high)))
    if marks:
        plural = "" if len(events) == 1 else "s"
        label = f"{len(events):,} event{plural} of the guard"
        axes.plot(*zip(*marks.values(), strict=True), color=WARNING, marker="v", ms=6.5, ls="none",
                  mec=CARD, mew=0.8, label=label, clip_on=False, zorder=5)  # fmt: skip


def medians(values: NDArray) -> NDArray:
    """Return the median of the finite values of each row; NaN for a row without any."""
    known = [row[np.isfinite(row)] for row in values]
    return np.array([np.median(row) if len(row) else np.nan for row in known])
