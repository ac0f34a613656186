import dataclasses
import platform
from typing import Any

import pytest
import torch

from firstnan import TooFewHealthyParts
from firstnan.faults import Thresholds
from ssl_kd.core.runs.schedule import learning_rate_at
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train import learner as training
from ssl_kd.vision.train import step as guarded
from ssl_kd.vision.train.heads import HeadBank, TEMIHead
from ssl_kd.vision.train.step import HeadTrainer
from tests import processes
from tests.faults.inject import (
    BATCH,
    CLUSTERS,
    CPU,
    DIM,
    HEADS,
    in_forward,
    make_trainer,
    problem,
    set_gradient,
    set_logit,
)
from tests.oracles import objectives as oracle
from tests.train_heads import train


def _views(seed=0):
    x = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(seed))
    return torch.stack([x, x + 0.1])


@pytest.mark.parametrize("how", ["none", "own", "mean"])
def test_one_step_equals_the_float64_oracle(how, monkeypatch):
    """Loss, clipped gradient, AdamW with bias correction, EMA and marginal, all by other means."""
    monkeypatch.setattr(guarded, "WEIGHT_DECAY", 0.1)
    trainer = make_trainer(instance_weight=how, clip_grad=0.02)
    start, views = trainer.state.student.clone(), _views()
    heads = [trainer.bank.head(start, i).double() for i in range(HEADS)]
    logits = torch.stack([h(views.double().flatten(0, 1)).view(2, BATCH, -1) for h in heads])
    q = torch.softmax(logits / 0.1, -1).mean((1, 2)).detach()
    marginal = 0.9 / CLUSTERS + 0.1 * q
    expected = oracle.temi(logits, logits.detach(), marginal, how)

    result = trainer.step(views, 1e-2)
    torch.testing.assert_close(result.loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(trainer.state.marginal.double(), marginal)

    for i, head in enumerate(heads):
        gradients = torch.autograd.grad(expected[i], list(head.parameters()), retain_graph=True)
        for p, g in zip(head.parameters(), gradients, strict=True):
            p.grad = g
        norm = torch.nn.utils.clip_grad_norm_(head.parameters(), 0.02)
        torch.testing.assert_close(result.grad_norm[i].double(), norm, rtol=1e-3, atol=1e-5)
        decay = [p for p in head.parameters() if p.ndim > 1]
        bias = [p for p in head.parameters() if p.ndim == 1]
        groups = [{"params": decay}, {"params": bias, "weight_decay": 0.0}]
        torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1).step()
        updated = trainer.bank.flatten(head)
        # Adam's first step is lr * sign(g): compare where float32 knows the sign.
        known = torch.cat([g.abs().flatten() for g in gradients]) > 1e-5
        torch.testing.assert_close(
            trainer.state.student[i][known], updated[known], rtol=1e-4, atol=1e-5
        )
        ema = 0.9 * start[i] + 0.1 * trainer.state.student[i]
        torch.testing.assert_close(trainer.state.teacher[i], ema)


