"""One guarded step: its numbers, the cost of a bad term, and replays without side effects."""

import math

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from firstnan import TooFewHealthyParts  # noqa: E402
from ssl_kd.core.precision import Precision  # noqa: E402
from ssl_kd.language.losses.teacher_output import LogitsTeacher  # noqa: E402
from ssl_kd.language.models.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.language.train.step import precision_of  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.marks import slow  # noqa: E402
from tests.oracles import token_objectives as oracle  # noqa: E402


@pytest.fixture
def teacher(tiny):
    return FrozenTeacher(tiny.model(spread=0.3))


class Sick:
    """A teacher whose answer holds a NaN at one position, for as long as it is `sick`."""

    def __init__(self, teacher, sick=True):
        self.teacher, self.sick = teacher, sick

    def __call__(self, batch, rows):
        output = self.teacher(batch, rows)
        logits = output.hidden @ output.weight.T
        if self.sick:
            logits[:, 5] = math.nan  # in every row
        return LogitsTeacher(logits)


def poison_student(distiller):
    """Make every hidden state of the student NaN; returns how to undo that."""

    def hook(module, args, out):
        out.last_hidden_state = out.last_hidden_state * math.nan

    return distiller.student.base_model.register_forward_hook(hook).remove


def state_of(distiller):
    """Weights and moments, by name."""
    names = dict(distiller.student.named_parameters())
    moments = {
        f"{name} {key}": value
        for name, p in names.items()
        for key, value in distiller.optimizer.state.get(p, {}).items()
    }
    return {k: v.detach().clone() for k, v in (names | moments).items()}


def by_hand(student, teacher, batch, settings, rate):
    """The step in float64: ce, kd, norm of the gradient, and the student after AdamW."""
    student, ce, kd, _ = oracle.step(student, teacher, batch, settings)
    gradients = {name: p.grad.clone() for name, p in student.named_parameters()}
    norm = nn.utils.clip_grad_norm_(student.parameters(), settings.clip_grad)
    groups = [[p for p in student.parameters() if (p.ndim >= 2) == wide] for wide in (True, False)]
    torch.optim.AdamW(
        [
            {"params": groups[0], "weight_decay": settings.weight_decay},
            {"params": groups[1], "weight_decay": 0.0},
        ],
        lr=rate,
        betas=(0.9, 0.95),
    ).step()
    return ce, kd, norm.item(), student, gradients


# --- the numbers of a step ------------------------------------------------------------------------


@pytest.mark.parametrize(("packing", "are"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "reverse_kl:5"])
def test_a_step_equals_the_same_step_by_hand_in_float64(
    tiny, teacher, divergence, packing, free, are
):
    free(are)
    options = {"alpha_ce": 0.7, "alpha_kd": 0.2, "temperature": 1.5, "clip_grad": 0.5}
    distiller = tiny.distiller(teacher, divergence=divergence, weight_decay=0.1, **options)
    batch = tiny.blocks(packing=packing).batch(range(3))
    expected = by_hand(distiller.student, teacher.model, batch, distiller.settings, 3e-3)
    ce, kd, norm, after, gradients = expected

    result = distiller.step([batch], 3e-3)
    assert result.updated and result.tokens == int(batch.counts.sum()) == distiller.tokens
    assert result.ce == pytest.approx(ce, rel=1e-5)
    assert result.kd == pytest.approx(kd, rel=1e-4)
    assert result.loss == pytest.approx(0.7 * ce + 0.2 * kd, rel=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-4) and norm > 0.5  # it was clipped
    ours = dict(distiller.student.named_parameters())
    for name, p in after.named_parameters():
        # Adam's first step is lr * sign(g): compare where float32 knows the sign.
        known = gradients[name].abs() > 1e-5
        torch.testing.assert_close(
            ours[name][known].double(), p[known].detach(), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("with_teacher", [True, False])
def test_four_small_batches_are_one_large_one(tiny, teacher, with_teacher):
    blocks = tiny.blocks()
    lengths = blocks.counts.sum(1)
    rows = lengths.argsort()[torch.tensor([0, 1, 2, 3, -4, -3, -2, -1])]
    assert lengths[rows[-1]] > 4 * lengths[rows[0]]
    # One small batch without a single target.
    blocks.counts[rows[2:4]] = False
    asked = teacher if with_teacher else None
    one, four = (tiny.distiller(asked, clip_grad=None) for _ in range(2))
    whole = one.step([blocks.batch(rows)], 1e-3)
    parts = four.step([blocks.batch(some) for some in rows.split(2)], 1e-3)
    assert whole.tokens == parts.tokens == int(lengths[rows].sum() - lengths[rows[2:4]].sum())
    for name in ("ce", "loss", "grad_norm", *(["kd"] if with_teacher else [])):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-5)
    (a, b) = (
        [d.optimizer.state[p]["exp_avg"] for p in d.student.parameters()] for d in (one, four)
    )
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-7)


