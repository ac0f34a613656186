"""Free memory and pages of mapped files are returned to the system."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ssl_kd.core.memory import cache_clearing
from ssl_kd.core.runs.loop import run_loop
from tests.core.runs.test_loop import Learner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
RESIDENT = """
import re
from pathlib import Path
import numpy as np
from ssl_kd.core.memory import give_back_memory

def resident():
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\\s+(\\d+)", text)[1]) // 1024

"""
FREED = """
before = resident()
blocks = [bytearray(b"x" * 100_000) for _ in range(2000)]
del blocks[:-1]  # the last one is on top of the heap, which keeps it from shrinking by itself
held = resident() - before
give_back_memory()
print(held, resident() - before)
"""


def test_unused_memory_is_returned(tmp_path):
    path = [str(Path(__file__).parents[2])]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path += {path}\n{RESIDENT}{FREED}"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    held, left = map(int, result.stdout.split())
    assert held > 100 > 50 > left, "MiB before and after"


def test_cached_memory_is_freed_after_each_step_with_a_hint(monkeypatch, caplog):
    caplog.set_level("INFO", "ssl_kd")
    calls = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: calls.append("cuda"))
    monkeypatch.setattr("torch.mps.empty_cache", lambda: calls.append("mps"))
    for device in ("cuda:1", "mps", "cpu"):
        clear = cache_clearing(True, torch.device(device), "a lower BATCH_SIZE")
        assert run_loop(Learner(3), after_step=clear) == 3
    assert calls == ["cuda"] * 3 + ["mps"] * 3
    on_gpu, _, on_cpu = caplog.messages
    assert "a lower BATCH_SIZE" in on_gpu and "expandable_segments:True" in on_gpu
    assert "CLEAR_CACHE_EVERY_STEP has no effect on cpu" in on_cpu
    cache_clearing(False, torch.device("cuda"), "")()
    assert len(calls) == 6 and len(caplog.messages) == 3
