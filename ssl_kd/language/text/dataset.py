"""Open the text that a language model is trained on, by name or path.

The package `datasets` (5.2) is not used for text files: one damaged line makes it reject the whole
file without the number of the line, and it turns text that looks like a date into a date.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import platform
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ssl_kd.core.errors import (
    DatasetUnavailable,
    DatasetUnreachable,
    InputError,
    MissingPackage,
    brief,
    first_few,
)
from ssl_kd.core.files.spill import SpilledSequence
from ssl_kd.language.text.records import Example, as_examples
from ssl_kd.language.text.shares import Share

TextSplit = Literal["train", "test", "all"]
_SPLIT_NAMES = {"train": ("train",), "test": ("test", "validation", "valid", "val", "eval")}
_SHARD = r"(-\d+-of-\d+)?"  # in names of files on the Hub
_NOT_STDLIB = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages"}
LONGEST = 1_000_000
"""Size in bytes above which an example is left out, since it is probably a mistake."""
MOST_NAMED = 10_000
"""Most records and documents that are named one by one where they are left out."""
_DOCUMENT, _LONG_DOCUMENT = 4_096, 16_384
_ROWS = 256  # rows of a table in memory at once
_Convert = Callable[..., Iterator[Example | str]]  # `as_examples` with its options


@dataclass(frozen=True)
class TextDataset:
    """Documents in a fixed order."""

    name: str
    split: TextSplit
    examples: Sequence[Example]
    digest: str  # SHA-256 of the content of all examples, in order
    left_out: tuple[str, ...]  # about the unusable records: `file.jsonl:17: text is empty`
    learn_thoughts: bool = True  # whether the reasoning of assistant turns is trained on
    tags: tuple[str, ...] = ()  # of all examples, if each is learned from the teacher of its tag
    shares: tuple[Share, ...] = ()  # of the records of all splits that are left out

    def __len__(self) -> int:
        return len(self.examples)

    @cached_property
    def pictured(self) -> str | None:
        """Position of the first document with images; None if there is none."""
        return next((e.where for e in self.examples if e.images), None)

    def check_text_alone(self) -> None:
        """Raise InputError if a document has images, which a tokenizer cannot read."""
        if self.pictured is not None:
            raise InputError(
                f"{self.pictured} contains images; expected text, since a tokenizer cannot read "
                "images: use make_picture_blocks of ssl_kd.language.text.picture_blocks with a "
                "processor"
            )

    def without(self, held_out: TextDataset) -> TextDataset:
        """Return this data set without the documents that `held_out` also contains."""
        others, digest = set(map(_identity, held_out.examples)), hashlib.sha256()

        def remaining() -> Iterator[Example]:
            for example in self.examples:
                if _identity(example) not in others:
                    digest.update(example.content() + b"\n")
                    yield example

        examples = SpilledSequence(remaining())
        if not (n_dropped := len(self) - len(examples)):
            return self
        if not examples:
            raise InputError(
                f"every document of {self.name} is also in {held_out.name}: choose different data "
                "for training (--data_path) and evaluation (--eval_path)"
            )
        lines = (f"{n_dropped} documents are also in the evaluation data", *self.left_out)
        return replace(self, examples=examples, digest=digest.hexdigest(), left_out=lines)


def open_text(
    source: str | os.PathLike[str],
    split: TextSplit = "train",
    *,
    field: str | None = None,
    held_out: float = 0.1,
    max_bytes: int | None = None,
    prompts: bool = False,
    tag_field: str | None = None,
) -> TextDataset:
    """Open one split of a text data set.

    A file contains one record per line (`.jsonl`), one record or a list of records (`.json`), or
    one record per row (`.csv`, `.parquet`); `as_example` lists the forms of a record. A `.txt` or
    `.md` file is split into documents, at the first blank line after 4,096 characters or the first
    line break after 16,384. Text is UTF-8. Files packed by gzip (`.jsonl.gz`) are unpacked.

    If the source has splits, they are used: files `NAME_train.jsonl` and `NAME_test.jsonl` (or
    `validation`, `valid`, `val`, `eval`), files or folders with such names in a folder (also
    `test-00000-of-00002.parquet`), or the splits of a Hugging Face data set. Otherwise the test
    split is the fraction `held_out` of the documents, selected by a hash of the content, so that
    duplicates are in the same split; answers to one prompt are, too.

    Args:
        source: a file, a folder of files, a folder written by `save_to_disk` of `datasets`,
            `hf:NAME` or `hf:NAME:CONFIG`, or `stdlib` (the installed Python standard library
            without its tests, one document per module).
        split: `train`, `test` or `all`.
        field: name of the field with the text; None: choose one of the forms of `as_example`.
        held_out: fraction of the documents in the test split, if the source has no splits.
        max_bytes: stop reading before the documents exceed this size; None: read all.
        prompts: whether a record may be a prompt without a text, which a model must continue.
        tag_field: name of the field with the tag of a record; None: no tags.
    """
    if split not in ("train", "test", "all"):
        raise ValueError(f"split is {split!r}; expected 'train', 'test' or 'all'")
    name = os.fspath(source)
    convert = partial(as_examples, field=field, tag_field=tag_field, prompts=prompts)
    divided, items = _read(name, split, convert)

    left_out: list[str] = []
    digest, documents = hashlib.sha256(), 0  # documents of all splits

    def selected() -> Iterator[Example]:
        nonlocal documents
        for example, content in _usable(items, max_bytes, left_out):
            documents += 1
            of = example.group.encode() or content
            if divided or split == "all" or _is_held_out(of, held_out) == (split == "test"):
                digest.update(content + b"\n")
                yield example

    examples = SpilledSequence(selected())
    if not examples and documents:
        raise InputError(
            f"{name}: the {split} split is empty, since {held_out:.0%} of {documents} "
            "documents are held out: add documents, or set a separate file with --eval_path"
        )
    if not examples:
        no_files = f"the folder has no {' '.join(TEXT_FILES)} files"
        empty = no_files if os.path.isdir(name) else "the source is empty"
        reasons = "; ".join(first_few(left_out, 3)) or empty
        raise InputError(f"{name} contains no usable document: {reasons}")
    if name == "stdlib":  # the text depends on the version
        name = f"stdlib of Python {platform.python_version()}"
    n, messages = len(left_out), first_few(left_out, MOST_NAMED)
    shares = ()
    if left_out:
        shares = (Share(n, n + documents, "records", "left out", left_out[0]),)
    return TextDataset(name, split, examples, digest.hexdigest(), messages, shares=shares)


def _identity(example: Example) -> bytes:
    return hashlib.sha256(example.content()).digest()


def _usable(
    items: Iterable[Example | str], max_bytes: int | None, left_out: list[str]
) -> Iterator[tuple[Example, bytes]]:
    """Yield each usable example with its content, and note which items are left out."""
    total = 0
    for item in items:
        if isinstance(item, str):
            left_out.append(item)
            continue
        try:
            content = item.content()
        except UnicodeEncodeError:
            left_out.append(f"{item.where}: invalid text (half of a surrogate pair)")
            continue
        if len(content) > LONGEST:
            size = f"{len(content):,} bytes; expected at most {LONGEST:,}"
            left_out.append(f"{item.where}: the document has {size}")
            continue
        total += len(content)
        if max_bytes is not None and total > max_bytes:
            left_out.insert(
                0, f"{item.where} and the rest are left out: max_bytes is {max_bytes:,}"
            )
            return
        yield item, content


def _is_held_out(content: bytes, fraction: float) -> bool:
    number = int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
    return number < fraction * 2**64


def _read(name: str, split: TextSplit, convert: _Convert) -> tuple[bool, Iterator[Example | str]]:
    """Return whether the source has splits, and its examples and messages about unusable ones."""
    if name == "stdlib":
        return False, _read_stdlib()
    path = Path(name).expanduser()
    saved = any((path / file).is_file() for file in ("dataset_info.json", "dataset_dict.json"))
    if name.startswith("hf:") or saved:
        return _read_hugging_face(name, split, convert)
    if not path.is_dir() and not (path.is_file() and _kind(path) in TEXT_FILES):
        raise DatasetUnavailable(
            f"the text source is {name!r}; expected an existing folder or text file "
            f"({' '.join(TEXT_FILES)}, also .gz), 'hf:NAME', or 'stdlib' (the Python standard "
            "library)"
        )
    divided, paths = _divide(path, split)
    return divided, (item for path in paths for item in _read_path(path, convert))


def _divide(path: Path, split: TextSplit) -> tuple[bool, list[Path]]:
    """Return whether the source has files for each split, and the files to read."""
    if split == "all":
        return True, [path]
    if path.is_dir():
        candidates, prefix = list(path.iterdir()), ""
    else:
        candidates = [p for p in path.parent.iterdir() if _kind(p) == _kind(path)]
        stem = path.name[: path.name.lower().rindex(_kind(path))]
        prefix = stem.removesuffix("train")
        if prefix == stem:
            return False, [path]
    paths = {
        s: _named(candidates, [prefix + n for n in names]) for s, names in _SPLIT_NAMES.items()
    }
    divided = all(paths.values())
    return divided, paths[split] if divided else [path]


def _named(paths: Iterable[Path], names: Sequence[str]) -> list[Path]:
    """Return the folder or files that have the first of these names that exists."""
    for name in names:
        for kind in ("", *TEXT_FILES):
            ending = _SHARD + re.escape(kind) + r"(\.gz)?" if kind else ""
            pattern = re.compile(re.escape(name) + ending)
            if matching := sorted(p for p in paths if pattern.fullmatch(p.name)):
                return matching
    return []


def _read_path(path: Path, convert: _Convert) -> Iterator[Example | str]:
    for file in _files_in(path) if path.is_dir() else (path,):
        # A .json file in a folder may be unrelated, and a plain text file may be blank.
        kind = _kind(file)
        yield from _examples(file, convert, kind not in PLAIN and (file == path or kind != ".json"))


def _files_in(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():  # a link may be circular
            yield from _files_in(path)
        elif path.is_file() and _kind(path) in TEXT_FILES:
            yield path


def _kind(path: Path) -> str:
    """Return the ending of a file's name in lower case, without `.gz` if it can be unpacked."""
    name = path.name.lower()
    unpacked = Path(name.removesuffix(".gz")).suffix
    return Path(name).suffix if unpacked == ".parquet" else unpacked


