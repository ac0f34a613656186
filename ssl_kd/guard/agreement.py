"""Ranks that train one model: each tells the others what it saw, and all take the same decision.

A rank that skips a step alone leaves the others waiting in an all-reduce; one that alone learns
from a bad term spoils the weights of all. So what a step shows of its losses is exchanged before
anything is decided, by every rank at the same points, whatever it found.
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ssl_kd.guard.norms import narrow
from ssl_kd.ranks import LOST, RankLost

_COLUMNS, _TERMS = 4, 16  # numbers of each part, and terms that fit into one message at least
_NAMED = 8  # ranks that an event names; more are counted
_WAY_OUT = (
    "A rank died, hangs, or was slower than the process group's timeout: the first error is in its"
    " own log. Start all ranks again from the last checkpoint; for steps that may be that slow pass"
    " timeout= to init_process_group"
)


@dataclass(frozen=True)
class Agreed:
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
        more: `[rank, n]`, further numbers as they were told.
    """

    loss: Tensor
    norm: Tensor
    present: Tensor
    differentiable: Tensor
    bad_loss: Tensor
    bad_norm: Tensor
    largest: Tensor
    more: Tensor

    @classmethod
    def of(cls, table: Tensor, losses: int) -> Agreed:
        """From what each rank told, `[rank, 4 * loss + n]`."""
        loss, norm, present, differentiable, more = table.split(
            [losses] * _COLUMNS + [table.shape[1] - _COLUMNS * losses], dim=1
        )
        here = present > 0
        bad = here & ~torch.isfinite(loss)
        shares = torch.where(here, loss.double(), 0) / here.sum(0).clamp(min=1)
        limit = torch.finfo(torch.float32).max
        mean = shares.sum(0).clamp(-limit, limit).float()
        first = loss.gather(0, bad.int().argmax(0, keepdim=True))[0]
        top = norm.amax(0)
        return cls(
            torch.where(bad.any(0), first, mean),
            top,
            here.any(0),
            (differentiable > 0).any(0),
            bad,
            ~torch.isfinite(norm),
            (norm == top) & (norm != top).any(0),
            more,
        )


