"""Let a student teach itself: as teacher, the same model reads a prompt that shows the answer.

Both predict the same continuation (Shenfeld et al., SDFT, arXiv 2601.19897; Zhao et al., OPSD,
arXiv 2601.18734). The teacher is the student without gradient, or with LoRA its frozen base model.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from ssl_kd.core.errors import InputError
from ssl_kd.core.memory import to_device_async
from ssl_kd.language.losses.teacher_output import LinearTeacher, LogitsTeacher, TeacherOutput
from ssl_kd.language.models.causal import CausalLM, evaluating, positions
from ssl_kd.language.models.frozen import answer_at, linear_head
from ssl_kd.language.teachers.base import Rows, Teacher, TeacherContext
from ssl_kd.language.text.blocks import (
    Batch,
    Blocks,
    Frame,
    OwnPrompts,
    cut_to_fit,
    digest_of,
    in_rows,
    tokenized,
)
from ssl_kd.language.text.dataset import TextDataset
from ssl_kd.language.text.records import Example
from ssl_kd.language.text.shares import Layout

_PLACES = re.compile(r"\{(prompt|privileged_context)\}")


class SelfTeacher(Teacher):
    """The student's own model, which reads another prompt in each row of the data."""

    compares = "tokens"

    def __init__(self, student: Any, prompts: OwnPrompts) -> None:
        self.student, self.prompts = student, prompts

    @classmethod
    def lay_out(cls, context: TeacherContext, texts: TextDataset, *, trains: bool) -> Rows:
        """Lay out one record per row, with the teacher's prompts; the held-out text as always."""
        if not trains:
            return super().lay_out(context, texts, trains=trains)
        settings = context.settings
        size, template = settings.block_size, settings.teacher_prompt_template
        return with_own_prompts(texts, context.student, size, template)

    @classmethod
    def open(cls, context: TeacherContext, rows: Rows) -> Self:
        """Return the student as its own teacher, with the prompts of these rows."""
        assert isinstance(rows, Blocks)  # lay_out
        return cls(context.student.model, rows.own_prompts)

    def describe(self) -> str:
        """Return what the teacher is."""
        return "the student itself, with the answer in view"

    def begin(self) -> None:
        """Find out whether the logits of the model without adapters are linear."""
        self._adapted = getattr(self.student, "disable_adapter", nullcontext)
        with self._adapted():
            self._linear = linear_head(self.student) is not None

    def answer(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """Return the answer of the model to its own prompts."""
        return [self.answer_once(batch, rows)]

    def answer_once(self, batch: Batch, rows: Tensor) -> LinearTeacher | LogitsTeacher:
        """Return the answer at the positions `rows` of the batch."""
        ids, (n, width) = batch.input_ids, batch.input_ids.shape
        chosen = [self.prompts[row] for row in batch.rows.tolist()]
        shifts = torch.tensor([len(prompt) - start for start, prompt in chosen])
        inputs = ids.new_zeros(n, width + int(shifts.max()))
        for row, (start, prompt) in enumerate(chosen):
            both = torch.cat([to_device_async(prompt, ids.device), ids[row, start:]])
            inputs[row, : len(both)] = both
        of = rows // width
        at = rows + of * int(shifts.max()) + to_device_async(shifts, ids.device)[of]
        with evaluating(self.student), self._adapted():
            return answer_at(self.student, {"input_ids": inputs}, at, linear=self._linear)


def with_own_prompts(
    texts: TextDataset, student: CausalLM, block_size: int, template: str
) -> Blocks:
    """Lay out one record per row, without those that do not fit, for a `SelfTeacher`."""
    frame = Frame.of(student.tokenizer)
    layout = Layout()
    turns = Counter()
    room = positions(student.model) or sys.maxsize
    pieces, prompts = [], []
    for example in texts.examples:
        pair = replace(texts, examples=[example, _informed(example, template)])
        documents = [d for _, d in tokenized(pair, student.tokenizer, frame, layout, turns)]
        starts = [int(d.counts.argmax()) if d.counts.any() else len(d.ids) for d in documents]
        fits = len(documents) == 2 and len(documents[0].ids) <= block_size
        if not fits or block_size + starts[1] - starts[0] > room:
            layout.left_out.append(f"{example.where}: too long for BLOCK_SIZE or for the teacher")
            continue
        parts = cut_to_fit(documents[0], block_size, example, layout)
        pieces += parts
        prompts += [(starts[0], torch.tensor(documents[1].ids[: starts[1]]))] * len(parts)
    counts = Counter({name: n // 2 for name, n in turns.items()})  # of one of the two
    rows = [[i] for i in range(len(pieces))]
    blocks = in_rows(texts.name, pieces, rows, block_size, frame.end, layout, counts)
    columns = [blocks.ids, *(prompt for _, prompt in prompts)]
    digest = digest_of(*(column.numpy() for column in columns))
    return replace(blocks, digest=digest, own_prompts=tuple(prompts))


def _informed(example: Example, template: str) -> Example:
    """Return the example with the teacher's prompt."""
    turns = list(example.messages or ())
    is_answer = [i >= example.given and turn["role"] == "assistant" for i, turn in enumerate(turns)]
    end = is_answer.index(True) if any(is_answer) else len(turns)
    user = max((i for i in range(end) if turns[i]["role"] == "user"), default=None)
    reference = turns[end]["content"] if any(is_answer) else example.completion
    context = example.privileged_context or reference
    prompt = example.prompt if user is None else turns[user]["content"]
    if not (isinstance(context, str) and isinstance(prompt, str) and context and prompt):
        raise InputError(
            f"{example.where}: TEACHER_MODEL 'self' needs records with a prompt, and with an answer"
            " or the field privileged_context"
        )
    values = {"prompt": prompt, "privileged_context": context}
    prompt = _PLACES.sub(lambda place: values[place[1]], template)
    if user is None:
        return replace(example, prompt=prompt)
    turns[user] = {**turns[user], "content": prompt}
    return replace(example, messages=tuple(turns))
