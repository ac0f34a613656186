"""The page `explore.html` with its data: a folder that any web server serves."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter, maximum_filter

from ssl_kd.datasets import UnreadableImage
from ssl_kd.errors import InputError, printable
from ssl_kd.evaluate.sample import random_rows
from ssl_kd.files import atomic_write_bytes
from ssl_kd.training.clock import Progress
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.explore.places import map_of
from ssl_kd.workbench.finished import Curation
from ssl_kd.workbench.naming import Names
from ssl_kd.workbench.place import new_folder

logger = logging.getLogger(__name__)

PAGE, INDEX, MARK, DATA = "explore.html", "index.html", "meta.json", "data"
_TO_PAGE = (
    f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={PAGE}">'
    f'<link rel="icon" href="data:,"><a href="{PAGE}">{PAGE}</a>\n'
).encode()
Put = Callable[[str, bytes], object]  # a file's name, and what is in it
PICTURES, EXAMPLES, NEIGHBOURS = 10_000, 400, 12
LOOKED_AT = 20  # samples, until a picture can be read
TILE, TINY, COLUMNS = 64, 32, 32  # pixels of a picture, of one that is shown as it is; in a row
PER_FILE = 16_384  # samples whose neighbours a static page reads at once: 768 KiB
GRID = 256  # cells of the map on either side, in which samples are counted


def page_files() -> list[str]:
    """The page without its data, relative to its folder."""
    vendor = ("regl-scatterplot.js", "LICENSES.txt")
    scripts = ("explore", "colours", "data", "decisions", "pictures", "plot", "touches", "words")
    own = ("explore.css", *(f"{name}.js" for name in scripts))
    return [PAGE, *own, *(f"vendor/{name}" for name in vendor)]


def page_file(name: str) -> bytes:
    """One of `page_files`."""
    return files("ssl_kd.workbench.explore").joinpath("page", *name.split("/")).read_bytes()


def write_site(
    samples: Samples,
    folder: str | Path,
    *,
    pictures: int = PICTURES,
    progress: Progress | None = None,
) -> Path:
    """Write a folder with `explore.html`, an `index.html` that leads to it, and all their files.

    Args:
        samples: the run.
        folder: the new folder; it appears once the page is complete.
        pictures: how many samples have one, examples first, others at random: about 2 KB each.
        progress: called with (stage, done, total, {}).

    Returns:
        The page.

    Raises:
        InputError: `folder` exists.
        FileNotFoundError: the embeddings of the run are gone.
    """
    out = Path(folder).expanduser().absolute()
    with new_folder(out) as page:

        def put(name: str, data: bytes) -> None:
            atomic_write_bytes(page / DATA / name, data)

        for name in page_files():
            atomic_write_bytes(page / name, page_file(name))
        atomic_write_bytes(page / INDEX, _TO_PAGE)
        page_data(samples, put, pictures=pictures, neighbours=True, progress=progress)
    return out / PAGE


def page_data(
    samples: Samples,
    put: Put,
    *,
    pictures: int = 0,
    neighbours: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make the data of the page: columns as plain binary files, names as lines, `meta.json`.

    Args:
        samples: the run.
        put: called with each file's name and content; `meta.json` comes last.
        pictures: how many samples have one, in sheets; 0: none, a server gives them.
        neighbours: make those of every sample.
        progress: as of `write_site`.

    Returns:
        What is in `meta.json`.
    """
    places = map_of(samples, progress=progress)
    put("places.f32", places.T.astype("<f4").tobytes())
    columns = {name: _column(samples, name, put) for name in _shown(samples)}
    if neighbours:
        near = samples.nearest(NEIGHBOURS).astype("<i4")
        for part, start in enumerate(range(0, len(near), PER_FILE)):
            put(f"neighbours_{part}.i32", near[start : start + PER_FILE].tobytes())
    put("files.txt", _lines(samples.column("file")).encode())
    examples = examples_of(places, samples)
    sheets, first = None, _first_picture(samples)
    if pictures and first is not None:
        sheets = _Sheets.plan(len(samples), examples, pictures, max(first.size) <= TINY)
        sheets.write(samples, put, progress)
    curation = Curation(samples)
    names = Names.load(samples.path)
    meta = {
        "title": samples.path.name,
        "samples": len(samples),
        "digest": curation.digest,
        "n_clusters": samples.n_clusters,
        "levels": samples.levels,
        "names": {
            level: {number: name.text for number, name in names.levels.get(level, {}).items()}
            for level in samples.levels
        },
        "columns": columns,
        "examples": examples.tolist(),
        "neighbours": NEIGHBOURS,
        "per_file": PER_FILE,
        "images": first is not None,
        "searches": first is not None,
        "tiny": first is not None and max(first.size) <= TINY,
        "sheets": None if sheets is None else sheets.as_dict(),
        "lines": curation.lines,
    }
    put(MARK, as_json(meta))
    return meta


