"""Processes that a launcher started together: how they join, wait for the first, and end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistError  # pyright: ignore[reportPrivateImportUsage]

from ssl_kd.errors import FAILED, InputError, Interrupted, UserError
from ssl_kd.guard.agreement import LOST, RankLost
from ssl_kd.settings.early import LAUNCHERS

if TYPE_CHECKING:  # a torch that was built for one process alone has none of them
    from torch.distributed import (  # public, but not so marked
        Store,  # pyright: ignore[reportPrivateImportUsage]
        TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    )

_JOINED_BY = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
_POLL = 0.05  # seconds between two looks at what rank 0 does
_LAST_WORDS = 1.0  # seconds that another rank's reason to stop is waited for
_LINGER = 5.0  # and that rank 0 waits for the others to leave
_WAY_OUT = (
    "A rank died or hangs: the first error is in its own log. Start all ranks again; --resume goes"
    " on from the last checkpoint"
)

T = TypeVar("T")


class RankStopped(RankLost):
    """Another rank stopped first; this one says why, and ends with the same exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def refuse_ranks() -> None:
    """Let no process work alone that a launcher (torchrun, mpirun, srun) started as one of several.

    Each would do all the work in a folder of its own, and none would tell.

    Raises:
        InputError: a launcher's variable counts more than one; the message names this process's
            rank.
    """
    if found := _launcher():
        size, count = found
        raise InputError(
            f"This is rank {os.environ.get(LAUNCHERS[size], 'unknown')} of {count} ({size}), but"
            " this is work for one process on one device. Start it with python alone, not torchrun,"
            " mpirun or srun with several tasks; for several GPUs one run for each, --device"
            " cuda:0, cuda:1 ..."
        )


def _launcher() -> tuple[str, int] | None:
    """The variable that says that a launcher started several processes, and how many."""
    for size in LAUNCHERS:
        count = os.environ.get(size, "")
        if count.isdecimal() and int(count) > 1:
            return size, int(count)
    return None


def follows() -> bool:
    """Whether a launcher started this process as another than the first of several."""
    found = _launcher()
    return found is not None and os.environ.get(LAUNCHERS[found[0]], "0") != "0"


@contextlib.contextmanager
def following() -> Iterator[None]:
    """Log errors alone: the first process speaks for all."""
    logger = logging.getLogger("ssl_kd")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@dataclass(frozen=True)
class Ranks:
    """The processes that work together, as one of them sees them.

    Attributes:
        rank: of this one, from 0.
        world: how many there are; 1 for a process by itself.
        device: its own, `cpu` or `cuda:1`; for a process by itself as it was given.
    """

    rank: int
    world: int
    device: str
    _stop: Store | None = None  # outlives any rank, under torchrun
    _first: Store | None = None  # lives in rank 0: the others notice when it ends

    def from_first(self, work: Callable[[], T]) -> T:
        """What rank 0's `work()` returns, on every rank; the others wait for as long as it takes.

        Call it on every rank in the same order. What is returned is pickled: tensors on the CPU.

        Raises:
            RankLost: rank 0 died.
            RankStopped: rank 0 stopped.
        """
        done: list[Any] = [None]
        if self.rank == 0:
            done[0] = work()
        if self._first is not None:
            turn = f"done {self._first.add(f'turns of {self.rank}', 1)}"
            if self.rank == 0:
                self._first.add(turn, 1)
            else:
                self._wait_for(self._first, turn)
            dist.broadcast_object_list(done)
        return done[0]

    def _wait_for(self, store: Store, key: str) -> None:
        """Look for a key of rank 0's now and then: signals are heard, and its end is noticed."""
        try:
            while not store.add(key, 0):  # asks without waiting, in every version of torch
                if self._said() is not None:
                    raise RankLost(f"rank {self.rank} of {self.world} is not needed any more")
                time.sleep(_POLL)
        except DistError as error:
            raise RankLost(
                f"rank {self.rank} of {self.world} waited for rank 0, which has ended. {_WAY_OUT}"
            ) from error

    def _lost(self, error: BaseException) -> RankLost | None:
        """What an error of the process group means; None for any other."""
        if not isinstance(error, DistError):
            if isinstance(error, UserError) or not isinstance(error, RuntimeError):
                return None
            if not LOST.search(str(error)):
                return None
        line = str(error).strip().splitlines()[0].partition(" This is typically")[0].rstrip(".")
        return RankLost(f"rank {self.rank} of {self.world} lost the others: {line}. {_WAY_OUT}")

    def _leave(self, patience: float) -> None:
        """Rank 0, where the stores may live, goes last: the others still ask why it stopped."""
        assert self._stop is not None
        deadline = time.monotonic() + patience
        with contextlib.suppress(DistError):
            left = self._stop.add("left", 1)
            while self.rank == 0 and left < self.world and time.monotonic() < deadline:
                time.sleep(_POLL)
                left = self._stop.add("left", 0)

    def _said(self) -> dict[str, Any] | None:
        """Who stopped first, why, and with which exit code; None while no rank has stopped."""
        assert self._stop is not None
        try:
            if self._stop.add("stops", 0):
                return json.loads(self._stop.get("stopped"))
        except DistError:  # it lived in rank 0, which is gone
            pass
        return None

    def _ended_by(self, error: BaseException) -> RankStopped | None:
        """Tell the others why this rank stops; another error where it is only one of those."""
        patience = 0.0 if self.rank == 0 and not isinstance(error, RankLost) else _LAST_WORDS
        deadline = time.monotonic() + patience
        while (said := self._said()) is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        if said is None:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            told = {"rank": self.rank, "code": _code(error), "why": line}
            with contextlib.suppress(DistError):
                assert self._stop is not None
                self._stop.set("stopped", json.dumps(told))
                self._stop.add("stops", 1)
            return None
        if self.rank == 0 and not isinstance(error, RankLost):
            return None
        return RankStopped(
            f"rank {self.rank} of {self.world} stopped with rank {said['rank']}: {said['why']}",
            said["code"],
        )


