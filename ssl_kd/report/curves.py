"""Curves of the report: what was learned over the steps, and when the guard stepped in."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from ssl_kd.report.figures import ACCENT, MUTED, PALETTE, WARNING, shorten, svg
from ssl_kd.report.wording import amount, finite

ACTIONS = {
    "skip": ("skipped", "o"),
    "cutout": ("cut out", "v"),
    "usedagain": ("used again", "P"),
    "restor": ("restored", "^"),
    "reinit": ("re-initialised", "s"),
    "stop": ("stopped", "X"),
    "": ("other", "D"),
}
MAX_POINTS = 400  # more points than pixels only cost bytes


def head_curves(
    steps: Sequence[dict[str, Any]], chosen: Sequence[int], events: Sequence[dict[str, Any]]
) -> Markup | None:
    """Loss of each head over the steps, chosen heads in colour, and below it the guard's events.

    Args:
        steps: Lines of `metrics.jsonl`.
        chosen: Numbers of the heads that form the answer.
        events: Lines of `events.jsonl`.

    Returns:
        SVG, or None where no loss was logged.
    """
    lines = [s for s in steps if isinstance(s.get("loss"), list) and s["loss"] and "step" in s]
    if not lines:
        return None
    lines = lines[:: -(-len(lines) // MAX_POINTS)]
    x = [line["step"] for line in lines]
    loss = np.array([[np.nan if v is None else v for v in s["loss"]] for s in lines], float)
    loss[~np.isfinite(loss)] = np.nan

    def draw(top: Axes) -> None:
        picked = [h for h in chosen if 0 <= h < loss.shape[1]]
        others = [h for h in range(loss.shape[1]) if h not in picked]
        top.plot(x, loss[:, others], color=MUTED, lw=0.7, alpha=0.35)
        top.plot(x, loss[:, picked], color=ACCENT, lw=1.3, alpha=0.9)
        if picked and others:
            top.plot([], [], color=ACCENT, label=f"{len(picked)} chosen heads")
            top.plot([], [], color=MUTED, alpha=0.5, label=f"{len(others)} others")
            top.legend(loc="upper right", labelcolor=MUTED)
        _fit(top, loss)
        top.set_ylabel("loss")

    return _above_events(draw, events, "loss of each head over the training steps")


TERMS = {
    "ce": "cross-entropy (ce)",
    "kd": "distillation (kd)",
    "hidden": "hidden states (hidden)",
}


def loss_curves(steps: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]) -> Markup | None:
    """The terms of the training loss over the steps, and below them the guard's events.

    Args:
        steps: Lines of `metrics.jsonl`; those with `ce`, `kd` or another term that has a
            `_success_rate` count, others are passed over.
        events: Lines of `events.jsonl`.

    Returns:
        SVG, or None where no term was ever finite.
    """
    ending = "_success_rate"
    rates = {key for line in steps for key in line if key.endswith(ending)}
    names = list(dict.fromkeys(["ce", "kd", *sorted(key.removesuffix(ending) for key in rates)]))
    colours = (ACCENT, *PALETTE[1:])
    terms = {t: (TERMS.get(t, t), colours[i % len(colours)]) for i, t in enumerate(names)}
    lines = [line for line in steps if finite(line.get("step")) and any(t in line for t in terms)]
    lines = lines[:: max(1, -(-len(lines) // MAX_POINTS))]
    x = [line["step"] for line in lines]
    losses = {
        term: np.array([v if finite(v := line.get(term)) else np.nan for line in lines], float)
        for term in terms
    }
    every = np.concatenate(list(losses.values()))
    if not np.isfinite(every).any():
        return None

    def draw(top: Axes) -> None:
        for term, (name, colour) in terms.items():
            if np.isfinite(losses[term]).any():
                # The dots show a value that stands alone between two that are not finite.
                top.plot(x, losses[term], color=colour, lw=1.3, label=name, marker=".", ms=2.5)
        _fit(top, every)
        top.legend(loc="upper right", labelcolor=MUTED)
        others = any(np.isfinite(losses[term]).any() for term in names[2:])
        top.set_ylabel("loss" if others else "loss, nats per token")

    return _above_events(draw, events, "cross-entropy and distillation loss over the steps")


def perplexity_curve(
    points: Sequence[tuple[float, float]], best: float | None, marks: dict[str, float]
) -> Markup | None:
    """Held-out perplexity over the steps, the best step marked, that of others as dashed lines.

    Args:
        points: Step and finite perplexity of each evaluation.
        best: The step whose weights were kept.
        marks: Up to two perplexities to compare with, by name.

    Returns:
        SVG, or None without a point.
    """
    if not points:
        return None
    x, y = zip(*sorted(points), strict=True)
    every = [*y, *marks.values()]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        if min(every) > 0 and max(every) > 5 * min(every):
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: amount(v)))
        axes.plot(x, y, color=ACCENT, lw=1.5, marker="o", ms=3.5)
        for (name, value), dashes in zip(marks.items(), ((4, 3), (1, 2)), strict=False):
            label = f"{name} {amount(value)}"
            axes.axhline(value, color=MUTED, lw=1.2, ls=(0, dashes), label=label)
        if marks:
            axes.legend(loc="upper right", labelcolor=MUTED)
        for step, value in points:
            if step == best:
                axes.plot(step, value, "o", ms=10, mfc="none", mec=WARNING, mew=2)
                axes.annotate(amount(value), (step, value), (0, 9), ha="center", weight="bold",
                              textcoords="offset points", fontsize=10)  # fmt: skip
        axes.margins(y=0.12)
        axes.set_ylabel("perplexity")
        axes.set_xlabel("step", loc="right")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))

    return svg(draw, (5.6, 3.5), "held-out perplexity over the training steps")


def _above_events(
    draw_top: Callable[[Axes], None], events: Sequence[dict[str, Any]], title: str
) -> Markup:
    """Curves over the steps, and on the same axis below them the guard's events, part by part."""
    counts = Counter(str(e.get("part")) for e in events)
    parts = sorted((part for part, _ in counts.most_common(12)), key=_natural)

    def draw(figure: Figure) -> None:
        ratios = [5, max(0.6, 0.35 * len(parts))] if parts else [5]
        axes = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)
        draw_top(axes[0, 0])
        if parts:
            below: Axes = axes[1, 0]
            for action, (name, shape) in ACTIONS.items():
                hits = [
                    (e.get("step", 0), parts.index(str(e.get("part"))))
                    for e in events
                    if _action(e) == action and str(e.get("part")) in parts
                ]
                if hits:
                    colour = PALETTE[2] if action == "stop" else WARNING
                    where = zip(*hits, strict=True)
                    below.scatter(*where, marker=shape, s=28, label=name, color=colour, lw=0)
            below.set_yticks(range(len(parts)), [shorten(p) for p in parts])
            below.set_ylim(len(parts) - 0.4, -0.6)
            if len(counts) > len(parts):
                below.set_title(f"the {len(parts)} busiest of {len(counts)} parts", loc="left",
                                color=MUTED, fontsize=10)  # fmt: skip
            below.legend(loc="upper left", bbox_to_anchor=(0, -0.35 / ratios[1]), ncols=5,
                         labelcolor=MUTED, handletextpad=0.1, borderaxespad=0)  # fmt: skip
        axes[-1, 0].set_xlabel("step", loc="right")
        axes[-1, 0].xaxis.set_major_locator(MaxNLocator(6, integer=True))

    return svg(draw, (5.6, 3.5 + 0.3 * len(parts)), title)


def _fit(axes: Axes, values: NDArray) -> None:
    """Limits that a single spike does not blow up."""
    known = values[np.isfinite(values)]
    if known.size:
        low, high = known.min(), np.percentile(known, 99.5)
        pad = 0.05 * (high - low) or 0.5
        axes.set_ylim(low - pad, high + pad)


def _natural(part: str) -> tuple[str, int]:
    """Sort key that puts `head 10` after `head 9`."""
    digits = re.search(r"\d+", part)
    return (part[: digits.start()], int(digits[0])) if digits else (part, -1)


def _action(event: dict[str, Any]) -> str:
    text = re.sub(r"[-_ ]", "", str(event.get("action", "")).lower())
    return next(stem for stem in ACTIONS if stem in text)
