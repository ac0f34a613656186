"""Draw the curves of the report: losses and perplexity over the training steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from ssl_kd.colors import tint
from ssl_kd.report.figures import ACCENT, MUTED, WARNING, svg
from ssl_kd.report.wording import amount, finite

MAX_POINTS = 60  # a single step says little; a mean over an interval shows the trend
SIZE = (5.6, 3.5)


def head_curves(steps: Sequence[dict[str, Any]], chosen: Sequence[int]) -> Markup | None:
    """Draw the loss of each head over the steps, chosen heads in color; None without a loss."""
    lines = _lines_of_heads(steps)
    if not lines:
        return None
    loss = np.array([[np.nan if v is None else v for v in s["loss"]] for s in lines], float)
    loss[~np.isfinite(loss)] = np.nan
    x, loss = _interval_means([line["step"] for line in lines], loss)
    colored = [head for head in chosen if 0 <= head < loss.shape[1]]
    others = [head for head in range(loss.shape[1]) if head not in colored]

    def draw(figure: Figure) -> None:
        axes = _axes_over_steps(figure, loss)
        axes.plot(x, loss[:, others], color=MUTED, lw=0.7, alpha=0.35)
        axes.plot(x, loss[:, colored], color=ACCENT, lw=1.3, alpha=0.9)
        if colored and others:
            axes.plot([], [], color=ACCENT, label=f"{len(colored)} chosen heads")
            axes.plot([], [], color=MUTED, alpha=0.5, label=f"{len(others)} others")
            axes.legend(loc="upper right", labelcolor=MUTED)
        axes.set_ylabel("loss")

    return svg(draw, SIZE, "loss of each head over the training steps")


def loss_curves(steps: Sequence[dict[str, Any]]) -> Markup | None:
    """Draw each term of the training loss over the steps; None if no term was ever finite.

    The terms are `ce`, `kd`, and each with a `_success_rate` in `metrics.jsonl`.
    """
    terms, lines = _lines_of_terms(steps)
    losses = np.array(
        [[v if finite(v := line.get(t)) else np.nan for t in terms] for line in lines]
    )
    if not np.isfinite(losses).any():
        return None
    x, losses = _interval_means([line["step"] for line in lines], losses)

    def draw(figure: Figure) -> None:
        axes = _axes_over_steps(figure, losses)
        for i in np.flatnonzero(np.isfinite(losses).any(0)):
            # The dots show a value between two that are not finite.
            axes.plot(
                x, losses[:, i], color=tint(int(i)), lw=1.3, marker=".", ms=2.5, label=terms[i]
            )
        axes.legend(loc="upper right", labelcolor=MUTED)
        axes.set_ylabel("loss")

    return svg(draw, SIZE, "terms of the loss over the training steps")


def perplexity_curve(
    points: Sequence[tuple[float, float]], best: float | None, teacher: float | None
) -> Markup | None:
    """Draw the perplexity at each evaluated step, the best step and the teacher's perplexity."""
    if not points:
        return None
    x, y = zip(*sorted(points), strict=True)
    values = [*y, teacher] if teacher is not None else y

    def draw(figure: Figure) -> None:
        axes = _axes_over_steps(figure)
        if min(values) > 0 and max(values) > 5 * min(values):
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: amount(v)))
        axes.plot(x, y, color=ACCENT, lw=1.5, marker="o", ms=3.5)
        if teacher is not None:
            label = f"teacher {amount(teacher)}"
            axes.axhline(teacher, color=MUTED, lw=1.2, ls=(0, (4, 3)), label=label)
            axes.legend(loc="upper right", labelcolor=MUTED)
        for step, value in points:
            if step == best:
                axes.plot(step, value, "o", ms=10, mfc="none", mec=WARNING, mew=2)
                axes.annotate(amount(value), (step, value), (0, 9), ha="center", weight="bold",
                              textcoords="offset points", fontsize=10)  # fmt: skip
        axes.margins(y=0.12)
        axes.set_ylabel("perplexity")

    return svg(draw, SIZE, "held-out perplexity over the training steps")


def curve_text(steps: Sequence[dict[str, Any]]) -> str:
    """Return a sentence on what a point of `head_curves` or `loss_curves` is."""
    size = _per_interval(len(_lines_of_heads(steps) or _lines_of_terms(steps)[1]))
    return f"Each point is the mean of {size} logged steps." if size > 1 else ""


def _lines_of_heads(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [s for s in steps if isinstance(s.get("loss"), list) and s["loss"] and "step" in s]


def _lines_of_terms(steps: Sequence[dict[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of the terms of the loss, and the log lines that have some of them."""
    ending = "_success_rate"
    rates = {key.removesuffix(ending) for line in steps for key in line if key.endswith(ending)}
    terms = list(dict.fromkeys(["ce", "kd", *sorted(rates)]))
    lines = [line for line in steps if finite(line.get("step")) and any(t in line for t in terms)]
    return terms, lines


def _per_interval(n: int) -> int:
    return max(1, -(-n // MAX_POINTS))


def _interval_means(steps: Sequence[float], values: NDArray) -> tuple[NDArray, NDArray]:
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


def _axes_over_steps(figure: Figure, values: NDArray | None = None) -> Axes:
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
