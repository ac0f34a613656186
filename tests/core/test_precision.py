from pathlib import Path

import pytest
import torch
from torch import nn

from ssl_kd.core import precision as policy
from ssl_kd.core.precision import (
    DeviceInfo,
    Precision,
    UnsupportedDevice,
    default_torch_state,
    promote_to_fp32,
)
from tests.faults.matrix import row
from tests.torch_modes import MODES

fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
NAMES = {fp32: "fp32", fp16: "fp16", bf16: "bf16"}

P100 = DeviceInfo("cuda", "P100", (6, 0))
V100 = DeviceInfo("cuda", "V100", (7, 0))
T4 = DeviceInfo("cuda", "T4", (7, 5))
A100 = DeviceInfo("cuda", "A100", (8, 0))
H100 = DeviceInfo("cuda", "H100", (9, 0))
L4 = DeviceInfo("cuda", "L4", (8, 9))
CPU_BF16 = DeviceInfo("cpu", "CPU", bf16_products=True)
CPU = DeviceInfo("cpu", "CPU")
MPS = DeviceInfo("mps", "MPS")


@pytest.mark.parametrize(
    ("info", "use_fp16", "teacher", "student", "scale"),
    [
        (P100, False, fp16, fp32, False),
        (P100, True, fp16, fp32, False),
        (P100, fp16, fp16, fp16, True),
        (V100, False, fp16, fp32, False),
        (V100, True, fp16, fp16, True),
        (T4, True, fp16, fp16, True),
        (T4, False, fp16, fp32, False),
        (A100, True, bf16, bf16, False),
        (A100, fp16, bf16, fp16, True),
        (H100, False, bf16, fp32, False),
        (H100, bf16, bf16, bf16, False),
        (L4, True, bf16, bf16, False),
        (CPU, False, fp32, fp32, False),
        (CPU, True, fp32, fp32, False),
        (CPU_BF16, False, fp32, fp32, False),
        (CPU_BF16, True, bf16, bf16, False),
        (MPS, False, fp32, fp32, False),
        (MPS, True, fp32, fp32, False),
    ],
)
def test_the_policy(info, use_fp16, teacher, student, scale):
    precision = Precision.for_device(info, use_fp16)
    assert (precision.teacher, precision.student, precision.scale) == (teacher, student, scale)
    assert info.name in str(precision) and "\n" not in str(precision)


@row(49)
@pytest.mark.parametrize(
    ("info", "asked", "expected"),
    [
        (CPU, True, "fp16 was requested and has no effect here, fp32 is used; CPU: without"),
        (
            CPU_BF16,
            fp16,
            "fp16 was requested and has no effect here, bf16 is used; CPU: it multiplies",
        ),
        (P100, bf16, "bf16 was requested and has no effect here, fp32 is used; P100 (sm_60): no b"),
        (V100, bf16, "bf16 was requested and has no effect here, fp16 is used; V100 (sm_70): fp16"),
        (A100, True, "fp16 was requested and has no effect here, bf16 is used; A100 (sm_80): bf16"),
        (MPS, True, "fp16 was requested and has no effect here, fp32 is used; MPS: half precisio"),
        (A100, bf16, "no loss scale (A100 (sm_80): bf16 in hardware"),
        (P100, False, "no loss scale (P100 (sm_60): no bf16"),
    ],
)
def test_the_line_names_what_is_used_instead_of_what_was_requested(info, asked, expected):
    assert expected in str(Precision.for_device(info, asked))


# --- A GPU without kernels ----------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    """Pretend that this machine has a GPU; returns a list of the kernels that were tried."""
    tried = []

    def pretend(info, error=None):
        monkeypatch.setattr(policy, "_resolve", lambda device: torch.device("cuda"))
        monkeypatch.setattr(DeviceInfo, "of", classmethod(lambda cls, device: info))

        def run(place, dtype):
            tried.append(dtype)
            if error is not None:
                raise error

        monkeypatch.setattr(policy, "_run_kernels", run)
        return tried

    return pretend


def test_real_kernels_run_in_every_dtype_before_the_answer(cuda):
    tried = cuda(T4)
    assert Precision.for_device("cuda", use_fp16=True).student == fp16
    assert tried == [fp32, fp16]


NO_KERNEL = "no kernel image is available for execution\nand more"
TOOLCHAIN = "the provided PTX was compiled with an unsupported toolchain"


