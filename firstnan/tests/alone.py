"""Run the guard with torch and its dependencies only: python alone.py FROM [python arguments].

FROM is the folder that contains `firstnan`. Without words, one guarded step is taken.
"""

import importlib.metadata
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


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


def link(distributions, folder):
    """Link the packages of distributions, with their metadata, into a folder."""
    for distribution in distributions:
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


if __name__ == "__main__":
    home = Path(sys.argv[1]).resolve()
    if sys.flags.no_site:
        guarded_step(home)
        assert "numpy" not in sys.modules
        print("the guard needs nothing but torch")
    else:
        with tempfile.TemporaryDirectory() as folder:
            distributions = {}
            collect("torch", distributions)
            link(distributions.values(), Path(folder))
            path = {"PYTHONPATH": os.pathsep.join([str(home), folder])}
            command = [sys.executable, "-S", *(sys.argv[2:] or [__file__, home])]
            sys.exit(subprocess.run(command, env=os.environ | path).returncode)
