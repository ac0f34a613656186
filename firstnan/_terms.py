"""Check loss terms that share weights, so that training goes on with the healthy ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from firstnan._norms import look
from firstnan.events import Event
from firstnan.faults import Kinds, Observation, Stage, Thresholds
from firstnan.health import Health, is_healthy

if TYPE_CHECKING:
    from firstnan._verdicts import Verdicts


class LossTerms:
    """Track the health of each named loss term, and decide which terms a step leaves out.

    A term computed on several batches of a step is bad if any of them is; the first bad batch is
    reported. The threshold `max_norm` does not apply to terms; it limits whole parts.
    """

    def __init__(self, thresholds: Thresholds, advice: Mapping[Kinds, str]) -> None:
        self._advice = advice  # what to change for each kind of fault
        self._thresholds = replace(thresholds, max_norm=None)
        self.health: dict[str, Health] = {}  # of each term, tensors `[1]`
        self.forget()

    def look(
        self,
        losses: Mapping[str, Tensor],
        through: Any,
        ranks: Verdicts,
        step: int,
        again: Callable[[], Mapping[str, Tensor]] | None,
    ) -> tuple[list[Tensor], list[Tensor], bool]:
        """Check the terms of one batch, with the same result on all `ranks`.

        Takes the arguments of `Guard.backward`. Returns the healthy losses, the bad ones, and
        whether a healthy loss needs a gradient on some rank.
        """
        loss, norm, needs, where = ranks.terms(step, losses, *look(losses, through))
        if again is not None and not bool(loss.isfinite().all()):
            sick, losses = ~loss.isfinite(), again()
            loss, norm, needs, where = ranks.terms(step, losses, *look(losses, through))
            lost = (sick & loss.isfinite()).tolist()
            self._partly |= {name for name, less in zip(losses, lost, strict=True) if less}
        healthy = list(map(self.judge, losses, loss, norm, where))
        rows = list(zip(losses.values(), needs, healthy, strict=True))
        kept = [x for x, _, well in rows if well]
        cut = [x for x, _, well in rows if not well]
        return kept, cut, any(need and well for _, need, well in rows)

    def judge(self, name: str, loss: Tensor, norm: Tensor, where: str = "") -> bool:
        """Return whether a term of one batch is healthy; `where` names the ranks with a fault."""
        health = self.health.setdefault(name, Health.fresh(1))
        stage = Observation(health, loss[None], norm[None], self._thresholds).stage()
        before = self._seen.get(name)
        if before is None or bool(is_healthy(before[0])):
            self._seen[name] = (stage, loss, norm, where)
        return bool(is_healthy(stage))

    def record(self, step: int) -> list[Event]:
        """Remember the terms of a step, and return the events that report their faults."""
        events = []
        for name, (stage, loss, norm, ranks) in self._seen.items():
            health, fault = self.health[name], Stage(int(stage))
            missed = int(health.streak)
            health.record_(stage, norm[None], self._thresholds)
            if name in self._partly and not int(health.streak):
                health.streak.fill_(missed + 1)  # a term without some of its rows is not healthy
            if fault.kind.reason:
                value = float(loss if fault.kind.value == "loss" else norm)
                action = "" if fault.kind.updates else "cut out"
                streak = int(health.streak)
                if action and streak % self._thresholds.restore_after == 0:
                    action += f", {streak} times in a row: {self._advice[fault]}"
                events.append(fault.event(step, name, value, action, ranks))
            elif missed and name not in self._partly:
                reason = f"healthy again after {missed} steps"
                events.append(Event(step, name, "loss", reason, "used again"))
        return events

    def cut_out_for_good(self, terms: Iterable[str], note: str) -> str:
        """Return a sentence that names the `terms` left out of too many steps in a row, or ""."""
        patience = self._thresholds.stop_after or 2 * self._thresholds.restore_after
        names = [name for name in self.health if name in terms]
        lost = [name for name in names if int(self.health[name].streak) >= patience]
        for name in lost:
            self.health[name].streak.zero_()  # so that a resumed run is not stopped at once
        why = f"{' and '.join(lost)} was cut out of each of the last {patience} steps{note}"
        left = " and ".join(name for name in names if name not in lost)
        why += f", which learned from {left} alone" if left else ""
        return why if lost else ""

    def forget(self) -> None:
        """Forget the terms of the previous step."""
        self._seen: dict[str, tuple[Tensor, Tensor, Tensor, str]] = {}
        self._partly: set[str] = set()  # terms that are finite without some rows

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the health of each term by name, for a checkpoint."""
        return {name: health.tensors() for name, health in self.health.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what `state_dict` returned."""
        self.health = {
            name: Health(**{key: tensor.clone() for key, tensor in tensors.items()})
            for name, tensors in state.items()
        }


def by_name(losses: Tensor | Mapping[str, Tensor], parts: Sequence[str]) -> dict[str, Tensor]:
    """Return a checked copy of the dictionary of losses passed to `Guard.backward`."""
    named = dict(losses) if isinstance(losses, Mapping) else {"": losses}
    if not named:
        raise ValueError("the dictionary of losses is empty; expected at least one loss")
    for name, loss in named.items():
        what = f"the loss {name!r}" if isinstance(losses, Mapping) else "the loss"
        if isinstance(losses, Mapping) and parts and name not in parts:
            raise ValueError(f"{what} belongs to no part; expected one of {', '.join(parts)}")
        if not isinstance(loss, Tensor):
            raise TypeError(f"{what} is {loss!r}; expected a tensor, or name -> tensor")
        if loss.ndim:
            raise ValueError(
                f"{what} has the shape {tuple(loss.shape)}; expected a single number (shape ()),"
                " such as loss.mean(), or a dictionary of name -> loss"
            )
    return named
