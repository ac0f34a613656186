"""One writer at a time: a lock between processes on a file."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from ssl_kd.errors import UserError


class LockHeld(UserError, RuntimeError):
    """Another writer is at work on the same files."""


class Lock:
    """A lock between processes (and within one) that a killed holder cannot leave behind.

    A context manager. The file at `path` holds the process id of the holder and stays when the
    lock is released; only the lock on it counts.

    Args:
        path: the file; on a network file system it holds between machines as far as that has locks.
        wait: seconds to wait for another holder.

    Raises:
        LockHeld: on entering, when another holder has it so long; the message names its process.
        OSError: the file cannot be opened, or its file system has no locks.
    """

    def __init__(self, path: str | Path, wait: float = 0):
        self.path = Path(path)
        self._lock = FileLock(
            self.path,
            timeout=wait,
            thread_local=False,  # another thread may release it
            preserve_lock_file=True,
            on_acquired=_write_process_id,
        )

    def __enter__(self) -> Lock:
        try:
            self._lock.acquire()
        except Timeout as error:
            try:
                holder = self.path.read_text(encoding="ascii", errors="replace").strip()
            except OSError:  # on Windows no other process can read a locked file
                holder = ""
            raise LockHeld(
                f"process {holder or 'unknown'} holds {self.path}: one writer at a time. "
                "Wait until it has finished, or stop it."
            ) from error
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


def _write_process_id(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
