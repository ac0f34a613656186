"""Memory that is free goes back to the system."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import re
from pathlib import Path
from ssl_kd.guard.memory import give_back_memory

def own():
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+)", text)[1]) // 1024

before = own()
blocks = [bytearray(b"x" * 100_000) for _ in range(2000)]
del blocks[:-1]  # the last one is on top of the heap, which keeps it from shrinking by itself
kept = own() - before
give_back_memory()
print(kept, own() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_free_in_the_heap_is_given_back():
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr
    found = re.findall(r"-?\d+", result.stdout)
    kept, left = map(int, found)
    assert kept > 100 > 50 > left, "MiB after the blocks were freed, and after they were given back"
