"""Processes that do one job: what they exchange, and the run folder that the first one writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ssl_kd.files import load_tensors
from ssl_kd.guard.agreement import Agreement
from ssl_kd.guard.events import EventLog
from ssl_kd.settings import RunSettings
from ssl_kd.training.folder import RunFolder
from ssl_kd.training.ranks import Ranks
from ssl_kd.training.stop import Signals

T = TypeVar("T")


class ProcessGroup:
    """The ranks of `torch.distributed` where it is initialised; else this process, one of one.

    All of them make it and call it at the same points.

    Args:
        device: whose backend sends.

    Attributes:
        rank: of this process, from 0.
        world: how many there are.

    Raises:
        RankLost: another rank does not make its own; so does whatever waits for the others.
    """

    def __init__(self, device: torch.device) -> None:
        self._agreement = Agreement.between(None, device, "of the processes of one job", 8)
        self.rank = 0 if self._agreement is None else self._agreement.rank
        self.world = 1 if self._agreement is None else self._agreement.world

    def waiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Raise RankLost, which names what was waited for, where the process group fails inside."""
        if self._agreement is None:
            return contextlib.nullcontext()
        return self._agreement.waiting(what)

    def sums(self, what: str, *numbers: float) -> list[float]:
        """Sum numbers over the ranks; each is sent as float32.

        Args:
            what: they are, and of which step; the same on every rank.
            *numbers: of this rank.
        """
        if self._agreement is None:
            return [*numbers]
        told = self._agreement.exchange(what, torch.tensor(numbers, dtype=torch.float32))
        return told.double().sum(0).tolist()

    def means(self, what: str, *numbers: float) -> list[float]:
        """Average numbers over the ranks; each is sent as float32."""
        return [number / self.world for number in self.sums(what, *numbers)]

    def of_all(self, what: str, value: T) -> list[T]:
        """Gather a value that can be pickled from each rank, in their order."""
        if self._agreement is None:
            return [value]
        told: list[Any] = [None] * self.world
        with self._agreement.waiting(what, always=True):
            dist.all_gather_object(told, value)
        return told

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a batch: every n-th of n ranks."""
        return rows[self.rank :: self.world]

    def told_to_stop(self, signals: Signals, when: str) -> bool:
        """Return whether any rank got a signal to stop; all ranks then act on the same one."""
        if self._agreement is None:
            return bool(signals.caught)
        mine = torch.tensor([float(*signals.caught[:1])])
        told = self._agreement.exchange(f"whether to stop {when}", mine)
        caught = [int(number) for number in told.flatten().tolist() if number]
        if caught and not signals.caught:
            signals.caught.append(caught[0])
        return bool(caught)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of the ranks, in place; one that a rank lacks is 0 there."""
        if self._agreement is None:
            return
        parameters = list(parameters)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        with self._agreement.waiting("the gradients", always=True):
            dist.all_reduce(flat)
        sizes = [p.numel() for p in parameters]
        for p, gradient in zip(parameters, flat.split(sizes), strict=True):
            p.grad = gradient.view_as(p)


class ReadOnlyRunFolder(RunFolder):
    """The run folder as every rank but the first sees it: for reading.

    Args:
        path: where the first rank writes it, on a file system of all ranks.
    """

    writes = False

    def __init__(self, path: Path) -> None:
        self.path, self.events = path, EventLog()
        self._checkpoints = path / "checkpoint"

    def __enter__(self) -> ReadOnlyRunFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing: the first rank has the folder's lock."""

    def checkpoint(self, step: int) -> dict[str, Any]:
        """Return the tensors of the first rank's checkpoint of a step; none at step 0."""
        if not step:
            return {}
        return load_tensors(self._checkpoints / f"step_{step:09d}.pt", mmap=True)["tensors"]


@contextlib.contextmanager
def run_folder(settings: RunSettings, ranks: Ranks) -> Iterator[RunFolder]:
    """Open the run's folder on the first rank, and give the others the same one for reading.

    Raises:
        RunFolderError, SettingsError, OSError: as `RunFolder`.
        RankStopped: the same, on the other ranks.
    """
    with contextlib.ExitStack() as stack:
        own: list[RunFolder] = []

        def opened() -> Path:
            own.append(stack.enter_context(RunFolder(settings)))
            return own[0].path

        path = ranks.from_first(opened)
        yield own[0] if own else ReadOnlyRunFolder(path)


def load_checkpoint(folder: RunFolder, ranks: Ranks) -> tuple[int, dict[str, Any]]:
    """Load, on every rank, the checkpoint that the first one finds."""
    found: list[tuple[int, dict[str, Any]]] = []

    def load() -> int:
        found.append(folder.load_checkpoint())
        return found[0][0]

    start = ranks.from_first(load)
    if isinstance(folder, ReadOnlyRunFolder):
        return start, folder.checkpoint(start)
    return found[0]
