"""What a `Guard` asks of the other ranks in a step, and on which of them a fault was seen."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ssl_kd.guard.agreement import Agreed, Agreement, Probes, leaves, several_ranks
from ssl_kd.guard.modules import ModuleParts
from ssl_kd.guard.norms import is_sharded


class Verdicts:
    """One guard's verdicts, as all ranks take them.

    Args:
        agreement: of the ranks.
        parts: of the guard; from now on their states count as finite where they are so everywhere.

    Attributes:
        first: whether this rank is number 0 of them.
    """

    def __init__(self, agreement: Agreement, parts: ModuleParts) -> None:
        self._ranks, self._parts = agreement, parts
        self._weights = parts.weights()
        self.first = agreement.rank == 0
        self._checked = False
        self._healed: list[set[int]] = [set() for _ in parts.buffers]
        self._probes = Probes([part.weights[0] for part in parts])
        parts.everywhere = functools.partial(agreement.everywhere, "the parts' states")
        self.forget()

    @classmethod
    def between(
        cls, group: dist.ProcessGroup | Literal[False] | None, parts: ModuleParts, settings: object
    ) -> Verdicts | None:
        """As `Agreement.between`.

        Args:
            group: as there.
            parts: of the guard.
            settings: of the guard; they have to be the same on every rank.

        Raises:
            ValueError: the ranks' guards differ, in parts, parameters or settings.
            RankLost: another rank did not take part.
        """
        shapes = [[tuple(p.shape) for p in part.weights] for part in parts]
        made = f"parts {', '.join(parts.names)} of the shapes {shapes}; {settings}"
        buffers = sum(len(mine) for _, mine in parts.buffers)
        numbers = 5 * len(parts) + buffers
        agreement = Agreement.between(group, parts[0].weights[0], made, numbers)
        return None if agreement is None else cls(agreement, parts)

    def forget(self) -> None:
        """Begin another step."""
        self._bad = torch.zeros(self._ranks.world, len(self._parts), dtype=torch.bool)
        self._evidence: list[Tensor] = []
        self._probes.forget()

    @property
    def probes(self) -> list[Tensor]:
        """Each part's largest gradient here, before the average over ranks; for `step`."""
        return self._probes.largest

    # -- before the backward pass -----------------------------------------------------------------

    def check_graph(self, losses: Iterable[Tensor]) -> None:
        """Refuse, in the first step, losses of which one could never be left out.

        Raises:
            ValueError: they were computed under reentrant activation checkpointing.
        """
        if not self._checked and not any(is_sharded(p) for p in self._weights):
            leaves(losses)
        self._checked = True

    def cut(self, step: int, told: Sequence[int], loss: Tensor, norm: Tensor) -> set[int]:
        """The parts that some rank has to leave out, from the losses of some, `[told]` each.

        Raises:
            ValueError: the ranks are at different points.
            RankLost: another rank does not answer.
        """
        mine = torch.zeros(3, len(self._parts))
        mine[:, list(told)] = torch.stack([loss, norm, torch.ones_like(loss)])
        loss, norm, here = mine
        seen = self._ranks.agree(f"step {step}, the parts' losses", loss, norm, here, here)
        self._bad |= seen.bad_loss | seen.bad_norm
        return set(self._bad.any(0).nonzero().flatten().tolist())

    def terms(
        self, step: int, losses: Mapping[str, Tensor], loss: Tensor, norm: Tensor
    ) -> tuple[Agreed, list[Callable[[], str]]]:
        """What all ranks saw of some loss terms, and what tells where each is bad.

        Raises:
            ValueError: the ranks are at different points, or have other terms.
            RankLost: another rank does not answer.
        """
        needs = torch.tensor([term.requires_grad for term in losses.values()])
        what = f"step {step}, the loss terms {', '.join(losses)}"
        seen = self._ranks.agree(what, loss, norm, torch.ones(len(losses)), needs)
        columns = zip(seen.bad_loss.T, seen.bad_norm.T, seen.largest.T, strict=True)
        return seen, [functools.partial(self._ranks.words, *some) for some in columns]

    def backward(self, step: int, kept: Sequence[Tensor], left_out: Iterable[Tensor]) -> bool:
        """As `Agreement.backward`; FSDP2 needs no help with weights that no loss reaches."""
        if any(is_sharded(p) for p in self._weights):
            if kept:
                with self.waiting(step):
                    torch.autograd.backward(kept)
            return any(p.grad is not None for p in self._weights)
        what = f"step {step}, the backward pass without what is left out"
        return self._ranks.backward(what, kept, left_out, self._weights)

    def waiting(self, step: int) -> contextlib.AbstractContextManager[None]:
        """As `Agreement.waiting`, for a backward pass that averages gradients."""
        return self._ranks.waiting(f"step {step}, the backward pass")

    # -- the step ---------------------------------------------------------------------------------

    def step(
        self,
        step: int,
        seen: tuple[Tensor, Tensor, Tensor, Tensor],
        spoiled: Sequence[Sequence[int]],
    ) -> tuple[Tensor, Tensor, Tensor, list[list[int]], list[tuple[int, str]]]:
        """What all ranks saw of a step.

        Args:
            step: its number.
            seen: loss, gradient norm, whether it is absent, largest gradient here: `[part]` each.
            spoiled: the buffers of each part that are not finite here.

        Returns:
            Loss, gradient norm and absence as agreed; the buffers that are spoiled on some rank;
            a part's number and the names of buffers that were put back since the last step.

        Raises:
            ValueError: the ranks are at different points.
            RankLost: another rank does not answer.
        """
        loss, norm, absent, probe = seen
        sizes = [len(buffers) for _, buffers in self._parts.buffers]
        flags = [torch.zeros(size) for size in sizes]
        for flag, now, before in zip(flags, spoiled, self._healed, strict=True):
            flag[list(now)] += 1
            flag[list(before)] += 2
            before.clear()
        table = torch.cat([probe, *flags])
        there = self._ranks.agree(f"step {step}, the step", loss, norm, ~absent, ~absent, table)
        probes, *told = there.more.split([len(loss), *sizes], dim=1)
        bad_probe = ~torch.isfinite(probes)
        self._evidence = [there.bad_loss, self._bad, bad_probe, there.bad_norm, there.largest]
        self._spoiled = [flags % 2 == 1 for flags in told]
        now = [flags.any(0).nonzero().flatten().tolist() for flags in self._spoiled]
        healed = []
        for i, (flags, (_, buffers)) in enumerate(zip(told, self._parts.buffers, strict=True)):
            if some := (flags >= 2).any(0).nonzero().flatten().tolist():
                words = self._ranks.words((flags >= 2).any(1))
                healed.append((i, buffers.words(some) + words))
        return there.loss, there.norm, ~there.present, now, healed

    def where(self, part: int) -> str:
        """The ranks that saw the fault of a part in this step, the earliest in it first."""
        return self._ranks.words(*(table[:, part] for table in self._evidence))

    def where_buffers(self, part: int) -> str:
        """The ranks on which buffers of a part were spoiled in this step."""
        return self._ranks.words(self._spoiled[part].any(1))

    def put_back(self, part: int, spoiled: Iterable[int]) -> None:
        """Remember buffers that were put back outside a step: the others learn it in the next."""
        self._healed[part] |= set(spoiled)


def check_late() -> None:
    """Refuse a guard that knows of no ranks, where there are several now.

    Raises:
        ValueError: there are several ranks now.
    """
    if several_ranks():
        raise ValueError(
            "torch.distributed was initialised after this Guard was made, which decides alone: make"
            " the Guard after init_process_group, or with group=False"
        )
