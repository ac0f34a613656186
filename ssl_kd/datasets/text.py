"""`open_text`: open the documents that a language model learns, by name or path."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from ssl_kd.datasets.catalog import DatasetUnavailable, DatasetUnreachable
from ssl_kd.datasets.records import Example, as_example
from ssl_kd.datasets.spill import SpilledSequence
from ssl_kd.datasets.text_files import (
    LONGEST,
    PLAIN,
    TEXT_FILES,
    Record,
    as_document,
    read_file,
    without_nulls,
)
from ssl_kd.errors import InputError, MissingPackage

TextSplit = Literal["train", "test", "all"]
_SPLIT_NAMES = {"train": ("train",), "test": ("test", "validation", "valid", "val", "eval")}
_OF_MANY = r"(-\d+-of-\d+)?"  # one of several files, as on the Hub
_NOT_STDLIB = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class TextDataset:
    """Documents in a fixed order.

    Attributes:
        name: the source, as given by the user.
        split: `train`, `test` or `all`.
        examples: the documents.
        digest: SHA-256 of the content of the examples, in order.
        left_out: unusable records and why, such as `file.jsonl:17: not JSON`; the first few.
    """

    name: str
    split: TextSplit
    examples: Sequence[Example]
    digest: str
    left_out: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.examples)

    @cached_property
    def pictured(self) -> str | None:
        """The place of the first document with images; None if there is none."""
        return next((e.where for e in self.examples if e.images), None)

    def check_text_alone(self) -> None:
        """Raise InputError if a document has images, which a tokenizer would ignore."""
        if self.pictured is not None:
            raise InputError(
                f"{self.pictured} holds images, which a tokenizer cannot read: use "
                "ssl_kd.datasets.picture_blocks.make_picture_blocks with a model's processor"
            )

    def without(self, held_out: TextDataset) -> TextDataset:
        """Return this data set without the documents of another one.

        Raises:
            ValueError: nothing is left.
        """
        others = {_identity(example) for example in held_out.examples}
        remaining = (e for e in self.examples if _identity(e) not in others)
        examples = SpilledSequence(remaining)
        if not (n_dropped := len(self) - len(examples)):
            return self
        if not examples:
            raise InputError(
                f"every document of {self.name} is also held out, in {held_out.name}: choose other "
                "text for training or for evaluation (--data_path, --eval_path)"
            )
        lines = (f"{n_dropped} documents that are also held out", *self.left_out)
        return replace(self, examples=examples, digest=_digest(examples), left_out=lines)


def first_few(lines: Sequence[str], limit: int = 20) -> tuple[str, ...]:
    """Return the first `limit` lines, and a line that counts the others.

    >>> first_few(["a", "b", "c"], limit=2)
    ('a', 'b', 'and 1 more')
    """
    more = len(lines) - limit
    return (*lines[:limit], *([f"and {more} more"] if more > 0 else []))


def open_text(
    source: str | os.PathLike[str],
    split: TextSplit = "train",
    *,
    field: str | None = None,
    held_out: float = 0.1,
    max_bytes: int | None = None,
) -> TextDataset:
    """Read one split of a text source.

    Files contain records: lines of `.jsonl`, one record or a list of them in `.json`, rows of
    `.csv` and `.parquet`; for the forms of a record see `as_example`. Text is UTF-8. A `.txt` or
    `.md` file is cut into documents: at the first blank line after 4,096 characters, or the first
    line break after 16,384.

    The test split is what the source itself calls so: `NAME_test.jsonl` (or `validation`, `valid`,
    `val`, `eval`) beside `NAME_train.jsonl`; such files or folders in a folder (also
    `test-00000-of-00002.parquet`); such a split of a Hugging Face data set. Otherwise it is the
    fraction `held_out` of the documents, chosen by a hash of their content: it stays the same, and
    duplicates fall on one side.

    Up to a GiB of documents are kept in memory, more in a temporary file (in TMPDIR). The source is
    read one record at a time (`.json` files at once, tables by 256 rows).

    Args:
        source: `stdlib` (the Python standard library of this machine, a document per module,
            without its tests), `hf:NAME` or `hf:NAME:CONFIG`, a file, a folder of such files, or a
            folder written by `save_to_disk` of the package `datasets`.
        split: `train`, `test`, or `all` of the source.
        field: name of the field that contains a text; None for all forms of `as_example`.
        held_out: fraction of the documents to hold out, from 0 to below 1, if the source has no
            splits.
        max_bytes: stop reading before the source exceeds this; None reads all.

    Raises:
        DatasetUnavailable: no such source.
        DatasetUnreachable: no network.
        ImportError: a Hugging Face data set without the package `datasets`.
        ValueError: a bad argument, a file of records without a usable one, or an empty split.
    """
    if split not in ("train", "test", "all"):
        raise ValueError(f"split must be 'train', 'test' or 'all', got {split!r}")
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out must be a fraction from 0 to below 1, got {held_out}")
    name = os.fspath(source)
    divided, items = _read(name, split, field)

    def belongs(content: bytes) -> bool:
        return divided or split == "all" or _is_held_out(content, held_out) == (split == "test")

    taken = _Taken(belongs, max_bytes)
    examples = SpilledSequence(taken.of(items))
    if not examples and taken.documents:
        raise InputError(
            f"{name}: nothing is left for the {split} split when {held_out:.0%} of "
            f"{taken.documents} documents are held out: give more documents, or a separate file "
            "for evaluation (--eval_path)"
        )
    if not examples:
        none = f"no file in it is one of {' '.join(TEXT_FILES)}"
        empty = none if os.path.isdir(name) else "it is empty"
        reasons = "; ".join(first_few(taken.left_out, 3)) or empty
        raise InputError(f"{name} holds nothing to learn from: {reasons}")
    if name == "stdlib":  # the text depends on the version
        name = f"stdlib of Python {platform.python_version()}"
    digest = taken.digest.hexdigest()
    return TextDataset(name, split, examples, digest, first_few(taken.left_out))


def _identity(example: Example) -> bytes:
    """Return a digest of an example's content, which may be long."""
    return hashlib.sha256(example.content()).digest()


