"""Pictures of the report, as SVG that takes its colours from the page (light or dark)."""

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from colorsys import hls_to_rgb
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import ArrayLike, NDArray

from ssl_kd.evaluate import match
from ssl_kd.report.wording import finite

# Ten colours that stay apart for colour-blind readers (Petroff, arXiv 2107.02270).
PALETTE = (
    "#3f90da",
    "#ffa90e",
    "#bd1f01",
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#717581",
    "#92dadd",
)
CLUSTERS = tuple(color for color in PALETTE if color not in ("#94a4a2", "#717581"))  # no greys
ACCENT, WARNING = "#3f90da", "#e76300"
SHARE_COLOURS = tuple(PALETTE[i] for i in (9, 1, 0, 5, 3, 8, 7))  # no alarming red
# Stand-ins that become colours of the page, so that one picture serves both themes.
INK, MUTED, GRID, CARD = "#010203", "#040506", "#070809", "#0a0b0c"
PAGE_COLOURS = {
    INK: "currentColor",
    MUTED: "var(--muted)",
    GRID: "var(--line)",
    CARD: "var(--card)",
}
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ssl_kd",
    "text.parse_math": False,  # a class may be called "$x$"
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


def cluster_size_bars(sizes: ArrayLike) -> Markup | None:
    """Sizes of the clusters, largest first, with the even share as a line.

    Args:
        sizes: `[n_clusters]` counts.

    Returns:
        SVG, or None without clusters.
    """
    counts = np.asarray(sizes)
    if not counts.size:
        return None
    order = np.argsort(-counts, kind="stable")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        place = np.arange(len(order))
        axes.bar(place, counts[order], color=ACCENT, width=0.8 if len(order) <= 60 else 1.0)
        empty = place[counts[order] == 0]
        axes.plot(empty, 0 * empty, "X", color=PALETTE[2], ms=6, mew=0, clip_on=False)
        axes.axhline(counts.mean(), color=MUTED, lw=1, ls=(0, (4, 3)))
        axes.annotate("even share", (1, counts.mean()), (0, 3), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", color=MUTED, fontsize=10)  # fmt: skip
        if len(order) <= 25:
            axes.set_xticks(place, [str(k) for k in order], fontsize=11 if len(order) <= 15 else 8)
            axes.set_xlabel("cluster")
        else:
            axes.set_xlabel(f"{len(order)} clusters, largest first")
        axes.grid(axis="x", visible=False)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.margins(x=0.02)

    return svg(draw, (5.2, 4.4), "number of samples in each cluster, largest first")


def confusion_matrix(
    table: ArrayLike, names: Sequence[str], clusters: Sequence[int] | None
) -> Markup | None:
    """Share of each class that fell into each cluster, matched pairs on the diagonal.

    Args:
        table: `[n_classes, n_clusters]` counts.
        names: Name of each class.
        clusters: Number of the cluster in each column, or None where not known.

    Returns:
        SVG, or None where the table is empty.
    """
    counts = np.asarray(table)
    if counts.ndim != 2 or not counts.size:
        return None
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    small = max(counts.shape) <= 12

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        picture = np.empty((*share.shape, 4))
        picture[..., :3] = to_rgb(ACCENT)
        picture[..., 3] = share**0.7  # zero is transparent, so the page shows through
        oblong = max(share.shape) > 1.6 * min(share.shape)
        axes.imshow(picture, aspect="auto" if oblong else "equal", interpolation="nearest")
        axes.grid(visible=False)
        axes.spines[:].set_visible(True)
        if small:
            for (i, j), value in np.ndenumerate(share):
                if value >= 0.005:
                    axes.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=9.5,
                              color="white" if value > 0.55 else INK)  # fmt: skip
        axes.set_xlabel("cluster")
        axes.set_ylabel("class")
        if len(names) == counts.shape[0] <= 30:
            axes.set_yticks(range(len(names)), [shorten(n) for n in names])
        if clusters is not None and len(clusters) == counts.shape[1] <= 30:
            axes.set_xticks(range(len(clusters)), [str(k) for k in clusters],
                            fontsize=11 if len(clusters) <= 15 else 8)  # fmt: skip
        axes.tick_params(length=0)

    return svg(draw, (5.2, 4.6), "share of each class in each cluster, in per cent")


def reliability_diagram(bins: Sequence[dict[str, Any]]) -> Markup | None:
    """How many are right at each confidence, beside the diagonal, and how many samples these are.

    Args:
        bins: As `ssl_kd.evaluate.calibration` gives them.

    Returns:
        SVG, or None without bins.
    """
    if not bins:
        return None
    low, high = (np.array([b[key] for b in bins]) for key in ("low", "high"))
    confidence, right, n = (
        np.array([b[key] for b in bins]) for key in ("confidence", "right", "n")
    )

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        above.bar(low, right, high - low, align="edge", color=ACCENT, lw=0)
        above.plot((0, 1), (0, 1), color=MUTED, lw=1, ls=(0, (4, 3)))
        above.plot(confidence, right, "o", color=INK, ms=4, mew=0)
        above.set_ylim(0, 1)
        above.set_ylabel("right")
        below.bar(low, n, high - low, align="edge", color=PALETTE[3], lw=0)
        below.yaxis.set_major_locator(MaxNLocator(2, integer=True))
        below.set_ylabel("samples")
        below.set_xlabel("confidence")
        below.set_xlim(0, 1)
        for axes in (above, below):
            axes.grid(axis="x", visible=False)

    return svg(draw, (5.2, 4.4), "share of right samples at each confidence, and their number")


