"""Draw the picture at the top of the README: all images of a run, in the colors of their clusters.

`make photos`, then

python -m benchmarks.mosaic runs/latest docs/photos.jpg
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw
from scipy.optimize import linear_sum_assignment
from scipy.stats import rankdata

from ssl_kd.core.colors import tint
from ssl_kd.vision.samples import Samples

TILE = 64  # pixels of a side
MARGIN = 4  # pixels between a picture and the border of its tile
MOST = 1000  # images that are drawn
ASPECT = 1.75  # width of the mosaic by its height
PALE = 0.72  # share of white in the color of a tile
TOGETHER = 0.5  # by how much a picture is moved from its place on the map to its cluster's center


def mosaic(run: Path) -> Image.Image:
    """Draw each training image near its neighbors on the map, on its cluster's color."""
    samples = Samples(run)
    with np.load(run / "arrays.npz") as file:
        places, clusters, rows = file["map"], file["map_cluster"], file["map_row"]
    if len(rows) > MOST or not samples.metrics["dataset"]["pictured"]:
        raise SystemExit(f"{run} has {len(rows)} samples: expected a run on at most {MOST} images")
    n_rows = round(math.sqrt(len(places) / ASPECT))
    n_columns = math.ceil(len(places) / n_rows)
    canvas = Image.new("RGB", (n_columns * TILE, n_rows * TILE), "white")
    draw = ImageDraw.Draw(canvas)
    cells = cells_of(places, clusters, n_rows, n_columns)
    for row, cluster, cell in zip(rows, clusters, cells, strict=True):
        y, x = (int(i) * TILE for i in divmod(cell, n_columns))
        draw.rectangle((x, y, x + TILE - 1, y + TILE - 1), fill=pale(tint(int(cluster))))
        file = samples.image_file(int(row))
        assert file is not None
        with Image.open(file) as opened:
            picture = opened.convert("RGBA")
        picture = picture.crop(picture.getchannel("A").getbbox())  # without transparent borders
        side = TILE - 2 * MARGIN
        scale = side / max(picture.size)
        size = [max(1, round(length * scale)) for length in picture.size]
        picture = picture.resize((size[0], size[1]), Image.Resampling.LANCZOS)
        canvas.paste(picture, (x + (TILE - size[0]) // 2, y + (TILE - size[1]) // 2), picture)
    return canvas


def cells_of(
    places: NDArray[np.float32], clusters: NDArray[np.int64], n_rows: int, n_columns: int
) -> NDArray[np.int64]:
    """Return the number of the cell, from the top left one on, of each sample `[n]`.

    Args:
        places: coordinates on the map, `[n, 2]`.
        clusters: cluster of each sample, `[n]`.
        n_rows: rows of the grid.
        n_columns: columns of the grid; it must have at least n cells.
    """
    even = np.stack([rankdata(axis) / len(places) for axis in places.T], 1)  # fills the grid
    centers = np.stack([even[clusters == k].mean(0) for k in clusters])
    wanted = (1 - TOGETHER) * even + TOGETHER * centers
    wanted = (wanted - wanted.min(0)) / np.ptp(wanted, 0) * (n_columns - 1, n_rows - 1)
    y, x = np.divmod(np.arange(n_rows * n_columns), n_columns)
    distance = (wanted[:, :1] - x) ** 2 + (wanted[:, 1:] - y) ** 2
    return linear_sum_assignment(distance)[1]


def pale(color: str) -> tuple[int, ...]:
    """Return a color `#rrggbb` mixed with white."""
    return tuple(round(255 * PALE + (1 - PALE) * v) for v in ImageColor.getrgb(color))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw all images of a run by cluster.")
    parser.add_argument("run", type=Path)
    parser.add_argument("jpg", type=Path)
    args = parser.parse_args()
    mosaic(args.run).save(args.jpg, quality=88, optimize=True)


if __name__ == "__main__":
    main()
