"""The processes that a launcher started: they join, wait for the first one, and end together."""

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

if TYPE_CHECKING:  # a torch built without torch.distributed has none of them
    from torch.distributed import (
        Store,  # pyright: ignore[reportPrivateImportUsage]
        TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    )

_JOINED_BY = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
_POLL = 0.05  # seconds between two looks at rank 0
_REASON_WAIT = 1.0  # seconds to wait for another rank's reason to stop
_LINGER = 5.0  # seconds that rank 0 waits for the others to leave
_WAY_OUT = (
    "A rank died or hangs: its own log has the first error. Start all ranks again; --resume goes on"
    " from the last checkpoint"
)

T = TypeVar("T")


class RankStopped(RankLost):
    """Another rank stopped first; the message has its reason, and the exit code is the same."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def refuse_ranks() -> None:
    """Raise InputError if a launcher (torchrun, mpirun, srun) started several processes.

    Each of them would do all the work in its own folder.
    """
    if found := _launcher():
        size, count = found
        raise InputError(
            f"This is rank {os.environ.get(LAUNCHERS[size], 'unknown')} of {count} ({size}), but"
            " this command runs in one process on one device. Start it with python alone, without"
            " torchrun, mpirun or srun; to use several GPUs start one run for each, --device"
            " cuda:0, cuda:1 ..."
        )


def _launcher() -> tuple[str, int] | None:
    """Return the variable by which a launcher announces several processes, and their number."""
    for size in LAUNCHERS:
        count = os.environ.get(size, "")
        if count.isdecimal() and int(count) > 1:
            return size, int(count)
    return None


def follows() -> bool:
    """Whether this is one of several processes, but not the first."""
    launcher = _launcher()
    return launcher is not None and os.environ.get(LAUNCHERS[launcher[0]], "0") != "0"


@contextlib.contextmanager
def following() -> Iterator[None]:
    """Log only errors in the block, because the first process logs for all."""
    logger = logging.getLogger("ssl_kd")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@dataclass(frozen=True)
class Ranks:
    """This process and the others of its job.

    Attributes:
        rank: of this process, from 0.
        world: number of processes.
        device: of this process, such as `cpu` or `cuda:1`; for a single process as given.
    """

    rank: int
    world: int
    device: str
    _stop: Store | None = None  # under torchrun it outlives the ranks
    _first: Store | None = None  # is in rank 0, so the others notice when that ends

    def from_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank; the others wait without limit.

        Call it on every rank in the same order. The result is pickled, with tensors on the CPU.

        Raises:
            RankLost: rank 0 died.
            RankStopped: rank 0 stopped.
        """
        result: list[Any] = [None]
        if self.rank == 0:
            result[0] = work()
        if self._first is not None:
            turn = f"done {self._first.add(f'turns of {self.rank}', 1)}"
            if self.rank == 0:
                self._first.add(turn, 1)
            else:
                self._wait_for(self._first, turn)
            dist.broadcast_object_list(result)
        return result[0]

    def _wait_for(self, store: Store, key: str) -> None:
        """Poll for a key that rank 0 sets, so that signals and the end of rank 0 are noticed."""
        try:
            while not store.add(key, 0):  # does not block in any version of torch
                if self._stop_reason() is not None:
                    raise RankLost(f"rank {self.rank} of {self.world} is not needed any more")
                time.sleep(_POLL)
        except DistError as error:
            raise RankLost(
                f"rank {self.rank} of {self.world} waited for rank 0, which has ended. {_WAY_OUT}"
            ) from error

    def _lost(self, error: BaseException) -> RankLost | None:
        """Translate an error of the process group; None for any other error."""
        if not isinstance(error, DistError):
            if isinstance(error, UserError) or not isinstance(error, RuntimeError):
                return None
            if not LOST.search(str(error)):
                return None
        line = str(error).strip().splitlines()[0].partition(" This is typically")[0].rstrip(".")
        return RankLost(f"rank {self.rank} of {self.world} lost the others: {line}. {_WAY_OUT}")

    def _leave(self, patience: float) -> None:
        """Leave; rank 0 waits for the others, which may still read the reason from its store."""
        assert self._stop is not None
        deadline = time.monotonic() + patience
        with contextlib.suppress(DistError):
            left = self._stop.add("left", 1)
            while self.rank == 0 and left < self.world and time.monotonic() < deadline:
                time.sleep(_POLL)
                left = self._stop.add("left", 0)

    def _stop_reason(self) -> dict[str, Any] | None:
        """Return rank, reason and exit code of the first rank to stop; None if none has."""
        assert self._stop is not None
        try:
            if self._stop.add("stops", 0):
                return json.loads(self._stop.get("stopped"))
        except DistError:  # the store was in rank 0, which is gone
            pass
        return None

    def _ended_by(self, error: BaseException) -> RankStopped | None:
        """Publish why this rank stops, or return an error with the reason of the first to stop."""
        first_error = self.rank == 0 and not isinstance(error, RankLost)
        deadline = time.monotonic() + (0.0 if first_error else _REASON_WAIT)
        while (reason := self._stop_reason()) is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        if reason is None:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            reason = {"rank": self.rank, "code": _code(error), "why": line}
            with contextlib.suppress(DistError):
                assert self._stop is not None
                self._stop.set("stopped", json.dumps(reason))
                self._stop.add("stops", 1)
            return None
        if first_error:
            return None
        return RankStopped(
            f"rank {self.rank} of {self.world} stopped with rank {reason['rank']}: {reason['why']}",
            reason["code"],
        )


