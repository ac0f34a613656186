"""Random numbers that depend on a key and on nothing else: neither on the clock nor on a resume."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


def seed_of(*key: int) -> int:
    """A seed for whatever the whole numbers of `key` name, `seed_of(seed, step)`: 0 to 2**63 - 1.

    The same on every machine and in every process: Python randomises the hashes of strings alone.
    """
    return hash(key) & (2**63 - 1)


@contextlib.contextmanager
def seeded(seed: int, devices: Iterable[torch.device | int] = ()) -> Iterator[None]:
    """Draw by `seed` inside; outside, torch's global generators go on as if nothing had been drawn.

    Args:
        seed: 0 to 2**64 - 1.
        devices: GPUs that draw by it, too; the generators of others are not touched.
    """
    devices = list(devices)
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
