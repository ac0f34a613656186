"""Draw random numbers that depend only on a key, so that a resumed run draws the same ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def seed_of(*key: int) -> int:
    """Return a seed from 0 to 2**63 - 1 for a key of integers, such as `seed_of(seed, step)`.

    The seed is the same in every process: Python randomizes only the hashes of strings.
    """
    return hash(key) & (2**63 - 1)


@contextlib.contextmanager
def seeded(seed: int, devices: Iterable[torch.device | int] = ()) -> Iterator[None]:
    """Seed torch's global generators, of the CPU and of GPU `devices`, inside the block."""
    devices = list(devices)
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class drawing(TorchDispatchMode):
    """Make operations on the CPU in this thread draw from a separate generator with `seed`.

    Draws the same numbers as `seeded`, without touching the global generator that all threads
    share. Each operation inside costs some microseconds more, and compiled functions cannot run.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first operation, for 3 seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator"):
            return func(*args, **kwargs)
        where = args[0].device if args and isinstance(args[0], torch.Tensor) else None
        if torch.device(where or kwargs.get("device") or "cpu").type != "cpu":
            return func(*args, **kwargs)
        if not any(argument.name == "generator" for argument in func._schema.arguments):
            name = func._overloadname.removesuffix("default")
            func = getattr(func.overloadpacket, f"{name}_generator".lstrip("_"))
        return func(*args, **kwargs, generator=self._generator)