def _code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + (error.signal if isinstance(error, Interrupted) else 2)
    return error.exit_code if isinstance(error, UserError) else FAILED


@contextlib.contextmanager
def joined(device: str, timeout: timedelta = timedelta(minutes=10)) -> Iterator[Ranks]:
    """Join the process group that torchrun describes, for the block.

    A single process gets no group. Otherwise `torch.distributed` is initialized with gloo for
    tensors on the CPU and NCCL for those on a GPU, one GPU for each process of a machine.

    Args:
        device: the setting DEVICE: `auto`, `cpu` or `cuda`.
        timeout: of a collective; `Ranks.from_first` may wait longer.

    Raises:
        InputError: a launcher without torchrun's variables, another device, or a torch that was
            built without `torch.distributed`.
        RankStopped: another rank stopped before this one.
    """
    launcher = _launcher()
    if launcher is None:
        yield Ranks(0, 1, device)
        return
    own_device = _device(device, *launcher)
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    from torch.distributed import (
        PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
        rendezvous,  # pyright: ignore[reportPrivateImportUsage]
    )

    store, rank, world = next(iter(rendezvous("env://", timeout=timeout)))
    backend = "gloo" if own_device.type == "cpu" else "cpu:gloo,cuda:nccl"
    groups = PrefixStore("groups", store)
    dist.init_process_group(backend, store=groups, rank=rank, world_size=world, timeout=timeout)
    stop = PrefixStore("ends", store)
    ranks = Ranks(rank, world, str(own_device), stop, _store_of_first(rank, stop, timeout))
    try:
        dist.barrier()  # all are connected to rank 0, so from now on they notice its end
        yield ranks
    except BaseException as error:
        with _without_sigterm():
            lost = ranks._lost(error)
            traceback.clear_frames(error.__traceback__)  # they would keep the group alive
            other = ranks._ended_by(lost or error) or lost
            _end_group()  # ends collectives in which other ranks wait for this one
            outlives = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            ranks._leave(0.0 if outlives else _LINGER)
        if other is not None:
            raise other from error
        raise
    _end_group()
    ranks._leave(_LINGER)


def _end_group() -> None:
    """End the group, but keep gloo until the call returns.

    In torch 2.6 the group ends gloo while it holds Python's lock and waits for gloo's threads, and
    a thread that has a tensor to free waits for the lock.
    """
    gloo = dist.group.WORLD and dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.destroy_process_group()
    del gloo


@contextlib.contextmanager
def _without_sigterm() -> Iterator[None]:
    """Ignore SIGTERM, which torchrun sends to all ranks when one has died, while ranks end."""
    if threading.current_thread() is not threading.main_thread():  # as Python requires
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _store_of_first(rank: int, store: Store, timeout: timedelta) -> TCPStore:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    host = os.environ["MASTER_ADDR"]  # of rank 0
    if rank == 0:
        own = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        store.set("port", str(own.port))
        return own
    return TCPStore(host, int(store.get("port")), is_master=False, timeout=timeout)


def _device(device: str, size: str, count: int) -> torch.device:
    """Return this process's device; the variable `size` says that `count` were started.

    Raises:
        InputError: as `joined`.
    """
    if size != "WORLD_SIZE" or any(name not in os.environ for name in _JOINED_BY):
        raise InputError(
            f"This is rank {os.environ.get(LAUNCHERS[size], 'unknown')} of {count} ({size}), but"
            f" torchrun's variables ({', '.join(_JOINED_BY)}) are not set, so each process would"
            " work alone. Start them with torchrun --nproc_per_node N, or one with python alone"
        )
    if not dist.is_available():
        raise InputError(
            f"{count} processes were started ({size}), but torch {torch.__version__} was built"
            " without torch.distributed, which they need: install a build with it, such as that"
            " from PyPI, or start one with python alone"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise InputError(
            f"DEVICE is {device}, but {count} processes were started: expected auto, cpu or cuda,"
            " with which each uses another GPU"
        )
    if device == "cpu":
        return torch.device("cpu")
    local, n_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= n_gpus:
        raise InputError(
            f"process {local} of this machine has no GPU: it has {n_gpus}, counted from 0. Start"
            f" torchrun with --nproc_per_node {n_gpus}, or set --device cpu"
        )
    return torch.device("cuda", local)
