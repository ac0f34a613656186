"""COCO: boxes that are known, each with its picture's cluster as the category."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as arrow
from PIL import Image, UnidentifiedImageError
from pyarrow import csv

from ssl_kd.cells import from_cell
from ssl_kd.errors import InputError
from ssl_kd.export.content import Content
from ssl_kd.export.registry import refuse_existing
from ssl_kd.files import atomic_write_json

COLUMNS = ("file", "x", "y", "width", "height")


def write_coco(
    content: Content, out: Path, *, boxes: Path | None = None, skip_missing: bool = False
) -> Path:
    """A file in COCO's form: pictures, categories (the clusters), and a box of each annotation.

    Clustering finds no boxes: they come from a detector or a person, and each has its picture's
    cluster. Pictures without a box, or in no cluster, have no annotation.

    Args:
        content: what goes out.
        out: a file that is not there.
        boxes: CSV with the columns file, x, y, width, height, in pixels from the upper left corner;
            several of a file are several rows.
        skip_missing: leave out pictures that are gone.

    Raises:
        InputError: no boxes, or boxes that are none or are of no picture that goes out.
    """
    if boxes is None:
        raise InputError(
            "coco holds boxes, and a clustering knows none: give them with --boxes FILE (CSV: "
            f"{','.join(COLUMNS)}), or export whole pictures as fiftyone, label-studio or parquet"
        )
    refuse_existing(out)
    known = _read(boxes)
    content, files = content.with_pictures(skip_missing=skip_missing)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    names = content.samples.column("file")
    for row, file in zip(content.rows.tolist(), files, strict=True):
        width, height = _size(file)
        images.append({"id": row, "file_name": str(names[row]), "width": width, "height": height})
        cluster = int(content.clusters[row])
        for box in known.get(str(names[row]), []) if cluster >= 0 else []:
            annotation = {"id": len(annotations) + 1, "image_id": row, "category_id": cluster + 1}
            shape = {"bbox": box, "area": box[2] * box[3], "iscrowd": 0}
            annotations.append(annotation | shape)
    if not annotations:
        raise InputError(
            f"{boxes} has no box of any picture that goes out: it names {next(iter(known), 'none')}"
            f", and they are called as {names[content.rows[0]]} is"
        )
    categories = [
        {"id": c + 1, "name": text, "supercategory": "cluster"}  # COCO's numbers begin at 1
        for c, text in content.cluster_names().items()
        if c >= 0
    ]
    info = {"description": f"clusters of {content.title}, by ssl_kd"}
    found = {"info": info, "images": images, "annotations": annotations, "categories": categories}
    atomic_write_json(out, found)
    return out


def _size(file: Path) -> tuple[int, int]:
    try:
        with Image.open(file) as image:
            return image.size
    except UnidentifiedImageError as error:
        raise InputError(f"{file} is no picture by now: put it back, or take it out") from error


def _read(path: Path) -> dict[str, list[list[float]]]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    kinds = {name: arrow.float64() for name in COLUMNS[1:]} | {"file": arrow.string()}
    try:
        parsed = csv.ParseOptions(newlines_in_values=True)
        table = csv.read_csv(path, None, parsed, csv.ConvertOptions(column_types=kinds))
    except arrow.ArrowInvalid as error:
        raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if lacking := [name for name in COLUMNS if name not in table.column_names]:
        raise InputError(f"{path} has no column {lacking[0]}: expected {', '.join(COLUMNS)}")
    found: dict[str, list[list[float]]] = {}
    for number, row in enumerate(table.select(list(COLUMNS)).to_pylist(), 2):
        box = [row[name] for name in COLUMNS[1:]]
        wrong = any(value is None or not math.isfinite(value) for value in box)
        if wrong or box[2] <= 0 or box[3] <= 0:
            raise InputError(
                f"{path}, line {number}: x, y, width, height are {box}, expected finite numbers, "
                "the last two above 0"
            )
        found.setdefault(from_cell(row["file"] or ""), []).append(box)
    return found
