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
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    lock: Lock
    gpu: str | None
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
    memory holds, by the largest run so far. One that fails beside others is tried once more alone.
    A run that another process trains is left to it, and the call returns when that has ended, too.
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
        self.largest = 0  # bytes that a finished run needed
        self.free = 0  # bytes of memory before the first of the runs that are trained now
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
            if waiting and len(self.running) < jobs and self._has_room():
                if self._begin_one(waiting, alone=jobs == 1):
                    continue
                if not self.running:
                    time.sleep(_SECONDS)
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

    def _has_room(self) -> bool:
        """Return whether the memory holds another run of the size of the largest so far.

        Runs that have just begun do not use their memory yet, so what was free before the first of
        them must hold them all. Until a run has ended, its size is unknown, and it is alone.
        """
        free = free_memory(torch.device("cpu"))
        if not self.running:
            self.free = free
            return True
        each = _ROOM * self.largest
        return each > 0 and free > each and self.free > each * (len(self.running) + 1)

    def _begin_one(self, waiting: list[str], alone: bool) -> bool:
        """Take the first run that no other process trains out of `waiting`, and start it.

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
                self._start(name, lock, alone)
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

    def _start(self, name: str, lock: Lock, alone: bool) -> None:
        failure_file(self.sweep.folder, name).unlink(missing_ok=True)
        environment = dict(os.environ)
        for variables in LAUNCHERS.items():  # the run is not a rank of what launched this process
            for variable in variables:
                environment.pop(variable, None)
        gpu = None
        if self.gpus:
            used = [child.gpu for child in self.running.values()]
            gpu = min(self.gpus, key=used.count)
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
        self.largest = max(self.largest, usage.ru_maxrss * unit)
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
