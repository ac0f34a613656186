"""Watch a folder over ten rounds of 500 images, in which two classes appear later.

    python -m benchmarks.watch --images fashion_mnist --data_dir data --seeds 3
    python -m benchmarks.watch --images FOLDER --teacher efficientnet_lite0 --each 150

Round 1 trains on eight of the classes; one class appears in round 4 and stays, another in round 7;
in round 10, a third of the images are of one old class. Rounds 2, 3, 5, 6, 8 and 9 hold no change,
so their alarms are false. Reports for each round how many images joined, and how many were offered
in how many clusters; how many of the images in added clusters are of the two late classes
(precision), and how many of the images of late classes are in added clusters (recall); whether an
earlier sample's number or cluster moved; and the alarms about drift with the p-values of shares,
outlier scores and the number of high scores. A seed draws the order of the classes and the images.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.regret import table_line
from ssl_kd.datasets import ImageDataset, open_dataset
from ssl_kd.vision.assignments import assignments_of
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.workbench.watch import Watch

APPEARS, SKEWED, OFTEN, ROUNDS = {8: 4, 9: 7}, 10, 0, 10  # place of a class -> its first round
COLUMNS = "round|joined|offered|precision|recall|moved|alarms|p-values"


def rounds(args: argparse.Namespace, seed: int, root: Path) -> Iterator[list[str]]:
    """Yield the cells of each round."""
    source = open_dataset(args.images, "train", root=args.data_dir, labels="folders")
    assert isinstance(source, ImageDataset) and source.labels is not None
    rng = np.random.default_rng(seed)
    rows_of = [np.flatnonzero(source.labels == c) for c in rng.permutation(10)]
    left = [rng.permutation(rows).tolist() for rows in rows_of]
    folders: dict[str, Any] = {
        "runs_dir": str(root / "runs"),
        "embeddings_dir": str(root / "embeddings"),
    }
    settings = VisionSettings(**folders, teacher=args.teacher, n_clusters="auto", baselines=False)
    watched, before = Watch(root / "images", root / "runs" / "watch", settings, {}), b""
    for number in range(1, ROUNDS + 1):
        weights = np.array([float(APPEARS.get(place, 1) <= number) for place in range(10)])
        if number == SKEWED:
            weights[OFTEN] = (weights.sum() - 1) / 2  # a third of the images
        drawn = rng.choice(10, args.each, p=weights / weights.sum())
        for place in drawn.tolist():
            file = root / "images" / f"{left[place].pop():06}.png"
            source.image(int(file.stem)).save(file)
            os.utime(file, (1e9, 1e9))  # not changed lately
        about = watched.advance()[0]["rounds"][-1]
        samples = Samples(watched.runs()[number])
        files, clusters = (samples.column(name)[-args.each :] for name in ("file", "cluster"))
        labels = source.labels[[int(Path(file).stem) for file in files]]
        late = [rows_of[place][0] for place, first in APPEARS.items() if first <= number]
        is_late = np.isin(labels, source.labels[late])
        is_found = clusters >= samples.config["n_clusters"]  # in a cluster that was offered
        n_offered, n_found = args.each - about["joined"], (is_late & is_found).sum()
        after = assignments_of(samples.path).read_bytes()
        yield [
            str(number),
            str(about["joined"]),
            f"{n_offered} in {len(about['new_clusters'])}",
            f"{n_found} of {is_found.sum()}" if is_found.any() else "-",
            f"{n_found} of {is_late.sum()}" if late else "-",
            "no" if after.startswith(before) else "YES",
            ", ".join(about["alarms"]) or "-",
            " ".join(f"{p:.2g}" for p in _p_values(about)),
        ]
        before = after


def _p_values(about: dict) -> list[float]:
    if "drift" not in about:
        return []
    return [about["drift"]["p"], about["outliers"]["p"], about["outliers"]["p_unusual"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", required=True, help="fashion_mnist, or FOLDER/train/<class>/*")
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--teacher", default="pixels")
    parser.add_argument("--each", type=int, default=500, help="images in a round")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    for seed in range(args.seeds):
        print(f"\nseed {seed}\n\n{table_line(COLUMNS.split('|'))}\n{table_line(['---'] * 8)}")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "images").mkdir()
            for cells in rounds(args, seed, Path(folder)):
                print(table_line(cells), flush=True)


if __name__ == "__main__":
    main()
