"""Several ranks on this machine: real processes that talk by gloo, each with a rank's work."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import pipe, start

TIMEOUT = 60.0
"""Seconds that a rank waits for the others; a test that needs them all has failed."""


def run_ranks(
    work: Callable[..., Any], world: int, *words: Any, timeout: float = TIMEOUT
) -> list[Any]:
    """What each rank's `work(rank, *words)` returns; an exception is returned, too.

    Args:
        work: a function of a module; `torch.distributed` is initialised around it.
        world: how many ranks.
        words: further arguments.
        timeout: of the process group, in seconds.

    Returns:
        Rank -> what came of it: a value, the text of an exception, None where the process died.
    """
    with tempfile.TemporaryDirectory() as folder:
        ends, ranks = [], []
        for rank in range(world):
            mine, theirs = pipe()
            where = str(Path(folder) / "store")
            ranks.append(start(_rank, theirs, where, rank, world, timeout, work, words))
            theirs.close()
            ends.append(mine)
        told = []
        for rank, end in enumerate(ends):
            assert end.poll(3 * TIMEOUT), f"rank {rank} of {work.__name__} hangs"
            try:
                told.append(end.recv())
            except EOFError:
                told.append(None)
        for process in ranks:
            process.join(TIMEOUT)
        return told


def _rank(
    end: Any, store: str, rank: int, world: int, timeout: float, work: Callable, words: tuple
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    try:
        end.send(work(rank, *words))
    except BaseException as error:
        end.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    end.close()
    os._exit(0)  # a group whose rank died cannot be taken down
