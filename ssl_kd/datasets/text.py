"""`open_text`: from the name in the settings to the documents a language model learns from."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ssl_kd.datasets.named import DatasetUnavailable, DatasetUnreachable
from ssl_kd.errors import InputError, MissingPackage

__all__ = ["TEXT_FILES", "Example", "TextDataset", "first_few", "open_text"]

TextSplit = Literal["train", "test", "all"]
TEXT_FILES = (".jsonl", ".txt", ".raw", ".md")
LONGEST = 1_000_000
"""Bytes of one example, above which it is taken for an accident and left out."""
_DOCUMENT, _LONG_DOCUMENT = 4_096, 16_384
_SPLIT_NAMES = {"train": ("train",), "test": ("test", "validation", "valid", "val", "eval")}
_HEAD = 4_096  # bytes in which a file shows whether it is text
_MARKS = {  # UTF-32's begins like UTF-16's, so it comes first
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_NOT_STDLIB = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Example:
    """One thing to learn: a `text`, or a `prompt` with its `completion`, or chat `messages`.

    Attributes:
        where: where it was read: `file.jsonl:17`.
        text: a document, all of which is learned.
        prompt: what is given, and not learned; with `completion`.
        completion: what is learned after the prompt.
        messages: `{"role", "content"}` each; the content of the role `assistant` is learned.
    """

    where: str
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None

    def content(self) -> bytes:
        """Its content, whatever the place: equal bytes are duplicates.

        Raises:
            UnicodeEncodeError: half of a surrogate pair, which is not valid text.
        """
        parts = self.text or (self.prompt, self.completion, self.messages)
        return json.dumps(parts, ensure_ascii=False).encode()


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
    examples: tuple[Example, ...]
    digest: str
    left_out: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.examples)

    def without(self, held_out: TextDataset) -> TextDataset:
        """Leave out what stands in another data set, too.

        Raises:
            ValueError: nothing is left.
        """
        others = {example.content() for example in held_out.examples}
        examples = tuple(e for e in self.examples if e.content() not in others)
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
    """The first `limit` lines, and one that counts the others.

    >>> first_few(["a", "b", "c"], limit=2)
    ('a', 'b', 'and 1 more')
    """
    more = len(lines) - limit
    return (*lines[:limit], *([f"and {more} more"] if more > 0 else []))


def open_text(
    source: str | os.PathLike[str],
    split: TextSplit = "train",
    *,
    field: str = "text",
    held_out: float = 0.1,
    max_bytes: int | None = None,
) -> TextDataset:
    """Read one split of a text source.

    A line of a `.jsonl` file (a row of a Hugging Face data set) is the first of these that it
    holds: `messages`, `prompt` and `completion`, `question` and `answer` (the question and a line
    break are the prompt; GSM8K), or the text in `field`. Files are UTF-8, or UTF-16 or UTF-32 with
    a byte order mark. A `.txt`, `.raw` or `.md` file is cut into
    documents: at the first blank line after 4,096 characters, or the first line break after 16,384.

    The test split is what the source itself calls so: `NAME_test.jsonl` (or `validation`, `valid`,
    `val`, `eval`) beside `NAME_train.jsonl`; such files or folders in a folder; such a split of a
    Hugging Face data set. Elsewhere it is the fraction `held_out` of the documents, chosen by a
    hash of their content, so that it stays the same and duplicates fall on one side.

    Args:
        source: `stdlib` (the Python standard library of this machine, a document per module,
            without its tests), `hf:NAME` or `hf:NAME:CONFIG`, the path of a file, or that of a
            folder of such files.
        split: `train`, `test`, or `all` of the source: a file or folder of its own for evaluation.
        field: name of the field that holds a text.
        held_out: fraction of the documents to hold out, from 0 to below 1, where the source has no
            split.
        max_bytes: stop reading before the source exceeds this; None reads all.

    Raises:
        DatasetUnavailable: no such source.
        DatasetUnreachable: no network.
        ImportError: `hf:` without the package `datasets`.
        ValueError: a bad argument, a `.jsonl` file without a usable line, or an empty split.
    """
    if split not in ("train", "test", "all"):
        raise ValueError(f"split must be 'train', 'test' or 'all', got {split!r}")
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out must be a fraction from 0 to below 1, got {held_out}")
    name = os.fspath(source)
    divided, items = _read(name, split, field)
    examples, left_out = _take(items, max_bytes)
    documents = len(examples)
    if split != "all" and not divided:
        examples = [e for e in examples if _is_held_out(e, held_out) == (split == "test")]
    if not examples and documents:
        raise InputError(
            f"{name}: nothing is left for the {split} split when {held_out:.0%} of {documents} "
            "documents are held out: name a file of its own for the evaluation (--eval_path), or "
            "give more documents"
        )
    if not examples:
        reasons = "; ".join(first_few(left_out, 3)) or "it is empty"
        raise InputError(f"{name} holds nothing to learn from: {reasons}")
    if name == "stdlib":  # each version's is another text
        name = f"stdlib of Python {platform.python_version()}"
    return TextDataset(name, split, tuple(examples), _digest(examples), first_few(left_out))


def _digest(examples: Iterable[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.content() + b"\n")
    return digest.hexdigest()


def _read(name: str, split: TextSplit, field: str) -> tuple[bool, Iterator[Example | str]]:
    """Whether the source is divided by itself, and its examples, or what is wrong with them."""
    if name == "stdlib":
        return False, _read_stdlib()
    if name.startswith("hf:"):
        return _read_hugging_face(name, split, field)
    path = Path(name).expanduser()
    if not path.is_dir() and not (path.is_file() and path.suffix in TEXT_FILES):
        raise DatasetUnavailable(
            f"{name!r} is neither a folder nor a text file ({' '.join(TEXT_FILES)}): name one, or "
            "'stdlib' for the source of Python's standard library, or 'hf:NAME'"
        )
    divided, path = _divide(path, split)
    return divided, _read_path(path, field)


def _take(items: Iterator[Example | str], max_bytes: int | None) -> tuple[list[Example], list[str]]:
    examples: list[Example] = []
    left_out: list[str] = []
    total = 0
    for item in items:
        if isinstance(item, str):
            left_out.append(item)
            continue
        try:
            size = len(item.content())
        except UnicodeEncodeError:
            left_out.append(f"{item.where}: half of a surrogate pair, which is not valid text")
            continue
        if size > LONGEST:
            left_out.append(f"{item.where}: {size:,} bytes, more than {LONGEST:,}")
            continue
        total += size
        if max_bytes is not None and total > max_bytes:
            left_out.insert(0, f"{item.where} and all after it: max_bytes is {max_bytes:,}")
            break
        examples.append(item)
    return examples, left_out


def _is_held_out(example: Example, fraction: float) -> bool:
    number = int.from_bytes(hashlib.sha256(example.content()).digest()[:8], "big")
    return number < fraction * 2**64


def _divide(path: Path, split: TextSplit) -> tuple[bool, Path]:
    """The file or folder of this split, where the source has one for each."""
    if split == "all":
        return True, path
    if path.is_dir():
        train = next((p for s in ("", *TEXT_FILES) if (p := path / f"train{s}").exists()), None)
    else:
        train = path if path.stem.endswith("train") else None
    if train is None:
        return False, path
    stem = train.stem.removesuffix("train")
    for name in _SPLIT_NAMES["test"]:
        test = train.with_name(f"{stem}{name}{train.suffix}")
        if test.exists():
            return True, train if split == "train" else test
    return False, path


def _read_path(path: Path, field: str) -> Iterator[Example | str]:
    if path.is_dir():
        for file in sorted(p for p in path.rglob("*") if p.suffix in TEXT_FILES and p.is_file()):
            yield from _read_path(file, field)
    elif path.suffix == ".jsonl":
        yield from _read_jsonl(path, field)
    else:
        yield from _read_plain(path)


def _lines(path: Path) -> Iterator[bytes | str]:
    """Lines of a text file as UTF-8; one that is a string says what is wrong in its place."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
        file.seek(0)
        encoding = next((name for mark, name in _MARKS.items() if head.startswith(mark)), None)
        if encoding is None and b"\0" not in head:
            for line in file:
                yield "holds NUL bytes" if b"\0" in line else line
            return
    if encoding is None:
        yield "the file holds NUL bytes: binary, or UTF-16 without a byte order mark"
        return
    try:
        with path.open(encoding=encoding, newline="\n") as text:
            for line in text:
                yield line.encode()
    except UnicodeError as error:
        yield f"not {encoding.upper()} ({error}); it and all after it are left out"


