"""Detect out-of-memory errors, measure and release memory, and copy to a device without waiting."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on the CPU or on a device."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def to_device_async(x: Tensor, device: torch.device | str | None) -> Tensor:
    """Copy a tensor to a device without waiting; from the CPU to a GPU through pinned memory."""
    if x.device.type == "cpu" and x.numel() and torch.device(device or "cpu").type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def free_memory(device: torch.device) -> int:
    """Return the number of bytes that this process can still allocate on a device, at most.

    For the CPU this is the kernel's estimate, within the limit of a container; where there is no
    estimate, the size of the memory.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = min(free, int(rows["MemAvailable"].split()[0]) * 1024)
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, KeyError, ValueError):  # not Linux, or no limit ("max")
        pass
    return free


def cache_clearing(wanted: bool, device: torch.device, others: str) -> Callable[[], None]:
    """Return the function to call after each step: if `wanted`, it frees a device's cached memory.

    `wanted` is CLEAR_CACHE_EVERY_STEP. A line in the log then says what it costs, and what else
    saves memory: `others`, the settings to change.
    """
    if not wanted:
        return lambda: None
    clear = {"cuda": torch.cuda.empty_cache, "mps": torch.mps.empty_cache}.get(device.type)
    if clear is None:
        logger.info(
            "CLEAR_CACHE_EVERY_STEP has no effect on %s, where PyTorch caches no memory", device
        )
        return lambda: None
    logger.info(
        "CLEAR_CACHE_EVERY_STEP: %s gets its cached memory back after every step, which waits for "
        "the device. If memory runs out, this usually helps more: %s; against fragmented memory, "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        *(device, others),
    )
    return clear


def give_back_memory() -> None:
    """Return freed heap memory of this process to the operating system (glibc only).

    glibc keeps blocks of some megabytes that are freed one by one: 360 MB after 600 MB of
    embeddings were verified.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
