"""Emulated casts beside references from the specifications; what a report recommends, applied."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from firstnan.low_precision import LowPrecision, cast, precision_report

# Bits of the mantissa, smallest exponent, largest value: arXiv:2209.05433, table 1.
FLOAT8 = {torch.float8_e4m3fn: (3, -6, 448.0), torch.float8_e5m2: (2, -14, 57344.0)}


def rounded(x, element):
    """Round a Python float to float8, to even and saturating."""
    bits, low, largest = FLOAT8[element]
    step = 2.0 ** (max(math.frexp(x)[1] - 1, low) - bits)
    return math.copysign(min(largest, round(abs(x) / step) * step), x)


def mx_block(values, element):
    """Round a block as the OCP MX specification v1.0 says in section 6.3."""
    if not all(map(math.isfinite, values)):
        return [math.nan] * len(values)
    power = math.frexp(max(map(abs, values)))[1] - math.frexp(FLOAT8[element][2])[1]
    scale = 2.0 ** max(-127, min(127, power))
    return [rounded(v / scale, element) * scale for v in values]


@pytest.mark.parametrize("element", FLOAT8)
def test_casts_keep_every_code_and_round_what_lies_between_to_even(element):
    codes = torch.arange(256, dtype=torch.uint8).view(element).float()
    finite = codes[codes.isfinite()]  # with the largest among them the scale is 1
    middles = (finite.unique()[1:] + finite.unique()[:-1]) / 2
    points = torch.cat([finite, middles, middles * (1 + 2**-20), middles * (1 - 2**-20)])
    expected = torch.tensor([rounded(x, element) for x in points.tolist()])
    values, saturated, flushed = cast(points, element, "tensor")
    assert torch.equal(values[: len(finite)], finite) and torch.equal(values, expected)
    assert not saturated.any() and torch.equal(flushed, (expected == 0) & (points != 0))


@pytest.mark.parametrize("element", FLOAT8)
@pytest.mark.parametrize("dim", [-1, -2])
def test_mx_blocks_are_those_of_the_specification(element, dim):
    torch.manual_seed(0)
    x = torch.randn(9, 71) * torch.exp2(torch.randint(-20, 20, (9, 71)))  # a last block of 7
    x[0], x[1, :32] = 0, 1e-44  # subnormal in float32
    x[2, 3], x[3, 40], x[4, 70] = math.nan, math.inf, -3e38
    blocks = [[mx_block(b.tolist(), element) for b in row.split(32)] for row in x]
    expected = torch.tensor([sum(row, []) for row in blocks])
    values, saturated, _ = cast(x if dim == -1 else x.T, element, "block", dim)
    assert torch.equal(*(y.nan_to_num(-1) for y in (values if dim == -1 else values.T, expected)))
    assert saturated.any() and not cast(x, element, "block up", -1)[1].any()


def test_half_precision_overflows_and_flushes_where_its_dtype_does():
    values, *masks = cast(torch.tensor([65504, 65520, 2.0**-24, 2.0**-25, 0]), torch.float16)
    assert values.tolist() == [65504, math.inf, 2.0**-24, 0, 0]
    assert [mask.nonzero().tolist() for mask in masks] == [[[1]], [[3]]]


def transformer():
    torch.manual_seed(1)
    blocks = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(2)]
    model, x = nn.Sequential(nn.Embedding(40, 32), *blocks, nn.Linear(32, 40)), torch.arange(40)
    return model, lambda run=model: F.cross_entropy(run(x[None])[0], x.flip(0), reduction="none")


def test_an_outlier_channel_hurts_one_scale_per_tensor_and_only_its_own_block():
    torch.manual_seed(0)
    model, x = nn.Linear(256, 16, bias=False), torch.randn(32, 256) * 1e-3
    x[:, 0] = 1e3
    model.weight.data[:, 0] = 0  # so that the loss is that of the other channels
    formats = ("e4m3", "mxfp8", "mxfp8_up")
    rows = [precision_report(model, lambda: model(x).square(), f).rows["all"] for f in formats]
    assert rows[0]["input flushed"] > 0.9 and rows[0]["loss"] > 0.9
    assert all(row["input flushed"] < 0.07 and row["loss"] < 0.4 for row in rows[1:])


def test_gradients_of_a_wide_range_need_e5m2():
    model, x, spread = nn.Linear(32, 32), torch.randn(64, 32), torch.exp2(-torch.arange(64) / 2.5)
    for format, is_lost in (("e4m3", True), ("hybrid", False)):
        report = precision_report(model, lambda: model(x) * spread[:, None], format)
        assert (report.rows["all"]["gradient flushed"] > 0.1) is is_lost


def test_the_recommended_modules_reduce_the_error_and_the_model_stays_as_it_was():
    model, losses = transformer()
    before = [torch.get_rng_state(), *(p.detach().clone() for p in model.parameters())]
    report = precision_report(model, losses, "mxfp8", tolerance=4e-3)
    assert all(map(torch.equal, before, [torch.get_rng_state(), *model.parameters()]))
    assert all(p.grad is None for p in model.parameters())
    everything, kept = [report.rows[k]["loss"] for k in ("everything", "all but what is kept")]
    assert kept <= 4e-3 < everything and 0 < len(report.keep_high) < 7
    assert {"1.self_attn", "1.linear1", "2.linear2", "3"} < set(report.rows)
    assert f"keep in high precision: {', '.join(report.keep_high)};" in str(report)


def test_recomputed_products_have_the_gradients_of_recorded_ones():
    model, losses = transformer()
    gradients = []
    for run in (model.eval(), lambda x: checkpoint(model.forward, x, use_reentrant=False)):
        with LowPrecision(model, "hybrid"):
            gradients.append(torch.autograd.grad(losses(run).mean(), list(model.parameters())))
    assert all(map(torch.equal, *gradients))


def test_the_loss_scale_leaves_room_and_flushes_the_share_that_fp16_does():
    model, x = nn.Linear(8, 8, bias=False), torch.randn(128, 8)
    spread = torch.exp2(-torch.arange(128.0) / 3)[:, None]
    report = precision_report(model, lambda: model(x).mul(spread).square().sum(1), "fp16")
    gradient = model(x).detach() * spread**2 * 2 / 128
    values = torch.cat([gradient, gradient.T @ x])
    assert 2**13 < values.abs().max() * report.loss_scale <= 2**14
    for scale in (1, report.loss_scale):
        share = ((values * scale).half() == 0).float().mean().item()
        assert report.rows[f"fp16 at scale {scale:g}"]["gradient flushed"] == pytest.approx(share)
