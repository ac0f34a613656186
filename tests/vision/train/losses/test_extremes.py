"""All losses beyond half precision, and refused second derivatives."""

import pytest
import torch

from ssl_kd.language.losses.cross_tokenizer import (
    VocabularyMap,
    chunk_log_likelihood,
    class_log_probabilities,
    uld,
)
from ssl_kd.language.losses.divergences import DIVERGENCES
from ssl_kd.language.losses.rows import row_divergences
from ssl_kd.losses import (
    beta_mi,
    centered_targets,
    linear_distillation,
    sharpened_cross_entropy,
    token_kd,
)
from tests.faults.matrix import row
from tests.oracles.token_objectives import JS

Z = torch.randn(3, 2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
KL, TARGETS = DIVERGENCES["forward_kl"], torch.zeros(6, dtype=torch.int64)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: token_kd(z[0], Z[1]),
        lambda z: linear_distillation(z[0, 0], z[0, 1], None, TARGETS, temperature=2.0),
        lambda z: row_divergences(z[0, 0], Z[0, 1], 2.0, KL),
        lambda z: beta_mi(z[:, 0], Z[:, 1], torch.full((3, 4), 0.25)),
        lambda z: sharpened_cross_entropy(z, Z.softmax(-1)),
    ],
    ids=["token_kd", "linear_distillation", "row_divergences", "beta_mi", "cross-entropy"],
)
def test_a_second_derivative_is_refused(loss):
    z = Z.clone().requires_grad_()
    value = loss(z).sum()
    (plain,) = torch.autograd.grad(value, z, retain_graph=True)
    (slope,) = torch.autograd.grad(value, z, create_graph=True)
    assert torch.equal(slope, plain) and slope.requires_grad
    with pytest.raises(
        RuntimeError, match="closed-form gradient, which cannot be differentiated again"
    ):
        slope.square().sum().backward()


UNIFORM, LEVEL = torch.full((2, 7), 1 / 7), torch.zeros(1, 7)
CLASSES = VocabularyMap(torch.tensor([0, 0, 1, 2, 2, 3, 3]), 4)
TOKENS, GROUPS = torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1])
LOSSES = {
    name: lambda x, y, name=name: token_kd(x, y, divergence=name) for name in (*DIVERGENCES, *JS)
} | {
    "beta_mi": lambda x, y: beta_mi(x, y, UNIFORM),
    "cross-entropy": lambda x, y: sharpened_cross_entropy(
        x[None], centered_targets(y[None], LEVEL, 0.04)
    ),
    "uld": lambda x, y: uld(x[0], y[0]),
    "classes": lambda x, y: class_log_probabilities(x[0], CLASSES),
    "chunks": lambda x, y: chunk_log_likelihood(x[0], TOKENS, GROUPS, 2),
}


@row(18)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_finite_logits_beyond_half_precision_count_as_its_largest(loss):
    signs = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)).sign()
    held, huge = signs * 65504, (signs * 3e38).requires_grad_()
    value = loss(huge, huge.detach().flip(0))
    value.sum().backward()
    assert torch.equal(value, loss(held, held.flip(0)))
    assert value.isfinite().all() and huge.grad.isfinite().all() and huge.grad.any()
