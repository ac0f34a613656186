"""Errors that shipped elsewhere, each as a test named after its public issue or pull request."""

import math

import pytest
import torch

transformers = pytest.importorskip("transformers")

from firstnan.hf import GuardCallback  # noqa: E402
from ssl_kd.core.settings import SettingsError  # noqa: E402
from ssl_kd.doctor.verify import expert_changes  # noqa: E402
from ssl_kd.language.hf_trainer.distillation import collate  # noqa: E402
from ssl_kd.language.models.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.language.teachers.cache import check_divergence  # noqa: E402
from ssl_kd.losses import TopKTeacher, logits_distillation, token_kd  # noqa: E402
from tests.faults.inject_language import make_model  # noqa: E402
from tests.language.hf_trainer import test_distillation as hf  # noqa: E402
from tests.language.train.test_rows_left_out import marked, spoil_student  # noqa: E402
from tests.marks import slow  # noqa: E402
from tests.oracles import token_objectives as oracle  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.tiny import Tiny  # noqa: E402


def test_verl_5041_top_k_reverse_kl_does_not_empty_its_support():
    g = torch.Generator().manual_seed(0)
    teacher = torch.randn(8, 40, generator=g) * 2
    log_p, start = teacher.log_softmax(-1), torch.randn(8, 40, generator=g)

    def naive(z):
        log_q, own = z.log_softmax(-1).topk(4)
        return (log_q.exp() * (log_q - log_p.gather(-1, own))).sum()

    def ours(z):
        return token_kd(z[None], teacher[None], temperature=1.0, divergence="reverse_kl:4")

    for loss, low, high in ((naive, -1, -0.2), (ours, -0.01, 0.01)):
        z = start.clone().requires_grad_()
        adam = torch.optim.Adam([z], lr=0.1)
        for _ in range(200):
            adam.zero_grad()
            loss(z).backward()
            adam.step()
        q, own = z.detach().softmax(-1).topk(4)
        excess = q.sum(-1) - log_p.exp().gather(-1, own).sum(-1)
        assert low < excess.min() and excess.max() < high, loss


def test_nemo_rl_3584_student_top_k_on_packed_rows(tiny):
    distiller = tiny.distiller(FrozenTeacher(tiny.model(spread=0.3)), divergence="reverse_kl:5")
    found = {}
    for packing in (True, False):
        blocks = tiny.blocks(packing=packing)
        kd = distiller.terms(blocks.batch(range(len(blocks))))["kd"]
        gradient = torch.autograd.grad(kd, [*distiller.student.parameters()])
        found[packing] = len(blocks), int(blocks.counts.sum()), kd.detach(), gradient
    assert found[True][0] < found[False][0] and found[True][1] == found[False][1]
    torch.testing.assert_close(found[True][2:], found[False][2:], rtol=1e-4, atol=1e-4)


def test_verl_7590_a_teacher_without_the_students_tokens_is_refused(tiny):
    top = TopKTeacher(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2), torch.zeros(1))
    one = torch.zeros(1, 3)
    with pytest.raises(ValueError, match="no probabilities of the student's likeliest tokens"):
        logits_distillation(one, None, [top], temperature=1.0, divergence="reverse_kl:2")
    with pytest.raises(ValueError, match="share a vocabulary of 3 tokens: use 'reverse_kl'"):
        token_kd(one[None], one[None], divergence="reverse_kl:4")
    with pytest.raises(SettingsError, match="a cache of CACHE_METHOD 'topk' holds only"):
        check_divergence("reverse_kl:2", "topk")
    with pytest.raises(SettingsError, match="TEACHER_URL provides only the teacher's own"):
        models = {"teacher_model": "folder", "teacher_url": "http://127.0.0.1:9/v1"}
        tiny.settings(**models, temperature=1.0, divergence="reverse_kl:2")


def test_trl_6702_what_logging_nan_inf_filter_hides_is_counted_in_each_log_line(tmp_path, tiny):
    teacher = hf.Moods(hf.teacher_model(), bad={1, 2, 8})
    options = {"logging_steps": 2, "max_steps": 6, "eval_dataset": hf.samples(32)}
    trainer, witness, _ = hf.trained(tmp_path, teacher, **options)
    lines = [line for line in witness.logs if "loss" in line]
    assert trainer.args.logging_nan_inf_filter and all(math.isfinite(x["loss"]) for x in lines)
    assert [(x["ce_left_out"], x["kd_left_out"]) for x in lines] == [(0, 1), (0, 1), (0, 0)]
    scores = trainer.evaluate()
    assert scores["eval_kd_left_out"] == 1 and scores["eval_ce_left_out"] == 0
    student, factors = tiny.model(seed=1), iter([1, 1, math.nan, *[1] * 99])
    student.lm_head.register_forward_hook(lambda module, x, output: output * next(factors))
    args, guard = hf.arguments(tmp_path), GuardCallback()
    plain = transformers.Trainer(student, args, collate, hf.samples(8), callbacks=[guard])
    plain.train()
    lines = [line for line in plain.state.log_history if "loss" in line]
    assert [math.isnan(line["loss"]) for line in lines] == [False, False, True, False]
    assert [line["guard_skipped"] for line in lines] == [0, 0, 1, 1]


