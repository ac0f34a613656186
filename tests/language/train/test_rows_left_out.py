"""A NaN in one row of a batch costs that row alone."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from firstnan import TooFewHealthyParts  # noqa: E402
from ssl_kd.language.losses.teacher_output import LogitsTeacher, TopKTeacher  # noqa: E402
from ssl_kd.language.losses.token_distillation import next_token_targets  # noqa: E402
from ssl_kd.language.models.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.language.settings import LanguageSettings  # noqa: E402
from ssl_kd.language.teachers.live import Live  # noqa: E402
from ssl_kd.language.train.rows_left_out import overwritten, without  # noqa: E402
from ssl_kd.language.train.step import Distiller  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.faults.inject_language import (  # noqa: E402
    BLOCK,
    CPU,
    FAST,
    ByHand,
    make_model,
    make_rows,
    trained_student,
)
from tests.faults.matrix import row  # noqa: E402
from tests.marks import slow  # noqa: E402

ROWS, NAN = 8, math.nan


class SickAnswer:
    """A teacher whose answers to some rows of the data are spoiled, in one of their tokens."""

    def __init__(self, bad, value=NAN, kind="logits", place=0):
        self.frozen, self.bad, self.value = FrozenTeacher(make_model(seed=2)), set(bad), value
        self.kind, self.place, self.asked = kind, place, 0

    def __call__(self, batch, rows):
        self.asked += 1
        answer: Any = self.frozen(batch, rows)
        numbers = batch.rows[rows // batch.input_ids.shape[1]].tolist()
        if self.kind == "hidden":
            spoiled = answer.hidden.clone()
        else:
            spoiled = answer.hidden @ answer.weight.T
        if self.kind == "top k":
            top = (spoiled / 2).log_softmax(-1).topk(4)
            spoiled = top.values.clone()
        for number in self.bad:
            if number in numbers:
                spoiled[numbers.index(number) + self.place, 1] = self.value
        if self.kind == "hidden":
            return replace(answer, hidden=spoiled)
        if self.kind == "top k":
            return TopKTeacher(top.indices, spoiled, (1 - top.values.exp().sum(-1)).log())
        return LogitsTeacher(spoiled)


def spoil_student(model, bad_token, value=NAN, layer=0):
    """Make what a layer puts out not finite in each row that holds a token."""
    seen = {}

    def look(module, args, kwargs):
        seen["ids"] = kwargs["input_ids"]

    def spoil(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        rows = (seen["ids"] == bad_token).any(1)[:, None, None]
        hidden = hidden.masked_fill(rows, value)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    model.register_forward_pre_hook(look, with_kwargs=True)
    model.model.register_forward_pre_hook(look, with_kwargs=True)
    model.model.layers[layer].register_forward_hook(spoil)
    return model


def marked(number, token=63):
    """Rows of which one alone holds a token."""
    rows = make_rows(ROWS)
    ids = torch.where(rows.ids == token, token - 1, rows.ids)
    ids[number, 4] = token
    return replace(rows, ids=ids)


def run(source=None, steps=2, rows=None, batch_size=ROWS, **options):
    rows = make_rows(ROWS) if rows is None else rows
    source = None if source is None else Live(source)
    return trained_student(steps=steps, rows=rows, source=source, batch_size=batch_size, **options)


class Without(ByHand):
    """A distiller whose batches lack rows by hand."""

    def __init__(self, *args, rows, **options):
        super().__init__(*args, **options)
        self._rows = rows

    def step(self, batches, learning_rate):
        out = [torch.tensor([int(n) in self._rows for n in batch.rows]) for batch in batches]
        fewer = [without(batch, rows) for batch, rows in zip(batches, out, strict=True)]
        return super().step(fewer, learning_rate)


@row(161)
@pytest.mark.parametrize("value", [NAN, slow(math.inf)])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_row_that_the_student_cannot_read_is_left_out_to_the_bit(monkeypatch, value, layer):
    rows, bad = marked(3), 3
    sick = run(steps=3, rows=rows, student=spoil_student(make_model(seed=1), 63, value, layer))
    monkeypatch.setattr(
        "tests.faults.inject_language.ByHand",
        lambda *args, **options: Without(*args, rows={bad}, **options),
    )
    twin = run(steps=3, rows=rows)
    assert same(sick.owned(), twin.owned()) and not twin.events
    assert all(result.updated and math.isfinite(result.loss) for result in sick.results)
    left_out = [e for e in sick.events if e.action == "rows left out"]
    assert [(e.step, e.part, e.reason) for e in left_out] == [
        (step, part, f"not finite in rows {bad}") for step in (1, 2, 3) for part in ("ce", "kd")
    ]
    for mine, theirs in zip(sick.results, twin.results, strict=True):
        assert (mine.ce, mine.kd) == (theirs.ce, theirs.kd)


@row(161)
@pytest.mark.parametrize("kind", ["logits", "hidden", "top k"])
def test_a_row_that_the_teacher_cannot_judge_loses_its_divergence_alone(kind):
    bad = 5
    teacher = SickAnswer({bad}, kind=kind)
    sick = run(teacher, steps=1)
    assert teacher.asked == 2  # once more for the explanation, not for the second pass
    assert [(e.part, e.action) for e in sick.events if e.stage == "loss"] == [
        ("kd", "rows left out")
    ]
    assert "rows 5" in sick.events[0].reason

    # By hand, with a teacher that is well, from the weights that both began with.
    settings = LanguageSettings(**{**FAST, "batch_size": ROWS, "block_size": BLOCK})
    distiller = Distiller(make_model(seed=1), settings, CPU, Live(SickAnswer((), kind=kind)))
    batch = make_rows(ROWS).batch([*range(ROWS)])
    out = torch.arange(ROWS) == bad
    n = batch.counts.sum()
    ce = distiller.terms(batch)["ce"] / n
    kd = distiller.terms(without(batch, out))["kd"]
    student = {name: p for name, p in distiller.student.named_parameters() if p.requires_grad}
    left = n - batch.counts[bad].sum()
    gradients = torch.autograd.grad(0.5 * ce + 0.5 * kd / left, [*student.values()])
    moments = sick.distiller.optimizer.state
    norm = torch.nn.utils.get_total_norm(gradients)
    assert sick.results[0].grad_norm == pytest.approx(norm.item(), rel=1e-5)
    clip = min(1.0, (sick.distiller.settings.clip_grad or math.inf) / norm.item())
    trained = [p for p in sick.distiller.student.parameters() if p.requires_grad]
    for p, gradient in zip(trained, gradients, strict=True):
        torch.testing.assert_close(
            moments[p]["exp_avg"], 0.1 * clip * gradient, rtol=1e-4, atol=1e-7
        )
    assert sick.results[0].kd == pytest.approx((kd / left).item(), rel=1e-5)
    assert sick.results[0].ce == pytest.approx(ce.item(), rel=1e-5)


@row(161)
def test_contents_of_a_bad_row_change_no_bit():
    found = [
        run(SickAnswer({5}, value=value, place=place), steps=3).owned()
        for value, place in ((NAN, 0), (NAN, 2))
    ]
    assert same(*found)
    assert not same(found[0], run(SickAnswer(()), steps=3).owned())


@row(161)
def test_accumulated_batches_leave_out_the_same_row_as_one_large_batch():
    whole = run(SickAnswer({2}))
    for size, accumulated in ((4, 2), (1, 8)):
        some = run(
            SickAnswer({2}),
            batch_size=size,
            gradient_accumulation_steps=accumulated,
        )
        for a, b in zip(some.results, whole.results, strict=True):
            assert a.ce == pytest.approx(b.ce, rel=1e-4)
            assert size == 1 or a.kd == pytest.approx(b.kd, rel=1e-4)
            assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)


@row(161)
@pytest.mark.parametrize("sick", ["teacher", "student"])
def test_a_row_that_is_faulty_in_every_step_ends_the_run(sick):
    options = {"steps": 9, "stop_after": 3, "rows": marked(3)}
    if sick == "student":
        options["student"] = spoil_student(make_model(seed=1), 63)
    with pytest.raises(TooFewHealthyParts, match="of the last 3 steps, in whole or of some rows"):
        run(SickAnswer({3}) if sick == "teacher" else None, **options)


@row(161)
def test_once_the_row_is_well_the_term_is_healthy_again():
    teacher = SickAnswer({3})

    def cure(distiller, step):
        if step == 2:
            teacher.bad = set()

    found = run(teacher, strike=cure, steps=9, stop_after=3)
    assert [e.action for e in found.events if e.part == "kd" and e.stage == "loss"] == [
        "rows left out",
        "rows left out",
        "used again",
    ]
    assert all(result.learned("kd") for result in found.results)


@pytest.mark.parametrize("cut", [[], [0], [1, 3], [0, 1, 2, 3]])
def test_an_overwritten_row_holds_another_and_has_no_target(cut):
    batch = make_rows(4).batch([0, 1, 2, 3])
    out = torch.zeros(4, dtype=torch.bool)
    out[cut] = True
    found = overwritten(batch, out)
    assert found.input_ids.shape == batch.input_ids.shape and torch.equal(found.rows, batch.rows)
    assert not found.counts[out].any() and torch.equal(found.counts[~out], batch.counts[~out])
    for name in ("input_ids", "position_ids", "documents"):
        mine, theirs = getattr(found, name), getattr(batch, name)
        assert torch.equal(mine[~out], theirs[~out])
        if cut and len(cut) < 4:
            healthy = int((~out).nonzero()[0])
            assert all(torch.equal(mine[i], theirs[healthy]) for i in cut)


def test_generated_rows_that_cannot_be_compared_have_terms_of_0(tiny):
    """Neither the text nor the teacher judges them."""
    distiller = tiny.distiller(FrozenTeacher(tiny.model(spread=0.3)))
    batch = replace(tiny.blocks().batch(range(3)), written=3)
    places = next_token_targets(batch.input_ids, batch.counts)
    answers = distiller.teacher.answer(batch, places[0], None)
    left_out = {"kd": torch.ones(3, dtype=torch.bool)}
    outputs = distiller._forward(batch)
    terms = distiller._terms_of(batch, places, outputs, answers, left_out)
    assert terms["ce"] == 0 and terms["kd"] == 0
    terms["ce"].backward()
    assert all(p.grad is None or not p.grad.any() for p in distiller.student.parameters())
