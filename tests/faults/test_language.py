"""Test rows 25 to 27, 51, 53, and 54 and later: the language mode."""

import contextlib
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from firstnan.parts import TooFewHealthyParts  # noqa: E402
from ssl_kd.core.errors import InputError  # noqa: E402
from ssl_kd.core.files import sha256_file  # noqa: E402
from ssl_kd.core.logits import SATURATION  # noqa: E402
from ssl_kd.core.runs.stop import Interrupted  # noqa: E402
from ssl_kd.core.settings import SettingsError  # noqa: E402
from ssl_kd.core.shards import FingerprintMismatch  # noqa: E402
from ssl_kd.core.shards.shards import read_manifest, write_manifest  # noqa: E402
from ssl_kd.language.evaluate.judge import judge_answers, judge_tokens  # noqa: E402
from ssl_kd.language.losses.token_distillation import (  # noqa: E402
    linear_distillation,
    logits_distillation,
)
from ssl_kd.language.models.causal import load_causal_lm  # noqa: E402
from ssl_kd.language.models.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.language.models.router import RouterStep  # noqa: E402
from ssl_kd.language.models.student import NotFinite, add_lora, save_student  # noqa: E402
from ssl_kd.language.report.page import write_report  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.settings import LanguageSettings  # noqa: E402
from ssl_kd.language.settings.presets import PRESETS  # noqa: E402
from ssl_kd.language.teachers.aligned import Aligned  # noqa: E402
from ssl_kd.language.teachers.cache import TeacherFingerprint, cache_identity, write  # noqa: E402
from ssl_kd.language.teachers.live import Live  # noqa: E402
from ssl_kd.language.teachers.routed import Routed  # noqa: E402
from ssl_kd.language.text.aligned import aligned_blocks  # noqa: E402
from ssl_kd.language.text.blocks import make_blocks  # noqa: E402
from ssl_kd.language.text.dataset import open_text  # noqa: E402
from ssl_kd.language.text.new_tokenizer import train_tokenizer  # noqa: E402
from ssl_kd.language.train.loop import rows_of_step  # noqa: E402
from ssl_kd.language.train.replay import replay  # noqa: E402
from ssl_kd.language.train.step import Distiller, precision_of  # noqa: E402
from ssl_kd.losses import LegacyClamp, LogitsTeacher  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.faults.inject import (  # noqa: E402
    content,
    events,
    flip_bit,
    metrics,
    newest_checkpoint,
    no_run,
    one_line,
    stop_at,
    train_in,
)
from tests.faults.inject_language import (  # noqa: E402
    BLOCK,
    FAST,
    NAN,
    ROWS,
    UP,
    VOCABULARY,
    FaultyOutput,
    dataset,
    leave_out,
    make_model,
    make_rows,
    owned,
    sentences,
    student_of,
    trained_student,
    write_lines,
)
from tests.faults.matrix import row  # noqa: E402
from tests.faults.test_checkpoint_and_process import steps_kept  # noqa: E402
from tests.kill_writers import kill_again_and_again  # noqa: E402
from tests.marks import slow  # noqa: E402

# peft uses a deprecated name of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

INF = math.inf


# --- the loss -------------------------------------------------------------------------------------


@row(25)
def test_a_row_in_which_nothing_counts_changes_no_bit_of_a_step():
    """Compare steps with and without rows that have no loss, from the same weights."""
    rows = make_rows(4)
    empty = replace(rows, counts=rows.counts.clone())
    empty.counts[2:] = False
    found = trained_student(steps=3, rows=empty, batch_size=4)
    assert not found.events and all(result.updated for result in found.results)
    assert {result.tokens for result in found.results} == {int(rows.counts[:2].sum())}
    alone = trained_student(steps=3, rows=make_rows(2), batch_size=2)
    for mine, theirs in zip(found.results, alone.results, strict=True):
        torch.testing.assert_close(mine.loss, theirs.loss, rtol=1e-5, atol=0)

    harmed = replace(empty, ids=empty.ids.clone())
    harmed.ids[2:] = 5  # any token
    assert same(
        trained_student(steps=3, rows=harmed).owned(), trained_student(steps=3, rows=empty).owned()
    )


# --- terms of a step ------------------------------------------------------------------------------

KINDS = {
    "all weights": {},
    "adapters, two batches a step": {"lora": {}, "gradient_accumulation_steps": 2},
    "adapters with dropout": {"lora": {"lora_dropout": 0.3, "use_dora": True}},
    "a head that is not linear": {"kind": "Gemma2"},
}


def _trained_student(strike, teacher, kind="Llama", lora=None, **settings):
    student = make_model(kind, seed=1)
    student = student if lora is None else add_lora(student, 4, **lora)
    return trained_student(strike, student=student, teacher=teacher, **settings)


@row(26)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_nan_divergence_leaves_the_cross_entropy_to_train_alone(options):
    batches, calls = options.get("gradient_accumulation_steps", 1), []
    teacher = make_model(seed=2)
    first_batch = lambda _: calls.append(1) or len(calls) % batches == 1 % batches  # noqa: E731
    hit = FaultyOutput(teacher.model.norm, when=first_batch)
    sick = _trained_student(hit.at(3), teacher, **options)
    twin = _trained_student(leave_out("kd", steps={3}), make_model(seed=2), **options)
    clean = _trained_student(leave_out(steps=()), make_model(seed=2), **options)

    assert sick.of("kd") == [
        (3, "loss", "cut out"),
        (3, "replay", "explained"),
        (4, "loss", "used again"),
    ]
    assert {event.part for event in sick.events} == {"kd"}
    assert math.isnan(sick.results[3].kd) and math.isfinite(sick.results[3].loss)
    assert all(result.updated for result in sick.results)
    assert int(sick.distiller.guard.terms["kd"].skipped) == 1
    assert same(sick.owned(), twin.owned()) and same(sick.owned(3), clean.owned(3))
    assert not same(sick.owned(4), clean.owned(4)) and not same(sick.owned(4), sick.owned(3))