def test_gradient_checkpointing_changes_no_bit(tiny, teacher):
    batch = tiny.blocks().batch(range(4))
    plain, less = (tiny.distiller(teacher, gradient_checkpointing=c) for c in (False, True))
    layers = [m for m in less.student.modules() if getattr(m, "gradient_checkpointing", False)]
    assert layers
    for _ in range(3):
        assert plain.step([batch], 1e-2) == less.step([batch], 1e-2)
    assert same(state_of(plain), state_of(less))


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, slow(torch.bfloat16)])
def test_half_precision_follows_float32_without_a_skipped_step(tiny, dtype):
    blocks, results = tiny.blocks(), {}
    for precision in (tiny.precision, tiny.half(dtype)):
        teacher = FrozenTeacher(tiny.model(spread=0.3), dtype=precision.teacher)
        distiller = tiny.distiller(teacher, precision=precision)
        assert all(p.dtype == torch.float32 for p in distiller.student.parameters())
        rows = [torch.arange(4 * k, 4 * k + 4) % len(blocks) for k in range(30)]
        results[precision.student] = [distiller.step([blocks.batch(r)], 3e-3) for r in rows]
        assert int(distiller.guard.updates[0]) == 30 and len(distiller.guard.events) == 0
    full, half = results[torch.float32], results[dtype]
    assert full != half  # it was computed in another dtype
    assert full[-1].ce < 0.8 * full[0].ce
    for name in ("ce", "kd", "grad_norm"):
        a, b = (torch.tensor([getattr(r, name) for r in side[-5:]]).mean() for side in (full, half))
        torch.testing.assert_close(a, b, rtol=0.05, atol=0)


def test_precision_follows_the_request_where_the_device_supports_it(tiny):
    for dtype in ("auto", "float32"):
        precision = precision_of(tiny.settings(model_dtype=dtype, device="cpu"))
        assert (precision.student, precision.teacher) == (torch.float32, torch.float32)
        assert not precision.scale
    asked = precision_of(tiny.settings(model_dtype="float16", device="cpu"))
    assert asked.student != torch.float16 and "fp16 was requested" in str(asked)


# --- a sick term ----------------------------------------------------------------------------------


@pytest.mark.parametrize("are", [True, False])
def test_a_nan_of_the_teacher_leaves_a_step_of_cross_entropy_alone(tiny, teacher, free, are):
    """To the bit what it would be had the teacher not been asked."""
    free(are)
    blocks = tiny.blocks()
    batches = [blocks.batch(range(4)), blocks.batch(range(4, 8))]
    sick, alone = tiny.distiller(Sick(teacher)), tiny.distiller(None)
    for _ in range(2):
        got, expected = sick.step(batches, 1e-2), alone.step(batches, 1e-2)
        assert got.updated and math.isnan(got.kd) and expected.kd is None
        assert (got.ce, got.loss, got.grad_norm) == (expected.ce, expected.loss, expected.grad_norm)
        assert same(state_of(sick), state_of(alone))


