"""Several ranks and one guard each: the same verdicts, weights, events and counters everywhere."""

import os
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ssl_kd.guard import Guard, RankLost, Thresholds, TooFewHealthyParts
from tests.ranks import (
    NAN,
    Spoil,
    TwoHeads,
    agreed,
    batch,
    build,
    in_pieces,
    losses_of,
    reasons,
    run_ranks,
    seen,
)

# -- loss terms -----------------------------------------------------------------------------------


def train_terms(rank, faults, through, steps=5, options=None):
    """`faults`: (step, rank) -> the terms that are NaN there; 'absent' leaves one out by hand."""
    model, ddp, optimizer, guard = build(**(options or {}))
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        features, losses = losses_of(ddp(x), y, faults.get((step, rank), ()))
        guard.backward(losses, features if through else None)
        guard.step()
    return seen(model, optimizer, guard)


@pytest.mark.parametrize("through", [False, True])
def test_a_term_that_is_nan_on_one_rank_is_left_out_on_all(through):
    one = agreed(run_ranks(train_terms, 4, {(2, 3): ("b",)}, through))
    event, again = one["events"]
    assert "used again" in again
    assert "the loss is not finite on rank 3 of 4" in event and '"step": 2' in event
    assert "step 5" in one["words"][0]


def train_without_b(rank, step_without):
    """By hand: plain DDP, in one step without the term b and so without the weights of its head."""
    torch.manual_seed(0)
    model = TwoHeads()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(5):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        if step == step_without:  # the head b is not even run
            features = model.trunk(x).tanh()
            (model.a(features) - y).square().mean().backward()
            for p in model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
        else:
            losses = losses_of(ddp(x), y)[1]
            (losses["a"] + losses["b"]).backward()
        optimizer.step()
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def test_what_is_left_is_as_if_the_term_had_not_existed():
    one = agreed(run_ranks(train_terms, 2, {(2, 1): ("b",)}, False))
    assert one["weights"] == run_ranks(train_without_b, 2, 2)[0]


def test_a_healthy_run_of_ranks_is_the_plain_one_to_the_last_bit():
    one = agreed(run_ranks(train_terms, 2, {}, True))
    assert one["weights"] == run_ranks(train_without_b, 2, -1)[0] and not one["events"]


def test_all_terms_nan_on_one_rank_lose_the_step_everywhere_without_a_hang():
    one = agreed(run_ranks(train_terms, 4, {(2, 1): ("a", "b")}, True))
    assert reasons(one).count("on rank 1 of 4") == 3  # both terms, and the model's step
    assert "80.0 % of updates done" in one["words"][0]


def test_terms_that_are_nan_on_different_ranks_are_all_left_out():
    one = agreed(run_ranks(train_terms, 2, {(2, 0): ("a",), (2, 1): ("b",)}, False))
    assert "on rank 0 of 2" in reasons(one) and "on rank 1 of 2" in reasons(one)


def keep_events(rank, file):
    model, ddp, optimizer, guard = build(events=file)
    x, y = batch(rank, 0)
    features, losses = losses_of(ddp(x), y, "b")
    guard.backward(losses, features)
    guard.step()
    return seen(model, optimizer, guard)


def test_one_rank_writes_the_file_of_events(tmp_path):
    one = agreed(run_ranks(keep_events, 2, tmp_path / "events.jsonl"))
    assert (tmp_path / "events.jsonl").read_text().splitlines() == one["events"] != []


