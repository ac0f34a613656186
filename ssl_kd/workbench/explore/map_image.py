"""Draw the map of a run as a picture, for reports and programs."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont

from ssl_kd.errors import InputError
from ssl_kd.workbench.columns import Columns, codes_of, group_rows

GRAY, MARGIN = "#8b949e", 0.94  # as on the page (colors.js, plot.js)
RAMP = ("#3b4cc0", "#5b8dd6", "#86c5c2", "#d9d27a", "#f2a14a", "#c8362f")
STEPS = 63  # colors of the ramp
NUMBERED = 40  # clusters that get their number on the map, the largest ones
SMALLEST, LARGEST = 64, 4096  # pixels of a side


def map_image(
    places: NDArray[np.float32], columns: Columns, color: str = "cluster", width: int = 800
) -> Image.Image:
    """Draw samples at `places` `[n, 2]`, colored by a column, on `width` x `width` pixels."""
    if not SMALLEST <= width <= LARGEST:
        raise InputError(f"`width` is {width}; expected {SMALLEST} to {LARGEST} pixels")
    codes, colors = _color_codes(columns, color)
    side = 2 * width  # twice the size, for smooth edges
    order = np.random.default_rng(0).permutation(len(places))  # no cluster covers all others
    upright = places * np.array([MARGIN, -MARGIN], np.float32)  # rows of a picture go down
    pixels = ((1 + upright) / 2 * (side - 1)).astype(np.int32)
    x, y = pixels[order].T
    radius = min(max(0.2 * side / math.sqrt(len(places)), 1), side / 100)
    steps = np.arange(-int(radius), int(radius) + 1, dtype=np.int32)
    dots = [(dx, dy) for dx in steps for dy in steps if dx * dx + dy * dy <= radius * radius]
    at = np.stack([(y + dy) * side + x + dx for dx, dy in dots], 1)  # [n, pixels of a dot]
    canvas = np.full(side * side, len(colors), np.int32)
    canvas[at.ravel()] = np.repeat(codes[order], len(dots))  # a later sample covers earlier ones
    table = np.array([*map(ImageColor.getrgb, colors), (255, 255, 255)], np.uint8)
    image = Image.fromarray(table[canvas].reshape(side, side, 3)).reduce(2)
    if color == "cluster":
        _write_numbers(image, pixels / 2, codes_of(columns.column(color)))
    return image


def _color_codes(columns: Columns, name: str) -> tuple[NDArray[np.int64], list[str]]:
    """Return a code for each sample `[n]` and the color of each code; 0 is a missing value."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    from ssl_kd.report.figures import tint

    column = columns.column(name)
    if columns.kinds[name] in ("text", "media"):
        raise InputError(f"`color` is {name}, a column of texts; expected one of few values")
    if columns.kinds[name] == "number":
        values = np.asarray(column, np.float64)
        is_known = np.isfinite(values)
        low, high = np.quantile(values[is_known], [0, 0.99]) if is_known.any() else (0, 1)
        shares = np.nan_to_num(np.clip((values - low) / max(high - low, 1e-12), 0, 1))
        codes = np.where(is_known, 1 + np.round(shares * (STEPS - 1)), 0).astype(np.int64)
        ramp = LinearSegmentedColormap.from_list("ramp", RAMP)(np.linspace(0, 1, STEPS))
        return codes, [GRAY, *map(to_hex, ramp)]
    values = codes_of(column)
    used = np.flatnonzero(np.bincount(values[values >= 0]))
    codes = np.zeros(values.max(initial=-1) + 2, np.int64)  # by number; the last one is that of -1
    codes[used] = np.arange(1, len(used) + 1)
    return codes[values], [GRAY, *map(tint, used.tolist())]


def _write_numbers(
    image: Image.Image, pixels: NDArray[np.float64], clusters: NDArray[np.integer]
) -> None:
    """Write the numbers of the largest clusters at their sample nearest to the median."""
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(max(12, image.width // 50))
    groups = group_rows(clusters, np.arange(0, len(clusters), 1 + len(clusters) // 100_000))
    for cluster, rows in sorted(groups.items(), key=lambda item: -len(item[1]))[:NUMBERED]:
        members = pixels[rows]
        nearest = np.square(members - np.median(members, axis=0)).sum(1).argmin()
        at = (float(members[nearest, 0]), float(members[nearest, 1]))
        draw.text(at, str(cluster), "black", font, "mm", stroke_width=3, stroke_fill="white")
