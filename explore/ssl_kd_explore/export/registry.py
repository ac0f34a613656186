"""List the export formats, and import the code of a format when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ssl_kd.core.errors import InputError
from ssl_kd.core.settings import nearest
from ssl_kd_explore.output_files import new_folder, refuse_existing

if TYPE_CHECKING:
    from ssl_kd_explore.export.content import Content


@dataclass(frozen=True)
class Format:
    """Description of an export format."""

    what: str  # for the help
    writer: str  # module and function (content, open file or new folder, **options)
    name: str  # default name of the output: a file if it has a suffix, else a folder
    options: tuple[str, ...] = ()  # of the writer
    how_to_read: str = ""  # code or a sentence, with {out} for the path of the output


FORMATS: Mapping[str, Format] = {
    "parquet": Format(
        "one row per sample, with all columns",
        "parquet_table.write_parquet",
        "clusters.parquet",
        how_to_read="pandas.read_parquet({out!r})",
    ),
    "folders": Format(
        "a folder of links for each cluster",
        "folders.write_folders",
        "folders",
        ("link", "skip_missing"),
    ),
    "fiftyone": Format(
        "a FiftyOne dataset",
        "fiftyone.write_fiftyone",
        "fiftyone",
        ("skip_missing",),
        "fiftyone.Dataset.from_dir({out!r}, fiftyone.types.LegacyFiftyOneDataset)",
    ),
    "label-studio": Format(
        "Label Studio tasks with predictions",
        "label_studio.write_label_studio",
        "label-studio",
        ("url", "skip_missing"),
        "import tasks.json into a project with label_config.xml",
    ),
    "hf-model": Format(
        "the model with its card",
        "cards.write_model",
        "hf-model",
        how_to_read="MultiHeadClusterer.from_pretrained({out!r})",
    ),
    "hf-dataset": Format(
        "the clusters with a dataset card",
        "cards.write_dataset",
        "hf-dataset",
        how_to_read="datasets.load_dataset({out!r})",
    ),
}


def export(
    content: Content, to: str, out: str | Path | None = None, *, force: bool = False, **options: Any
) -> Path:
    """Write samples of a run in the format `to`, a key of `FORMATS`, and return the output's path.

    `out` is by default in `export/` of the run's folder. With `force`, an existing file is replaced
    once the new one is complete; a folder is never replaced. The `options` are the format's own.
    """
    from ssl_kd.core.files import atomic_write  # imports torch

    path = checked_path(content.samples.path, to, out, options, force=force)
    module, _, name = FORMATS[to].writer.rpartition(".")
    write = getattr(importlib.import_module(f"ssl_kd_explore.export.{module}"), name)

    def write_file(file: BinaryIO) -> None:
        write(content, file, **options)
        if not force:
            refuse_existing(path)  # another program may have written it meanwhile

    if Path(FORMATS[to].name).suffix:
        atomic_write(path, write_file)
    else:
        with new_folder(path) as folder:
            write(content, folder, **options)
    return path


def checked_path(
    run: Path, to: str, out: str | Path | None, options: Iterable[str] = (), *, force: bool = False
) -> Path:
    """Check format, options and path of an export before the run is read; return the path."""
    if to not in FORMATS:
        raise InputError(f"--to is {to!r}; expected {', '.join(FORMATS)}.{nearest(to, FORMATS)}")
    format = FORMATS[to]
    if unknown := [name for name in options if name not in format.options]:
        known = ", ".join(f"--{option}" for option in format.options) or "none"
        raise InputError(
            f"the format {to} has no option --{unknown[0]}; the options of {to}: {known}"
        )
    path = run / "export" / format.name if out is None else Path(out).expanduser()
    suffix = Path(format.name).suffix
    if "\0" in str(path) or (suffix and path.suffix != suffix):
        kind = f"a file name that ends in {suffix}" if suffix else "the name of a folder"
        raise InputError(f"--out is {str(path)!r}; expected {kind} for the format {to}")
    is_file = bool(suffix) and path.is_file()
    if not (force and is_file):
        refuse_existing(path, "replace it with --force" if is_file else "move it away")
    return path