def checkpointed(rank, reentrant, one_loss=False):
    torch.manual_seed(0)
    model = TwoHeads()
    inside = nn.Sequential(model.trunk, nn.Tanh())
    model.forward = lambda x: losses_through(checkpoint(inside, x, use_reentrant=reentrant), model)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = Guard(ddp, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        _, losses = losses_of(ddp(x.requires_grad_()), y, "ab"[: rank * step % 3])
        guard.backward(losses["a"] + losses["b"] if one_loss else losses)
        guard.step()
    return seen(model, optimizer, guard)


def losses_through(features, model):
    return features, model.a(features), model.b(features)


def test_reentrant_checkpointing_is_refused_where_a_term_could_not_be_left_out():
    for told in run_ranks(checkpointed, 2, True):
        assert told.startswith("ValueError") and "use_reentrant=False" in told
    plain = agreed(run_ranks(checkpointed, 2, False))
    assert "on rank 1 of 2" in reasons(plain)
    assert agreed(run_ranks(checkpointed, 2, True, True))["events"]  # of one loss none is left out


def train_with_options(rank, options):
    """Terms that are cut out on either rank, under DDP with other options."""
    torch.manual_seed(0)
    model = TwoHeads()
    ddp = DistributedDataParallel(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    guard = Guard(ddp, optimizer)
    bad = {(2, 1): ("b",), (3, 0): ("a", "b"), (4, 1): ("a",)}
    for step in range(6):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        outputs = ddp(x)
        _, losses = losses_of(outputs, y, bad.get((step, rank), ()))
        guard.backward(losses, outputs[1:])  # DDP gives each output a place of its own in the graph
        guard.step()
    return seen(model, optimizer, guard)


def test_the_options_of_ddp_change_no_bit():
    options = (
        {},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 0.0001},
    )
    ends = [agreed(run_ranks(train_with_options, 2, some)) for some in options]
    assert all(end == ends[0] for end in ends) and ends[0]["events"]


def train_other_parts(rank):
    """Each rank has, in one step, a loss for another part."""
    torch.manual_seed(0)
    model = TwoHeads()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    guard = Guard(ddp, optimizer, {"a": model.a, "b": model.b})
    for step in range(6):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        _, losses = losses_of(ddp(x), y, "b" if step == 2 and rank == 1 else ())
        if step == 4:
            losses.pop("a" if rank else "b")
        guard.backward(losses)
        guard.step()
    return seen(model, optimizer, guard)


def test_a_part_may_have_a_loss_on_some_ranks_alone():
    one = agreed(run_ranks(train_other_parts, 2))
    [event] = one["events"]
    assert '"b"' in event and "on rank 1 of 2" in event


def train_two_models(rank):
    """A generator's bad batch on one rank runs through the discriminator's BatchNorm."""
    torch.manual_seed(0)
    generator = nn.Linear(6, 6)
    judge = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    make = DistributedDataParallel(generator)
    tell = DistributedDataParallel(judge, broadcast_buffers=False)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (generator, judge)]
    guards = [Guard(m, o) for m, o in zip((make, tell), optimizers, strict=True)]
    for step in range(5):
        x, _ = batch(rank, step)
        optimizers[1].zero_grad()
        guards[1].backward(tell(torch.cat([make(x).detach(), x])).square().mean())
        guards[1].step()
        optimizers[0].zero_grad()
        noise = x * NAN if step == 2 and rank == 1 else x
        guards[0].backward(-tell(make(noise)).mean())
        guards[0].step()
    return {
        **seen(generator, optimizers[0], guards[0]),
        "judge": seen(judge, optimizers[1], guards[1]),
    }


def test_what_a_bad_batch_left_in_another_model_is_put_back_and_told_by_all():
    one = agreed(run_ranks(train_two_models, 2))
    assert "the loss is not finite on rank 1 of 2" in reasons(one)
    assert "running_mean, module.1.running_var on rank 1 of 2" in reasons(one["judge"])


# -- accumulation ---------------------------------------------------------------------------------


def accumulate(rank, faults):
    """Two batches a step, the first under `no_sync`; `faults`: (step, micro, rank) -> terms."""
    model, ddp, optimizer, guard = build()
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            ddp.require_backward_grad_sync = micro == 1  # as no_sync() does
            x, y = batch(rank, 2 * step + micro)
            features, losses = losses_of(ddp(x), y, faults.get((step, micro, rank), ()))
            guard.backward(losses, features)
        guard.step()
    return seen(model, optimizer, guard)


@pytest.mark.parametrize("micro", [0, 1])
@pytest.mark.parametrize("bad", [("b",), ("a", "b")])
def test_accumulation_with_no_sync_agrees(micro, bad):
    one = agreed(run_ranks(accumulate, 2, {(1, micro, 1): bad}))
    assert "on rank 1 of 2" in reasons(one)


# -- one loss, gradients, weights -----------------------------------------------------------------


