"""Out of memory, whichever allocator says so; how much there is; and the way to a device's."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch
from torch import Tensor


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; the CPU's allocator raises RuntimeError."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def to_device_async(x: Tensor, device: torch.device | str | None) -> Tensor:
    """A tensor on a device, or itself for None; nothing waits for it.

    From the CPU to a GPU it goes by way of pinned memory, which the copy need not stop for.
    """
    if x.device.type == "cpu" and x.numel() and torch.device(device or "cpu").type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def free_memory(device: torch.device) -> int:
    """Bytes that a device has left, at most: what this process could still take.

    Of a CPU what the kernel says is available, within the limit of a container; where the system
    does not say it, all there is.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = min(free, int(told["MemAvailable"].split()[0]) * 1024)
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, KeyError, ValueError):  # not Linux, or no limit ("max")
        pass
    return free


def give_back_memory() -> None:
    """Return what is free in this process's heap to the system, where its library can (glibc).

    Blocks of some megabytes that are freed one by one stay with the process: 360 MB after 600 MB
    of embeddings had been verified.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
