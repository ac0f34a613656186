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

from firstnan import Guard, RankLost, Thresholds, TooFewHealthyParts
from firstnan.script import ScriptWatch
from tests.faults.matrix import row
from tests.ranks import (
    NAN,
    TIMEOUT,
    Spoil,
    TwoHeads,
    agreed,
    batch,
    build,
    give_up_after,
    in_pieces,
    losses_of,
    others_outlive_the_first,
    reasons,
    run_ranks,
    seen,
)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train(rank, loop, steps, setup=build, **options):
    """`loop(step, rank, outputs, y, guard)` calls `guard.backward`; what every rank must share."""
    model, ddp, optimizer, guard = setup(**options)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        loop(step, rank, ddp(x), y, guard)
        guard.step()
    return seen(model, optimizer, guard)


# -- loss terms -----------------------------------------------------------------------------------


def train_terms(rank, faults, through, options=None):
    """`faults`: (step, rank) -> the terms that are NaN there."""

    def loop(step, rank, outputs, y, guard):
        features, losses = losses_of(outputs, y, faults.get((step, rank), ()))
        guard.backward(losses, features if through else None)

    return train(rank, loop, 5, **(options or {}))


def train_without_b(rank, step_without):
    """By hand: plain DDP, in one step without the term b and so without the weights of its head."""
    torch.manual_seed(0)
    model = TwoHeads()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw(model)
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


@pytest.mark.parametrize("through", [False, True])
def test_a_term_that_is_nan_on_one_rank_is_left_out_on_all_as_if_by_hand(through, tmp_path):
    log = tmp_path / "events.jsonl"
    one = agreed(run_ranks(train_terms, 2, {(2, 1): ("b",)}, through, {"events": log}))
    event, again = one["events"]
    assert "the loss is not finite on rank 1 of 2" in event and '"step": 3' in event
    assert "used again" in again and one["words"][1] == 5
    assert one["weights"] == run_ranks(train_without_b, 2, 2)[0]
    assert log.read_text().splitlines() == one["events"]  # one rank writes the file


def test_a_healthy_run_of_ranks_is_the_plain_one_to_the_last_bit():
    one = agreed(run_ranks(train_terms, 2, {}, True))
    assert one["weights"] == run_ranks(train_without_b, 2, -1)[0] and not one["events"]


@row(46)
def test_all_terms_nan_on_one_rank_lose_the_step_everywhere_without_a_hang():
    one = agreed(run_ranks(train_terms, 4, {(2, 1): ("a", "b")}, True))
    assert reasons(one).count("on rank 1 of 4") == 3  # both terms, and the model's step
    assert one["words"][1:] == (5, [4])


def test_terms_that_are_nan_on_different_ranks_are_all_left_out():
    one = agreed(run_ranks(train_terms, 2, {(2, 0): ("a",), (2, 1): ("b",)}, False))
    assert "on rank 0 of 2" in reasons(one) and "on rank 1 of 2" in reasons(one)


def checkpointed(rank, reentrant, one_loss=False):
    torch.manual_seed(0)
    model = TwoHeads()
    inside = nn.Sequential(model.trunk, nn.Tanh())

    def forward(x):
        features = checkpoint(inside, x.requires_grad_(), use_reentrant=reentrant)
        return features, model.a(features), model.b(features)

    def setup():
        model.forward = forward
        ddp, optimizer = DistributedDataParallel(model), adamw(model)
        return model, ddp, optimizer, Guard(ddp, optimizer)

    def loop(step, rank, outputs, y, guard):
        _, losses = losses_of(outputs, y, "ab"[: rank * step % 3])
        guard.backward(losses["a"] + losses["b"] if one_loss else losses)

    return train(rank, loop, 4, setup)


def test_reentrant_checkpointing_is_refused_where_a_term_could_not_be_left_out():
    for answer in run_ranks(checkpointed, 2, True):
        assert answer.startswith("ValueError") and "use_reentrant=False" in answer
    plain = agreed(run_ranks(checkpointed, 2, False))
    assert "on rank 1 of 2" in reasons(plain)
    assert agreed(run_ranks(checkpointed, 2, True, True))["events"]  # of one loss none is left out


