"""Independent float64 formula of the distance of hidden states, a token at a time, by autograd."""

import torch

HUGE = 65504.0


def state_oracle(student, teacher):
    """1 - cos of each pair, infinities saturated."""
    values = []
    for s, t in zip(student, teacher, strict=True):
        s, t = (torch.where(x.isinf(), x.sign() * HUGE, x) for x in (s, t))
        values.append(1 - (s @ t) / (s.norm() * t.norm()))
    return torch.stack(values)
