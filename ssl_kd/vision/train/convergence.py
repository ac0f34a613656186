"""End training when neighbor information has hardly grown since half as many steps.

The learning rate warms up, stays constant until then (the number of steps is not known earlier),
and falls to 0 in a fixed fraction of all steps (Zhai et al., Scaling Vision Transformers, 2022,
section 3.4; Hu et al., MiniCPM, 2024, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Steps at which the heads are evaluated: 25, 35, 50, 71, ... up to 590 million.
LOOKS = [round(25 * 2 ** (number / 2)) for number in range(50)]
ALONE = LOOKS.index(50)  # the first look if the heads find the clusters themselves
# A look is compared with the one this many before it, which is at half as many steps.
APART = 2
# Gain in the second half of the steps, as a fraction of log K, below which heads have converged.
LEAST_GROWTH = 0.01
# Fraction of all steps in which the learning rate falls.
DECAY = 0.3


def fewest(first: int = 0) -> int:
    """Return the smallest possible number of steps; `first` is the index of the first look."""
    return math.ceil(LOOKS[first + APART] / (1 - DECAY))


class Convergence:
    """Evaluate the heads during training; decide when the learning rate falls and when to stop.

    Both depend only on the results of the looks, so a resumed run ends at the same step. `judge`
    returns the neighbor information of each head in nats, NaN if it failed; `first` is the index of
    the first look in `LOOKS`.
    """

    def __init__(
        self, judge: Callable[[], Tensor], n_clusters: int, max_steps: int, first: int = 0
    ) -> None:
        self._judge = judge
        self._max_steps = max_steps
        self._first = first
        self._growth = LEAST_GROWTH * math.log(n_clusters)
        # The median over the heads at each look; NaN where it was not measured.
        self.information = torch.full((len(LOOKS),), torch.nan, dtype=torch.float64)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state to save in a checkpoint, as name -> tensor."""
        return {"convergence.information": self.information}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned; keep the current state if it is missing."""
        self.information.copy_(tensors.get("convergence.information", self.information))

    def look(self, done: int) -> None:
        """Evaluate the heads if a look is due after `done` steps."""
        if done in LOOKS[self._first :] and done <= self._flat:
            self.information[LOOKS.index(done)] = self._judge().nanmedian().nan_to_num(0.0)

    def history(self) -> dict[int, float]:
        """Return number of steps -> information, for all looks so far."""
        looks = zip(LOOKS, self.information.tolist(), strict=True)
        return {step: value for step, value in looks if not math.isnan(value)}

    @property
    def steps(self) -> int:
        """Total number of steps; before that is known, the smallest possible number."""
        return min(self._max_steps, math.ceil(self._flat / (1 - DECAY)))

    @property
    def _flat(self) -> int:
        """Steps before the learning rate falls; before that is known, the fewest possible."""
        looks = list(self.history().items())
        first = LOOKS.index(looks[0][0]) if looks else self._first
        step = LOOKS[first + max(APART, len(looks))]
        for (_, before), (at, value) in zip(looks, looks[APART:], strict=False):
            if value - before < self._growth:
                step = at
                break
        return min(step, math.ceil(self._max_steps * (1 - DECAY)))

    def learning_rate_at(self, step: int, peak: float, warmup_fraction: float) -> float:
        """Return the learning rate at a step: linear warm-up, constant, cosine to 0."""
        warmup = max(1, round(warmup_fraction * min(self._max_steps, fewest(self._first))))
        if step < warmup:
            return peak * (step + 1) / warmup
        flat = self._flat
        falling = max(0, step - flat) / max(1, self.steps - flat)
        return peak * 0.5 * (1 + math.cos(math.pi * falling))
