"""A teacher's likeliest tokens as a cache keeps them, where its whole distribution is not known."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ssl_kd.losses.teacher_output import TopKTeacher
from ssl_kd.store.shards import Content

LOWEST = torch.finfo(torch.float16).min  # a log-probability below it is a probability of 0


def rescaled(log_probs: Tensor, log_tail: Tensor) -> Tensor:
    """Make the masses of the kept tokens sum to 1 minus the tail, float32 `[n, k]`."""
    kept = log_probs.float()
    return kept.log_softmax(-1) + torch.log1p(-log_tail.exp()).unsqueeze(-1)


def as_cached(answer: TopKTeacher) -> TopKTeacher:
    """What a cache gives back of an answer, to the bit."""
    kept = answer.log_probs.clamp(min=LOWEST).half()
    return TopKTeacher(answer.indices, rescaled(kept, answer.log_tail), answer.log_tail)


def given_top_k(answer: TopKTeacher, vocabulary: int) -> Content:
    """The columns of a cache of a teacher that gives its likeliest tokens alone, as a server does.

    `error` is the most that it can be: how the tail is shared out is not known, but none of its
    tokens is likelier than the last one that is kept.
    """
    kept, log_tail = answer.log_probs, answer.log_tail
    error = (kept.exp() * (kept - as_cached(answer).log_probs)).sum(-1)
    others = max(vocabulary - kept.shape[-1], 1)
    tail = log_tail.exp()
    uneven = (math.log(others) + kept[:, -1] - log_tail).clamp(min=0)
    return {
        "tokens": answer.indices,
        "log_probs": kept.clamp(min=LOWEST).half(),
        "log_tail": log_tail,
        "lost": tail,
        "error": error + torch.where(tail > 0, tail * uneven, 0.0),
    }