def train_one_loss(rank, fault, at, bad_rank, steps=8, **options):
    """One loss for all; at the steps `at`, the rank's loss, gradient or weights are spoiled."""
    model, ddp, optimizer, guard = build(**options)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        hit = step in at and rank == bad_rank
        if hit and fault == "weight":
            with torch.no_grad():
                model.trunk.weight[1, 2] = NAN
        features, a, b = ddp(x)
        loss = (a - y).square().mean() + (b + y).square().mean()
        if hit and fault == "loss":
            loss = loss * NAN
        if hit and fault == "gradient":
            loss = Spoil.apply(loss)
        guard.backward(loss)
        guard.step()
    return seen(model, optimizer, guard)


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_bad_loss_or_gradient_on_one_rank_loses_the_step_on_all(fault):
    one = agreed(run_ranks(train_one_loss, 4, fault, {3}, 2))
    [event] = one["events"]
    assert f'"{fault}"' in event and "on rank 2 of 4" in event
    assert "last on rank 2 of 4" in one["words"][1]


def restore(rank):
    options = {"thresholds": Thresholds(restore_after=2), "snapshot_every": 1}
    return train_one_loss(rank, "weight", {3}, 1, **options)


def test_a_weight_that_is_nan_on_one_rank_is_restored_on_all():
    one = agreed(run_ranks(restore, 2))
    first, second, back = one["events"]
    assert "on rank 1 of 2" in first and "on rank 1 of 2" in second
    assert "restored to its state before step 2" in back
    assert all(np.isfinite(np.frombuffer(w, np.float32)).all() for w in one["weights"])


def climb(rank):
    """One rank is bad for ever: restored, re-initialised, then the end; on all ranks alike."""
    options = {"thresholds": Thresholds(restore_after=2, forgive_after=3)}
    torch.manual_seed(0)
    model = TwoHeads()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parts = {"a": model.a, "b": model.b}
    guard = Guard(ddp, optimizer, parts, **options)
    for step in range(12):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        features, losses = losses_of(ddp(x), y, ("b",) if step > 2 and rank == 1 else ())
        guard.backward(losses, features if step % 2 else None)
        guard.step()
    return seen(model, optimizer, guard)


def test_a_part_is_restored_reinitialised_and_retired_alike():
    one = agreed(run_ranks(climb, 2))
    for word in ("restored", "re-initialised", "retired"):
        assert word in reasons(one), word


def stop(rank):
    with pytest.raises(TooFewHealthyParts) as stopped:
        train_one_loss(
            rank, "loss", range(3, 9), 0, thresholds=Thresholds(restore_after=2), steps=9
        )
    return {"words": str(stopped.value)}


def test_all_ranks_stop_with_the_same_diagnosis():
    assert "last on rank 0 of 2" in agreed(run_ranks(stop, 2))["words"]


# -- buffers --------------------------------------------------------------------------------------


def spoil_buffers(rank):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 2))
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(ddp, optimizer, {"last": model[2]}, clip_grad=1.0)
    for step in range(4):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        guard.backward({"last": (ddp(x) - y).square().mean()})
        if step == 1 and rank == 1:
            norm.state_dict()["running_mean"][2] = NAN  # as a forward pass does that only judges
        guard.step()
        assert all(torch.isfinite(b).all() for b in model.buffers())
    return seen(model, optimizer, guard)


def test_buffers_spoiled_on_one_rank_are_told_by_all():
    one = agreed(run_ranks(spoil_buffers, 2))
    [event] = one["events"]
    assert "running_mean on rank 1 of 2" in event


# -- processes ------------------------------------------------------------------------------------


def die(rank, how):
    model, ddp, optimizer, guard = build()
    begun = time.monotonic()
    try:
        for step in range(5):
            optimizer.zero_grad()
            x, y = batch(rank, step)
            if step == 2 and rank == 1 and how == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            features, losses = losses_of(ddp(x), y)
            guard.backward(losses, features)
            if step == 2 and rank == 1:
                if how == "hangs":
                    time.sleep(8)
                os.kill(os.getpid(), signal.SIGKILL)
            guard.step()
    except RankLost as lost:
        return time.monotonic() - begun, str(lost)


@pytest.mark.parametrize("how", ["before", "after", "hangs"])
def test_a_rank_that_dies_or_hangs_ends_the_others_with_what_they_waited_for(how):
    first, second = run_ranks(die, 2, how, timeout=4)[:2]
    assert second is None or how == "hangs"
    seconds, words = first
    where = "the loss terms a, b" if how == "before" else "step 2, the step"
    assert seconds < 30 and where in words and "rank 0 of 2 waited" in words


def be_slow(rank):
    model, ddp, optimizer, guard = build()
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        if rank == 1:
            time.sleep(0.3)
        features, losses = losses_of(ddp(x), y)
        guard.backward(losses, features)
        guard.step()
    return seen(model, optimizer, guard)


