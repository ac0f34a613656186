"""Draw the map of a run as a picture, for reports and programs."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ssl_kd.core.colors import MISSING, RAMP, tint
from ssl_kd.core.errors import InputError
from ssl_kd_explore.columns import Columns, codes_of, group_rows

MARGIN = 0.94  # as on the page (plot.js)
NUMBERED = 40  # clusters that get their number on the map, the largest ones
SMALLEST = 64  # pixels of a side
LARGEST = 4096
DPI = 100


def map_image(places: NDArray[np.float32], columns: Columns, color: str, width: int) -> Image.Image:
    """Draw samples at `places` `[n, 2]`, colored by a column, on `width` x `width` pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    if not SMALLEST <= width <= LARGEST:
        raise InputError(f"`width` is {width}; expected {SMALLEST} to {LARGEST} pixels")
    colors = _colors(columns, color)
    limits = (-1 / MARGIN, 1 / MARGIN)
    points_per_pixel = 72 / DPI
    canvas = FigureCanvasAgg(Figure((width / DPI, width / DPI), DPI))
    axes = canvas.figure.add_axes((0, 0, 1, 1), xlim=limits, ylim=limits)
    axes.set_axis_off()
    dot = points_per_pixel * min(max(0.4 * width / math.sqrt(len(places)), 1), width / 50)
    order = np.random.default_rng(0).permutation(len(places))  # no cluster covers all others
    axes.scatter(*places[order].T, s=dot**2, c=colors[order], linewidths=0)
    clusters = codes_of(columns.column(color)) if color == "cluster" else np.array([], np.int64)
    groups = group_rows(clusters, np.arange(len(clusters)))
    style = {"ha": "center", "va": "center", "fontsize": points_per_pixel * max(12, width / 50)}
    for cluster, rows in sorted(groups.items(), key=lambda item: -len(item[1]))[:NUMBERED]:
        members = places[rows]
        x, y = members[np.square(members - np.median(members, axis=0)).sum(1).argmin()]
        white = [withStroke(linewidth=3, foreground="white")]
        axes.text(x, y, str(cluster), **style, path_effects=white)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def _colors(columns: Columns, name: str) -> NDArray[np.float64]:
    """Return the color of each sample, `[n, 4]`; gray for a missing value."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgba_array

    column = columns.column(name)
    if columns.kinds[name] in ("text", "media"):
        raise InputError(f"`color` is {name}, a column of texts; expected one of few values")
    if columns.kinds[name] != "number":
        codes = codes_of(column)
        return to_rgba_array([*map(tint, range(codes.max() + 1)), MISSING])[codes]
    values = np.asarray(column, np.float64)
    is_known = np.isfinite(values)
    low, high = np.quantile(values[is_known], [0, 0.99]) if is_known.any() else (0, 1)
    ramp = LinearSegmentedColormap.from_list("ramp", RAMP)
    colors = ramp((values - low) / max(high - low, 1e-12))
    colors[~is_known] = to_rgba_array(MISSING)
    return colors
