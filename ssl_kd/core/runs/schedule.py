"""Compute the learning rate at each step of a run."""

from __future__ import annotations

import math


def warmup_length(
    steps: int, warmup_fraction: float, schedule: str = "cosine", warmup_steps: int = 0
) -> int:
    """Return the number of steps of the warm-up; 0 for the schedule `constant`."""
    if schedule == "constant":
        return 0
    return warmup_steps or max(1, round(warmup_fraction * steps))


def learning_rate_at(
    step: int,
    steps: int,
    peak: float,
    warmup_fraction: float,
    schedule: str = "cosine",
    warmup_steps: int = 0,
    min_lr_rate: float = 0.0,
) -> float:
    """Return the learning rate at a step: a linear warm-up to `peak`, then the schedule.

    Args:
        step: the step, from 0 to `steps - 1`.
        steps: total number of steps.
        peak: the largest learning rate.
        warmup_fraction: fraction of the steps used for the warm-up, in [0, 1).
        schedule: `cosine` or `linear` (both reach 0 after the last step), `constant_with_warmup`,
            `cosine_with_min_lr` (which reaches `min_lr_rate * peak`), or `constant` (no warm-up).
        warmup_steps: length of the warm-up; 0 means that `warmup_fraction` decides.
        min_lr_rate: see `schedule`.
    """
    if schedule == "constant":
        return peak
    warmup = warmup_length(steps, warmup_fraction, schedule, warmup_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant_with_warmup":
        return peak
    done = (step - warmup) / max(1, steps - warmup)
    if schedule == "linear":
        return peak * (1 - done)
    least = min_lr_rate if schedule == "cosine_with_min_lr" else 0.0
    return peak * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done)))
