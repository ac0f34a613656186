"""Train the heads in several processes, which exchange the reports of the guard.

Each rank trains some of the heads. Heads share no weights, so ranks do not wait for each other
between exchanges, except for one all-reduce per step with INSTANCE_WEIGHT `mean`. The reports of
all ranks determine when to stop, whether enough heads are healthy, and the log.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from firstnan.events import Event
from firstnan.faults import Thresholds
from firstnan.health import Health, Tally
from ssl_kd.core.errors import InputError
from ssl_kd.core.runs.ranks import Ranks
from ssl_kd.vision.train import losses
from ssl_kd.vision.train.learner import HeadsLearner
from ssl_kd.vision.train.step import HeadsState, HeadTrainer

SHARED = ("convergence.", "stage.")  # tensors of a checkpoint that have no row for each head


class HeadRanks:
    """Divide the heads among the processes, and exchange tensors and reports.

    In a single process, the methods return their arguments unchanged.
    """

    def __init__(self, ranks: Ranks, n_heads: int) -> None:
        if ranks.world > n_heads:
            raise InputError(
                f"N_HEADS is {n_heads}; expected at least {ranks.world}, one for each process that "
                f"was started: start at most {n_heads} processes, or raise --n_heads"
            )
        bounds = [n_heads * rank // ranks.world for rank in range(ranks.world + 1)]
        self.ranks = ranks
        self._bounds = bounds
        self._n_heads = n_heads
        self.heads = range(bounds[ranks.rank], bounds[ranks.rank + 1])
        self.caught: list[int] = []  # signals that this rank received
        self._agreed_to_stop = False

    @property
    def leads(self) -> bool:
        """Return whether this rank writes the run folder."""
        return self.ranks.rank == 0

    @property
    def stopping(self) -> bool:
        """Return whether to stop before the next step; all ranks agree on this in `gather`."""
        return bool(self.caught) if self.ranks.world == 1 else self._agreed_to_stop

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks; all ranks must call this method in the same order.

        If any rank has caught a signal, all ranks stop before the next step.
        """
        if self.ranks.world == 1:
            return [value]
        received: list[Any] = [None] * self.ranks.world
        dist.all_gather_object(received, (self.caught[:1], value))
        signals = [number for caught, _ in received for number in caught]
        if signals:
            self._agreed_to_stop = True
            self.caught[:] = self.caught or signals[:1]
        return [values for _, values in received]

    def rows_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Select the rows of this rank's heads from the tensors of a checkpoint."""
        rows = slice(self.heads.start, self.heads.stop)
        return {n: t if n.startswith(SHARED) else t[rows] for n, t in tensors.items()}

    def gather_rows(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Collect the rows of all heads on rank 0, in CPU memory; return {} on other ranks."""
        if self.ranks.world == 1:
            return tensors
        gathered = {}
        for name, tensor in tensors.items():
            tensor = tensor.detach().cpu().contiguous()
            if not self.leads:
                dist.send(tensor, 0)
                continue
            # Rows are received in place, so no second copy is needed.
            gathered[name] = rows = tensor.new_empty(self._n_heads, *tensor.shape[1:])
            rows[: len(tensor)] = tensor
            for rank in range(1, self.ranks.world):
                dist.recv(rows[self._bounds[rank] : self._bounds[rank + 1]], rank)
        return gathered

    def gather_trainer(self, trainer: HeadTrainer) -> HeadTrainer:
        """Return a trainer of all heads on rank 0, and `trainer` itself on other ranks.

        It has no students and moments, for which one device may lack the memory.
        """
        if self.ranks.world == 1:
            return trainer
        state = trainer.state
        health = {f"health.{name}": tensor for name, tensor in state.health.tensors().items()}
        gathered = self.gather_rows({"teacher": state.teacher, "loss": state.loss} | health)
        if not gathered:
            return trainer
        gathered = {name: tensor.to(state.teacher.device) for name, tensor in gathered.items()}
        health = {f.name: gathered.pop(f"health.{f.name}") for f in fields(Health)}
        empty = dict.fromkeys((f.name for f in fields(HeadsState)), gathered["teacher"][:, :0])
        trainer = copy.copy(trainer)
        trainer.state = HeadsState(**{**empty, **gathered, "health": Health(**health)})
        return trainer

    def instance_weights(self, agreements: Tensor) -> Tensor | None:
        """Weight samples by the mean teacher agreement over all ranks, in one all-reduce."""
        healthy = torch.isfinite(agreements).all(-1, keepdim=True)
        sums = agreements.new_empty(agreements.shape[1] + 1)
        sums[:-1] = torch.where(healthy, agreements, 0).sum(0)
        sums[-1] = healthy.sum()
        dist.all_reduce(sums)
        mean = sums[:-1] / sums[-1].clamp(min=1)
        return losses.instance_weights(mean.unsqueeze(0), "mean")


class RankHeadsLearner(HeadsLearner):
    """Train the heads of one rank in `run_loop`; rank 0 writes the log for all ranks.

    Ranks exchange the guard's reports, and signals to stop, every `log_every` steps.
    """

    def __init__(self, ranks: HeadRanks, log_every: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ranks, self._log_every = ranks, log_every
        self.trainer.weigh_together = ranks.instance_weights
        self._write_events, self.on_events = self.on_events, self._collect
        self._unsent: list[Event] = []
        self._tallies: list[tuple[int, Tally]] = []
        self._gathered: tuple[Tensor, ...] = ()

    def look(self, done: int, *, at_once: bool = False) -> None:
        """Process unread steps as `HeadsLearner` does, and exchange reports at each log record."""
        super().look(done, at_once=at_once)
        if not at_once and (done % self._log_every == 0 or done == self.steps):
            results = self._exchange(done, super().read_results())
            self._gathered = tuple(torch.cat(column, -1) for column in zip(*results, strict=True))

    def before_checkpoint(self, done: int) -> None:  # noqa: D102
        super().before_checkpoint(done)
        self._exchange(done)

    def escalate(self, done: int) -> tuple[list[Event], str]:
        """Restore or retire heads; the next exchange decides whether too few are left."""

        def later(tally: Tally, _: Thresholds) -> str:
            self._tallies.append((done, tally))
            return ""

        return self.trainer.recovery.escalate(done - 1, self.trainer.thresholds, later)

    def read_results(self) -> tuple[Tensor, ...]:
        """Return the results of the heads of all ranks, from the last exchange."""
        return self._gathered

    def _collect(self, events: list[Event]) -> None:
        """Queue events; every rank sees the same batch, so rank 0 alone reports on it."""
        self._unsent += [event for event in events if event.part != "batch" or self.ranks.leads]

    def _exchange(self, done: int, results: Any = None) -> list[Any]:
        """Exchange events, tallies and `results`; return the results of all ranks."""
        n_heads = len(self.ranks.heads)
        n_active = n_heads - int(self.trainer.state.health.retired.sum())
        rest = Tally(n_heads, n_active, 0, 0, n_active)
        received = self.ranks.gather((self._unsent, dict(self._tallies), rest, results))
        events = sorted((event for events, *_ in received for event in events), key=_position)
        self._unsent, self._tallies = [], []
        self._write_events(events)
        if faults := [event for event in events if _position(event)[1] < 3]:
            self._last_event = next(event for event in faults if event.step == faults[-1].step)
        for look in sorted({look for _, tallies, *_ in received for look in tallies}):
            of_ranks: list[Tally] = [tallies.get(look, rest) for _, tallies, rest, _ in received]
            total = Tally(*map(sum, zip(*of_ranks, strict=True)))
            if message := total.hopeless(self.trainer.thresholds):
                self._give_up(done, message)
        return [results for *_, results in received]

    def _give_up(self, done: int, message: str) -> NoReturn:
        events = self.trainer.recovery.give_up(done - 1, message)
        received = self.ranks.gather(events[:-1])
        self._write_events([event for rank in received for event in rank] + events[-1:])
        self.stop(done, message)


# Order in which a single process logs the events of one step: batch, marginals, faults, the rest.
_ORDER = {"marginal": 1, "escalation": 3, "weight": 4}


def _position(event: Event) -> tuple[int, int]:
    return event.step, 0 if event.part == "batch" else _ORDER.get(event.stage, 2)
