"""Train the runs of a sweep as processes, several at a time if there is memory for them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ssl_kd.core.errors import Interrupted, printable
from ssl_kd.core.files import atomic_write_json
from ssl_kd.core.files.lock import Lock, LockHeld
from ssl_kd.core.memory import free_memory
from ssl_kd.sweep.plan import Sweep, read_object

logger = logging.getLogger(__name__)

LOGS = "logs"
PROGRAM = (sys.executable, "-m", "ssl_kd")
_ROOM = 1.2  # free memory before another run starts, as a multiple of the largest so far
_TAIL = 2000  # bytes of a log in which the reason of a failure is looked for
_LOOK = 0.05  # seconds between two looks at the processes
_SECONDS = 2.0  # between two looks at a run that an earlier sweep still trains


@dataclass
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    gpu: str | None
    alone: bool
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
    A failure is kept as `logs/RUN.failed.json`; what a run prints is in `logs/RUN.log`.

    Args:
        sweep: The plan.
        names: The runs to train, in this order.
        jobs: Largest number of runs at once.
        gpus: Values of CUDA_VISIBLE_DEVICES, one for each run at once; none: that of this process.
        on_end: Called with the outcome of each run.

    Raises:
        Interrupted: Ctrl-C or SIGTERM; the runs were told to stop, and wrote their checkpoints.
    """
    (sweep.folder / LOGS).mkdir(exist_ok=True)
    return _Pool(sweep, jobs, gpus, on_end).run(names)


def is_finished(folder: Path) -> bool:
    """Return whether a run folder is that of a finished run."""
    return (folder / "metrics.json").exists()


def failure_file(sweep_folder: Path, name: str) -> Path:
    """Return the file that says why a run of a sweep failed."""
    return sweep_folder / LOGS / f"{name}.failed.json"


class _Pool:
    """The processes of a sweep."""

    def __init__(
        self,
        sweep: Sweep,
        jobs: int,
        gpus: Sequence[str],
        on_end: Callable[[Outcome], object],
    ) -> None:
        self.sweep, self.jobs, self.on_end = sweep, jobs, on_end
        self.free_gpus = list(gpus)
        self.running: dict[int, _Child] = {}
        self.largest = 0  # bytes that a finished run needed
        self.outcomes: list[Outcome] = []

    def run(self, names: Sequence[str]) -> list[Outcome]:
        seen: set[str] = set()
        first: list[str] = []
        rest: list[str] = []
        for name in names:
            group = self.sweep.groups[name]
            (rest if group in seen else first).append(name)
            seen.add(group)
        with _signals_to(self.running):
            self._train(first, jobs=1)
            again = self._train(rest, jobs=self.jobs)
            self._train(again, jobs=1)
        return self.outcomes

    def _train(self, names: Sequence[str], jobs: int) -> list[str]:
        """Train runs, at most `jobs` at once; return those that failed beside others."""
        waiting = [n for n in names if not is_finished(self.sweep.folder / n)]
        again: list[str] = []
        while waiting or self.running:
            while waiting and len(self.running) < jobs and self._has_room():
                name = waiting.pop(0)
                _wait_for(self.sweep.folder / name)
                if is_finished(self.sweep.folder / name):
                    self._keep(Outcome(name, 0, 0.0))
                else:
                    self._start(name, alone=jobs == 1)
            if not self.running:
                continue
            child, outcome = self._wait()
            if outcome.code and not child.alone:
                again.append(child.name)
                continue
            self._keep(outcome)
        return again

    def _keep(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.on_end(outcome)

    def _has_room(self) -> bool:
        """Return whether the free memory holds another run, as far as that is known."""
        if not self.running:
            return True
        return free_memory(torch.device("cpu")) > _ROOM * self.largest

    def _start(self, name: str, alone: bool) -> None:
        failure_file(self.sweep.folder, name).unlink(missing_ok=True)
        gpu = self.free_gpus.pop(0) if self.free_gpus else None
        environment = dict(os.environ)
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[variable] = str(self.sweep.threads)
        log = self.sweep.folder / LOGS / f"{name}.log"
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [*PROGRAM, *self.sweep.arguments(name)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches it through this process alone
            )
        self.running[process.pid] = _Child(name, process, gpu, alone)

    def _wait(self) -> tuple[_Child, Outcome]:
        """Wait for the next run to end."""
        child, status, usage = self._next_exit()
        del self.running[child.process.pid]
        child.process.returncode = code = os.waitstatus_to_exitcode(status)
        if child.gpu is not None:
            self.free_gpus.append(child.gpu)
        unit = 1 if sys.platform == "darwin" else 1024
        self.largest = max(self.largest, usage.ru_maxrss * unit)
        reason = ""
        if code == 0 and not is_finished(self.sweep.folder / child.name):
            code, reason = 1, "it ended without results"
        if code:
            reason = reason or _reason(self.sweep.folder / LOGS / f"{child.name}.log", code)
            file = failure_file(self.sweep.folder, child.name)
            atomic_write_json(file, {"code": code, "reason": reason})
        return child, Outcome(child.name, code, time.monotonic() - child.began, reason)

    def _next_exit(self) -> tuple[_Child, int, Any]:
        """Return the next run to end, with its exit status and what it used."""
        while True:
            for child in self.running.values():
                pid, status, usage = os.wait4(child.process.pid, os.WNOHANG)
                if pid:
                    return child, status, usage
            time.sleep(_LOOK)


@contextmanager
def _signals_to(running: dict[int, _Child]) -> Iterator[None]:
    """Tell the processes to stop on Ctrl-C and SIGTERM, wait for them, and raise Interrupted."""

    def stop(number: int, frame: Any) -> None:
        raise _Stop(number)

    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except _Stop as error:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        for child in running.values():
            child.process.terminate()
        for child in running.values():
            child.process.wait()
        raise Interrupted(error.number, None) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Stop(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _wait_for(folder: Path) -> None:
    """Wait for a process of an earlier sweep that still trains this run."""
    if not folder.exists():
        return
    said = False
    while True:
        try:
            with Lock(folder / ".lock"):
                return
        except LockHeld as error:
            if not said:
                logger.info("%s: %s", folder.name, error)
                said = True
            time.sleep(_SECONDS)


def _reason(log: Path, code: int) -> str:
    """Return the message with which a run failed."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        lines = file.read().decode("utf-8", "replace").splitlines()
    said = [line.removeprefix("ssl_kd: ") for line in lines if line.startswith("ssl_kd: ")]
    last = said[-1:] or [line for line in lines if line.strip()][-1:]
    if code < 0:
        return f"killed by {signal.Signals(-code).name}" + (
            ", which is how Linux ends a process if memory runs out" if code == -9 else ""
        )
    return printable(last[0]) if last else f"exit code {code}"


def read_failure(sweep_folder: Path, name: str) -> tuple[int, str] | None:
    """Return exit code and reason of a run that failed; None if it did not."""
    file = failure_file(sweep_folder, name)
    if not file.exists():
        return None
    failure = read_object(file)
    return failure["code"], failure["reason"]