def _rows_of(step, n=ROWS):
    return rows_of_step(step, FAST["batch_size"], n, LanguageSettings().seed).tolist()


def _named(step, n=ROWS):
    """Return the beginning of the message that names the rows of a step."""
    return f"rows {', '.join(map(str, _rows_of(step, n)))}: "


@row(26)
def test_a_term_that_stays_out_is_explained_and_training_continues(monkeypatch):
    monkeypatch.setattr("ssl_kd.language.train.step.RESTORE_AFTER", 3)
    teacher = make_model(seed=2)
    hit = FaultyOutput(teacher.model.norm)
    sick = trained_student(hit.at(*range(2, 8)), steps=9, teacher=teacher)
    actions = [action for _, stage, action in sick.of("kd") if stage == "loss"]
    assert [action.partition(":")[0] for action in actions] == [
        "cut out",
        "cut out",
        "cut out, 3 times in a row",
        "cut out",
        "cut out",
        "cut out, 6 times in a row",
        "used again",
    ]
    assert "look for NaN" in actions[2]
    assert sick.events[-1].reason == "healthy again after 6 steps"
    twin = trained_student(leave_out("kd", steps=range(2, 8)), steps=9)
    assert same(sick.owned(), twin.owned()) and {e.part for e in sick.events} == {"kd"}
    assert len([e for e in sick.events if e.stage == "replay"]) == 1  # only the first time


@row(27)
@pytest.mark.parametrize("lasting", [True, False], ids=["found again", "of one moment"])
def test_without_a_finite_term_the_step_is_skipped_and_its_rows_named(lasting):
    calls, student = [], make_model(seed=1)
    hit = FaultyOutput(
        student.model.norm, when=lambda _: calls.append(1) or lasting or len(calls) == 1
    )
    sick = trained_student(hit.at(3), student=student)
    assert [sick.of(part)[0] for part in ("ce", "kd", "model")] == [
        (3, "loss", "cut out"),
        (3, "loss", "cut out"),
        (3, "loss", "skipped"),
    ]
    for part in ("ce", "kd", "model"):
        words = sick.explained(part)
        assert words.startswith(_named(3))
        assert ("aten.masked_fill" in words) == lasting
        assert ("a second run of the same step is finite" in words) != lasting
    assert [result.updated for result in sick.results] == [i != 3 for i in range(6)]
    assert same(sick.owned(4), sick.owned(3))  # weights, moments, step counts
    twin = trained_student(_idle_at(3))
    assert same(sick.owned(), twin.owned())


def _idle_at(step):
    """Return a strike that skips a step by hand: its gradients never reach the optimizer."""

    def strike(distiller, now):
        vars(distiller.optimizer).pop("step", None)
        if now == step:
            distiller.optimizer.step = lambda: None

    return strike


# --- mixtures of experts --------------------------------------------------------------------------

MODES = ("native", "all", "ka", "sar")


def _mixture(mode, **settings) -> tuple[Any, Any, dict]:
    """Return a teacher with four experts, its source, and the settings of both."""
    asked = {"router_mode": mode, "router_lr": 1e-2, "divergence": "forward_kl", **settings}
    model = make_model("Mixtral", seed=2)
    frozen = FrozenTeacher(model)
    full = LanguageSettings(**{**FAST, "block_size": BLOCK, **asked})
    source = Live(frozen) if mode == "native" else Routed(frozen, full)
    return model, source, asked


def _patch(weight, place, at=3):
    """Return a strike that makes one entry of a weight NaN for one step."""
    whole = []

    def strike(distiller, step):
        if step == at:
            whole.append(weight[place].item())
            weight.data[place] = NAN
        elif whole:
            weight.data[place] = whole.pop()

    return strike


def _without_router(step, *terms):
    """Return a strike that leaves out the router's step and these terms by hand."""
    terms_out = leave_out(*terms, steps={step})

    def strike(distiller, now):
        terms_out(distiller, now)
        if isinstance(distiller.teacher, Routed):
            distiller.teacher.learns = now != step

    return strike


@row(54, 55)
@pytest.mark.parametrize("mode", [MODES[0], *map(slow, MODES[1:])])
@pytest.mark.parametrize(
    ("weight", "place"), [("gate.weight", (1, 0)), ("experts.down_proj", (2, 0, 0))]
)
def test_a_nan_gate_or_expert_is_named_and_leaves_the_cross_entropy_to_train_alone(
    mode, weight, place
):
    model, source, asked = _mixture(mode)
    name = f"model.layers.1.mlp.{weight}"
    sick = trained_student(_patch(model.get_parameter(name), place), source=source, **asked)
    _, source, _ = _mixture(mode)
    twin = trained_student(_without_router(3, "kd"), source=source, **asked)
    assert same(sick.owned(), twin.owned())
    assert [event for event in sick.of("kd") if event[1] == "loss"] == [
        (3, "loss", "cut out"),
        (4, "loss", "used again"),
    ]
    assert all(result.updated for result in sick.results)
    words = sick.explained("kd")
    assert words.startswith(_named(3))
    assert f"teacher weight {name} came in not finite" in words
    assert f"the first at {list(place)}" in words
    assert sick.of("router") == ([(3, "loss", "skipped")] if mode == "sar" else [])


