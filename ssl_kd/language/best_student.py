"""The weights of a run with the best held-out likelihood so far."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ssl_kd.evaluate.tokens import TokenScores
from ssl_kd.language.step import Distiller

logger = logging.getLogger(__name__)


class Best:
    """The trained weights with the best held-out likelihood so far, on the first rank's CPU.

    The latest, where the student learns from no text but what it writes itself: what the likelihood
    of other text measures is not what it is asked to learn.
    """

    def __init__(self, distiller: Distiller, name: str = "student") -> None:
        self._student, self._name, self._trainee = distiller.student, name, distiller.trainee
        self._holds = distiller.team.rank == 0
        self._latest = not distiller.settings.learns_text
        self.step, self.nll, self._weights = 0, float("inf"), {}

    def offer(self, step: int, scores: TokenScores) -> None:
        """Keep the weights as they are now if they are better than those that were kept."""
        nll = scores.nll
        better = not self._weights or (nll is not None and (self._latest or nll < self.nll))
        if better := better and self._trainee.is_finite():
            self.step, self.nll = step, float("inf") if nll is None else nll
            trained = [(n, p) for n, p in self._student.named_parameters() if p.requires_grad]
            weights = self._trainee.gathered({name: p.detach() for name, p in trained})
            if self._holds:
                self._weights = {name: p.to("cpu", copy=True) for name, p in weights.items()}
            else:
                self._weights = dict.fromkeys(weights, torch.empty(0))
        known = "unknown" if scores.perplexity is None else f"{scores.perplexity:.4g}"
        kept = "kept" if self._latest else "the best so far"
        words = f"; {kept}" if better and step else ""
        logger.info("%s: held-out perplexity %s at step %d%s", self._name, known, step, words)

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the student its best weights; where it is whole on each rank, the first's."""
        for name, p in self._student.named_parameters():
            if name in self._weights and (self._holds or self._trainee.sharded):
                p.copy_(self._trainee.spread(self._weights[name], p))

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"step": self.step, "nll": self.nll, "weights": self._weights}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        self.step, self.nll, self._weights = state["step"], state["nll"], state["weights"]
