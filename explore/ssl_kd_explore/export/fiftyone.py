"""Export to FiftyOne: write a `samples.json` that `fiftyone.Dataset.from_dir` reads.

The layout is `fiftyone.types.LegacyFiftyOneDataset`. Pictures are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from ssl_kd_explore.export.content import Content
from ssl_kd_explore.output_files import write_list


def write_fiftyone(content: Content, folder: Path, *, skip_missing: bool = False) -> None:
    """Write one FiftyOne sample per picture, with levels and label as Classifications.

    Numbers, truth values and texts become fields, and times become texts. The split becomes a tag,
    and so does `checked`.
    """
    content, files = content.with_pictures(skip_missing=skip_missing)
    content.write_decisions(folder)
    write_list(folder / "samples.json", _samples(content, files), '{"samples": [', "]}")


def _samples(content: Content, files: list[Path]) -> Iterator[dict[str, Any]]:
    for file, row in zip(files, content.records(), strict=True):
        sample = {"filepath": str(file), "tags": [row.pop("split")]}
        if row.pop("checked", False):
            sample["tags"].append("checked")
        confidence = row.pop("confidence")
        del row["file"]
        for level in content.samples.levels:
            sample[level] = _classification(str(row.pop(level)))
        sample["cluster"] = _classification(row.pop("cluster_name")) | {"confidence": confidence}
        if label := row.pop("label", None):
            sample["label"] = _classification(label)
        for name, value in row.items():
            if isinstance(value, Decimal):
                value = float(value)
            elif isinstance(value, date | time | timedelta):  # datetime is a date
                value = str(value)
            if isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value)):
                sample[name] = value
        yield sample


def _classification(label: str) -> dict[str, Any]:
    return {"_cls": "Classification", "label": label}
