"""Write the data of the page `explore.html`, and the static page that any web server can serve."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from scipy.ndimage import gaussian_filter, maximum_filter

from ssl_kd.core.colors import CLUSTERS, MISSING, RAMP
from ssl_kd.core.errors import InputError, printable
from ssl_kd.core.files import atomic_write_bytes
from ssl_kd.core.runs.clock import Progress, no_progress
from ssl_kd.vision.data import UnreadableImage
from ssl_kd.vision.evaluate.sample import random_rows
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.columns import DECIDED, Columns, codes_of
from ssl_kd_explore.decisions import Curation
from ssl_kd_explore.explore.map_layout import map_of
from ssl_kd_explore.explore.spatial_index import spatial_index
from ssl_kd_explore.output_files import new_folder

logger = logging.getLogger(__name__)

PAGE, DATA = "explore.html", "data"
_SOURCES = Path(__file__).with_name("page")
PAGE_FILES = [path.relative_to(_SOURCES).as_posix() for path in sorted(_SOURCES.rglob("*.*"))]
_REDIRECT = (
    f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={PAGE}">'
    f'<link rel="icon" href="data:,"><a href="{PAGE}">{PAGE}</a>\n'
).encode()
Put = Callable[[str, bytes], object]  # stores a file, given its name and content
PICTURES, EXAMPLES = 10_000, 400  # pictures of a static page; examples on the map
TRIED = 20  # samples that are tried to find a picture that can be read
TILE = 64  # pixels of a picture
TINY = 32  # pixels of a tiny picture
COLUMNS = 32  # pictures in a row of a sheet
GRID = 256  # the density of samples is counted in GRID x GRID cells of the map


def page_file(name: str) -> bytes:
    """Read a file of the explorer page, one of `PAGE_FILES`."""
    return (_SOURCES / name).read_bytes()


def write_site(
    samples: Samples,
    folder: str | Path,
    *,
    pictures: int = PICTURES,
    progress: Progress = no_progress,
) -> Path:
    """Write a new folder with a static `explore.html`, which makes no decisions; return its path.

    `pictures` samples get a picture of about 2 KB: examples first, then random ones.
    """
    out = Path(folder).expanduser().absolute()
    with new_folder(out) as page:

        def put(name: str, content: bytes) -> None:
            atomic_write_bytes(page / DATA / name, content)

        for name in PAGE_FILES:
            atomic_write_bytes(page / name, page_file(name))
        atomic_write_bytes(page / "index.html", _REDIRECT)
        curation = Curation(samples)
        columns = Columns(samples, curation)
        own = write_page_data(samples, columns, put, pictures=pictures, progress=progress)
        for file, name in own.items():
            put(file, column_file(columns, name))
        for name, content in decision_files(curation).items():
            put(name, content)
    return out / PAGE


def write_page_data(
    samples: Samples,
    columns: Columns,
    put: Put,
    *,
    is_served: bool = False,
    searches_texts: bool = False,
    pictures: int = 0,
    progress: Progress = no_progress,
) -> dict[str, str]:
    """Write the data of the page that decisions do not change: columns, file names, `meta.json`.

    If a server `is_served` the page, the page has a table, whose cells the server sends; it may
    also search by the meaning of a text (`searches_texts`). `pictures` are written into sheets; 0
    if a server serves single pictures.

    Returns:
        File -> name of the columns that do not come from the run and color the map: the page asks
        for `column_file` of these when they are needed.
    """
    places = map_of(samples, progress)
    put("places.kd", spatial_index(places))
    described, own = {}, {}
    for name in _color_columns(samples, columns):
        described[name] = _describe_column(columns, name)
        if name in samples.table.column_names:
            put(described[name]["file"], column_file(columns, name))
        else:
            described[name]["file"] = f"own_{len(own)}"  # the name of a column may be anything
            own[described[name]["file"]] = name
    put("files.txt", _lines(samples.column("file")).encode())
    examples = examples_of(places, samples)
    first = _first_picture(samples)
    is_tiny = first is not None and max(first.size) <= TINY
    sheets = None
    if pictures and first is not None:
        sheets = _write_sheets(samples, examples[:pictures], pictures, is_tiny, put, progress)
    meta = {
        "title": Path(samples.metrics["dataset"].get("name") or samples.path).name,
        "run": samples.path.name,
        "samples": len(samples),
        "columns": described,
        "own": list(own.values()),
        "colors": {"clusters": CLUSTERS, "missing": MISSING, "ramp": RAMP},
        "table": [{"name": n, "kind": k} for n, k in columns.kinds.items()] if is_served else None,
        "examples": examples.tolist(),
        "images": first is not None,
        "media": samples.media,
        "searches_texts": searches_texts,
        "tiny": is_tiny,
        "sheets": sheets,
    }
    put("meta.json", as_json(meta))
    return own


def decision_files(curation: Curation) -> dict[str, bytes]:
    """Return name -> content of the files that decisions change: clusters, names and history."""
    lines = curation.lines
    for line in lines:
        if "rows" in line:
            line["rows"] = len(line["rows"])
    return {
        "clusters.i32": curation.clusters.astype("<i4").tobytes(),
        "decisions.json": as_json(
            {"lines": lines, "names": curation.names, "words": curation.words}
        ),
    }


def examples_of(places: NDArray[np.float32], samples: Samples) -> NDArray[np.int64]:
    """Return the most confident sample at each density peak of the map, densest peak first."""
    cells = np.clip(((places + 1) / 2 * GRID).astype(np.int64), 0, GRID - 1)
    flat = cells[:, 0] * GRID + cells[:, 1]
    counts = np.bincount(flat, minlength=GRID * GRID).reshape(GRID, GRID)
    density = gaussian_filter(counts.astype(np.float32), 2)
    is_peak = (density == maximum_filter(density, 9)) & (density > 1e-4 * density.max())
    peaks = np.argwhere(is_peak)
    peaks = peaks[np.argsort(-density[tuple(peaks.T)], kind="stable")][:EXAMPLES]
    order = np.argsort(flat, kind="stable")
    starts = np.searchsorted(flat[order], np.arange(GRID * GRID + 1))
    confidence, rows = samples.column("confidence"), []
    for x, y in peaks:
        low, high = max(0, y - 2), min(GRID, y + 3)
        lines = [GRID * line for line in range(max(0, x - 2), min(GRID, x + 3))]
        near = np.concatenate([order[starts[n + low] : starts[n + high]] for n in lines])
        if len(near):
            rows.append(int(near[np.argmax(confidence[near])]))
    return np.array(list(dict.fromkeys(rows)), np.int64)


def column_file(columns: Columns, name: str) -> bytes:
    """Return a column that colors the map: float32 numbers, or int32 codes, -1 where missing."""
    column = columns.column(name)
    if columns.kinds[name] == "number":
        return np.asarray(column, np.float64).astype("<f4").tobytes()
    return codes_of(column).astype("<i4").tobytes()


def _color_columns(samples: Samples, columns: Columns) -> list[str]:
    """Return the columns that can color the map, except the clusters after all decisions."""
    levels = [level for level in samples.levels if level != "cluster"]
    others = [name for name, kind in columns.kinds.items() if kind in ("number", "category")]
    return [*levels, *(name for name in others if name not in DECIDED)]


def _describe_column(columns: Columns, name: str) -> dict[str, Any]:
    """Return kind and file of a column that colors the map, with its ends or its values."""
    column, kind = columns.column(name), columns.kinds[name]
    if kind == "category":
        values = list(map(printable, column.dictionary.to_pylist()))
        return {"kind": kind, "file": f"{name}.i32", "values": values}
    if kind == "cluster":
        return {"kind": kind, "file": f"{name}.i32"}
    numbers = np.asarray(column, np.float64)
    finite = numbers[np.isfinite(numbers)]
    low, high = np.quantile(finite, [0, 0.99]) if len(finite) else (0, 1)
    return {"kind": kind, "file": f"{name}.f32", "low": float(low), "high": float(high)}


def _lines(names: NDArray[Any]) -> str:
    """Join names into text, one name per line; escape control characters within names."""
    text = "\n".join(map(str, names))
    clean = text.count("\n") == len(names) - 1 and text.replace("\n", "").isprintable()
    return text if clean else "\n".join(printable(str(name)) for name in names)


def _first_picture(samples: Samples) -> Image.Image | None:
    reason: Exception | None = None
    for row in range(min(len(samples), TRIED)):
        try:
            return samples.image(row)
        except (OSError, InputError, UnreadableImage) as error:
            reason = reason or error
    logger.warning("the page shows no pictures, because none could be read: %s", reason)
    return None


def _write_sheets(
    samples: Samples,
    examples: NDArray[np.int64],
    pictures: int,
    is_tiny: bool,
    put: Put,
    progress: Progress,
) -> dict[str, Any]:
    """Write `sheet_0.webp`, ... with 1,024 pictures each, missing ones white; return the layout."""
    others = np.setdiff1d(np.arange(len(samples)), examples, assume_unique=True)
    drawn = others[random_rows(len(others), pictures - len(examples), 0)]
    rows = np.union1d(examples, drawn)
    tile = TINY if is_tiny else TILE
    per_sheet = COLUMNS**2
    missing, last = 0, ""
    for start in range(0, len(rows), per_sheet):
        shown = rows[start : start + per_sheet]
        height = -(-len(shown) // COLUMNS) * tile
        sheet = Image.new("RGB", (COLUMNS * tile, height), "white")
        for at, row in enumerate(shown.tolist()):
            try:
                image = samples.image(row)
            except (OSError, UnreadableImage) as error:
                missing, last = missing + 1, str(error)
                continue
            assert image is not None
            sheet.paste(square(image, tile), (at % COLUMNS * tile, at // COLUMNS * tile))
        target = io.BytesIO()
        sheet.save(target, "WEBP", quality=80, lossless=is_tiny)
        put(f"sheet_{start // per_sheet}.webp", target.getvalue())
        progress("pictures", start + len(shown), len(rows), {})
    if missing:
        logger.warning("%d pictures cannot be read and stay white; the last: %s", missing, last)
    return {"rows": rows.tolist(), "tile": tile, "columns": COLUMNS, "per_sheet": per_sheet}


def fitted(image: Image.Image, side: int) -> Image.Image:
    """Fit a picture into `side` x `side` pixels, in RGB; enlarge tiny pictures."""
    small = image.convert("RGB")
    if max(small.size) > side:
        small.thumbnail((side, side))
    elif max(small.size) <= TINY:
        times = side // max(small.size)
        small = small.resize((small.width * times, small.height * times), Image.Resampling.NEAREST)
    return small


def square(image: Image.Image, side: int) -> Image.Image:
    """Return the middle of a picture that fills `side` x `side` pixels, in RGB."""
    is_tiny = max(image.size) <= TINY
    method = Image.Resampling.NEAREST if is_tiny else Image.Resampling.BICUBIC
    return ImageOps.fit(image.convert("RGB"), (side, side), method)


def as_json(value: Any) -> bytes:
    """Encode a value as JSON; raise ValueError for NaN."""
    return json.dumps(value, allow_nan=False).encode()
