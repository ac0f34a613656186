"""Train the runs of a sweep as processes, several at a time if there is memory for them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ssl_kd.core.errors import Interrupted, printable
from ssl_kd.core.files import atomic_write_json
from ssl_kd.core.files.lock import Lock, LockHeld
from ssl_kd.core.memory import free_memory
from ssl_kd.core.runs.sweeps import LOGS, failure_file, is_finished
from ssl_kd.core.settings.early import LAUNCHERS
from ssl_kd.sweep.plan import Sweep

logger = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "ssl_kd")
_ROOM = 1.2  # free memory before another run starts, as a multiple of the largest so far
_TAIL = 2000  # bytes of a log in which the reason of a failure is looked for
_LOOK = 0.05  # seconds between two looks at the processes
_SECONDS = 1.0  # between two looks at runs that other processes train


@dataclass
class _Memory:
    """The memory of the host or of a GPU, and how much of it a run needs.

    Attributes:
        free: Returns the bytes that are free now.
        before: Bytes that were free before the first of the runs that are trained now.
        largest: Bytes that the largest run so far needed; 0 until that is known.
    """

    free: Callable[[], int]
    before: int = 0
    largest: int = 0

    def has_room(self, n_running: int) -> bool:
        """Return whether the memory holds another run of the size of the largest so far.

        Runs that have just begun do not use their memory yet, so what was free before the first of
        them must hold them all. Until the size of a run is known, a run is alone.
        """
        free = self.free()
        if not n_running:
            self.before = free
            return True
        each = _ROOM * self.largest
        return each > 0 and free > each and self.before > each * (n_running + 1)

    def measure(self, n_running: int) -> None:
        """Take what is not free any more as the size of a run, if a single one is trained."""
        if n_running == 1:
            self.largest = max(self.largest, self.before - self.free())


@dataclass
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    lock: Lock
    gpu: str  # in CUDA_VISIBLE_DEVICES; empty for that of this process
    alone: bool
    begins: int  # of what it prints, in its log
    began: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Outcome:
    """How the process of a run ended."""

    name: str
    code: int
    seconds: float
    reason: str = ""  # of a failure


def run_sweep(
    sweep: Sweep,
    names: Sequence[str],
    *,
    jobs: int = 1,
    gpus: Sequence[str] = (),
    on_end: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """Train the runs that are not finished; return how each of them ended.

    A run that shares no cache with an earlier one of `names` is trained alone first, and the others
    beside each other. How many are trained at once is at most `jobs`, and as many as the free
    memory of the host and of the GPUs holds, by the largest run so far. One that fails beside
    others is tried once more alone. A run that another process trains is left to it, and the call
    returns when that has ended, too.
    A failure is kept as `logs/RUN.failed.json`; what a run prints is in `logs/RUN.log`.

    Args:
        sweep: The plan.
        names: The runs to train, in this order.
        jobs: Largest number of runs at once.
        gpus: Values of CUDA_VISIBLE_DEVICES; a run gets the one with the fewest runs. None: that of
            this process.
        on_end: Called with the outcome of each run.

    Raises:
        Interrupted: Ctrl-C or SIGTERM; the runs were told to stop, and wrote their checkpoints.
    """
    (sweep.folder / LOGS).mkdir(exist_ok=True)
    return _Pool(sweep, jobs, gpus, on_end).run(names)


class _Pool:
    """The processes of a sweep."""

    def __init__(
        self,
        sweep: Sweep,
        jobs: int,
        gpus: Sequence[str],
        on_end: Callable[[Outcome], object],
    ) -> None:
        self.sweep = sweep
        self.jobs = jobs
        self.gpus = gpus
        self.on_end = on_end
        self.running: dict[int, _Child] = {}
        self.memory = _Memory(lambda: free_memory(torch.device("cpu")))
        self.gpu_memory = _gpu_memory(sweep, gpus) if jobs > max(1, len(gpus)) else {}
        self.signals: list[int] = []  # that arrived
        self.elsewhere: set[str] = set()  # runs that another process trained when they were due
        self.outcomes: list[Outcome] = []

    def run(self, names: Sequence[str]) -> list[Outcome]:
        seen: set[str] = set()
        first: list[str] = []
        rest: list[str] = []
        for name in names:
            group = self.sweep.groups[name]
            (rest if group in seen else first).append(name)
            seen.add(group)
        with _collected(self.signals):
            try:
                self._train(first, jobs=1)
                again = self._train(rest, jobs=self.jobs)
                self._train(again, jobs=1)
            finally:
                self._stop()  # also if this process fails, for example on a full disk
        return self.outcomes

    def _train(self, names: Sequence[str], jobs: int) -> list[str]:
        """Train runs, at most `jobs` at once; return those that failed beside others."""
        waiting = [n for n in names if not is_finished(self.sweep.folder / n)]
        again: list[str] = []
        while waiting or self.running:
            if self.signals:
                self._stop()
                raise Interrupted(self.signals[0], None)
            if waiting and len(self.running) < jobs and self.memory.has_room(len(self.running)):
                gpu = self._gpu_with_room()
                if gpu is not None and self._begin_one(waiting, gpu, alone=jobs == 1):
                    continue
                if not self.running:
                    time.sleep(_SECONDS)
            for gpu, memory in self.gpu_memory.items():
                memory.measure(self._n_running(gpu))
            ended = self._next_exit()
            if ended is None:
                time.sleep(_LOOK)
                continue
            child, outcome = self._outcome(*ended)
            if outcome.code and not child.alone:
                again.append(child.name)
            else:
                self._keep(outcome)
        return again

    def _keep(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.on_end(outcome)

    def _n_running(self, gpu: str) -> int:
        return [child.gpu for child in self.running.values()].count(gpu)

    def _gpu_with_room(self) -> str | None:
        """Return the GPU with the fewest runs of those with room; None if none has room.

        The result is empty if runs choose their GPU themselves, or use none.
        """
        of_gpus = {gpu: self._n_running(gpu) for gpu in self.gpus or [""]}
        fits = [
            gpu
            for gpu, n_running in of_gpus.items()
            if gpu not in self.gpu_memory or self.gpu_memory[gpu].has_room(n_running)
        ]
        return min(fits, key=of_gpus.__getitem__, default=None)

    def _begin_one(self, waiting: list[str], gpu: str, alone: bool) -> bool:
        """Take the first run that no other process trains out of `waiting`, and start it on `gpu`.

        Return False if other processes train all of them.
        """
        for name in waiting:
            lock = self._claimed(name)
            if lock is None:
                continue
            waiting.remove(name)
            if is_finished(self.sweep.folder / name):  # by the other process
                lock.__exit__()
                self._keep(Outcome(name, 0, 0.0))
            else:
                self._start(name, lock, gpu, alone)
            return True
        return False

    def _claimed(self, name: str) -> Lock | None:
        """Return the lock of a run, held; None if another process trains the run.

        That is a second sweep, or a process that a killed sweep has left.
        """
        lock = Lock(self.sweep.folder / LOGS / f"{name}.lock")
        folder = self.sweep.folder / name
        try:
            with ExitStack() as stack:
                stack.enter_context(lock)
                if folder.exists():
                    with Lock(folder / ".lock"):
                        pass
                stack.pop_all()
        except LockHeld:
            if name not in self.elsewhere:
                logger.info("%s is left to another process, which trains it", name)
            self.elsewhere.add(name)
            return None
        return lock

    def _start(self, name: str, lock: Lock, gpu: str, alone: bool) -> None:
        failure_file(self.sweep.folder, name).unlink(missing_ok=True)
        environment = dict(os.environ)
        for variables in LAUNCHERS.items():  # the run is not a rank of what launched this process
            for variable in variables:
                environment.pop(variable, None)
        if gpu:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[variable] = str(self.sweep.threads)
        with open(self.sweep.folder / LOGS / f"{name}.log", "ab") as output:
            begins = output.tell()
            process = subprocess.Popen(
                [*PROGRAM, *self.sweep.arguments(name)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches it through this process alone
            )
        self.running[process.pid] = _Child(name, process, lock, gpu, alone, begins)

    def _next_exit(self) -> tuple[_Child, int, Any] | None:
        """Return a run that has ended, with its exit status and what it used; None if none has."""
        for child in self.running.values():
            pid, status, usage = os.wait4(child.process.pid, os.WNOHANG)
            if pid:
                del self.running[pid]
                child.process.returncode = os.waitstatus_to_exitcode(status)
                child.lock.__exit__()
                return child, child.process.returncode, usage
        return None

    def _outcome(self, child: _Child, code: int, usage: Any) -> tuple[_Child, Outcome]:
        """Return how a run ended, and keep the reason of a failure."""
        unit = 1 if sys.platform == "darwin" else 1024
        self.memory.largest = max(self.memory.largest, usage.ru_maxrss * unit)
        reason = ""
        if code == 0 and not is_finished(self.sweep.folder / child.name):
            code, reason = 1, "it ended without results"
        if code:
            log = self.sweep.folder / LOGS / f"{child.name}.log"
            reason = reason or _reason(log, code, child.begins)
            file = failure_file(self.sweep.folder, child.name)
            atomic_write_json(file, {"code": code, "reason": reason})
        return child, Outcome(child.name, code, time.monotonic() - child.began, reason)

    def _stop(self) -> None:
        """Tell the runs to stop, once more for each further signal, and wait until they have."""
        told = -1
        while self.running:
            if told < len(self.signals):
                told = len(self.signals)
                for pid in self.running:
                    os.kill(pid, signal.SIGTERM)
            if self._next_exit() is None:
                time.sleep(_LOOK)


def _gpu_memory(sweep: Sweep, gpus: Sequence[str]) -> dict[str, _Memory]:
    """Return GPU -> its memory; the only key is empty if all runs use one; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    if gpus:
        numbers = {gpu: number for number, gpu in enumerate(gpus)}
    else:
        kind, _, number = str(sweep.shared.get("DEVICE", "auto")).partition(":")
        numbers = {"": int(number or 0)} if kind in ("auto", "cuda") else {}
    return {gpu: _Memory(partial(_free_on_gpu, number)) for gpu, number in numbers.items()}


def _free_on_gpu(number: int) -> int:
    return torch.cuda.mem_get_info(number)[0]


@contextmanager
def _collected(signals: list[int]) -> Iterator[None]:
    """Append Ctrl-C and SIGTERM to a list instead of ending this process."""

    def collect(number: int, frame: Any) -> None:
        signals.append(number)

    before = {n: signal.signal(n, collect) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reason(log: Path, code: int, begins: int) -> str:
    """Return the message with which a run failed, whose output begins at a byte of the log."""
    with open(log, "rb") as file:
        file.seek(max(begins, log.stat().st_size - _TAIL))
        lines = file.read().decode("utf-8", "replace").splitlines()
    said = [line.removeprefix("ssl_kd: ") for line in lines if line.startswith("ssl_kd: ")]
    last = said[-1:] or [line for line in lines if line.strip()][-1:]
    if code < 0:
        return f"killed by {signal.Signals(-code).name}" + (
            ", which is how Linux ends a process if memory runs out" if code == -9 else ""
        )
    return printable(last[0]) if last else f"exit code {code}"
