"""Several ranks on this machine: real processes that talk by gloo, each with a rank's work."""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ssl_kd.guard import Guard
from tests.processes import pipe, start

NAN, INF = float("nan"), float("inf")
TIMEOUT = 60.0
"""Seconds that a rank waits for the others; a test that needs them all has failed."""
in_pieces = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="before torch 2.7 FSDP2 asks the CPU for streams",
)


def run_ranks(
    work: Callable[..., Any], world: int, *words: Any, timeout: float = TIMEOUT
) -> list[Any]:
    """What each rank's `work(rank, *words)` returns; an exception is returned, too.

    Args:
        work: a function of a module; `torch.distributed` is initialised around it.
        world: how many ranks.
        words: further arguments.
        timeout: of the process group, in seconds.

    Returns:
        Rank -> what came of it: a value, the text of an exception, None where the process died.
    """
    with tempfile.TemporaryDirectory() as folder:
        ends, ranks = [], []
        for rank in range(world):
            mine, theirs = pipe()
            where = str(Path(folder) / "store")
            ranks.append(start(_rank, theirs, where, rank, world, timeout, work, words))
            theirs.close()
            ends.append(mine)
        told = [_received(end, f"rank {rank} of {work.__name__}") for rank, end in enumerate(ends)]
        for process in ranks:
            process.join(TIMEOUT)
        return told


def run_joined(work: Callable[..., Any], world: int, *words: Any) -> list[Any]:
    """As `run_ranks`, of processes with torchrun's variables that have joined no group yet."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ends = []
    for rank in range(world):
        mine, theirs = pipe()
        told = {"WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
        told |= {"MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": "lo"}
        variables = {name: str(value) for name, value in told.items()}
        start(_joined, theirs, variables, work, (rank, *words))
        theirs.close()
        ends.append(mine)
    return [_received(end, f"rank {rank} of {work.__name__}") for rank, end in enumerate(ends)]


def _received(end: Any, who: str) -> Any:
    assert end.poll(3 * TIMEOUT), f"{who} hangs"
    try:
        return end.recv()
    except EOFError:
        return None


def as_torchrun(rank: int, world: int) -> None:
    """Set what torchrun sets, in a process that is in a group already."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": 0}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(v) for name, v in told.items()}


def _joined(end: Any, variables: dict[str, str], work: Callable, words: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(variables)
    try:
        end.send(work(*words))
    except BaseException as error:
        end.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    end.close()
    os._exit(0)


def _rank(
    end: Any, store: str, rank: int, world: int, timeout: float, work: Callable, words: tuple
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    try:
        end.send(work(rank, *words))
    except BaseException as error:
        end.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    end.close()
    os._exit(0)  # a group whose rank died cannot be taken down


class TwoHeads(nn.Module):
    """A trunk with a head for each of two loss terms, so that one term's weights are its own."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        features = self.trunk(x).tanh()
        return features, self.a(features), self.b(features)


def batch(rank, step):
    """Inputs and targets of a rank in a step."""
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=g), torch.randn(4, 2, generator=g)


def losses_of(outputs, y, bad=()):
    """The tensor that both loss terms come from, and the terms; those in `bad` are NaN."""
    features, a, b = outputs
    losses = {"a": (a - y).square().mean(), "b": (b + y).abs().mean()}
    return features, {k: x * NAN if k in bad else x for k, x in losses.items()}


def build(**options):
    """A model that is the same on every rank, in DDP, its optimizer and its guard."""
    torch.manual_seed(0)
    model = TwoHeads()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return model, ddp, optimizer, Guard(ddp, optimizer, **options)


def seen(model, optimizer, guard):
    """All that has to be the same on every rank."""
    state = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    health = {name: term.tensors() for name, term in guard.terms.items()}
    return {
        "weights": [p.detach().numpy().tobytes() for p in model.parameters()],
        "state": [v.numpy().tobytes() for v in state],
        "events": [event.line() for event in guard.events.events],
        "health": repr((guard.health.tensors(), guard.updates, guard.recovery.tensors(), health)),
        "words": (guard.summary(), guard.diagnosis(), guard.steps),
    }


def agreed(told):
    """What the ranks told, which is the same of all."""
    for rank, one in enumerate(told):
        assert isinstance(one, dict), f"rank {rank}: {one}"
        for key, value in one.items():
            assert value == told[0][key], (rank, key)
    return told[0]


def reasons(one):
    """All events of what `seen` gave, as one text."""
    return "\n".join(one["events"])


class Spoil(torch.autograd.Function):
    """The identity, with a gradient that is infinite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * INF