@row(49)
@pytest.mark.parametrize(
    ("info", "error", "kind", "message"),
    [
        (P100, NO_KERNEL, UnsupportedDevice, "P100.*whl/cu126"),
        (V100, NO_KERNEL, UnsupportedDevice, "whl/cu126"),
        (H100, NO_KERNEL, UnsupportedDevice, "newest torch"),
        (P100, TOOLCHAIN, UnsupportedDevice, "update"),
        (P100, "CUDA out of memory", RuntimeError, "out of memory"),
    ],
)
def test_an_error_of_a_first_kernel_is_named_with_the_way_out(cuda, info, error, kind, message):
    cuda(info, RuntimeError(error))
    with pytest.raises(kind, match=message) as caught:
        Precision.for_device("cuda")
    assert type(caught.value) is kind and "\n" not in str(caught.value)


@pytest.mark.gpu
def test_this_gpu():
    precision = Precision.for_device("cuda", use_fp16=True)
    with precision.autocast():
        assert (torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")).isfinite().all()


# --- This machine -------------------------------------------------------------------------------


def test_unknown_devices_and_dtypes_are_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for device, use_fp16, message in [
        ("abacus", False, "abacus"),
        ("cuda:99", False, "cuda:99"),
        ("mps", False, "no Apple GPU"),
        (A100, torch.float64, "use_fp16 is torch.float64"),
    ]:
        with pytest.raises(ValueError, match=message):
            Precision.for_device(device, use_fp16)


def test_the_table_in_the_guide_has_the_dtypes_of_the_policy():
    page = (Path(__file__).parents[2] / "docs" / "guard.md").read_text(encoding="utf-8")
    others = DeviceInfo("cpu", "other CPUs"), DeviceInfo("mps", "Apple GPU")
    for info in (P100, V100, T4, A100, H100, *others):
        plain, half = Precision.for_device(info), Precision.for_device(info, use_fp16=True)
        dtypes = [NAMES[dtype] for dtype in (plain.teacher, plain.student, half.student)]
        scale = "per part" if half.scale else "none"
        assert f"| {' | '.join([str(info), *dtypes, scale, info.halves()[1]])} |" in page


# --- Half-precision weights ---------------------------------------------------------------------


class HalfModel(nn.Module):
    def __init__(self, dtype=fp16):
        super().__init__()
        self.frozen = nn.Linear(4, 3, dtype=dtype).requires_grad_(False)
        self.trained = nn.Linear(3, 2, dtype=dtype)

    def forward(self, x):
        return self.trained(self.frozen(x))


@pytest.mark.parametrize("dtype", [fp16, bf16])
def test_trainable_half_weights_become_masters(dtype):
    model = HalfModel(dtype)
    before = list(model.parameters())
    values = model.trained.weight.detach().float().clone()
    model.tied = model.trained  # shared weights stay shared, and what is not finite is reported
    with torch.no_grad():
        model.trained.weight[0, 0] = values[0, 0] = float("nan")
    line = str(promote_to_fp32(model))
    assert line.endswith("NOT FINITE: trained.weight")
    assert "2 trainable" in line and "trained.weight, trained.bias" in line and "\n" not in line
    assert model.frozen.weight.dtype == dtype  # frozen
    assert model.trained.weight.dtype == model.trained.bias.dtype == fp32
    torch.testing.assert_close(
        model.trained.weight.detach(), values, atol=0, rtol=0, equal_nan=True
    )
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert promote_to_fp32(model) is None


@row(37)
def test_masters_can_be_unscaled_where_half_weights_crash():
    def step(model):
        """One scaled step of an optimizer made before the promotion."""
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with torch.autocast("cpu", dtype=fp16):
            loss = model(torch.ones(5, 4)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    model = HalfModel()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        step(model)

    assert model.trained.weight.grad is not None  # the half gradient of the failed step
    promote_to_fp32(model)
    assert model.trained.weight.grad.dtype == fp32
    optimizer.zero_grad()
    frozen, trained = model.frozen.weight.clone(), model.trained.weight.detach().clone()
    step(model)
    assert torch.equal(model.frozen.weight, frozen)
    assert model.trained.weight.isfinite().all() and not torch.equal(model.trained.weight, trained)


@pytest.mark.parametrize("mode", MODES)
def test_global_modes_of_torch_are_reset_inside_and_restored_outside(mode):
    def state():
        made = torch.ones(2)
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            (made.dtype, made.device.type, made.is_inference()),
        )

    fresh = state()
    with MODES[mode]():
        before = state()
        assert before != fresh
        with default_torch_state():
            assert state() == fresh
        with pytest.raises(KeyError), default_torch_state():
            raise KeyError
        assert state() == before
    assert state() == fresh
