"""Rows of a batch in which a loss term is not finite: found, and left out of that term alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ssl_kd.datasets.aligned import AlignedBatch
from ssl_kd.datasets.blocks import Batch
from ssl_kd.guard.events import Event
from ssl_kd.guard.memory import to_device_async
from ssl_kd.language.fault_explainer import rng_state, set_rng_state
from ssl_kd.language.sources import named_rows
from ssl_kd.losses.teacher_output import TeacherOutput
from ssl_kd.training.process_group import ProcessGroup

AnyBatch = TypeVar("AnyBatch", Batch, AlignedBatch)
Out = Mapping[str, Tensor]
"""Name of a term -> boolean `[batch]` on the CPU: the rows that it is without."""


@dataclass
class FirstPass(Generic[AnyBatch]):
    """What a second pass over a batch needs of the first.

    Attributes:
        batch: of the pass.
        rng: before it, so that both drop out the same.
        answers: the teacher's, which is not asked again; None before they are there.
        out: the rows that the second pass left out of each term.
    """

    batch: AnyBatch
    rng: Mapping[str, Tensor]
    answers: Sequence[TeacherOutput] | None = None
    out: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: AnyBatch, device: torch.device) -> FirstPass[AnyBatch]:
        """Before the forward pass of a batch."""
        return cls(batch, rng_state(device))

    @contextlib.contextmanager
    def as_before(self, device: torch.device) -> Iterator[None]:
        """Draw what the first pass drew; afterwards the draws go on as after that."""
        after = rng_state(device)
        set_rng_state(self.rng, device)
        try:
            yield
        finally:
            set_rng_state(after, device)

    def again(
        self,
        team: ProcessGroup,
        step: int,
        before: Mapping[str, Tensor],
        terms: Mapping[str, Tensor],
        lost: Callable[[AnyBatch, Out], dict[str, int]],
    ) -> tuple[dict[str, Tensor], list[Event], dict[str, int]]:
        """What to go on with, once the second pass was done; every rank calls it.

        A term that has no row left on any rank stays what it was, and is cut out as a whole; so is
        one whose fault is not seen again in any row.

        Args:
            team: the ranks.
            step: for the events.
            before: the terms of the first pass.
            terms: those of the second.
            lost: how much of what each term is a mean over is in the rows that it is without.

        Returns:
            The terms that have rows left; an event of each that is without some; and how much each
            of those lost on this rank.
        """
        named = {name: self._named(rows) for name, rows in self.out.items() if bool(rows.any())}
        whole = [name for name, rows in self.out.items() if bool(rows.all())]
        sick = [name for name, term in before.items() if not bool(term.isfinite())]
        seen = named, whole, [name for name in sick if name not in named]
        gathered = team.of_all(f"step {step}, rows left out", seen)
        gone = {name for name in terms if all(name in whole for _, whole, _ in gathered)}
        gone |= {name for _, _, vanished in gathered for name in vanished}
        events = []
        for name in (name for name in terms if name not in gone):
            where = [
                some[name] + (f" on rank {rank} of {team.world}" if team.world > 1 else "")
                for rank, (some, _, _) in enumerate(gathered)
                if name in some
            ]
            if where:
                reason = f"not finite in {'; '.join(where)}"
                events.append(Event(step, name, "loss", reason, "rows left out"))
        partly = {event.part: self.out[event.part] for event in events}
        kept = {name: term for name, term in terms.items() if name not in gone}
        return kept, events, lost(self.batch, partly)

    def _named(self, rows: Tensor) -> str:
        ids, places = self.batch.rows, torch.arange(len(rows))
        return named_rows(torch.where(ids < 0, places, ids)[rows])


def without(batch: AnyBatch, rows: Tensor) -> AnyBatch:
    """The batch with no target in some of its rows."""
    if isinstance(batch, AlignedBatch):
        counts = batch.counts & ~rows.numpy()[:, None]
        return replace(batch, student=without(batch.student, rows), counts=counts)
    return replace(batch, counts=batch.counts & ~rows[:, None])


def overwritten(batch: AnyBatch, rows: Tensor) -> AnyBatch:
    """The batch with no target in some rows, which hold what another one does: of the same shape.

    What a student makes of these rows is then finite as well, and 0 times it is 0 in a backward
    pass. Rows with images stay what they are.
    """
    if isinstance(batch, AlignedBatch):
        student = overwritten(batch.student, rows)
        return replace(without(batch, rows), student=student)
    if batch.pictures is not None or not bool(rows.any()):
        return without(batch, rows)
    if bool(rows.all()):
        return replace(without(batch, rows), input_ids=torch.zeros_like(batch.input_ids))
    source = torch.where(rows, (~rows).int().argmax(), torch.arange(len(rows)))
    source = to_device_async(source, batch.input_ids.device)
    columns = {n: getattr(batch, n)[source] for n in ("input_ids", "position_ids", "documents")}
    return replace(without(batch, rows), **columns)