@pytest.mark.parametrize("kind", ["teacher", "student"])
def test_explaining_changes_nothing(tiny, teacher, kind, monkeypatch):
    """Weights, moments, random numbers and the dropout of the steps after it."""
    blocks, states = tiny.blocks(), []
    for explains in (True, False):
        torch.manual_seed(5)
        student = tiny.model("GPT2", seed=1, resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)
        asked = Sick(teacher)
        distiller = tiny.distiller(asked, student=student)
        if not explains:
            monkeypatch.setattr(distiller.explainer, "explain", lambda *args: None)
        results = []
        for step in range(4):
            asked.sick = (kind, step) in (("teacher", 1), ("teacher", 2))
            undo = poison_student(distiller) if (kind, step) == ("student", 1) else lambda: None
            both = [blocks.batch([4 * step, 4 * step + 1]), blocks.batch([4 * step + 2])]
            results.append(distiller.step(both, 1e-2))  # the first one explains it
            undo()
        assert any(e.action == "explained" for e in distiller.guard.events.events) == explains
        states.append((state_of(distiller), torch.get_rng_state(), results))
    (a, rng_state, first), (b, other_rng_state, second) = states
    assert same(a, b) and torch.equal(rng_state, other_rng_state)
    assert repr(first) == repr(second)  # NaN equals no NaN


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_replay_sees_the_same_dropout(tiny, device):
    """A fault that one dropped activation causes is found again."""
    student = tiny.model("GPT2", seed=1, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.5)
    teacher = FrozenTeacher(tiny.model(spread=0.3), device=device)
    distiller = tiny.distiller(teacher, student, Precision.for_device(device, False))
    seen = []

    def hook(module, args, out):
        seen.append(out.clone())
        return out * math.nan

    student.transformer.drop.register_forward_hook(hook)
    distiller.step([tiny.blocks().batch(range(4), device)], 1e-2)
    # The step; the search for sick rows and what is left, which are none; the replay of three.
    assert len(seen) == 6
    assert all(torch.equal(seen[0], again) for again in [seen[1], *seen[3:]])


# --- sick for long --------------------------------------------------------------------------------


def test_twenty_bad_steps_restart_and_twenty_more_end_the_run(tiny, teacher):
    """As the preset `ultra_stable` has it."""
    batch = tiny.blocks().batch(range(4))
    distiller = tiny.distiller(teacher, stop_after=None)
    distiller.step([batch], 1e-2)
    poison_student(distiller)
    with pytest.raises(TooFewHealthyParts, match="last 20 steps; the last good state was restored"):
        for _ in range(40):
            distiller.step([batch], 1e-2)
    event = next(e for e in distiller.guard.events.events if e.stage == "escalation")
    assert (event.step, event.reason) == (21, "20 bad steps in a row")


# --- resume ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_a_distiller_continues_a_loaded_state_bit_for_bit(tiny, teacher, kind, tmp_path):
    blocks = tiny.blocks()
    dropout = {"resid_pdrop": 0.1, "attn_pdrop": 0.1} if kind == "GPT2" else {}

    def make():
        # A scale that grows is a part of the state, too.
        student = tiny.model(kind, seed=1, **dropout)
        return tiny.distiller(Sick(teacher), student, tiny.half())

    def go(distiller, steps):
        for step in steps:
            torch.manual_seed(step)
            distiller.teacher.answers[0].sick = step == 3
            distiller.step([blocks.batch(range(4 * step, 4 * step + 4))], 1e-2)

    whole, first, second = make(), make(), make()
    go(whole, range(8))
    go(first, range(5))
    torch.save(first.state(), tmp_path / "state.pt")
    second.load(torch.load(tmp_path / "state.pt", weights_only=True))
    go(second, range(5, 8))
    assert same(state_of(whole), state_of(second))
    a, b = whole.state(), second.state()
    assert (a["tokens"], a["guard"]["steps"]) == (b["tokens"], b["guard"]["steps"])
    assert same(a["guard"]["health"], b["guard"]["health"])
    assert same(a["guard"]["terms"]["kd"], b["guard"]["terms"]["kd"])
    assert torch.equal(a["guard"]["scale"], b["guard"]["scale"])