@row(54)
@pytest.mark.parametrize("stage", ["loss", "gradient"])
def test_a_nan_in_the_router_step_leaves_only_the_router_unchanged(stage):
    """Corrupt only the pass with gradients: the router's step, not the teacher's output."""
    model, source, asked = _mixture("sar")
    on = []

    def spoil(module, args):
        if on and torch.is_grad_enabled():
            hidden = args[0].clone()
            hidden.view(-1, hidden.shape[-1])[5, 0] = NAN
            return (hidden,)
        return None

    def spoil_gradient(module, gradients, outputs):
        return tuple(g.fill_(NAN) if on and g is not None else g for g in gradients)

    if stage == "loss":
        model.model.layers[0].mlp.gate.register_forward_pre_hook(spoil)
    else:
        model.model.layers[1].self_attn.o_proj.register_full_backward_hook(spoil_gradient)

    def strike(distiller, step):
        on[:] = [1] if step == 3 else []

    sick = trained_student(strike, source=source, **asked)
    _, source, _ = _mixture("sar")
    twin = trained_student(_without_router(3), source=source, **asked)
    assert same(sick.owned(), twin.owned())
    (event,) = sick.events
    assert (event.step, event.part, event.stage, event.action) == (4, "router", stage, "skipped")
    assert stage == "gradient" or event.reason.startswith(_named(3))
    routers = [{k: v for k, v in sick.owned(i).items() if k.startswith("router")} for i in (3, 4)]
    assert same(*routers) and not same(routers[0], sick.owned(2))
    assert all(math.isfinite(result.kd) and result.updated for result in sick.results)


@row(55)
def test_a_nan_expert_spoils_the_tokens_that_it_answers_and_no_other():
    model, source, _ = _mixture("sar")
    batch = make_rows().batch(range(8))
    tokens = torch.arange(batch.input_ids.numel())
    before = source.frozen[0](batch, tokens).hidden
    source.begin()
    with source.mixture.watch() as gates:
        source.frozen[0](batch, tokens)
    model.model.layers[1].mlp.experts.down_proj.data[2, 0, 0] = NAN
    after = source.frozen[0](batch, tokens).hidden
    answered = (gates.chosen[1] == 2).any(1)
    assert 0 < int(answered.sum()) < len(tokens)
    assert torch.equal(~after.isfinite().all(1), answered)
    assert torch.equal(after[~answered], before[~answered])


# --- two tokenizers -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_tokenizers():
    texts = dataset(sentences())
    mine, theirs = (train_tokenizer(texts, size) for size in (300, 270))
    return aligned_blocks(texts, mine, theirs, 64), (len(mine), len(theirs))


def _aligned(how, two, strike=lambda distiller, step: None, at=None, kinds=("Llama", "Llama")):
    """Train across tokenizers; `at` is the teacher token to corrupt in the first row."""
    rows, (mine, theirs) = two
    asked = {**FAST, "align": how, "divergence": "forward_kl"}
    teacher = make_model(kinds[1], seed=2, vocab_size=theirs)
    if at is not None:
        strike = FaultyOutput(teacher.model.norm, (0, at)).at(3)
    with torch.random.fork_rng():
        aligned = Aligned(Live(FrozenTeacher(teacher)), LanguageSettings(**asked))
    student = make_model(kinds[0], seed=1, vocab_size=mine)
    return trained_student(strike, rows=rows, source=aligned, student=student, **asked)


every_alignment = pytest.mark.parametrize("how", ["uld", "chunks"])


@row(56)
@every_alignment
def test_a_nan_in_one_group_takes_its_row_out_of_the_divergence_alone(how, two_tokenizers):
    rows = two_tokenizers[0]
    groups = rows.batch(_rows_of(3, len(rows))).groups().teacher
    before_a_group = int(groups.rows[groups.first][1])  # in the first row, after BOS
    before_another = int(groups.rows[groups.first][2])
    sick, twin = (_aligned(how, two_tokenizers, at=at) for at in (before_a_group, before_another))
    without = _aligned(how, two_tokenizers, leave_out("kd", steps={3}))
    assert same(sick.owned(), twin.owned())
    assert not same(sick.owned(), without.owned())  # the other rows still train
    assert [event for event in sick.of("kd") if event[1] == "loss"] == [
        (3, "loss", "rows left out"),
        (4, "loss", "used again"),
    ]
    assert {event.part for event in sick.events} == {"kd"}
    assert math.isfinite(sick.results[3].kd) and all(result.updated for result in sick.results)
    assert sick.events[0].reason == f"not finite in rows {_rows_of(3, len(rows))[0]}"


@row(56)
@every_alignment
def test_teacher_logits_outside_all_groups_change_no_bit(how, two_tokenizers):
    """Corrupt the last token of a row, which predicts nothing."""
    rows = two_tokenizers[0]
    last = int((rows.teacher.documents[_rows_of(3, len(rows))[0]] > 0).sum()) - 1
    sick, clean = _aligned(how, two_tokenizers, at=last), _aligned(how, two_tokenizers)
    assert not sick.events and same(sick.owned(), clean.owned())


