"""A confidence that means something, without labels: as sure as the partition is stable."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Between these the temperature is looked for, by halving the interval this often.
COLDEST, HOTTEST, HALVINGS = 0.05, 20.0, 40


def tempered(probabilities: Tensor, temperature: float) -> Tensor:
    """`p_k^(1/T) / sum_l p_l^(1/T)`, to the bit the same for T = 1; the largest stays the largest.

    Args:
        probabilities: `[..., K]`, each row a distribution.
        temperature: T, positive; above 1 makes them less sure.
    """
    if temperature == 1:
        return probabilities
    logits = probabilities.clamp(min=torch.finfo(torch.float32).tiny).double().log()
    return torch.softmax(logits / temperature, -1).to(probabilities.dtype)


def temperature_for(probabilities: Tensor, confidence: float) -> float:
    """The temperature that brings the mean of the largest probabilities to a wanted one.

    Args:
        probabilities: `[n, K]`, each row a distribution.
        confidence: in [0, 1]; what no temperature from 0.05 to 20 reaches gives the nearest.

    References:
        Guo et al., On calibration of modern neural networks, ICML 2017, section 4.2; they fit the
        temperature to labels.
    """
    low, high = math.log(COLDEST), math.log(HOTTEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        sure = float(tempered(probabilities, math.exp(middle)).amax(-1).double().mean())
        low, high = (middle, high) if sure > confidence else (low, middle)
    return math.exp((low + high) / 2)
