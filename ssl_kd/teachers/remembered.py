"""A teacher's answers for a few rows, kept after the teacher itself is freed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ssl_kd.datasets.blocks import Batch, Blocks
from ssl_kd.losses.teacher_output import LinearTeacher, LogitsTeacher
from ssl_kd.teachers.frozen import FrozenTeacher

REMEMBERED = 64  # rows: of 512 tokens and 4,096 dimensions in bfloat16, 256 MiB beside the head


class RememberedTeacher:
    """A teacher's whole distributions over some rows, in the CPU's memory.

    As hidden states with one head, or as logits where the head is not linear, in the teacher's
    dtype: its answers equal the teacher's bit for bit.

    Args:
        teacher: asked once.
        blocks: rows of tokens; the first `rows` are kept.
        rows: at most.
        batch_size: rows asked about at once.

    Attributes:
        bytes: that are held.
    """

    def __init__(
        self, teacher: FrozenTeacher, blocks: Blocks, rows: int = REMEMBERED, batch_size: int = 8
    ) -> None:
        self._answers: dict[bytes, Tensor] = {}  # tokens of a row -> hidden states, or logits
        self._head: tuple[Tensor, Tensor | None] | None = None
        first = range(min(rows, len(blocks)))
        for start in range(0, len(first), batch_size):
            batch = blocks.batch(first[start : start + batch_size], teacher.device)
            answer: Any = teacher(batch, torch.arange(batch.input_ids.numel()))
            if isinstance(answer, LinearTeacher):
                kept = answer.hidden
                bias = None if answer.bias is None else answer.bias.cpu()
                self._head = answer.weight.cpu(), bias
            else:
                kept = answer.logits
            lengths, kept = _lengths(batch), kept.unflatten(0, batch.input_ids.shape)
            for key, n, of in zip(_keys(batch), lengths, kept, strict=True):
                self._answers[key] = of[:n].to("cpu", copy=True)
        held = [*self._answers.values(), *(x for x in self._head or () if x is not None)]
        self.bytes = sum(x.numel() * x.element_size() for x in held)

    def __call__(self, batch: Batch, rows: Tensor) -> LinearTeacher | LogitsTeacher | None:
        """The teacher's answer at some positions of a batch, as `FrozenTeacher` gives it.

        Args:
            batch: rows of tokens.
            rows: int64 `[n]` into the flattened `[batch * token]`; of real tokens.

        Returns:
            None where a row of the batch is not among those that are kept.
        """
        found = [self._answers.get(key) for key in _keys(batch)]
        known = [kept for kept in found if kept is not None]
        if len(known) < len(found):
            return None
        width, device = batch.input_ids.shape[1], batch.input_ids.device
        padded = [torch.nn.functional.pad(x, (0, 0, 0, width - len(x))) for x in known]
        kept = torch.cat(padded)[rows.cpu()].to(device)
        if self._head is None:
            return LogitsTeacher(kept)
        weight, bias = self._head
        return LinearTeacher(kept, weight.to(device), None if bias is None else bias.to(device))


def _keys(batch: Batch) -> list[bytes]:
    """The tokens of each row without its padding, and its images."""
    ids, lengths = batch.input_ids.cpu(), _lengths(batch)
    of = [""] * len(ids) if batch.pictures is None else batch.pictures.of
    rows = zip(ids, lengths, of, strict=True)
    return [row[:n].numpy().tobytes() + images.encode() for row, n, images in rows]


def _lengths(batch: Batch) -> list[int]:
    return (batch.documents > 0).sum(1).tolist()
