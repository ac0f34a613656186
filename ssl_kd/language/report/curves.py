"""Draw the terms of the loss and the perplexity over the training steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from ssl_kd.core.colors import tint
from ssl_kd.core.pages.curves import (
    SIZE,
    axes_over_steps,
    interval_means,
    interval_text,
    log_if_wide,
    mark_events,
)
from ssl_kd.core.pages.figures import ACCENT, MUTED, WARNING, svg
from ssl_kd.core.pages.wording import amount, finite


def loss_curves(
    steps: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]] = ()
) -> Markup | None:
    """Draw each term of the training loss over the steps; None if no term was ever finite.

    The terms are `ce`, `kd`, and each with a `_success_rate` in `metrics.jsonl`. Events of the
    guard are marks.
    """
    terms, lines = _lines_of_terms(steps)
    losses = np.array(
        [[v if finite(v := line.get(t)) else np.nan for t in terms] for line in lines]
    )
    if not np.isfinite(losses).any():
        return None
    x, losses = interval_means([line["step"] for line in lines], losses)

    def draw(figure: Figure) -> None:
        axes = axes_over_steps(figure, losses)
        for i in np.flatnonzero(np.isfinite(losses).any(0)):
            # The dots show a value between two that are not finite.
            axes.plot(
                x, losses[:, i], color=tint(int(i)), lw=1.3, marker=".", ms=2.5, label=terms[i]
            )
        mark_events(axes, events, x, losses, {term: i for i, term in enumerate(terms)})
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
        axes = axes_over_steps(figure)
        log_if_wide(axes, values)
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
    """Return a sentence on what a point of `loss_curves` is."""
    return interval_text(len(_lines_of_terms(steps)[1]))


def _lines_of_terms(steps: Sequence[dict[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of the terms of the loss, and the log lines that have some of them."""
    ending = "_success_rate"
    rates = {key.removesuffix(ending) for line in steps for key in line if key.endswith(ending)}
    terms = list(dict.fromkeys(["ce", "kd", *sorted(rates)]))
    lines = [line for line in steps if finite(line.get("step")) and any(t in line for t in terms)]
    return terms, lines
