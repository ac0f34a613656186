"""Which dtype runs where, and why: one decision per device, in one printable line."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["DeviceInfo", "Precision", "UnsupportedDevice"]


class UnsupportedDevice(RuntimeError):
    """The installed torch has no kernels for this GPU."""


@dataclass(frozen=True)
class DeviceInfo:
    """What the policy needs to know of a device; hand it one you describe to test without it.

    Attributes:
        type: "cpu", "cuda" or "mps".
        name: what the device calls itself.
        capability: CUDA compute capability, `(7, 5)` for a T4; None elsewhere.
        arch_list: what `torch.cuda.get_arch_list()` says, `("sm_75", ..., "compute_90")`.
        bf16_products: CPU only: matrix products in bfloat16 run in hardware.
    """

    type: str
    name: str = ""
    capability: tuple[int, int] | None = None
    arch_list: tuple[str, ...] = ()
    bf16_products: bool = False

    @classmethod
    def of(cls, device: torch.device) -> DeviceInfo:
        """Describe a device of this machine."""
        if device.type == "cuda":
            return cls(
                "cuda",
                torch.cuda.get_device_name(device),
                torch.cuda.get_device_capability(device),
                tuple(torch.cuda.get_arch_list()),
            )
        if device.type == "cpu":
            return cls("cpu", "CPU", bf16_products=_cpu_has_bf16_products())
        return cls(device.type, device.type.upper())

    def has_kernels(self) -> bool:
        """Whether the torch build holds kernels for this capability.

        Binary code of one major version runs on later minor versions of it; `compute_XY` is
        portable code that newer GPUs compile for themselves.
        """
        if self.capability is None or not self.arch_list:
            return True
        major, minor = self.capability
        for arch in self.arch_list:
            kind, _, digits = arch.partition("_")
            digits = digits.rstrip("abcdefghijklmnopqrstuvwxyz")
            built = (int(digits[:-1]), int(digits[-1]))
            if kind == "sm" and built[0] == major and built[1] <= minor:
                return True
            if kind == "compute" and built <= (major, minor):
                return True
        return False


def _cpu_has_bf16_products() -> bool:
    # Without the instructions bf16 products are 2 to 4 times slower than fp32: ask, never assume.
    asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, ask, lambda: False)() for ask in asks)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run on one device.

    Attributes:
        device: where it runs.
        teacher: dtype of the frozen teacher's forward pass.
        student: dtype of the students' matrix products (autocast).
        weights: dtype of trainable weights; always float32.
        losses: dtype of loss arithmetic; always float32.
        scale: whether losses are scaled before the backward pass (float16 products only).
        why: the reason, in a sentence.
    """

    device: torch.device
    teacher: torch.dtype
    student: torch.dtype
    scale: bool
    why: str
    weights: torch.dtype = torch.float32
    losses: torch.dtype = torch.float32

    @classmethod
    def for_device(
        cls, device: str | torch.device | DeviceInfo = "auto", use_fp16: bool = False
    ) -> Precision:
        """Decide the dtypes.

        Args:
            device: "auto", "cpu", "cuda", "cuda:1", a `torch.device` or a described device.
            use_fp16: run the students' products in the fastest half precision the device has.
                The frozen teacher uses it on a GPU in any case.

        Raises:
            ValueError: the device is not there.
            UnsupportedDevice: the installed torch has no kernels for this GPU.
        """
        if isinstance(device, DeviceInfo):
            info, place = device, torch.device(device.type)
        else:
            place = _resolve(device)
            info = DeviceInfo.of(place)

        full, half, bf16 = torch.float32, torch.float16, torch.bfloat16
        if info.type == "cpu":
            if not use_fp16:
                return cls(place, full, full, False, "CPU: fp32 throughout")
            if info.bf16_products:
                return cls(place, bf16, bf16, False, "CPU with bf16 products: half means bf16")
            why = "CPU without bf16 products: half precision would be slower, so fp32"
            return cls(place, full, full, False, why)
        if info.type != "cuda":
            return cls(place, full, full, False, f"{info.name}: fp32 throughout")

        if not info.has_kernels():
            raise UnsupportedDevice(_no_kernels(info))
        capability = info.capability or (0, 0)
        what = f"{info.name} (sm_{capability[0]}{capability[1]})"
        if capability >= (8, 0):
            return cls(place, bf16, bf16 if use_fp16 else full, False, f"{what}: bf16 in hardware")
        if capability >= (7, 0):
            why = f"{what}: fp16 tensor cores, no bf16"
            return cls(place, half, half if use_fp16 else full, use_fp16, why)
        why = f"{what}: fp16 saves memory but no time, so the students stay in fp32"
        return cls(place, half, full, False, why)

    def autocast(self) -> torch.autocast:
        """The context that the students' forward passes run in."""
        return torch.autocast(
            self.device.type, dtype=self.student, enabled=self.student != torch.float32
        )

    def __str__(self) -> str:
        """One line: `cpu: teacher float32, students float32, ... (CPU: fp32 throughout)`."""

        def short(dtype: torch.dtype) -> str:
            return str(dtype).removeprefix("torch.")

        scale = "loss scaled per head" if self.scale else "no loss scale"
        return (
            f"{self.device}: teacher {short(self.teacher)}, students {short(self.student)}, "
            f"weights and losses {short(self.weights)}, {scale} ({self.why})"
        )


def _resolve(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r}: expected auto, cpu, cuda or cuda:N") from error
    if place.type == "cuda":
        count = torch.cuda.device_count()
        if (place.index or 0) >= count:
            raise ValueError(f"device {device!r} asked for, but torch sees {count} CUDA devices")
    return place


def _no_kernels(info: DeviceInfo) -> str:
    major, minor = info.capability or (0, 0)
    if major < 7 or (major, minor) == (7, 0):
        way = (
            "install a build against CUDA 12.6 (torch 2.6 to 2.14 have one): pip install "
            "'torch<2.15' torchvision --index-url https://download.pytorch.org/whl/cu126"
        )
    else:
        way = "install the newest torch, or run with --device cpu"
    return (
        f"{info.name} is sm_{major}{minor}, and the installed torch has kernels for "
        f"{', '.join(info.arch_list)} only: {way}"
    )
