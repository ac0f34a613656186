"""Fingerprints: equal fingerprints mean equal cache content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from typing_extensions import Self

from ssl_kd.errors import InputError


class FingerprintMismatch(InputError):
    """A cache was computed from something else than this run needs."""

    def __init__(self, path: Path, differences: Sequence[str], way_out: str):
        self.path = path
        self.differences = list(differences)
        super().__init__(
            f"{path} was made from something else: {'; '.join(differences)}. {way_out}"
        )


_KINDS = {str: "str", int: "int", float: "float", bool: "bool", type(None): "None"}


@dataclass(frozen=True)
class BaseFingerprint:
    """Everything that determines a cache's content: strings and numbers, which JSON preserves."""

    way_out: ClassVar[str]
    """A sentence that tells the user how to resolve a mismatch."""

    @classmethod
    def odd(cls, values: Mapping[str, object]) -> list[str]:
        """Return the names of values that are missing, unknown or of a wrong type."""
        kinds = {field.name: str(field.type).split(" | ") for field in fields(cls)}
        wrong = {
            name
            for name in kinds.keys() & values.keys()
            if (kind := _KINDS.get(type(values[name]))) not in kinds[name]
            and not (kind == "int" and "float" in kinds[name])
        }
        return sorted(wrong | (kinds.keys() ^ values.keys()))

    def differences(self, expected: Self) -> list[str]:
        """Describe each field in which this fingerprint (the cache's) and `expected` differ."""
        return [
            f"{name}: cache has {cached!r}, this run asks for {getattr(expected, name)!r}"
            for name, cached in vars(self).items()
            if cached != getattr(expected, name)
        ]

    @property
    def digest(self) -> str:
        """SHA-256 of all fields, in hexadecimal."""
        return hashlib.sha256(json.dumps(vars(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Fingerprint(BaseFingerprint):
    """Everything that determines a teacher's embeddings.

    Args:
        teacher: name of the teacher.
        weights: identity of its weights.
        transform: identity of the preprocessing, with its image size.
        dtype: what the teacher computed in.
        data: identity of the data set's content, its order and its labels.

    >>> a = Fingerprint("pixels", "none", "none", "float32", "digits")
    >>> a.differences(Fingerprint("dinov2_vits14", "none", "none", "float32", "digits"))
    ["teacher: cache has 'pixels', this run asks for 'dinov2_vits14'"]
    """

    way_out = (
        "Keep it and name another folder with --embeddings_dir, or auto for one of this data and "
        "teacher. --force-recompute replaces it."
    )

    teacher: str
    weights: str
    transform: str
    dtype: str
    data: str