def _code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + (error.signal if isinstance(error, Interrupted) else 2)
    return error.exit_code if isinstance(error, UserError) else FAILED


@contextlib.contextmanager
def joined(device: str, timeout: timedelta = timedelta(minutes=10)) -> Iterator[Ranks]:
    """The process group that torchrun describes, for as long as the block runs.

    A process by itself gets no group. Otherwise `torch.distributed` is initialised inside: gloo
    for tensors on the CPU, and NCCL for those on a GPU, one GPU for each process of a machine.

    Args:
        device: the setting DEVICE: `auto`, `cpu` or `cuda`.
        timeout: of a collective; `Ranks.from_first` waits for longer.

    Raises:
        InputError: a launcher that is not like torchrun, another device than these, or a torch
            that was built without `torch.distributed`.
        RankStopped: in place of what ended this rank, where another one stopped before it.
    """
    found = _launcher()
    if found is None:
        yield Ranks(0, 1, device)
        return
    mine = _device(device, *found)
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    from torch.distributed import (
        PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
        rendezvous,  # pyright: ignore[reportPrivateImportUsage]
    )

    store, rank, world = next(iter(rendezvous("env://", timeout=timeout)))
    backend = "gloo" if mine.type == "cpu" else "cpu:gloo,cuda:nccl"
    groups = PrefixStore("groups", store)
    dist.init_process_group(backend, store=groups, rank=rank, world_size=world, timeout=timeout)
    stop = PrefixStore("ends", store)
    ranks = Ranks(rank, world, str(mine), stop, _store_of_first(rank, stop, timeout))
    try:
        dist.barrier()  # all are in touch with rank 0: from now on its end is noticed
        yield ranks
    except BaseException as error:
        with _deaf():
            lost = ranks._lost(error)
            traceback.clear_frames(error.__traceback__)  # they would keep the group alive
            other = ranks._ended_by(lost or error) or lost
            _part()  # ends collectives in which other ranks wait for this one
            outlives = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            ranks._leave(0.0 if outlives else _LINGER)
        if other is not None:
            raise other from error
        raise
    _part()
    ranks._leave(_LINGER)


def _part() -> None:
    """End the group; gloo outlives it here, and ends without Python's lock.

    The group of torch 2.6 ends gloo with the lock held: it waits for gloo's threads, and one that
    has a tensor to free waits for the lock.
    """
    gloo = dist.group.WORLD and dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.destroy_process_group()
    del gloo


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """SIGTERM is not heard inside: torchrun sends it to all where one has died, and ends go on."""
    if threading.current_thread() is not threading.main_thread():  # Python's own condition
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _store_of_first(rank: int, store: Store, timeout: timedelta) -> TCPStore:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    host = os.environ["MASTER_ADDR"]  # rank 0 is there
    if rank == 0:
        mine = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        store.set("port", str(mine.port))
        return mine
    return TCPStore(host, int(store.get("port")), is_master=False, timeout=timeout)


def _device(device: str, size: str, count: int) -> torch.device:
    """The device of this process, one of `count`, as the variable `size` says.

    Raises:
        InputError: as `joined`.
    """
    if size != "WORLD_SIZE" or any(name not in os.environ for name in _JOINED_BY):
        raise InputError(
            f"This is rank {os.environ.get(LAUNCHERS[size], 'unknown')} of {count} ({size}), but"
            f" what torchrun tells its processes ({', '.join(_JOINED_BY)}) is missing: each would"
            " work alone. Start them by torchrun --nproc_per_node N, or one with python alone"
        )
    if not dist.is_available():
        raise InputError(
            f"{count} processes were started ({size}), but torch {torch.__version__} was built"
            " without torch.distributed, by which they would talk: install a build that has it"
            " (that of PyPI does), or start one with python alone"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise InputError(
            f"DEVICE is {device}, but {count} processes were started: expected auto, cpu or cuda,"
            " by which each takes a GPU of its own"
        )
    if device == "cpu":
        return torch.device("cpu")
    local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= there:
        raise InputError(
            f"process {local} of this machine has no GPU: it has {there}, counted from 0. Start"
            f" torchrun with --nproc_per_node {there}, or give --device cpu"
        )
    return torch.device("cuda", local)
