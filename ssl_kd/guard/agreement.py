"""Ranks that train one model exchange a few numbers, so that all take the same decision.

A rank that skips a step alone leaves the others waiting in an all-reduce; one that alone learns
from a bad term spoils the weights of all. So the numbers by which a step is judged are exchanged
before anything is decided, by every rank at the same points, whatever it found.
"""

from __future__ import annotations

import contextlib
import re
import time
import zlib
from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ssl_kd.errors import UserError

LOST = re.compile("gloo|NCCL|[Cc]onnection|[Ss]ocket|timed? ?out", re.IGNORECASE)
"""What the message of a process group's error contains where a rank is gone."""
_WIDTH = 64  # numbers that fit into one message at least
_NAMED = 8  # ranks that an event names; more are counted
_WAY_OUT = (
    "A rank died, hangs, or was slower than the process group's timeout: the first error is in its"
    " own log. Start all ranks again from the last checkpoint; for steps that may be that slow pass"
    " timeout= to init_process_group"
)


class RankLost(UserError, RuntimeError):
    """Other ranks did not answer; the message says what was waited for, and how long."""


class Agreement:
    """The ranks of a process group, which exchange a few numbers in one small all-reduce.

    Every rank has to come to the same exchanges in the same order. Each carries a checksum of what
    it is for, so that ranks at different points of their loops are found, and named on all of them.

    Args:
        group: of the ranks; None for all.
        device: of the weights; where the backend cannot send from the CPU it sends from there.
        made: describes the guard; ranks with different ones are refused.
        numbers: how many a message should have room for.

    Attributes:
        rank: of this process in the group.
        world: how many ranks there are.

    Raises:
        ValueError: the ranks' guards differ, or this process is not in the group.
        RankLost: another rank does not make its guard.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, made: str, numbers: int
    ) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not in the given group: pass one that holds it")
        self.world = dist.get_world_size(group)
        gloo = dist.get_backend(group) == "gloo"
        self._device = torch.device("cpu") if gloo else device
        self._width = 0
        self.exchange(f"a new Guard ({made})", torch.zeros(0))
        self._width = max(numbers, _WIDTH)

    @classmethod
    def between(
        cls,
        group: dist.ProcessGroup | Literal[False] | None,
        device: torch.device,
        made: str,
        numbers: int,
    ) -> Agreement | None:
        """Return the agreement of several ranks; None for a process that decides alone.

        Args:
            group: None for all ranks, if there are several; False to decide alone.
            device: see `Agreement`, as the following.
            made: describes the guard.
            numbers: how many a message should have room for.

        Raises:
            ValueError: a group was given, but `torch.distributed` is not initialised; else as
                `Agreement`.
            RankLost: another rank does not make its guard.
        """
        if group and not (dist.is_available() and dist.is_initialized()):
            raise ValueError("group= was given, but torch.distributed is not initialised")
        if group is False or not several_ranks(group):
            return None
        return cls(group, device, made, numbers)

    def exchange(self, what: str, numbers: Tensor) -> Tensor:
        """Gather `[n]` numbers of each rank as `[rank, n]` float32 on the CPU of all.

        Args:
            what: these numbers are, and of which step; the same on every rank.
            numbers: of this rank, as many as the others'.

        Raises:
            ValueError: other ranks are at another point, with what each is at.
            RankLost: some rank does not answer.
        """
        pieces = numbers.split(self._width) if self._width else (numbers,)
        names = [f"{what} [{i + 1} of {len(pieces)}]" for i in range(len(pieces))]
        tables = [self._exchange(*pair) for pair in zip(names, pieces, strict=True)]
        return torch.cat(tables, dim=1)

    def _exchange(self, what: str, numbers: Tensor) -> Tensor:
        # A sum in which every other rank adds zeros: exact, and known to every backend.
        table = torch.zeros(self.world, 1 + self._width)
        table[self.rank, 0] = zlib.crc32(what.encode()) & 0xFFFFFF  # exact in float32
        table[self.rank, 1 : 1 + len(numbers)] = numbers
        with self.waiting(what, always=True):
            table = table.to(self._device)
            dist.all_reduce(table, group=self.group)
            table = table.cpu()
        if bool((table[:, 0] != table[0, 0]).any()):
            raise ValueError(self._difference(what))
        return table[:, 1 : 1 + len(numbers)]

    def _difference(self, what: str) -> str:
        points = self.share("what each rank is at", what)
        at = "; ".join(f"rank {rank}: {point}" for rank, point in enumerate(points))
        return (
            f"the ranks are not at the same point. {at}. Make the same Guard on every rank, call"
            " its backward and step equally often there, and with losses of the same names: a term"
            " that finds nothing in a rank's batch is a constant 0"
        )

    def share(self, what: str, words: str) -> list[str]:
        """Gather a few words of each rank, in their order; `what` they are, as `exchange`."""
        gathered: list[str] = [""] * self.world
        with self.waiting(what, always=True):
            dist.all_gather_object(gathered, words, group=self.group)
        return gathered

    @contextlib.contextmanager
    def waiting(self, what: str, *, always: bool = False) -> Iterator[None]:
        """Name what was waited for where the process group fails inside.

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

    def name_ranks(self, *evidence: Tensor) -> str:
        """Return where something was seen, as ` on rank 3 of 4`, counted from 0.

        Args:
            *evidence: boolean `[rank]` each; the first that is true somewhere is named.
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


def several_ranks(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `torch.distributed` is initialised, with more than one rank."""
    there = dist.is_available() and dist.is_initialized()
    return there and dist.get_world_size(group) != 1
