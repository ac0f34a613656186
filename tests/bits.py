"""Bitwise comparison of tensors, numbers, and containers of them."""

import torch


def same(a, b):
    """Return whether two tensors, numbers, or nested containers of them are bit-identical."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def changed(before, after):
    """Return the names whose tensors differ between two mappings."""
    return {name for name, x in before.items() if not torch.equal(x, after[name])}
