"""A file for embedding-atlas: the table, a map or the vectors, neighbours, and small pictures."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from torch import Tensor

from ssl_kd.datasets import UnreadableImage
from ssl_kd.errors import InputError, printable
from ssl_kd.export.content import Content, refuse_columns
from ssl_kd.export.table import stream
from ssl_kd.guard.finite import safe_normalize

logger = logging.getLogger(__name__)

ROWS = 4096
NEIGHBOURS = 15
PIXELS = 96
_NEAR = arrow.struct(
    [("ids", arrow.list_(arrow.int64())), ("distances", arrow.list_(arrow.float32()))]
)
_IMAGE = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])


def write_atlas(content: Content, out: Path, *, skip_missing: bool = False) -> Path:
    """Parquet with the columns that `embedding-atlas FILE` reads.

    `neighbors` has the nearest samples that go out and their cosine distances, `image` a picture of
    96 pixels, where there are pictures. `x` and `y` are the map where it is given
    (`Content.columns`); where it is not, `vector` has the embeddings, of which it makes one.

    Args:
        content: what goes out.
        out: a file that is not there.
        skip_missing: no picture for those that are gone.

    Raises:
        InputError: there is a file, or pictures are gone; FileNotFoundError: the embeddings are.
    """
    refuse_columns(content.columns, ("vector", "neighbors", "image"), "embedding-atlas")
    return stream(_batches(content, skip_missing), out)


def has_map(content: Content) -> bool:
    """Whether a map was given."""
    return {"x", "y"} <= content.columns.keys()


def _batches(content: Content, skip_missing: bool) -> Iterator[arrow.RecordBatch]:
    places = np.full(len(content.samples), -1)
    places[content.rows] = np.arange(len(content))
    near = content.samples.nearest(NEIGHBOURS, dict.fromkeys(content.split_of(content.rows)))
    gone: list[int] = []
    for at, batch in zip(range(0, len(content), ROWS), content.batches(ROWS), strict=True):
        rows = content.rows[at : at + ROWS]
        found = {name: batch.column(name) for name in batch.schema.names}
        x = content.samples.embeddings(rows)
        if not has_map(content):
            flat = arrow.array(x.numpy().ravel(), arrow.float32())
            found["vector"] = arrow.FixedSizeListArray.from_arrays(flat, x.shape[1])
        found["neighbors"] = _near(content, near[rows], places, x)
        if content.pictured:
            images = [_thumbnail(content, int(row), gone) for row in rows]
            found["image"] = arrow.array(images, _IMAGE)
        if gone and not skip_missing:
            name = printable(str(content.samples.column("file")[gone[0]]))
            raise InputError(
                f"{len(gone)} of the first {at + len(rows)} pictures are gone, {name} first: put "
                "them back, or go on without them: --skip_missing"
            )
        yield arrow.RecordBatch.from_pydict(found)
    if gone:
        logger.warning("%d of %d pictures are gone; their rows have none", len(gone), len(content))


def _near(
    content: Content, near: NDArray[np.int64], places: NDArray[np.int64], x: Tensor
) -> arrow.Array:
    """The neighbours by their places in the file, with distances; those that stay are left out."""
    others, inverse = np.unique(near[near >= 0], return_inverse=True)
    known = safe_normalize(content.samples.embeddings(others)).numpy()
    rows = np.repeat(np.arange(len(near)), (near >= 0).sum(1))
    apart = np.zeros(near.shape, np.float32)
    if len(others):
        own = safe_normalize(x).numpy()[rows]
        apart[near >= 0] = 1 - np.einsum("ij,ij->i", own, known[inverse.ravel()])
    found = []
    for own, distances in zip(near, apart, strict=True):
        kept = (own >= 0) & (places[own] >= 0)
        far = np.maximum(distances[kept], 0).tolist()
        found.append({"ids": places[own[kept]].tolist(), "distances": far})
    return arrow.array(found, _NEAR)


def _thumbnail(content: Content, row: int, gone: list[int]) -> dict[str, object] | None:
    try:
        image = content.samples.image(row)
    except (FileNotFoundError, UnreadableImage):
        gone.append(row)
        return None
    if image is None:
        return None
    image = image.convert("RGB")
    image.thumbnail((PIXELS, PIXELS))
    data = io.BytesIO()
    image.save(data, "JPEG", quality=85)
    return {"bytes": data.getvalue(), "path": str(content.samples.column("file")[row])}