def _examples(path: Path, convert: _Convert, must: bool) -> Iterator[Example | str]:
    """Yield the examples of a file; raise InputError if `must` and no record is usable."""
    usable, first_message = False, ""
    for read in _read_file(path):
        record = isinstance(read, _Record)
        items = convert(read.content, read.where, folder=path.parent) if record else [read]
        for item in items:
            if isinstance(item, str):
                first_message = first_message or item
            else:
                usable = True
            yield item
    if must and not usable:
        raise InputError(f"{path} has no usable record: {first_message or 'the file is empty'}")


def _read_stdlib() -> Iterator[Example | str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files: dict[str, Path] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _NOT_STDLIB]
        paths = [Path(folder, n) for n in names if n.endswith(".py")]
        files |= {p.relative_to(root).as_posix(): p for p in paths if p.is_file()}
    # Sorted by a hash of the name, so that the first megabytes are a mixture of modules.
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        try:
            text = files[name].read_text("utf-8")
        except (UnicodeDecodeError, OSError) as error:
            yield f"{name}: {error}"
            continue
        if text:  # an empty __init__.py is common
            yield _as_document([text], name)


def _read_hugging_face(
    name: str, split: TextSplit, convert: _Convert
) -> tuple[bool, Iterator[Example | str]]:
    try:
        import datasets
    except ImportError as error:
        raise MissingPackage(
            f"reading {name} needs the package datasets: pip install 'ssl_kd[llm]'"
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
            raise ValueError(f"the splits are {names}; expected one called train")
        tables = {part: load(split=part) for part in parts}
    except Exception as error:  # the hub, the network and each builder have their own exceptions
        raise DatasetUnreachable(
            f"{name} cannot be opened: {brief(error, 300)}. Without network access, use a local "
            "file or folder, or 'stdlib'"
        ) from error
    return divided, (
        item
        for part, table in tables.items()
        for i, row in enumerate(_rows(table), 1)
        for item in convert(without_nulls(row), f"{name}[{part}]:{i}")
    )


def _rows(table: Any) -> Iterator[dict[str, Any]]:
    for batch in table.with_format("arrow").iter(256):  # images are not decoded
        yield from batch.to_pylist()


class _Record(NamedTuple):
    where: str
    content: Any


_Item = _Record | Example | str
"""A record, a document, or a message that says why a record cannot be used."""


def _read_file(path: Path) -> Iterator[_Item]:
    """Yield the records of a file in order, without loading all of it (except `.json`)."""
    import pyarrow

    try:
        yield from TEXT_FILES[_kind(path)](path)
    except (csv.Error, pyarrow.ArrowException, gzip.BadGzipFile, EOFError, zlib.error) as error:
        damage = f"the file is damaged ({brief(error)}), so the remaining rows are left out"
        yield f"{path.name}: {damage}"


class _Line(NamedTuple):
    where: str
    text: str
    fault: str  # why the line cannot be used, or empty


def _lines(path: Path) -> Iterator[_Line]:
    is_packed = path.suffix.lower() == ".gz"
    with gzip.open(path, "rb") if is_packed else path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            where = f"{path.name}:{number}"
            text = ""
            fault = ""
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                fault = f"not UTF-8 ({error.reason})"
            if b"\0" in raw:
                fault = "contains NUL bytes; expected UTF-8 text: convert the file"
            yield _Line(where, text, fault)


def _read_jsonl(path: Path) -> Iterator[_Item]:
    for where, text, fault in _lines(path):
        fault = fault or ("" if text.strip() else "empty")
        yield f"{where}: {fault}" if fault else _parsed(text, where)


def _parsed(text: str, where: str) -> _Record | str:
    try:
        return _Record(where, json.loads(text))
    except (ValueError, RecursionError) as error:
        return f"{where}: not valid JSON ({error})"


def _read_json(path: Path) -> Iterator[_Item]:
    """Read a list of records, or one record."""
    lines = list(_lines(path))
    if faulty := next((line for line in lines if line.fault), None):
        yield f"{faulty.where}: {faulty.fault}"
        return
    record = _parsed("".join(line.text for line in lines), path.name)
    if isinstance(record, _Record) and isinstance(record.content, list):
        yield from (_Record(f"{path.name}:{i}", each) for i, each in enumerate(record.content, 1))
    else:
        yield record


def _read_csv(path: Path) -> Iterator[_Item]:
    """Read rows below a line of field names; a quoted field may contain line breaks."""
    csv.field_size_limit(max(csv.field_size_limit(), 4 * LONGEST))
    faults: list[str] = []

    def usable() -> Iterator[str]:
        for where, text, fault in _lines(path):
            if fault:
                faults.append(f"{where}: {fault}")
            else:
                yield text

    rows = csv.DictReader(usable())
    for row in rows:
        where = f"{path.name}:{rows.line_num}"
        if None in row:
            yield f"{where}: more fields than the first line names"
        else:
            yield _Record(where, {k: v for k, v in row.items() if v is not None})
    yield from faults


def _read_parquet(path: Path) -> Iterator[_Item]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, memory_map=True) as file:
        rows = (row for batch in file.iter_batches(batch_size=_ROWS) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield _Record(f"{path.name}:{number}", without_nulls(row))


def without_nulls(value: Any) -> Any:
    """Remove null fields, which a table has where only other records have a value."""
    if isinstance(value, Mapping):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def _read_plain(path: Path) -> Iterator[_Item]:
    """Split text into documents, preferably at blank lines."""
    lines: list[str] = []
    first, length = 1, 0
    for number, (where, line, fault) in enumerate(_lines(path), 1):
        if fault:
            yield f"{where}: {fault}"
            continue
        lines.append(line := line.replace("\r\n", "\n"))
        length += len(line)
        if length > _LONG_DOCUMENT or (length > _DOCUMENT and not line.strip()):
            yield _as_document(lines, f"{path.name}:{first}")
            lines = []
            first = number + 1
            length = 0
    if first == 1 or any(map(str.strip, lines)):
        yield _as_document(lines, f"{path.name}:{first}")


def _as_document(lines: Iterable[str], where: str) -> Example | str:
    text = "".join(lines).strip("\n")
    return Example(where, text=text) if text.strip() else f"{where}: empty"


TEXT_FILES: Mapping[str, Callable[[Path], Iterator[_Item]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".txt": _read_plain,
    ".md": _read_plain,
    ".parquet": _read_parquet,
}
"""Function that reads a file, by suffix."""
PLAIN = (".txt", ".md")
"""Suffixes of files that contain plain text instead of records."""