@row(57)
@every_alignment
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_head_that_is_not_linear_is_followed(who, how, two_tokenizers):
    kinds = ("Gemma2", "Llama") if who == "student" else ("Llama", "Gemma2")
    found = _aligned(how, two_tokenizers, kinds=kinds)
    assert all(0 < result.kd < INF for result in found.results) and not found.events


# --- escalation -----------------------------------------------------------------------------------


def _strike_of(hit, steps, seen):
    """Return a strike with a fault in these steps, which stores the distiller in `seen`."""
    at = hit.at(*steps)

    def strike(distiller, step):
        seen["distiller"] = distiller
        seen.setdefault(step, owned(distiller))
        at(distiller, step)

    return strike


@row(58)
def test_ten_steps_without_a_finite_term_end_in_the_last_good_state():
    student, seen = make_model(seed=1), {}
    hit = FaultyOutput(student.model.norm)
    with pytest.raises(TooFewHealthyParts, match="step 14: .*last 10") as stopped:
        trained_student(_strike_of(hit, range(4, 99), seen), steps=99, student=student)
    assert "restored to its state before step 1" in str(stopped.value)
    weights = {k: v for k, v in owned(seen["distiller"]).items() if k.startswith("student")}
    assert same(weights, {k: v for k, v in seen[0].items() if k.startswith("student")})
    assert not seen["distiller"].optimizer.state


@row(58)
def test_ultra_stable_goes_back_with_a_fresh_optimizer_and_on(monkeypatch):
    monkeypatch.setattr("ssl_kd.language.train.step.RESTORE_AFTER", 4)
    student, seen = make_model(seed=1), {}
    hit = FaultyOutput(student.model.norm)
    patience = {"stop_after": PRESETS["ultra_stable"]["stop_after"]}
    found = trained_student(
        _strike_of(hit, range(4, 8), seen), steps=12, student=student, **patience
    )
    (event,) = [e for e in found.events if e.stage == "escalation"]
    assert event.step == 8 and event.action.endswith("with a fresh optimizer")
    assert same(found.owned(8), found.owned(0))  # the first step starts without moments, too
    assert [result.updated for result in found.results] == [not 4 <= i < 8 for i in range(12)]
    assert not same(found.owned(), found.owned(8))


# --- float16 --------------------------------------------------------------------------------------

HALF = {"model_dtype": "float16"}  # with the fixture `float16_here`


@row(59)
@pytest.mark.parametrize("linear", [True, False])
def test_a_head_that_overflows_under_autocast_has_a_finite_loss_and_gradient(linear):
    """Compare with saturated logits in float64."""
    generator = torch.Generator().manual_seed(0)
    hidden = 150 * torch.randn(40, 32, generator=generator)
    weight = 100 * torch.randn(VOCABULARY, 32, generator=generator)
    targets = torch.randint(VOCABULARY, (40,), generator=generator)
    teachers = [LogitsTeacher(torch.randn(40, VOCABULARY, generator=generator))]
    logits = (hidden.half() @ weight.half().T).detach()
    assert 100 < int(logits.isinf().sum()) < logits.numel() / 2

    z = logits.double().clamp(-SATURATION, SATURATION).requires_grad_()
    ce = F.cross_entropy(z, targets, reduction="sum")
    p = (teachers[0].logits.double() / 2).softmax(-1)
    kd = 4 * F.kl_div((z / 2).log_softmax(-1), p, reduction="sum")
    (slope,) = torch.autograd.grad(ce + kd, z)
    with torch.autocast("cpu", torch.float16):
        if linear:
            hidden.requires_grad_()
            found = linear_distillation(hidden, weight, None, targets, teachers, temperature=2.0)
            source, expected = hidden, slope @ weight.half().double()
        else:
            source, expected = logits.requires_grad_(), slope
            found = logits_distillation(logits, targets, teachers, temperature=2.0)
    found.sum().backward()
    torch.testing.assert_close(found.double(), torch.stack([ce, kd]).detach(), rtol=2e-3, atol=0)
    largest = float(expected.abs().max())
    torch.testing.assert_close(source.grad.double(), expected, rtol=0, atol=2e-3 * largest)


@row(59)
@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_no_step_is_lost_to_a_float16_teacher_whose_logits_overflow(kind, float16_here):
    """Test both ways to multiply by the head: in the loss (Llama) and in the model (Gemma 2)."""
    half = precision_of(LanguageSettings(**{**FAST, **HALF}))
    assert half.student == half.teacher == torch.float16
    teacher = make_model(kind, seed=2, tie_word_embeddings=False)
    teacher.lm_head.weight.data *= 500
    teacher.model.norm.weight.data.fill_(150)
    frozen = FrozenTeacher(teacher, dtype=torch.float16)
    assert not teacher.lm_head(teacher.model(make_rows().ids[:4])[0]).isfinite().all()
    found = trained_student(source=Live(frozen), precision=half, **HALF)
    assert all(result.updated and 0 < result.kd < INF for result in found.results)
    assert not found.events


# --- files on disk --------------------------------------------------------------------------------


@row(51)
def test_another_tokenizer_is_refused_and_the_ways_to_follow_it_are_named(world, distill):
    code, error = distill(world.settings(student_model=str(world.stranger)))
    line = one_line(error)
    assert code == 2 and "different tokenizers" in line and "--align chunks or uld;" in line
    assert f"teacher {world.teacher}" in line and f"student {world.stranger}" in line
    assert no_run(world.settings())
    for how in ("chunks", "uld"):
        path = run(world.settings(student_model=str(world.stranger), align=how, run_name=how))
        assert metrics(path)["success_rate"] == 1 and metrics(path)["alignment"]["coverage"] > 0.9


