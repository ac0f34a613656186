"""The formats by name: what each writes, and what reads it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssl_kd.errors import InputError
from ssl_kd.export.atlas import has_map, write_atlas
from ssl_kd.export.cards import write_dataset, write_model
from ssl_kd.export.coco import write_coco
from ssl_kd.export.content import Content
from ssl_kd.export.fiftyone import write_fiftyone
from ssl_kd.export.folders import write_folders
from ssl_kd.export.label_studio import write_label_studio
from ssl_kd.export.table import write_parquet
from ssl_kd.export.vlm4cluster import write_vlm4cluster
from ssl_kd.settings import nearest


@dataclass(frozen=True)
class Format:
    """One way out.

    Args:
        what: in a few words.
        write: (content, out, **options) -> what it wrote.
        name: of what it writes where no other is given.
        options: those that it takes.
        reads: (content, out) -> how it is read.
    """

    what: str
    write: Callable[..., Path]
    name: str
    options: tuple[str, ...] = ()
    reads: Callable[[Content, Path], str] = lambda content, out: ""


def _atlas_command(content: Content, out: Path) -> str:
    how = "--x x --y y" if has_map(content) else "--vector vector"
    picture = " --image image" if content.pictured else ""
    return f"embedding-atlas {shlex.quote(str(out))} {how} --neighbors neighbors{picture}"


FORMATS: Mapping[str, Format] = {
    "parquet": Format(
        "a row for each sample, with everything known of it",
        write_parquet,
        "clusters.parquet",
        reads=lambda content, out: f"pandas.read_parquet({str(out)!r})",
    ),
    "folders": Format(
        "a folder of links for each cluster", write_folders, "folders", ("link", "skip_missing")
    ),
    "fiftyone": Format(
        "a data set of FiftyOne",
        write_fiftyone,
        "fiftyone",
        ("skip_missing",),
        lambda content, out: (
            f"fiftyone.Dataset.from_dir({str(out)!r}, fiftyone.types.FiftyOneDataset)"
        ),
    ),
    "label-studio": Format(
        "tasks of Label Studio with predictions",
        write_label_studio,
        "label-studio",
        ("url", "skip_missing"),
        lambda content, out: "import tasks.json into a project with label_config.xml",
    ),
    "coco": Format(
        "boxes that you give, with clusters as categories",
        write_coco,
        "clusters.coco.json",
        ("boxes", "skip_missing"),
    ),
    "embedding-atlas": Format(
        "a file for embedding-atlas",
        write_atlas,
        "atlas.parquet",
        ("skip_missing",),
        _atlas_command,
    ),
    "vlm4cluster": Format(
        "VLM4Cluster's cache of features",
        write_vlm4cluster,
        "vlm4cluster",
        ("model",),
        lambda content, out: f"image_dataset.root={out}, or copy feature_cache to your root",
    ),
    "hf-model": Format("the model with its card", write_model, "hf-model"),
    "hf-dataset": Format("the clusters with a data set's card", write_dataset, "hf-dataset"),
}


def export(content: Content, to: str, out: str | Path | None = None, **options: Any) -> Path:
    """Write some samples of a run in another program's format.

    Args:
        content: what goes out (`Content.of`).
        to: one of `FORMATS`.
        out: where; None: `export/` in the run's folder. Nothing is overwritten.
        **options: of the format, as its `write_` function says.

    Returns:
        What was written, a file or a folder.

    Raises:
        InputError: no such format or option, something is at `out`, or as the format says.
    """
    format = format_of(to)
    for name in options:
        if name not in format.options:
            takes = ", ".join(f"--{option}" for option in format.options) or "none"
            raise InputError(f"{to} does not take --{name}; of its own it takes {takes}")
    place = content.samples.path / "export" / format.name if out is None else Path(out).expanduser()
    ending = Path(format.name).suffix
    if place.suffix != ending and ending:
        raise InputError(f"--out is {place}; {to} writes a file whose name ends in {ending}")
    return format.write(content, place, **options)


def format_of(name: str) -> Format:
    """The format of that name; raises InputError with the nearest."""
    if name not in FORMATS:
        raise InputError(f"--to is {name!r}, not {', '.join(FORMATS)}.{nearest(name, FORMATS)}")
    return FORMATS[name]
