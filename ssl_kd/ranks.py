"""Processes that were started together: refused, until training is distributed."""

from __future__ import annotations

import os

from ssl_kd.errors import InputError


def refuse_ranks() -> None:
    """Let no process train that `torchrun` or `accelerate` started as one of several.

    Each would train a model of its own in a folder of its own, and none would tell.

    Raises:
        InputError: WORLD_SIZE is above 1; the message names this process's rank.
    """
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1:
        raise InputError(
            f"This is rank {os.environ.get('RANK', 'unknown')} of {size} (WORLD_SIZE), but one"
            " process trains on one device: each would train a model of its own. Start it with"
            " python, not torchrun; for several GPUs one run for each, --device cuda:0, cuda:1 ..."
        )
