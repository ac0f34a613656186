"""`open_text`: from the name in the settings to the documents that a language model learns."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from ssl_kd.datasets.catalog import DatasetUnavailable, DatasetUnreachable
from ssl_kd.datasets.records import Example, as_example
from ssl_kd.datasets.spill import SpilledSequence
from ssl_kd.datasets.text_files import (
    LONGEST,
    PLAIN,
    TEXT_FILES,
    Record,
    as_document,
    files_in,
    is_saved_dataset,
    kind_of,
    read_file,
    stem_of,
    without_nulls,
)
from ssl_kd.errors import InputError, MissingPackage

TextSplit = Literal["train", "test", "all"]
_SPLIT_NAMES = {"train": ("train",), "test": ("test", "validation", "valid", "val", "eval")}
_OF_MANY = r"(-\d+-of-\d+)?"  # a file that is one of several, as the Hub has them
_NOT_STDLIB = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class TextDataset:
    """Documents in a fixed order.

    Attributes:
        name: what the user called the source.
        split: `train`, `test` or `all`.
        examples: the documents.
        digest: SHA-256 of the content of the examples, in their order.
        left_out: what could not be used, and why: `file.jsonl:17: not JSON`; the first few.
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
        """Return the place of the first document with images; None where no document has any."""
        return next((e.where for e in self.examples if e.images), None)

    def check_text_alone(self) -> None:
        """Raise InputError where a document holds images, which a tokenizer would ignore."""
        if self.pictured is not None:
            raise InputError(
                f"{self.pictured} holds images, and tokens are made of text alone here: take "
                "ssl_kd.datasets.picture_blocks.make_picture_blocks with a model's processor"
            )

    def without(self, held_out: TextDataset) -> TextDataset:
        """Leave out the documents that another data set has, too.

        Raises:
            ValueError: nothing is left.
        """
        others = {_identity(example) for example in held_out.examples}
        kept = (e for e in self.examples if _identity(e) not in others)
        examples = SpilledSequence(kept)
        if not (found := len(self) - len(examples)):
            return self
        if not examples:
            raise InputError(
                f"every document of {self.name} is held out, too, in {held_out.name}: name other "
                "text to learn from or to hold out (--data_path, --eval_path)"
            )
        lines = (f"{found} documents that are held out, too", *self.left_out)
        return replace(self, examples=examples, digest=_digest(examples), left_out=lines)


