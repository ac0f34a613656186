"""Choose the dtypes of teacher, students, weights and losses for a device, with the reason."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ssl_kd.core.errors import InputError, UserError

_HALVES = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def default_torch_state() -> Iterator[None]:
    """Run a block with torch's modes as in a fresh process; also usable as a decorator.

    Switches off the caller's autocast, `no_grad` and `inference_mode`, and creates new tensors in
    float32 on the CPU; restores the modes afterwards. The default dtype changes for all threads.
    """
    dtype = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda", "mps"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        # Only where needed: each call inside a device context costs a little.
        if torch.empty(0).device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if dtype != torch.float32:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        yield


class UnsupportedDevice(UserError, RuntimeError):
    """The installed torch has no kernels for this GPU, or the GPU's driver cannot run them."""


@dataclass(frozen=True)
class DeviceInfo:
    """The properties of a device that decide its precision; you need not have the device.

    Attributes:
        type: "cpu", "cuda" or "mps".
        name: name of the device, such as "Tesla T4".
        capability: CUDA compute capability, `(7, 5)` for a T4; None for other devices.
        bf16_products: whether a CPU multiplies matrices in bfloat16 in hardware.
    """

    type: str
    name: str = ""
    capability: tuple[int, int] | None = None
    bf16_products: bool = False

    @classmethod
    def of(cls, device: torch.device) -> DeviceInfo:
        """Describe a device of this machine."""
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            return cls("cuda", name, torch.cuda.get_device_capability(device))
        if device.type == "cpu":
            return cls("cpu", "CPU", bf16_products=_cpu_has_bf16_products())
        return cls(device.type, device.type.upper())

    def halves(self) -> tuple[tuple[torch.dtype, ...], str]:
        """Return the half precisions with fast matrix products, best first, and the reason."""
        if self.type == "cpu":
            if self.bf16_products:
                return (torch.bfloat16,), "it multiplies bf16 in hardware"
            return (), "without bf16 products (avx512_bf16, amx) half is 2 to 4 times slower"
        if self.type != "cuda":
            return (), "half precision was never measured here"
        capability = self.capability or (0, 0)
        if capability >= (8, 0):
            return (torch.bfloat16, torch.float16), "bf16 in hardware, and it does not overflow"
        if capability >= (7, 0):
            return (torch.float16,), "fp16 tensor cores, bf16 only emulated"
        return (), "no bf16, and fp16 saves memory but no time"

    def __str__(self) -> str:
        if self.capability is None:
            return self.name or self.type.upper()
        return f"{self.name or self.type.upper()} (sm_{self.capability[0]}{self.capability[1]})"


def _cpu_has_bf16_products() -> bool:
    # Without these instructions bf16 products are 2 to 4 times slower than fp32.
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, check, lambda: False)() for check in checks)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run on one device; trainable weights and losses are always float32.

    Attributes:
        device: the device of the run.
        teacher: dtype of the frozen teacher's forward pass.
        student: dtype of the students' matrix products (autocast).
        scale: whether losses are scaled before the backward pass (float16 products only).
        why: the reason for these dtypes, and any difference from the requested ones.
        replaced: whether the students' dtype is another one than was requested.
    """

    device: torch.device
    teacher: torch.dtype
    student: torch.dtype
    scale: bool
    why: str
    replaced: bool = False

    @classmethod
    def for_device(
        cls,
        device: str | torch.device | DeviceInfo = "auto",
        use_fp16: bool | torch.dtype = False,
    ) -> Precision:
        """Choose the dtypes for a device; if it is a CUDA device of this machine, test its kernels.

        Args:
            device: "auto", "cpu", "cuda", "cuda:1", a `torch.device` or a `DeviceInfo`.
            use_fp16: half precision of the students' products: `torch.float16`, `torch.bfloat16`,
                or True for the device's best. A slow one is replaced by a fast one, else by
                float32. On a GPU the frozen teacher always uses half precision.

        Raises:
            ValueError: there is no such device, or `use_fp16` is another dtype.
            UnsupportedDevice: the installed torch has no kernels for this GPU.

        >>> print(Precision.for_device(DeviceInfo("cuda", "V100", (7, 0)), use_fp16=True).student)
        torch.float16
        """
        if not isinstance(use_fp16, bool) and use_fp16 not in _HALVES:
            raise ValueError(
                f"use_fp16 is {use_fp16}; expected True, False, torch.float16 or torch.bfloat16"
            )
        described = isinstance(device, DeviceInfo)
        place = torch.device(device.type) if described else _resolve(device)
        info = device if described else DeviceInfo.of(place)
        full = torch.float32
        halves, why = info.halves()
        student = full
        if use_fp16 is not False and halves:
            student = use_fp16 if use_fp16 in halves else halves[0]
        elif use_fp16 is torch.float16 and info.type == "cuda":  # a P100, for its memory
            student = torch.float16
        teacher = student
        if info.type == "cuda":  # half the memory for frozen weights, even where it is not faster
            teacher = halves[0] if halves else torch.float16
        reason = f"{info}: {why}" if info.type == "cuda" or use_fp16 else f"{info}: fp32 throughout"
        wanted = torch.float16 if use_fp16 is True else use_fp16
        replaced = False
        if wanted is not False and wanted != student:
            replaced = True
            request = f"{_short(wanted)} was requested and has no effect here"
            reason = f"{request}, {_short(student)} is used; {reason}"
        if info.type == "cuda" and not described:
            for dtype in dict.fromkeys((full, teacher, student)):
                _try_kernels(place, dtype, info)
        return cls(place, teacher, student, student == torch.float16, reason, replaced)

    def autocast(self) -> torch.autocast:
        """Return the context for the students' forward passes."""
        return torch.autocast(
            self.device.type, dtype=self.student, enabled=self.student != torch.float32
        )

    def log(self, logger: logging.Logger) -> None:
        """Log the dtypes, as a warning if a requested one has no effect on this device."""
        logger.log(logging.WARNING if self.replaced else logging.INFO, "%s", self)

    def __str__(self) -> str:
        """One line: `cpu: teacher fp32, students fp32, ... (CPU: fp32 throughout)`."""
        scale = "loss scaled per part" if self.scale else "no loss scale"
        return (
            f"{self.device}: teacher {_short(self.teacher)}, students {_short(self.student)}, "
            f"weights and losses fp32, {scale} ({self.why})"
        )