def _digest(examples: Iterable[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.content() + b"\n")
    return digest.hexdigest()


class _Taken:
    """Selects the examples of a split; counts, digests and reports what was read."""

    def __init__(self, belongs: Callable[[bytes], bool], max_bytes: int | None) -> None:
        self._belongs, self._max_bytes = belongs, max_bytes
        self.left_out: list[str] = []
        self.documents = 0  # of all splits
        self.digest = hashlib.sha256()

    def of(self, items: Iterable[Example | str]) -> Iterator[Example]:
        """Yield the examples of the split."""
        total = 0
        for item in items:
            if isinstance(item, str):
                self.left_out.append(item)
                continue
            try:
                content = item.content()
            except UnicodeEncodeError:
                reason = "half of a surrogate pair, which is not valid text"
                self.left_out.append(f"{item.where}: {reason}")
                continue
            if len(content) > LONGEST:
                self.left_out.append(f"{item.where}: {len(content):,} bytes, more than {LONGEST:,}")
                continue
            total += len(content)
            if self._max_bytes is not None and total > self._max_bytes:
                reason = f"and all after it: max_bytes is {self._max_bytes:,}"
                self.left_out.insert(0, f"{item.where} {reason}")
                return
            self.documents += 1
            if self._belongs(content):
                self.digest.update(content + b"\n")
                yield item


def _is_held_out(content: bytes, fraction: float) -> bool:
    number = int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
    return number < fraction * 2**64


def _read(name: str, split: TextSplit, field: str | None) -> tuple[bool, Iterator[Example | str]]:
    """Return whether the source has splits of its own, and its examples or complaints."""
    if name == "stdlib":
        return False, _read_stdlib()
    path = Path(name).expanduser()
    saved = any((path / file).is_file() for file in ("dataset_info.json", "dataset_dict.json"))
    if name.startswith("hf:") or saved:
        return _read_hugging_face(name, split, field)
    if not path.is_dir() and not (path.is_file() and path.suffix.lower() in TEXT_FILES):
        raise DatasetUnavailable(
            f"{name!r} is neither a folder nor a text file ({' '.join(TEXT_FILES)}): give one, or "
            "'stdlib' for the source of Python's standard library, or 'hf:NAME'"
        )
    divided, paths = _divide(path, split)
    return divided, (item for path in paths for item in _read_path(path, field))


def _divide(path: Path, split: TextSplit) -> tuple[bool, list[Path]]:
    """Return whether the source has files for each split, and those of this split."""
    if split == "all":
        return True, [path]
    if path.is_dir():
        candidates, prefix = list(path.iterdir()), ""
    else:
        candidates = [p for p in path.parent.iterdir() if p.suffix == path.suffix]
        prefix = path.stem.removesuffix("train")
        if prefix == path.stem:
            return False, [path]
    paths = {
        s: _named(candidates, [prefix + n for n in names]) for s, names in _SPLIT_NAMES.items()
    }
    divided = all(paths.values())
    return divided, paths[split] if divided else [path]


def _named(paths: Iterable[Path], names: Sequence[str]) -> list[Path]:
    """Return the folder, or the files of one kind, with the first existing of these names."""
    for name in names:
        for kind in ("", *TEXT_FILES):
            pattern = re.compile(re.escape(name) + (_OF_MANY if kind else "") + re.escape(kind))
            if matching := sorted(p for p in paths if pattern.fullmatch(p.name)):
                return matching
    return []


def _read_path(path: Path, field: str | None) -> Iterator[Example | str]:
    for file in _files_in(path) if path.is_dir() else (path,):
        # A .json in a folder may be something else, and any text file may be blank.
        kind = file.suffix.lower()
        yield from _examples(file, field, kind not in PLAIN and (file == path or kind != ".json"))


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the text files below a folder, sorted by path."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():  # a link may lead back
            yield from _files_in(path)
        elif path.is_file() and path.suffix.lower() in TEXT_FILES:
            yield path


def _examples(path: Path, field: str | None, must: bool) -> Iterator[Example | str]:
    """Yield the examples of a file; with `must`, raise if it has no usable record."""
    usable, complaint = False, ""
    for item in read_file(path):
        if isinstance(item, Record):
            item = as_example(item.content, item.where, field, path.parent)
        if isinstance(item, str):
            complaint = complaint or item
        else:
            usable = True
        yield item
    if must and not usable:
        raise InputError(f"{path} has no usable record: {complaint or 'it is empty'}")


def _read_stdlib() -> Iterator[Example | str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files: dict[str, Path] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _NOT_STDLIB]
        paths = [Path(folder, n) for n in names if n.endswith(".py")]
        files |= {p.relative_to(root).as_posix(): p for p in paths if p.is_file()}
    # Sorted by hash of the name, so that the first megabytes are a mixture of modules.
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        try:
            text = files[name].read_text("utf-8")
        except (UnicodeDecodeError, OSError) as error:
            yield f"{name}: {error}"
            continue
        if text:  # an empty __init__.py is common
            yield as_document([text], name)


def _read_hugging_face(
    name: str, split: TextSplit, field: str | None
) -> tuple[bool, Iterator[Example | str]]:
    """Read a data set of the Hub, or a folder written by `save_to_disk`."""
    try:
        import datasets
    except ImportError as error:
        raise MissingPackage(
            f"{name} needs the package datasets: pip install 'ssl_kd[llm]'"
        ) from error
    load: Any
    try:
        if name.startswith("hf:"):
            path, _, config = name.removeprefix("hf:").partition(":")
            names = datasets.get_dataset_split_names(path, config or None)
            load = partial(datasets.load_dataset, path, config or None)
        else:
            saved = datasets.load_from_disk(str(Path(name).expanduser()))
            splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
            names, load = list(splits), lambda split: splits[split]
        by_split = {s: next((n for n in _SPLIT_NAMES[s] if n in names), None) for s in _SPLIT_NAMES}
        divided = None not in by_split.values()
        parts: list[Any] = names if split == "all" else [by_split[split if divided else "train"]]
        if None in parts:
            raise ValueError(f"its splits are {names}, and none is called train")
        tables = {part: load(split=part) for part in parts}
    except Exception as error:  # the hub, the network and each builder have their own exceptions
        reason = " ".join(str(error).split())[:300]
        raise DatasetUnreachable(
            f"{name} cannot be opened: {reason}. Without network, use a .jsonl file, a folder, or "
            "'stdlib'"
        ) from error
    return divided, (
        as_example(without_nulls(row), f"{name}[{part}]:{i}", field)
        for part, table in tables.items()
        for i, row in enumerate(_rows(table), 1)
    )


def _rows(table: Any) -> Iterator[dict[str, Any]]:
    for batch in table.with_format("arrow").iter(256):  # does not decode and re-encode images
        yield from batch.to_pylist()
