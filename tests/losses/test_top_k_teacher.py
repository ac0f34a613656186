"""A teacher's k likeliest tokens and one outcome for all others: exact, and not to be emptied."""

import pytest
import torch

from ssl_kd.losses import DIVERGENCES, TopKTeacher, logits_distillation
from tests.losses.test_token_distillation import ELEVEN
from tests.oracles import token_objectives as oracle

K, VOCAB = 5, 40


def _teacher(logits, k=K):
    """The k likeliest of float64 logits `[n, vocab]`, the tail by its own logsumexp."""
    log_p = logits.log_softmax(-1)
    kept, tokens = log_p.topk(k)
    return TopKTeacher(tokens, kept, log_p.scatter(-1, tokens, -torch.inf).logsumexp(-1))


def _by_oracle(student, teacher, name):
    """Sum of D over k + 1 outcomes and its gradient, all in float64 and by logarithms."""
    z = student.double().clamp(-65504, 65504).requires_grad_()
    log_q = z.log_softmax(-1)
    rest = log_q.scatter(-1, teacher.indices, -torch.inf).logsumexp(-1, keepdim=True)
    coarse_q = torch.cat([log_q.gather(-1, teacher.indices), rest], -1)
    log_p = torch.cat([teacher.log_probs, teacher.log_tail[:, None]], -1).double()
    values = [oracle.divergence(name, *row) for row in zip(log_p, coarse_q, strict=True)]
    total = torch.stack([*values, z.sum() * 0]).sum()
    return total.detach(), torch.autograd.grad(total, z)[0]


def _ours(student, teacher, name):
    student = student.clone().requires_grad_()
    value = logits_distillation(student, None, [teacher], temperature=1.0, divergence=name)[1]
    return value.detach(), torch.autograd.grad(value, student)[0]


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("case", ELEVEN)
def test_the_eleven_fp16_cases(case, name):
    (student, teacher), options = ELEVEN[case]()
    real = options.get("mask", torch.ones(student.shape[:2])).bool()
    student, teacher = student[real], teacher[real].double().clamp(-65504, 65504)
    found = _teacher(teacher)
    value, gradient = _ours(student, found, name)
    expected, slope = _by_oracle(student, found, name)
    assert value.dtype == torch.float32 and gradient.dtype == torch.float16
    torch.testing.assert_close(value.double(), expected, rtol=2e-3, atol=2e-3)
    scale = slope.abs().max().clamp(min=1) if slope.numel() else 1
    torch.testing.assert_close(
        gradient / scale, slope / scale, rtol=2e-3, atol=1e-6, check_dtype=False
    )


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_tail_that_a_student_has_emptied_is_filled_again(name):
    """With less than float32's least number left for all other tokens, too."""
    teacher = _teacher(torch.zeros(1, VOCAB, dtype=torch.float64))
    student = torch.full((1, VOCAB), -300.0).index_fill_(1, teacher.indices[0], 0.0)
    value, gradient = _ours(student, teacher, name)
    expected, slope = _by_oracle(student, teacher, name)
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient.double(), slope, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(gradient.sum(), torch.tensor(0.0), atol=1e-6, rtol=0)
