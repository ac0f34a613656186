"""One writer at a time; its death frees the lock, even if its children live on."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ssl_kd.core.files.lock import Lock, LockHeld


def test_one_holder_at_a_time_in_one_process(tmp_path):
    with Lock(tmp_path / "lock"):
        with pytest.raises(LockHeld, match=f"process {os.getpid()} holds .*lock"):
            Lock(tmp_path / "lock").__enter__()
    with Lock(tmp_path / "lock"):
        pass


HOLD_AND_FORK = """
import os, sys, warnings
from ssl_kd.core.files.lock import Lock
warnings.simplefilter("ignore")  # fork next to threads
with Lock(sys.argv[1]):
    if os.fork() == 0:  # a data-loading worker
        os.write(1, b"held\\n")
        os.read(0, 1)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_another_process_is_named_and_its_death_frees_the_lock(tmp_path):
    path = tmp_path / "lock"
    words = [sys.executable, "-c", HOLD_AND_FORK, str(path)]
    pipe, root = subprocess.PIPE, Path(__file__).parents[3]
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, cwd=root) as parent:
        assert parent.stdout and parent.stdout.readline() == b"held\n"
        with pytest.raises(LockHeld, match=f"process {parent.pid} "):
            Lock(path).__enter__()
        parent.kill()
        parent.wait()
        with Lock(path):  # although the child process is still alive
            assert path.read_text() == str(os.getpid())


@pytest.mark.skipif(os.name == "nt", reason="needs flock")
def test_a_file_system_without_locks_is_an_error(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match="not implemented"):
        Lock(tmp_path / "lock").__enter__()
