"""Identify what a cache was computed from: caches with equal fingerprints have equal content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from typing_extensions import Self

from ssl_kd.core.errors import InputError


class FingerprintMismatch(InputError):
    """Raised if a cache was computed from another teacher or other data than this run needs."""

    def __init__(self, path: Path, differences: Sequence[str], way_out: str):
        self.path = path
        self.differences = list(differences)
        super().__init__(
            f"{path} was computed from something else: {'; '.join(differences)}. {way_out}"
        )


_KINDS = {str: "str", int: "int", float: "float", bool: "bool", type(None): "None"}


@dataclass(frozen=True)
class BaseFingerprint:
    """The inputs that determine a cache's content, as strings and numbers for JSON."""

    way_out: ClassVar[str]
    """How to resolve a mismatch, as the last sentence of the error message."""

    @classmethod
    def odd(cls, values: Mapping[str, object]) -> list[str]:
        """Return the names of fields that are missing, unknown or of a wrong type in `values`."""
        kinds = {field.name: str(field.type).split(" | ") for field in fields(cls)}
        wrong = {
            name
            for name in kinds.keys() & values.keys()
            if (kind := _KINDS.get(type(values[name]))) not in kinds[name]
            and not (kind == "int" and "float" in kinds[name])
        }
        return sorted(wrong | (kinds.keys() ^ values.keys()))

    def differences(self, expected: Self) -> list[str]:
        """Describe each field in which this fingerprint of a cache differs from `expected`."""
        return [
            f"{name}: cache has {cached!r}, this run needs {getattr(expected, name)!r}"
            for name, cached in vars(self).items()
            if cached != getattr(expected, name)
        ]

    @property
    def digest(self) -> str:
        """SHA-256 of all fields, in hexadecimal."""
        return hashlib.sha256(json.dumps(vars(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Fingerprint(BaseFingerprint):
    """The inputs that determine a teacher's embeddings.

    >>> a = Fingerprint("pixels", "none", "none", "float32", "digits")
    >>> a.differences(Fingerprint("dinov2_vits14", "none", "none", "float32", "digits"))
    ["teacher: cache has 'pixels', this run needs 'dinov2_vits14'"]
    """

    way_out = (
        "To keep this cache, choose another folder with --embeddings_dir (auto: a folder for this "
        "data and teacher). To replace it, use --force_recompute."
    )

    teacher: str  # name of the teacher
    weights: str  # identity of the teacher's weights
    transform: str  # identity of the preprocessing, including the image size
    dtype: str  # dtype in which the teacher computes
    data: str  # identity of the data set: samples, order and labels


def weights_id(model: nn.Module) -> str:
    """Return a SHA-256 of the names, dtypes, shapes and values in a model's state dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
