"""Exchange values among the processes of a job, and share the run folder that rank 0 writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from firstnan.agreement import Agreement
from ssl_kd.core.files import load_tensors
from ssl_kd.core.runs.folder import RunFolder
from ssl_kd.core.runs.ranks import Ranks
from ssl_kd.core.runs.stop import Signals
from ssl_kd.core.runs.writer import NoWriter
from ssl_kd.core.settings import RunSettings


class ProcessGroup(Agreement):
    """Collective operations over the `torch.distributed` ranks, or over a single process.

    All ranks must create the object and call its methods in the same order. A method that waits
    for another rank raises RankLost if that rank does not respond.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(None, device, "the processes of one job")

    def sums(self, what: str, *numbers: float) -> list[float]:
        """Sum numbers over the ranks in float32; `what` names them, identically on all ranks."""
        if self.world == 1:
            return list(numbers)
        of_ranks = self.exchange(what, torch.tensor(numbers, dtype=torch.float32))
        return of_ranks.double().sum(0).tolist()

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a batch: rows rank, rank + world, rank + 2 world, ..."""
        return rows[self.rank :: self.world]

    def any_signal(self, signals: Signals, when: str) -> bool:
        """Return whether any rank got a signal to stop; copy that signal to ranks without one."""
        first = signals.caught[0] if signals.caught else 0
        of_ranks = self.exchange(f"whether to stop {when}", torch.tensor([float(first)]))
        caught = [int(number) for number in of_ranks.flatten().tolist() if number]
        if caught and not signals.caught:
            signals.caught.append(caught[0])
        return bool(caught)


@contextlib.contextmanager
def run_folder(run: RunSettings, ranks: Ranks) -> Iterator[RunFolder]:
    """Open the run folder for writing on rank 0, and for reading on the other ranks.

    If `RunFolder.open` raises an error on rank 0, the other ranks raise RankStopped.
    """
    with contextlib.ExitStack() as stack:
        opened: list[RunFolder] = []

        def open_folder() -> Path:
            opened.append(stack.enter_context(RunFolder.open(run)))
            return opened[0].path

        path = ranks.from_first(open_folder)
        yield opened[0] if opened else RunFolder(path, NoWriter())


def load_checkpoint(folder: RunFolder, ranks: Ranks) -> tuple[int, dict[str, Any]]:
    """Load the newest checkpoint that rank 0 saved, on every rank."""
    loaded: list[tuple[int, dict[str, Any]]] = []

    def load() -> int:
        loaded.append(folder.load_checkpoint())
        return loaded[0][0]

    start = ranks.from_first(load)
    if loaded or not start:
        return loaded[0] if loaded else (0, {})
    path = folder.path / "checkpoint" / f"step_{start:09d}.pt"
    return start, load_tensors(path, mmap=True)["tensors"]
