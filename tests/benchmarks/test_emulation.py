"""Emulated casts against references from the specifications; a report's advice, applied."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.emulation import LowPrecision, cast, precision_report

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
def test_casts_keep_every_code_and_round_half_to_even(element):
    codes = torch.arange(256, dtype=torch.uint8).view(element).float()
    finite = codes[codes.isfinite()]  # with the largest among them the scale is 1
    middles = (finite.unique()[1:] + finite.unique()[:-1]) / 2
    points = torch.cat([finite, middles, middles * (1 + 2**-20), middles * (1 - 2**-20)])
    expected = torch.tensor([rounded(x, element) for x in points.tolist()])
    values, saturated, flushed = cast(points, element, "tensor")
    assert torch.equal(values[: len(finite)], finite) and torch.equal(values, expected)
    assert not saturated.any() and torch.equal(flushed, (expected == 0) & (points != 0))


@pytest.mark.parametrize("element", FLOAT8)
def test_mx_blocks_are_those_of_the_specification(element):
    torch.manual_seed(0)
    x = torch.randn(9, 71) * torch.exp2(torch.randint(-20, 20, (9, 71)))  # a last block of 7
    x[0], x[1, :32], x[2, 3], x[3, 40], x[4, 70] = 0, 1e-44, math.nan, math.inf, -3e38
    blocks = ([mx_block(b.tolist(), element) for b in row.split(32)] for row in x)
    expected = torch.tensor([sum(row, []) for row in blocks])
    values, saturated, _ = cast(x, element, "block")
    assert torch.equal(values.nan_to_num(-1), expected.nan_to_num(-1))
    assert saturated.any() and not cast(x, element, "block up")[1].any()
    with LowPrecision(nn.Identity(), "mxfp8"):
        products, whole = x[5:] @ x[5:].T, torch.tensor([[449]]) @ torch.tensor([[1]])
    if element == torch.float8_e4m3fn:
        torch.testing.assert_close(products, expected[5:] @ expected[5:].T)
    assert whole == 449  # a product of integers is exact


def test_emulated_half_precision_overflows_and_flushes_like_its_dtype():
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


def test_the_loss_scale_leaves_room_and_flushes_the_same_share_as_fp16():
    model, x = nn.Linear(8, 8, bias=False), torch.randn(128, 8)
    spread = torch.exp2(-torch.arange(128.0) / 3)[:, None]
    report = precision_report(model, lambda: model(x).mul(spread).square().sum(1), "fp16")
    gradient = model(x).detach() * spread**2 * 2 / 128
    values = torch.cat([gradient, gradient.T @ x])
    assert 2**13 < values.abs().max() * report.loss_scale <= 2**14
    for scale in (1, report.loss_scale):
        share = ((values * scale).half() == 0).float().mean().item()
        assert report.rows[f"fp16 at scale {scale:g}"]["gradient flushed"] == pytest.approx(share)
    assert precision_report(model, lambda: model(x) * 1e-20).loss_scale == 2**24
    assert not {"inf%", "nan%"} & set(str(precision_report(model, lambda: model(x) * 0)).split())


def test_delayed_scaling_uses_the_largest_of_earlier_steps_and_a_spike_saturates():
    x, low = torch.tensor([[1.0, -0.3, 0.01]]), LowPrecision(nn.Identity(), "delayed")
    for peak, before in ((1, 448), (4, 1), (2, 4), (448, 4)):  # at first the scale is 1
        with low:
            y = (x * peak) @ torch.eye(3)
        expected = [rounded(v * 448 / before, torch.float8_e4m3fn) for v in (x * peak)[0].tolist()]
        assert (y[0] * 448 / before).tolist() == pytest.approx(expected)
    assert low.shares["no module", "input saturated"].tolist() == [5, 48]  # with the identity
    with pytest.raises(ValueError, match="'hybrid' for a single step"):
        precision_report(nn.Identity(), lambda: x, "delayed")


@pytest.mark.parametrize("change", [lambda x: x.detach(), lambda x: x * math.inf])
def test_a_step_that_cannot_be_measured_is_refused_and_leaves_no_trace(change):
    model = nn.BatchNorm1d(4)

    def losses():
        model.running_mean = y = 1 + model(torch.randn(8, 4))[0]  # another tensor
        return change(y)

    with pytest.raises(ValueError, match="expected losses that depend|expected a healthy step"):
        precision_report(model, losses)
    assert not model.running_mean.any() and not model.num_batches_tracked