class Agreement:
    """The ranks of a process group, which exchange a few numbers in one small all-reduce.

    Every rank has to come to the same exchanges in the same order. Each carries a checksum of what
    it is for, so that ranks at different points of their loops are told so, all of them.

    Args:
        group: of the ranks; None for all.
        beside: a weight; where the backend cannot send from the CPU it is sent from its device.
        made: describes the guard; ranks with different ones are refused.
        numbers: how many a message should have room for.

    Attributes:
        rank: of this process in the group.
        world: how many there are.

    Raises:
        ValueError: the ranks' guards differ, or this process is not in the group.
        RankLost: another rank does not make its guard.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, beside: Tensor, made: str, numbers: int
    ) -> None:
        self._group, self.rank = group, dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not in the given group: pass one that holds it")
        self.world = dist.get_world_size(group)
        gloo = dist.get_backend(group) == "gloo"
        self._device = torch.device("cpu") if gloo else beside.device
        self._width = 0
        self.exchange(f"a new Guard ({made})", torch.zeros(0))
        self._width = max(numbers, _COLUMNS * _TERMS)

    @classmethod
    def between(
        cls,
        group: dist.ProcessGroup | Literal[False] | None,
        beside: Tensor,
        made: str,
        numbers: int,
    ) -> Agreement | None:
        """The agreement of several ranks; None for a process that decides alone.

        Args:
            group: None for all ranks, if there are several; False to decide alone.
            beside: as `Agreement`.
            made: as `Agreement`.
            numbers: as `Agreement`.

        Raises:
            ValueError: a group was given, but `torch.distributed` is not initialised; else as
                `Agreement`.
            RankLost: as `Agreement`.
        """
        if group and not (dist.is_available() and dist.is_initialized()):
            raise ValueError("group= was given, but torch.distributed is not initialised")
        if group is False or not several_ranks(group):
            return None
        return cls(group, beside, made, numbers)

    def exchange(self, what: str, numbers: Tensor) -> Tensor:
        """What all ranks tell: from `[n]` of each to `[rank, n]` float32 on the CPU of all.

        Args:
            what: these numbers are, and of which step; the same on every rank.
            numbers: of this rank, as many as the others'.

        Raises:
            ValueError: other ranks are at another point, with what each is at.
            RankLost: some rank does not answer.
        """
        pieces = numbers.split(self._width) if self._width else (numbers,)
        words = [f"{what} [{i + 1} of {len(pieces)}]" for i in range(len(pieces))]
        tables = [self._exchange(*pair) for pair in zip(words, pieces, strict=True)]
        return torch.cat(tables, dim=1)

    def _exchange(self, what: str, numbers: Tensor) -> Tensor:
        # A sum in which every other rank adds zeros: exact, and known to every backend.
        table = torch.zeros(self.world, 1 + self._width)
        table[self.rank, 0] = zlib.crc32(what.encode()) & 0xFFFFFF  # exact in float32
        table[self.rank, 1 : 1 + len(numbers)] = numbers
        with self.waiting(what, always=True):
            table = table.to(self._device)
            dist.all_reduce(table, group=self._group)
            table = table.cpu()
        if bool((table[:, 0] != table[0, 0]).any()):
            raise ValueError(self._difference(what))
        return table[:, 1 : 1 + len(numbers)]

    def _difference(self, what: str) -> str:
        told: list[str] = [""] * self.world
        with self.waiting("what each rank is at", always=True):
            dist.all_gather_object(told, what, group=self._group)
        at = "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(told))
        return (
            f"the ranks are not at the same point. {at}. Make the same Guard on every rank, call"
            " its backward and step equally often there, and with losses of the same names: a term"
            " that finds nothing in a rank's batch is a constant 0"
        )

    @contextlib.contextmanager
    def waiting(self, what: str, *, always: bool = False) -> Iterator[None]:
        """Say what was waited for where the process group fails inside.

        Args:
            what: is waited for.
            always: any failure is one of the process group.

        Raises:
            RankLost: in place of the process group's error.
        """
        begun = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if not (always or isinstance(error, dist.DistError) or LOST.search(str(error))):
                raise
            line = str(error).strip().splitlines()[0]
            raise RankLost(
                f"rank {self.rank} of {self.world} waited {time.monotonic() - begun:.1f} s for the"
                f" other ranks at {what}: {line}. {_WAY_OUT}"
            ) from error

    # -- what is exchanged ------------------------------------------------------------------------

    def agree(
        self,
        what: str,
        loss: Tensor,
        norm: Tensor,
        present: Sequence[bool] | Tensor,
        differentiable: Sequence[bool] | Tensor,
        more: Tensor | None = None,
    ) -> Agreed:
        """What all ranks saw, from what this one saw: `[loss]` each, on the CPU.

        Args:
            what: as `exchange`.
            loss: their values.
            norm: their gradient norms.
            present: whether this rank has them; the others count as healthy.
            differentiable: whether they need a gradient here.
            more: `[n]` further numbers.

        Raises:
            ValueError: as `exchange`.
            RankLost: as `exchange`.
        """
        flags = [torch.as_tensor(flag).float() for flag in (present, differentiable)]
        norm = torch.where(flags[0] > 0, norm, 0)
        more = torch.zeros(0) if more is None else more
        table = self.exchange(what, torch.cat([loss, norm, *flags, more]))
        return Agreed.of(table, len(loss))

    def everywhere(self, what: str, flags: Sequence[bool]) -> list[bool]:
        """Which flags are true on every rank.

        Raises:
            ValueError: as `exchange`.
            RankLost: as `exchange`.
        """
        if not flags:  # none here is none anywhere
            return []
        return (self.exchange(what, torch.tensor(flags).float()) > 0).all(0).tolist()

    def words(self, *evidence: Tensor) -> str:
        """Where something was seen: ` on rank 3 of 4`, counted from 0 as in the group.

        Args:
            *evidence: boolean `[rank]` each; the first that is anywhere true is told.
        """
        for where in evidence:
            ranks = where.nonzero().flatten().tolist()
            if len(ranks) == self.world:
                return f" on all {self.world} ranks"
            if len(ranks) > _NAMED:
                return f" on {len(ranks)} of {self.world} ranks, the first is rank {ranks[0]}"
            if ranks:
                some = ", ".join(map(str, ranks))
                return f" on rank{'s' * (len(ranks) > 1)} {some} of {self.world}"
        return ""

    def backward(
        self,
        what: str,
        kept: Sequence[Tensor],
        left_out: Iterable[Tensor],
        weights: Sequence[nn.Parameter],
    ) -> bool:
        """The backward pass of some losses, as `DistributedDataParallel` can follow it.

        It waits for every parameter that the forward pass used. Those that only the losses reach
        which are left out get a gradient of exact zeros here (a NaN loss times 0 would be NaN), so
        that the ranks' averages are done; afterwards they have none, as without these losses.

        Args:
            what: as `exchange`.
            kept: losses to go on with; some rank may have none.
            left_out: the others.
            weights: the same on every rank.

        Returns:
            Whether it left gradients.

        Raises:
            ValueError: as `exchange`.
            RankLost: as `exchange`, and where the averages are not done.
        """
        reached = leaves(kept)
        others = {key: leaf for key, leaf in leaves(left_out).items() if key not in reached}
        bare = {key: leaf for key, leaf in others.items() if leaf.grad is None}
        mine = [id(p) in reached or p.grad is not None for p in weights]
        real = (self.exchange(what, torch.tensor(mine).float()) > 0).any(0)
        zeros = [torch.zeros_like(leaf) for leaf in others.values()]
        if roots := [*kept, *others.values()]:
            with self.waiting(what):
                torch.autograd.backward(roots, [*[None] * len(kept), *zeros])
        for p, somewhere in zip(weights, real.tolist(), strict=True):
            bare.pop(id(p), None)
            if not somewhere:
                p.grad = None
        for leaf in bare.values():  # of another model, as a discriminator
            leaf.grad = None
        return any(p.grad is not None for p in weights)


def several_ranks(group: dist.ProcessGroup | None = None) -> bool:
    """Whether `torch.distributed` is initialised, with more than one rank."""
    there = dist.is_available() and dist.is_initialized()
    return there and dist.get_world_size(group) != 1


class Probes:
    """The largest gradient of each part's first weight on this rank, before ranks are averaged.

    A NaN in a backward pass goes on to the first layer; after the average every rank has it.

    Args:
        first: the first weight of each part.
    """

    def __init__(self, first: Sequence[nn.Parameter]) -> None:
        self._first = list(first)
        self.forget()
        for i, p in enumerate(self._first):
            handle = p.register_hook(_Probe(self, i))
            weakref.finalize(self, handle.remove)

    def forget(self) -> None:
        """Begin another step."""
        self.largest = [torch.zeros((), device=p.device) for p in self._first]
        """Part -> a float32 number on its device, NaN where there was one."""

    def see(self, part: int, gradient: Tensor) -> None:
        """Look at a gradient that is about to be accumulated; waits for no device."""
        values = gradient._values() if gradient.is_sparse else gradient
        if values.numel():
            norm = torch.linalg.vector_norm(values, math.inf)
            self.largest[part] = torch.maximum(self.largest[part], narrow(norm))


class _Probe:
    """A hook that does not keep the probes alive."""

    def __init__(self, probes: Probes, part: int) -> None:
        self._probes, self._part = weakref.ref(probes), part

    def __call__(self, gradient: Tensor | None) -> None:
        # None: DDP looks for unused parameters, and no loss reaches this one.
        if gradient is not None and (probes := self._probes()) is not None:
            probes.see(self._part, gradient.detach())


def leaves(losses: Iterable[Tensor]) -> dict[int, Tensor]:
    """By their `id`, the tensors that a backward pass of `losses` gives gradients to.

    Raises:
        ValueError: reentrant activation checkpointing, which shows none of what it computes, and
            whose weights would be left without a gradient, or their averages without an end.
    """
    found: dict[int, Tensor] = {}
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
            found[id(node.variable)] = node.variable
        nodes = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= nodes
        ahead += nodes
    return found