def first_few(lines: Sequence[str], limit: int = 20) -> tuple[str, ...]:
    """Return the first `limit` lines, and one that counts the others.

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

    Files hold records: lines of `.jsonl`, a list or one of them in `.json`, rows of `.csv`, `.tsv`,
    `.parquet` and `.arrow`; those of text may be packed (`.jsonl.gz`). `as_example` lists the forms
    of a record. Text is UTF-8. A `.txt`,
    `.raw` or `.md` file is cut into documents: at the first blank line after 4,096 characters, or
    the first line break after 16,384.

    The test split is what the source itself calls so: `NAME_test.jsonl` (or `validation`, `valid`,
    `val`, `eval`) beside `NAME_train.jsonl`; such files or folders in a folder (also
    `test-00000-of-00002.parquet`, and what `DatasetDict.save_to_disk` wrote); such a split of a
    Hugging Face data set. Elsewhere it is the fraction `held_out` of the documents, chosen by a
    hash of their content, so that it stays the same and duplicates fall on one side.

    Up to a GiB of documents are in memory; more lie in a temporary file, which ends with the
    process (TMPDIR names its folder). The source is read one record at a time (`.json` files
    whole, tables by 256 rows).

    Args:
        source: `stdlib` (the Python standard library of this machine, a document per module,
            without its tests), `hf:NAME` or `hf:NAME:CONFIG`, the path of a file, or that of a
            folder of such files, or one that `save_to_disk` wrote.
        split: `train`, `test`, or `all` of the source: a file or folder of its own for evaluation.
        field: name of the field that holds a text; None for all forms that `as_example` knows.
        held_out: fraction of the documents to hold out, from 0 to below 1, where the source has no
            split.
        max_bytes: stop reading before the source exceeds this; None reads all.

    Raises:
        DatasetUnavailable: no such source.
        DatasetUnreachable: no network.
        ImportError: `hf:` without the package `datasets`.
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
            f"{taken.documents} documents are held out: name a file of its own for the evaluation "
            "(--eval_path), or give more documents"
        )
    if not examples:
        none = f"no file in it is one of {' '.join(TEXT_FILES)}"
        empty = none if os.path.isdir(name) else "it is empty"
        reasons = "; ".join(first_few(taken.left_out, 3)) or empty
        raise InputError(f"{name} holds nothing to learn from: {reasons}")
    if name == "stdlib":  # each version's is another text
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
    """Selects the examples of a split, and counts, digests and reports on what was read."""

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
                why = "half of a surrogate pair, which is not valid text"
                self.left_out.append(f"{item.where}: {why}")
                continue
            if len(content) > LONGEST:
                self.left_out.append(f"{item.where}: {len(content):,} bytes, more than {LONGEST:,}")
                continue
            total += len(content)
            if self._max_bytes is not None and total > self._max_bytes:
                why = f"and all after it: max_bytes is {self._max_bytes:,}"
                self.left_out.insert(0, f"{item.where} {why}")
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
    if name.startswith("hf:"):
        return _read_hugging_face(name, split, field)
    path = Path(name).expanduser()
    if not path.is_dir() and not (path.is_file() and kind_of(path)):
        raise DatasetUnavailable(
            f"{name!r} is neither a folder nor a text file ({' '.join(TEXT_FILES)}): name one, or "
            "'stdlib' for the source of Python's standard library, or 'hf:NAME'"
        )
    divided, paths = _divide(path, split)
    return divided, (item for path in paths for item in _read_path(path, field))


def _divide(path: Path, split: TextSplit) -> tuple[bool, list[Path]]:
    """Return whether the source has files for each split, and those of this split."""
    if split == "all":
        return True, [path]
    if is_saved_dataset(path):
        return False, [path]
    if path.is_dir():
        there = [p for p in path.iterdir() if p.is_dir() or kind_of(p)]
        before = ""
    else:
        there = [p for p in path.parent.iterdir() if kind_of(p) == kind_of(path)]
        before = stem_of(path).removesuffix("train")
        if before == stem_of(path):
            return False, [path]
    found = {s: _named(there, [before + n for n in names]) for s, names in _SPLIT_NAMES.items()}
    divided = all(found.values())
    return divided, found[split] if divided else [path]


def _named(paths: Iterable[Path], names: Sequence[str]) -> list[Path]:
    """Return the folder, or the files of one kind, with the first of these names that exists."""
    for name in names:
        for kind in ("", *TEXT_FILES):
            whole = re.compile(re.escape(name) + (_OF_MANY if kind else "") + re.escape(kind))
            if found := sorted(p for p in paths if whole.fullmatch(p.name)):
                return found
    return []


def _read_path(path: Path, field: str | None) -> Iterator[Example | str]:
    for file in files_in(path) if path.is_dir() else (path,):
        # A folder may hold a .json that is no data, and any file of text may be blank.
        must = kind_of(file) not in PLAIN and (file == path or kind_of(file) != ".json")
        yield from _examples(file, field, must)


def _examples(path: Path, field: str | None, must: bool) -> Iterator[Example | str]:
    """Yield the examples of a file; with `must`, refuse a file without a usable record."""
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
    # By hash of the name: the first megabytes are a mixture, not the modules that begin with a.
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        try:
            text = files[name].read_text("utf-8")
        except (UnicodeDecodeError, OSError) as error:
            yield f"{name}: {error}"
            continue
        if text:  # many an __init__.py is empty on purpose
            yield as_document([text], name)


def _read_hugging_face(
    name: str, split: TextSplit, field: str | None
) -> tuple[bool, Iterator[Example | str]]:
    try:
        import datasets
    except ImportError as error:
        raise MissingPackage(
            f"{name} needs the package datasets: pip install 'ssl_kd[llm]'"
        ) from error
    path, _, config = name.removeprefix("hf:").partition(":")
    try:
        names = datasets.get_dataset_split_names(path, config or None)
        found = {s: next((n for n in _SPLIT_NAMES[s] if n in names), None) for s in _SPLIT_NAMES}
        divided = None not in found.values()
        part = "+".join(names) if split == "all" else found[split if divided else "train"]
        if part is None:
            raise ValueError(f"its splits are {names}, and none is called train")
        rows = datasets.load_dataset(path, config or None, split=part)
    except Exception as error:  # the hub, the network and each builder have exceptions of their own
        reason = " ".join(str(error).split())[:300]
        raise DatasetUnreachable(
            f"{name} cannot be opened: {reason}. Without network, name a .jsonl file, a folder, or "
            "'stdlib'"
        ) from error
    return divided, (
        as_example(without_nulls(row), f"{name}[{part}]:{i}", field)
        for i, row in enumerate(rows, 1)
    )
