"""Out of memory, whichever allocator says so; and how much there is."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; the CPU's allocator raises RuntimeError."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


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