def _read_jsonl(path: Path, field: str) -> Iterator[Example | str]:
    usable, complaint = False, ""
    for number, line in enumerate(_lines(path), 1):
        where = f"{path.name}:{number}"
        item = f"{where}: {line}" if isinstance(line, str) else _parse(line, where, field)
        if isinstance(item, str):
            complaint = complaint or item
        else:
            usable = True
        yield item
    if not usable:
        raise InputError(f"{path} has no usable line: {complaint or 'it is empty'}")


def _parse(line: bytes, where: str, field: str) -> Example | str:
    if not line.strip():
        return f"{where}: empty"
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return f"{where}: not JSON ({error})"
    return _example(record, where, field)


def _example(record: Any, where: str, field: str) -> Example | str:
    if not isinstance(record, Mapping):
        return f"{where}: not an object but {type(record).__name__}"
    if isinstance(record.get("messages"), list):
        return _chat(record["messages"], where)
    for prompt, completion in (("prompt", "completion"), ("question", "answer")):
        given, learned = record.get(prompt), record.get(completion)
        if isinstance(given, str) and isinstance(learned, str):
            if not learned.strip():
                return f"{where}: {completion} is empty"
            given += "\n" if prompt == "question" else ""
            return Example(where, prompt=given, completion=learned)
    text = record.get(field)
    if not isinstance(text, str):
        return (
            f"{where}: holds {sorted(map(str, record))[:8]}; expected strings in messages, "
            f"prompt and completion, question and answer, or {field}"
        )
    return Example(where, text=text) if text.strip() else f"{where}: {field} is empty"


