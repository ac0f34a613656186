"""A teacher's outputs for a few rows, kept after the teacher itself is freed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ssl_kd.datasets.blocks import Batch, Blocks
from ssl_kd.losses.teacher_output import LinearTeacher, LogitsTeacher
from ssl_kd.teachers.frozen import FrozenTeacher

REMEMBERED = 64  # rows: with 512 tokens and 4,096 dimensions in bfloat16, 256 MiB plus the head


class RememberedTeacher:
    """A teacher's full distributions over some rows, in CPU memory.

    They are stored as hidden states and one head, or as logits if the head is not linear, in the
    teacher's dtype, so the outputs are bit-identical to the teacher's.

    Args:
        teacher: called once for each row.
        blocks: rows of tokens, of which the first `rows` are stored.
        rows: at most.
        batch_size: rows of one call.

    Attributes:
        bytes: memory in use.
    """

    def __init__(
        self, teacher: FrozenTeacher, blocks: Blocks, rows: int = REMEMBERED, batch_size: int = 8
    ) -> None:
        self._outputs: dict[bytes, Tensor] = {}  # tokens of a row -> hidden states, or logits
        self._head: tuple[Tensor, Tensor | None] | None = None
        first = range(min(rows, len(blocks)))
        for start in range(0, len(first), batch_size):
            batch = blocks.batch(first[start : start + batch_size], teacher.device)
            answer: Any = teacher(batch, torch.arange(batch.input_ids.numel()))
            if isinstance(answer, LinearTeacher):
                output = answer.hidden
                bias = None if answer.bias is None else answer.bias.cpu()
                self._head = answer.weight.cpu(), bias
            else:
                output = answer.logits
            output = output.unflatten(0, batch.input_ids.shape)
            for key, n, row in zip(_keys(batch), _lengths(batch), output, strict=True):
                self._outputs[key] = row[:n].to("cpu", copy=True)
        tensors = [*self._outputs.values(), *(x for x in self._head or () if x is not None)]
        self.bytes = sum(x.numel() * x.element_size() for x in tensors)

    def __call__(self, batch: Batch, rows: Tensor) -> LinearTeacher | LogitsTeacher | None:
        """Return the teacher's output at some positions of a batch, as `FrozenTeacher` does.

        Args:
            batch: rows of tokens.
            rows: int64 `[n]` into the flattened `[batch * token]`, of real tokens only.

        Returns:
            None if a row of the batch is not stored.
        """
        outputs = [self._outputs.get(key) for key in _keys(batch)]
        known = [output for output in outputs if output is not None]
        if len(known) < len(outputs):
            return None
        width, device = batch.input_ids.shape[1], batch.input_ids.device
        padded = [torch.nn.functional.pad(x, (0, 0, 0, width - len(x))) for x in known]
        output = torch.cat(padded)[rows.cpu()].to(device)
        if self._head is None:
            return LogitsTeacher(output)
        weight, bias = self._head
        return LinearTeacher(output, weight.to(device), None if bias is None else bias.to(device))


def _keys(batch: Batch) -> list[bytes]:
    """Return the tokens of each row without padding, with its images, as a key."""
    ids, lengths = batch.input_ids.cpu(), _lengths(batch)
    images = [""] * len(ids) if batch.pictures is None else batch.pictures.of
    rows = zip(ids, lengths, images, strict=True)
    return [row[:n].numpy().tobytes() + names.encode() for row, n, names in rows]


def _lengths(batch: Batch) -> list[int]:
    return (batch.documents > 0).sum(1).tolist()
