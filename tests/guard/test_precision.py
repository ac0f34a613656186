import pytest
import torch

from ssl_kd.guard.precision import DeviceInfo, Precision, UnsupportedDevice

NEW = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
OLD = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("name", "capability", "arch", "use_fp16", "teacher", "student", "scale"),
    [
        ("P100", (6, 0), OLD, True, fp16, fp32, False),
        ("V100", (7, 0), OLD, True, fp16, fp16, True),
        ("T4", (7, 5), NEW, True, fp16, fp16, True),
        ("T4", (7, 5), NEW, False, fp16, fp32, False),
        ("A100", (8, 0), NEW, True, bf16, bf16, False),
        ("H100", (9, 0), NEW, False, bf16, fp32, False),
        ("L4", (8, 9), NEW, True, bf16, bf16, False),  # runs sm_80 code
    ],
)
def test_gpus(name, capability, arch, use_fp16, teacher, student, scale):
    precision = Precision.for_device(DeviceInfo("cuda", name, capability, arch), use_fp16)
    assert (precision.teacher, precision.student, precision.scale) == (teacher, student, scale)
    assert precision.weights == precision.losses == fp32
    assert name in str(precision) and "\n" not in str(precision)


@pytest.mark.parametrize(
    ("use_fp16", "products", "student"),
    [(False, True, fp32), (True, True, bf16), (True, False, fp32)],
)
def test_cpus(use_fp16, products, student):
    info = DeviceInfo("cpu", "CPU", bf16_products=products)
    precision = Precision.for_device(info, use_fp16)
    assert precision.student == student and not precision.scale


@pytest.mark.parametrize(
    ("capability", "way"), [((6, 0), "cu126"), ((7, 0), "cu126"), ((13, 0), None)]
)
def test_a_gpu_without_kernels_is_named_with_the_way_out(capability, way):
    info = DeviceInfo("cuda", "Some GPU", capability, NEW)
    if way is None:  # compute_120 is portable to newer chips
        assert Precision.for_device(info).why
        return
    with pytest.raises(UnsupportedDevice, match=way):
        Precision.for_device(info)


def test_this_machine():
    precision = Precision.for_device("cpu")
    assert precision.device.type == "cpu" and precision.student == fp32
    with precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == fp32


def test_unknown_devices_are_refused():
    with pytest.raises(ValueError, match="abacus"):
        Precision.for_device("abacus")
    with pytest.raises(ValueError, match="cuda:99"):
        Precision.for_device("cuda:99")