def one_step(rank, world, accumulation, sick):
    """Return results of a step on a rank's share of uneven rows, and those of the oracle."""
    rows = marked(3)
    rows.counts.logical_and_(torch.arange(rows.counts.shape[1]) < 4 + torch.arange(8)[:, None])
    student, teacher = make_model(seed=1), make_model(seed=2)
    spoil_student(student, -1 if sick is None else 63)
    options = {"divergence": "reverse_kl:5", "clip_grad": None}
    distiller = Tiny().distiller(FrozenTeacher(teacher), student, **options)
    parts = torch.arange(8)[rank::world].split(8 // world // accumulation)
    result = distiller.step([rows.batch(part) for part in parts], 1e-3)
    moments = [distiller.optimizer.state[p]["exp_avg"].numpy() for p in student.parameters()]
    rows.counts[[] if sick is None else sick] = False
    given = make_model(seed=1), teacher, rows.batch(range(8)), distiller.settings
    exact, ce, kd, _ = oracle.step(*given)
    gradient = [0.1 * p.grad.numpy() for p in exact.parameters()]
    return (result.ce, result.kd), (ce, kd), moments, gradient


@pytest.mark.parametrize(("world", "accumulation"), [slow(1, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("sick", [3, None], ids=["torchtitan_4174", "trl_6006"])
def test_weights_are_by_the_tokens_that_remain(world, accumulation, sick):
    given = accumulation, sick
    for found in run_ranks(one_step, 2, 2, *given) if world == 2 else [one_step(0, 1, *given)]:
        terms, expected, moments, gradient = found
        assert terms == pytest.approx(expected, rel=1e-4)
        for mine, exact in zip(moments, gradient, strict=True):
            assert mine == pytest.approx(exact, rel=1e-3, abs=1e-6)


def test_axolotl_3271_an_evaluation_is_the_loss_of_training_and_liger_974_ignores_labels(tmp_path):
    rows = hf.samples(8, low=6)
    ignored = [row | {"labels": [*row["labels"][:-3], *[-100] * 3]} for row in rows]
    options = {"temperature": 2.0, "eval_dataset": ignored}
    trainer, _, _ = hf.trained(tmp_path, hf.teacher_model(), **options)
    shorter = [{name: x[:-3] for name, x in row.items()} for row in rows]
    scores = trainer.evaluate()
    expected, _ = hf.oracle(trainer.model, hf.teacher_model(), shorter)
    assert scores["eval_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "extra"), [("Mixtral", {}), ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2})]
)
def test_automodel_3243_other_experts_are_distinguished_from_rounding(tiny, kind, extra):
    model, rows = tiny.model(kind, spread=0.3, **extra), tiny.blocks().part(slice(8))
    same = expert_changes(model, rows, torch.device("cpu"))
    assert same.changed == 0 and max(same.free, same.pinned) < 1e-4
    noise = torch.randn(32, generator=torch.Generator().manual_seed(0)) * 0.02
    model.model.layers[0].register_forward_pre_hook(  # where a row runs alone
        lambda module, inputs: (inputs[0] + noise * (len(inputs[0]) == 1), *inputs[1:])
    )
    other = expert_changes(model, rows, torch.device("cpu"))
    assert 0 < other.changed < 0.5 and 0 < other.pinned < other.free


ONE, OTHER = torch.randn(2, 2, 5, 40, generator=torch.Generator().manual_seed(0)) * 3
PADDED = OTHER.index_fill(-1, torch.arange(36, 40), -math.inf)


@pytest.mark.parametrize("name", ["js", "reverse_kl", "reverse_kl:3"])
@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        pytest.param(ONE, ONE.bfloat16(), id="ms-swift_10156: js below 0 of a bfloat16 teacher"),
        pytest.param(ONE.half() * 10, OTHER.half(), id="pylate_239: 1e-8 is 0 in float16"),
        pytest.param(ONE, PADDED, id="trl_5594, ms-swift_8436: a teacher padded by -inf"),
        pytest.param(ONE.repeat(9, 2, 1), OTHER.repeat(9, 2, 1), id="easydistill_34: n twice"),
    ],
)
def test_a_value_and_its_gradient_are_those_of_float64(student, teacher, name):
    x = student.clone().requires_grad_()
    value = token_kd(x, teacher, divergence=name)
    value.backward()
    expected, slope = oracle.token_kd(student, teacher, divergence=name)
    assert value > 0
    torch.testing.assert_close(value.double(), expected, rtol=2e-3, atol=0)
    torch.testing.assert_close(x.grad.double(), slope, rtol=2e-3, atol=1e-6)


def test_ms_swift_8436_labels_are_shifted_once(tiny):
    batch, distiller = tiny.blocks().batch([2]), tiny.distiller()
    given = batch.model_inputs() | {"labels": batch.input_ids.masked_fill(~batch.counts, -100)}
    expected = distiller.student(**given).loss
    ce = distiller.terms(batch)["ce"] / batch.counts[:, 1:].sum()
    torch.testing.assert_close(ce, expected)


@pytest.mark.parametrize(("name", "limit"), [("js:.001", "forward_kl"), ("js:.999", "reverse_kl")])
def test_trl_3043_beta_is_the_weight_of_the_teacher(name, limit):
    small, whole = (token_kd(ONE, OTHER, divergence=kind) for kind in (name, limit))
    assert small.item() / 0.001 == pytest.approx(whole.item(), rel=0.05)
