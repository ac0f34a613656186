"""Memory that is free, and pages of mapped files, go back to the system."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
RESIDENT = """
import re
from pathlib import Path
import numpy as np
from ssl_kd.memory import give_back_memory

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


def test_what_is_not_needed_is_given_back(tmp_path):
    path = [str(Path(__file__).parents[1])]
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
