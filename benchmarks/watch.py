"""Watch a folder over ten rounds of 500 images, in which two classes appear later.

    python -m benchmarks.watch --images fashion_mnist --data_dir data --seeds 3
    python -m benchmarks.watch --images FOLDER --teacher efficientnet_lite0 --each 150

Round 1 trains on eight of the classes; one class appears in round 4 and stays, another in round 7;
in round 10, a third of the images are of one old class. Rounds 2, 3, 5, 6, 8 and 9 hold no change,
so their alarms are false. Reports for each round how many images joined; how many of the images in
added clusters are of the two late classes, and how many images of late classes there are; whether
an earlier sample's number or cluster moved; and the alarms about drift, with the p-values of the
shares and of the number of high outlier scores. A seed draws the order of the classes and images.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.turns import header, row
from ssl_kd.vision.assignments import assignments_of
from ssl_kd.vision.data import ImageDataset, open_dataset
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.settings import VisionSettings
from ssl_kd_explore.watch import Watch

APPEARS, SKEWED, ROUNDS = {8: 4, 9: 7}, 10, 10  # place of a class -> its first round
COLUMNS = "round|joined|late of those in added clusters|late|moved|alarms|p-values".split("|")


def rounds(args: argparse.Namespace, seed: int, root: Path) -> Iterator[list[object]]:
    """Yield the cells of each round."""
    source = open_dataset(args.images, "train", root=args.data_dir, labels="folders")
    assert isinstance(source, ImageDataset) and source.labels is not None
    rng, images, before = np.random.default_rng(seed), root / "images", b""
    images.mkdir()
    order = rng.permutation(10)  # the classes, as they appear
    left = [rng.permutation(np.flatnonzero(source.labels == c)).tolist() for c in order]
    settings = VisionSettings(teacher=args.teacher, n_clusters="auto", baselines=False)
    settings = settings.replace(embeddings_dir=str(root / "embeddings"))
    watch = Watch(images, root / "runs", settings, {})
    for number in range(1, ROUNDS + 1):
        weights = np.array([float(APPEARS.get(place, 1) <= number) for place in range(10)])
        if number == SKEWED:
            weights[0] = (weights.sum() - 1) / 2  # a third of the images
        for place in rng.choice(10, args.each, p=weights / weights.sum()).tolist():
            file = images / f"{left[place].pop():06}.png"
            source.image(int(file.stem)).save(file)
            os.utime(file, (1e9, 1e9))  # not changed lately
        summary, _ = watch.advance()
        samples, newest = Samples(summary["run"]), summary["rounds"][-1]
        files, clusters = (samples.column(name)[-args.each :] for name in ("file", "cluster"))
        labels = source.labels[[int(Path(file).stem) for file in files]]
        is_late = np.isin(labels, order[list(APPEARS)])
        is_added = clusters >= samples.config["n_clusters"]
        after = assignments_of(samples.path).read_bytes()
        added = f"{(is_late & is_added).sum()} of {is_added.sum()}"
        moved, alarms = not after.startswith(before), ", ".join(newest["alarms"])
        p_values = f"{newest['drift']['p']:.2g} {newest['unusual']['p']:.2g}"
        yield [number, newest["joined"], added, is_late.sum(), moved, alarms or "-", p_values]
        before = after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", required=True, help="fashion_mnist, or FOLDER/train/<class>/*")
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--teacher", default="pixels")
    parser.add_argument("--each", type=int, default=500, help="images in a round")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    for seed in range(args.seeds):
        print(f"\nseed {seed}\n")
        header(*COLUMNS)
        with tempfile.TemporaryDirectory() as folder:
            for cells in rounds(args, seed, Path(folder)):
                row(*map(str, cells))


if __name__ == "__main__":
    main()
