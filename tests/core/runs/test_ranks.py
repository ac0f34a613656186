"""Processes of torchrun join, wait for the first one, and end together."""

import time

import pytest
import torch
import torch.distributed as dist

from ssl_kd.core.errors import BAD_INPUT, InputError
from ssl_kd.core.runs.ranks import RankStopped, joined
from tests.ranks import run_joined

# -- joining --------------------------------------------------------------------------------------


def test_a_single_process_joins_no_group():
    with joined("cuda:1") as ranks:
        assert (ranks.rank, ranks.world, ranks.device) == (0, 1, "cuda:1")
        assert ranks.from_first(lambda: "mine") == "mine"
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [
        ("cuda:1", 2, "DEVICE is cuda:1, but 3 processes"),
        ("mps", 0, "DEVICE is mps"),
        ("auto", 2, "has 2 GPUs.*--nproc_per_node 2"),
        ("cuda", 2, "has 2 GPUs"),
    ],
)
def test_a_device_for_all_processes_is_refused(monkeypatch, device, gpus, message):
    torchrun = {"WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "2"}
    for name, value in (torchrun | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(InputError, match=message), joined(device):
        pass


# -- waiting for the first ------------------------------------------------------------------------


def twice_from_first(rank):
    with joined("auto") as ranks:
        slow = ranks.from_first(lambda: (time.sleep(1.5), torch.arange(3))[1])
        second = ranks.from_first(lambda: {"rank": ranks.rank})
        total = torch.ones(1)
        dist.all_reduce(total)
        return ranks.rank, ranks.world, ranks.device, slow.tolist(), second, int(total)


def test_the_result_of_the_first_reaches_all():
    found = run_joined(twice_from_first, 3)
    assert found == [(rank, 3, "cpu", [0, 1, 2], {"rank": 0}, 3) for rank in range(3)]


# -- ends -----------------------------------------------------------------------------------------


def fail(rank, who):
    def work():
        raise InputError("no such thing\nmore of it")

    try:
        with joined("cpu") as ranks:
            if rank == who != 0:
                work()
            ranks.from_first(work if who == 0 else lambda: time.sleep(1))
            dist.all_reduce(torch.zeros(1))
    except (InputError, RankStopped) as error:
        return type(error), str(error), error.exit_code


def test_all_ranks_end_with_the_first_and_its_reason():
    first, *others = run_joined(fail, 3, 0)
    assert first[0] is InputError and "more of it" in first[1]
    for rank, other in enumerate(others, 1):
        assert other == (
            RankStopped,
            f"rank {rank} of 3 stopped with rank 0: no such thing",
            BAD_INPUT,
        )


def test_all_ranks_end_with_a_failing_rank():
    first, second, third = run_joined(fail, 3, 1)
    assert second == (InputError, "no such thing\nmore of it", BAD_INPUT)
    assert third[1] == "rank 2 of 3 stopped with rank 1: no such thing"
    assert first[1] == "rank 0 of 3 stopped with rank 1: no such thing"