@row(51)
def test_a_vocabulary_that_is_only_padded_is_the_same(world):
    wide = make_model(seed=1, vocab_size=len(world.tokenizer) + 20)
    save_student(wide, world.tokenizer, world.own / "wide", "A tiny model.")
    for name in ("student_model", "teacher_model"):
        path = run(world.settings(**{name: str(world.own / "wide")}))
        assert metrics(path)["success_rate"] == 1 and not events(path)


@row(53)
def test_clamps_with_zero_gradient_everywhere_are_refused(world, distill):
    with pytest.raises(
        ValueError, match=r"no perplexity below 340 .* makes the loss the constant 5"
    ):
        LegacyClamp.parse("2.5:0.1:5.0").check(50257)
    code, error = distill(world.settings(legacy_clamp="0.5:0.1:1.0"))
    lowest = LegacyClamp(0.5).lowest_perplexity(len(world.tokenizer))
    line = one_line(error)
    assert code in (1, 2) and f"no perplexity below {lowest:.3g}" in line
    assert "the loss the constant 1" in line and "remove the clamp" in line
    assert no_run(world.settings())


@row(53)
def test_a_usable_clamp_logs_its_cost(world, caplog):
    caplog.set_level("WARNING", "ssl_kd")
    path = run(world.settings(legacy_clamp="2.5"))
    lowest = LegacyClamp(2.5).lowest_perplexity(len(world.tokenizer))
    assert f"perplexity can never fall below {lowest:.4g}" in caplog.text
    assert metrics(path)["success_rate"] == 1