def train_with_options(rank, options):
    """Terms that are cut out on either rank, under DDP with other options."""
    bad = {(2, 1): ("b",), (3, 0): ("a", "b"), (4, 1): ("a",)}

    def setup():
        torch.manual_seed(0)
        model = TwoHeads()
        ddp, optimizer = DistributedDataParallel(model, **options), adamw(model)
        return model, ddp, optimizer, Guard(ddp, optimizer)

    def loop(step, rank, outputs, y, guard):
        losses = losses_of(outputs, y, bad.get((step, rank), ()))[1]
        guard.backward(losses, outputs[1:])  # DDP gives each output its own place in the graph

    return train(rank, loop, 6, setup)


def test_the_options_of_ddp_change_no_bit():
    options = (
        {},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 0.0001},
    )
    ends = [agreed(run_ranks(train_with_options, 2, each)) for each in options]
    assert all(end == ends[0] for end in ends) and ends[0]["events"]


def of_parts(**options):
    """Two parts on a trunk that they share."""
    torch.manual_seed(0)
    model = TwoHeads()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw(model)
    return model, ddp, optimizer, Guard(ddp, optimizer, {"a": model.a, "b": model.b}, **options)


def train_other_parts(rank):
    """Each rank has, in one step, a loss for another part."""

    def loop(step, rank, outputs, y, guard):
        losses = losses_of(outputs, y, "b" if step == 2 and rank == 1 else ())[1]
        if step == 4:
            losses.pop("a" if rank else "b")
        guard.backward(losses)

    return train(rank, loop, 6, of_parts)


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
    optimizers = [adamw(model) for model in (generator, judge)]
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
    other = seen(judge, optimizers[1], guards[1])
    return {**seen(generator, optimizers[0], guards[0]), "judge": other}


def test_all_ranks_restore_buffers_of_another_model_after_a_bad_batch():
    one = agreed(run_ranks(train_two_models, 2))
    assert "the loss is not finite on rank 1 of 2" in reasons(one)
    assert "running_mean, module.1.running_var on rank 1 of 2" in reasons(one["judge"])


def accumulate(rank, faults, absent=()):
    """Two batches a step, the first under `no_sync`; `faults`: (step, micro, rank) -> terms.

    In the batch `absent`, (step, micro), the term b is 0 on all ranks.
    """
    model, ddp, optimizer, guard = build()
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            ddp.require_backward_grad_sync = micro == 1  # as no_sync() does
            x, y = batch(rank, 2 * step + micro)
            features, losses = losses_of(ddp(x), y, faults.get((step, micro, rank), ()))
            if (step, micro) == absent:
                losses["b"] = 0 * losses["b"]
            guard.backward(losses, features)
        guard.step()
    return seen(model, optimizer, guard)


@row(46)
@pytest.mark.parametrize(("micro", "bad"), [(0, ("b",)), (1, ("a", "b"))])
def test_accumulation_with_no_sync_agrees(micro, bad):
    one = agreed(run_ranks(accumulate, 2, {(1, micro, 1): bad}))
    assert "on rank 1 of 2" in reasons(one)


def test_a_term_left_out_of_one_batch_keeps_the_gradient_of_the_batches_before():
    sick, by_hand = (
        agreed(run_ranks(accumulate, 2, faults, absent))
        for faults, absent in (({(1, 1, 1): ("b",)}, ()), ({}, (1, 1)))
    )
    assert sick["weights"] == by_hand["weights"]


# -- one loss, gradients, weights, buffers --------------------------------------------------------


def train_one_loss(rank, fault, at, bad_rank, steps=8, **options):
    """One loss for all; at the steps `at`, the rank's loss, gradient or weights are spoiled."""

    def loop(step, rank, outputs, y, guard):
        hit = fault if step in at and rank == bad_rank else ""
        if hit == "weight":
            with torch.no_grad():
                guard.model.module.trunk.weight[1, 2] = NAN
            outputs = guard.model(batch(rank, step)[0])
        _, a, b = outputs
        loss = (a - y).square().mean() + (b + y).square().mean()
        guard.backward(loss * NAN if hit == "loss" else Spoil.apply(loss) if hit else loss)

    return train(rank, loop, steps, **options)


