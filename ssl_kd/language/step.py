"""One step of a student: its own text, the teacher's word on it, and the guard between both."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_kd.datasets.aligned import AlignedBatch
from ssl_kd.datasets.blocks import Batch
from ssl_kd.guard.events import Event
from ssl_kd.guard.faults import Thresholds
from ssl_kd.guard.loop import Guard
from ssl_kd.guard.memory import is_out_of_memory
from ssl_kd.guard.microscope import Microscope, diagnose
from ssl_kd.guard.precision import Precision, promote_to_fp32
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.sources import Aligned, Routed, Source, fixed, named_rows, unfit_for_hidden
from ssl_kd.losses.legacy_clamp import LegacyClamp
from ssl_kd.losses.linear_distillation import linear_distillation, logits_distillation
from ssl_kd.losses.teacher_output import LinearTeacher, LogitsTeacher, TeacherOutput
from ssl_kd.losses.token_distillation import next_token_targets
from ssl_kd.teachers.causal import LinearHead, hidden_states, linear_head

logger = logging.getLogger(__name__)


def precision_of(settings: LanguageSettings) -> Precision:
    """The dtypes of a run: what suits the device, or what was asked for where the device has it."""
    asked = {"auto": True, "float32": False}.get(
        settings.model_dtype, getattr(torch, settings.model_dtype, True)
    )
    if settings.model_dtype == "auto" and settings.device in ("auto", "cpu"):
        plain = Precision.for_device(settings.device)
        asked = plain.device.type == "cuda"
    precision = Precision.for_device(settings.device, asked)
    if settings.model_dtype == "float32":
        precision = dataclasses.replace(precision, teacher=torch.float32)
    if settings.emulate_fp16 and precision.device.type == "cpu":
        return dataclasses.replace(
            precision,
            teacher=torch.float16,
            student=torch.float16,
            scale=True,
            why="CPU: fp16 emulated, to see what a GPU without bf16 would",
        )
    return precision


@dataclass(frozen=True)
class StepResult:
    """What came of a step.

    Attributes:
        ce: cross-entropy with the text, nats a token; NaN where it was not finite.
        kd: the divergence times temperature squared, nats a token; with another tokenizer what
            ALIGN measures, a mean over what `Aligned.count` counts. None without a teacher.
        router: what the teacher's router did, by name; empty where none learns.
        loss: the weighted sum of those that the guard let through.
        grad_norm: before clipping.
        updated: whether the student moved.
        tokens: real tokens.
    """

    ce: float
    kd: float | None
    loss: float
    grad_norm: float
    updated: bool
    tokens: int
    router: dict[str, float | None]


class Distiller:
    """A student with its optimizer and guard.

    The loss is `ALPHA_CE * ce + ALPHA_KD * T^2 * divergence`, both means over the real tokens of
    the whole step (`kd` of a teacher with another tokenizer over its groups), however many batches
    it is made of. `ce` and `kd` fail alone: a NaN in one leaves the other training on that step;
    without either the step is skipped.

    Args:
        student: a causal LM; its trainable weights become float32.
        settings: weights of the terms, optimizer, guard.
        precision: of the forward pass.
        source: what the teacher says of a batch; None for cross-entropy alone.
        aligned: a teacher with another tokenizer, in place of `source`; batches are `AlignedBatch`.
        events: a file to append the guard's decisions to.

    Attributes:
        tokens: learned from so far.
        recent: results of the steps since the last log line, which may be before a resume.
    """

    def __init__(
        self,
        student: nn.Module,
        settings: LanguageSettings,
        precision: Precision,
        source: Source | None = None,
        events: Any = None,
        aligned: Aligned | None = None,
    ) -> None:
        self.settings, self.precision, self.source = settings, precision, source
        self.aligned = None if aligned is None else aligned.to(precision.device)
        self.student = student.to(precision.device).train()
        if (line := promote_to_fp32(student)) is not None:
            logger.info("%s", line)
        if settings.gradient_checkpointing:
            _checkpoint_activations(student)
        self.head = linear_head(student)
        if aligned is not None and aligned.projection is not None and self.head is None:
            raise unfit_for_hidden("student", student)
        self.clamp = LegacyClamp.parse(settings.legacy_clamp) if settings.legacy_clamp else None
        modules = [student] if aligned is None else [student, aligned]
        trained = [p for module in modules for p in module.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.peak_lr,
            betas=(0.9, 0.95),
        )
        self.guard = Guard(
            student,
            self.optimizer,
            thresholds=Thresholds(
                spike_factor=settings.spike_factor,
                restore_after=settings.restore_after,
                stop_after=settings.stop_after,
            ),
            clip_grad=settings.clip_grad,
            scaler=precision.scale,
            fresh_optimizer=True,
            events=events,
        )
        self.tokens = 0
        self.recent: list[StepResult] = []
        self._explained: set[str] = set()

    def step(self, batches: Sequence[Batch | AlignedBatch], learning_rate: float) -> StepResult:
        """Learn from some batches as from one large one.

        Raises:
            TooFewHealthyParts: going on would be a waste; the student is at its last good state.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        tokens = sum(int(_own(batch).counts.sum()) for batch in batches)
        sizes = {"ce": tokens, "kd": tokens}
        if self.aligned is not None:
            aligned = [batch for batch in batches if isinstance(batch, AlignedBatch)]
            sizes["kd"] = sum(map(self.aligned.count, aligned))
        zero = torch.zeros((), device=self.precision.device)
        sums: dict[str, Tensor] = {"ce": zero, "kd": zero}
        with self._router_moves_once(batches):
            dice = self._dice()
            for batch in batches:
                terms = self.terms(batch)
                terms = {name: term / max(sizes[name], 1) for name, term in terms.items()}
                sums |= {name: sums[name] + term.detach() for name, term in terms.items()}
                self.guard.backward(self._weighted(terms))
        self.tokens += tokens
        first = len(self.guard.events)
        router = self._router_events()
        try:
            updated = bool(self.guard.step())
        finally:  # where the guard stops the run, above all
            self.optimizer.zero_grad()
            self._explain(batches, self.guard.events.events[first:], dice)
        ce, kd = (float(sums[name]) for name in ("ce", "kd"))
        weighted = {"ce": self.settings.alpha_ce * ce, "kd": self.settings.alpha_kd * kd}
        finite = [value for value in weighted.values() if abs(value) < float("inf")]
        return StepResult(
            ce=ce,
            kd=kd if self.has_teacher else None,
            loss=sum(finite) if finite else float("nan"),
            grad_norm=float(self.guard.grad_norm[0]),
            updated=updated,
            tokens=tokens,
            router=router,
        )

    @property
    def has_teacher(self) -> bool:
        """Whether there is more to learn from than the text."""
        return self.source is not None or self.aligned is not None

    def terms(self, of: Batch | AlignedBatch) -> dict[str, Tensor]:
        """Sums over the batch: `ce`, and with a teacher `kd`; float32.

        Over its real tokens; `kd` of an aligned teacher over what `Aligned.count` counts.
        """
        batch = _own(of)
        rows, targets = next_token_targets(batch.input_ids, batch.counts)
        options: dict[str, Any] = {
            "temperature": self.settings.temperature,
            "divergence": self.settings.kind_of_divergence,
            "weights": (self.settings.alpha_ce, self.settings.alpha_kd),
            "legacy_clamp": self.clamp,
        }
        with self.precision.autocast():
            if self.head is None:
                logits = self.student(**batch.model_inputs(), use_cache=False).logits
                every = logits.flatten(0, 1)
                logits = every[rows]
                if isinstance(of, AlignedBatch) and self.aligned is not None:
                    ce = logits_distillation(logits, targets, (), **options)[0]
                    kd = self.aligned(of, None, lambda some: every[some])
                    return {"ce": ce, "kd": kd.float()}
                teachers = self._ask(batch, rows, LogitsTeacher(logits.detach()))
                return self._named(logits_distillation(logits, targets, teachers, **options))
            every = hidden_states(self.student, batch.model_inputs()).flatten(0, 1)
            hidden, weight, bias = every[rows], self.head.weight, self.head.bias
            if isinstance(of, AlignedBatch) and self.aligned is not None:
                ce = linear_distillation(hidden, weight, bias, targets, (), **options)[0]
                kd = self.aligned(of, every, lambda some: F.linear(every[some], weight, bias))
                return {"ce": ce, "kd": kd.float()}
            teachers = self._ask(batch, rows, _as_teacher(hidden, self.head))
            sums = linear_distillation(hidden, weight, bias, targets, teachers, **options)
            return self._named(sums)

    def _named(self, sums: Tensor) -> dict[str, Tensor]:
        return {"ce": sums[0], "kd": sums[1]} if self.has_teacher else {"ce": sums[0]}

    def _ask(self, batch: Batch, rows: Tensor, own: TeacherOutput) -> Sequence[TeacherOutput]:
        return () if self.source is None else self.source(batch, rows, own)

    def _router_moves_once(self, batches: Sequence[Any]) -> AbstractContextManager[None]:
        if len(batches) == 1 or not isinstance(self.source, Routed):
            return nullcontext()
        return self.source.moved_once(batches, self._word, self.precision.autocast)

    @torch.no_grad()
    def _word(self, batch: Batch, rows: Tensor) -> TeacherOutput:
        """What the student says, as a teacher of its teacher's router."""
        if self.head is None:
            logits = self.student(**batch.model_inputs(), use_cache=False).logits
            return LogitsTeacher(logits.flatten(0, 1)[rows])
        hidden = hidden_states(self.student, batch.model_inputs()).flatten(0, 1)[rows]
        return _as_teacher(hidden, self.head)

    def _router_events(self) -> dict[str, float | None]:
        """Fetch what the teacher's router had to say."""
        if not isinstance(self.source, Routed) or self.source.record is None:
            return {}
        events, self.source.events = self.source.events, []
        self.guard.events.extend([replace(e, step=self.guard.steps) for e in events])
        seen = self.source.record
        return {
            "router": seen.loss,
            "router_drift": seen.drift,
            "router_entropy": seen.entropy,
            "teacher_ce": self.source.ce,
        }

    def _weighted(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = {"ce": self.settings.alpha_ce, "kd": self.settings.alpha_kd}
        return {name: weights[name] * term for name, term in terms.items()}

    def _explain(
        self, batches: Sequence[Batch | AlignedBatch], events: Sequence[Event], dice: list[Tensor]
    ) -> None:
        """Name the rows of a sick batch and the operation, once for each part.

        Args:
            batches: of the step.
            events: what the guard said of it.
            dice: from `_dice`, before the step's first batch.
        """
        for event in events:
            sick = event.stage in ("loss", "gradient") and event.action != "taken in again"
            if not sick or event.part == "router" or event.part in self._explained:
                continue
            why = "finite when run again"
            try:
                with torch.random.fork_rng(self._gpus()):
                    torch.set_rng_state(dice[0])
                    for gpu, state in zip(self._gpus(), dice[1:], strict=True):
                        torch.cuda.set_rng_state(state, gpu)
                    said = (self.explain(batch, event.part) for batch in batches)
                    words = next((words for words in said if words is not None), None)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                words, why = None, "no memory to run it again"
            action = "explained"
            if words is None:  # the rows are all that can be said
                rows = torch.cat([_own(batch).rows for batch in batches])
                words, action = f"{named_rows(rows)}: {why}", "not found again"
            else:
                self._explained.add(event.part)
            self.guard.events.extend([Event(event.step, event.part, "replay", words, action)])

    def _gpus(self) -> list[torch.device]:
        return [self.precision.device] if self.precision.device.type == "cuda" else []

    def _dice(self) -> list[Tensor]:
        """States of the random numbers: the CPU's, and the GPU's where one is used."""
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._gpus())]

    def explain(self, batch: Batch | AlignedBatch, part: str = "model") -> str | None:
        """Run a batch again under the microscope; what first went wrong, and what to change.

        Nothing learns from it. Where another part was updated, the weights are those after.
        """
        named = {
            f"student weight {name}": p.detach() for name, p in self.student.named_parameters()
        }
        followed: Any = self.source if self.aligned is None else self.aligned
        teacher = getattr(followed, "model", None)
        named |= {  # all of a large one would be too much to look at in float64
            f"teacher weight {name}": p.detach()
            for name, p in ([] if teacher is None else teacher.named_parameters())
            if not p.isfinite().all()
        }
        trained = [p for p in self.student.parameters() if p.requires_grad]
        with fixed(self.source), Microscope(named) as scope:
            terms = self._weighted(self.terms(batch))
            looked = [terms[part]] if part in terms else list(terms.values())
            fault = scope.fault(*looked)
            if fault is None:
                total = sum(looked, torch.zeros(()))
                found = torch.autograd.grad(total, trained, allow_unused=True)
                fault = scope.fault(*(g for g in found if g is not None))
        if fault is None:
            return None
        found, rows = diagnose(fault), named_rows(_own(batch).rows)
        where = f"{fault.op}, {'backward' if fault.backward else 'forward'} pass"
        where += f", {fault.place}" if fault.place else ""
        return f"{rows}: {where}: {found.cause.value}: {found.words}. {found.remedy}"

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        trained = {n: p.detach() for n, p in self.student.named_parameters() if p.requires_grad}
        return {
            "student": trained,
            "optimizer": self.optimizer.state_dict(),
            "guard": self.guard.state_dict(),
            "tokens": self.tokens,
            "recent": [dataclasses.asdict(result) for result in self.recent],
            "explained": sorted(self._explained),
            "aligned": {} if self.aligned is None else self.aligned.state_dict(),
            "router": self.source.state() if isinstance(self.source, Routed) else {},
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        for name, p in self.student.named_parameters():
            if p.requires_grad:
                p.copy_(state["student"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.guard.load_state_dict(state["guard"])
        self.tokens, self._explained = state["tokens"], set(state["explained"])
        self.recent = [StepResult(**row) for row in state["recent"]]
        if self.aligned is not None:
            self.aligned.load_state_dict(state["aligned"])
        if isinstance(self.source, Routed):
            self.source.load(state["router"])


def _as_teacher(hidden: Tensor, head: LinearHead) -> LinearTeacher:
    bias = None if head.bias is None else head.bias.detach()
    return LinearTeacher(hidden.detach(), head.weight.detach(), bias)


def _own(batch: Batch | AlignedBatch) -> Batch:
    """The student's side."""
    return batch.student if isinstance(batch, AlignedBatch) else batch


def _checkpoint_activations(model: Any) -> None:
    name = "activation_checkpointing_enable"  # since transformers 5.3
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
