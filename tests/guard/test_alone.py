"""Who wants the guard has torch already, and needs nothing more."""

import subprocess
import sys

from tests.processes import HANG, ROOT


def test_a_guarded_step_needs_nothing_but_torch(tmp_path):
    ran = subprocess.run(
        [sys.executable, ROOT / "tests/guard/alone.py", ROOT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