HARM = {
    "a truncated file": lambda folder: _cut(folder / "model.safetensors"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no configuration": lambda folder: (folder / "config.json").unlink(),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "a tensor is missing": lambda folder: _drop(folder / "model.safetensors"),
    "random bytes": lambda folder: (folder / "model.safetensors").write_bytes(bytes(range(256))),
}


def _cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _drop(path):
    tensors = load_file(path)
    del tensors[UP]
    save_file(tensors, path, metadata={"format": "pt"})


@row(62)
@pytest.mark.parametrize("who", ["student", "teacher"])
@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_model_folder_is_named_before_any_work(world, distill, who, harm):
    folder = world.own / "damaged"
    shutil.copytree(getattr(world, who), folder)
    HARM[harm](folder)
    before = content(folder)
    code, error = distill(world.settings(**{f"{who}_model": str(folder)}))
    line = one_line(error)
    assert code in (1, 2) and str(folder) in line
    if harm == "a tensor is missing":
        assert UP in line
    assert content(folder) == before and no_run(world.settings())


@row(63)
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_adapters_whose_base_is_gone_name_it(world, distill, who):
    base = world.own / "base"
    shutil.copytree(world.student, base)
    model = add_lora(load_causal_lm(base).model, 4)
    folder = world.own / "adapters"
    save_student(model, world.tokenizer, folder, "Adapters.")
    asked = world.settings(**{f"{who}_model": str(folder)})
    assert metrics(run(asked.replace(run_name="there")))["success_rate"] == 1
    shutil.rmtree(base)
    code, error = distill(asked.replace(run_name="gone"))
    assert code in (1, 2) and str(base) in one_line(error)

    described = json.loads((folder / "adapter_config.json").read_text())
    described["base_model_name_or_path"] = None
    (folder / "adapter_config.json").write_text(json.dumps(described))
    code, error = distill(asked.replace(run_name="gone"))
    assert code in (1, 2) and "base_model_name_or_path" in one_line(error)
    assert not (world.runs / "gone").exists()


@row(64)
def test_invalid_lines_are_named_and_the_others_train_alone(world):
    good = [{"text": text} for text in sentences()]
    bad = {
        3: "{'text': 'single quotes'}",
        7: "",
        11: {"text": "   "},
        15: {"other": "a field"},
        19: [1, 2],
        22: {"prompt": "only a prompt", "completion": ""},
        26: '{"text": "half a line',
    }
    lines = [*good]
    for number, line in bad.items():
        lines.insert(number - 1, line)
    clean, mixed = (
        run(
            world.settings(
                data_path=str(write_lines(world.own / f"{name}.jsonl", records)), run_name=name
            )
        )
        for name, records in (("clean", good), ("mixed", lines))
    )
    assert student_of(mixed) == student_of(clean)
    left_out = json.loads((mixed / "config.json").read_text())["data"]["left_out"]
    assert [line.partition(": ")[0] for line in left_out] == [f"mixed.jsonl:{n}" for n in bad]
    assert left_out[0].startswith("mixed.jsonl:3: not valid JSON")


@row(64)
def test_messages_without_a_chat_template_are_refused_with_the_ways_out(world, distill):
    turns = [{"role": "user", "content": "a fox?"}, {"role": "assistant", "content": "a dog"}]
    good = [{"text": text} for text in sentences()]
    chat = write_lines(world.own / "chat.jsonl", [*good, {"messages": turns}])
    code, error = distill(world.settings(data_path=str(chat)))
    line = one_line(error)
    assert code in (1, 2) and "chat.jsonl:41: messages need a chat template" in line
    assert "prompt and completion" in line and no_run(world.settings())


@row(64)
def test_a_file_without_a_usable_line_is_refused(world, distill):
    empty = write_lines(world.own / "empty.jsonl", ["no JSON", ""])
    code, error = distill(world.settings(data_path=str(empty)))
    assert code in (1, 2) and "empty.jsonl:1: not valid JSON" in one_line(error)
    assert no_run(world.settings())


# --- the teacher's cache --------------------------------------------------------------------------


@pytest.fixture
def cached(world):
    """Return a teacher cache of the text with two rows per file."""
    lm = load_causal_lm(world.teacher)
    texts = open_text(world.text, "train", held_out=0)
    rows = make_blocks(texts, lm.tokenizer, FAST["block_size"])
    identity = cache_identity(LanguageSettings(temperature=2.0), lm, texts, rows)
    of = TeacherFingerprint(**identity, dtype="float32", method="topk", k=8)
    return write(FrozenTeacher(lm.model), rows, world.own / "cache", of, shard_rows=2).folder


FOREIGN = {
    "teacher": {"teacher_model": "student"},
    "weights": {"teacher_model": "student"},
    "tokenizer": {"teacher_model": "stranger", "student_model": "stranger"},
    "text": {"data_path": "questions", "eval_path": "text"},
    "block_size": {"block_size": 24},
    "packed": {"packing": False},
    "temperature": {"temperature": 1.5},
}


@row(60)
def test_a_cache_of_something_else_is_refused_with_the_field(world, distill, cached):
    asked = world.settings(teacher_cache=str(cached))
    assert metrics(run(asked.replace(run_name="own", max_steps=2)))["cache"]["k"] == 8
    before = content(cached)
    for field, changed in FOREIGN.items():
        changes = {
            name: str(getattr(world, value)) if isinstance(value, str) else value
            for name, value in changed.items()
        }
        code, error = distill(asked.replace(run_name="other", **changes))
        line = one_line(error)
        assert code in (1, 2) and f"{field}: cache has" in line
        if field == "temperature":  # and no other field is named
            assert line.count(": cache has") == 1
        assert content(cached) == before and not (world.runs / "other").exists()


@row(125)
@pytest.mark.parametrize("student_model", ["llama:1x16", slow("saved")])
def test_a_run_trains_from_the_cache_alone_if_the_teacher_is_gone(
    world, cached, caplog, student_model
):
    teacher = world.own / Path(world.teacher).name
    shutil.copytree(world.teacher, teacher)
    own = world.settings(teacher_cache=str(cached), teacher_model=str(teacher))
    if student_model != "saved":
        own = own.replace(student_model=student_model)
    with_teacher = run(own.replace(run_name="with"))
    if student_model == "saved":  # its tokenizer replaces that of the teacher
        shutil.rmtree(teacher)
    else:
        (teacher / "model.safetensors").unlink()
    without = run(own.replace(run_name="without"))
    weights = "student/model.safetensors"
    assert same(load_file(with_teacher / weights), load_file(without / weights))
    assert "the student learns from TEACHER_CACHE alone" in caplog.text
    names = [scores["name"] for scores in metrics(without)["table"]]
    assert names == ["student before", "student"] and write_report(without).exists()


@row(125)
def test_a_cache_that_cannot_replace_an_absent_teacher_is_refused(world, cached):
    own = world.settings(teacher_cache=str(cached), teacher_model=str(world.own / "gone"))
    for error, changes, message in (
        (SettingsError, {"student_model": "fresh:1x16"}, "built from the teacher .* llama:LAYERSx"),
        (FileNotFoundError, {"teacher_cache": None}, "does not exist"),
        (InputError, {"teacher_cache": str(world.own / "other")}, "does not exist"),
        (FingerprintMismatch, {}, "teacher: cache has"),
        (FingerprintMismatch, {"student_model": str(world.stranger)}, "tokenizer: cache has"),
    ):
        with pytest.raises(error, match=message):
            run(own.replace(**changes))


def _spoil_row(cached, fitting):
    """Put a NaN into row 5 of the cache (its third file); `fitting` updates the manifest."""
    manifest = read_manifest(cached / "teacher.json")
    entry = manifest["shards"][2]
    path = cached / entry["file"]
    shard = torch.load(path, weights_only=True)
    shard["log_probs"][1, 4, 0] = NAN
    torch.save(shard, path)
    if fitting:
        entry |= {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        write_manifest(cached / "teacher.json", manifest)
    return path.name


@row(61)
@pytest.mark.parametrize("how", ["fitting checksum", "other checksum", "one bit", "truncated"])
def test_a_damaged_cache_names_its_file_before_any_work(world, distill, cached, how):
    if how.endswith("checksum"):
        name = _spoil_row(cached, how == "fitting checksum")
    else:
        path = cached / read_manifest(cached / "teacher.json")["shards"][2]["file"]
        name = path.name
        flip_bit(path) if how == "one bit" else _cut(path)
    before = content(cached)
    code, error = distill(world.settings(teacher_cache=str(cached)))
    line = one_line(error)
    assert code in (1, 2) and name in line
    if how.endswith("checksum"):
        assert "row 1 (row 5" in line and "log_probs is NaN" in line
    assert content(cached) == before and no_run(world.settings())


def cache_rows(folder, method):
    """Cache the teacher's outputs for 160 rows in 40 shards."""
    fingerprint = TeacherFingerprint(
        "t", "w", "t", "x", BLOCK, False, "rows", "float32", method, 8, 2.0
    )
    teacher = FrozenTeacher(make_model(seed=2))
    write(teacher, make_rows(160), folder, fingerprint, batch_size=2, shard_rows=4)


def shards(folder):
    """Return the complete shards."""
    for place in (folder / "teacher.partial", folder):
        if (place / "teacher.json").exists():
            return {shard["file"] for shard in read_manifest(place / "teacher.json")["shards"]}
    return set()


@row(65)
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.parametrize("method", ["topk", "sample", "hidden"])
def test_killed_at_random_positions_the_cache_is_that_of_an_unharmed_writer(tmp_path, method):
    found = kill_again_and_again(cache_rows, shards, tmp_path, method, kills=8)
    assert found.kills == 8 and found.resumed > 3
    for folder in found.folders:
        assert content(folder) == content(found.straight)


# --- interrupted runs -----------------------------------------------------------------------------

RUNS = {
    "adapters, two batches a step": {"lora_rank": 4, "gradient_accumulation_steps": 2},
    "float16": HALF,
    "from a cache": {"teacher_cache": "cache"},
    "another tokenizer, chunks": {"align": "chunks", "student_model": "stranger"},
    "a router that learns": {"router_mode": "sar", "teacher_model": "mixture", "router_lr": 1e-2},
    "a teacher that is sick at one token": {"teacher_model": "sick"},
    "sampled experts": {"router_mode": "ka", "teacher_model": "mixture"},
}
QUICK = ("from a cache", "a router that learns")


def _asked(world, changes, **more):
    places = {
        name: str(world.own / "cache" if value == "cache" else getattr(world, value))
        for name, value in changes.items()
        if name in ("teacher_cache", "student_model", "teacher_model")
    }
    return world.settings(**changes | places | more)


def _same_run(a, b):
    """Check that two runs are equal in everything except times."""
    assert student_of(a) == student_of(b)
    assert same(newest_checkpoint(a)[1], newest_checkpoint(b)[1])
    assert _log(a) == _log(b)
    for name in ("table", "best_step", "tokens", "success_rate", "generations"):
        assert metrics(a)[name] == metrics(b)[name]
    assert events(a) == events(b)
    routers = [path / "router.safetensors" for path in (a, b)]
    assert routers[0].exists() == routers[1].exists()
    if routers[0].exists():
        assert same(*map(load_file, routers))


def _log(path):
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


@row(66)
@pytest.mark.parametrize("kind", [kind if kind in QUICK else slow(kind) for kind in RUNS])
def test_an_interrupted_run_ends_to_the_bit_as_one_that_was_not(world, kind, request):
    if kind == "from a cache":
        request.getfixturevalue("cached")
    if kind == "float16":
        request.getfixturevalue("float16_here")
    asked = _asked(world, RUNS[kind], max_steps=6, checkpoint_every=3)
    whole = run(asked.replace(run_name="whole"))
    with pytest.raises(Interrupted):
        run(asked.replace(run_name="stopped"), progress=stop_at(4))
    resumed = run(asked.replace(run_name="stopped", resume=True))
    _same_run(resumed, whole)


@row(66)
def test_half_a_student_of_a_killed_run_is_cleared_away(world):
    asked = world.settings(run_name="parts", checkpoint_every=3)
    with pytest.raises(Interrupted):
        run(asked, progress=stop_at(4))
    half = world.runs / "parts" / ".student.1a2b3c4d.tmp"
    half.mkdir()
    (half / "config.json").write_text("{")
    run(asked.replace(resume=True))
    assert not half.exists()


@row(66)
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_killed_at_random_positions_the_student_is_the_uninterrupted_runs(world):
    """Test a run with a trainable router, whose checkpoint holds more than the student."""
    more = {"max_steps": 20, "checkpoint_every": 3, "log_every": 2, "eval_every": 8}
    asked = _asked(world, RUNS["a router that learns"], **more)
    found = kill_again_and_again(train_in, steps_kept, world.runs, run, asked, kills=8)
    assert found.kills == 8 and found.resumed > 1
    for path in found.folders:
        _same_run(path, found.straight)
        assert not [file for file in path.rglob(".*") if file.name != ".lock"]


# --- judging --------------------------------------------------------------------------------------


@row(67)
def test_a_student_that_is_nan_only_when_it_writes_is_named_by_its_questions(world):
    """Inject the NaN at the second new token of the second question, with a KV cache."""
    lm, clean = load_causal_lm(world.student), load_causal_lm(world.student)
    hit = FaultyOutput(lm.model.model.norm, (1,), when=lambda output: output.shape[1] == 1)
    hit.on = True
    examples = open_text(world.questions, "all").examples
    asked = {"limit": 4, "batch_size": 2, "max_new_tokens": 4}
    scores, written = judge_answers(lm.model, lm.tokenizer, examples, **asked)
    expected, texts = judge_answers(clean.model, clean.tokenizer, examples, **asked)
    assert [line.partition(": ")[0] for line in scores.faults] == [
        "questions.jsonl:2",
        "questions.jsonl:4",
    ]
    assert all("logits not finite at new token 2" in line for line in scores.faults)
    assert scores.n == expected.n and not expected.faults
    assert [written[i].text for i in (0, 2)] == [texts[i].text for i in (0, 2)]
    assert [written[i].text for i in (1, 3)] == ["", ""]
    rows = make_rows()
    found, expected = (judge_tokens(model, rows).table_row("") for model in (lm.model, clean.model))
    assert found == expected and found["left_out"] == 0


@row(68)
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_an_evaluation_batch_that_is_nan_is_left_out_and_named(who):
    rows, model, frozen = make_rows(32), make_model(seed=1), FrozenTeacher(make_model(seed=2))
    seen = []
    hit = FaultyOutput(
        (model if who == "student" else frozen.model).model.norm,
        (2, 4),
        when=lambda output: len(output) == 8 and not seen.append(1) and len(seen) == 2,
    )
    clean = judge_tokens(model, rows, teachers=[frozen])
    hit.on = True
    found = judge_tokens(model, rows, teachers=[frozen])
    assert found.table_row("x")["left_out"] == 1 and not clean.left_out
    assert found.left_out[0].startswith("blocks 8 to 15: not finite: ")
    others = judge_tokens(model, _without(rows, 8, 16), teachers=[frozen])
    assert not others.left_out
    own, beside = ("nll", "perplexity", "ece"), ("agreement", "kl")
    for name in own + beside:
        # A NaN of the teacher does not affect the student's own scores.
        kept = clean if who == "teacher" and name in own else others
        assert getattr(found, name) == getattr(kept, name)
        assert getattr(others, name) != getattr(clean, name)


def _without(rows, start, stop):
    kept = [i for i in range(len(rows)) if not start <= i < stop]
    names = ("ids", "counts", "documents", "row_bytes")
    return replace(rows, **{name: getattr(rows, name)[kept] for name in names})


# --- routers --------------------------------------------------------------------------------------


@row(69)
def test_a_failing_imitating_router_is_stopped_alone(monkeypatch):
    monkeypatch.setitem(RouterStep.__init__.__kwdefaults__, "drift_limit", 0.02)
    _, source, asked = _mixture("sar", router_lr=1.0)
    found = trained_student(source=source, steps=8, **asked)
    (event,) = found.events
    assert (event.part, event.stage, event.action) == ("router", "drift", "stopped")
    assert "above 0.02" in event.reason and event.reason.startswith(_named(event.step - 1))
    assert all(result.updated and 0 < result.kd < INF for result in found.results)
    routers = [
        {k: v for k, v in found.owned(i).items() if k.startswith("router")}
        for i in (event.step - 1, event.step, None)
    ]
    assert same(routers[0], routers[1]) and same(routers[1], routers[2])


def _foreign(tensors):
    for tensor in tensors.values():
        tensor += 1


ROUTER_FILES = {
    "another teacher's": "original_rows",
    "a NaN in it": "the tensor model.layers.1.mlp.gate.weight is missing, not finite",
    "truncated": "is not a safetensors file",
    "no file": "no router file",
}


@row(70)
def test_a_router_file_that_does_not_fit_is_refused_with_its_differences(world, distill):
    asked = _asked(world, RUNS["a router that learns"], max_steps=2)
    file = run(asked.replace(run_name="learned")) / "router.safetensors"
    assert metrics(run(asked.replace(run_name="fits", router_weights=str(file))))["steps"] == 2
    other_teacher = str(world.with_fault("mixture", _foreign))
    place = world.own / "router.safetensors"
    for harm, message in ROUTER_FILES.items():
        place.unlink(missing_ok=True)
        if harm != "no file":
            shutil.copy(file, place)
        if harm == "a NaN in it":
            with safe_open(place, "pt") as opened:
                metadata = opened.metadata()
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            tensors["model.layers.1.mlp.gate.weight"][0, 0] = NAN
            save_file(tensors, place, metadata=metadata)
        if harm == "truncated":
            _cut(place)
        changes = {"teacher_model": other_teacher} if harm == "another teacher's" else {}
        code, error = distill(asked.replace(run_name="other", router_weights=str(place), **changes))
        line = one_line(error)
        assert code in (1, 2) and str(place) in line and message in line
        assert not (world.runs / "other").exists()


@row(71)
@pytest.mark.parametrize("mode", ["all", "ka", "sar"])
def test_router_modes_refuse_a_dense_teacher(world, distill, mode):
    code, error = distill(world.settings(router_mode=mode))
    line = one_line(error)
    assert code in (1, 2) and "LlamaForCausalLM has no router" in line and "'native'" in line
    assert no_run(world.settings())


@row(71)
@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"TEACHER_CACHE": "somewhere"}, ["TEACHER_CACHE", "'sar'"]),
        ({"ALIGN": "chunks"}, ["ALIGN", "'all' or 'ka'"]),
    ],
)
def test_a_router_cannot_learn_from_a_teacher_that_is_not_there(world, distill, changes, names):
    code, error = distill(_asked(world, RUNS["a router that learns"]), **changes)
    line = one_line(error)
    assert code == 2 and all(name in line for name in names)
    assert no_run(world.settings())


# --- replay ---------------------------------------------------------------------------------------


@row(72)
def test_a_gradient_that_is_not_finite_is_found_again(world, monkeypatch):
    """Add a square root at 0 to the student's norm: finite loss, infinite gradient."""
    made = Distiller.__init__

    def with_a_root(self, student, *args, **options):
        made(self, student, *args, **options)
        norm = student.model.norm
        norm.register_forward_hook(lambda module, inputs, out: out + (out * 0).sqrt())

    monkeypatch.setattr(Distiller, "__init__", with_a_root)
    with contextlib.suppress(TooFewHealthyParts, NotFinite):
        run(world.settings(stop_after=1, run_name="a"))
    report = replay(min((world.runs / "a" / "faults").glob("*.safetensors")))
    assert report.bundle.event.stage == "gradient" and report.fault.backward
    assert report.fault.op == "aten.div" and report.diagnosis.cause.value == "root of zero"
