"""Draw the losses of heads over the training steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from ssl_kd.core.pages.curves import (
    SIZE,
    axes_over_steps,
    interval_means,
    interval_text,
    mark_events,
)
from ssl_kd.core.pages.figures import ACCENT, MUTED, svg


def head_curves(
    steps: Sequence[dict[str, Any]],
    chosen: Sequence[int],
    events: Sequence[dict[str, Any]] = (),
) -> Markup | None:
    """Draw the loss of each head over the steps, chosen heads in color; None without a loss.

    The cross-entropy to given clusters, which heads may learn before LOSS, is dotted. Events of the
    guard are marks.
    """
    lines = _lines_of_heads(steps)
    if not lines:
        return None
    loss = np.array([[np.nan if v is None else v for v in s["loss"]] for s in lines], float)
    loss[~np.isfinite(loss)] = np.nan
    by_loss = np.array([s.get("by_loss", [True] * loss.shape[1]) for s in lines], bool)
    steps_of_lines = [line["step"] for line in lines]
    x, given = interval_means(steps_of_lines, np.where(by_loss, np.nan, loss))
    x, loss = interval_means(steps_of_lines, np.where(by_loss, loss, np.nan))
    both = np.where(np.isnan(loss), given, loss)
    colored = [head for head in chosen if 0 <= head < loss.shape[1]]
    others = [head for head in range(loss.shape[1]) if head not in colored]

    def draw(figure: Figure) -> None:
        axes = axes_over_steps(figure, both)
        for values, style in ((given, ":"), (loss, "-")):
            line: Any = {"ls": style, "marker": ".", "ms": 2.5}  # a point alone has no line
            axes.plot(x, values[:, others], color=MUTED, lw=0.7, alpha=0.35, **line)
            axes.plot(x, values[:, colored], color=ACCENT, lw=1.3, alpha=0.9, **line)
        if colored and others:
            axes.plot([], [], color=ACCENT, label=f"{len(colored)} chosen heads")
            axes.plot([], [], color=MUTED, alpha=0.5, label=f"{len(others)} others")
        if np.isfinite(given).any():
            axes.plot([], [], color=MUTED, ls=":", label="cross-entropy to given clusters")
        mark_events(axes, events, x, both, {f"head {i}": i for i in range(loss.shape[1])})
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc="best", labelcolor=MUTED)
        axes.set_ylabel("loss")

    return svg(draw, SIZE, "loss of each head over the training steps")


def curve_text(steps: Sequence[dict[str, Any]]) -> str:
    """Return a sentence on what a point of `head_curves` is."""
    return interval_text(len(_lines_of_heads(steps)))


def _lines_of_heads(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [s for s in steps if isinstance(s.get("loss"), list) and s["loss"] and "step" in s]