def tint(cluster: int) -> str:
    """The color of a cluster, as in the explorer (colours.js): of the palette, then ever new hues.

    >>> len({tint(k) for k in range(200)})
    200
    """
    if cluster < len(CLUSTERS):
        return CLUSTERS[cluster]
    light, full = 0.48 + cluster % 4 * 0.07, 0.55 + cluster % 3 * 0.12
    return to_hex(hls_to_rgb(cluster * 137.508 % 360 / 360, light, full))


def embedding_scatter(
    places: ArrayLike, groups: ArrayLike, colours: Sequence[str], names: Sequence[str], title: str
) -> Markup | None:
    """Points of the 2-D map coloured by group, with each group's name at its middle.

    Args:
        places: `[m, 2]` places.
        groups: `[m]` group of each point, -1 where unknown (drawn faint).
        colours: A colour for each group.
        names: What to write at the middle of each group.
        title: Description for those who cannot see the picture.

    Returns:
        SVG, or None where there is no point.
    """
    places, groups = np.asarray(places, float), np.asarray(groups)
    if not len(places):
        return None
    largest_first = np.argsort(-np.bincount(groups[groups >= 0], minlength=len(names)))
    width, height = np.ptp(places, axis=0) + 1e-12
    shuffled = np.random.default_rng(0).permutation(len(places))  # no group lies on top of all

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set_aspect("equal")
        rgba = np.zeros((len(places), 4))
        rgba[:] = (0.5, 0.5, 0.5, 0.25)
        known = groups >= 0
        rgba[known, :3] = np.array([to_rgb(c) for c in colours])[groups[known]]
        rgba[known, 3] = 0.85
        size = float(np.clip(14_000 / len(places), 4, 26))
        axes.scatter(*places[shuffled].T, c=rgba[shuffled], s=size, lw=0, rasterized=True)
        middles = _middles(len(names), places, groups)
        named: list[tuple[float, float]] = []
        for k in largest_first:
            x, y = middles[k]
            gap = 0.07 * max(width, height)  # a name that would cover a larger group's is left out
            if np.isfinite(x) and all(math.hypot(x - a, y - b) > gap for a, b in named):
                named.append((x, y))
                axes.text(
                    x,
                    y,
                    shorten(names[int(k)], 14),
                    ha="center",
                    va="center",
                    fontsize=10.5,
                    weight="bold",
                    bbox={"boxstyle": "round,pad=0.22", "fc": CARD, "ec": "none", "alpha": 0.82},
                )
        axes.margins(0.03)

    return svg(draw, (5.2, float(np.clip(5.2 * height / width, 3.4, 5.4))), title)


def class_colours(
    n_classes: int, colours: Sequence[str], labels: ArrayLike, clusters: ArrayLike
) -> list[str]:
    """Give each class the colour of the cluster it is matched with, grey where there is none.

    Args:
        n_classes: Number of classes.
        colours: A colour for each cluster.
        labels: `[m]` labels of the map's points, -1 where unknown.
        clusters: `[m]` clusters of the same.

    Returns:
        `n_classes` colours.
    """
    picked = ["#808080"] * n_classes
    for cluster, label in match(labels, clusters).items():
        picked[label] = colours[cluster]
    return picked


def _middles(n: int, places: NDArray, groups: NDArray) -> NDArray:
    """The point of each group nearest its coordinate-wise median; NaN where a group is empty."""
    middles = np.full((n, 2), np.nan)
    for k in range(n):
        points = places[groups == k]
        if len(points):
            distance = np.square(points - np.median(points, axis=0)).sum(1)
            middles[k] = points[distance.argmin()]
    return middles


def shares(values: dict[str, Any], text: Callable[[float], str]) -> list[dict[str, str]]:
    """The parts of a bar, and of the list below it.

    Args:
        values: Size of each part; `total`, and what is not finite or not positive, is left out.
        text: Writes a size.

    Returns:
        `name`, `text`, `share` and `colour` of each part.
    """
    parts = {k: v for k, v in values.items() if k != "total" and finite(v) and v > 0}
    return [
        {
            "name": name,
            "text": text(value),
            "share": f"{value / sum(parts.values()):.4f}",
            "colour": SHARE_COLOURS[i % len(SHARE_COLOURS)],
        }
        for i, (name, value) in enumerate(parts.items())
    ]


def svg(draw: Callable[[Figure], None], size: tuple[float, float], title: str) -> Markup:
    """Draw on a fresh figure.

    Args:
        draw: Fills the figure.
        size: Width and height in inches.
        title: Description for those who cannot see the picture; no two of a page are the same.

    Returns:
        Inline SVG whose ids are unique on the page.
    """
    target = io.StringIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has the glyph
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
    for stand_in, colour in PAGE_COLOURS.items():
        text = text.replace(stand_in, colour)
    head = re.sub(r' (?:width|height)="[^"]*pt"', "", text[: text.index(">") + 1])
    head = head.replace("<svg", f'<svg role="img" aria-label="{Markup.escape(title)}"', 1)
    return Markup(head + text[text.index(">") + 1 :])


def shorten(text: str, length: int = 18) -> str:
    """Text for a picture: printable, and cut where it is too long."""
    text = "".join(c if c.isprintable() else "?" for c in str(text))
    return text if len(text) <= length else text[: length - 1] + "…"
