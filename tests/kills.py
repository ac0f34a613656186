"""Real kills of jobs that write files, at a position in the work: no test here looks at a clock.

A position is a count of changes to files: how often a file was opened to be written, renamed or
removed. A process is killed (-9) before such a change, or by the kernel in the middle of what it
writes then. The machine may be as slow as it likes.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import answer

_DEATHS = {signal.SIGKILL, signal.SIGXFSZ}
_CHANGES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link"}
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass
class Killed:
    """What came of `kill_again_and_again`.

    Attributes:
        straight: the folder of the job that was left alone.
        folders: those of the jobs that were killed again and again, and then finished.
        kills: how many there were.
        resumed: how often a job began with something that one before it had finished.
    """

    straight: Path
    folders: list[Path]
    kills: int
    resumed: int


def kill_again_and_again(
    job: Callable[..., object],
    finished: Callable[[Path], set],
    folder: Path,
    *words: Any,
    kills: int,
) -> Killed:
    """Let a job be killed and begun again until it was killed often enough and has ended.

    It runs in forks of a process of its own, which has no threads. What is finished must outlive
    every kill.

    Args:
        job: `job(folder, *words)` of a test module: begins, goes on, and ends in that folder.
        finished: `finished(folder)` is a set that never loses a member.
        folder: where the jobs' folders are made.
        words: further arguments of the job.
        kills: how many, at positions drawn from the first half of the whole work.
    """
    return answer(_kill, job, finished, folder, words, kills)


def on_change(tell: Callable[[int, str, bool], object], folder: str | Path) -> None:
    """Call `tell(position, path, written)` before every change below a folder, for good.

    Args:
        tell: gets the count of changes, the file's path, and whether it is opened to be written.
        folder: changes elsewhere do not count.
    """
    below, position = str(folder), 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal position
        if event not in _CHANGES or not isinstance(arguments[0], str | os.PathLike):
            return
        path, opened = os.fspath(arguments[0]), event == "open"
        if str(path).startswith(below) and (not opened or arguments[2] & _TO_WRITE):
            position += 1
            tell(position, str(path), opened)

    sys.addaudithook(hook)


def _work(job: Callable, folder: Path, words: tuple, at: int, size: int | None) -> None:
    """The job, killed before its change number `at`, or when it then has written `size` bytes."""

    def die(position: int, path: str, written: bool) -> None:
        if position == at and (size is None or not written):
            os.kill(os.getpid(), signal.SIGKILL)
        elif position == at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    on_change(die, folder)
    try:
        job(folder, *words)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _kill(job: Callable, finished: Callable, root: Path, words: tuple, n: int) -> Killed:
    draw, changes = random.Random(0), 0

    def count(position: int, path: str, written: bool) -> None:
        nonlocal changes
        changes = position

    on_change(count, root / "straight")
    job(root / "straight", *words)
    found = Killed(root / "straight", [], 0, 0)
    while found.kills < n:
        place, known, ended = root / str(len(found.folders)), set(), False
        found.folders.append(place)
        while not ended:
            at = draw.randint(1, changes // 2) if found.kills < n else 0
            size = draw.choice([None, draw.randint(1, 4000)])
            child = os.fork()
            if child == 0:
                _work(job, place, words, at, size)
            status = os.waitpid(child, 0)[1]
            found.resumed += bool(known)
            now = finished(place)
            assert known <= now, f"lost by a kill at change {at} ({size}): {known - now}"
            ended, known = status == 0, now
            assert ended or os.WIFSIGNALED(status) and os.WTERMSIG(status) in _DEATHS, status
            found.kills += not ended
    return found
