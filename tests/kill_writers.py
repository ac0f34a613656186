"""Kill jobs that write files at random positions of their work; no clock is involved.

A position is the number of changes to files so far: opened for writing, renamed or removed. The
process is killed with SIGKILL before such a change, or by the kernel in the middle of a write.
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
    """Result of `kill_again_and_again`.

    Attributes:
        straight: folder of the job that was never killed.
        folders: folders of the jobs that were killed repeatedly before they finished.
        kills: number of kills.
        resumed: number of starts that found finished work of an earlier start.
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
    """Kill a job and start it again, until there were enough kills and the job has ended.

    The job runs in forks of a process without threads. Finished work must survive each kill.

    Args:
        job: `job(folder, *words)` at the top level of a module; resumes the work in the folder.
        finished: `finished(folder)` returns the set of finished items, which must only grow.
        folder: where the jobs' folders are created.
        words: further arguments of the job.
        kills: number of kills, at positions drawn from the first half of the work.
    """
    return answer(_kill, job, finished, folder, words, kills)


def on_change(callback: Callable[[int, str, bool], object], folder: str | Path) -> None:
    """Call `callback(position, path, written)` before each change of a file in a folder.

    Args:
        callback: called with the number of changes so far, the path of the file, and whether it is
            opened for writing.
        folder: changes elsewhere are ignored.
    """
    below, position = str(folder), 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal position
        if event not in _CHANGES or not isinstance(arguments[0], str | os.PathLike):
            return
        path, opened = os.fspath(arguments[0]), event == "open"
        if str(path).startswith(below) and (not opened or arguments[2] & _TO_WRITE):
            position += 1
            callback(position, str(path), opened)

    sys.addaudithook(hook)


def _work(job: Callable, folder: Path, words: tuple, at: int, size: int | None) -> None:
    """Run the job; kill it before change `at`, or once it has then written `size` bytes."""

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
    result = Killed(root / "straight", [], 0, 0)
    while result.kills < n:
        place, known, ended = root / str(len(result.folders)), set(), False
        result.folders.append(place)
        while not ended:
            at = draw.randint(1, changes // 2) if result.kills < n else 0
            size = draw.choice([None, draw.randint(1, 4000)])
            child = os.fork()
            if child == 0:
                _work(job, place, words, at, size)
            status = os.waitpid(child, 0)[1]
            result.resumed += bool(known)
            now = finished(place)
            assert known <= now, f"lost by a kill at change {at} ({size}): {known - now}"
            ended, known = status == 0, now
            assert ended or os.WIFSIGNALED(status) and os.WTERMSIG(status) in _DEATHS, status
            result.kills += not ended
    return result