def _chat(messages: list[Any], where: str) -> Example | str:
    for message in messages:
        if not (
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        ):
            return f"{where}: a message must hold the strings role and content"
    if not any(m["role"] == "assistant" and m["content"].strip() for m in messages):
        return f"{where}: no message of the assistant to learn from"
    turns = tuple({"role": m["role"], "content": m["content"]} for m in messages)
    return Example(where, messages=turns)


def _read_plain(path: Path) -> Iterator[Example | str]:
    lines: list[str] = []
    first, length = 1, 0
    for number, raw in enumerate(_lines(path), 1):
        if isinstance(raw, str):
            yield f"{path.name}:{number}: {raw}"
            continue
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            yield f"{path.name}:{number}: not UTF-8 ({error.reason})"
            continue
        lines.append(line)
        length += len(line)
        if length > _LONG_DOCUMENT or (length > _DOCUMENT and not line.strip()):
            yield _document(lines, f"{path.name}:{first}")
            lines, first, length = [], number + 1, 0
    if first == 1 or any(map(str.strip, lines)):
        yield _document(lines, f"{path.name}:{first}")


def _document(lines: list[str], where: str) -> Example | str:
    text = "".join(lines).strip("\n")
    return Example(where, text=text) if text.strip() else f"{where}: empty"


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
            yield _document([text], name)


def _read_hugging_face(
    name: str, split: TextSplit, field: str
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
    return divided, (_example(row, f"{name}[{part}]:{i}", field) for i, row in enumerate(rows, 1))
