"""Loss terms beside `ce` and `kd`: each fails, counts, is weighed, logged and resumed alone."""

import contextlib
import math

import pytest
import torch

from ssl_kd.language.fault_explainer import trained
from ssl_kd.language.sources import Plain
from ssl_kd.language.step import Distiller
from ssl_kd.language.train import train
from ssl_kd.teachers.frozen import FrozenTeacher
from tests.bits import same


class Narrow:
    """The square of a learned map of what the student's last layer puts out."""

    name, weight = "narrow", 0.25

    def __init__(self, student):
        self.student, self.sick, self.seen = student, False, []
        torch.manual_seed(3)
        self.module = torch.nn.Linear(student.config.hidden_size, 1)

    def held(self, batch_size, block_size, itemsize):
        return 0

    @contextlib.contextmanager
    def listening(self):
        hook = self.student.model.norm.register_forward_hook(self._see)
        yield
        hook.remove()

    def _see(self, module, arguments, out):
        self.seen = [out]

    def __call__(self, batch, rows):
        found = self.module(self.seen[-1].flatten(0, 1)[rows].float()).square().sum()
        return found * math.nan if self.sick else found

    def count(self, batch):
        return 3 * len(batch.rows)


@pytest.fixture(scope="module")
def teacher(tiny):
    return FrozenTeacher(tiny.model(spread=0.3))


@pytest.fixture
def with_term(tiny, teacher):
    """A distiller with the term, or without."""

    def make(others=True, **changes):
        student = tiny.model(seed=1)
        terms = [Narrow(student)] if others else []
        settings = tiny.settings(**changes)
        return Distiller(student, settings, tiny.precision, Plain(teacher), others=terms)

    return make


def student_of(distiller):
    """All that is left of a step in the student: weights and moments."""
    names = {p: n for n, p in distiller.student.named_parameters()}
    moments = {names[p]: s for p, s in distiller.optimizer.state.items() if p in names}
    return distiller.student.state_dict(), moments


def test_a_term_is_a_mean_over_what_it_counts_and_is_weighed(tiny, with_term):
    distiller, batches = with_term(), [tiny.blocks().batch(rows) for rows in ([0, 1, 2], [3])]
    sums = [distiller.terms(batch)["narrow"].item() for batch in batches]
    result = distiller.step(batches, 0.0)
    assert [*result.terms] == ["ce", "kd", "narrow"]
    assert result.terms["narrow"] == pytest.approx(sum(sums) / 12, rel=1e-6)
    expected = 0.5 * result.ce + 0.5 * result.kd + 0.25 * result.terms["narrow"]
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert distiller.weights == {"ce": 0.5, "kd": 0.5, "narrow": 0.25}


def test_the_gradient_is_that_of_the_weighted_sum(tiny, with_term):
    distiller, batch = with_term(clip_grad=None), tiny.blocks().batch(range(4))
    terms, counts = distiller.terms(batch), distiller.counts([batch])
    weights = distiller.weights
    loss = torch.stack([weights[name] * terms[name] / counts[name] for name in weights]).sum()
    leaves = [p for group in distiller.optimizer.param_groups for p in group["params"]]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, leaves)])
    assert distiller.step([batch], 0.0).grad_norm == pytest.approx(float(expected.norm()), rel=1e-5)


def test_a_nan_in_another_term_leaves_the_step_as_without_it_to_the_bit(tiny, with_term):
    blocks = tiny.blocks()
    sick, alone = with_term(), with_term(others=False)
    for step in range(3):
        sick.others[0].sick = True
        batch = blocks.batch(range(4 * step, 4 * step + 4))
        got, expected = sick.step([batch], 1e-2), alone.step([batch], 1e-2)
        assert got.updated and math.isnan(got.terms["narrow"])
        assert (got.ce, got.kd, got.loss) == (expected.ce, expected.kd, expected.loss)
        assert got.grad_norm == expected.grad_norm
        assert same(student_of(sick), student_of(alone))
    assert sick.learned == {"ce": 3, "kd": 3, "narrow": 0}
    assert [e.part for e in sick.guard.events.events if e.action == "cut out"] == ["narrow"] * 3
    begun = Narrow(sick.student).module.weight
    assert torch.equal(sick.others[0].module.weight, begun)
    sick.others[0].sick = False
    assert sick.step([batch], 1e-2).learned("narrow")
    assert not torch.equal(sick.others[0].module.weight, begun)


def test_a_nan_in_kd_leaves_the_other_term_learning(tiny, with_term):
    distiller, batch = with_term(), tiny.blocks().batch(range(4))
    answer = distiller.source.answers[0]
    head = answer.model.lm_head.weight
    before = head.clone()
    try:
        head.data.fill_(math.nan)
        result = distiller.step([batch], 1e-2)
    finally:
        head.data.copy_(before)
    assert math.isnan(result.kd) and result.learned("narrow") and not result.learned("kd")
    assert result.loss == pytest.approx(0.5 * result.ce + 0.25 * result.terms["narrow"])


def test_the_log_has_a_column_and_a_rate_of_each_term(tiny, with_term):
    distiller, rows = with_term(), []
    distiller.others[0].sick = True
    train(distiller, tiny.blocks(), 2, on_log=rows.append)
    assert all(row["narrow"] is None and row["narrow_success_rate"] == 0 for row in rows)
    assert all(row["kd_success_rate"] == 1 and row["kd"] > 0 for row in rows)


def test_what_a_term_trains_is_resumed_to_the_bit(tiny, with_term, tmp_path):
    batch = tiny.blocks().batch(range(4))
    whole, first, second = with_term(), with_term(), with_term()
    for distiller in (whole, first):
        distiller.step([batch], 1e-2)
    torch.save(first.state(), tmp_path / "state.pt")
    second.load(torch.load(tmp_path / "state.pt", weights_only=True))
    results = [distiller.step([batch], 1e-2) for distiller in (whole, second)]
    assert results[0] == results[1] and second.learned["narrow"] == 2
    assert same(whole.others[0].module.state_dict(), second.others[0].module.state_dict())
    assert same(student_of(whole), student_of(second))
    assert "narrow weight" in trained(whole)  # a recorded fault is replayed with it
