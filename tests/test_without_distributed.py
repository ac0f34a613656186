"""Training with a torch that was built without `torch.distributed`, as some for Windows."""

import json
import os
import subprocess
import sys

import numpy as np

from tests.processes import HANG, ROOT

BUILT_WITHOUT = """
import sys

class Without:
    # torch checks these names of its extension when it imports the package.
    NAMES = ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init")

    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":
            for name in self.NAMES:
                if hasattr(sys.modules["torch._C"], name):
                    delattr(sys.modules["torch._C"], name)

sys.meta_path.insert(0, Without())
import torch
import torch.distributed as dist

assert not dist.is_available() and not hasattr(dist, "TCPStore")
"""

TRAINS = """
from firstnan import Guard

model = torch.nn.Linear(3, 2)
guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1))
for x in (torch.ones(4, 3), torch.full((4, 3), float("nan"))):
    guard.backward(model(x).square().mean())
    guard.step()
assert int(guard.updates[0]) == 1 and all(p.isfinite().all() for p in model.parameters())

from ssl_kd.language.run import run as distill  # all that it imports
from ssl_kd.vision.run import run
from ssl_kd.vision.settings import VisionSettings

settings = {"dataset": sys.argv[1] + "/few.npy", "n_clusters": 3, "device": "cpu"}
settings |= {"method": "heads", "n_heads": 2, "max_steps": 3}
folders = {"runs_dir": sys.argv[1] + "/runs", "embeddings_dir": sys.argv[1] + "/embeddings"}
run(VisionSettings(**settings, **folders, run_name="a"))

import os
from ssl_kd import cli

os.environ |= {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
print("alone: done", file=sys.stderr)
sys.exit(cli.main(["train", "--runs_dir", sys.argv[1] + "/more"]))
"""


def test_one_process_trains_without_it_and_several_are_refused_in_a_line(tmp_path):
    np.save(tmp_path / "few.npy", np.random.default_rng(0).random((64, 5), np.float32))
    known = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", BUILT_WITHOUT + TRAINS, str(tmp_path)],
        env=known | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    _, alone, refusal = done.stderr.partition("alone: done\n")
    assert alone, done.stderr
    metrics = json.loads((tmp_path / "runs" / "a" / "metrics.json").read_text())
    assert metrics["steps"] == 3 and metrics["success_rate"] == 1
    assert done.returncode == 2 and len(refusal.splitlines()) == 1, done.stderr
    assert "was built without torch.distributed" in refusal
    assert not (tmp_path / "more").exists()
