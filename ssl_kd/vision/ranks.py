"""Heads over several processes: each trains some, and they meet only to tell what they saw.

Heads share no weight, so ranks do not wait for each other between two looks; only INSTANCE_WEIGHT
`mean` takes one all-reduce a step. What the heads of one process would have decided together is
decided here from what all told: when to stop, whether enough heads are left, what is logged.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from signal import SIGTERM
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ssl_kd import losses
from ssl_kd.errors import InputError
from ssl_kd.guard.events import Event
from ssl_kd.guard.faults import Stage
from ssl_kd.guard.health import Health, Tally
from ssl_kd.training.ranks import Ranks
from ssl_kd.vision.step import HeadsState, HeadTrainer
from ssl_kd.vision.train import Heads

logger = logging.getLogger(__name__)

Place = tuple[int, int]
"""Where a rank is: steps done, and what it came for, in the order of the loop."""
_JUDGE, _LOOK, _CHECKPOINT, _GIVE_UP, _STOP = range(5)
Said = tuple[str, int, str]
"""A logger, a level and a message."""
_Key = tuple[int, int, int, int]
"""Where an event of one process would stand: look, turn in it, step, batch before heads."""


class HeadRanks:
    """The ranks of a training, of which each has some heads.

    Args:
        ranks: they.
        n_heads: of all of them.

    Attributes:
        caught: signals that tell this rank to stop.
        heads: numbers of its heads.
        said: what it warned of since it told last.
        done: steps that it has done.
        stopping: whether all are agreed to stop.

    Raises:
        InputError: there are more ranks than heads.
    """

    def __init__(self, ranks: Ranks, n_heads: int) -> None:
        if ranks.world > n_heads:
            raise InputError(
                f"{ranks.world} processes were started for {n_heads} head(s) (N_HEADS), and each "
                f"trains one at least: start at most {n_heads}, or raise --n_heads"
            )
        bounds = [n_heads * rank // ranks.world for rank in range(ranks.world + 1)]
        self.ranks, self._bounds, self._n_heads = ranks, bounds, n_heads
        self.heads = range(bounds[ranks.rank], bounds[ranks.rank + 1])
        self.caught: list[int] = []
        self.said: list[Said] = []
        self.done = 0
        self._target: Place | None = None
        self.stopping = False
        self._wanted: Tensor | None = None

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes."""
        return self.ranks.rank == 0

    # -- meetings ---------------------------------------------------------------------------------

    def meet(self, what: int, told: Any) -> list[Any]:
        """What each rank tells, on all of them; every rank comes to the same meetings in order."""
        heard = self._meet((self.done, what), told)
        assert heard is not None, "another rank went on without this one"
        return heard

    def _meet(self, here: Place, told: Any) -> list[Any] | None:
        """As `meet`; None where the others are at a later place already, to which this one goes.

        A rank that is told to stop comes early. All then go on to the latest place that any of them
        has reached, and stop there.
        """
        while True:
            heard: list[Any] = [None] * self.ranks.world
            dist.all_gather_object(heard, (here, self.caught[:1], told))
            latest = max(place for place, _, _ in heard)
            if all(place == latest for place, _, _ in heard):
                self._target = None
                if wanted := [number for _, caught, _ in heard for number in caught]:
                    self._stop(wanted[0])
                return [words for _, _, words in heard]
            self._target = latest
            if here < latest:
                return None

    def _stop(self, number: int) -> None:
        self.stopping = True
        if not self.caught:
            self.caught.append(number)

    def should_stop(self, step: int, look_every: int) -> bool:
        """Whether all stop before this step; the same on every rank."""
        if self._wanted is not None:
            if step % look_every == 0 and float(self._wanted) > 0:
                self._stop(SIGTERM)
            return self.stopping
        here = (step, _STOP)
        if not self.stopping and (self.caught or self._target) and here >= (self._target or here):
            self._meet(here, None)
        return self.stopping

    # -- messages ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def overheard(self) -> Iterator[None]:
        """Rank 0 repeats what is warned of inside, when this rank tells the next time."""
        log, listener = logging.getLogger("ssl_kd"), _Listener(self.said)
        before = log.level, log.propagate
        log.setLevel(logging.WARNING)
        log.addHandler(listener)
        log.propagate = False
        try:
            yield
        finally:
            log.removeHandler(listener)
            log.setLevel(before[0])
            log.propagate = before[1]

    def repeat(self, said: Iterable[Said]) -> None:
        """Say what other ranks said."""
        for name, level, message in said if self.leads else ():
            logging.getLogger(name).log(level, "%s", message)

    # -- rows of heads ----------------------------------------------------------------------------

    def of_all(self, mine: Tensor) -> Tensor:
        """From `[head]` of each rank's heads to that of all heads, in a meeting."""
        return torch.cat(self.meet(_JUDGE, mine))

    def own(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of a checkpoint's tensors what belongs to this rank's heads, and what to none."""
        rows = slice(self.heads.start, self.heads.stop)
        return {n: t if n.startswith("convergence.") else t[rows] for n, t in whole.items()}

    def gathered(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """From `[head, ...]` of each rank to those of all heads on rank 0; nothing elsewhere.

        On the CPU; sent straight into the tensors of all heads: no more memory than these.
        """
        found = {}
        for name, tensor in mine.items():
            tensor = tensor.detach().cpu().contiguous()
            if not self.leads:
                dist.send(tensor, 0)
                continue
            found[name] = whole = tensor.new_empty(self._n_heads, *tensor.shape[1:])
            whole[: len(tensor)] = tensor
            for rank in range(1, self.ranks.world):
                dist.recv(whole[self._bounds[rank] : self._bounds[rank + 1]], rank)
        return found

    def whole(self, trainer: HeadTrainer) -> HeadTrainer:
        """All heads as rank 0 judges them and forms the answer; each rank's own elsewhere.

        Only what an answer is formed from: students and moments stay where they are, since one
        device may not hold them all.
        """
        state = trainer.state
        health = {f"health.{name}": tensor for name, tensor in state.health.tensors().items()}
        found = self.gathered({"teacher": state.teacher, "loss": state.loss} | health)
        if not found:
            return trainer
        device = state.teacher.device
        found = {name: tensor.to(device) for name, tensor in found.items()}
        health = {f.name: found.pop(f"health.{f.name}") for f in fields(Health)}
        absent = dict.fromkeys((f.name for f in fields(HeadsState)), found["teacher"][:, :0])
        trainer = copy.copy(trainer)
        trainer.state = HeadsState(**{**absent, **found, "health": Health(**health)})
        return trainer

    # -- INSTANCE_WEIGHT mean ---------------------------------------------------------------------

    def weigh_together(self, trainer: HeadTrainer) -> None:
        """Let all heads weigh the samples by the agreement of all teachers, one all-reduce a step.

        The wish to stop rides along: in step with each other, ranks need not meet for it.
        """
        self._wanted = torch.zeros((), device=trainer.precision.device)
        trainer.weigh = self._weigh

    def _weigh(self, agreements: Tensor) -> Tensor | None:
        healthy = torch.isfinite(agreements).all(-1, keepdim=True)
        told = agreements.new_empty(agreements.shape[1] + 2)
        told[:-2] = torch.where(healthy, agreements, 0).sum(0)
        told[-2] = healthy.sum()
        told[-1] = bool(self.caught)
        dist.all_reduce(told)
        self._wanted = told[-1]
        mean = told[:-2] / told[-2].clamp(min=1)
        return losses.instance_weights(mean.unsqueeze(0), "mean")


class _Listener(logging.Handler):
    def __init__(self, said: list[Said]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append((record.name, record.levelno, record.getMessage()))


class RankHeads(Heads):
    """A rank's heads as the loop's learner; it tells the others and logs for all.

    Args:
        together: the ranks; `caught` tells them to stop.
        log_every: steps between two records, at which the ranks exchange what they found.
        *args: as `Heads`.

    Raises:
        TooFewHealthyParts: from a step that is logged; too few heads of all ranks are healthy.
        RankLost: another rank does not answer.
    """

    def __init__(self, together: HeadRanks, log_every: int, *args: Any) -> None:
        super().__init__(*args)
        self.together, self._log_every = together, log_every
        if self.trainer.settings.instance_weight == "mean" and self.clusters is None:
            together.weigh_together(self.trainer)
        if self.trainer.bank.draws and together.leads:
            logger.warning(
                "heads with dropout draw by the first head of their process: the result is another "
                "one than that of another number of processes, and no worse"
            )
        self._write, self.on_events = self.on_events, self._keep
        self._untold: list[tuple[_Key, Event]] = []
        self._tallies: list[tuple[int, Tally]] = []
        self._turn: tuple[int, int] = (0, 0)
        self._seen: tuple[Tensor, ...] = ()

    def should_stop(self) -> bool:
        """Whether all ranks stop before the next step; the same on each."""
        return self.together.should_stop(self.together.done, self._look_every)

    def learn(self, step: int) -> None:
        """As `Heads`."""
        self.together.done = step + 1
        super().learn(step)

    def look(self, done: int, *, at_once: bool = False) -> None:
        """As `Heads`, and now and then tell the others.

        Raises:
            TooFewHealthyParts: on all ranks; too few heads of all are healthy.
        """
        self.together.done, self._turn = done, (done, 0)
        super().look(done, at_once=at_once)
        if not at_once and (done % self._log_every == 0 or done == self.steps):
            told = self._tell(done, _LOOK, super().seen())
            self._seen = tuple(torch.cat(columns, dim=-1) for columns in zip(*told, strict=True))

    def before_checkpoint(self, done: int) -> None:
        """As `Heads`, and tell the others.

        Raises:
            TooFewHealthyParts: as `look`.
        """
        self._turn = (done, 2)
        super().before_checkpoint(done)
        self._tell(done, _CHECKPOINT)

    def escalate(self, done: int) -> tuple[list[Event], str]:
        """As `Heads`; whether too few heads are left is decided when all tell."""
        keep = lambda tally: self._tallies.append((done, tally))  # noqa: E731
        return self.trainer.recovery.escalate(done - 1, self.trainer.thresholds, keep)

    def seen(self) -> tuple[Tensor, ...]:
        """As `Heads`, of all heads; they told it at the look before."""
        return self._seen

    def _keep(self, events: list[Event]) -> None:
        """Events in the order in which one process would have seen them."""
        look, turn = self._turn
        self._turn = look, turn + 1
        for event in events:
            of_batch = event.part == "batch"
            if of_batch and not self.together.leads:  # all see the same batch
                continue
            order = 0 if of_batch else 1 if Stage.of(event) is Stage.MARGINAL else 2
            self._untold.append(((look, turn, event.step, order), event))

    def _tell(self, done: int, what: int, more: Any = None) -> list[Any]:
        """Tell the others what the guard saw and did here, and `more`; what each told of that."""
        active = len(self.together.heads) - int(self.trainer.state.health.retired.sum())
        rest = Tally(len(self.together.heads), active, 0, 0, active)
        said = self.together.said.copy()
        self.together.said.clear()
        told = self.together.meet(what, (self._untold, self._tallies, rest, said, more))
        events = sorted((pair for one, *_ in told for pair in one), key=lambda pair: pair[0])
        self._untold, self._tallies = [], []
        self.together.repeat(line for *_, said, _ in told for line in said)
        self._write([event for _, event in events])
        if seen := [event for (_, turn, _, _), event in events if turn == 0]:
            self._last = next(event for event in seen if event.step == seen[-1].step)
        if why := self._hopeless([(dict(tallies), rest) for _, tallies, rest, *_ in told]):
            self._give_up(done, why)
        return [more for *_, more in told]

    def _hopeless(self, told: Sequence[tuple[dict[int, Tally], Tally]]) -> str:
        """Why training cannot continue, from the tallies of each look that any rank made some."""
        for look in sorted({look for tallies, _ in told for look in tallies}):
            first, *others = (tallies.get(look, rest) for tallies, rest in told)
            if why := sum(others, first).hopeless(self.trainer.thresholds):
                return why
        return ""

    def _give_up(self, done: int, why: str) -> NoReturn:
        events = self.trainer.recovery.give_up(done - 1, why)
        told = self.together.meet(_GIVE_UP, events[:-1])
        self._write([event for one in told for event in one] + events[-1:])
        self.stop(done, why)
