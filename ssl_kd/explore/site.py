"""The page `explore.html` with its data: a folder that any web server serves."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter, maximum_filter

from ssl_kd.datasets import UnreadableImage
from ssl_kd.errors import InputError, printable
from ssl_kd.evaluate.sample import random_rows
from ssl_kd.explore.places import map_of
from ssl_kd.files import atomic_write_json
from ssl_kd.finished import Curation, Samples
from ssl_kd.training.clock import Progress

logger = logging.getLogger(__name__)

PAGE, MARK, DATA = "explore.html", "meta.json", "data"
PICTURES, EXAMPLES, NEIGHBOURS = 10_000, 400, 12
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
    return files("ssl_kd.explore").joinpath("page", *name.split("/")).read_bytes()


def write_site(
    samples: Samples,
    folder: str | Path,
    *,
    pictures: int = PICTURES,
    progress: Progress | None = None,
) -> Path:
    """Write `explore.html` and all that it needs into a folder of their own.

    It is written beside the folder and then takes its name: killed at any moment, the folder is
    what it was.

    Args:
        samples: the run.
        folder: where to; it may hold an earlier page, and nothing else.
        pictures: how many samples have one, examples first, others at random: about 2 KB each.
        progress: called with (stage, done, total, {}).

    Returns:
        The page.

    Raises:
        InputError: the folder holds something else.
        FileNotFoundError: the embeddings of the run are gone.
    """
    folder = Path(folder).expanduser()
    earlier = (folder / PAGE).is_file() and (folder / DATA / MARK).is_file()
    if folder.is_file() or (folder.is_dir() and not earlier and any(folder.iterdir())):
        raise InputError(f"{folder} holds something else: give an empty folder, or a new one")
    folder = folder.absolute()
    work = folder.with_name(f".{folder.name}.partial")
    if work.exists():  # of one that was killed
        shutil.rmtree(work)
    try:
        write_data(samples, work / DATA, pictures=pictures, neighbours=True, progress=progress)
        with as_file(files("ssl_kd.explore").joinpath("page")) as page:
            for name in page_files():
                (work / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(page / name, work / name)
        if folder.is_dir():
            shutil.rmtree(folder)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder / PAGE


def write_data(
    samples: Samples,
    folder: Path,
    *,
    pictures: int = 0,
    neighbours: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The data of the page: columns as plain binary files, names as lines, `meta.json`.

    Args:
        samples: the run.
        folder: where to; it is made.
        pictures: how many samples have one, in sheets; 0: none, a server gives them.
        neighbours: write those of every sample.
        progress: as of `write_site`.

    Returns:
        What is in `meta.json`.
    """
    places = map_of(samples, progress=progress)
    folder.mkdir(parents=True, exist_ok=True)
    places.T.astype("<f4").tofile(folder / "places.f32")
    columns = {name: _column(samples, name, folder) for name in _shown(samples)}
    if neighbours:
        near = samples.nearest(NEIGHBOURS).astype("<i4")
        for part, start in enumerate(range(0, len(near), PER_FILE)):
            near[start : start + PER_FILE].tofile(folder / f"neighbours_{part}.i32")
    (folder / "files.txt").write_text(_lines(samples.column("file")), encoding="utf-8")
    examples = examples_of(places, samples)
    sheets, first = None, _first_picture(samples)
    if pictures and first is not None:
        sheets = _Sheets.plan(len(samples), examples, pictures, max(first.size) <= TINY)
        sheets.write(samples, folder, progress)
    curation = Curation(samples)
    meta = {
        "title": samples.path.resolve().name,
        "samples": len(samples),
        "digest": curation.digest,
        "n_clusters": samples.n_clusters,
        "levels": samples.levels,
        "columns": columns,
        "examples": examples.tolist(),
        "neighbours": NEIGHBOURS,
        "per_file": PER_FILE,
        "images": first is not None,
        "searches": first is not None,
        "tiny": first is not None and max(first.size) <= TINY,
        "sheets": None if sheets is None else sheets.told(),
        "lines": curation.lines,
    }
    atomic_write_json(folder / MARK, meta)
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


def _column(samples: Samples, name: str, folder: Path) -> dict[str, Any]:
    if name in ("label", "split"):
        text = samples.table.column(name).cast("string").combine_chunks().dictionary_encode()
        found = text.dictionary.to_pylist()
        known = {value: code for code, value in enumerate(sorted(set(found) - {""}))}
        codes = np.array([*(known.get(value, -1) for value in found), -1])  # -1: those without any
        codes[text.indices.fill_null(-1).to_numpy()].astype("<i4").tofile(folder / f"{name}.i32")
        named = [printable(value) for value in known]
        return {"kind": "category", "file": f"{name}.i32", "values": named}
    values = samples.column(name)
    if name in ("confidence", "outlier"):
        numbers = values.astype("<f4")
        numbers.tofile(folder / f"{name}.f32")
        finite = numbers[np.isfinite(numbers)]
        low, high = np.quantile(finite, [0, 0.99]) if len(finite) else (0, 1)
        return {"kind": "number", "file": f"{name}.f32", "low": float(low), "high": float(high)}
    values.astype("<i4").tofile(folder / f"{name}.i32")
    return {"kind": "cluster", "file": f"{name}.i32"}


def _lines(names: NDArray[Any]) -> str:
    """A line each; none breaks a line, whatever is in it."""
    text = "\n".join(map(str, names))
    clean = text.count("\n") == len(names) - 1 and text.replace("\n", "").isprintable()
    return text if clean else "\n".join(printable(str(name)) for name in names)


def _first_picture(samples: Samples) -> Image.Image | None:
    """The picture of the first sample; None where there are none, or they are gone."""
    try:
        return samples.image(0)
    except (OSError, InputError, UnreadableImage) as error:
        logger.warning("the page has no pictures: %s", error)
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

    def told(self) -> dict[str, Any]:
        return {
            "rows": self.rows.tolist(),
            "tile": self.tile,
            "columns": COLUMNS,
            "per_sheet": COLUMNS * COLUMNS,
        }

    def write(self, samples: Samples, folder: Path, progress: Progress | None) -> None:
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
            lossless = self.tile == TINY
            number = start // COLUMNS**2
            sheet.save(folder / f"sheet_{number}.webp", quality=80, lossless=lossless)
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
