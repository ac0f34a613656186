"""Loss terms of the same weights, each of which may fail alone and leaves the others training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ssl_kd.guard.events import Event
from ssl_kd.guard.faults import Stage, Thresholds
from ssl_kd.guard.health import Health, is_healthy
from ssl_kd.guard.norms import look

if TYPE_CHECKING:
    from ssl_kd.guard.verdicts import Verdicts


class LossTerms:
    """What is remembered of each loss term; they are known by name, from when they first appear.

    A term counts once in a step, however many batches the step is made of: as its first bad one.

    Args:
        thresholds: asked for at each decision.
        in_run: what to change is a setting of a run, not of a loop.

    Attributes:
        health: name -> of that term.
    """

    def __init__(self, thresholds: Callable[[], Thresholds], in_run: bool = False) -> None:
        self._thresholds, self._in_run = thresholds, in_run
        self.health: dict[str, Health] = {}
        self.forget()

    def look(
        self,
        losses: Mapping[str, Tensor],
        through: Any,
        ranks: Verdicts | None,
        step: int,
        again: Callable[[], Mapping[str, Tensor]] | None,
    ) -> tuple[list[Tensor], list[Tensor], list[bool]]:
        """Look at the terms of one batch, as all ranks see them.

        Args:
            losses: by name.
            through: as `Guard.backward`.
            ranks: this process and the others; None for one alone.
            step: its number.
            again: gives the losses anew, without the rows in which some are not finite.

        Returns:
            The losses that are healthy; the others; which of the healthy ones need a gradient on
            some rank.
        """
        loss, norm, needs, where = self._numbers(losses, through, ranks, step)
        if again is not None and not bool(loss.isfinite().all()):
            sick, losses = ~loss.isfinite(), again()
            loss, norm, needs, where = self._numbers(losses, through, ranks, step)
            lost = (sick & loss.isfinite()).tolist()
            self._partly |= {name for name, less in zip(losses, lost, strict=True) if less}
        healthy = [*map(self.judge, losses, loss, norm, where)]
        pairs = [*zip(losses.values(), needs, healthy, strict=True)]
        return (
            [x for x, _, well in pairs if well],
            [x for x, _, well in pairs if not well],
            [need for _, need, well in pairs if well],
        )

    @staticmethod
    def _numbers(
        losses: Mapping[str, Tensor], through: Any, ranks: Verdicts | None, step: int
    ) -> tuple[Tensor, Tensor, list[bool], Sequence[Callable[[], str]]]:
        loss, norm = look(dict(losses), through)
        if ranks is None:
            return loss, norm, [x.requires_grad for x in losses.values()], [str] * len(losses)
        seen, where = ranks.terms(step, losses, loss, norm)
        return seen.loss, seen.norm, seen.differentiable.tolist(), where

    def judge(self, name: str, loss: Tensor, norm: Tensor, where: Callable[[], str] = str) -> bool:
        """Whether a term of one batch is healthy.

        Args:
            name: of the term.
            loss: its value, on the CPU.
            norm: its gradient norm, on the CPU.
            where: tells the ranks on which it is not, to be added to the reason.
        """
        health = self.health.setdefault(name, Health.fresh(1))
        stage = health.judge(loss[None], norm[None], self._thresholds())
        healthy = bool(is_healthy(stage))
        before = self._seen.get(name)
        if before is None or bool(is_healthy(before[0])):
            words = where() if Stage(int(stage)).kind.reason else ""
            self._seen[name] = (stage, loss, norm, words)
        return healthy

    def record(self, step: int) -> list[Event]:
        """Remember the terms of a step, and put what was wrong with them into words."""
        events = []
        for name, (stage, loss, norm, where) in self._seen.items():
            health, found = self.health[name], Stage(int(stage))
            missed = int(health.streak)
            health.record_(stage, norm[None], self._thresholds())
            if name in self._partly and not int(health.streak):
                health.streak.fill_(missed + 1)  # what is asked for and lacks rows is not healthy
            if found.kind.reason:
                value = float(loss if found.kind.value == "loss" else norm)
                action = "" if found.kind.updates else self._cut_out(found, health)
                events.append(found.event(step, name, value, action, where))
            elif missed and name not in self._partly:
                reason = f"healthy again after {missed} steps"
                events.append(Event(step, name, "loss", reason, "used again"))
        return events

    def cut_out_for_good(self, terms: Iterable[str], note: str) -> str:
        """Return which terms were cut out for as long as a sick model may be, and empty for none.

        Those terms are counted anew.
        """
        thresholds = self._thresholds()
        patience = thresholds.stop_after or 2 * thresholds.restore_after
        asked = [name for name in self.health if name in terms]
        lost = [name for name in asked if int(self.health[name].streak) >= patience]
        for name in lost:
            self.health[name].streak.zero_()
        why = f"{' and '.join(lost)} was cut out of each of the last {patience} steps{note}"
        left = " and ".join(name for name in asked if name not in lost)
        why += f", which learned from {left} alone" if left else ""
        return why if lost else ""

    def forget(self) -> None:
        """Give up the step that was begun."""
        self._seen: dict[str, tuple[Tensor, Tensor, Tensor, str]] = {}  # in this step
        self._partly: set[str] = set()  # those that were finite once some rows were left out

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Name -> its health, for a checkpoint."""
        return {name: health.tensors() for name, health in self.health.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what `state_dict` gave."""
        self.health = {name: Health.copy_of(tensors) for name, tensors in state.items()}

    def _cut_out(self, found: Stage, health: Health) -> str:
        streak = int(health.streak)
        if streak % self._thresholds().restore_after:
            return "cut out"
        return f"cut out, {streak} times in a row: {found.kind.change(self._in_run)}"


def by_name(losses: Tensor | Mapping[str, Tensor], named: Sequence[str]) -> dict[str, Tensor]:
    """Name -> loss, from whatever was handed over.

    Args:
        losses: as `Guard.backward`, but no single number.
        named: the parts; empty where the losses are terms.

    Raises:
        TypeError: a loss is no tensor.
        ValueError: names or shapes do not fit.
    """
    if isinstance(losses, Tensor):
        if not named or losses.shape != (len(named),):
            vector = f"a vector of {len(named)}, one per part, " if named else ""
            raise ValueError(
                f"losses have the shape {tuple(losses.shape)}; expected one number without "
                f"dimensions, {vector}or a dictionary"
            )
        return dict(zip(named, losses.unbind(), strict=True))
    if not isinstance(losses, Mapping):
        raise TypeError(f"the loss is {losses!r}; expected a tensor, or a dictionary of them")
    if not losses:
        raise ValueError("the dictionary of losses is empty; expected one or more")
    for name, loss in losses.items():
        if named and name not in named:
            raise ValueError(f"no part is named {name!r}; there are {', '.join(named)}")
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss {name!r} is {loss!r}; expected a tensor")
        if loss.ndim:
            raise ValueError(f"loss {name!r} has the shape {tuple(loss.shape)}, not one number")
    return dict(losses)
