"""Draw the figure of docs/start.md from a finished run.

`make train`, then

python -m benchmarks.picture runs/latest docs/digits.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ssl_kd.core.colors import tint
from ssl_kd.vision.data import FeatureDataset, open_dataset


def picture(run: Path) -> Figure:
    """Draw the map of the embeddings colored by cluster, and typical images of each cluster."""
    with np.load(run / "arrays.npz") as file:
        places, clusters, typical = file["map"], file["map_cluster"], file["typical"]
    metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    dataset = open_dataset(metrics["dataset"]["name"], "train")
    if isinstance(dataset, FeatureDataset) or dataset.kind != "image":
        raise SystemExit(f"{run} was trained on {dataset.kind}, not images: use a run on images")

    figure = Figure(figsize=(10, 4.4), layout="constrained", facecolor="white")
    left, right = figure.add_gridspec(1, 2, width_ratios=(1.15, 1))
    axes = figure.add_subplot(left)
    axes.scatter(*places.T, s=9, c=[tint(k) for k in clusters], linewidths=0)
    axes.set(xticks=[], yticks=[], aspect="equal")
    n = metrics["dataset"]["n_train"]
    axes.set_title(f"{n:,} images, clustered without a label", fontsize=11)
    axes.spines[:].set_visible(False)

    grid = right.subgridspec(*typical.shape)
    for k, rows in enumerate(typical):
        for column, row in enumerate(rows):
            cell = figure.add_subplot(grid[k, column])
            cell.set(xticks=[], yticks=[])
            for spine in cell.spines.values():
                spine.set(color=tint(k), linewidth=1.5)
            if row >= 0:
                cell.imshow(np.asarray(dataset.sample(int(row))), cmap="gray_r")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the map and typical images of a run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("png", type=Path)
    args = parser.parse_args()
    picture(args.run).savefig(args.png, dpi=110)


if __name__ == "__main__":
    main()
