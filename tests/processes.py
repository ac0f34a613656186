"""Other processes for tests: forks of one that has imported everything and has no threads."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
HANG = 20 * 60
"""Seconds after which a process of a test hangs; far more than any needs on any machine."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(  # whatever of this is missing is left out
    [
        "ssl_kd.cli",
        "tests.faults.inject",
        "tests.faults.inject_language",
        "transformers.models.llama.modeling_llama",
        "transformers.models.mixtral.modeling_mixtral",
        "transformers.trainer",
        "accelerate",
        "hypothesis",
        "tests.frozen",
    ]
)


def start(target: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Start a process with one thread for products; it ends with this one at the latest.

    Args:
        target: a function of a module.
        arguments: of it; what `multiprocessing` can send, such as a `pipe`'s end.
    """
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)):
        forkserver.ensure_running()
    process = _context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def pipe() -> Any:
    """Two connected ends: one to keep, one for the other process."""
    return _context.Pipe()


def answer(target: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in another process.

    Raises:
        AssertionError: it failed, with its traceback, or hangs.
    """
    mine, theirs = pipe()
    process = start(_answer, theirs, target, arguments)
    theirs.close()
    assert mine.poll(HANG), f"{target.__name__} hangs"
    try:
        done, told = mine.recv()
    except EOFError:
        process.join(HANG)
        raise AssertionError(f"{target.__name__} died: {process.exitcode}") from None
    process.join(HANG)
    assert done, told
    return told


def _answer(pipe: Any, target: Callable[..., Any], arguments: tuple) -> None:
    try:
        pipe.send((True, target(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
