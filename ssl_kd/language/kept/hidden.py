"""CACHE_METHOD hidden: what a teacher's output head gets, and the head once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from ssl_kd.datasets.blocks import Batch
from ssl_kd.errors import InputError
from ssl_kd.files import CorruptFileError, load_tensors, save_tensors
from ssl_kd.language.kept.method import Kept, Live
from ssl_kd.language.teacher_fingerprint import TeacherFingerprint
from ssl_kd.losses.teacher_output import LinearTeacher
from ssl_kd.store.shards import Columns, Content, Manifest, odd_fields

HEADS = "teacher_head_*.pt"
STORED = (torch.float32, torch.bfloat16, torch.float16)
_HEADER = {"vocabulary": int, "dim": int, "stored": str, "head": str}


class LastHidden(Kept):
    """The last hidden state at each position, and the output head in a file beside them.

    The answer is a `LinearTeacher`, as of the live teacher: every divergence at every temperature.
    It is what the teacher said in that batch, to the bit.

    Column: `hidden` `[dim]`. The head's file, `weight` and `bias`, carries its digest in its name,
    so that the cache which it replaces stays readable to the end.

    Args:
        vocabulary: rows of the head, with its padding.
        dim: width of the teacher.
        stored: dtype of the column, the teacher's own.
        head: digest of the head.
    """

    name = "hidden"
    finite = ("hidden",)

    def __init__(self, vocabulary: int, dim: int, stored: torch.dtype, head: str) -> None:
        self.vocabulary, self.dim, self.stored, self.head = vocabulary, dim, stored, head
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    @classmethod
    def planned(cls, answer: Live, fingerprint: TeacherFingerprint, vocabulary: int | None) -> Self:
        """As `Kept.planned`."""
        if not isinstance(answer, LinearTeacher):
            raise InputError(
                f"CACHE_METHOD is 'hidden', but the teacher {fingerprint.teacher!r} caps or scales "
                "its logits, so they are more than its output head makes of hidden states: set "
                "CACHE_METHOD to 'topk' or 'sample'"
            )
        # An entry of -inf in the bias is outside the vocabulary; all else there is a fault.
        bias = answer.weight[:0] if answer.bias is None else answer.bias
        if not answer.weight.isfinite().all() or not (bias < torch.inf).all():
            raise InputError(
                f"the output head of the teacher {fingerprint.teacher!r} holds NaN or infinity: "
                "check its weights"
            )
        size, dim = answer.weight.shape
        return cls(size, dim, answer.hidden.dtype, _digest(answer.weight, answer.bias))

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """As `Kept.of`."""
        if odd := odd_fields(manifest, _HEADER):
            raise ValueError(f"{', '.join(odd)}: missing or of another kind")
        if not re.fullmatch(r"[0-9a-f]{16}", manifest["head"]):
            raise ValueError(f"head is {manifest['head'][:50]!r}; expected a digest")
        stored = {str(dtype): dtype for dtype in STORED}.get(f"torch.{manifest['stored']}")
        if re.fullmatch("[0-9a-f]{16}", manifest["head"]) is None:  # it names a file
            raise ValueError(f"head is {manifest['head']!r}")
        if stored is None:
            raise ValueError(f"stored is {manifest['stored']!r}")
        return cls(manifest["vocabulary"], manifest["dim"], stored, manifest["head"])

    @property
    def header(self) -> Manifest:
        """As `Kept.header`."""
        stored = str(self.stored).removeprefix("torch.")
        return {"vocabulary": self.vocabulary, "dim": self.dim, "stored": stored, "head": self.head}

    @property
    def facts(self) -> dict[str, Any]:
        """As `Kept.facts`."""
        found = {name: self.header[name] for name in ("stored", "dim")}
        return found | ({} if self._weight is None else {"head_bytes": self._head_bytes()})

    @property
    def columns(self) -> Columns:
        """As `Kept.columns`."""
        return {"hidden": ((self.dim,), self.stored)}

    def content(self, answer: Live, batch: Batch, rows: Tensor) -> Content:
        """As `Kept.content`; `error` is 0, or NaN where a hidden state is not finite."""
        assert isinstance(answer, LinearTeacher)  # planned
        hidden = answer.hidden
        lost = torch.zeros(len(hidden), device=hidden.device)
        bad = ~hidden.isfinite().all(-1)
        return {"hidden": hidden, "lost": lost, "error": lost.masked_fill(bad, torch.nan)}

    def answer(self, column: Callable[[str], Tensor]) -> LinearTeacher:
        """As `Kept.answer`."""
        assert self._weight is not None, "load was not called"
        hidden = column("hidden")
        self._weight = self._weight.to(hidden.device)  # stays there
        self._bias = None if self._bias is None else self._bias.to(hidden.device)
        return LinearTeacher(hidden.to(self._weight.dtype), self._weight, self._bias)

    def _head_bytes(self) -> int:
        return sum(x.nbytes for x in (self._weight, self._bias) if x is not None)

    def save(self, folder: Path, answer: Live) -> list[Path]:
        """As `Kept.save`; a file that is damaged is written again."""
        assert isinstance(answer, LinearTeacher)  # planned
        try:
            self.load(folder)
        except CorruptFileError:
            parts = {"weight": answer.weight, "bias": answer.bias}
            whole = {n: x.detach().cpu().clone() for n, x in parts.items() if x is not None}
            save_tensors(self._file(folder), whole)
        return [self._file(folder)]

    def load(self, folder: Path) -> Self:
        """As `Kept.load`."""
        file = self._file(folder)
        try:
            found = load_tensors(file)
        except FileNotFoundError as error:
            raise CorruptFileError(f"{file} is missing; {_AGAIN}") from error
        try:
            weight, bias = found["weight"], found.get("bias")
            digest = _digest(weight, bias)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            raise CorruptFileError(f"{file} holds no output head; {_AGAIN}") from error
        if digest != self.head:
            raise CorruptFileError(f"{file} holds another head than was written; {_AGAIN}")
        self._weight, self._bias = weight, bias
        return self

    def _file(self, folder: Path) -> Path:
        return folder / HEADS.replace("*", self.head)


_AGAIN = "cache_teacher.py --rebuild_damaged writes this file alone again"


def _digest(weight: Tensor, bias: Tensor | None) -> str:
    """Of dtype, shape and bytes, shortened."""
    digest = hashlib.sha256()
    for x in (weight, bias):
        if x is not None:
            digest.update(f"{x.dtype} {tuple(x.shape)}".encode())
            digest.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
