"""CACHE_METHOD topk: a teacher's likeliest tokens and the mass of the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ssl_kd.datasets.blocks import Batch
from ssl_kd.language.kept.distribution import KeptTokens, in_chunks, narrowest, widened
from ssl_kd.language.kept.given import LOWEST, given_top_k, rescaled
from ssl_kd.language.kept.method import Live
from ssl_kd.losses.teacher_output import TopKTeacher
from ssl_kd.store.shards import Columns, Content


@dataclass(frozen=True)
class TopK(KeptTokens):
    """The k likeliest tokens, and the mass of all others.

    Columns: `tokens` `[k]`; `log_probs` `[k]` float16 of `softmax(logits / temperature)`;
    `log_tail` float32, the log of the mass of all others. Reading rescales `log_probs`, so that all
    masses sum to 1.
    """

    name = "topk"
    below_inf = ("log_probs", "log_tail")

    @property
    def columns(self) -> Columns:
        """As `Kept.columns`."""
        return {
            "tokens": ((self.k,), narrowest(self.vocabulary - 1)),
            "log_probs": ((self.k,), torch.float16),
            "log_tail": ((), torch.float32),
        }

    def content(self, answer: Live, batch: Batch, rows: Tensor) -> Content:
        """As `Kept.content`; `error` is the KL to what is kept, its tail shared out evenly."""
        if isinstance(answer, TopKTeacher):
            return given_top_k(answer, self.vocabulary)
        return in_chunks(
            answer, self.vocabulary, self.temperature, lambda log_p, p, place: self._of(log_p)
        )

    def _of(self, log_p: Tensor) -> Content:
        kept, tokens = log_p.topk(self.k)
        rest = log_p.scatter(-1, tokens, -torch.inf)
        log_tail = rest.logsumexp(-1)  # not 1 - sum: a small tail would cancel
        tail, others = log_tail.exp(), max(log_p.shape[-1] - self.k, 1)
        log_probs = kept.clamp(min=LOWEST).half()
        error = (kept.exp() * (kept - rescaled(log_probs, log_tail))).sum(-1)
        shared = torch.where(tail > 0, tail * (log_tail - math.log(others)), 0.0)
        error = error - torch.special.entr(rest.exp()).sum(-1) - shared
        return {
            "tokens": tokens,
            "log_probs": log_probs,
            "log_tail": log_tail,
            "lost": tail,
            "error": error,
        }

    def answer(self, column: Callable[[str], Tensor]) -> TopKTeacher:
        """As `Kept.answer`."""
        log_tail = column("log_tail")
        return TopKTeacher(
            widened(column("tokens")), rescaled(column("log_probs"), log_tail), log_tail
        )
