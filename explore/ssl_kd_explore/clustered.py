"""Find or make the run of a data set, so that a feature file can be explored in one step."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as arrow
from pyarrow import parquet

from ssl_kd.core.errors import InputError
from ssl_kd.core.files import sha256_file
from ssl_kd.core.settings.early import DATASETS, dataset_path
from ssl_kd.vision.data.catalog import open_rows
from ssl_kd.vision.data.shards import shards_of
from ssl_kd.vision.data.tables import ROOT
from ssl_kd.vision.settings import VisionSettings

FRAMES = "explore-frames"  # folder of data frames, in RUNS_DIR


def settings_of(
    data: str, settings: VisionSettings, media: str | None = None
) -> tuple[VisionSettings, Path]:
    """Return settings that cluster a data set, and the run's folder `RUNS_DIR/explore-NAME-HASH`.

    The hash is of the paths, sizes and times of the data's files, and of all settings that affect
    the result. If the run was interrupted, the settings resume it. A column `media` that cannot
    be shown raises InputError, before the data are clustered.
    """
    if media is not None:
        columns = {name: getattr(settings, name) for name in ("column", "label_column", "labels")}
        open_rows(data, "train", media=media, **columns)
    name = data
    state = []
    settings = settings.replace(dataset=data)
    if data not in DATASETS:
        path = dataset_path(data).resolve()
        own = [Path(f).resolve() for f in (settings.runs_dir, settings.embeddings_root)]
        name = path.stem
        state = _states(path, own)
        settings = settings.replace(dataset=str(path))
    free = {*settings.free_on_resume, "resume", "run_name", "runs_dir", "device"}
    values = {k: v for k, v in settings.to_dict().items() if k.lower() not in free}
    digest = hashlib.sha256(json.dumps([state, values], sort_keys=True).encode()).hexdigest()
    readable = re.sub(r"[^\w.]+", "_", name).strip("._")[:40]
    folder = Path(settings.runs_dir) / f"explore-{readable}-{digest[:10]}"
    begun = (folder / "config.json").is_file()
    return settings.replace(run_name=folder.name, resume=begun), folder


def _states(path: Path, own: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return the path, size and time of a file and its shards, or of all files below a folder.

    Hidden files, and files below the folders `own` that lie in the folder, are left out, since they
    change while the data stay the same.
    """
    below = [folder for folder in own if folder.is_relative_to(path)]
    files = list(shards_of(path))
    if path.is_dir():
        files = [
            file
            for file in sorted(path.rglob("*"))
            if not file.is_dir()
            and not any(file.is_relative_to(folder) for folder in below)
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
    return [(str(file), file.lstat().st_size, file.lstat().st_mtime_ns) for file in files]


def write_frame(frame: Any, runs: str) -> Path:
    """Write a data frame to `RUNS_DIR/explore-frames`, unless it is there; return its path.

    Relative paths in its columns are relative to the current folder.

    Raises:
        InputError: the value is not a data frame of pandas, polars or pyarrow.
    """
    try:
        table = frame.to_arrow() if hasattr(frame, "to_arrow") else arrow.table(frame)  # polars
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the data is {type(frame).__name__}; expected a path or a data frame of pandas, "
            f"polars or pyarrow with a column of lists ({error})"
        ) from error
    metadata = {ROOT.encode(): os.fsencode(os.getcwd()), **(table.schema.metadata or {})}
    table = table.replace_schema_metadata(metadata)
    folder = Path(runs) / FRAMES
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".{os.getpid()}.parquet"
    try:
        parquet.write_table(table, new)
        path = folder / f"frame-{sha256_file(new)[:16]}.parquet"
        if not path.exists():  # else its time, and so the run's name, would change
            new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    return path