@row(46)
@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_bad_loss_or_gradient_on_one_rank_loses_the_step_on_all(fault):
    one = agreed(run_ranks(train_one_loss, 4, fault, {3}, 2))
    [event] = one["events"]
    assert f'"{fault}"' in event and "on rank 2 of 4" in event
    assert "last on rank 2 of 4" in one["words"][0]


def restore(rank):
    options = {"thresholds": Thresholds(restore_after=2), "snapshot_every": 1}
    return train_one_loss(rank, "weight", {3}, 1, **options)


@row(46)
def test_a_weight_that_is_nan_on_one_rank_is_restored_on_all():
    one = agreed(run_ranks(restore, 2))
    first, second, back = one["events"]
    assert "on rank 1 of 2" in first and "on rank 1 of 2" in second
    assert "restored to its state before step 3" in back
    assert all(np.isfinite(np.frombuffer(w, np.float32)).all() for w in one["weights"])


def climb(rank):
    """One rank's part is always bad: restored, re-initialized, retired; on all ranks alike."""

    def loop(step, rank, outputs, y, guard):
        losses = losses_of(outputs, y, ("b",) if step > 2 and rank == 1 else ())[1]
        guard.backward(losses, outputs[1:] if step % 2 else None)

    return train(rank, loop, 12, of_parts, thresholds=Thresholds(restore_after=2, forgive_after=3))


def test_all_ranks_restore_reinitialize_and_retire_a_part():
    one = agreed(run_ranks(climb, 2))
    for action in ("restored", "re-initialized", "retired"):
        assert action in reasons(one), action


def stop(rank):
    options = {"thresholds": Thresholds(restore_after=2), "steps": 9}
    with pytest.raises(TooFewHealthyParts) as stopped:
        train_one_loss(rank, "loss", range(3, 9), 0, **options)
    return {"words": str(stopped.value)}


def test_all_ranks_stop_with_the_same_diagnosis():
    assert "last on rank 0 of 2" in agreed(run_ranks(stop, 2))["words"]


# -- processes that die, and misuse ---------------------------------------------------------------


def die(rank, how):
    begun = time.monotonic()

    def loop(step, rank, outputs, y, guard):
        if step == 2 and rank == 1 and how == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        features, losses = losses_of(outputs, y)
        guard.backward(losses, features)
        if step == 2 and rank == 0 and how == "hangs":
            give_up_after(1.5)  # seconds
        if step == 2 and rank == 1:  # it hangs
            with others_outlive_the_first(rank):
                pass

    try:
        with others_outlive_the_first(rank):
            train(rank, loop, 5)
    except RankLost as lost:
        return time.monotonic() - begun, str(lost)


@row(47)
@pytest.mark.parametrize("how", ["before", "hangs"])
def test_a_rank_that_dies_or_hangs_ends_the_others_with_the_pending_call(how):
    first, second = run_ranks(die, 2, how)
    assert second is None or how == "hangs"
    seconds, message = first
    where = "the loss terms a, b" if how == "before" else "step 3, the step"
    assert seconds < TIMEOUT and where in message and "rank 0 of 2 waited" in message


def misuse(rank, how):
    if how in ("late", "settings", "half"):
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters())
        if how == "late":
            guard = Guard(model, optimizer, group=False)
            guard._ranks.group = None  # as if there had been no group then
            guard.step()
        Guard(model.half() if how == "half" else model, optimizer, clip_grad=1.0 + rank)
    model, ddp, optimizer, guard = build()
    x, y = batch(rank, 0)
    if how == "names":
        losses = losses_of(ddp(x), y)[1]
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
        ("names", "rank 0: step 1, the loss terms a; rank 1: step 1, the loss terms a, b"),
        ("uneven", "rank 1: step 1, the step"),
    ],
)
def test_misuse_is_an_error_with_the_way_out_on_every_rank(how, expected):
    for answer in run_ranks(misuse, 2, how):
        assert answer.startswith("ValueError") and expected in answer, answer