def promote_to_fp32(model: nn.Module) -> str | None:
    """Convert half-precision trainable parameters to float32, in place.

    Half-precision weights lose small updates, and a GradScaler refuses them ("Attempting to unscale
    FP16 gradients"). The parameters stay the same objects, so an optimizer that holds them still
    works if it has no state yet. Afterwards run the model under autocast. Frozen parameters and
    buffers are not changed.

    Args:
        model: any module.

    Returns:
        A line that names the converted parameters, and those of them that are not finite; None if
        nothing was converted.

    >>> promote_to_fp32(nn.Linear(2, 1))
    """
    halves = {n: p for n, p in model.named_parameters() if p.requires_grad and p.dtype in _HALVES}
    if not halves:
        return None
    dtypes = sorted({_short(p.dtype) for p in halves.values()})
    for parameter in halves.values():
        gradient, parameter.grad = parameter.grad, None  # its dtype must match the parameter's
        parameter.data = parameter.data.float()
        if gradient is not None:
            parameter.grad = gradient.float()
    line = (
        f"{len(halves)} trainable parameters were {' and '.join(dtypes)} and are fp32 masters now: "
        f"{_listed(list(halves))}; run the model under autocast"
    )
    poisoned = [n for n, p in halves.items() if not torch.isfinite(p.detach()).all()]
    return f"{line}; NOT FINITE: {_listed(poisoned)}" if poisoned else line


def _listed(names: list[str], most: int = 5) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def _resolve(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise InputError(
            f"device is {device!r}; expected auto, cpu, cuda, cuda:N or mps"
        ) from error
    if place.type == "cuda":
        count = torch.cuda.device_count()
        if (place.index or 0) >= count:
            raise InputError(
                f"device is {device!r}, but torch sees {count} CUDA devices: name another device, "
                "or check the driver and CUDA_VISIBLE_DEVICES"
            )
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise InputError(f"device is {device!r}, but torch sees no Apple GPU: use cpu or auto")
    return place


def _run_kernels(place: torch.device, dtype: torch.dtype) -> None:
    """Run a matrix product and a softmax, and wait, since a failed launch alone raises nothing."""
    x = torch.ones(32, 32, device=place, dtype=dtype)
    torch.softmax((x @ x).float(), dim=-1)
    torch.cuda.synchronize(place)


def _try_kernels(place: torch.device, dtype: torch.dtype, info: DeviceInfo) -> None:
    """Raise UnsupportedDevice if a few kernels fail."""
    try:
        _run_kernels(place, dtype)
    except RuntimeError as error:
        line = str(error).strip().splitlines()[0]
        if any(text in line for text in ("no kernel image", "invalid device function", "ARCH_MIS")):
            raise UnsupportedDevice(_no_kernels(info, line)) from error
        if "toolchain" in line or "driver version is insufficient" in line:
            raise UnsupportedDevice(
                f"{info}: {line}. Its driver is older than the CUDA {torch.version.cuda} that the "
                "installed torch was built with: update the driver, or install a build for an "
                "older CUDA"
            ) from error
        raise


def _no_kernels(info: DeviceInfo, error: str) -> str:
    way = "Install the newest torch"
    if info.capability is not None and info.capability < (7, 5):
        way = (
            "Install a build against CUDA 12.6 (torch 2.6 to 2.14 have one): pip install "
            "'torch<2.15' torchvision --index-url https://download.pytorch.org/whl/cu126"
        )
    architectures = ", ".join(torch.cuda.get_arch_list()) or "no GPU"
    return (
        f"{info}: the installed torch has kernels for {architectures}, and a first kernel fails "
        f"with {error!r}. {way}, or run with --device cpu"
    )
