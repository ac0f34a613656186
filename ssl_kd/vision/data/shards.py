"""Find the Parquet files of one data set: its shards, and its splits."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ssl_kd.core.errors import InputError
from ssl_kd.vision.data.images import find_images

SPLITS = ("train", "test", "val", "validation", "valid", "dev")
_SHARD = re.compile(r"(?P<name>.*?)-?(?P<number>\d{3,})-of-(?P<total>\d{3,})(?P<rest>.*)")
# Parts of a file name that number it: digits, hashes, and what Spark adds.
_NUMBERING = re.compile(r"\d+|of|(?=.*\d)[0-9a-f]{4,}|c\d+|tid|snappy|zstd|gz")


class Part(NamedTuple):
    """One split of a table: the path that messages name, and its files in order."""

    path: Path
    files: tuple[Path, ...]


def shards_of(file: Path) -> tuple[Path, ...]:
    """Return all shards of the data set that a file called `NAME-00000-of-00002` is a part of.

    Other files are returned alone.

    Raises:
        InputError: a shard is missing.
    """
    match = _SHARD.fullmatch(file.stem)
    if match is None or int(match["total"]) < 2:
        return (file,)
    siblings: dict[int, Path] = {}
    for path in sorted(file.parent.glob(f"*{file.suffix}")):
        other = _SHARD.fullmatch(path.stem)
        if other is not None and (other["name"], other["total"]) == (match["name"], match["total"]):
            siblings.setdefault(int(other["number"]), path)
    missing = [number for number in range(int(match["total"])) if number not in siblings]
    if missing:
        width = len(match["number"])
        names = [f"{match['name']}-{n:0{width}}-of-{match['total']}" for n in missing[:5]]
        raise InputError(
            f"{file} is one of {int(match['total'])} shards, but {len(missing)} of them "
            f"{'is' if len(missing) == 1 else 'are'} missing in {file.parent}, such as "
            f"{names[0]}{file.suffix}: add the shards, or rename the file to use it alone"
        )
    return tuple(siblings[number] for number in range(int(match["total"])))


def holds_tables(folder: Path) -> bool:
    """Return whether a folder has Parquet files, and no images, at any depth."""
    if not folder.is_dir() or next(find_images(folder), None) is not None:
        return False
    return next(_parquet_files(folder), None) is not None


def splits_in(folder: Path) -> dict[str, Part]:
    """Return the split of a data set -> its Parquet files, at any depth of a folder.

    The split is in the name of a file or of its folder, as in `data/train-00000-of-00002.parquet`
    or `test/0000.parquet`. Files without one belong to the split `train`.

    Raises:
        InputError: the files are of several data sets, or a shard is missing.
    """
    files: dict[str, list[Path]] = defaultdict(list)
    data_sets: dict[tuple[str, ...], Path] = {}
    for file in sorted(_parquet_files(folder), key=_by_number):
        words = re.split(r"[\W_]+", "/".join(file.relative_to(folder).with_suffix("").parts))
        split = next((word.lower() for word in words if word.lower() in SPLITS), "train")
        rest = [w for w in words if w.lower() not in SPLITS and not _NUMBERING.fullmatch(w.lower())]
        data_sets.setdefault(tuple(rest), file.relative_to(folder))
        files[split].append(file)
    if len(data_sets) > 1:
        first = ", ".join(str(path) for path in list(data_sets.values())[:5])
        raise InputError(
            f"{folder} holds several tables, such as {first}: give the file, or a folder that "
            "holds the shards of one table"
        )
    for split in files.values():
        for file in split:
            shards_of(file)  # all of them are there
    return {split: Part(folder, tuple(paths)) for split, paths in files.items()}


def named_split(file: Path, splits: Sequence[str]) -> Part | None:
    """Return the first of some splits that lies beside the `train` split in `file`."""
    match = _SHARD.fullmatch(file.stem)
    name = file.stem if match is None else match["name"]
    if not name.endswith("train"):
        return None
    for split in splits:
        other = name.removesuffix("train") + split
        for path in sorted(file.parent.glob(f"*{file.suffix}")):
            shard = _SHARD.fullmatch(path.stem)
            if (path.stem if shard is None else shard["name"]) == other:
                return Part(path, shards_of(path))
    return None


def _by_number(path: Path) -> list[str | int]:
    """Return a key that sorts `x_2` before `x_10`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def _parquet_files(folder: Path) -> Iterator[Path]:
    return (
        path
        for path in folder.rglob("*.parquet")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    )
