"""One step of a student: its own text, the teacher's answer to it, and the guard between both."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ssl_kd.datasets.aligned import AlignedBatch
from ssl_kd.datasets.blocks import Batch
from ssl_kd.guard.events import Event
from ssl_kd.guard.faults import Thresholds
from ssl_kd.guard.loop import Guard
from ssl_kd.guard.modules import without_pieces
from ssl_kd.guard.precision import Precision
from ssl_kd.language.aligned import Aligned
from ssl_kd.language.fault_explainer import FaultExplainer, examine, rng_state
from ssl_kd.language.objective import Objective, Term, student_side
from ssl_kd.language.parallel import DistributedStudent
from ssl_kd.language.routed import Routed
from ssl_kd.language.setting_groups import TrainingSettings
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.sick_rows import FirstPass
from ssl_kd.language.sources import Source, named_rows
from ssl_kd.teachers.finite import in_words
from ssl_kd.training.fault_bundle import FlightRecorder
from ssl_kd.training.process_group import ProcessGroup

logger = logging.getLogger(__name__)

RESTORE_AFTER = 20
"""Bad steps in a row before the student goes back to its last good state."""


def precision_of(settings: TrainingSettings) -> Precision:
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
    return precision


@dataclass(frozen=True)
class StudentStep:
    """What came of a step.

    Attributes:
        terms: the loss terms by name, NaN where one was not finite: `ce`, cross-entropy with the
            text, nats a token of it, where the step had text; with a teacher `kd`, the divergence
            times temperature squared, nats a token, or with another tokenizer what ALIGN measures,
            a mean over what `Aligned.count` counts; and others, each a mean over what it counts.
        router: what the teacher's router did, by name; empty where none learns.
        loss: the weighted sum of those that the guard let through.
        grad_norm: before clipping.
        updated: whether the student moved.
        tokens: real tokens.
        rollouts: what the student wrote to learn from, by name; empty where it wrote nothing.
    """

    terms: dict[str, float]
    loss: float
    grad_norm: float
    updated: bool
    tokens: int
    router: dict[str, float | None]
    rollouts: dict[str, float | None] = field(default_factory=dict)

    @property
    def ce(self) -> float | None:
        """Cross-entropy with the text, nats a token of it; None where the step had no text."""
        return self.terms.get("ce")

    @property
    def kd(self) -> float | None:
        """The distance to the teacher; None without one."""
        return self.terms.get("kd")

    def learned(self, term: str) -> bool:
        """Whether the student moved by a loss term."""
        return self.updated and math.isfinite(self.terms.get(term, math.nan))


class Distiller(Objective):
    """A student's objective with its optimizer and guard.

    Its terms are means over the real tokens of the whole step (`kd` of a teacher with another
    tokenizer over its groups), however many batches it is made of; `ce`, too, where the student
    wrote some of these itself, so that a token's weight does not depend on the others. Each term
    fails alone, row by row: rows in which it is not finite are left out of it, by an event that
    names them, and the others count what they counted (what a mean divides by stays; the log has
    the mean of the others). A term without a row left leaves the others training on that step;
    without any of those that have a weight, and without a token, the step is skipped. A term that
    is cut out of STOP_AFTER steps in a row, in whole or of rows, ends the run, as a student does
    that is sick for so long.

    Where `torch.distributed` has several ranks, a step is of the batches of all of them, and so are
    its means; every rank makes a distiller and calls it equally often.

    Args:
        student: a causal LM; its trainable weights become float32.
        settings: weights of the terms, optimizer, guard.
        precision: of the forward pass.
        source: gives the teacher's answer to a batch; None for cross-entropy alone.
        aligned: a teacher with another tokenizer, in place of `source`; batches are `AlignedBatch`.
        events: a file to append the guard's decisions to, or an `EventLog`.
        recorder: keeps the first fault of each part.
        others: further loss terms.

    Attributes:
        team: the ranks that train this student.
        trainee: the student as they hold it.
        tokens: learned from so far.
        learned: how many steps each of these terms has moved the student in.
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
        recorder: FlightRecorder | None = None,
        others: Sequence[Term] = (),
    ) -> None:
        super().__init__(student, settings, precision, source, aligned, others)
        beside = [*self.beside.values()]
        self.team = ProcessGroup(precision.device)
        self.trainee = DistributedStudent(
            student, beside, precision.device, self.team, shard=settings.shard
        )
        trained = [
            p for module in (student, *beside) for p in module.parameters() if p.requires_grad
        ]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.peak_lr,
            betas=(0.9, 0.95),
            fused=True if precision.device.type == "cuda" else None,  # a CPU's keeps its bits
        )
        self.guard = Guard(
            student,
            self.optimizer,
            thresholds=Thresholds(
                spike_factor=settings.spike_factor,
                restore_after=RESTORE_AFTER,
                stop_after=settings.stop_after,
                max_norm=settings.grad_norm_threshold,
            ),
            clip_grad=settings.clip_grad,
            scaler=precision.scale,
            fresh_optimizer=True,
            events=events,
        )
        self.tokens = 0
        self.learned = dict.fromkeys(self.weights, 0)
        self.recent: list[StudentStep] = []
        self.explainer = FaultExplainer(self, recorder)

    def step(self, batches: Sequence[Batch | AlignedBatch], learning_rate: float) -> StudentStep:
        """Learn from some batches as from one large one.

        Raises:
            TooFewHealthyParts: training cannot continue; the student is at its last good state.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        tokens, text, sizes = self._sizes(batches)
        self._lost: dict[str, int] = {}
        sums = dict.fromkeys(sizes, torch.zeros((), device=self.precision.device))
        rng = rng_state(self.precision.device)
        if not tokens:  # no loss, so the guard sees nothing to update by, and counts the step
            event = Event(self.guard.steps, "batch", "input", "no token to learn from", "skipped")
            self.guard.events.extend([event])
            batches = []
        with self._router_moves_once(batches):
            for i, batch in enumerate(batches):
                with self.trainee.averaged(last=i == len(batches) - 1):
                    terms = self._learn_from(batch, sizes)
                sums |= {name: sums[name] + term for name, term in terms.items()}
        self.tokens += tokens
        router = self._router_events()
        # On their way while the guard waits for what it reads, behind them.
        sent = torch.stack([*sums.values()]).to("cpu", non_blocking=True)
        try:
            self.guard.before_step()
            self.explainer.explain(
                batches, rng
            )  # of a term that is cut out, before the others move
            self.guard.optimizer.step()
            explain = partial(self.explainer.explain, batches, rng)
            updated = bool(self.guard.after_step(on_fault=explain))
        finally:
            self.optimizer.zero_grad()
        what = f"step {self.guard.steps - 1}, the losses"
        means = self.team.means(what, *sent.tolist())
        found = dict(zip(sums, means, strict=True)) if tokens else {}
        weighted = [weight * found[name] for name, weight in self.weights.items() if name in found]
        finite = [value for value in weighted if math.isfinite(value)]
        self._without_lost(found, text, sizes)
        if not text:
            found.pop("ce", None)
        elif tokens != text:
            found["ce"] *= tokens / text
        done = StudentStep(
            terms=found,
            loss=sum(finite) if finite else float("nan"),
            grad_norm=float(self.guard.grad_norm[0]),
            updated=updated,
            tokens=tokens,
            router=router,
        )
        self.learned = {name: n + done.learned(name) for name, n in self.learned.items()}
        note = ", in whole or of some rows" if self._lost else ""
        self.guard.stop_without(self.weights, note)
        return done

    def _learn_from(
        self, batch: Batch | AlignedBatch, sizes: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """Gradients of a batch; its part of each mean. A term leaves out rows that spoil it."""
        late: list[Tensor] = []
        first = FirstPass.of(batch, self.precision.device)

        def shares(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: term / sizes[name] for name, term in sums.items()}

        def again() -> dict[str, Tensor]:
            late.clear()
            sums = self.trainee.forward(self.without_sick_rows, first, late)
            step = self.guard.steps
            sums, events, lost = first.again(self.team, step, terms, sums, self.lost)
            self.guard.events.extend(events)
            for name in {event.part for event in events}:
                self._lost[name] = self._lost.get(name, 0) + lost[name]
            terms.update(shares(sums))
            return self.weighted(terms)

        terms = shares(self.trainee.forward(partial(self.terms, late=late, first=first), batch))
        self.guard.backward(self.weighted(terms), again=again)
        seen = {name: term.detach() for name, term in terms.items()}
        if late:
            seen["kd"] = seen["kd"] + torch.stack(late).sum() / sizes["kd"]
        return seen

    def _without_lost(self, found: dict[str, float], text: int, sizes: Mapping[str, float]) -> None:
        """Make means of the terms that lost rows what they are over the others; on every rank."""
        for name in sorted(self._lost):
            (lost,) = self.team.sums(f"step {self.guard.steps - 1}, {name} lost", self._lost[name])
            of = text if name == "ce" else sizes[name] * self.team.world
            found[name] *= of / (of - lost) if lost < of else math.nan

    def _sizes(self, batches: Sequence[Batch | AlignedBatch]) -> tuple[int, int, dict[str, float]]:
        """Real tokens of all ranks, those of text among them, and each term's divisor.

        See `counts`. Gradients are averaged over ranks: sums over a rank's share of a divisor
        become means over all.
        """
        here, what = self.counts(batches), f"step {self.guard.steps}, the tokens"
        of_text = sum(student_side(batch).text_tokens for batch in batches)
        text, *of_all = map(int, self.team.sums(what, of_text, *here.values()))
        sizes = dict(zip(here, of_all, strict=True))
        shares = {name: max(n, 1) / self.team.world for name, n in sizes.items()}
        return sizes["ce"], text, shares

    def _router_moves_once(self, batches: Sequence[Any]) -> AbstractContextManager[None]:
        alone = len(batches) == self.team.world == 1
        if alone or not isinstance(self.source, Routed):
            return nullcontext()
        return self.source.moved_once(batches, self.answer, self.precision.autocast)

    def _router_events(self) -> dict[str, float | None]:
        """Move the events of the teacher's router to the guard; return its numbers."""
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

    def explain(self, batch: Batch | AlignedBatch, part: str = "model") -> str | None:
        """Run a batch again under the microscope; what first went wrong, and what to change."""
        found = examine(self, batch, part)
        return None if found is None else f"{named_rows(batch.rows)}: {in_words(*found)}"

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs; tensors that are sharded are the first rank's, whole."""
        trained = {n: p.detach() for n, p in self.student.named_parameters() if p.requires_grad}
        return {
            "student": self.trainee.gathered(trained),
            "optimizer": self.trainee.gathered(self.optimizer.state_dict()),
            "guard": self._for_all(self.guard.state_dict()),
            "tokens": self.tokens,
            "learned": self.learned,
            "recent": [dataclasses.asdict(result) for result in self.recent],
            "explained": sorted(self.explainer.explained),
            "beside": {
                name: self.trainee.gathered(module.state_dict())
                for name, module in self.beside.items()
            },
            "router": self.source.state() if isinstance(self.source, Routed) else {},
        }

    def _for_all(self, guard: dict[str, Any]) -> dict[str, Any]:
        return without_pieces(guard) if self.trainee.sharded else guard

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave, to however many ranks."""
        spread = self.trainee.spread
        for name, p in self.student.named_parameters():
            if p.requires_grad:
                p.copy_(spread(state["student"][name], p))
        rows, groups = state["optimizer"]["state"], self.optimizer.param_groups
        moments = {
            i: {key: spread(value, p) if value.ndim else value for key, value in rows[i].items()}
            for i, p in enumerate(p for group in groups for p in group["params"])
            if i in rows
        }
        self.optimizer.load_state_dict({**state["optimizer"], "state": moments})
        self.guard.load_state_dict(self._for_all(state["guard"]))
        self.tokens, self.explainer.explained = state["tokens"], set(state["explained"])
        self.learned |= state["learned"]
        self.recent = [StudentStep(**row) for row in state["recent"]]
        for name, module in self.beside.items():
            for key, p in module.state_dict().items():
                p.copy_(spread(state["beside"][name][key], p))
        if isinstance(self.source, Routed):
            self.source.load(state["router"])
