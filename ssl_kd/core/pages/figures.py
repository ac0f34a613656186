"""Draw figures as SVG that takes its colors from the page, in its light or dark theme."""

import io
import math
import re
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ssl_kd.core.colors import tint

ACCENT, WARNING = tint(0), "#e76300"
# Placeholders for colors of the page, so that one figure serves both themes.
INK = "#010203"
MUTED = "#040506"
GRID = "#070809"
CARD = "#0a0b0c"
PAGE_COLORS = {INK: "currentColor", MUTED: "var(--muted)", GRID: "var(--line)", CARD: "var(--card)"}
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ssl_kd",
    "text.parse_math": False,  # a loss term may be called "$x$"
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 10,
}


def cluster_map(points: NDArray, clusters: NDArray) -> Markup | None:
    """Draw points `[m, 2]` colored by cluster `[m]`, with the clusters' numbers; None if m = 0."""
    if not len(points):
        return None
    sizes = np.bincount(clusters)
    width, height = np.ptp(points, axis=0) + 1e-12
    gap = 0.07 * max(width, height)  # a number that would cover a larger cluster's is left out
    shuffled = np.random.default_rng(0).permutation(len(points))  # no cluster covers all others
    style = {"boxstyle": "round,pad=0.22", "fc": CARD, "ec": "none", "alpha": 0.82}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set_aspect("equal")
        colors = np.array([to_rgb(tint(k)) for k in range(len(sizes))])[clusters[shuffled]]
        size = float(np.clip(14_000 / len(points), 4, 26))
        axes.scatter(*points[shuffled].T, c=colors, s=size, lw=0, alpha=0.85, rasterized=True)
        named: list[tuple[float, float]] = []
        for k in np.argsort(-sizes)[: np.count_nonzero(sizes)]:
            members = points[clusters == k]
            distance = np.square(members - np.median(members, axis=0)).sum(1)
            x, y = members[distance.argmin()]
            if all(math.hypot(x - a, y - b) > gap for a, b in named):
                named.append((x, y))
                axes.text(x, y, str(k), ha="center", va="center", fontsize=10.5, weight="bold",
                          bbox=style)  # fmt: skip
        axes.margins(0.03)

    title = "map of the embeddings, colored by cluster"
    return svg(draw, (5.2, float(np.clip(5.2 * height / width, 3.4, 5.4))), title)


def svg(draw: Callable[[Figure], None], size: tuple[float, float], title: str) -> Markup:
    """Return a figure of `size` (inches) as inline SVG with ids that are unique on the page.

    The title, a description for screen readers, is part of the ids.
    """
    target = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(0)
        draw(figure)
        for axes in figure.axes:
            axes.patch.set_alpha(0)
        figure.savefig(target, format="svg", dpi=180, metadata={"Date": None, "Creator": None})
    text = target.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    prefix = re.sub(r"\W+", "-", title) + "-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{prefix}", text)
    text = re.sub(r"font: ([^;\"]*?) 'DejaVu Sans'[^;\"]*", r"font: \1 var(--font)", text)
    for stand_in, color in PAGE_COLORS.items():
        text = text.replace(stand_in, color)
    head = re.sub(r' (?:width|height)="[^"]*pt"', "", text[: text.index(">") + 1])
    head = head.replace("<svg", f'<svg role="img" aria-label="{Markup.escape(title)}"', 1)
    return Markup(head + text[text.index(">") + 1 :])
