"""Stands in for `python -m ssl_kd`: writes the files of a finished run, without training."""

import json
import os
import sys
import time
from pathlib import Path

words = sys.argv[1:]
values = {
    word.removeprefix("--"): words[i + 1] for i, word in enumerate(words[:-1]) if word[:2] == "--"
}
values |= dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
folder = Path(values["runs_dir"]) / values["run_name"]
folder.mkdir(exist_ok=True)
beta, seed = float(values.get("beta", 0.9)), int(values.get("seed", 0))
with open(folder.parent / "order.txt", "a") as order:
    order.write(f"{folder.name} {'--resume' in words}\n")
if beta == 0.9:  # the cause of a failure can be taken away
    if not (folder.parent / "mended").exists():
        print("ssl_kd: the reason of the failure", file=sys.stderr)
        raise SystemExit(3)
settings = {"BETA": beta, "SEED": seed, "RUN_NAME": folder.name}
(folder / "config.json").write_text(
    json.dumps({"settings": settings, "commit": "abc", "command": " ".join(words)})
)
if beta == 0.7:  # begun, and then slow
    (folder / "began").write_text(str(os.getpid()))
    time.sleep(60 if "--resume" not in words else 0)
(folder / "environment.json").write_text(json.dumps(dict(os.environ)))
losses = [{"step": step, "loss": [beta, seed + 1 / step]} for step in (10, 20)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))
(folder / "report.html").write_text("<p><!-- the sweep --><!-- end of the sweep --></p>")
row = {"name": "consensus", "split": "test", "acc": 0.5 + beta / 10 + seed / 100}
metrics = {"table": [row], "heads": [], "events": 0, "seconds": {"total": 1.0}}
(folder / "metrics.json").write_text(json.dumps(metrics))
