"""Small pictures of the most typical samples of each cluster."""

import base64
import io
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ssl_kd.core.colors import tint
from ssl_kd.core.images.decode import decoded
from ssl_kd.vision.model import has_pictures
from ssl_kd.vision.report.decided import Decided
from ssl_kd.vision.report.results import RunResults
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.sources import SourceChanged

logger = logging.getLogger(__name__)

Images = Callable[[list[int]], list[Image.Image | None]]
"""A function from rows of the shown split to their pictures, None for one that cannot be read."""

MAX_CLUSTERS, MAX_PICTURES = 100, 600


def run_images(run_dir: Path) -> Images | None:
    """Return a function that loads pictures of a finished run, or None if the run has no pictures.

    The function opens the data set when it is called, and raises if that fails.
    """
    run = RunResults.read(Path(run_dir))
    if run.is_language or not has_pictures(run.metrics):
        return None

    def images(rows: list[int]) -> list[Image.Image | None]:
        samples = Samples(run_dir)
        first = samples.splits[run.split].start

        def picture(row: int) -> Image.Image | None:
            try:
                return decoded(samples.image, row)
            except SourceChanged as error:  # the other pictures are shown
                logger.warning("a picture is left out: %s", error)
                return None

        return [picture(first + row) for row in rows]

    return images


def gallery(
    run: RunResults, images: Images | None, sizes: Mapping[int, int], decided: Decided | None
) -> dict[str, Any]:
    """Return caption, color and typical pictures of each cluster, as the page shows them.

    `hidden` counts the clusters that are left out; `missing` says why there are no pictures.
    """
    if images is None:
        return _no_pictures("this data has features, not images")
    typical = _typical(run, decided)
    if not typical:
        return _no_pictures("arrays.npz does not name typical samples")
    n_pictures = max(1, min(12, MAX_PICTURES // min(len(typical), MAX_CLUSTERS)))
    filled = [k for k in typical if sizes.get(k) != 0]
    shown = sorted(sorted(filled, key=lambda k: -sizes.get(k, -1))[:MAX_CLUSTERS])
    rows_of = {k: typical[k][:n_pictures] for k in shown}
    rows = [row for k in shown for row in rows_of[k]]
    try:
        loaded = zip(rows, images(rows), strict=True)
        pictures = {row: thumbnail(image) for row, image in loaded if image is not None}
    except Exception as error:  # the images may no longer exist; the rest of the page remains
        logger.warning("the report has no pictures: %s", error)
        return _no_pictures(f"{type(error).__name__}: {error}")
    if lost := len({*rows} - {*pictures}):
        logger.warning(
            "the report lacks %d of %d pictures: unreadable or changed", lost, len({*rows})
        )
    if not pictures:
        return _no_pictures("none of them can be read")
    samples = run.assignments
    for row, picture in pictures.items():
        is_listed = row < samples.num_rows
        picture["name"] = str(samples.column("file")[row]) if is_listed else f"row {row}"
    labels = _label_counts(run)
    new = {c["cluster"] for c in run.metrics.get("extended", {}).get("new_clusters", [])}
    clusters = [
        {
            **_caption(_title(k, k in new, decided), sizes.get(k), labels.get(k)),
            "color": tint(k),
            "pictures": [pictures[row] for row in rows_of[k] if row in pictures],
        }
        for k in shown
    ]
    columns = max(len(rows_of[k]) for k in shown)
    return {
        "clusters": [cluster for cluster in clusters if cluster["pictures"]],
        "hidden": len(filled) - len(shown),
        "columns": columns if columns <= 8 else -(-columns // 2),
    }


def _typical(run: RunResults, decided: Decided | None) -> dict[int, list[int]]:
    """Return the rows of typical samples of each cluster, best first."""
    if decided is not None:
        return decided.typical(np.asarray(run.assignments["confidence"]))
    rows = run.arrays.get("typical", np.empty((0, 0), np.int64))
    return {k: [int(row) for row in of_cluster if row >= 0] for k, of_cluster in enumerate(rows)}


def _title(cluster: int, is_new: bool, decided: Decided | None) -> str:
    name = decided.names.get(cluster) if decided is not None else None
    title = f"{name} (cluster {cluster})" if name else f"Cluster {cluster}"
    return title + (" (new)" if is_new else "")


def _no_pictures(reason: str) -> dict[str, Any]:
    return {"clusters": [], "missing": f"There are no pictures: {reason}."}


def _label_counts(run: RunResults) -> dict[int, Counter[str]]:
    """Count the samples of each class in each cluster; unknown labels are left out."""
    counts: dict[int, Counter[str]] = {}
    if "label" not in run.assignments.column_names:
        return counts
    class_names = run.metrics.get("dataset", {}).get("class_names") or []
    names = {str(number): str(name) for number, name in enumerate(class_names)}
    pairs = run.assignments.group_by(["cluster", "label"]).aggregate([([], "count_all")])
    for pair in pairs.to_pylist():
        label = str(pair["label"] or "-1")
        if label != "-1":
            name = names.get(label, label)
            counts.setdefault(pair["cluster"], Counter())[name] += pair["count_all"]
    return counts


def _caption(title: str, size: int | None, labels: Counter[str] | None) -> dict[str, Any]:
    """Return the title of a cluster, and a line with its size and most frequent labels."""
    about = "" if size is None else f"{size:,} image{'s' if size != 1 else ''}"
    if labels:
        (name, count), total = labels.most_common(1)[0], labels.total()
        title += f" · {name}" if count >= 0.5 * total else " · mixed"
        about += f", {100 * count / total:.0f} % of them {name}"
        others = [n for n, c in labels.most_common(3)[1:] if c >= 0.1 * total]
        about += f"; also {', '.join(others)}" if others else ""
    return {"title": title, "about": about}


def strip(samples: Samples, rows: list[int]) -> list[dict[str, str]]:
    """Return small pictures of samples, named by their files, without those that are unreadable."""
    images = [decoded(samples.image, row) for row in rows]
    names = [samples.table.column("file")[row].as_py() for row in rows]
    named = zip(names, images, strict=True)
    return [thumbnail(image) | {"name": name} for name, image in named if image is not None]


def thumbnail(image: Image.Image) -> dict[str, str]:
    """Return a picture as a data URI of a few kilobytes, with its kind: `tiny` or `photo`."""
    tiny = max(image.size) <= 32
    small = image.convert("L" if image.mode in ("L", "1") else "RGB")
    target = io.BytesIO()
    if tiny:
        small.save(target, "PNG", optimize=True)
    else:
        small.thumbnail((96, 96))
        small.save(target, "JPEG", quality=78)
    kind = "png" if tiny else "jpeg"
    data = base64.b64encode(target.getvalue()).decode()
    return {"source": f"data:image/{kind};base64,{data}", "kind": "tiny" if tiny else "photo"}
