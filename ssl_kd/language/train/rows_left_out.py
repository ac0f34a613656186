"""Leave the rows of a batch in which a loss term is not finite out of this term alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from firstnan.events import Event
from ssl_kd.core.memory import to_device_async
from ssl_kd.core.runs.process_group import ProcessGroup
from ssl_kd.language.losses.teacher_output import TeacherOutput
from ssl_kd.language.teachers.base import named_rows
from ssl_kd.language.text.aligned import AlignedBatch
from ssl_kd.language.text.blocks import Batch

AnyBatch = TypeVar("AnyBatch", Batch, AlignedBatch)
SickRows = Mapping[str, Tensor]
"""Name of a term -> boolean `[batch]` on the CPU: the rows that are left out of it."""


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Return the random state of the CPU, and of the GPU if `device` is one."""
    gpu = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state()} | gpu


def set_rng_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore a random state that `rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@dataclass
class FirstPass(Generic[AnyBatch]):
    """The first pass over a batch, for a second one that leaves rows out."""

    batch: AnyBatch
    rng: Mapping[str, Tensor]  # random state before the pass, so that dropout repeats
    answers: Sequence[TeacherOutput] | None = None  # outputs of the teachers
    sick: dict[str, Tensor] = field(default_factory=dict)  # term -> rows that were left out

    @contextlib.contextmanager
    def same_random_state(self, device: torch.device) -> Iterator[None]:
        """Use the random state of the first pass; restore the current one afterwards."""
        after = rng_state(device)
        set_rng_state(self.rng, device)
        try:
            yield
        finally:
            set_rng_state(after, device)

    def merge(
        self,
        ranks: ProcessGroup,
        step: int,
        before: Mapping[str, Tensor],
        terms: Mapping[str, Tensor],
        lost: Callable[[AnyBatch, SickRows], dict[str, int]],
    ) -> tuple[dict[str, Tensor], list[Event], dict[str, int]]:
        """Decide on all ranks together which terms to use without some of their rows.

        A term is not used if no row of any rank is finite, or if its fault does not reappear in the
        second pass: the guard then cuts out the whole term. `before` are the terms of the first
        pass, `terms` those of the second.

        Returns:
            The terms of the second pass to use; an event for each term that lost rows; and, from
            `lost`, how many tokens of each term are not used on this rank.
        """
        named = {name: self._named(rows) for name, rows in self.sick.items() if bool(rows.any())}
        without_rows = [name for name, rows in self.sick.items() if bool(rows.all())]
        sick = [name for name, term in before.items() if not bool(term.isfinite())]
        local = named, without_rows, [name for name in sick if name not in named]
        gathered = ranks.gather(f"step {step}, rows left out", local)
        gone = {name for name in terms if all(name in empty for _, empty, _ in gathered)}
        gone |= {name for _, _, vanished in gathered for name in vanished}
        events = []
        for name in (name for name in terms if name not in gone):
            places = [
                rows[name] + (f" on rank {rank} of {ranks.world}" if ranks.world > 1 else "")
                for rank, (rows, _, _) in enumerate(gathered)
                if name in rows
            ]
            if places:
                reason = f"not finite in {'; '.join(places)}"
                events.append(Event(step, name, "loss", reason, "rows left out"))
        healthy = {name: term for name, term in terms.items() if name not in gone}
        out = {event.part: self.sick[event.part] for event in events}
        out |= {name: torch.ones_like(self.sick[name]) for name in gone}
        return healthy, events, lost(self.batch, out)

    def _named(self, rows: Tensor) -> str:
        ids, places = self.batch.rows, torch.arange(len(rows))
        return named_rows(torch.where(ids < 0, places, ids)[rows])


def without(batch: AnyBatch, rows: Tensor) -> AnyBatch:
    """Return a copy of the batch without targets in `rows`, a boolean `[batch]`."""
    if isinstance(batch, AlignedBatch):
        counts = batch.counts & ~rows.numpy()[:, None]
        return replace(batch, student=without(batch.student, rows), counts=counts)
    return replace(batch, counts=batch.counts & ~rows[:, None])


def overwritten(batch: AnyBatch, rows: Tensor) -> AnyBatch:
    """Return a copy of the batch in which `rows` have no targets and the tokens of another row.

    The student's output there is then finite, and its gradient is 0. Rows with images keep theirs.
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
