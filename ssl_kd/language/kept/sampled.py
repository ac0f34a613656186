"""CACHE_METHOD sample: tokens drawn from a teacher, whose expected weights are its distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_kd.datasets.blocks import Batch
from ssl_kd.language.kept.distribution import KeptTokens, in_chunks, narrowest, widened
from ssl_kd.language.kept.method import Live
from ssl_kd.losses.teacher_output import SampledTeacher, TopKTeacher
from ssl_kd.store.shards import Columns, Content


@dataclass(frozen=True)
class Sampled(KeptTokens):
    """K tokens, drawn so that the expected weight of every token is its probability p.

    Token i is drawn with probability min(1, p_i / t) and weighs max(p_i, t), where t is such that k
    are drawn: tokens above t are always drawn and keep their probability, the others represent each
    other. Drawn without replacement, so no token comes twice, and the weights sum to 1. Unused
    places weigh 0.

    Columns: `tokens` `[k]`, `weights` `[k]` float16, and `entropy` float32 of the whole
    distribution.

    References:
        Anshumann et al., "Sparse Logit Sampling: Accelerating Knowledge Distillation in LLMs",
        2025: why a sample teaches what the likeliest tokens cannot (there, k independent draws).
        Madow, "On the theory of systematic sampling, II", 1949: the draw.
    """

    name = "sample"
    below_inf = ("weights", "entropy")

    @property
    def columns(self) -> Columns:
        """As `Kept.columns`."""
        return {
            "tokens": ((self.k,), narrowest(self.vocabulary - 1)),
            "weights": ((self.k,), torch.float16),
            "entropy": ((), torch.float32),
        }

    def content(self, answer: Live, batch: Batch, rows: Tensor) -> Content:
        """As `Kept.content`; `error` is how far off the draws are at the teacher's entropy."""
        width = batch.input_ids.shape[1]
        every = _uniforms(batch.rows, width).flatten(0, 1)[rows.cpu()]
        assert not isinstance(answer, TopKTeacher)  # planned
        return in_chunks(
            answer,
            self.vocabulary,
            self.temperature,
            lambda log_p, p, place: _drawn(log_p, p, every[place], self.k),
        )

    def answer(self, column: Callable[[str], Tensor]) -> SampledTeacher:
        """As `Kept.answer`."""
        weights = F.normalize(column("weights").float(), p=1, dim=-1)
        return SampledTeacher(widened(column("tokens")), weights, column("entropy"))


def _drawn(log_p: Tensor, p: Tensor, uniform: Tensor, k: int) -> Content:
    """K tokens of probabilities `[n, vocab]`, chosen by one uniform number each, `[n, 1]`."""
    # In float64: in float32 the sum over a large vocabulary is coarser than a rare token's mass.
    exact = torch.float32 if p.device.type == "mps" else torch.float64
    upto, uniform = p.to(exact), uniform.to(p.device, exact)
    largest, at = upto.topk(k)
    others = upto.scatter(-1, at, 0).sum(-1, keepdim=True)
    places = torch.arange(k, device=p.device)
    # The mass without the m largest, divided by the k - m places that remain: t is the smallest.
    remains = largest.flip(-1).cumsum(-1).flip(-1) + others
    least = (remains / (k - places)).amin(-1, keepdim=True).clamp(min=torch.finfo(exact).tiny)
    upto.div_(least).clamp_(max=1).cumsum_(-1)
    tokens = torch.searchsorted(upto, uniform + places, right=True)
    drawn = tokens < p.shape[-1]  # fewer where less than k tokens have any mass
    tokens.clamp_(max=p.shape[-1] - 1)
    masses = p.gather(-1, tokens)
    weights = torch.where(drawn, masses.maximum(least.float()), 0.0)
    entropy = -(p * log_p).sum(-1)
    estimate = -(weights * log_p.gather(-1, tokens)).sum(-1)
    return {
        "tokens": tokens,
        "weights": weights.half(),
        "entropy": entropy,
        "lost": (1 - (masses * drawn).sum(-1)).clamp(min=0),
        "error": (estimate - entropy).abs(),
    }


def _uniforms(rows: Tensor, width: int) -> Tensor:
    """Numbers from 0 to 1, `[b, width, 1]`.

    A row's numbers depend on its index alone, neither on batches nor on the device.
    """
    drawn = [np.random.default_rng(row).random((width, 1)) for row in rows.tolist()]
    return torch.from_numpy(np.stack(drawn))
