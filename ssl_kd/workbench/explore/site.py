"""The page `explore.html` with its data: a folder that any web server serves.

`explore.html` names the folder of all its other files, and a new page gets a new one: a page
is whole even if its writer was killed. The manifest keeps what is ours.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
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
from ssl_kd.files import (
    CorruptFileError,
    atomic_write_bytes,
    atomic_write_json,
    remove_orphans,
    sha256_file,
    strict_json,
)
from ssl_kd.files.lock import Lock
from ssl_kd.training.clock import Progress
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.explore.places import map_of
from ssl_kd.workbench.finished import Curation
from ssl_kd.workbench.naming import Names

logger = logging.getLogger(__name__)

PAGE, MARK, DATA = "explore.html", "meta.json", "data"
INDEX, MANIFEST, LOCK = "index.html", ".ssl_kd-explore.json", ".ssl_kd-explore.lock"
_TO_PAGE = (
    f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={PAGE}">'
    f'<link rel="icon" href="data:,"><a href="{PAGE}">{PAGE}</a>\n'
).encode()
_OURS = re.compile("explore-[0-9a-f]{12}")
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
    """Write `explore.html`, an `index.html` that leads to it, and a folder of all that it needs.

    Killed at any moment, an earlier page is whole; the next call removes what was left of this one.

    Args:
        samples: the run.
        folder: where to; beside an earlier page it may hold anything.
        pictures: how many samples have one, examples first, others at random: about 2 KB each.
        progress: called with (stage, done, total, {}).

    Returns:
        The page.

    Raises:
        InputError: the folder holds something else, or a file of ours that was edited.
        LockHeld: another program writes a page there.
        CorruptFileError: the manifest of the folder is damaged.
        FileNotFoundError: the embeddings of the run are gone.
    """
    folder = Path(folder).expanduser().resolve()
    _manifest(folder)  # nothing is written where it is refused
    folder.mkdir(parents=True, exist_ok=True)
    with Lock(folder / LOCK):
        earlier, sums = _manifest(folder)
        for name in (PAGE, INDEX, MANIFEST):
            remove_orphans(folder / name)
        new = f"explore-{secrets.token_hex(6)}"
        page = page_file(PAGE).replace(b"<head>", f'<head>\n<base href="{new}/">'.encode(), 1)
        written = {PAGE: page, INDEX: _TO_PAGE}
        sums |= {hashlib.sha256(data).hexdigest() for data in written.values()}
        _settle(folder, earlier, sums, [new])
        try:
            for name in page_files():
                if name != PAGE:
                    atomic_write_bytes(folder / new / name, page_file(name))

            def put(name: str, data: bytes) -> None:
                atomic_write_bytes(folder / new / DATA / name, data)

            page_data(samples, put, pictures=pictures, neighbours=True, progress=progress)
            _manifest(folder)  # an edit of the last minutes is nothing that may be replaced either
            for name, data in written.items():
                atomic_write_bytes(folder / name, data)
        finally:
            _settle(folder, [*earlier, new], sums)
    return folder / PAGE


def _manifest(folder: Path) -> tuple[list[str], set[str]]:
    """Return the folders in it that are ours, and the SHA-256 of the files that may be replaced."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{printable(str(folder))} is no folder: give an empty one, or a new one")
    path, folders, sums = folder / MANIFEST, [], set()
    others = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if path.exists():
        try:
            kept = strict_json(path.read_bytes())
            folders, sums = kept["folders"], set(kept["files"])
            if not all(isinstance(name, str) and _OURS.fullmatch(name) for name in folders):
                raise ValueError("a folder is called as none of ours")
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptFileError(
                f"{printable(str(path))} is damaged ({error}): give another folder, or an empty one"
            ) from error
    elif visible := [name for name in others if not name.startswith(".")]:
        raise InputError(
            f"{printable(str(folder))} holds something else: give an empty folder, or a new one "
            f"({printable(visible[0])} is there)"
        )
    there = {folder / name for name in (PAGE, INDEX) if name in others}
    for file in there:
        if file.is_symlink() or not file.is_file() or sha256_file(file) not in sums:
            raise InputError(
                f"{printable(str(file))} was not written by explore, or was edited since: move it "
                "away, or give another folder"
            )
    return folders, set(map(sha256_file, there))


def _settle(folder: Path, ours: list[str], sums: set[str], coming: Sequence[str] = ()) -> None:
    """Remove our folders that the page there does not name; keep what is left in the manifest."""
    page = folder / PAGE
    live = re.search(rb'<base href="([^"/]+)/">', page.read_bytes()) if page.is_file() else None
    for name in ours:
        if not (folder / name).is_symlink() and (live is None or name != live[1].decode()):
            shutil.rmtree(folder / name, ignore_errors=True)
    left = [name for name in ours if (folder / name).is_dir()]
    atomic_write_json(folder / MANIFEST, {"folders": [*left, *coming], "files": sorted(sums)})


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
        "sheets": None if sheets is None else sheets.told(),
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

    def told(self) -> dict[str, Any]:
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
