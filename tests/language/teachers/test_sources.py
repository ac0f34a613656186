"""Steps with mixtures of experts and with teachers of another tokenizer."""

import copy
import math
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from ssl_kd.language.losses.token_distillation import next_token_targets  # noqa: E402
from ssl_kd.language.models.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.language.models.mixture import Routing  # noqa: E402
from ssl_kd.language.teachers.aligned import Aligned  # noqa: E402
from ssl_kd.language.teachers.live import Live  # noqa: E402
from ssl_kd.language.teachers.routed import Routed  # noqa: E402
from ssl_kd.language.text.aligned import aligned_blocks  # noqa: E402
from ssl_kd.language.train.step import Distiller  # noqa: E402
from tests.bits import changed, same  # noqa: E402


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def routed(tiny, mode, precision=None, **changes) -> Any:
    """A distiller that follows a small mixture of experts."""
    precision = precision or tiny.precision
    settings = tiny.settings(router_mode=mode, **{"router_lr": 1e-2, **changes})
    frozen = FrozenTeacher(tiny.model("Mixtral", spread=0.3), dtype=precision.teacher)
    checkpointing = settings.gradient_checkpointing
    how = {"scale_loss": precision.scale, "gradient_checkpointing": checkpointing}
    source = Routed(frozen, settings, **how)
    return Distiller(tiny.model(seed=1), settings, precision, source)


def go(distiller, blocks, steps, rate=1e-2, size=4):
    results = []
    for step in steps:
        torch.manual_seed(step)
        rows = torch.arange(4 * step, 4 * step + 4)
        results.append(distiller.step([blocks.batch(some) for some in rows.split(size)], rate))
    return results


def on_batch(distiller, batch, teacher_mode, temperature, student=None):
    """Mean KL(q || p) of a batch by definition, and the teacher's own cross-entropy."""
    source, student = distiller.teacher, student or distiller.student
    rows, targets = next_token_targets(batch.input_ids, batch.counts)
    with torch.no_grad(), source.mixture.using(Routing(teacher_mode)):
        p = (
            source.frozen[0]
            .model(**batch.model_inputs(), use_cache=False)
            .logits.flatten(0, 1)[rows]
        )
        q = student(**batch.model_inputs(), use_cache=False).logits.flatten(0, 1)[rows]
    log_p, log_q = (x.double().div(temperature).log_softmax(-1) for x in (p, q))
    kl = (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    ce = -p.log_softmax(-1).gather(1, targets[:, None]).mean()
    return float(temperature**2 * kl), float(ce)


# --- mixtures of experts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "half"),
    [
        ({"mode": "native"}, False),
        ({"mode": "all"}, True),
        ({"mode": "ka"}, False),
        ({"mode": "sar"}, False),
        ({"mode": "sar", "gradient_checkpointing": True}, True),
    ],
    ids=str,
)
def test_every_router_mode_trains_the_student_and_only_sar_the_router(
    tiny, changes, half, monkeypatch
):
    monkeypatch.setattr("ssl_kd.language.teachers.routed.KA_LAMBDA", 0.5)
    blocks = tiny.blocks()
    precision = tiny.half() if half else None
    distiller = routed(tiny, precision=precision, alpha_ce=0.0, alpha_kd=1.0, **changes)
    before = weights(distiller.teacher.frozen[0].model)
    results = go(distiller, blocks, [*range(5), 0])
    assert all(r.updated and math.isfinite(r.kd) for r in results)
    assert results[-1].kd < 0.98 * results[0].kd  # the same batch and draw of experts
    moved = changed(before, weights(distiller.teacher.frozen[0].model))
    routers = set(distiller.teacher.mixture.router_parameters())
    assert moved == (routers if changes["mode"] == "sar" else set()) and len(routers) == 2
    learns = {"router", "router_drift", "router_entropy", "teacher_ce"}
    assert set(results[-1].router) == (learns if changes["mode"] == "sar" else set())
    assert len(distiller.guard.events) == 0


def test_the_losses_are_those_of_the_paper(tiny):
    """KL(q || p), the teacher with all experts; in sar with the router as the step has left it."""
    batch = tiny.blocks().batch(range(4))
    for mode in ("all", "sar"):
        distiller = routed(tiny, mode, temperature=1.0, router_lr=0.1)
        student = copy.deepcopy(distiller.student)
        result = distiller.step([batch], 1e-2)
        kl, _ = on_batch(distiller, batch, "all", 1.0, student)
        assert result.kd == pytest.approx(kl, rel=1e-4)


def test_an_adapted_router_is_saved_and_loaded_into_the_teacher(tiny, tmp_path):
    blocks = tiny.blocks()
    distiller = routed(tiny, "sar")
    go(distiller, blocks, range(3))
    file = tmp_path / "router.safetensors"
    distiller.teacher.mixture.save_router(file)
    again = routed(tiny, "all", router_weights=str(file))
    assert same(
        dict(distiller.teacher.mixture.router_parameters()),
        dict(again.teacher.mixture.router_parameters()),
    )
    batch = blocks.batch(range(4))
    student = distiller.student
    assert on_batch(again, batch, "all", 1.0, student) == on_batch(distiller, batch, "all", 1.0)
    # What it drifted from is the router as the teacher came.
    adapted = routed(tiny, "sar", router_weights=str(file)).step([batch], 0.0)
    assert adapted.router["router_drift"] > 1e-6


