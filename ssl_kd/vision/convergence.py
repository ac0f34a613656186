"""When training ends: once the heads tell hardly more of neighbours than half as many steps ago.

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
ALONE = LOOKS.index(50)  # the first look at heads that are not given any clusters to learn
# Looks between two that are compared: half as many steps.
APART = 2
# What the second half of the steps must have brought, as a share of the most there is, log K.
LEAST_GROWTH = 0.01
# Share of all steps in which the learning rate falls.
DECAY = 0.3


def fewest(first: int = 0) -> int:
    """Steps of a training that converges at once, by the number of the first look."""
    return math.ceil(LOOKS[first + APART] / (1 - DECAY))


class Convergence:
    """Judges the heads as they train, and says when the learning rate falls and when it is 0.

    That depends on nothing but what was seen, so that a resumed run ends where it would have.

    Args:
        judge: gives each head's neighbour information in nats, `[head]`; NaN of one not to count.
        n_clusters: K.
        most: steps after which training ends in any case.
        first: number of the first look.

    Attributes:
        information: `[look]` float64, the median over the heads; NaN where it was not measured.
    """

    def __init__(
        self, judge: Callable[[], Tensor], n_clusters: int, most: int, first: int = 0
    ) -> None:
        self._judge, self._most, self._first = judge, most, first
        self._growth = LEAST_GROWTH * math.log(n_clusters)
        self.information = torch.full((len(LOOKS),), torch.nan, dtype=torch.float64)

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, for a checkpoint."""
        return {"convergence.information": self.information}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` gave; after a checkpoint without it, begin to look anew."""
        for name, mine in self.tensors().items():
            if name in tensors:
                mine.copy_(tensors[name])

    def look(self, done: int) -> None:
        """Judge the heads after so many steps, if that is due."""
        if done in LOOKS[self._first :] and done <= self._flat:
            self.information[LOOKS.index(done)] = self._judge().nanmedian().nan_to_num(0.0)

    def seen(self) -> dict[int, float]:
        """Steps done -> information, of all looks so far."""
        looks = zip(LOOKS, self.information.tolist(), strict=True)
        return {step: value for step, value in looks if not math.isnan(value)}

    @property
    def steps(self) -> int:
        """When training ends; while that is open, the earliest that it can."""
        return min(self._most, math.ceil(self._flat / (1 - DECAY)))

    @property
    def _flat(self) -> int:
        """Steps before the learning rate falls; while that is open, the fewest that it can be."""
        seen = list(self.seen().items())
        first = LOOKS.index(seen[0][0]) if seen else self._first
        step = LOOKS[first + max(APART, len(seen))]
        for (_, before), (at, value) in zip(seen, seen[APART:], strict=False):
            if value - before < self._growth:
                step = at
                break
        return min(step, math.ceil(self._most * (1 - DECAY)))

    def learning_rate_at(self, step: int, peak: float, warmup_fraction: float) -> float:
        """Linear warm-up in a share of the fewest steps, then constant, then a cosine to 0."""
        warmup = max(1, round(warmup_fraction * min(self._most, fewest(self._first))))
        if step < warmup:
            return peak * (step + 1) / warmup
        flat = self._flat
        falling = max(0, step - flat) / max(1, self.steps - flat)
        return peak * 0.5 * (1 + math.cos(math.pi * falling))
