"""Global states of torch in which a caller may call a function."""

import contextlib

import torch


@contextlib.contextmanager
def _float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "float64": _float64,
    "meta": lambda: torch.device("meta"),
}
"""Name -> function that returns the context manager."""
