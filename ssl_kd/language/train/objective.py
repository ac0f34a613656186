"""Compute a student's loss terms: cross-entropy with its text, and divergence to its teacher."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_kd.core.memory import to_device_async
from ssl_kd.core.precision import Precision, promote_to_fp32
from ssl_kd.language.losses.legacy_clamp import LegacyClamp
from ssl_kd.language.losses.teacher_output import (
    LinearTeacher,
    LogitsTeacher,
    TeacherOutput,
    select_rows,
)
from ssl_kd.language.losses.token_distillation import distillation_terms, next_token_targets
from ssl_kd.language.models.causal import without_adapters
from ssl_kd.language.models.frozen import hidden_states, linear_head
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.teachers.base import Teacher
from ssl_kd.language.text.aligned import AlignedBatch
from ssl_kd.language.text.blocks import Batch
from ssl_kd.language.train.rows_left_out import FirstPass, SickRows, overwritten, without
from ssl_kd.language.train.tied_weight import TiedGradient, tied_lookups

logger = logging.getLogger(__name__)


class Objective:
    """The loss terms of a student: `ce`, cross-entropy with the text, and `kd`, with the teacher.

    The loss is `ALPHA_CE * ce + ALPHA_KD * T^2 * divergence`. Text that the student generated
    itself has no `ce`. Trainable weights are cast to float32. Without a `teacher`, there is only
    `ce`. A teacher that compares groups of tokens needs batches of type `AlignedBatch`.
    """

    def __init__(
        self,
        student: nn.Module,
        settings: LanguageSettings,
        precision: Precision,
        teacher: Teacher | None = None,
    ) -> None:
        self.settings, self.precision = settings, precision
        self.teacher = Teacher() if teacher is None else teacher
        self.teacher.begin()
        self.student = student.to(precision.device).train()
        if (line := promote_to_fp32(student)) is not None:
            logger.info("%s", line)
        if settings.gradient_checkpointing:
            checkpoint_activations(student)
        self.tied = TiedGradient()  # of the last forward pass
        self._linear = linear_head(student) is not None
        self.clamp = LegacyClamp.parse(settings.legacy_clamp) if settings.legacy_clamp else None
        ce = settings.alpha_ce if settings.learns_text else 0.0
        weights = {"ce": ce, "kd": settings.alpha_kd if self.teacher.compares else 0.0}
        self.weights = {name: weight for name, weight in weights.items() if weight}

    @property
    def head(self) -> Any:
        """The student's output head; None if the logits are not linear in the hidden states."""
        return without_adapters(self.student).get_output_embeddings() if self._linear else None

    def weighted(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Multiply each term by its weight; leave out the terms of weight 0."""
        return {name: self.weights[name] * terms[name] for name in self.weights if name in terms}

    def counts(self, batches: Sequence[Batch | AlignedBatch]) -> dict[str, int]:
        """Return the number of target tokens per term; `kd` may count groups of tokens."""
        tokens = sum(int(student_side(batch).counts.sum()) for batch in batches)
        counts = {"ce": tokens}
        if self.teacher.compares:
            counts["kd"] = sum(map(self.teacher.count, batches))
        return counts

    def terms(
        self,
        batch: Batch | AlignedBatch,
        first: FirstPass[Any] | None = None,
    ) -> dict[str, Tensor]:
        """Return the unweighted sum of each term over the batch, in float32.

        `first` stores the teacher's outputs, so that `without_sick_rows` can use them again.
        """
        with self.precision.autocast():
            text = student_side(batch)
            outputs = self._forward(text)
            rows, targets = next_token_targets(text.input_ids, text.counts)
            teachers: Sequence[TeacherOutput] = ()
            if self.teacher.compares == "tokens":
                teachers = self.teacher.answer(text, rows, outputs.at(rows).as_teacher())
            if first is not None:
                first.answers = teachers
            return self._terms_of(batch, (rows, targets), outputs, teachers)

    def without_sick_rows(self, first: FirstPass[Any]) -> dict[str, Tensor]:
        """Compute the terms of a batch again, each without the rows in which it is not finite.

        A row with non-finite hidden states or cross-entropy is left out of every term and of the
        student's forward pass. The rows are stored in `first.sick`. The bits are those of a batch
        in which these rows have no targets.
        """
        batch, device = first.batch, self.precision.device
        text, answers = student_side(batch), first.answers or ()
        with self.precision.autocast(), torch.no_grad(), first.same_random_state(device):
            outputs = self._forward(text)
            healthy: dict[str, list[bool]] = {}
            for row in torch.eye(len(text.counts), dtype=torch.bool):
                single = without(batch, ~row)
                places, chosen_answers = self._choose(text, student_side(single), answers)
                terms = self._terms_of(single, places, outputs, chosen_answers)
                for name, term in terms.items():
                    healthy.setdefault(name, []).append(bool(term.isfinite()))
            sick = {name: ~torch.tensor(rows) for name, rows in healthy.items()}
            cut = sick["ce"] | ~outputs.finite(len(text.counts)).cpu()
        first.sick = {name: rows | cut for name, rows in sick.items()}
        remaining = overwritten(batch, cut)
        places, chosen_answers = self._choose(text, student_side(remaining), answers)
        with self.precision.autocast(), first.same_random_state(device):
            outputs = self._forward(student_side(remaining))
            return self._terms_of(remaining, places, outputs, chosen_answers, first.sick)

    @staticmethod
    def _choose(
        text: Batch, subset: Batch, answers: Sequence[TeacherOutput]
    ) -> tuple[tuple[Tensor, Tensor], list[TeacherOutput]]:
        """Return the positions and targets of `subset`, and the teachers' outputs there."""
        at = subset.counts[:, 1:][text.counts[:, 1:]].nonzero().flatten()
        at = to_device_async(at, text.input_ids.device)
        places = next_token_targets(subset.input_ids, subset.counts)
        return places, [select_rows(answer, at) for answer in answers]

    def _terms_of(
        self,
        batch: Batch | AlignedBatch,
        places: tuple[Tensor, Tensor],
        outputs: _Outputs,
        teachers: Sequence[TeacherOutput],
        sick: SickRows = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        """Compute the terms from the outputs of student and teachers, without the sick rows."""
        text, (rows, targets) = student_side(batch), places
        student, head = outputs.at(rows), outputs.head
        weight_and_bias = (None, None) if head is None else (head.weight, head.bias)
        options: dict[str, Any] = {
            "temperature": self.settings.temperature,
            "weights": (self.settings.alpha_ce, self.settings.alpha_kd),
            "legacy_clamp": self.clamp,
            "wait": False,
            "give_weight_gradient": self.tied.add if self.tied.is_looked_up else None,
        }
        if self.teacher.compares == "groups":
            assert isinstance(batch, AlignedBatch)  # the teacher has laid them out
            ce = distillation_terms(student.x, *weight_and_bias, targets, **options)[0]
            healthy = without(batch, sick["kd"]) if sick else batch
            kd = self.teacher.distance(healthy, outputs.all_logits)
            return {"ce": ce, "kd": kd.float()}
        sums = []
        for segment in self._segments(text, len(targets), sick):
            at, is_compared = segment.positions, segment.divergence is not None
            here, goals = student, targets
            answers = teachers[segment.answers] if is_compared else ()
            if at is not None:
                here, goals = student.at(at), targets[at]
                answers = [select_rows(answer, at) for answer in answers]
            sums.append(
                distillation_terms(
                    here.x,
                    *weight_and_bias,
                    goals if segment.uses_text else None,
                    answers,
                    divergence=segment.divergence or self.settings.kind_of_divergence,
                    teacher_weights=self.teacher.weights if is_compared else None,
                    **options,
                )
            )
        ce, kd = sums[0]
        if len(sums) > 1:
            ce, kd = (torch.stack(parts).sum() for parts in zip(*sums, strict=True))
        return {"ce": ce, "kd": kd} if self.teacher.compares else {"ce": ce}

    def _segments(self, text: Batch, n: int, sick: SickRows) -> list[_Segment]:
        """Divide the `n` target positions of a batch into segments, each with its loss terms.

        Positions of text precede those that the student generated. Rows in which `kd` is not finite
        are not compared with the teacher. If a row has a teacher of its own, only this one is.
        """
        kind, on_policy = self.settings.kind_of_divergence, self.settings.kind_on_policy
        n_text, owners = text.text_tokens, self.teacher.owners(text)
        is_compared = torch.ones(n, dtype=torch.bool)
        if "kd" in sick:
            is_compared = without(text, sick["kd"]).counts[:, 1:][text.counts[:, 1:]]
        if owners is None and bool(is_compared.all()):
            if n_text == n:
                return [_Segment(None, True, kind)]
            generated = _Segment(slice(n_text, n), False, on_policy)
            return [_Segment(slice(n_text), True, kind), generated] if n_text else [generated]
        owned = [(slice(None), torch.ones(n, dtype=torch.bool))]
        if owners is not None:
            owned = [(slice(i, i + 1), owners == i) for i in owners.unique().tolist()]
        is_text, segments = torch.arange(n) < n_text, []
        for is_chosen, uses_text, divergence in (
            (is_text & is_compared, True, kind),
            (is_text & ~is_compared, True, None),
            (~is_text & is_compared, False, on_policy),
        ):
            for answers, is_owned in owned:
                if len(at := (is_chosen & is_owned).nonzero().flatten()):
                    at = to_device_async(at, self.precision.device)
                    segments.append(_Segment(at, uses_text, divergence, answers))
        return segments or [_Segment(slice(0), True, None)]

    def lost(self, batch: Any, sick: SickRows) -> dict[str, int]:
        """Return how many tokens of each term, and of text, belong to rows that are left out."""
        lost = {}
        for name, rows in sick.items():
            sides = batch, without(batch, rows)
            before, after = (self.counts([side])[name] for side in sides)
            lost[name] = before - after
            if name == "ce":
                before, after = (student_side(side).text_tokens for side in sides)
                lost["text"] = before - after
        return lost

    def _forward(self, batch: Batch) -> _Outputs:
        if (head := self.head) is None:
            logits = self.student(**batch.model_inputs(), use_cache=False).logits
            return _Outputs(None, logits.flatten(0, 1), None)
        self.tied = TiedGradient()
        embedding = without_adapters(self.student).get_input_embeddings()
        with tied_lookups(embedding, head.weight, self.tied):
            hidden = hidden_states(self.student, batch.model_inputs()).flatten(0, 1)
        return _Outputs(hidden, None, head)


@dataclass(frozen=True)
class _Segment:
    """Target positions of a batch that have the same loss terms."""

    positions: Tensor | slice | None  # among the targets; None: all
    uses_text: bool  # whether they have a cross-entropy
    divergence: str | None  # to the teacher; None: they are not compared
    answers: slice = field(default_factory=lambda: slice(None))  # of the teachers to compare with


@dataclass(frozen=True)
class _Outputs:
    """The student's output at some positions: hidden states before a linear head, or logits."""

    hidden: Tensor | None
    logits: Tensor | None  # of a model that caps or scales them
    head: Any  # with weight and bias; None: not linear

    @property
    def x(self) -> Tensor:
        x = self.hidden if self.logits is None else self.logits
        assert x is not None
        return x

    def at(self, rows: Tensor | slice) -> _Outputs:
        hidden, logits = (None if x is None else x[rows] for x in (self.hidden, self.logits))
        return _Outputs(hidden, logits, self.head)

    def finite(self, n_rows: int) -> Tensor:
        """Return for each row whether it has no NaN; hidden states may not be infinite either."""
        if self.hidden is not None:
            return self.hidden.isfinite().view(n_rows, -1).all(1)
        return ~self.x.isnan().view(n_rows, -1).any(1)

    def all_logits(self, rows: Tensor) -> Tensor:
        x = self.at(rows).x
        return x if self.head is None else F.linear(x, self.head.weight, self.head.bias)

    def as_teacher(self) -> TeacherOutput:
        if self.head is None:
            return LogitsTeacher(self.x.detach())
        bias = None if self.head.bias is None else self.head.bias.detach()
        return LinearTeacher(self.x.detach(), self.head.weight.detach(), bias)


def student_side(batch: Batch | AlignedBatch) -> Batch:
    """Return the student's side of an aligned batch; return any other batch unchanged."""
    return batch.student if isinstance(batch, AlignedBatch) else batch


def checkpoint_activations(model: Any) -> None:
    """Make a model keep only the input of each layer, and run the layer again backward."""
    name = "activation_checkpointing_enable"  # since transformers 5.3
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
