"""When training ends: once the heads know hardly more of neighbors than half as many steps ago.

The learning rate is constant until then, since the number of steps is not known, and falls to 0
in a last part of fixed share: warm-up, stable, decay (Zhai et al., Scaling Vision Transformers,
2022, section 3.4; Hu et al., MiniCPM, 2024, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Steps at which the heads are judged: 25, 35, 50, 71, ... to 590 million.
LOOKS = [round(25 * 2 ** (number / 2)) for number in range(50)]
ALONE = LOOKS.index(50)  # the first look at heads that find the clusters themselves
# Looks between two that are compared: half as many steps.
APART = 2
# What the second half of the steps must have gained, as a share of the maximum, log K.
LEAST_GROWTH = 0.01
# Share of all steps in which the learning rate falls.
DECAY = 0.3


def fewest(first: int = 0) -> int:
    """Return the steps of a training that converges at once; `first` numbers the first look."""
    return math.ceil(LOOKS[first + APART] / (1 - DECAY))


class Convergence:
    """Judge the heads as they train, and decide when the learning rate falls, and when to stop.

    Both depend on the looks alone, so a resumed run ends where it would have.

    Args:
        judge: returns each head's neighbor information in nats, `[head]`; NaN for an unhealthy one.
        n_clusters: K.
        max_steps: training ends here at the latest.
        first: number of the first look.

    Attributes:
        information: `[look]` float64, the median over the heads; NaN where it was not measured.
    """

    def __init__(
        self, judge: Callable[[], Tensor], n_clusters: int, max_steps: int, first: int = 0
    ) -> None:
        self._judge, self._max_steps, self._first = judge, max_steps, first
        self._growth = LEAST_GROWTH * math.log(n_clusters)
        self.information = torch.full((len(LOOKS),), torch.nan, dtype=torch.float64)

    def tensors(self) -> dict[str, Tensor]:
        """Return name -> tensor, for a checkpoint."""
        return {"convergence.information": self.information}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned; a checkpoint without it starts the looks anew."""
        for name, mine in self.tensors().items():
            if name in tensors:
                mine.copy_(tensors[name])

    def look(self, done: int) -> None:
        """Judge the heads if a look is due after so many steps."""
        if done in LOOKS[self._first :] and done <= self._flat:
            self.information[LOOKS.index(done)] = self._judge().nanmedian().nan_to_num(0.0)

    def history(self) -> dict[int, float]:
        """Return steps done -> information, of all looks so far."""
        looks = zip(LOOKS, self.information.tolist(), strict=True)
        return {step: value for step, value in looks if not math.isnan(value)}

    @property
    def steps(self) -> int:
        """When training ends; before that is known, the earliest step at which it can."""
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
        """Return the rate: linear warm-up in a share of the fewest steps, constant, cosine to 0."""
        warmup = max(1, round(warmup_fraction * min(self._max_steps, fewest(self._first))))
        if step < warmup:
            return peak * (step + 1) / warmup
        flat = self._flat
        falling = max(0, step - flat) / max(1, self.steps - flat)
        return peak * 0.5 * (1 + math.cos(math.pi * falling))
