"""What a student learns from: its own text, the teacher's answer to it, and more, as loss terms."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_kd.datasets.aligned import AlignedBatch
from ssl_kd.datasets.blocks import Batch
from ssl_kd.guard.memory import to_device_async
from ssl_kd.guard.precision import Precision, promote_to_fp32
from ssl_kd.language.aligned import Aligned, unfit_for_hidden
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.sick_rows import FirstPass, Out, overwritten, without
from ssl_kd.language.sources import Source
from ssl_kd.losses.legacy_clamp import LegacyClamp
from ssl_kd.losses.teacher_output import LinearTeacher, LogitsTeacher, TeacherOutput, select_rows
from ssl_kd.losses.token_distillation import distillation_terms, next_token_targets
from ssl_kd.teachers.causal import without_adapters
from ssl_kd.teachers.frozen import LinearHead, hidden_states, linear_head

logger = logging.getLogger(__name__)


class Term(Protocol):
    """A loss term of an `Objective`, beside `ce` and `kd`; it fails alone, as they do."""

    @property
    def name(self) -> str:
        """Its part of the guard, and its column in `metrics.jsonl`; not `ce`, `kd` or `model`."""
        ...

    @property
    def weight(self) -> float:
        """Of the term in the loss, above 0."""
        ...

    @property
    def module(self) -> nn.Module | None:
        """What is trained with the student and discarded afterwards; None for nothing."""
        ...

    def listening(self) -> AbstractContextManager[None]:
        """Around the forward passes of student and teacher on a batch, to see what it needs."""
        ...

    def __call__(self, batch: Batch, rows: Tensor) -> Tensor:
        """The term of a batch, after the forward passes.

        Args:
            batch: as the student reads it.
            rows: int64 `[n]`, the positions in the flattened `[batch * token]` that predict a token
                that counts.

        Returns:
            A float32 scalar, a sum over what `count` counts.
        """
        ...

    def count(self, batch: Batch) -> int:
        """What the term is a mean over."""
        ...


class Objective:
    """A student's loss terms: `ce` with its text, `kd` with its teacher, and others by name.

    The loss is `ALPHA_CE * ce + ALPHA_KD * T^2 * divergence`, and each other term times its weight.
    Text that the student wrote itself has no `ce`.

    Args:
        student: a causal LM; its trainable weights become float32.
        settings: weights of the terms, temperature, divergence.
        precision: of the forward pass.
        source: gives the teacher's answer to a batch; None for cross-entropy alone.
        aligned: a teacher with another tokenizer, in place of `source`; batches are `AlignedBatch`.
        others: further loss terms.

    Raises:
        SettingsError: ALIGN is `hidden`, and the student caps or scales its logits.

    Attributes:
        weights: of the loss terms that are asked for, those above 0.
        beside: what is trained with the student, by the name of what it belongs to.
        settings: as they are in this step.
        began: the settings of the run.
        moves: the names of those that SCHEDULE moves.
    """

    def __init__(
        self,
        student: nn.Module,
        settings: LanguageSettings,
        precision: Precision,
        source: Source | None = None,
        aligned: Aligned | None = None,
        others: Sequence[Term] = (),
    ) -> None:
        self.settings, self.precision, self.source = settings, precision, source
        self.aligned, self.others = aligned, tuple(others)
        learns = {"aligned": aligned} | {term.name: term.module for term in others}
        self.beside: dict[str, nn.Module] = {
            name: module.to(precision.device)
            for name, module in learns.items()
            if module is not None
        }
        # What is to be in pieces may be too large for one device.
        self.student = (student if settings.shard else student.to(precision.device)).train()
        if (line := promote_to_fp32(student)) is not None:
            logger.info("%s", line)
        if settings.gradient_checkpointing:
            _checkpoint_activations(student)
        self._linear = linear_head(student) is not None
        if aligned is not None and aligned.projection is not None and not self._linear:
            raise unfit_for_hidden("student", student)
        self.clamp = LegacyClamp.parse(settings.legacy_clamp) if settings.legacy_clamp else None
        ce = settings.alpha_ce if settings.learns_text else 0.0
        weights = {"ce": ce, "kd": settings.alpha_kd if self.has_teacher else 0.0}
        weights |= {term.name: term.weight for term in others}
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self.began, self.moves = settings, [move.name for move in settings.moves]

    @property
    def head(self) -> LinearHead | None:
        """The student's output head, as it is now; None where its logits need more than that."""
        if not self._linear:
            return None
        # Sharded weights are whole in a forward pass alone, and then other tensors.
        head = without_adapters(self.student).get_output_embeddings()
        return LinearHead(head.weight, head.bias)

    @property
    def has_teacher(self) -> bool:
        """Whether there is more to learn from than the text."""
        return self.source is not None or self.aligned is not None

    def follow(self, step: int, steps: int) -> None:
        """Take the temperature and the weights that SCHEDULE has for a step.

        Args:
            step: from 0.
            steps: of the run.
        """
        if not self.moves:
            return
        self.settings = now = self.began.at_step(step, steps)
        if self.aligned is not None:
            self.aligned.settings = now
        self.weights |= {
            name: getattr(now, f"alpha_{name}")
            for name in self.weights
            if f"alpha_{name}" in self.moves
        }

    def weighted_terms(self, batch: Batch | AlignedBatch) -> dict[str, Tensor]:
        """The `terms` of a batch times their weights."""
        return self.weighted(self.terms(batch))

    def terms(
        self,
        batch: Batch | AlignedBatch,
        late: list[Tensor] | None = None,
        first: FirstPass[Any] | None = None,
    ) -> dict[str, Tensor]:
        """Sums over the batch: `ce`, with a teacher `kd`, and the others; float32.

        Each over what `counts` counts. For `late` see `distillation_terms`: numbers that `kd` lacks
        until the backward pass of the terms times their weights. `first` gets what the teacher
        answers, for `without_sick_rows`.
        """
        with self.precision.autocast(), self._listening():
            outputs = self._forward(text := student_side(batch))
            rows, targets = next_token_targets(text.input_ids, text.counts)
            teachers: Sequence[TeacherOutput] = ()
            if self.source is not None:
                teachers = self.source(text, rows, outputs.at(rows).as_teacher())
            if first is not None:
                first.answers = teachers
            return self._terms_of(batch, (rows, targets), outputs, teachers, late)

    def without_sick_rows(
        self, first: FirstPass[Any], late: list[Tensor] | None = None
    ) -> dict[str, Tensor]:
        """`terms` of a batch again, each without the rows in which it is not finite.

        A row whose hidden states or cross-entropy are not finite is left out of every term, and of
        the student's forward pass. `first.out` gets the rows. Sums over the other rows are to the
        bit what they are where the rows' targets do not count.
        """
        batch, device = first.batch, self.precision.device
        text, answers = student_side(batch), first.answers or ()
        with self.precision.autocast(), torch.no_grad(), self._listening(), first.as_before(device):
            outputs = self._forward(text)
            self._show_teacher(text, outputs)
            healthy: dict[str, list[bool]] = {}
            for row in torch.eye(len(text.counts), dtype=torch.bool):
                some = without(batch, ~row)
                given = self._given(text, student_side(some), answers)
                for name, term in self._terms_of(some, given[0], outputs, given[1]).items():
                    healthy.setdefault(name, []).append(bool(term.isfinite()))
            sick = {name: ~torch.tensor(rows) for name, rows in healthy.items()}
            cut = sick["ce"] | ~outputs.finite(len(text.counts)).cpu()
        first.out = {name: rows | cut for name, rows in sick.items()}
        left = overwritten(batch, cut)
        places, theirs = self._given(text, student_side(left), answers)
        with self.precision.autocast(), self._listening(), first.as_before(device):
            outputs = self._forward(student_side(left))
            self._show_teacher(student_side(left), outputs)
            return self._terms_of(left, places, outputs, theirs, late, first.out)

    def _show_teacher(self, text: Batch, outputs: _Outputs) -> None:
        """Run the teacher for the terms that listen to it; its answer is known already."""
        if self.others and self.source is not None:
            rows, _ = next_token_targets(text.input_ids, text.counts)
            with torch.no_grad():
                self.source(text, rows, outputs.at(rows).as_teacher())

    @staticmethod
    def _given(
        text: Batch, some: Batch, answers: Sequence[TeacherOutput]
    ) -> tuple[tuple[Tensor, Tensor], list[TeacherOutput]]:
        """Positions and targets of `some`; what was answered there, of answers to all of `text`."""
        here = some.counts[:, 1:][text.counts[:, 1:]].nonzero().flatten()
        theirs = [
            select_rows(answer, to_device_async(here, text.input_ids.device)) for answer in answers
        ]
        return next_token_targets(some.input_ids, some.counts), theirs

    def _terms_of(
        self,
        batch: Batch | AlignedBatch,
        places: tuple[Tensor, Tensor],
        outputs: _Outputs,
        teachers: Sequence[TeacherOutput],
        late: list[Tensor] | None = None,
        out: Out = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        """The terms, from what student and teachers put out; each without some rows."""
        text, (rows, targets) = student_side(batch), places
        student, head = outputs.at(rows), outputs.weight_and_bias
        shares = getattr(self.source, "weights", None)
        options: dict[str, Any] = {
            "temperature": self.settings.temperature,
            "weights": (self.settings.alpha_ce, self.settings.alpha_kd),
            "legacy_clamp": self.clamp,
            "corrections": late,
        }
        if isinstance(batch, AlignedBatch) and self.aligned is not None:
            ce = distillation_terms(student.x, *head, targets, **options)[0]
            some = without(batch, out["kd"]) if out else batch
            kd = self.aligned(some, outputs.hidden, outputs.logits)
            terms = {"ce": ce, "kd": kd.float()}
        else:
            sums = []
            for at, has_target, divergence in self._parts(text, len(targets), out):
                whole = at is None
                answers = teachers if whole else [select_rows(teacher, at) for teacher in teachers]
                sums.append(
                    distillation_terms(
                        student.x if whole else student.at(at).x,
                        *head,
                        (targets if whole else targets[at]) if has_target else None,
                        answers if divergence else (),
                        divergence=divergence or self.settings.kind_of_divergence,
                        teacher_weights=shares if divergence else None,
                        **options,
                    )
                )
            ce, kd = sums[0]
            if len(sums) > 1:
                ce, kd = (torch.stack(some).sum() for some in zip(*sums, strict=True))
            terms = {"ce": ce, "kd": kd} if self.has_teacher else {"ce": ce}
        for term in self.others:
            some = text
            if out:
                some = without(text, out[term.name])
                rows = next_token_targets(some.input_ids, some.counts)[0]
            terms[term.name] = term(some, rows)
        return terms

    def lost(self, batch: Any, out: Out) -> dict[str, int]:
        """How much of what each term is a mean over is in the rows that it is without."""
        lost = {}
        for name, rows in out.items():
            both = batch, without(batch, rows)
            if name == "ce":
                whole, left = (student_side(one).text_tokens for one in both)
            else:
                whole, left = (self.counts([one])[name] for one in both)
            lost[name] = whole - left
        return lost

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Around the forward passes, for those terms that look inside."""
        with ExitStack() as stack:
            for term in self.others:
                stack.enter_context(term.listening())
            yield

    def _parts(self, text: Batch, n: int, out: Out) -> list[tuple[Any, bool, str | None]]:
        """Return which of `n` positions learn alike, if from text, and by which divergence.

        None stands for all of them. The first are of text, the others are what the student wrote.
        Rows that are not finite in `kd` have no divergence.
        """
        kind, written = self.settings.kind_of_divergence, self.settings.kind_on_policy
        of_text = text.text_tokens
        judged = torch.ones(n, dtype=torch.bool)
        if "kd" in out:
            judged = without(text, out["kd"]).counts[:, 1:][text.counts[:, 1:]]
        if bool(judged.all()):
            whole = [(slice(of_text), True, kind), (slice(of_text, n), False, written)]
            return [(None, True, kind)] if of_text == n else whole[0 if of_text else 1 :]
        is_text, device = torch.arange(n) < of_text, self.precision.device
        return [
            (to_device_async(which.nonzero().flatten(), device), has_target, divergence)
            for which, has_target, divergence in (
                (judged & is_text, True, kind),
                (~judged & is_text, True, None),
                (judged & ~is_text, False, written),
            )
        ]

    def _forward(self, batch: Batch) -> _Outputs:
        """The student's outputs at every position."""
        if (head := self.head) is None:
            logits = self.student(**batch.model_inputs(), use_cache=False).logits
            return _Outputs(None, logits.flatten(0, 1), None)
        hidden = hidden_states(self.student, batch.model_inputs()).flatten(0, 1)
        return _Outputs(hidden, None, head)

    @torch.no_grad()
    def answer(self, batch: Batch, rows: Tensor) -> TeacherOutput:
        """The student's answer, as a teacher of its teacher's router."""
        return self._forward(batch).at(rows).as_teacher()

    def weighted(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the guard gets: a term of weight 0 is none, so it can neither save nor spoil."""
        return {name: self.weights[name] * terms[name] for name in self.weights if name in terms}

    def counts(self, batches: Sequence[Batch | AlignedBatch]) -> dict[str, int]:
        """What each term is a mean over: tokens, groups of them where they are aligned, or its own.

        That of `ce` is the number of real tokens.
        """
        texts = [student_side(batch) for batch in batches]
        found = {"ce": sum(int(text.counts.sum()) for text in texts)}
        if self.aligned is not None:
            aligned = [batch for batch in batches if isinstance(batch, AlignedBatch)]
            found["kd"] = sum(map(self.aligned.count, aligned))
        elif self.has_teacher:
            found["kd"] = found["ce"]
        return found | {term.name: sum(map(term.count, texts)) for term in self.others}


@dataclass(frozen=True)
class _Outputs:
    """What a student puts out, `[position]`: hidden states before its linear head, or logits."""

    hidden: Tensor | None
    given: Tensor | None  # logits, of a model that caps or scales them
    head: LinearHead | None

    @property
    def x(self) -> Tensor:
        """The hidden states, or the logits where there is no linear head."""
        x = self.hidden if self.given is None else self.given
        assert x is not None
        return x

    @property
    def weight_and_bias(self) -> tuple[Tensor | None, Tensor | None]:
        """Of the linear head; None where `x` are logits."""
        return (None, None) if self.head is None else (self.head.weight, self.head.bias)

    def at(self, rows: Tensor | slice) -> _Outputs:
        """At some positions."""
        hidden, given = (None if x is None else x[rows] for x in (self.hidden, self.given))
        return _Outputs(hidden, given, self.head)

    def finite(self, batch: int) -> Tensor:
        """Whether all of a row is: boolean `[batch]`. An entry of given logits may be infinite."""
        if self.hidden is not None:
            return self.hidden.isfinite().view(batch, -1).all(1)
        assert self.given is not None
        return ~self.given.isnan().view(batch, -1).any(1)

    def logits(self, rows: Tensor) -> Tensor:
        """The logits at some positions."""
        some = self.at(rows)
        if some.given is not None:
            return some.given
        assert some.hidden is not None and self.head is not None
        return F.linear(some.hidden, self.head.weight, self.head.bias)

    def as_teacher(self) -> TeacherOutput:
        """The same without gradient."""
        if self.given is not None:
            return LogitsTeacher(self.given.detach())
        assert self.hidden is not None and self.head is not None
        bias = None if self.head.bias is None else self.head.bias.detach()
        return LinearTeacher(self.hidden.detach(), self.head.weight.detach(), bias)


def student_side(batch: Batch | AlignedBatch) -> Batch:
    """The batch as the student reads it."""
    return batch.student if isinstance(batch, AlignedBatch) else batch


def _checkpoint_activations(model: Any) -> None:
    name = "activation_checkpointing_enable"  # since transformers 5.3
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
