import pytest
import torch

from firstnan.finite import compute_dtype, safe_normalize
from tests.faults.matrix import row

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def test_arithmetic_is_in_float32_at_least():
    wide = [compute_dtype(torch.zeros(1, dtype=dtype)) for dtype in DTYPES]
    assert wide == [torch.float32, torch.float32, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-7, 1.0, 3e3])
def test_safe_normalize_has_unit_length(dtype, scale):
    x = (torch.randn(5, 768, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    x[x == 0] = scale
    length = safe_normalize(x).double().norm(dim=-1)
    torch.testing.assert_close(length, torch.ones(5, dtype=torch.float64), atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_safe_normalize_neither_overflows_nor_underflows(scale):
    x = torch.tensor([[3.0, 4.0]]) * scale
    torch.testing.assert_close(safe_normalize(x), torch.tensor([[0.6, 0.8]]))


@row(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_stay_zero_with_a_finite_gradient(dtype):
    x = torch.zeros(2, 4, dtype=dtype, requires_grad=True)
    y = safe_normalize(x)
    assert torch.equal(y, torch.zeros_like(y))
    y.sum().backward()
    assert torch.isfinite(x.grad).all() and x.grad.abs().max() <= 1


@pytest.mark.parametrize("dim", [1, -1])
def test_safe_normalize_has_both_derivatives(dim):
    x = torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def of_each(x):  # vmap asks for a rule of its own
        return torch.vmap(safe_normalize)(x)

    for normalize in (lambda x: safe_normalize(x, dim), of_each):
        assert torch.autograd.gradcheck(normalize, x.requires_grad_())
        assert torch.autograd.gradgradcheck(normalize, x)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_gradient_of_safe_normalize_at_any_length(scale):
    x = torch.tensor([[3.0, 4.0]]) * scale
    safe_normalize(x.requires_grad_())[0, 0].backward()
    torch.testing.assert_close(x.grad * scale, torch.tensor([[0.128, -0.096]]))