def _targets(heads, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(CLUSTERS, (heads, 2, BATCH), generator=draw)


def test_fixed_targets_are_learned_from_the_other_view_by_cross_entropy():
    trainer, views = make_trainer(student_temp=0.2, instance_weight="mean"), _views()
    targets = _targets(1)
    heads = [trainer.bank.head(trainer.state.student, i).double() for i in range(HEADS)]
    logs = [h(views.double()).div(0.2).log_softmax(-1) for h in heads]
    other = targets[0].flip(0).unsqueeze(-1)
    expected = torch.stack([-log.gather(-1, other).mean() for log in logs])
    before = trainer.state.marginal.clone()
    with pytest.raises(ValueError, match=f"{HEADS} of {HEADS} heads learn fixed targets: pass"):
        trainer.by_loss.fill_(False)
        trainer.step(views, 1e-2)
    result = trainer.step(views, 1e-2, fixed_targets=targets)
    torch.testing.assert_close(result.loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(trainer.state.marginal, before)  # it is the EMA teachers'


@pytest.mark.parametrize("how", ["none", "own", "mean"])
@pytest.mark.parametrize("chunk", [1, 2, HEADS])
def test_in_one_step_some_heads_learn_fixed_targets_and_others_by_loss(how, chunk, monkeypatch):
    def chunks(n_heads, *other):
        return [slice(i, min(i + chunk, n_heads)) for i in range(0, n_heads, chunk)]

    monkeypatch.setattr(guarded, "head_chunks", chunks)
    views, targets = _views(), _targets(HEADS)
    by_loss = torch.arange(HEADS) % 3 != 1
    mixed, fixed, free = (make_trainer(instance_weight=how) for _ in range(3))
    mixed.by_loss.copy_(by_loss)
    fixed.by_loss.fill_(False)
    result = mixed.step(views, 1e-2, fixed_targets=targets)
    for other, rows in ((fixed, ~by_loss), (free, by_loss)):
        if how == "mean" and other is free:  # the mean is over the heads that learn by LOSS
            continue
        expected = other.step(views, 1e-2, fixed_targets=targets)
        assert torch.equal(result.loss[rows], expected.loss[rows])
        for name in ("student", "teacher", "marginal"):
            actual, wanted = (getattr(t.state, name)[rows] for t in (mixed, other))
            assert torch.equal(actual, wanted), name
    assert result.loss.isfinite().all() and len(set(result.loss.tolist())) == HEADS


def test_a_faulty_head_leaves_the_rows_of_both_kinds_as_they_are():
    views, targets = _views(), _targets(HEADS)
    trainers = make_trainer(), make_trainer()
    for trainer in trainers:
        trainer.by_loss.copy_(torch.arange(HEADS) < 2)
    for sick in (0, HEADS - 1):
        trainers[0].state.student[sick] = torch.nan
    for step in range(3):
        for trainer in trainers:
            trainer.step(views, 1e-2, step, targets)
    well = slice(1, HEADS - 1)
    for name, tensor in trainers[0].state.owned().items():
        assert torch.equal(tensor[well], trainers[1].state.owned()[name][well]), name


def test_a_bad_sample_takes_its_target_with_it():
    trainer, alone = make_trainer(), make_trainer()
    views, targets = _views(), _targets(1)
    kept = torch.arange(BATCH) != 3
    for each in (trainer, alone):
        each.by_loss.fill_(False)
    alone.step(views[:, kept], 1e-2, fixed_targets=targets[..., kept])
    views[1, 3, 2] = torch.nan
    trainer.step(views, 1e-2, fixed_targets=targets)
    assert torch.equal(trainer.state.student, alone.state.student)


def test_the_loss_that_is_shown_begins_with_the_first_and_follows_slowly():
    trainer = make_trainer()
    first = trainer.step(_views(), 1e-2).loss
    torch.testing.assert_close(trainer.state.loss, first)
    second = trainer.step(_views(1), 1e-2).loss
    torch.testing.assert_close(trainer.state.loss, 0.98 * first + 0.02 * second)


def test_all_of_a_checkpoint_is_restored():
    old, new = make_trainer(), make_trainer()
    for name, tensor in old.tensors().items():
        tensor.logical_not_() if tensor.dtype == torch.bool else tensor.fill_(3)
        assert not torch.equal(new.tensors()[name], tensor), name
    new.load(old.tensors())
    for name, tensor in new.tensors().items():
        assert torch.equal(tensor, old.tensors()[name]), name
    counts = old.tensors()["recovery.counts"]  # saved before a kind of fault was added
    new.load(old.tensors() | {"recovery.counts": counts[:, :-1]})
    assert torch.equal(new.recovery.counts[:, :-1], counts[:, :-1])
    assert not new.recovery.counts[:, -1].any()


@pytest.mark.parametrize("name", ["student", "marginal", "health.level", "good.exp_avg"])
def test_a_checkpoint_of_other_heads_is_refused_by_name(name):
    trainer = make_trainer()
    tensors = {key: tensor.clone() for key, tensor in trainer.tensors().items()}
    tensors[name] = tensors[name][:-1]
    with pytest.raises(ValueError, match=rf"{name} is \[{HEADS - 1}.*\], expected \[{HEADS}"):
        trainer.load(tensors)
    del tensors[name]
    with pytest.raises(ValueError, match=f"{name} is missing"):
        trainer.load(tensors)


def test_heads_restart_from_their_teachers():
    trainer = make_trainer()
    for step in range(3):
        trainer.step(_views(step), 1e-2, step)
    before = {name: tensor.clone() for name, tensor in trainer.state.tensors().items()}
    again = torch.tensor([True] + [False] * (trainer.bank.n_heads - 1))
    trainer.begin_again(again, 3)
    after = trainer.state.tensors()
    assert torch.equal(after["student"][0], before["teacher"][0])
    assert not after["exp_avg_sq"][0].any() and after["updates"][0] == after["health.seen"][0] == 0
    assert trainer.tensors()["good_step"].tolist() == [3] + [0] * (trainer.bank.n_heads - 1)
    assert all(torch.equal(after[name][1:], before[name][1:]) for name in before)


def test_sharpened_step_equals_the_oracle_loss():
    trainer = make_trainer(loss="sharpened", teacher_temp=0.05)
    trainer.step(_views(0), 1e-2)  # so that the center is not zero
    center = trainer.state.marginal.double()
    student, teacher = trainer.state.student.clone(), trainer.state.teacher.clone()
    views = _views(1).double().flatten(0, 1)

    def logits(weights):
        rows = [trainer.bank.head(weights, i).double()(views) for i in range(HEADS)]
        return torch.stack(rows).view(HEADS, 2, BATCH, -1)

    expected = oracle.sharpened(logits(student), logits(teacher), center, tt=0.05).detach()
    result = trainer.step(_views(1), 1e-2)
    torch.testing.assert_close(result.loss.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_sample_is_bad_where_it_is_not_finite_and_not_where_it_is_large(value):
    views = torch.full((2, 3, 4), 3e38)  # their sum is infinite
    assert guarded.bad_samples(views).sum() == 0
    views[1, 2, 0], views[0, 1, 3] = value, torch.inf
    assert guarded.bad_samples(views).nonzero().tolist() == [[0, 1], [1, 2]]


PAGES_OF_A_STEP = """
import ctypes, resource
import torch
from ssl_kd.vision.train.step import keep_freed_memory

{prepare}
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [torch.ones(2**20) for _ in range(10)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.slow  # two processes of their own
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how glibc gives memory back")
def test_memory_freed_by_a_step_is_reused():
    """Count the pages that the system maps in a step of ten blocks of 4 MiB."""
    pages = []
    # M_MMAP_THRESHOLD: imports may have freed a large block, which has the effect that is tested.
    for prepare in ("ctypes.CDLL(None).mallopt(-3, 128 << 10)", "keep_freed_memory()"):
        code = PAGES_OF_A_STEP.format(prepare=prepare)
        done = processes.python(processes.ROOT, "-c", code, text=True)
        assert done.returncode == 0, done.stderr
        pages.append(int(done.stdout))
    mapped, kept = pages
    assert kept < mapped / 3


def test_chunks_cover_the_heads_once_and_do_not_change_the_result(monkeypatch):
    for heads, size in ((1, 1), (50, 10**7), (50, 10**6), (48, 2 * 10**5)):
        chunks = guarded.head_chunks(heads, size, torch.device("cpu"))
        assert [i for c in chunks for i in range(heads)[c]] == list(range(heads))
    whole = make_trainer(instance_weight="mean")
    whole.step(_views(), 1e-2)
    monkeypatch.setattr(
        guarded, "head_chunks", lambda heads, size, device: [slice(0, 2), slice(2, 5)]
    )
    parts = make_trainer(instance_weight="mean")
    parts.step(_views(), 1e-2)
    torch.testing.assert_close(whole.state.student, parts.state.student)


def test_float16_products_train_like_float32():
    half = dataclasses.replace(CPU, student=torch.float16, scale=True)
    bank = HeadBank(lambda: TEMIHead(DIM, CLUSTERS, 10, 5), HEADS)
    low = HeadTrainer(bank, VisionSettings(batch_size=BATCH), half, CLUSTERS)
    full = make_trainer()
    for step in range(20):
        a, b = low.step(_views(step), 1e-3), full.step(_views(step), 1e-3)
    assert low.state.health.skipped.sum() == 0 and low.state.student.dtype == torch.float32
    torch.testing.assert_close(a.loss, b.loss, rtol=0.01, atol=0.01)


def test_learning_rate_warms_up_and_ends_near_zero():
    rates = [learning_rate_at(s, 100, 1.0, 0.1) for s in range(100)]
    assert rates[0] == 0.1 and max(rates) == rates[9] == 1.0
    assert all(a >= b for a, b in zip(rates[9:], rates[10:], strict=False)) and rates[-1] < 0.001


def test_events_before_a_stop_are_not_lost():
    x, sampler = problem()
    trainer, events, asked = make_trainer(), [], iter([False] * 3 + [True])
    trainer.state.student[1, 0] = torch.nan
    calls = {"on_events": events.extend, "should_stop": lambda: next(asked)}
    train(trainer, sampler, x.__getitem__, 50, **calls)
    seen = [(event.step, event.part, event.action) for event in events]
    assert seen[:-1] == [(step, "head 1", "skipped") for step in range(1, 4)]
    assert seen[-1] == (3, "head 1", "restored to its state before step 1")


def test_faults_between_checks_are_found_late_with_known_facts(monkeypatch):
    monkeypatch.setattr(training, "LOOK_EVERY_ON_CPU", 10)
    x, sampler = problem()
    faults, saved, trainer = [], [], make_trainer()
    states = []

    def gather(rows):
        step = len(states)
        states.append({n: t[2:3].clone() for n, t in trainer.state.tensors().items()})
        strike(trainer, step)
        return x[rows]

    def keep(fault):
        kept = {name: tensor.clone() for name, tensor in fault.before.items()}
        faults.append(dataclasses.replace(fault, before=kept))

    strike = in_forward(set_gradient(torch.nan), {3, 18, 19})
    train(trainer, sampler, gather, 30, on_fault=keep)
    found = [(f.event.step, f.head, f.exact) for f in faults]
    assert found == [(4, 2, False), (19, 2, True), (20, 2, True)]
    for fault in faults[1:]:
        before = states[fault.event.step - 1]
        assert [n for n, t in fault.before.items() if not torch.equal(t, before[n])] == []

    trainer = make_trainer()
    in_forward(set_logit(torch.nan), {0})(trainer, 0)
    trainer.state.health.retired[:] = torch.tensor([True, True, False, True, True])
    with pytest.raises(TooFewHealthyParts):  # seen at a checkpoint, which is saved all the same
        train(trainer, sampler, x.__getitem__, 60, checkpoint_every=13, on_checkpoint=saved.append)
    assert saved[-1] in (20, 26) and len(saved) == len(set(saved))


def test_the_reported_streak_is_the_real_one(monkeypatch):
    """Where looking is rare, a head may be sick for longer than the patience before it is seen."""
    monkeypatch.setattr(training, "LOOK_EVERY_ON_CPU", 10)
    x, sampler = problem()
    events, trainer = [], make_trainer(learning_rate=1e-2)
    in_forward(set_logit(torch.nan), {0})(trainer, 0)
    trainer.thresholds = Thresholds(restore_after=7)
    train(trainer, sampler, x.__getitem__, 10, on_events=events.extend)
    assert events[-1].stage == "escalation" and events[-1].reason == "10 bad steps in a row"


def test_a_state_that_no_step_has_proved_is_not_kept_as_good(kept_every_50_steps):
    x, sampler = problem()
    trainer = make_trainer()

    def gather(rows):
        if trainer.state.health.run[2] == 50:  # the weights of head 2 after 50 steps are no good
            trainer.state.student[2] *= 1e38
            trainer.state.teacher[2] *= 1e38
        return x[rows]

    train(trainer, sampler, gather, 70)
    assert trainer.tensors()["good_step"].tolist() == [50, 50, 0, 50, 50]


def _interrupted(make, steps, at):
    """The trainer of a run of `steps` steps, and of one that was stopped and resumed on the way."""
    x, sampler = problem()
    whole, first, second = make(), make(), make()
    train(whole, sampler, x.__getitem__, steps)
    asked = iter([False] * at + [True])
    train(first, sampler, x.__getitem__, steps, should_stop=lambda: next(asked))
    torch.rand(7)
    second.load({name: tensor.clone() for name, tensor in first.tensors().items()})
    train(second, sampler, x.__getitem__, steps, start=at)
    return whole, second


def _all_equal(a, b):
    return all(torch.equal(tensor, b.tensors()[name]) for name, tensor in a.tensors().items())


def test_a_resumed_run_restores_from_the_same_state(kept_every_50_steps):
    def make():
        trainer = make_trainer()

        def sick(logits):
            run = trainer.state.health.run  # of its neighbour, which counts the steps
            return set_logit(torch.nan)(logits) if run[1] >= 60 else logits

        in_forward(sick, {0})(trainer, 0)
        return trainer

    whole, resumed = _interrupted(make, 80, at=67)
    assert _all_equal(whole, resumed)
    health = whole.state.health
    assert health.reinitialized[2]
    assert whole.tensors()["good_step"].tolist() == [50, 50, 80, 50, 50]


class _Forgetful(TEMIHead):
    stacked: Any = None

    def __init__(self, in_dim, n_clusters):
        super().__init__(in_dim, n_clusters, 10, 5)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        return super().forward(self.dropout(x))


def test_heads_with_dropout_resume_with_the_same_draws():
    def fresh():
        bank = HeadBank(lambda: _Forgetful(DIM, CLUSTERS), HEADS)
        return HeadTrainer(bank, VisionSettings(batch_size=BATCH), CPU, CLUSTERS)

    torch.manual_seed(1)
    before = torch.get_rng_state()
    whole, resumed = _interrupted(fresh, 6, at=3)
    assert _all_equal(whole, resumed)
    torch.set_rng_state(before)
    x, sampler = problem()
    train(fresh(), sampler, x.__getitem__, 3)
    assert torch.equal(before, torch.get_rng_state())
