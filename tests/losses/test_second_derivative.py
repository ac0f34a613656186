"""A loss with a closed-form gradient refuses a second derivative; it would be taken for 0."""

import pytest
import torch

from ssl_kd.divergences import DIVERGENCES
from ssl_kd.losses import beta_mi, linear_distillation, sharpened_cross_entropy, token_kd
from ssl_kd.losses.rows import row_divergences

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
def test_a_second_derivative_is_refused_and_not_taken_for_0(loss):
    z = Z.clone().requires_grad_()
    value = loss(z).sum()
    (plain,) = torch.autograd.grad(value, z, retain_graph=True)
    (slope,) = torch.autograd.grad(value, z, create_graph=True)
    assert torch.equal(slope, plain) and slope.requires_grad
    with pytest.raises(
        RuntimeError, match="closed-form gradient, which cannot be differentiated again"
    ):
        slope.square().sum().backward()
