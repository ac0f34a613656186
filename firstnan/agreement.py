"""Exchange a few numbers between the ranks that train one model, so that all decide alike.

If one rank skipped a step alone, the others would wait for it in an all-reduce; if one rank alone
used a bad loss term, the averaged gradient would damage the weights of all. So the ranks exchange
the numbers that judge a step, at the same points of the loop, before anything is decided.
"""

from __future__ import annotations

import contextlib
import re
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from firstnan.errors import UserError

T = TypeVar("T")
_LOST = re.compile("gloo|NCCL|connection|socket|timed? ?out", re.IGNORECASE)
_WIDTH = 64  # least number of values in one message
_NAMED = 8  # most ranks that an event names
_WAY_OUT = (
    "A rank died, hangs, or was slower than the process group's timeout: its own log has the first"
    " error. Start all ranks again from the last checkpoint; if steps may take that long, pass"
    " timeout= to init_process_group"
)


class RankLost(UserError, RuntimeError):
    """Another rank did not respond; the message says what was waited for, and for how long."""


class Agreement:
    """Exchange a few numbers between the ranks of a process group, in one small all-reduce.

    Every rank makes the same exchanges in the same order. Each message starts with a checksum of
    its purpose, so that ranks at different points of their loops get an error that names the points
    instead of wrong numbers. Ranks that describe themselves differently (`made`) are refused. A
    single rank, or one with `group=False`, sends nothing.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Literal[False] | None,
        device: torch.device,
        made: str,
        numbers: int = 0,  # of the longest message
    ) -> None:
        if group and not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "group= is a process group, but torch.distributed is not initialized: call "
                "init_process_group first, or leave group= out"
            )
        self.group: Any = group
        self.rank, self.world = 0, 1
        if group is False or not several_ranks(group):
            return
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in `group`; expected a group that contains it")
        self._device = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        self._width = 0
        self._exchange(made, torch.zeros(0))
        self._width = max(numbers, _WIDTH)

    def exchange(self, what: str, numbers: Tensor) -> Tensor:
        """Gather each rank's `[n]` numbers as `[rank, n]` float32 on the CPU; `what` names them."""
        if self.world == 1:
            return numbers.float().unsqueeze(0)
        return torch.cat([self._exchange(what, x) for x in numbers.split(self._width)], dim=1)

    def _exchange(self, what: str, numbers: Tensor) -> Tensor:
        # A sum in which every other rank adds zeros: exact, and every backend has it.
        table = torch.zeros(self.world, 1 + self._width)
        table[self.rank, 0] = zlib.crc32(what.encode()) & 0xFFFFFF  # exact in float32
        table[self.rank, 1 : 1 + len(numbers)] = numbers
        with self.waiting(what, always=True):
            table = table.to(self._device)
            dist.all_reduce(table, group=self.group)
            table = table.cpu()
        if bool((table[:, 0] != table[0, 0]).any()):
            points = self.gather("the point of each rank", what)
            at = "; ".join(f"rank {rank}: {point}" for rank, point in enumerate(points))
            raise ValueError(
                f"the ranks are not at the same point. {at}. Make the same Guard on every rank,"
                " call its backward and step equally often there, and with losses of the same"
                " names: a term that does not apply to a rank's batch is a constant 0"
            )
        return table[:, 1 : 1 + len(numbers)]

    def gather(self, what: str, value: T) -> list[T]:
        """Gather a picklable value from each rank, in rank order."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            with self.waiting(what, always=True):
                dist.all_gather_object(values, value, group=self.group)
        return values

    @contextlib.contextmanager
    def waiting(self, what: str, *, always: bool = False) -> Iterator[None]:
        """Turn a failure of the process group (`always`: any RuntimeError) into RankLost."""
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if self.world == 1 or not (always or is_lost(error)):
                raise
            line = str(error).strip().splitlines()[0]
            raise RankLost(
                f"rank {self.rank} of {self.world} waited {time.monotonic() - start:.1f} s for the"
                f" other ranks at {what}: {line}. {_WAY_OUT}"
            ) from error

    def name_ranks(self, evidence: Iterable[Tensor]) -> str:
        """Return ` on rank 3 of 4` by the first boolean `[rank]` tensor that is true somewhere."""
        if self.world == 1:
            return ""
        for where in evidence:
            ranks = where.nonzero().flatten().tolist()
            if len(ranks) == self.world:
                return f" on all {self.world} ranks"
            if len(ranks) > _NAMED:
                return f" on {len(ranks)} of {self.world} ranks, the first is rank {ranks[0]}"
            if ranks:
                names = ", ".join(map(str, ranks))
                noun = "ranks" if len(ranks) > 1 else "rank"
                return f" on {noun} {names} of {self.world}"
        return ""


def is_lost(error: BaseException) -> bool:
    """Return whether an error says that the process group lost its connection to another rank."""
    known = isinstance(error, dist.DistError)  # pyright: ignore[reportPrivateImportUsage]
    return known or (isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None)


def several_ranks(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `torch.distributed` is initialized with more than one rank."""
    initialized = dist.is_available() and dist.is_initialized()
    return initialized and dist.get_world_size(group) != 1
