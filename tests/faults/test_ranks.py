"""Test rows 46 and 47: one of several ranks of a model has a fault or dies."""

import os
import signal
import time

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from firstnan import RankLost
from tests.faults.matrix import row
from tests.ranks import (
    TIMEOUT,
    agreed,
    batch,
    build,
    give_up_after,
    losses_of,
    others_outlive_the_first,
    reasons,
    run_ranks,
)
from tests.ranks import seen as seen_of

SHORT = 1.5
"""Seconds after which a rank that is expected to hang gives up."""


def skip_alone(rank, guarded, at):
    """Skip NaN losses on each rank alone, as in pytorch/audio#3749, or with the guard."""
    model, ddp, optimizer, guard = build(group=None if guarded else False)
    with others_outlive_the_first(rank):  # the rank that skips is alive
        for step in range(5):
            optimizer.zero_grad()
            x, y = batch(rank, step)
            _, losses = losses_of(ddp(x), y, "ab" if step == at and rank == 1 else "")
            loss = losses["a"] + losses["b"]
            if not guarded and rank == 0 and step == 4:
                give_up_after(SHORT)
            if guarded:
                guard.backward(loss)
                guard.step()
            elif torch.isfinite(loss):
                loss.backward()
                optimizer.step()
    return seen_of(model, optimizer, guard)


@row(46)
@pytest.mark.parametrize("at", [1, 4])
def test_a_rank_that_skips_alone_hangs_and_with_the_guard_all_skip(at):
    begun = time.monotonic()
    first, _ = run_ranks(skip_alone, 2, False, at)
    assert isinstance(first, str) and time.monotonic() - begun > SHORT, "no hang without the guard"
    assert "imed out" in first or "imeout" in first
    one = agreed(run_ranks(skip_alone, 2, True, at))
    assert "the loss is not finite on rank 1 of 2" in reasons(one)


def stop_and_go_on(rank, folder, die_at):
    """Train with a checkpoint per step and resume from the last one; one rank may be killed."""
    model, _, optimizer, guard = build()
    ddp = DistributedDataParallel(model)
    file = folder / f"rank {rank}.pt"
    if file.exists():
        saved = torch.load(file, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        guard.load_state_dict(saved["guard"])
    begun = time.monotonic()
    try:
        for step in range(guard.steps, 6):
            optimizer.zero_grad()
            x, y = batch(rank, step)
            features, losses = losses_of(ddp(x), y, "b" if step == 1 and rank == 0 else "")
            guard.backward(losses, features)
            if step == die_at and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            guard.step()
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "guard": guard.state_dict(),
                },
                file,
            )
    except RankLost as lost:
        return time.monotonic() - begun, str(lost)
    state = seen_of(model, optimizer, guard)
    del state["events"]  # differ between ranks
    return state


@row(47)
def test_a_killed_rank_ends_all_and_a_resume_uses_the_last_checkpoint(tmp_path):
    (tmp_path / "straight").mkdir()
    straight = agreed(run_ranks(stop_and_go_on, 2, tmp_path / "straight", None))
    (seconds, words), dead = run_ranks(stop_and_go_on, 2, tmp_path, 3)
    assert dead is None and seconds < TIMEOUT
    assert "rank 0 of 2 waited" in words and "step 4, the step" in words
    assert "Start all ranks again from the last checkpoint" in words
    assert agreed(run_ranks(stop_and_go_on, 2, tmp_path, None)) == straight