def test_a_slow_rank_makes_the_others_wait_and_no_more():
    assert not agreed(run_ranks(be_slow, 2))["events"]


# -- misuse ---------------------------------------------------------------------------------------


def misuse(rank, how):
    if how == "late":
        model = nn.Linear(6, 2)
        guard = Guard(model, torch.optim.SGD(model.parameters()), group=False)
        guard._group = None  # as if there had been no group then
        guard.step()
    elif how == "settings":
        model = nn.Linear(6, 2)
        Guard(model, torch.optim.SGD(model.parameters()), clip_grad=1.0 + rank)
    elif how == "half":
        model = nn.Linear(6, 2).half()
        Guard(model, torch.optim.SGD(model.parameters()))
    model, ddp, optimizer, guard = build()
    x, y = batch(rank, 0)
    if how == "names":
        features, losses = losses_of(ddp(x), y)
        guard.backward(losses if rank else {"a": losses["a"] + losses["b"]})
    if how == "uneven" and rank == 0:
        with ddp.no_sync():
            guard.backward(losses_of(ddp(x), y)[1])
    guard.step()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("late", "make the Guard after init_process_group"),
        ("settings", "Make the same Guard on every rank"),
        ("half", "'weight' is float16, expected float32"),
        ("names", "rank 0: step 0, the loss terms a [1 of 1]; rank 1: step 0, the loss terms a, b"),
        ("uneven", "rank 1: step 0, the step"),
    ],
)
def test_misuse_is_an_error_with_the_way_out_on_every_rank(how, expected):
    for told in run_ranks(misuse, 2, how, timeout=20):
        assert told.startswith("ValueError") and expected in told, told


def alone(rank):
    """`group=False`: every rank for itself, without any exchange."""
    torch.manual_seed(rank)
    model = nn.Linear(6, 2)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), group=False)
    for step in range(1 + rank):  # not equally often
        guard.backward(model(batch(rank, step)[0]).square().mean() * (NAN if rank else 1))
        guard.step()
    return [event.reason for event in guard.events.events]


def test_without_a_group_each_rank_decides_for_itself():
    assert run_ranks(alone, 2) == [[], ["the loss is not finite"] * 2]


def of_a_group(rank):
    pair = dist.new_group([0, 1])
    if rank > 1:
        return None
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    ddp = DistributedDataParallel(model, process_group=pair)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(ddp, optimizer, group=pair)
    guard.backward(ddp(batch(rank, 0)[0]).square().mean() * (NAN if rank else 1))
    guard.step()
    return seen(model, optimizer, guard)


def test_a_group_of_some_ranks():
    told = run_ranks(of_a_group, 3)
    assert "on rank 1 of 2" in reasons(agreed(told[:2])) and told[2] is None


# -- sharded weights ------------------------------------------------------------------------------


def train_sharded(rank, sharded, faults, steps=8):
    """The same loop under FSDP2 and under DDP; `faults`: (step, rank) -> the terms that are NaN."""
    torch.manual_seed(0)
    model = TwoHeads()
    if sharded:
        for module in (model.a, model.b, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    wrapped = model if sharded else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    options = {"thresholds": Thresholds(restore_after=2), "snapshot_every": 1, "clip_grad": 1.0}
    guard = Guard(wrapped, optimizer, **options)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        features, losses = losses_of(wrapped(x), y, faults.get((step, rank), ()))
        guard.backward(losses, features)
        guard.step()
    whole = [p.full_tensor() if sharded else p for p in model.parameters()]  # pyright: ignore
    return {
        "weights": [p.detach().tolist() for p in whole],
        "events": [event.line() for event in guard.events.events],
        "words": (guard.summary(), guard.diagnosis()),
    }


@in_pieces
@pytest.mark.parametrize("world", [2, 4])
def test_under_fsdp2_all_is_as_under_ddp(world):
    bad = {(2, 1): ("b",), (4, 0): ("a", "b"), (5, 0): ("a", "b"), (7, 1): ("a",)}
    sharded = agreed(run_ranks(train_sharded, world, True, bad))
    whole = agreed(run_ranks(train_sharded, world, False, bad))
    assert sharded["events"] == whole["events"] and sharded["words"] == whole["words"]
    assert "restored to its state before step 3" in reasons(sharded)
    for one, other in zip(sharded["weights"], whole["weights"], strict=True):
        assert np.allclose(one, other, rtol=0, atol=1e-6)
