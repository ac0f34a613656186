"""The export formats by name; the code that writes one is imported when it is used."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_kd.errors import InputError
from ssl_kd.settings import nearest
from ssl_kd.workbench.output_files import refuse_existing

if TYPE_CHECKING:
    from ssl_kd.workbench.export.content import Content


@dataclass(frozen=True)
class Format:
    """One export format.

    Args:
        what: a short description.
        writer: module and function, `(content, out, **options) -> Path`.
        name: default name of what it writes; one with a suffix is a file, else a folder.
        options: names of its options.
        how_to_read: code or a sentence that reads it, with `{out}` for the path.
    """

    what: str
    writer: str
    name: str
    options: tuple[str, ...] = ()
    how_to_read: str = ""


FORMATS: Mapping[str, Format] = {
    "parquet": Format(
        "a row for each sample, with everything known about it",
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
    "hf-model": Format("the model with its card", "cards.write_model", "hf-model"),
    "hf-dataset": Format("the clusters with a dataset card", "cards.write_dataset", "hf-dataset"),
}


def export(
    content: Content, to: str, out: str | Path | None = None, *, force: bool = False, **options: Any
) -> Path:
    """Write samples of a run in another program's format.

    Args:
        content: what to export (`Content.of`).
        to: one of `FORMATS`.
        out: the file or folder; None: in `export/` of the run's folder.
        force: replace an existing file, once the new one is complete; never a folder.
        **options: options of the format.

    Returns:
        The file or folder that was written.

    Raises:
        InputError: unknown format or option, something exists at `out`, or as the format says.
    """
    path = checked_path(content.samples.path, to, out, options, force=force)
    module, _, name = FORMATS[to].writer.rpartition(".")
    write = getattr(importlib.import_module(f"ssl_kd.workbench.export.{module}"), name)
    if not os.path.lexists(path):
        return write(content, path, **options)
    temporary = path.with_name(f".{secrets.token_hex(4)}{path.suffix}")
    try:
        write(content, temporary, **options)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def checked_path(
    run: Path, to: str, out: str | Path | None, options: Iterable[str] = (), *, force: bool = False
) -> Path:
    """Return where an export goes; check all that can be checked without reading the run.

    Raises:
        InputError: unknown format or option, or an invalid or existing path.
    """
    if to not in FORMATS:
        raise InputError(f"--to is {to!r}, not {', '.join(FORMATS)}.{nearest(to, FORMATS)}")
    format = FORMATS[to]
    if unknown := [name for name in options if name not in format.options]:
        known = ", ".join(f"--{option}" for option in format.options) or "none"
        raise InputError(f"{to} does not take --{unknown[0]}; its own options: {known}")
    path = run / "export" / format.name if out is None else Path(out).expanduser()
    suffix = Path(format.name).suffix
    if "\0" in str(path) or (suffix and path.suffix != suffix):
        kind = f"a file whose name ends in {suffix}" if suffix else "a folder"
        raise InputError(f"--out is {str(path)!r}; {to} writes {kind}")
    is_file = bool(suffix) and path.is_file()
    if not (force and is_file):
        refuse_existing(path, "replace it with --force" if is_file else "move it away")
    return path
