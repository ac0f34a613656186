"""VLM4Cluster's cache of features: one `.npz` a split, where that benchmark looks for it."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ssl_kd.export.content import Content
from ssl_kd.export.place import new_folder

ROWS = 65_536
FOLDER = Path("feature_cache", "common", "image")


def write_vlm4cluster(content: Content, out: Path, *, model: str | None = None) -> Path:
    """`feature_cache/common/image/DATASET__SPLIT__MODEL__raw_image.npz`, below the data's root.

    Each has `features` float32 `[m, d]`, `labels` int64 `[m]` (none: `[0]`), `has_labels` bool
    `[1]` and `sample_indices` int64 `[m]`, the samples' places in their split.

    Args:
        content: what goes out.
        out: a folder that is not there.
        model: what the benchmark calls the features, as `laion400m__vit-b-32`; None: the teacher.

    Raises:
        InputError: there is a folder; FileNotFoundError: the embeddings are gone.

    References:
        VLM4Cluster, https://github.com/hyw1008/VLM4Cluster, `vlm4cluster/methods/feature_cache.py`.
    """
    samples = content.samples
    splits = np.array(content.split_of(content.rows))
    dataset = Path(str(samples.settings["DATASET"])).name
    labels = _labels(content)
    with new_folder(out) as folder:
        (folder / FOLDER).mkdir(parents=True)
        for split in dict.fromkeys(splits.tolist()):
            mine = splits == split
            rows = content.rows[mine]
            called = model or samples.store(split).fingerprint.teacher
            key = "__".join(_token(part) for part in (dataset, split, *called.split("__")))
            own = None if labels is None else labels[mine]
            _write(folder / FOLDER / f"{key}__raw_image.npz", content, rows, split, own)
    return out


def _labels(content: Content) -> NDArray[np.int64] | None:
    """The classes as numbers, where every sample that goes out has one."""
    if "label" not in content.samples.table.column_names:
        return None
    texts = content.samples.column("label")
    known = sorted({text for text in texts if text})
    own = [text or "" for text in texts[content.rows]]
    if not all(own):
        return None
    return np.searchsorted(np.array(known, dtype=object), np.array(own, dtype=object))


def _write(
    path: Path,
    content: Content,
    rows: NDArray[np.int64],
    split: str,
    labels: NDArray[np.int64] | None,
) -> None:
    width = content.samples.embeddings(rows[:1]).shape[1]
    arrays = {
        "labels": np.zeros(0, np.int64) if labels is None else labels.astype(np.int64),
        "has_labels": np.array([labels is not None]),
        "sample_indices": rows - content.samples.splits[split].start,
    }
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        with archive.open("features.npy", "w", force_zip64=True) as file:
            shape = {"descr": "<f4", "fortran_order": False, "shape": (len(rows), width)}
            npy.write_array_header_1_0(file, shape)
            for start in range(0, len(rows), ROWS):
                x = content.samples.embeddings(rows[start : start + ROWS])
                file.write(np.ascontiguousarray(x.numpy(), "<f4").tobytes())
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                npy.write_array(file, array, allow_pickle=False)


def _token(text: str) -> str:
    """A part of the file's name, as that benchmark spells it."""
    found = re.sub(r"[/\\ :=]", "-", text.strip().lower()).replace(".", "p")
    return "-".join(part for part in found.split("-") if part)
