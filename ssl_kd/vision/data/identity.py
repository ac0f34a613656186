"""Recognize rows of tables and files of samples by their content, when they are opened again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as arrow
from pyarrow import compute, types

from ssl_kd.core.errors import InputError
from ssl_kd.core.files.state import DIGEST_BYTES, FileState
from ssl_kd.vision.data.tables import Table, is_text, readable_values


def files_of_table(table: Table) -> dict[str, FileState]:
    """Return the state of each file of a table, by its path relative to the table."""
    paths: Sequence[Path] = table.files or [table.path]
    if table.path.is_dir() and not table.files:
        paths = sorted(path for path in table.path.rglob("*") if path.is_file())
    names = [Path(os.path.relpath(path, table.path)).as_posix() for path in paths]
    states = {name: FileState.of(path) for name, path in zip(names, paths, strict=True)}
    return {name: state for name, state in states.items() if state is not None}


def row_digests(table: Table, names: Sequence[str]) -> list[bytes]:
    """Return a digest of the content of each row in some columns.

    It does not depend on the order of rows and columns, nor on the type of floating-point numbers
    in lists: those are compared as float32.

    Raises:
        InputError: the table has no such column.
    """
    if missing := [name for name in names if name not in table.kinds]:
        raise InputError(f"{table.path} has no column {missing[0]!r} any more")
    digests = [b""] * table.n
    for name in sorted(names):
        start = name.encode("utf-8", "surrogatepass") + b"\0"
        rows = zip(digests, _contents(table.read(name)), strict=True)
        digests = [
            hashlib.sha256(before + start + content).digest()[:DIGEST_BYTES]
            for before, content in rows
        ]
    return digests


def _contents(column: arrow.ChunkedArray) -> Iterator[bytes]:
    """Yield the value of each row as bytes that differ for different values."""
    for chunk in column.chunks:
        kind = getattr(chunk.type, "storage_type", chunk.type)
        chunk = chunk.cast(kind) if kind != chunk.type else chunk
        value = None if types.is_dictionary(kind) else getattr(kind, "value_type", None)
        if value is not None and (types.is_integer(value) or types.is_floating(value)):
            yield from _vectors(chunk)
        elif is_text(kind):
            yield from map(_encoded, readable_values(chunk))
        else:
            yield from map(_encoded, chunk.to_pylist())


def _vectors(lists: arrow.Array) -> Iterator[bytes]:
    """Yield each list of numbers as the bytes of float32 values; a missing list is empty."""
    lengths = compute.call_function("list_value_length", [lists]).fill_null(0)
    ends = np.cumsum(lengths.to_numpy(zero_copy_only=False))
    with np.errstate(over="ignore"):
        flat = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    start = 0
    for end in ends.tolist():
        yield flat[start:end].tobytes()
        start = end


def _encoded(value: object) -> bytes:
    if isinstance(value, bytes):
        return b"b" + value
    if isinstance(value, dict):  # a picture of Hugging Face: its bytes and its path
        parts = [_encoded(part) for part in (*value.keys(), *value.values())]
        return b"d" + b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return repr(value).encode("utf-8", "surrogatepass")
