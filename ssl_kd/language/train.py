"""The training loop of the language mode.

It is our own, and not transformers' Trainer: there a step is one loss and one clip, done before
anybody is asked, so a sick term could only be seen when it is already in the weights that all terms
share. For a Trainer of one's own there is `ssl_kd.hf_trainer.GuardCallback`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ssl_kd.datasets.aligned import AlignedBlocks
from ssl_kd.datasets.blocks import Blocks
from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.language.step import Distiller, StepResult

Row = dict[str, Any]
"""One line of `metrics.jsonl`."""


def learning_rate_at(step: int, steps: int, peak: float, warmup_fraction: float) -> float:
    """Linear warm-up to `peak`, then a cosine down to 0 at the last step."""
    warmup = max(1, round(warmup_fraction * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


def rows_of_step(step: int, rows: int, n: int, seed: int) -> Tensor:
    """Which `rows` of `n` the step sees: every row once a pass, in an order of each pass's own."""
    wanted, parts = torch.arange(step * rows, (step + 1) * rows), []
    for epoch in (wanted // n).unique().tolist():
        generator = torch.Generator().manual_seed(hash((seed, epoch)) % 2**63)
        order = torch.randperm(n, generator=generator)
        parts.append(order[wanted[wanted // n == epoch] - epoch * n])
    return torch.cat(parts)


def train(
    distiller: Distiller,
    blocks: Blocks | AlignedBlocks,
    steps: int,
    *,
    start: int = 0,
    on_step: Callable[[int, StepResult], None] = lambda step, result: None,
    on_log: Callable[[Row], None] = lambda row: None,
    on_eval: Callable[[int], None] = lambda step: None,
    on_checkpoint: Callable[[int], None] = lambda step: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Train from step `start` to `steps`.

    Args:
        distiller: holds the state; changed in place.
        blocks: the text, aligned where the teacher has another tokenizer.
        steps: last step, exclusive.
        start: first step, the number of steps already done.
        on_step: gets each step's number, from 0, and result.
        on_log: gets a row every LOG_EVERY steps, and at the end.
        on_eval: called with the steps done every EVAL_EVERY, and at the end.
        on_checkpoint: saves, with the steps done, every CHECKPOINT_EVERY and at the end.
        should_stop: asked before every step; true saves and returns.

    Returns:
        The number of steps done; less than `steps` if it was told to stop.

    Raises:
        TooFewHealthyParts: going on would be a waste; the last good state was saved before.
    """
    settings, device = distiller.settings, distiller.precision.device
    size, batches = settings.batch_size, settings.gradient_accumulation_steps
    meter = _Meter(device, distiller.recent)
    for step in range(start, steps):
        if should_stop():
            on_checkpoint(step)
            return step
        rows = rows_of_step(step, size * batches, len(blocks), settings.seed)
        rate = learning_rate_at(step, steps, settings.peak_lr, settings.warmup_fraction)
        gpus = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(gpus):  # dropout draws the same numbers after a resume
            torch.manual_seed(hash((settings.seed, step)) % 2**63)
            try:
                result = distiller.step(
                    [blocks.batch(some, device) for some in rows.split(size)], rate
                )
            except TooFewHealthyParts:
                on_checkpoint(step + 1)
                raise
        if settings.clear_cache_every_step and device.type == "cuda":
            torch.cuda.empty_cache()
        on_step(step, result)
        meter.add(result)
        done = step + 1
        if done % settings.log_every == 0 or done == steps:
            on_log(meter.row(done, rate, int(distiller.guard.health.streak[0])))
        with meter.stopped():
            if done % settings.eval_every == 0 or done == steps:
                on_eval(done)
            if done % settings.checkpoint_every == 0 or done == steps:
                on_checkpoint(done)
    return steps


class _Meter:
    """Means since the last log line."""

    def __init__(self, device: torch.device, results: list[StepResult]) -> None:
        self._device, self._results = device, results
        self._began, self._tokens = time.perf_counter(), 0

    def add(self, result: StepResult) -> None:
        self._results.append(result)
        self._tokens += result.tokens

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Time that is not spent on learning."""
        before = time.perf_counter()
        yield
        self._began += time.perf_counter() - before

    def row(self, step: int, learning_rate: float, streak: int) -> Row:
        results, seconds = self._results, time.perf_counter() - self._began
        updated = sum(result.updated for result in results)
        row = {
            "step": step,
            "train_loss": _mean([result.loss for result in results]),
            "kd": _mean([result.kd for result in results]),
            "ce": _mean([result.ce for result in results]),
            "grad_norm": _mean([result.grad_norm for result in results]),
            "learning_rate": learning_rate,
            "success_rate": updated / len(results),
            "consecutive_nans": streak,
            "gpu_memory_gb": self._peak(),
            "tokens_per_second": self._tokens / max(seconds, 1e-9),
        }
        for name in results[-1].router:
            row[name] = _mean([result.router.get(name) for result in results])
        results.clear()
        self._began, self._tokens = time.perf_counter(), 0
        return row

    def _peak(self) -> float | None:
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device) / 2**30


def _mean(values: list[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
