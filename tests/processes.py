"""Processes for tests, forked from a server that has imported everything and has no threads."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import secrets
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "explore")])
HANG = 20 * 60
"""Seconds after which a process counts as hung; far more than any test needs."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(  # modules that are not installed are skipped
    [
        "ssl_kd.cli",
        "tests.faults.inject",
        "tests.faults.inject_language",
        "transformers.models.llama.modeling_llama",
        "transformers.models.mixtral.modeling_mixtral",
        "transformers.trainer",
        "accelerate",
        "hypothesis",
        "faiss",
        "scipy.cluster.hierarchy",
        "sklearn.cluster",
        "sklearn.manifold",
        "torch.utils.tensorboard",
        "tests.forked",
    ]
)


def start(target: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Start a daemon process with one thread.

    Args:
        target: a function at the top level of a module.
        arguments: picklable arguments of `target`, or ends of a `pipe`.
    """
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=PYTHONPATH):
        forkserver.ensure_running()
    process = _context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def python(folder: Path, *words: str, **options: Any) -> subprocess.CompletedProcess:
    """Run Python in a folder, and return its exit code and its output (bytes unless `text`).

    Args:
        folder: the working directory.
        words: the command line after `python`.
        options: of `subprocess.run`; `env` is complemented by the path of this repository.
    """
    env = {**os.environ, **options.pop("env", {}), "PYTHONPATH": PYTHONPATH}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, **streams)


def script(folder: Path, *words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a Python script in a folder as `python` does, forked with its imports done.

    Args:
        folder: the working directory.
        words: the script's path and its arguments.
        env: all environment variables.
    """
    with tempfile.TemporaryDirectory() as outputs:
        files = [Path(outputs) / "stdout", Path(outputs) / "stderr"]
        process = start(_run_script, folder, words, env, files)
        process.join(HANG)
        assert process.exitcode is not None, f"{words} hangs"
        stdout, stderr = (file.read_text(encoding="utf-8") for file in files)
        return subprocess.CompletedProcess(words, process.exitcode, stdout, stderr)


def _run_script(folder: Path, words: tuple, env: dict[str, str], outputs: list[Path]) -> None:
    for descriptor, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.orig_argv, sys.argv = [sys.executable, *words], list(words)
    sys.path.insert(0, str(Path(words[0]).parent.resolve()))
    runpy.run_path(words[0], run_name="__main__")


def free_port() -> int:
    """Return a free port; no system gives it to another program meanwhile, as it does above."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)  # each test seeds `random` with the same number
        with socket.socket() as unused, suppress(OSError):
            unused.bind(("", port))
            return port


def pipe() -> Any:
    """Return two connected ends: one to keep, one for the other process."""
    return _context.Pipe()


def answer(target: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in another process, and return its value.

    Raises:
        AssertionError: the function raised (with its traceback), or hangs.
    """
    mine, theirs = pipe()
    process = start(_answer, theirs, target, arguments)
    theirs.close()
    assert mine.poll(HANG), f"{target.__name__} hangs"
    try:
        succeeded, value = mine.recv()
    except EOFError:
        process.join(HANG)
        raise AssertionError(f"{target.__name__} died: {process.exitcode}") from None
    process.join(HANG)
    assert succeeded, value
    return value


def _answer(pipe: Any, target: Callable[..., Any], arguments: tuple) -> None:
    try:
        pipe.send((True, target(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