def in_groups(rank):
    """Ranks 0 and 1 agree on each verdict, rank 2 decides by itself, in more steps."""
    pair = dist.new_group([0, 1])
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    ddp = model if rank == 2 else DistributedDataParallel(model, process_group=pair)
    guard = Guard(ddp, adamw(model), group=False if rank == 2 else pair)
    for _ in range(1 + rank // 2):
        guard.backward(ddp(batch(rank, 0)[0]).square().mean() * (NAN if rank else 1))
        guard.step()
    return [event.reason for event in guard.events.events]


def test_a_group_of_some_ranks_agrees_and_without_a_group_each_decides_by_itself():
    first, second, alone = run_ranks(in_groups, 3)
    assert first == second == ["the loss is not finite on rank 1 of 2"]
    assert alone == ["the loss is not finite"] * 2


# -- sharded weights ------------------------------------------------------------------------------


def two_heads(sharded):
    """The model, and what a loop under FSDP2 or DDP calls."""
    model = TwoHeads()
    if not sharded:
        return model, DistributedDataParallel(model)
    for module in (model.a, model.b, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, model


def train_sharded(rank, sharded, faults, steps=8):
    """The same loop under FSDP2 and under DDP; `faults`: (step, rank) -> the terms that are NaN."""
    torch.manual_seed(0)
    model, wrapped = two_heads(sharded)
    optimizer = adamw(model)
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
        "words": (guard.diagnosis(), guard.updates.tolist()),
    }


@in_pieces
def test_fsdp2_guards_match_ddp():
    bad = {(2, 1): ("b",), (4, 0): ("a", "b"), (5, 0): ("a", "b"), (7, 1): ("a",)}
    sharded = agreed(run_ranks(train_sharded, 2, True, bad))
    whole = agreed(run_ranks(train_sharded, 2, False, bad))
    assert sharded["events"] == whole["events"] and sharded["words"] == whole["words"]
    assert "restored to its state before step 4" in reasons(sharded)
    for one, other in zip(sharded["weights"], whole["weights"], strict=True):
        assert np.allclose(one, other, rtol=0, atol=1e-6)


def train_attached(rank, sharded, guarded, bad):
    """A loop like torchtitan's: two optimizers, its own clipping over sharded gradients."""
    torch.manual_seed(0)
    model, wrapped = two_heads(sharded)
    optimizers = [adamw(model.trunk), adamw(nn.ModuleList([model.a, model.b]))]
    guard = Guard(wrapped, optimizers, locate=True).attach() if guarded else None
    bits = []
    for step in range(5):
        x, y = batch(rank, step)
        _, losses = losses_of(wrapped(x), y, "ab" if (step, rank) in bad else "")
        torch.stack([*losses.values()]).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        whole = [p.full_tensor() if sharded else p for p in model.parameters()]  # pyright: ignore
        bits.append([p.detach().numpy().tobytes() for p in whole])
    return {
        "bits": bits,
        "events": [event.line() for event in guard.events.events] if guard else [],
    }


@in_pieces
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_one_line_guards_two_optimizers_of_ranks_that_clip_by_themselves(sharded):
    plain = run_ranks(train_attached, 2, sharded, False, ())
    assert agreed(run_ranks(train_attached, 2, sharded, True, ())) == agreed(plain)
    sick = agreed(run_ranks(train_attached, 2, sharded, True, {(2, 1)}))
    bits = sick["bits"]
    assert [i for i in range(1, 5) if bits[i] == bits[i - 1]] == [2]
    assert bits[1] == plain[0]["bits"][1] and "skipped" in sick["events"][-1]


def run_as_a_script(rank):
    """An infinite loss of rank 1 alone, whose gradients are finite everywhere."""
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ScriptWatch("skip", report=lambda _: None).watching():
        for late in (0, torch.inf if rank else 0, 0):
            (model(torch.ones(1, 2)).sum() + late).backward(), optimizer.step()
    return {"weight": model.module.weight.tolist()}


def test_a_rank_of_a_script_does_not_skip_alone():
    agreed(run_ranks(run_as_a_script, 2))
