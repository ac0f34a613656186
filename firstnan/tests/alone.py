"""Run the guard with torch and its dependencies only: python firstnan/tests/alone.py FROM.

FROM is the folder that contains `firstnan`.
"""

import contextlib
import importlib.metadata
import io
import math
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """import torch

class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).softmax(1).log()[:, 0]

model = Model(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 1e30)
for step in range(9):
    model(torch.ones(4, 3)).mean().backward()
    optimizer.step()
"""


def collect(name, distributions):
    """Collect a distribution and its requirements without extras, by name."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:  # for another platform
        return
    if name in distributions:
        return
    distributions[name] = distribution
    for line in distribution.requires or ():
        if "extra ==" not in line:
            collect(re.match(r"[\w.-]+", line).group(), distributions)


def link_torch(folder):
    """Link torch and its dependencies into a folder."""
    distributions = {}
    collect("torch", distributions)
    for distribution in distributions.values():
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))


def guarded_step(home):
    """Train two parts for one step in which one loss is NaN."""
    import torch

    import firstnan as package

    assert Path(package.__file__).is_relative_to(home), package.__file__
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2) for name in ("left", "right")})
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    x = torch.randn(4, 3)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "events.jsonl"
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        guard = package.Guard(model, optimizer, dict(model.items()), events=log)
        losses = {name: head(x).square().mean() for name, head in model.items()}
        guard.backward(losses | {"left": losses["left"] * math.nan})
        guard.step()
        assert '"left"' in log.read_text(), log.read_text()
    now = model.state_dict()
    changed = {name for name in now if not torch.equal(now[name], before[name])}
    assert changed == {"right.weight", "right.bias"}, changed


def watched_script():
    """Run `python -m firstnan` on a script whose loss becomes infinite."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        sys.argv[1:] = [str(script)]
        try:
            with contextlib.redirect_stderr(said):
                runpy.run_module("firstnan", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            assert end.code == 3, said.getvalue()
    for found in ("aten.log", "train.py:5", "learning rate too high"):
        assert found in said.getvalue(), said.getvalue()


if __name__ == "__main__":
    home = Path(sys.argv[1]).resolve()
    if sys.flags.no_site:
        sys.path[:0] = [str(home), sys.argv[2]]
        guarded_step(home)
        watched_script()
        assert "numpy" not in sys.modules
        print("the guard needs nothing but torch")
    else:
        with tempfile.TemporaryDirectory() as folder:
            link_torch(Path(folder))
            command = [sys.executable, "-I", "-S", __file__, home, folder]
            sys.exit(subprocess.run(command).returncode)
