"""Connect the processes that a launcher such as torchrun started, and end them together."""

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

from firstnan.agreement import RankLost, is_lost
from ssl_kd.core.errors import FAILED, InputError, Interrupted, UserError
from ssl_kd.core.settings.early import LAUNCHERS

if TYPE_CHECKING:  # not in builds of torch without torch.distributed
    from torch.distributed import (
        Store,  # pyright: ignore[reportPrivateImportUsage]
        TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    )

_JOINED_BY = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
_POLL = 0.05  # seconds between two checks of the store of rank 0
_REASON_WAIT = 1.0  # seconds to wait until another rank publishes why it stopped
_LINGER = 5.0  # seconds that rank 0 waits for the other ranks to leave
_WAY_OUT = (
    "A rank died or hangs: its log shows the first error. Start all ranks again, with --resume to"
    " continue from the last checkpoint"
)

T = TypeVar("T")


class RankStopped(RankLost):
    """Another rank stopped first; message and exit code are those of its error."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def refuse_ranks() -> None:
    """Raise InputError if a launcher (torchrun, mpirun, srun) started several processes.

    Without this check, each process would do all the work in a folder of its own.
    """
    if found := _launcher():
        size, count = found
        raise InputError(
            f"This is rank {os.environ.get(LAUNCHERS[size], 'unknown')} of {count} ({size}), but"
            " this command runs in one process on one device. Start it with python alone, without"
            " torchrun, mpirun or srun; to use several GPUs, start one run per GPU with --device"
            " cuda:0, cuda:1 ..."
        )


def _launcher() -> tuple[str, int] | None:
    """Return the environment variable that holds the number of processes, if > 1, and its value."""
    for size in LAUNCHERS:
        count = os.environ.get(size, "")
        if count.isdecimal() and int(count) > 1:
            return size, int(count)
    return None


def follows() -> bool:
    """Return whether this is one of several processes and not rank 0."""
    launcher = _launcher()
    return launcher is not None and os.environ.get(LAUNCHERS[launcher[0]], "0") != "0"


@contextlib.contextmanager
def following() -> Iterator[None]:
    """Log only errors in the `with` block, because rank 0 logs for all processes."""
    loggers = [logging.getLogger(name) for name in ("ssl_kd", "firstnan")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@dataclass(frozen=True)
class Ranks:
    """The rank and device of this process, and its connection to the other ranks."""

    rank: int
    world: int
    device: str  # such as `cpu` or `cuda:1`; may be `auto` if `world` is 1
    _stop: Store | None = None  # under torchrun, this store outlives the ranks
    _first: Store | None = None  # runs in rank 0, so other ranks notice when rank 0 ends

    def from_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank, without a time limit.

        All ranks must call it in the same order. The result is pickled, with tensors on the CPU.
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
        """Wait for a key that rank 0 sets; poll, to notice signals and the end of rank 0."""
        try:
            while not store.add(key, 0):  # does not block in any version of torch
                if self._stop_reason() is not None:
                    raise RankLost(f"rank {self.rank} of {self.world} stops since another one did")
                time.sleep(_POLL)
        except DistError as error:
            raise RankLost(
                f"rank {self.rank} of {self.world} waited for rank 0, which has ended. {_WAY_OUT}"
            ) from error

    def _lost(self, error: BaseException) -> RankLost | None:
        """Return a RankLost for an error of the process group; None for any other error."""
        if isinstance(error, UserError) or not is_lost(error):
            return None
        line = str(error).strip().splitlines()[0].partition(" This is typically")[0].rstrip(".")
        return RankLost(f"rank {self.rank} of {self.world} lost other ranks: {line}. {_WAY_OUT}")

    def _leave(self, patience: float) -> None:
        """Leave the job; rank 0 waits up to `patience` seconds for ranks that read its store."""
        assert self._stop is not None
        deadline = time.monotonic() + patience
        with contextlib.suppress(DistError):
            left = self._stop.add("left", 1)
            while self.rank == 0 and left < self.world and time.monotonic() < deadline:
                time.sleep(_POLL)
                left = self._stop.add("left", 0)

    def _stop_reason(self) -> dict[str, Any] | None:
        """Return the rank, error and exit code of the first rank that stopped; None if none has."""
        assert self._stop is not None
        try:
            if self._stop.add("stops", 0):
                return json.loads(self._stop.get("stopped"))
        except DistError:  # the store was in rank 0, which is gone
            pass
        return None

    def _ended_by(self, error: BaseException) -> RankStopped | None:
        """Publish why this rank stops, or return the error of a rank that stopped before it."""
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
    """Join the process group that torchrun describes, for the `with` block.

    A single process creates no group. Several use gloo for CPU tensors and NCCL for GPU tensors,
    with one GPU for each process of a machine. `timeout` limits a collective operation, but not
    `Ranks.from_first`. Raises RankStopped if another rank stopped before this one.
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
        dist.barrier()  # from here on, all ranks are connected to rank 0 and notice its end
        yield ranks
    except BaseException as error:
        with _without_sigterm():
            lost = ranks._lost(error)
            traceback.clear_frames(error.__traceback__)  # frames would keep the group alive
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
    """Destroy the process group, but keep the gloo backend alive until the call returns.

    Otherwise torch 2.6 can deadlock: it holds the GIL and waits for gloo's threads, while such a
    thread waits for the GIL to free a tensor.
    """
    gloo = dist.group.WORLD and dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.destroy_process_group()
    del gloo


@contextlib.contextmanager
def _without_sigterm() -> Iterator[None]:
    """Ignore SIGTERM, which torchrun sends to all ranks after one died, in the `with` block."""
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

    host = os.environ["MASTER_ADDR"]  # host of rank 0
    if rank == 0:
        own = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        store.set("port", str(own.port))
        return own
    return TCPStore(host, int(store.get("port")), is_master=False, timeout=timeout)


def _device(device: str, size: str, count: int) -> torch.device:
    """Return the device of this process; `size` is the variable that holds `count`."""
    if size != "WORLD_SIZE" or any(name not in os.environ for name in _JOINED_BY):
        raise InputError(
            f"This is rank {os.environ.get(LAUNCHERS[size], 'unknown')} of {count} ({size}), but"
            f" torchrun's variables ({', '.join(_JOINED_BY)}) are not set, so each process would"
            " work alone. Start them with torchrun --nproc_per_node N, or one with python alone"
        )
    if not dist.is_available():
        raise InputError(
            f"{count} processes were started ({size}), but torch {torch.__version__} was built"
            " without torch.distributed, which they need: install a build that has it, such as"
            " the one on PyPI, or start a single process with python"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise InputError(
            f"DEVICE is {device}, but {count} processes were started: expected auto, cpu or cuda"
            " (cuda gives each process a GPU)"
        )
    if device == "cpu":
        return torch.device("cpu")
    local, n_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= n_gpus:
        raise InputError(
            f"LOCAL_RANK is {local}, but this machine has {n_gpus} GPUs, one per process: start"
            f" torchrun with --nproc_per_node {n_gpus}, or set --device cpu"
        )
    return torch.device("cuda", local)
