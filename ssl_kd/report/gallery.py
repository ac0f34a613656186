"""Small pictures of the most typical samples of each cluster."""

import base64
import io
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ssl_kd.datasets.decode import decoded
from ssl_kd.report.assignments import Assignments
from ssl_kd.report.results import RunResults
from ssl_kd.vision.model import has_pictures
from ssl_kd.vision.samples import Samples

logger = logging.getLogger(__name__)

Images = Callable[[list[int]], list[Image.Image | None]]
MAX_CLUSTERS, MAX_PICTURES, N_DOUBTFUL = 100, 600, 14


def run_images(run_dir: Path) -> Images | None:
    """Return the pictures of a finished run's training rows, for a report written later.

    Args:
        run_dir: The run folder; its settings say where the data set lies.

    Returns:
        A function that opens the data set when it is called, and raises what that raises; None
        where the run learned from features without images, or from text.
    """
    run = RunResults.read(Path(run_dir))
    if run.is_language or not has_pictures(run.metrics):
        return None

    def images(rows: list[int]) -> list[Image.Image | None]:
        samples = Samples(run_dir)
        first = samples.splits[run.split].start
        return [decoded(samples.image, first + row) for row in rows]

    return images


def gallery(
    run: RunResults,
    images: Images | None,
    sizes: Sequence[int],
    colors: Sequence[str],
    label_names: dict[str, str],
) -> dict[str, Any]:
    """Return what the page shows of each cluster.

    Args:
        run: The run folder; `typical` of its arrays are row numbers of the training split.
        images: Returns the pictures of training rows, None for one that cannot be read; or None.
        sizes: Size of each cluster.
        colors: Color of each cluster.
        label_names: Name of each label as written in `assignments.csv`.

    Returns:
        `clusters`, `hidden` (number of clusters left out), `doubtful` (the samples of the lowest
        confidence), and `missing`: the sentence to show where there are no pictures.
    """
    nothing: dict[str, Any] = {"clusters": [], "hidden": 0, "doubtful": []}
    typical = run.arrays.get("typical")
    if images is None:
        return nothing | {"missing": "There are no pictures: this data has features, not images."}
    if typical is None or not typical.size:
        return nothing | {"missing": "There are no pictures: arrays.npz does not name any."}
    typical = typical[:, : max(1, min(12, MAX_PICTURES // min(len(typical), MAX_CLUSTERS)))]
    counts = [int(sizes[k]) if k < len(sizes) else -1 for k in range(len(typical))]
    shown = sorted(sorted(range(len(typical)), key=lambda k: -counts[k])[:MAX_CLUSTERS])
    rows_of = {k: [int(r) for r in typical[k] if r >= 0] if counts[k] else [] for k in shown}
    doubtful = _least_confident(run.assignments)
    rows = [row for k in shown for row in rows_of[k]] + doubtful
    try:
        read = zip(rows, images(rows), strict=True)
        pictures = {row: thumbnail(image) for row, image in read if image is not None}
    except Exception as error:  # the images may no longer exist; the rest of the page remains
        logger.warning("the report has no pictures: %s", error)
        return nothing | {"missing": f"There are no pictures: {type(error).__name__}: {error}"}
    if lost := len({*rows} - {*pictures}):
        logger.warning("%d of %d pictures cannot be read", lost, len({*rows}))
    if not pictures:
        return nothing | {"missing": "There are no pictures: none of them can be read."}
    samples = dict(zip(rows, run.assignments.rows(rows), strict=True))

    def named(wanted: list[int], *columns: str) -> list[dict[str, str]]:
        names = {
            row: [
                samples[row].get("file", f"row {row}"),
                *(f"{c} {samples[row][c]}" for c in columns),
            ]
            for row in wanted
            if row in pictures
        }
        return [pictures[row] | {"name": ", ".join(parts)} for row, parts in names.items()]

    members: dict[str, Counter[str]] = {}
    for (cluster, label), count in run.assignments.members.items():
        if name := label_names.get(label):
            members.setdefault(cluster, Counter())[name] += count
    new = {c["cluster"] for c in run.metrics.get("extended", {}).get("new_clusters", [])}
    clusters = [
        _caption(k, counts[k], members.get(str(k)), k in new)
        | {
            "size": counts[k],
            "color": colors[k] if k < len(colors) else "#808080",
            "pictures": named(rows_of[k]),
        }
        for k in shown
    ]
    return {
        "clusters": clusters,
        "hidden": len(typical) - len(shown),
        "columns": typical.shape[1] if typical.shape[1] <= 8 else -(-typical.shape[1] // 2),
        "doubtful": named(doubtful, "cluster", "confidence"),
    }


def _caption(cluster: int, size: int, labels: Counter[str] | None, new: bool) -> dict[str, Any]:
    """Return the title of a cluster, and a line on its size and classes."""
    title = f"Cluster {cluster}" + (" (new)" if new else "")
    about = f"{size:,} image{'s' if size != 1 else ''}" if size >= 0 else ""
    if labels:
        (name, count), total = labels.most_common(1)[0], labels.total()
        title += f" · {name}" if count >= 0.5 * total else " · mixed"
        about += f", {100 * count / total:.0f} % of them {name}"
        others = [n for n, c in labels.most_common(3)[1:] if c >= 0.1 * total]
        about += f"; also {', '.join(others)}" if others else ""
    return {"title": title, "about": about}


def _least_confident(assignments: Assignments) -> list[int]:
    """Return the rows of the lowest confidence; none where all are equal."""
    values = assignments.confidence
    if values is None or not len(values) or not np.nanmin(values) < np.nanmax(values):
        return []
    return [int(row) for row in np.argsort(values, kind="stable")[:N_DOUBTFUL]]


def thumbnail(image: Image.Image) -> dict[str, str]:
    """Return the picture as a data URI of a few kilobytes."""
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
