"""Several ranks on this machine: real processes that communicate over gloo."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from firstnan import Guard
from tests.processes import HANG, free_port, pipe, start

NAN, INF = float("nan"), float("inf")
TIMEOUT = 300.0
"""Timeout of the process group in seconds."""
in_pieces = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="before torch 2.7, FSDP2 needs streams on the CPU",
)


def run_ranks(work: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """Call `work(rank, *arguments)` in each rank of a process group.

    Args:
        work: a function at the top level of a module.
        world: number of ranks.
        arguments: further arguments of `work`.

    Returns:
        For each rank the value, the text of the exception, or None where the process died.
    """
    with tempfile.TemporaryDirectory() as folder:
        ends, ranks = [], []
        for rank in range(world):
            mine, theirs = pipe()
            store = str(Path(folder) / "store")
            ranks.append(start(_rank, theirs, store, rank, world, work, arguments))
            theirs.close()
            ends.append(mine)
        values = [_receive(end, f"rank {rank} of {work.__name__}") for rank, end in enumerate(ends)]
        for process in ranks:
            process.join(HANG)
        return values


def run_joined(work: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """Do the same as `run_ranks`, with torchrun's variables and no process group yet."""
    port, ends = free_port(), []
    for rank in range(world):
        mine, theirs = pipe()
        values = {"WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
        values |= {"MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": "lo"}
        variables = {name: str(value) for name, value in values.items()}
        start(_joined, theirs, variables, work, (rank, *arguments))
        theirs.close()
        ends.append(mine)
    return [_receive(end, f"rank {rank} of {work.__name__}") for rank, end in enumerate(ends)]


def _receive(end: Any, name: str) -> Any:
    assert end.poll(HANG), f"{name} hangs"
    try:
        return end.recv()
    except EOFError:
        return None


def as_torchrun(rank: int, world: int) -> None:
    """Set the variables of torchrun in a process that is already in a group."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": 0}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(v) for name, v in numbers.items()}


def _joined(end: Any, variables: dict[str, str], work: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(variables)
    try:
        end.send(work(*arguments))
    except BaseException as error:
        end.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    end.close()
    os._exit(0)


def _rank(end: Any, store: str, rank: int, world: int, work: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT),
    )
    try:
        end.send(work(rank, *arguments))
    except BaseException as error:
        end.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    end.close()
    os._exit(0)  # a group of which a rank died cannot be destroyed


def give_up_after(seconds: float) -> None:
    """Let later collective operations of this rank fail if the others let it wait so long."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=seconds))


@contextmanager
def others_outlive_the_first(rank: int) -> Iterator[None]:
    """Keep ranks that finish the block waiting in it until rank 0 has left it."""
    store = dist.distributed_c10d._get_default_store()
    try:
        yield
        if rank > 0:
            store.wait(["the first has left"], timedelta(seconds=TIMEOUT))
    finally:
        if rank == 0:
            store.set("the first has left", "")


class TwoHeads(nn.Module):
    """A trunk with one head for each of two loss terms."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        features = self.trunk(x).tanh()
        return features, self.a(features), self.b(features)


def batch(rank, step):
    """Return the inputs and targets of a rank in a step."""
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=g), torch.randn(4, 2, generator=g)


def losses_of(outputs, y, bad=()):
    """Return the features and the two loss terms; the terms named in `bad` are NaN."""
    features, a, b = outputs
    losses = {"a": (a - y).square().mean(), "b": (b + y).abs().mean()}
    return features, {k: x * NAN if k in bad else x for k, x in losses.items()}


def build(**options):
    """Build the same model on each rank, wrapped in DDP, with optimizer and guard."""
    torch.manual_seed(0)
    model = TwoHeads()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return model, ddp, optimizer, Guard(ddp, optimizer, **options)


def seen(model, optimizer, guard):
    """Return all state that must be the same on each rank."""
    state = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    health = {name: term.tensors() for name, term in guard.terms.items()}
    return {
        "weights": [p.detach().numpy().tobytes() for p in model.parameters()],
        "state": [v.numpy().tobytes() for v in state],
        "events": [event.line() for event in guard.events.events],
        "health": repr((guard.health.tensors(), guard.updates, guard.recovery.counts, health)),
        "words": (guard.diagnosis(), guard.steps, guard.updates.tolist()),
    }


def agreed(values):
    """Check that all ranks returned the same values, and return them."""
    for rank, state in enumerate(values):
        assert isinstance(state, dict), f"rank {rank}: {state}"
        for key, value in state.items():
            assert value == values[0][key], (rank, key)
    return values[0]


def reasons(state):
    """Return the events in a state of `seen` as one text."""
    return "\n".join(state["events"])


class Spoil(torch.autograd.Function):
    """The identity with an infinite gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * INF
