"""Train a student language model on rows of text.

This loop exists beside `ssl_kd.hf_trainer.DistillationTrainer` because a transformers Trainer
controls data, step and checkpoint itself. A bit-exact resume with the guard's state, the replay of
a fault, and text that the student generates during training are not possible in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from firstnan.parts import TooFewHealthyParts
from ssl_kd.core.runs.loop import Pace, run_loop
from ssl_kd.core.runs.schedule import learning_rate_at
from ssl_kd.core.seeds import seed_of, seeded
from ssl_kd.language.rollouts import RolloutBatches
from ssl_kd.language.text.aligned import AlignedBlocks
from ssl_kd.language.text.blocks import Blocks
from ssl_kd.language.text.rows import rows_of_step
from ssl_kd.language.train.step import Distiller, StudentStep
from ssl_kd.language.train.success import Success

Row = dict[str, Any]
"""One line of `metrics.jsonl`."""


def train(
    distiller: Distiller,
    blocks: Blocks | AlignedBlocks,
    steps: int,
    *,
    rollouts: RolloutBatches | None = None,
    on_step: Callable[[int, StudentStep], object] = lambda step, result: None,
    **loop: Any,
) -> int:
    """Train a student until step `steps`; return the number of steps done.

    `rollouts` makes the batches if ON_POLICY is above 0. `on_step` gets each step, from 0, and its
    result. The other arguments are those of `run_loop`.

    Raises:
        TooFewHealthyParts: training cannot continue, or no step changed the student. The last good
            state was saved before.
    """
    settings = distiller.settings
    done = run_loop(
        _StudentLearner(distiller, blocks, steps, on_step, rollouts),
        log_every=settings.log_every,
        checkpoint_every=settings.checkpoint_every,
        eval_every=settings.eval_every,
        **loop,
    )
    if done == steps and not any(distiller.learned.values()):
        message = f"none of the {steps} steps changed the student: all were skipped"
        raise TooFewHealthyParts(f"{message}.\n{distiller.guard.diagnosis()}".rstrip())
    return done


@dataclass
class _StudentLearner:
    """The steps, log rows and checkpoints of a student, for `run_loop`."""

    distiller: Distiller
    blocks: Blocks | AlignedBlocks
    steps: int
    on_step: Callable[[int, StudentStep], object]
    rollouts: RolloutBatches | None
    pace: Pace = field(default_factory=Pace)
    _learning_rate: float = 0.0

    @property
    def _device(self) -> torch.device:
        return self.distiller.precision.device

    def learn(self, step: int) -> None:
        """Run one guarded step on the rows of text that belong to it."""
        distiller, settings = self.distiller, self.distiller.settings
        self._learning_rate = rate = learning_rate_at(step, self.steps, *settings.rate_schedule)
        gpus = [self._device] if self._device.type == "cuda" else []
        rank = distiller.ranks.rank
        with seeded(seed_of(settings.seed, step, *([rank] if rank else [])), gpus):  # of dropout
            if self.rollouts is None:
                batches, values = self._batches(step), {}
                if (prefetch := distiller.teacher.prefetch) is not None:
                    following = self._batches(step + 1) if step + 1 < self.steps else []
                    prefetch([*batches, *following])
            else:
                batches, sums = self.rollouts.batches(step, self._shares(step), self._device)
                values = self._rollout_means(step, sums)
            result = replace(distiller.step(batches, rate), rollouts=values)
        distiller.recent.append(result)
        self.pace.add(result.tokens)
        self.on_step(step, result)

    def _rollout_means(self, step: int, local: dict[str, float]) -> dict[str, float | None]:
        """Return the means of the rollout values over all ranks, for the log."""
        totals = self.distiller.ranks.sums(f"step {step + 1}, generated text", *local.values())
        sums = dict(zip(local, totals, strict=True))
        texts = sums["written"]
        n = sums.get("compared")
        served = {} if n is None else {"rollout_mismatch": sums["difference"] / n if n else None}
        return {
            "rollout_share": texts / sums["rows"],
            "rollout_tokens": sums["tokens"] / texts if texts else None,
            "rollout_ended": sums["ended"] / texts if texts else None,
            **served,
        }

    def _shares(self, step: int) -> list[Tensor]:
        """Return this rank's share of a step's rows, for each batch."""
        settings = self.distiller.settings
        size, n = settings.batch_size, settings.gradient_accumulation_steps
        rows = rows_of_step(step, size * n, len(self.blocks), settings.seed)
        return list(map(self.distiller.ranks.share, rows.split(size)))

    def _batches(self, step: int) -> list[Any]:
        return [self.blocks.batch(rows, self._device) for rows in self._shares(step)]

    def look(self, done: int, *, at_once: bool = False) -> None:
        """Do nothing, because the guard checks every step of a student at once."""

    def before_checkpoint(self, done: int) -> None:
        """Restore weights that became NaN or infinite outside a step."""
        guard = self.distiller.guard
        guard.events.extend(guard.recovery.restore_what_is_not_finite(done - 1))

    def record(self, done: int) -> Row:
        """Return a row for the log: means over the steps since the previous row."""
        results, success = self.distiller.recent, Success()
        for result in results:
            success.add(result.shares)
        names = dict.fromkeys(["kd", "ce", *(name for r in results for name in r.terms)])
        row = {
            "step": done,
            "train_loss": _mean([result.loss for result in results]),
            **{name: _mean([result.terms.get(name) for result in results]) for name in names},
            "grad_norm": _mean([result.grad_norm for result in results]),
            "learning_rate": self._learning_rate,
            "success_rate": success.rate,
            **{f"{name}_success_rate": success.rates.get(name) for name in self.distiller.weights},
            "consecutive_nans": int(self.distiller.guard.health.streak[0]),
            "gpu_memory_gb": (
                torch.cuda.max_memory_allocated(self._device) / 2**30
                if self._device.type == "cuda"
                else None
            ),
            "tokens_per_second": self.pace.per_second(),
        }
        for group in ("router", "rollouts"):
            for name in getattr(results[-1], group):
                row[name] = _mean([getattr(result, group).get(name) for result in results])
        results.clear()
        return row


def _mean(values: list[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
