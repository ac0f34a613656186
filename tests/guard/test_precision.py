import dataclasses

import pytest
import torch
from torch import nn

from ssl_kd.guard import precision as policy
from ssl_kd.guard.precision import (
    DeviceInfo,
    Precision,
    UnsupportedDevice,
    default_torch_state,
    precision_table,
    promote_to_fp32,
)
from tests.faults.matrix import row
from tests.modes import MODES

NEW = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
OLD = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16

P100 = DeviceInfo("cuda", "P100", (6, 0), OLD)
V100 = DeviceInfo("cuda", "V100", (7, 0), OLD)
T4 = DeviceInfo("cuda", "T4", (7, 5), NEW)
A100 = DeviceInfo("cuda", "A100", (8, 0), NEW)
H100 = DeviceInfo("cuda", "H100", (9, 0), NEW)
L4 = DeviceInfo("cuda", "L4", (8, 9), NEW)  # runs sm_80 code
CPU_BF16 = DeviceInfo("cpu", "CPU", bf16_products=True)
CPU = DeviceInfo("cpu", "CPU")
MPS = DeviceInfo("mps", "MPS")


@pytest.mark.parametrize(
    ("info", "use_fp16", "teacher", "student", "scale"),
    [
        (P100, False, fp16, fp32, False),
        (P100, True, fp16, fp32, False),
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
    assert precision.weights == precision.losses == fp32
    assert info.name in str(precision) and "\n" not in str(precision)


@row(49)
@pytest.mark.parametrize(
    ("info", "asked", "said"),
    [
        (CPU, True, "fp16 was requested, fp32 is used; CPU: without bf16 products"),
        (CPU_BF16, fp16, "fp16 was requested, bf16 is used; CPU: it multiplies bf16 in hardware"),
        (P100, bf16, "bf16 was requested, fp32 is used; P100 (sm_60): no bf16"),
        (P100, True, "fp16 was requested, fp32 is used; P100 (sm_60): no bf16, and fp16 saves"),
        (V100, bf16, "bf16 was requested, fp16 is used; V100 (sm_70): fp16 tensor cores"),
        (A100, True, "fp16 was requested, bf16 is used; A100 (sm_80): bf16 in hardware"),
        (MPS, True, "fp16 was requested, fp32 is used; MPS: half precision was never measured"),
    ],
)
def test_what_is_used_instead_of_what_was_asked_for(info, asked, said):
    assert said in str(Precision.for_device(info, asked))


@pytest.mark.parametrize(
    ("info", "asked"), [(V100, fp16), (A100, bf16), (CPU_BF16, bf16), (CPU, False), (P100, False)]
)
def test_nothing_is_said_of_an_exchange_where_there_is_none(info, asked):
    assert "instead" not in str(Precision.for_device(info, asked))


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="float64"):
        Precision.for_device(A100, torch.float64)


# --- A GPU without kernels ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "arch", "runs"),
    [
        ((6, 0), NEW, False),
        ((6, 0), OLD, True),
        ((7, 0), NEW, False),
        ((8, 9), ("sm_80",), True),
        ((9, 0), ("sm_80", "sm_86"), False),  # binary code does not cross a major version
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_90a",), True),
        ((12, 1), ("sm_120a",), False),  # an `a` is for this very chip
        ((12, 1), ("sm_120",), True),
        ((13, 0), NEW, True),  # compute_120 is portable to newer chips
        ((9, 4), ("gfx90a", "gfx942"), True),  # AMD's names say nothing
        ((9, 0), (), True),
    ],
)
def test_capability_and_architectures(capability, arch, runs):
    assert DeviceInfo("cuda", "Some GPU", capability, arch).has_kernels() is runs


@row(49)
@pytest.mark.parametrize(
    ("capability", "arch", "way"),
    [((6, 0), NEW, "cu126"), ((7, 0), NEW, "cu126"), ((13, 0), OLD, "newest torch")],
)
def test_a_gpu_without_kernels_is_named_with_the_way_out(capability, arch, way):
    info = DeviceInfo("cuda", "Some GPU", capability, arch)
    with pytest.raises(UnsupportedDevice, match=way) as caught:
        Precision.for_device(info)
    assert "Some GPU" in str(caught.value) and ", ".join(arch) in str(caught.value)


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


