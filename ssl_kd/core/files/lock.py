"""Lock a file, so that only one process writes at a time."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from ssl_kd.core.errors import UserError


class LockHeld(UserError, RuntimeError):
    """Raised if another writer holds the lock."""


class Lock:
    """A context manager that holds a lock, which the system releases if the process dies.

    The lock excludes other processes and other threads; LockHeld is raised after `wait` seconds.
    The file contains the process id of the holder, and is not removed when the lock is released.
    Whether other machines see the lock depends on the network file system.
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
                f"process {holder or 'unknown'} holds {self.path}, and only one writer is allowed: "
                "wait until that process has finished, or stop it"
            ) from error
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


def _write_process_id(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
