"""Equal to the bit, whatever the values are kept in."""

import torch


def same(a, b):
    """Whether two tensors or numbers, or mappings or sequences of them, are equal to the bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def changed(before, after):
    """The names in a mapping whose tensors are not equal to the bit any more."""
    return {name for name, x in before.items() if not torch.equal(x, after[name])}