def examples_of(places: NDArray[np.float32], samples: Samples) -> NDArray[np.int64]:
    """The surest sample at each peak of the map's density, densest first, at most `EXAMPLES`."""
    cells = np.clip(((places + 1) / 2 * GRID).astype(np.int64), 0, GRID - 1)
    flat = cells[:, 0] * GRID + cells[:, 1]
    counts = np.bincount(flat, minlength=GRID * GRID).reshape(GRID, GRID)
    density = gaussian_filter(counts.astype(np.float32), 2)
    peak = (density == maximum_filter(density, 9)) & (density > 1e-4 * density.max())
    found = np.argwhere(peak)
    found = found[np.argsort(-density[tuple(found.T)], kind="stable")][:EXAMPLES]
    sure, rows = samples.column("confidence"), []
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    for x, y in found:
        near: list[NDArray[np.int64]] = []
        for row in range(max(0, x - 2), min(GRID, x + 3)):
            edges = [row * GRID + max(0, y - 2), row * GRID + min(GRID - 1, y + 2) + 1]
            start, stop = np.searchsorted(ordered, edges)
            near.append(order[start:stop])
        inside = np.concatenate(near)
        if len(inside):
            rows.append(int(inside[np.argmax(sure[inside])]))
    return np.array(list(dict.fromkeys(rows)), np.int64)


def _shown(samples: Samples) -> list[str]:
    """The columns that the page colours by: `cluster`, other levels, what is known of each."""
    own = ["cluster", *(level for level in samples.levels if level != "cluster")]
    others = ("label", "confidence", "outlier", "split")
    return [*own, *(name for name in others if name in samples.table.column_names)]


def _column(samples: Samples, name: str, put: Put) -> dict[str, Any]:
    if name in ("label", "split"):
        text = samples.table.column(name).cast("string").combine_chunks().dictionary_encode()
        found = text.dictionary.to_pylist()
        known = {value: code for code, value in enumerate(sorted(set(found) - {""}))}
        codes = np.array([*(known.get(value, -1) for value in found), -1])  # -1: those without any
        put(f"{name}.i32", codes[text.indices.fill_null(-1).to_numpy()].astype("<i4").tobytes())
        named = [printable(value) for value in known]
        return {"kind": "category", "file": f"{name}.i32", "values": named}
    values = samples.column(name)
    if name in ("confidence", "outlier"):
        numbers = values.astype("<f4")
        put(f"{name}.f32", numbers.tobytes())
        finite = numbers[np.isfinite(numbers)]
        low, high = np.quantile(finite, [0, 0.99]) if len(finite) else (0, 1)
        return {"kind": "number", "file": f"{name}.f32", "low": float(low), "high": float(high)}
    put(f"{name}.i32", values.astype("<i4").tobytes())
    return {"kind": "cluster", "file": f"{name}.i32"}


def _lines(names: NDArray[Any]) -> str:
    """A line each; none breaks a line, whatever is in it."""
    text = "\n".join(map(str, names))
    clean = text.count("\n") == len(names) - 1 and text.replace("\n", "").isprintable()
    return text if clean else "\n".join(printable(str(name)) for name in names)


def _first_picture(samples: Samples) -> Image.Image | None:
    """The picture of the first sample; None where there are none, or they are gone."""
    reason: Exception | None = None
    for row in range(min(len(samples), LOOKED_AT)):
        try:
            return samples.image(row)
        except (OSError, InputError, UnreadableImage) as error:
            reason = reason or error
    logger.warning("the page has no pictures: %s", reason)
    return None


@dataclass(frozen=True)
class _Sheets:
    """Pictures of some samples, many on a sheet.

    Args:
        rows: which samples, in order.
        tile: pixels of a picture.
    """

    rows: NDArray[np.int64]
    tile: int

    @classmethod
    def plan(cls, n: int, examples: NDArray[np.int64], most: int, tiny: bool) -> _Sheets:
        examples = examples[:most]
        others = np.setdiff1d(np.arange(n), examples, assume_unique=True)
        more = others[random_rows(len(others), most - len(examples), 0)]
        return cls(np.union1d(examples, more), TINY if tiny else TILE)

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows.tolist(),
            "tile": self.tile,
            "columns": COLUMNS,
            "per_sheet": COLUMNS * COLUMNS,
        }

    def write(self, samples: Samples, put: Put, progress: Progress | None) -> None:
        """`sheet_0.webp` and so on; the place of a picture that is gone stays empty."""
        missing, last = 0, ""
        for start in range(0, len(self.rows), COLUMNS**2):
            rows = self.rows[start : start + COLUMNS**2]
            height = -(-len(rows) // COLUMNS) * self.tile
            sheet = Image.new("RGB", (COLUMNS * self.tile, height), "white")
            for at, row in enumerate(rows.tolist()):
                try:
                    image = samples.image(row)
                except (OSError, UnreadableImage) as error:
                    missing, last = missing + 1, str(error)
                    continue
                assert image is not None
                small = fitted(image, self.tile)
                left, top = at % COLUMNS * self.tile, at // COLUMNS * self.tile
                gap = [(self.tile - side) // 2 for side in small.size]
                sheet.paste(small, (left + gap[0], top + gap[1]))
            target = io.BytesIO()
            sheet.save(target, "WEBP", quality=80, lossless=self.tile == TINY)
            put(f"sheet_{start // COLUMNS**2}.webp", target.getvalue())
            if progress is not None:
                progress("pictures", start + len(rows), len(self.rows), {})
        if missing:
            logger.warning("%d pictures are not there; the last: %s", missing, last)


def fitted(image: Image.Image, side: int) -> Image.Image:
    """The picture in RGB, at most `side` pixels wide and high; a tiny one is as large as it is."""
    small = image.convert("RGB")
    if max(small.size) > side:
        small.thumbnail((side, side))
    elif max(small.size) <= side // 2:
        times = side // max(small.size)
        small = small.resize((small.width * times, small.height * times), Image.Resampling.NEAREST)
    return small


def as_json(value: Any) -> bytes:
    """JSON without a NaN."""
    return json.dumps(value, allow_nan=False).encode()