def test_a_kernel_that_is_not_there_is_found_whatever_the_list_says(cuda):
    error = RuntimeError(
        "CUDA error: no kernel image is available for execution on the device\n"
        "CUDA kernel errors might be asynchronously reported at some other API call."
    )
    cuda(dataclasses.replace(P100, arch_list=OLD), error)
    with pytest.raises(UnsupportedDevice, match="no kernel image is available") as caught:
        Precision.for_device("cuda")
    assert "whl/cu126" in str(caught.value) and "P100 (sm_60)" in str(caught.value)
    assert caught.value.__cause__ is error and "\n" not in str(caught.value)


def test_a_driver_that_is_too_old_is_named(cuda):
    cuda(
        T4, RuntimeError("CUDA error: the provided PTX was compiled with an unsupported toolchain")
    )
    with pytest.raises(UnsupportedDevice, match="update the driver"):
        Precision.for_device("cuda")


def test_other_errors_of_a_kernel_stay_what_they_are(cuda):
    cuda(T4, RuntimeError("CUDA out of memory"))
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        Precision.for_device("cuda")
    assert not isinstance(caught.value, UnsupportedDevice)


@pytest.mark.gpu
def test_this_gpu():
    precision = Precision.for_device("cuda", use_fp16=True)
    with precision.autocast():
        assert (torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")).isfinite().all()


# --- This machine -------------------------------------------------------------------------------


def test_this_machine():
    precision = Precision.for_device("cpu")
    assert precision.device.type == "cpu" and precision.student == fp32
    with precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == fp32


def test_unknown_devices_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="abacus"):
        Precision.for_device("abacus")
    with pytest.raises(ValueError, match="cuda:99"):
        Precision.for_device("cuda:99")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no Apple GPU"):
        Precision.for_device("mps")


def test_the_table_says_what_the_policy_does():
    header, line, *rows = precision_table().splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert {len(row) for row in [*cells, header.strip("|").split("|")]} == {6}
    by_device = {row[0]: row[1:5] for row in cells}
    assert by_device["P100 (sm_60)"] == ["fp16", "fp32", "fp32", "none"]
    assert by_device["V100 (sm_70)"] == ["fp16", "fp32", "fp16", "per part"]
    assert by_device["T4 (sm_75)"] == ["fp16", "fp32", "fp16", "per part"]
    assert (
        by_device["A100 (sm_80)"] == by_device["H100 (sm_90)"] == ["bf16", "fp32", "bf16", "none"]
    )
    assert by_device["CPU with bf16 products"][1:] == ["fp32", "bf16", "none"]
    assert by_device["other CPUs"] == ["fp32", "fp32", "fp32", "none"]


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
    line = str(promote_to_fp32(model))
    assert "2 trainable" in line and "trained.weight, trained.bias" in line and "\n" not in line
    assert model.frozen.weight.dtype == dtype  # frozen
    assert model.trained.weight.dtype == model.trained.bias.dtype == fp32
    assert torch.equal(model.trained.weight, values)
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


def test_what_is_not_finite_stays_so_and_is_said():
    model = HalfModel()
    with torch.no_grad():
        model.trained.weight[0, 0] = float("nan")
        model.trained.weight[1, 1] = float("inf")
    line = str(promote_to_fp32(model))
    assert line.endswith("NOT FINITE: trained.weight")
    assert model.trained.weight[0, 0].isnan() and model.trained.weight[1, 1].isinf()


def test_shared_weights_stay_shared():
    model = HalfModel()
    model.tied = nn.Linear(3, 2, bias=False)
    model.tied.weight = model.trained.weight
    assert "2 trainable" in str(promote_to_fp32(model))
    assert model.tied.weight is model.trained.weight and model.tied.weight.dtype == fp32


@pytest.mark.parametrize("mode", MODES)
def test_inside_torch_is_as_in_a_fresh_process_and_outside_as_it_was(mode):
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
