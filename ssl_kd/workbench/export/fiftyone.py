"""Export to FiftyOne: write a `samples.json` that `fiftyone.Dataset.from_dir` reads.

The layout is `fiftyone.types.LegacyFiftyOneDataset`. Pictures are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssl_kd.workbench.export.content import Content, refuse_columns
from ssl_kd.workbench.output_files import new_folder, write_list

_OWN_FIELDS = ("id", "filepath", "tags", "metadata", "created_at", "last_modified_at")


def write_fiftyone(content: Content, out: Path, *, skip_missing: bool = False) -> Path:
    """Write one FiftyOne sample per picture, with levels and label as Classifications.

    Numbers become fields, and the split becomes a tag.

    Raises:
        InputError: `out` exists, pictures are missing, or a column has the name of a field that
            FiftyOne itself uses.
    """
    refuse_columns(content.columns, _OWN_FIELDS, "fiftyone")
    content, files = content.with_pictures(skip_missing=skip_missing)
    with new_folder(out) as folder:
        write_list(folder / "samples.json", _samples(content, files), '{"samples": [', "]}")
    return out


def _samples(content: Content, files: list[Path]) -> Iterator[dict[str, Any]]:
    levels = content.samples.levels
    for file, row in zip(files, content.records(), strict=True):
        sample = {"filepath": str(file), "tags": [row.pop("split")]}
        confidence = row.pop("confidence")
        del row["file"]
        for level in levels:
            sample[level] = _classification(row.pop(f"{level}_name"))
            del row[level]
        if sample["cluster"] is not None:
            sample["cluster"]["confidence"] = confidence
        if "label" in row:
            sample["label"] = _classification(row.pop("label"))
        for name, value in row.items():
            if isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value)):
                sample[name] = value
        yield sample


def _classification(label: str | None) -> dict[str, Any] | None:
    return {"_cls": "Classification", "label": label} if label else None
