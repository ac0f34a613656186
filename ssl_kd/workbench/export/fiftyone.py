"""FiftyOne: a folder that `fiftyone.Dataset.from_dir` reads, with the pictures where they are.

Its form is `fiftyone.types.FiftyOneDataset`: `metadata.json`, the fields, and `samples.json`, the
samples, both as MongoDB's extended JSON. It is of version 1.0; later ones bring it up to theirs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssl_kd.workbench.export.content import RECORDS, Content, refuse_columns
from ssl_kd.workbench.place import new_folder, write_list

VERSION = "1.0.0"
_FIELDS, _LABEL = "fiftyone.core.fields.", "fiftyone.core.labels.Classification"


def write_fiftyone(content: Content, out: Path, *, skip_missing: bool = False) -> Path:
    """Classifications `cluster`, `label`, `level_5` ..., numbers as they are, the split as a tag.

    Raises:
        InputError: there is a folder, or pictures are gone.
    """
    refuse_columns(content.columns, [field["name"] for field in _DEFAULT], "fiftyone")
    content, files = content.with_pictures(skip_missing=skip_missing)
    labels = [*content.samples.levels]
    if "label" in content.samples.table.column_names:
        labels.append("label")
    first = _first_values(content)
    others = [
        name
        for name, value in first.items()
        if name not in (*labels, "confidence", "split", "file")
        and name not in [f"{level}_name" for level in labels]
        and isinstance(value, int | float | str)
    ]
    kinds = {int: "IntField", float: "FloatField", str: "StringField", bool: "BooleanField"}
    fields = [*_DEFAULT, *(_field(n, "EmbeddedDocumentField", _LABEL, _CLASSES) for n in labels)]
    fields += [_field(name, kinds[type(first[name])]) for name in others]
    metadata = {
        "name": content.title,
        "version": VERSION,
        "media_type": "image",
        "sample_fields": fields,
        "frame_fields": [],
        "info": {"run": str(content.samples.path.resolve())},
        "tags": [],
        "classes": {"cluster": list(content.cluster_names().values())},
        "default_classes": [],
        "mask_targets": {},
        "default_mask_targets": {},
        "skeletons": {},
        "saved_views": [],
        "workspaces": [],
        "annotation_runs": {},
        "brain_methods": {},
        "evaluations": {},
        "runs": {},
        "group_media_types": {},
    }
    with new_folder(out) as folder:
        (folder / "metadata.json").write_text(json.dumps(metadata), encoding="utf-8")
        samples = _samples(content, files, labels, others)
        write_list(folder / "samples.json", samples, '{"samples": [', "]}")
    return out


def _first_values(content: Content) -> dict[str, Any]:
    """Return each column's first value that is not null; columns of nulls alone are left out."""
    first: dict[str, Any] = {}
    for batch in content.batches(RECORDS):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if name not in first and len(values := column.drop_null()):
                first[name] = values[0].as_py()
    return first


def _samples(
    content: Content, files: list[Path], labels: list[str], others: list[str]
) -> Iterator[dict[str, Any]]:
    run = str(content.samples.path.resolve())
    for number, file, row in zip(content.rows, files, content.records(), strict=True):
        id = hashlib.sha256(f"{run}\0{number}".encode()).hexdigest()
        sample: dict[str, Any] = {
            "_id": {"$oid": id[:24]},
            "filepath": str(file),
            "tags": [row["split"]],
            "metadata": None,
            "_media_type": "image",
            "_rand": int(id[24:36], 16) / 16**12,
        }
        for place, name in enumerate(labels):
            text = row["label"] if name == "label" else row[f"{name}_name"]
            confidence = row["confidence"] if name == "cluster" else None
            oid = hashlib.sha256(f"{id}{place}".encode()).hexdigest()[:24]
            sample[name] = text and _classification(oid, text, confidence)
        for name in others:
            value = row[name]
            odd = isinstance(value, float) and not math.isfinite(value)
            sample[name] = None if odd else value
        yield sample


def _classification(oid: str, label: str, confidence: float | None) -> dict[str, Any]:
    found = {"_id": {"$oid": oid}, "_cls": "Classification", "tags": [], "label": label}
    return found if confidence is None else {**found, "confidence": confidence}


def _field(
    name: str,
    kind: str,
    document: str | None = None,
    fields: list[dict[str, Any]] | None = None,
    *,
    subfield: str | None = None,
    stored: str | None = None,
) -> dict[str, Any]:
    return {
        "name": name,
        "ftype": _FIELDS + kind,
        "embedded_doc_type": document,
        "subfield": subfield and _FIELDS + subfield,
        "fields": fields or [],
        "db_field": stored or name,
        "description": None,
        "info": None,
        "read_only": False,
        "created_at": None,
    }


_CLASSES = [
    _field("id", "ObjectIdField", stored="_id"),
    _field("tags", "ListField", subfield="StringField"),
    _field("label", "StringField"),
    _field("confidence", "FloatField"),
    _field("logits", "VectorField"),
]
_DEFAULT = [
    _field("id", "ObjectIdField", stored="_id"),
    _field("filepath", "StringField"),
    _field("tags", "ListField", subfield="StringField"),
    _field(
        "metadata",
        "EmbeddedDocumentField",
        "fiftyone.core.metadata.ImageMetadata",
        [
            _field("size_bytes", "IntField"),
            _field("mime_type", "StringField"),
            _field("width", "IntField"),
            _field("height", "IntField"),
            _field("num_channels", "IntField"),
        ],
    ),
    _field("created_at", "DateTimeField"),
    _field("last_modified_at", "DateTimeField"),
]
