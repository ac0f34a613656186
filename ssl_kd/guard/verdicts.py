"""A `Guard`'s verdicts as all ranks take them, and the ranks on which a fault was seen."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ssl_kd.guard.agreement import Agreement, several_ranks
from ssl_kd.guard.modules import ModuleParts
from ssl_kd.guard.norms import is_sharded, narrow


class Agreed(NamedTuple):
    """What all ranks saw of some losses; equal on all of them, on the CPU.

    Attributes:
        loss: `[loss]` float32, the mean over the ranks that have it; where it is not finite on
            some rank, its value on the first of these.
        norm: `[loss]` float32, the largest gradient norm; NaN where one is.
        present: boolean `[loss]`, whether some rank has it.
        differentiable: boolean `[loss]`, whether it needs a gradient on some rank.
        bad_loss: boolean `[rank, loss]`, where the loss is not finite.
        bad_norm: boolean `[rank, loss]`, where the gradient norm is not finite.
        largest: boolean `[rank, loss]`, where the norm is the largest, and not so everywhere.
        more: `[rank, n]`, further numbers as they were exchanged.
    """

    loss: Tensor
    norm: Tensor
    present: Tensor
    differentiable: Tensor
    bad_loss: Tensor
    bad_norm: Tensor
    largest: Tensor
    more: Tensor


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
        parts.everywhere = self._everywhere
        self.forget()

    @classmethod
    def between(
        cls, group: dist.ProcessGroup | Literal[False] | None, parts: ModuleParts, settings: object
    ) -> Verdicts | None:
        """Return the verdicts of several ranks; None for a process that decides alone.

        Args:
            group: None for all ranks, if there are several; False to decide alone.
            parts: of the guard.
            settings: of the guard; they have to be the same on every rank.

        Raises:
            ValueError: the ranks' guards differ, in parts, parameters or settings.
            RankLost: another rank did not take part.
        """
        shapes = [[tuple(p.shape) for p in part.weights] for part in parts]
        made = f"parts {', '.join(parts.names)} of the shapes {shapes}; {settings}"
        buffers = sum(len(mine) for _, mine in parts.buffers)
        device = parts[0].weights[0].device
        agreement = Agreement.between(group, device, made, 5 * len(parts) + buffers)
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

    def _exchange_flags(self, what: str, flags: Sequence[bool]) -> Tensor:
        """Gather flags of each rank, boolean `[rank, flag]`."""
        return self._ranks.exchange(what, torch.tensor(flags).float()) > 0

    def _everywhere(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags are true on every rank; without a flag no rank has one."""
        return self._exchange_flags("the parts' states", flags).all(0).tolist() if flags else []

    def _agree(
        self,
        what: str,
        loss: Tensor,
        norm: Tensor,
        present: Tensor,
        differentiable: Tensor,
        more: Tensor,
    ) -> Agreed:
        """Agree on some losses, `[loss]` each on the CPU; those that are absent here are healthy.

        Args:
            what: the same on every rank.
            loss: their values.
            norm: their gradient norms.
            present: whether this rank has them.
            differentiable: whether they need a gradient here.
            more: `[n]` further numbers.
        """
        n = len(loss)
        columns = [loss, torch.where(present, norm, 0), present, differentiable, more]
        table = self._ranks.exchange(what, torch.cat([column.float() for column in columns]))
        loss, norm, here, needs, more = table.split([n] * 4 + [len(more)], dim=1)
        here = here > 0
        bad = here & ~torch.isfinite(loss)
        shares = torch.where(here, loss.double(), 0) / here.sum(0).clamp(min=1)
        limit = torch.finfo(torch.float32).max
        mean = shares.sum(0).clamp(-limit, limit).float()
        first = loss.gather(0, bad.int().argmax(0, keepdim=True))[0]
        top = norm.amax(0)
        return Agreed(
            torch.where(bad.any(0), first, mean),
            top,
            here.any(0),
            (needs > 0).any(0),
            bad,
            ~torch.isfinite(norm),
            (norm == top) & (norm != top).any(0),
            more,
        )

    # -- before the backward pass -----------------------------------------------------------------

    def check_graph(self, losses: Iterable[Tensor]) -> None:
        """Refuse, in the first step, losses of which one could never be left out.

        Raises:
            ValueError: they were computed under reentrant activation checkpointing.
        """
        if not self._checked and not any(is_sharded(p) for p in self._weights):
            leaves(losses)
        self._checked = True

    def cut(self, step: int, parts: Sequence[int], loss: Tensor, norm: Tensor) -> set[int]:
        """Return the parts that some rank has to leave out, from the losses of some, `[part]` each.

        Raises:
            ValueError: the ranks are at different points.
            RankLost: another rank does not answer.
        """
        sick = torch.zeros(len(self._parts), dtype=torch.bool)
        sick[list(parts)] = ~(torch.isfinite(loss) & torch.isfinite(norm))
        self._bad |= self._exchange_flags(f"step {step}, the parts' losses", sick.tolist())
        return set(self._bad.any(0).nonzero().flatten().tolist())

    def terms(
        self, step: int, losses: Mapping[str, Tensor], loss: Tensor, norm: Tensor
    ) -> tuple[Agreed, list[Callable[[], str]]]:
        """Return what all ranks saw of some loss terms, and functions that name where each is bad.

        Raises:
            ValueError: the ranks are at different points, or have other terms.
            RankLost: another rank does not answer.
        """
        needs = torch.tensor([term.requires_grad for term in losses.values()])
        what = f"step {step}, the loss terms {', '.join(losses)}"
        here = torch.ones(len(losses), dtype=torch.bool)
        seen = self._agree(what, loss, norm, here, needs, torch.zeros(0))
        columns = zip(seen.bad_loss.T, seen.bad_norm.T, seen.largest.T, strict=True)
        return seen, [functools.partial(self._ranks.name_ranks, *some) for some in columns]

    def backward(self, step: int, kept: Sequence[Tensor], left_out: Iterable[Tensor]) -> bool:
        """Run the backward pass of some losses, as `DistributedDataParallel` can follow it.

        It waits for every parameter that the forward pass used. Those that only the losses reach
        which are left out get a gradient of exact zeros here (a NaN loss times 0 would be NaN), so
        that the ranks' averages are done; afterwards they have none, as without these losses.
        FSDP2 needs no help with weights that no loss reaches.

        Args:
            step: its number.
            kept: losses to go on with; some rank may have none.
            left_out: the others.

        Returns:
            Whether it left gradients.

        Raises:
            ValueError: the ranks are at different points.
            RankLost: another rank does not answer, or the averages are not done.
        """
        if any(is_sharded(p) for p in self._weights):
            if kept:
                with self.waiting(step):
                    torch.autograd.backward(kept)
            return any(p.grad is not None for p in self._weights)
        what = f"step {step}, the backward pass without what is left out"
        reached = leaves(kept)
        others = {key: leaf for key, leaf in leaves(left_out).items() if key not in reached}
        bare = {key: leaf for key, leaf in others.items() if leaf.grad is None}
        mine = [id(p) in reached or p.grad is not None for p in self._weights]
        real = self._exchange_flags(what, mine).any(0)
        zeros = [torch.zeros_like(leaf) for leaf in others.values()]
        if roots := [*kept, *others.values()]:
            with self._ranks.waiting(what):
                torch.autograd.backward(roots, [*[None] * len(kept), *zeros])
        for p, somewhere in zip(self._weights, real.tolist(), strict=True):
            bare.pop(id(p), None)
            if not somewhere:
                p.grad = None
        for leaf in bare.values():  # of another model, as a discriminator
            leaf.grad = None
        return any(p.grad is not None for p in self._weights)

    def waiting(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Raise RankLost where the process group fails inside, in a backward pass."""
        return self._ranks.waiting(f"step {step}, the backward pass")

    # -- the step ---------------------------------------------------------------------------------

    def step(
        self,
        step: int,
        seen: tuple[Tensor, Tensor, Tensor, Tensor],
        spoiled: Sequence[Sequence[int]],
    ) -> tuple[Tensor, Tensor, Tensor, list[list[int]], list[tuple[int, str]]]:
        """Agree on what the ranks saw of a step.

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
        more = torch.cat([probe, *flags])
        agreed = self._agree(f"step {step}, the step", loss, norm, ~absent, ~absent, more)
        probes, *tables = agreed.more.split([len(loss), *sizes], dim=1)
        bad_probe = ~torch.isfinite(probes)
        self._evidence = [agreed.bad_loss, self._bad, bad_probe, agreed.bad_norm, agreed.largest]
        self._spoiled = [table % 2 == 1 for table in tables]
        now = [table.any(0).nonzero().flatten().tolist() for table in self._spoiled]
        healed = []
        for i, (table, (_, buffers)) in enumerate(zip(tables, self._parts.buffers, strict=True)):
            if some := (table >= 2).any(0).nonzero().flatten().tolist():
                where = self._ranks.name_ranks((table >= 2).any(1))
                healed.append((i, buffers.words(some) + where))
        return agreed.loss, agreed.norm, ~agreed.present, now, healed

    def share(self, step: int, words: str) -> list[str]:
        """Gather what each rank found in a step, in the order of the ranks."""
        return self._ranks.share(f"step {step}: what was located", words)

    def where(self, part: int) -> str:
        """Name the ranks that saw the fault of a part in this step, the earliest in it first."""
        return self._ranks.name_ranks(*(table[:, part] for table in self._evidence))

    def where_buffers(self, part: int) -> str:
        """Name the ranks on which buffers of a part were spoiled in this step."""
        return self._ranks.name_ranks(self._spoiled[part].any(1))

    def put_back(self, part: int, spoiled: Iterable[int]) -> None:
        """Remember buffers that were put back outside a step: the others learn it in the next."""
        self._healed[part] |= set(spoiled)


def check_late() -> None:
    """Refuse a guard that was made before the ranks were joined.

    Raises:
        ValueError: there are several ranks now.
    """
    if several_ranks():
        raise ValueError(
            "torch.distributed was initialised after this Guard was made, which decides alone: make"
            " the Guard after init_process_group, or with group=False"
        )


class Probes:
    """The largest gradient of each part's first weight on this rank, before ranks are averaged.

    A NaN in a backward pass goes on to the first layer; after the average every rank has it.

    Args:
        first: the first weight of each part.
    """

    def __init__(self, first: Sequence[nn.Parameter]) -> None:
        self._first = list(first)
        self.forget()
        # The hooks do not keep the probes alive.
        probes: weakref.ref[Probes] = weakref.ref(self)
        for i, p in enumerate(self._first):
            handle = p.register_hook(functools.partial(_see, probes, i))
            weakref.finalize(self, handle.remove)

    def forget(self) -> None:
        """Begin another step."""
        self.largest = [torch.zeros((), device=p.device) for p in self._first]
        """Part -> a float32 number on its device, NaN where there was one."""


def _see(reference: weakref.ref[Probes], part: int, gradient: Tensor | None) -> None:
    """Look at a gradient that is about to be accumulated; waits for no device."""
    # None: DDP looks for unused parameters, and no loss reaches this one.
    if gradient is None or (probes := reference()) is None:
        return
    gradient = gradient.detach()
    values = gradient._values() if gradient.is_sparse else gradient
    if values.numel():
        norm = torch.linalg.vector_norm(values, math.inf)
        probes.largest[part] = torch.maximum(probes.largest[part], narrow(norm))


def leaves(losses: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return, by their `id`, the tensors that a backward pass of `losses` gives gradients to.

    Raises:
        ValueError: reentrant activation checkpointing, which shows none of what it computes, and
            whose weights would be left without a gradient, or their averages without an end.
    """
    reached: dict[int, Tensor] = {}
    ahead: list = [
        torch.autograd.graph.get_gradient_edge(x).node for x in losses if x.requires_grad
    ]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        name = type(node).__name__
        if name == "CheckpointFunctionBackward":
            raise ValueError(
                "with several ranks a Guard has to see which weights each loss reaches, and"
                " reentrant activation checkpointing hides them: pass use_reentrant=False to"
                ' checkpoint, or gradient_checkpointing_kwargs={"use_reentrant": False} to'
                " transformers"
            )
        if name == "AccumulateGrad":
            reached[id(node.variable)] = node.variable
        nodes = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= nodes
        ahead += nodes
    return reached
