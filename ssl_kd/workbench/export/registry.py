"""The formats by name: what each writes, and what reads it; what writes it is imported late."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_kd.errors import InputError
from ssl_kd.settings import nearest
from ssl_kd.workbench.place import refuse_existing

if TYPE_CHECKING:
    from ssl_kd.workbench.export.content import Content


@dataclass(frozen=True)
class Format:
    """One way out.

    Args:
        what: in a few words.
        writer: module and name of (content, out, **options) -> what it wrote.
        name: of what it writes where no other is given.
        options: those that it takes.
        reads: (content, out) -> how it is read.
    """

    what: str
    writer: str
    name: str
    options: tuple[str, ...] = ()
    reads: Callable[[Content, Path], str] = lambda content, out: ""


FORMATS: Mapping[str, Format] = {
    "parquet": Format(
        "a row for each sample, with everything known of it",
        "table.write_parquet",
        "clusters.parquet",
        reads=lambda content, out: f"pandas.read_parquet({str(out)!r})",
    ),
    "folders": Format(
        "a folder of links for each cluster",
        "folders.write_folders",
        "folders",
        ("link", "skip_missing"),
    ),
    "fiftyone": Format(
        "a data set of FiftyOne",
        "fiftyone.write_fiftyone",
        "fiftyone",
        ("skip_missing",),
        lambda content, out: (
            f"fiftyone.Dataset.from_dir({str(out)!r}, fiftyone.types.FiftyOneDataset)"
        ),
    ),
    "label-studio": Format(
        "tasks of Label Studio with predictions",
        "label_studio.write_label_studio",
        "label-studio",
        ("url", "skip_missing"),
        lambda content, out: "import tasks.json into a project with label_config.xml",
    ),
    "hf-model": Format("the model with its card", "cards.write_model", "hf-model"),
    "hf-dataset": Format(
        "the clusters with a data set's card", "cards.write_dataset", "hf-dataset"
    ),
}


def export(
    content: Content, to: str, out: str | Path | None = None, *, force: bool = False, **options: Any
) -> Path:
    """Write some samples of a run in another program's format.

    Args:
        content: what goes out (`Content.of`).
        to: one of `FORMATS`.
        out: where; None: `export/` in the run's folder.
        force: replace a file that is there, once the new one is whole; a folder never.
        **options: of the format, as its `write_` function says.

    Returns:
        What was written, a file or a folder.

    Raises:
        InputError: no such format or option, something is at `out`, or as the format says.
    """
    place = place_of(content.samples.path, to, out, options, force=force)
    module, _, name = FORMATS[to].writer.rpartition(".")
    write = getattr(importlib.import_module(f"ssl_kd.workbench.export.{module}"), name)
    if not os.path.lexists(place) or not Path(FORMATS[to].name).suffix:
        return write(content, place, **options)
    beside = place.with_name(f".{secrets.token_hex(4)}{place.suffix}")
    try:
        write(content, beside, **options)
        os.replace(beside, place)
    finally:
        beside.unlink(missing_ok=True)
    return place


def place_of(
    run: Path, to: str, out: str | Path | None, options: Iterable[str] = (), *, force: bool = False
) -> Path:
    """Where an export goes, by what is known before the run is read.

    Raises:
        InputError: no such format or option, or a place that cannot be.
    """
    format = format_of(to)
    for name in options:
        if name not in format.options:
            takes = ", ".join(f"--{option}" for option in format.options) or "none"
            raise InputError(f"{to} does not take --{name}; of its own it takes {takes}")
    place = run / "export" / format.name if out is None else Path(out).expanduser()
    ending = Path(format.name).suffix
    if "\0" in str(place) or (place.suffix != ending and ending):
        kind = f"a file whose name ends in {ending}" if ending else "a folder"
        raise InputError(f"--out is {str(place)!r}; {to} writes {kind}")
    is_file = bool(ending) and place.is_file()
    if not (force and is_file):
        refuse_existing(place, "replace it by --force" if is_file else "move it away")
    return place


def format_of(name: str) -> Format:
    """The format of that name; raises InputError with the nearest."""
    if name not in FORMATS:
        raise InputError(f"--to is {name!r}, not {', '.join(FORMATS)}.{nearest(name, FORMATS)}")
    return FORMATS[name]
