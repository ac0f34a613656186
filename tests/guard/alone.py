"""The guard with torch and what torch needs, and nothing else: python tests/guard/alone.py FROM

FROM is a folder that holds `ssl_kd`, or a wheel.
"""

import importlib.metadata
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def needed(name, seen):
    """Collect this distribution and all that it needs without extras, by name."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:  # of another platform
        return
    if name in seen:
        return
    seen[name] = found
    for line in found.requires or ():
        if "extra ==" not in line:
            needed(re.match(r"[\w.-]+", line).group(), seen)


def link_torch(folder):
    """Fill a folder with links to torch and to what torch needs, as if nothing else were there."""
    torchs = {}
    needed("torch", torchs)
    for found in torchs.values():
        for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))


def guarded_step(home):
    """Train two parts for a step in which one loss is NaN."""
    import torch

    from ssl_kd import guard as package

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
        sys.path[:0] = [str(home), sys.argv[2]]
        guarded_step(home)
        assert "numpy" not in sys.modules
        print("the guard needs nothing but torch")
    else:
        with tempfile.TemporaryDirectory() as folder:
            link_torch(Path(folder))
            words = [sys.executable, "-I", "-S", __file__, home, folder]
            sys.exit(subprocess.run(words).returncode)