def test_the_router_learns_from_each_batch_of_a_step(tiny):
    distiller, blocks = routed(tiny, "sar"), tiny.blocks()
    result = distiller.step([blocks.batch([0, 1]), blocks.batch([2, 3])], 1e-3)
    assert result.updated and int(distiller.teacher.router.guard.updates) == 2


# --- foreign tokenizers ---------------------------------------------------------------------------


def aligned(tiny, how, precision=None, student=None, kind="Llama", **changes) -> Any:
    """A distiller whose teacher has another tokenizer, and its rows."""
    precision = precision or tiny.precision
    settings = tiny.settings(align=how, alpha_kd=1.0, **changes)
    wide = {"hidden_size": 48, "num_key_value_heads": 4} if kind == "Llama" else {}
    theirs = tiny.model(kind, seed=2, tokenizer=tiny.other_tokenizer, spread=0.3, **wide)
    frozen = FrozenTeacher(theirs, dtype=precision.teacher)
    teacher = Routed(frozen, settings) if kind == "Mixtral" else Live(frozen)
    kind = settings.kind_of_divergence
    source = Aligned(teacher, settings, divergence=kind, draws=settings.draws)
    student = student or tiny.model(seed=1)
    blocks = aligned_blocks(tiny.texts(24), tiny.tokenizer, tiny.other_tokenizer, 64)
    return Distiller(student, settings, precision, source), blocks


each = pytest.mark.parametrize("how", ["uld", "chunks"])


@pytest.mark.parametrize(("how", "half"), [("uld", False), ("chunks", False), ("chunks", True)])
def test_every_alignment_is_learned_from(tiny, how, half):
    distiller, blocks = aligned(tiny, how, tiny.half() if half else None)
    batch = blocks.batch(range(6))
    results = [distiller.step([batch], 1e-2) for _ in range(6)]
    assert all(r.updated for r in results)
    assert results[-1].kd < 0.9 * results[0].kd and results[-1].loss < 0.9 * results[0].loss
    assert len(distiller.guard.events) == 0
    assert all(p.grad is None for p in distiller.teacher.models["teacher"].parameters())


@each
def test_small_aligned_batches_are_one_large_one(tiny, how):
    """The mean is over the groups of the whole step, whatever batch they are in."""
    seen = []
    for size in (8, 2):
        distiller, blocks = aligned(tiny, how, clip_grad=None)
        blocks.student.counts[2:4, 3:] = False  # batches with few and with many groups
        rows = torch.arange(8)
        result = distiller.step([blocks.batch(some) for some in rows.split(size)], 1e-3)
        trained = [*distiller.student.parameters()]
        seen.append((result, [distiller.optimizer.state[p]["exp_avg"] for p in trained]))
    (whole, moments), (parts, others) = seen
    for name in ("ce", "kd", "grad_norm"):
        assert getattr(whole, name) == pytest.approx(getattr(parts, name), rel=1e-5)
    for a, b in zip(moments, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


@each
def test_an_aligned_mixture_is_followed_in_the_mean_of_its_draws(tiny, how, monkeypatch):
    kds = []
    for draws in (1, 3):
        monkeypatch.setattr("ssl_kd.language.settings.groups.KA_DRAWS", draws)
        monkeypatch.setattr("ssl_kd.language.teachers.routed.KA_LAMBDA", 1.0)
        distiller, blocks = aligned(tiny, how, kind="Mixtral", router_mode="ka")
        batch = blocks.batch(range(4))
        torch.manual_seed(1)
        with torch.no_grad():
            kds.append([float(distiller.terms(batch)["kd"]) for _ in range(3 // draws)])
    assert len(set(kds[0])) == 3
    assert kds[1] == pytest.approx([sum(kds[0]) / 3], rel=1e-5)


@pytest.mark.parametrize(("how", "kind"), [("chunks", "Llama"), ("uld", "Gemma2")])
def test_a_nan_from_an_aligned_teacher_leaves_cross_entropy_alone(tiny, how, kind):
    students = [tiny.model(kind, seed=1, head_dim=8) for _ in range(2)]
    sick, blocks = aligned(tiny, how, student=students[0])
    alone = Distiller(students[1], sick.settings, tiny.precision)
    norm = sick.teacher.models["teacher"].model.norm.weight
    norm.data.fill_(math.nan)
    for step in range(2):
        batch = [blocks.batch(range(4 * step, 4 * step + 4))]
        got, expected = sick.step(batch, 1e-2), alone.step(batch, 1e-2)
        assert got.updated and math.isnan(got.kd) and math.isfinite(got.ce)
        assert (got.ce, got.grad_norm) == (expected.ce, expected.grad_norm)
    assert same(weights(sick.student), weights(alone.student))
    events = [(e.step, e.part, e.action) for e in sick.guard.events.events]
    assert events == [(1, "kd", "cut out"), (1, "kd", "explained"), (2, "kd", "cut out")]
    assert "teacher weight model.norm.weight" in sick.guard.events.events[1].reason
