"""Some tokens of a teacher's distribution at each position: what both ways to choose them share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from ssl_kd.errors import InputError
from ssl_kd.language.kept.method import Kept, Live, Whole
from ssl_kd.language.teacher_fingerprint import TeacherFingerprint
from ssl_kd.losses.rows import log_softmax_, saturate_
from ssl_kd.losses.teacher_output import LogitsTeacher, TopKTeacher
from ssl_kd.losses.token_terms import CHUNK_BYTES
from ssl_kd.store.shards import Content, Manifest


@dataclass(frozen=True)
class KeptTokens(Kept):
    """K tokens of each distribution.

    Args:
        k: how many.
        temperature: of the softmax.
        vocabulary: how many there are to choose from.
    """

    k: int
    temperature: float
    vocabulary: int

    @classmethod
    def planned(cls, answer: Live, fingerprint: TeacherFingerprint, vocabulary: int | None) -> Self:
        """As `Kept.planned`."""
        k, temperature = fingerprint.k, fingerprint.temperature
        assert k is not None and temperature is not None  # TeacherFingerprint
        if not isinstance(answer, TopKTeacher):
            tokens = logits_of(answer, vocabulary)(0, 1).shape[-1]
        elif vocabulary is None or fingerprint.method != "topk":
            raise InputError(
                "a teacher that gives its top k takes a vocabulary and the method topk"
            )
        else:
            tokens = vocabulary
        if k > tokens:
            raise InputError(f"k is {k}, but the teacher has only {tokens} tokens")
        return cls(k, temperature, tokens)

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """As `Kept.of`."""
        said = manifest["fingerprint"]
        return cls(said["k"], said["temperature"], manifest["vocabulary"])

    @property
    def header(self) -> Manifest:
        """As `Kept.header`."""
        return {"vocabulary": self.vocabulary}

    @property
    def facts(self) -> dict[str, Any]:
        """As `Kept.facts`."""
        return {"k": self.k}

    @property
    def bounds(self) -> Mapping[str, tuple[float, float]]:
        """As `Kept.bounds`; a rounded log-probability may be slightly above 0."""
        most = math.log(max(self.vocabulary, 1)) + 0.01
        return {
            "tokens": (0, self.vocabulary - 1),
            "log_probs": (-math.inf, 0.01),
            "log_tail": (-math.inf, 0),
            "weights": (0, 1.01),
            "entropy": (-0.01, most),
        }


def logits_of(answer: Whole, vocabulary: int | None) -> Callable[[int, int], Tensor]:
    """The first `vocabulary` logits of positions `start` to `stop`, a float32 copy."""
    if isinstance(answer, LogitsTeacher):
        logits = answer.logits[:, :vocabulary]
        return lambda start, stop: logits[start:stop].to(torch.float32, copy=True)
    weight = answer.weight[:vocabulary]
    bias = None if answer.bias is None else answer.bias[:vocabulary]
    return lambda start, stop: F.linear(answer.hidden[start:stop], weight, bias).float()


def in_chunks(
    answer: Whole,
    vocabulary: int,
    temperature: float,
    kept: Callable[[Tensor, Tensor, slice], Content],
) -> Content:
    """What `kept` makes of the distributions at all positions; logits exist for some at a time.

    Args:
        answer: at n positions.
        vocabulary: how many tokens there are; logits beyond are padding and get no mass.
        temperature: of the softmax.
        kept: from log-probabilities and probabilities `[m, vocabulary]`, which it may overwrite,
            and which of the n positions they are of, to columns `[m, ...]`.
    """
    rows = answer.logits if isinstance(answer, LogitsTeacher) else answer.hidden
    logits, n = logits_of(answer, vocabulary), len(rows)
    chunk = max(1, CHUNK_BYTES // (4 * vocabulary))
    parts: list[Content] = []
    for start in range(0, max(n, 1), chunk):
        place = slice(start, min(start + chunk, n))
        log_p, p = log_softmax_(saturate_(logits(place.start, place.stop)), temperature)
        parts.append(kept(log_p, p, place))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def narrowest(largest: int) -> torch.dtype:
    """For whole numbers from 0; as int16 they are unsigned, as torch cannot add uint16."""
    if largest < 2**8:
        return torch.uint8
    return torch.int16 if largest < 2**16 else torch.int32


def widened(stored: Tensor) -> Tensor:
    """int64 of what was stored as `narrowest`."""
    whole = stored.long()
    return whole & 0xFFFF if stored.dtype == torch.int16 else whole
