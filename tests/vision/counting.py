"""A teacher of a user's own for jobs in other processes: it leaves a line for each batch."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import torch

from ssl_kd.teachers import Teacher

SHARD = 64
"""Rows of a shard; a batch of the teacher, too."""


class Counting(Teacher):
    """Mean and spread of an image.

    `told` is a folder, named by the environment: each batch leaves a file there with the images'
    sum; a file `sick`, `deadly` or `stopped` in it holds the sum of the batch that is to fail, or
    where Ctrl-C comes; with a file `slow` each takes a second.
    """

    dim = 2
    name = "tests.vision.counting.Counting"
    transform_id = "as it is"

    def __init__(self):
        self.told = Path(os.environ["COUNTING"])

    def preprocess(self, image):
        return torch.from_numpy(np.array(image.convert("L"))[None])

    def embed(self, batch):
        key = str(int(batch.sum()))
        with open(self.told / "batches", "a") as file:
            file.write(f"{os.getpid()} {key}\n")
        signals = {"sick": None, "deadly": signal.SIGKILL, "stopped": signal.SIGINT}
        for fault, number in signals.items():
            if (self.told / fault).exists() and key in (self.told / fault).read_text().split():
                if number is not None:
                    os.kill(os.getpid(), number)
                raise RuntimeError("this teacher cannot")
        if (self.told / "slow").exists():
            time.sleep(1)
        x = batch.flatten(1).float()
        return torch.stack([x.mean(1), x.std(1)], 1)
