"""Prepare the process that `tests.processes` forks others from; to be imported last.

It trains the heads of one tiny run, so that forks find everything imported and the ensemble formed.
"""

import tempfile
from pathlib import Path

from ssl_kd.vision.run import run
from ssl_kd.vision.settings import VisionSettings
from tests.reuse import equal_results_are_reused
from tests.vision.test_ranks import FAST, save_digits

reused = equal_results_are_reused()
reused.__enter__()  # until the process ends

with tempfile.TemporaryDirectory() as folder:
    save_digits(Path(folder))
    folders = {"runs_dir": f"{folder}/runs", "embeddings_dir": f"{folder}/embeddings"}
    run(VisionSettings(**FAST, **folders, dataset=f"{folder}/digits_train.npz"))

import tests.frozen  # noqa: E402, F401
