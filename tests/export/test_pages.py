"""The pages about names and exports: each block runs as it stands, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["names", "export"])
def test_every_block_runs(page, tmp_path):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert len(blocks) > 3
    lines = ["import subprocess"]  # the blocks of Python are one session
    for kind, code in blocks:
        if kind == "python":
            lines.append(code)
        for line in code.splitlines() if kind == "bash" else ():
            words = [sys.executable, "-m", *line.split()]
            lines.append(f"subprocess.run({words!r}, check=True)")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
