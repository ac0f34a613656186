"""What a cache was computed from: equal fingerprints, equal embeddings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


class FingerprintMismatch(ValueError):
    """A cache was computed from something else than what this run asks for."""

    def __init__(self, path: Path, differences: Sequence[str]):
        self.path = path
        self.differences = list(differences)
        super().__init__(
            f"{path} was made from something else: {'; '.join(differences)}. "
            "Go on with --force-recompute to replace it, "
            "or with --embeddings_dir to keep it and use another folder."
        )


@dataclass(frozen=True)
class Fingerprint:
    """Everything that decides what a teacher's embeddings are.

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

    teacher: str
    weights: str
    transform: str
    dtype: str
    data: str

    def differences(self, asked: Fingerprint) -> list[str]:
        """One sentence for each field in which this (the cache's) and `asked` differ."""
        ours, theirs = asdict(self), asdict(asked)
        return [
            f"{name}: cache has {ours[name]!r}, this run asks for {theirs[name]!r}"
            for name in ours
            if ours[name] != theirs[name]
        ]

    @property
    def digest(self) -> str:
        """SHA-256 of all fields, in hexadecimal."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
