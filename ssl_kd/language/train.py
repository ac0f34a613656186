"""The training loop of the language mode: rows, steps, log lines and checkpoints of a student.

This is the full engine. transformers' Trainer owns data, step and checkpoint, so it cannot resume
to the bit with the guard's state, replay a fault, or have rows written anew;
`ssl_kd.hf_trainer.DistillationTrainer` is the loss and the guard alone, for those who stay with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ssl_kd.datasets.aligned import AlignedBlocks
from ssl_kd.datasets.blocks import Blocks
from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.guard.seeds import seed_of, seeded
from ssl_kd.language.rollouts import Written, seen_of
from ssl_kd.language.step import Distiller, StudentStep
from ssl_kd.training.loop import Pace, run_loop
from ssl_kd.training.schedule import learning_rate_at

Row = dict[str, Any]
"""One line of `metrics.jsonl`."""


def rows_of_step(step: int, rows: int, n: int, seed: int) -> Tensor:
    """Which `rows` of `n` the step sees: every row once a pass, in an order of each pass's own."""
    wanted, parts = torch.arange(step * rows, (step + 1) * rows), []
    for epoch in (wanted // n).unique().tolist():
        generator = torch.Generator().manual_seed(seed_of(seed, epoch))
        order = torch.randperm(n, generator=generator)
        parts.append(order[wanted[wanted // n == epoch] - epoch * n])
    return torch.cat(parts)


def train(
    distiller: Distiller,
    blocks: Blocks | AlignedBlocks,
    steps: int,
    *,
    start: int = 0,
    written: Written | None = None,
    on_step: Callable[[int, StudentStep], object] = lambda step, result: None,
    on_log: Callable[[Row], object] = lambda row: None,
    on_eval: Callable[[int], object] = lambda step: None,
    on_checkpoint: Callable[[int], object] = lambda step: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Train a student, as `ssl_kd.training.loop.run_loop` does.

    Args:
        distiller: holds the state; changed in place.
        blocks: the text, aligned where the teacher has another tokenizer.
        steps: last step, exclusive.
        start: first step, the number of steps already done.
        written: who makes its batches where ON_POLICY is above 0, see `rollouts.writer`.
        on_step: gets each step's number, from 0, and result.
        on_log: gets a row every LOG_EVERY steps, and at the end.
        on_eval: called with the steps done every EVAL_EVERY, and at the end.
        on_checkpoint: saves, with the steps done, every CHECKPOINT_EVERY and at the end.
        should_stop: asked before every step; true saves and returns.

    Returns:
        The number of steps done; less than `steps` if it was stopped.

    Raises:
        TooFewHealthyParts: training cannot continue, or is over without a step that was learned
            from; the last good state was saved before.
        ValueError: ON_POLICY is above 0 and there is no `written`, or the other way round.
    """
    settings = distiller.settings
    if bool(settings.on_policy) != (written is not None):
        raise ValueError(f"on_policy is {settings.on_policy}, and written is {written}")
    done = run_loop(
        _Student(distiller, blocks, steps, on_step, written),
        start=start,
        log_every=settings.log_every,
        checkpoint_every=settings.checkpoint_every,
        eval_every=settings.eval_every,
        on_log=on_log,
        on_eval=on_eval,
        on_checkpoint=on_checkpoint,
        should_stop=should_stop,
    )
    if done == steps and not any(distiller.learned.values()):
        why = f"none of the {steps} steps could be learned from"
        raise TooFewHealthyParts(f"{why}.\n{distiller.guard.diagnosis()}".rstrip())
    return done


class _Student:
    """A student as the loop's learner."""

    def __init__(
        self,
        distiller: Distiller,
        blocks: Blocks | AlignedBlocks,
        steps: int,
        on_step: Callable[[int, StudentStep], object],
        written: Written | None,
    ) -> None:
        self.distiller, self.blocks, self.steps, self.on_step = distiller, blocks, steps, on_step
        self.written = written
        self.pace = Pace()
        self._device = distiller.precision.device
        self._learning_rate = 0.0

    def learn(self, step: int) -> None:
        """One guarded step on some rows of the text."""
        distiller, settings = self.distiller, self.distiller.settings
        team = distiller.team
        how = settings.peak_lr, settings.warmup_fraction, settings.lr_schedule
        distiller.follow(step, self.steps)
        self._learning_rate = rate = learning_rate_at(step, self.steps, *how)
        gpus = [self._device] if self._device.type == "cuda" else []
        key = (step,) if team.rank == 0 else (step, team.rank)
        with seeded(seed_of(settings.seed, *key), gpus):  # of dropout
            if self.written is not None:
                result = self._learn_from_its_own(self.written, step, rate)
            else:
                batches = self._batches(step)
                if (ask_ahead := getattr(distiller.source, "ask_ahead", None)) is not None:
                    following = self._batches(step + 1) if step + 1 < self.steps else []
                    ask_ahead([*batches, *following])
                result = distiller.step(batches, rate)
        distiller.recent.append(result)
        self.pace.add(result.tokens)
        self.on_step(step, result)

    def _learn_from_its_own(self, written: Written, step: int, rate: float) -> StudentStep:
        """A step on rows of which the student writes some."""
        batches, here = written.batches(step, self._shares(step), self._device)
        sums = self.distiller.team.sums(f"step {step}, what was written", *here.values())
        found = seen_of(dict(zip(here, sums, strict=True)))
        seen = {name: total / n if n else None for name, (total, n) in found.items()}
        return replace(self.distiller.step(batches, rate), rollouts=seen)

    def _shares(self, step: int) -> list[Tensor]:
        """This rank's share of a step's rows, for each batch."""
        settings = self.distiller.settings
        size, n = settings.batch_size, settings.gradient_accumulation_steps
        rows = rows_of_step(step, size * n, len(self.blocks), settings.seed)
        return [*map(self.distiller.team.share, rows.split(size))]

    def _batches(self, step: int) -> list[Any]:
        """The batches of a step."""
        return [self.blocks.batch(some, self._device) for some in self._shares(step)]

    def look(self, done: int, *, at_once: bool = False) -> None:
        """The guard of modules has looked in the step itself."""

    def before_checkpoint(self, done: int) -> None:
        """Restore weights that were hit from outside a step."""
        guard = self.distiller.guard
        guard.events.extend(guard.recovery.restore_what_is_not_finite(done - 1))

    def record(self, done: int) -> Row:
        """Means over the steps since the last record, which may be before a resume."""
        results = self.distiller.recent
        updated = sum(result.updated for result in results)
        row = {
            "step": done,
            "train_loss": _mean([result.loss for result in results]),
            **self._terms(),
            "grad_norm": _mean([result.grad_norm for result in results]),
            "learning_rate": self._learning_rate,
            **{name: getattr(self.distiller.settings, name) for name in self.distiller.moves},
            "success_rate": updated / len(results),
            **self._success_of_terms(),
            "consecutive_nans": int(self.distiller.guard.health.streak[0]),
            "gpu_memory_gb": self._peak_memory(),
            "tokens_per_second": self.pace.per_second(),
        }
        for seen in ("router", "rollouts"):
            for name in getattr(results[-1], seen):
                row[name] = _mean([getattr(result, seen).get(name) for result in results])
        results.clear()
        return row

    def _terms(self) -> dict[str, float | None]:
        """Each loss term; `kd` is there without a teacher, too."""
        results = self.distiller.recent
        names = dict.fromkeys(["kd", "ce", *(name for r in results for name in r.terms)])
        return {name: _mean([result.terms.get(name) for result in results]) for name in names}

    def _success_of_terms(self) -> dict[str, float]:
        """The share of these steps that each loss term which is asked for took part in."""
        results = self.distiller.recent
        return {
            f"{name}_success_rate": sum(r.learned(name) for r in results) / len(results)
            for name in self.distiller.weights
        }

    def _peak_memory(self) -> float | None:
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device) / 2**30


def _mean(values: list[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
