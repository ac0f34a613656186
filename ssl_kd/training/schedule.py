"""The learning rate over the steps of a run."""

from __future__ import annotations

import math


def learning_rate_at(step: int, steps: int, peak: float, warmup_fraction: float) -> float:
    """Linear warm-up to `peak`, then a cosine down to 0 at the last step.

    Args:
        step: from 0 to `steps - 1`.
        steps: in all.
        peak: the largest learning rate.
        warmup_fraction: share of the steps that warm up, 0 up to, not including, 1.
    """
    warmup = max(1, round(warmup_fraction * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * done))
