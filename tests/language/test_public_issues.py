"""Errors that shipped elsewhere, each as a test named after its public issue or pull request."""

import math

import pytest
import torch

transformers = pytest.importorskip("transformers")

from ssl_kd.hf_trainer import GuardCallback  # noqa: E402
from ssl_kd.hf_trainer.distillation import collate  # noqa: E402
from ssl_kd.language.caching import check_divergence  # noqa: E402
from ssl_kd.losses import LogitsTeacher, TopKTeacher, logits_distillation, token_kd  # noqa: E402
from ssl_kd.settings import SettingsError  # noqa: E402
from ssl_kd.teachers.frozen import FrozenTeacher  # noqa: E402
from tests.test_hf_distillation import Moods, arguments, samples, teacher_model, trained  # noqa: E402

# --- reverse KL on the student's own top k --------------------------------------------------------


def test_verl_5041_top_k_reverse_kl_does_not_empty_its_support():
    g = torch.Generator().manual_seed(0)
    teacher = torch.randn(8, 40, generator=g) * 2
    log_p, start = teacher.log_softmax(-1), torch.randn(8, 40, generator=g)

    def naive(z):
        log_q, own = z.log_softmax(-1).topk(4)
        return (log_q.exp() * (log_q - log_p.gather(-1, own))).sum()

    def ours(z):
        options = {"temperature": 1.0, "divergence": "reverse_kl:4"}
        return logits_distillation(z, None, [LogitsTeacher(teacher)], **options)[1]

    excess = {}
    for loss in (naive, ours):
        z = start.clone().requires_grad_()
        adam = torch.optim.Adam([z], lr=0.1)
        for _ in range(200):
            adam.zero_grad()
            loss(z).backward()
            adam.step()
        q, own = z.detach().softmax(-1).topk(4)
        excess[loss] = q.sum(-1) - log_p.exp().gather(-1, own).sum(-1)
    assert (excess[naive] < -0.2).all() and excess[ours].abs().max() < 1e-2


def test_nemo_rl_3584_student_top_k_on_packed_rows(tiny):
    distiller = tiny.distiller(FrozenTeacher(tiny.model(spread=0.3)), divergence="reverse_kl:5")
    found = {}
    for packing in (True, False):
        blocks = tiny.blocks(packing=packing)
        kd = distiller.terms(blocks.batch(range(len(blocks))))["kd"]
        gradient = torch.autograd.grad(kd, [p for p in distiller.student.parameters()])
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
        tiny.settings(
            divergence="reverse_kl:2", temperature=1.0, teacher_url="http://127.0.0.1:9/v1",
            teacher_model="folder", student_model="folder",
        )  # fmt: skip
    with pytest.raises(SettingsError, match="reverse_kl:K"):
        tiny.settings(divergence="reverse_kl:0")


# --- what a log hides -----------------------------------------------------------------------------


def test_trl_6702_what_logging_nan_inf_filter_hides_is_counted_in_each_log_line(tmp_path, tiny):
    teacher = Moods(teacher_model(), bad={1, 2, 8})
    trainer, witness, _ = trained(tmp_path, teacher, logging_steps=2, max_steps=6)
    assert trainer.args.logging_nan_inf_filter
    lines = [line for line in witness.logs if "loss" in line]
    assert all(math.isfinite(line["loss"] + line["kd"]) for line in lines)
    assert [line["kd_left_out"] for line in lines] == [1, 1, 0]
    assert [line["ce_left_out"] for line in lines] == [0, 0, 0]
    scores = trainer.evaluate(samples(32))
    assert scores["eval_kd_left_out"] == 1 and scores["eval_ce_left_out"] == 0

    student, passes = tiny.model(seed=1), []

    def spoil(module, inputs, output):
        passes.append(output)
        return output * math.nan if len(passes) == 3 else output

    student.lm_head.register_forward_hook(spoil)
    options = {"args": arguments(tmp_path), "train_dataset": samples(8), "data_collator": collate}
    plain = transformers.Trainer(student, **options, callbacks=[GuardCallback()])
    plain.train()
    lines = [line for line in plain.state.log_history if "loss" in line]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert [line["guard_skipped"] for line in lines] == [0, 0, 1, 1]
