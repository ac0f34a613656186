"""How a cache stores a teacher's answers: one class for each CACHE_METHOD."""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from ssl_kd.datasets.blocks import Batch
from ssl_kd.errors import InputError
from ssl_kd.files import CorruptFileError, load_tensors, save_tensors
from ssl_kd.losses.rows import log_softmax_, saturate_
from ssl_kd.losses.teacher_output import (
    LinearTeacher,
    LogitsTeacher,
    SampledTeacher,
    TeacherOutput,
    TopKTeacher,
)
from ssl_kd.losses.token_terms import CHUNK_BYTES
from ssl_kd.store.shards import Columns, Content, Manifest, odd_fields

HEAD_FILES = "teacher_head_*.pt"
LOWEST = torch.finfo(torch.float16).min  # a log-probability below it is a probability of 0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of stored hidden states
_REBUILD = "cache_teacher.py --rebuild_damaged writes this file alone again"

FullAnswer = LinearTeacher | LogitsTeacher
LiveAnswer = FullAnswer | TopKTeacher  # a server returns only its top k


class CacheMethod(ABC):
    """What a cache stores of a teacher's answer, in which columns, and how to read it back.

    Attributes:
        columns: shape and dtype of what is stored at each position.
        header: the manifest's entries about the method.
        bounds: smallest and largest valid value of columns that have a range.
    """

    name: ClassVar[str]  # the CACHE_METHOD
    finite: ClassVar[tuple[str, ...]] = ()  # columns of finite numbers
    below_inf: ClassVar[tuple[str, ...]] = ()  # columns of logarithms, which may be -inf

    columns: Columns
    header: Manifest
    bounds: Mapping[str, tuple[float, float]] = MappingProxyType({})

    @classmethod
    @abstractmethod
    def plan(cls, answer: LiveAnswer, fingerprint: Manifest, vocabulary: int | None) -> Self:
        """Return the method for a teacher that answers like `answer`.

        Args:
            answer: at some positions.
            fingerprint: fields of the cache's `TeacherFingerprint`.
            vocabulary: tokens of the tokenizer; None: as many as the teacher has.

        Raises:
            InputError: such an answer cannot be stored in this way.
        """

    @classmethod
    @abstractmethod
    def from_manifest(cls, manifest: Manifest) -> Self:
        """Return the method that a cache's manifest describes, or raise ValueError."""

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the facts for a report."""

    @abstractmethod
    def content(self, answer: LiveAnswer, batch: Batch, rows: Tensor) -> Content:
        """Return what is stored of an answer at `rows` of the flattened `[batch * token]`.

        The `columns`, `[n, ...]`, with `lost`, the probability mass that is not stored, and
        `error` in nats, NaN where the answer is not finite.
        """

    @abstractmethod
    def answer(self, column: Callable[[str], Tensor]) -> TeacherOutput:
        """Return the answer at some positions, from the columns there."""

    def save(self, folder: Path, answer: LiveAnswer) -> list[Path]:
        """Write what is stored once for all positions; return its files."""
        return []

    def load(self, folder: Path) -> Self:
        """Load what `save` wrote, or raise CorruptFileError."""
        return self

    def __str__(self) -> str:
        return f"{self.name} {next(iter(self.facts.values()))}"


class _StoredTokens(CacheMethod):
    """K tokens of each distribution: of `vocabulary` tokens, at a softmax temperature."""

    def __init__(self, k: int, temperature: float, vocabulary: int) -> None:
        self.k, self.temperature, self.vocabulary = k, temperature, vocabulary
        self.header = {"vocabulary": vocabulary}
        self.bounds = {
            "tokens": (0, vocabulary - 1),
            "log_probs": (-math.inf, 0.01),  # rounding may exceed 0
            "log_tail": (-math.inf, 0),
            "weights": (0, 1.01),
            "entropy": (-0.01, math.log(max(vocabulary, 1)) + 0.01),
        }
        values, scalar = self.below_inf
        self.columns = {
            "tokens": ((k,), _narrowest(vocabulary - 1)),
            values: ((k,), torch.float16),
            scalar: ((), torch.float32),
        }

    @classmethod
    def plan(cls, answer: LiveAnswer, fingerprint: Manifest, vocabulary: int | None) -> Self:
        k = fingerprint["k"]
        if not isinstance(answer, TopKTeacher):
            tokens = _logits(answer, vocabulary)(0, 1).shape[-1]
        elif vocabulary is None or cls.name != "topk":
            raise InputError("a teacher that returns its top k needs a vocabulary and method topk")
        else:
            tokens = vocabulary
        if k > tokens:
            raise InputError(f"k is {k}, but the teacher has only {tokens} tokens")
        return cls(k, fingerprint["temperature"], tokens)

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> Self:
        fingerprint = manifest["fingerprint"]
        return cls(fingerprint["k"], fingerprint["temperature"], manifest["vocabulary"])

    @property
    def facts(self) -> dict[str, Any]:
        return {"k": self.k}

    def _in_chunks(
        self, answer: FullAnswer, select: Callable[[Tensor, Tensor, slice], Content]
    ) -> Content:
        """Apply `select(log_probs, probs, positions)` to the distributions, a chunk at a time.

        Logits beyond the vocabulary are padding and get no mass; `select` may overwrite its input.
        """
        rows = answer.logits if isinstance(answer, LogitsTeacher) else answer.hidden
        logits, n = _logits(answer, self.vocabulary), len(rows)
        chunk = max(1, CHUNK_BYTES // (4 * self.vocabulary))
        parts: list[Content] = []
        for start in range(0, max(n, 1), chunk):
            positions = slice(start, min(start + chunk, n))
            chunk_logits = saturate_(logits(positions.start, positions.stop))
            log_p, p = log_softmax_(chunk_logits, self.temperature)
            parts.append(select(log_p, p, positions))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class TopK(_StoredTokens):
    """CACHE_METHOD topk: the k most likely tokens, and the total mass of all others.

    Columns: `tokens` `[k]`; `log_probs` `[k]` float16 of `softmax(logits / temperature)`;
    `log_tail` float32, the log of the mass of all others. Reading rescales `log_probs` so that all
    masses sum to 1.
    """

    name = "topk"
    below_inf = ("log_probs", "log_tail")

    def content(self, answer: LiveAnswer, batch: Batch, rows: Tensor) -> Content:
        """Return the columns; `error` is the KL to what is stored, its tail shared out evenly."""
        if isinstance(answer, TopKTeacher):
            return self._content_of_top_k(answer)
        return self._in_chunks(answer, lambda log_p, p, positions: self._of(log_p))

    def _of(self, log_p: Tensor) -> Content:
        top, tokens = log_p.topk(self.k)
        rest = log_p.scatter(-1, tokens, -torch.inf)
        log_tail = rest.logsumexp(-1)  # not 1 - sum: a small tail would cancel
        tail, others = log_tail.exp(), max(log_p.shape[-1] - self.k, 1)
        log_probs = top.clamp(min=LOWEST).half()
        error = (top.exp() * (top - _rescaled(log_probs, log_tail))).sum(-1)
        even = torch.where(tail > 0, tail * (log_tail - math.log(others)), 0.0)
        error = error - torch.special.entr(rest.exp()).sum(-1) - even
        return {
            "tokens": tokens,
            "log_probs": log_probs,
            "log_tail": log_tail,
            "lost": tail,
            "error": error,
        }

    def _content_of_top_k(self, answer: TopKTeacher) -> Content:
        """Return the columns of a server's answer; `error` is an upper bound.

        The distribution of the tail is unknown, but no token in it is likelier than the last one of
        the top k.
        """
        top, log_tail = answer.log_probs, answer.log_tail
        error = (top.exp() * (top - as_cached(answer).log_probs)).sum(-1)
        others = max(self.vocabulary - top.shape[-1], 1)
        tail = log_tail.exp()
        uneven = (math.log(others) + top[:, -1] - log_tail).clamp(min=0)
        return {
            "tokens": answer.indices,
            "log_probs": top.clamp(min=LOWEST).half(),
            "log_tail": log_tail,
            "lost": tail,
            "error": error + torch.where(tail > 0, tail * uneven, 0.0),
        }

    def answer(self, column: Callable[[str], Tensor]) -> TopKTeacher:
        """Return the answer at some positions."""
        log_tail = column("log_tail")
        log_probs = _rescaled(column("log_probs"), log_tail)
        return TopKTeacher(widened(column("tokens")), log_probs, log_tail)


class Sampled(_StoredTokens):
    """CACHE_METHOD sample: K tokens, sampled so that each token's expected weight is its p.

    Token i is drawn with probability min(1, p_i / t) and weighs max(p_i, t), where t is such that k
    tokens are drawn: tokens above t are always drawn and keep their probability, the others
    represent each other. Drawn without replacement, so no token comes twice, and the weights sum to
    1. Unused places weigh 0.

    Columns: `tokens` `[k]`, `weights` `[k]` float16, and `entropy` float32 of the full
    distribution.

    References:
        Anshumann et al., "Sparse Logit Sampling: Accelerating Knowledge Distillation in LLMs",
        2025: why samples teach what the top k cannot (there, k independent draws).
        Madow, "On the theory of systematic sampling, II", 1949: the draw.
    """

    name = "sample"
    below_inf = ("weights", "entropy")

    def content(self, answer: LiveAnswer, batch: Batch, rows: Tensor) -> Content:
        """Return the columns; `error` is how far the sample is off at the teacher's entropy."""
        width = batch.input_ids.shape[1]
        # A row's random numbers depend on its index alone, not on the batch or the device.
        drawn = [np.random.default_rng(row).random((width, 1)) for row in batch.rows.tolist()]
        uniform = torch.from_numpy(np.stack(drawn)).flatten(0, 1)[rows.cpu()]
        assert not isinstance(answer, TopKTeacher)  # plan
        return self._in_chunks(
            answer, lambda log_p, p, positions: _sample(log_p, p, uniform[positions], self.k)
        )

    def answer(self, column: Callable[[str], Tensor]) -> SampledTeacher:
        """Return the answer at some positions."""
        weights = F.normalize(column("weights").float(), p=1, dim=-1)
        return SampledTeacher(widened(column("tokens")), weights, column("entropy"))


class LastHidden(CacheMethod):
    """CACHE_METHOD hidden: the last hidden state at each position, and the output head once.

    The answer is a `LinearTeacher`, to the bit that of the live teacher in the same batch: for
    every divergence at every temperature.

    Column: `hidden` `[dim]`. The head's file, `weight` and `bias`, has its digest in its name, so
    that a cache that is being replaced stays readable to the end.
    """

    name = "hidden"
    finite = ("hidden",)

    def __init__(self, vocabulary: int, dim: int, stored: torch.dtype, head: str) -> None:
        self.stored, self.head = stored, head
        name = str(stored).removeprefix("torch.")
        self.header = {"vocabulary": vocabulary, "dim": dim, "stored": name, "head": head}
        self.columns = {"hidden": ((dim,), stored)}
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    @classmethod
    def plan(cls, answer: LiveAnswer, fingerprint: Manifest, vocabulary: int | None) -> Self:
        """Return the method for a teacher whose logits are linear in its hidden states."""
        teacher = fingerprint["teacher"]
        if not isinstance(answer, LinearTeacher):
            raise InputError(
                f"CACHE_METHOD is 'hidden', but the teacher {teacher!r} caps or scales its logits:"
                " set CACHE_METHOD to 'topk' or 'sample'"
            )
        # An entry of -inf in the bias is outside the vocabulary; all else there is a fault.
        bias = answer.weight[:0] if answer.bias is None else answer.bias
        if not answer.weight.isfinite().all() or not (bias < torch.inf).all():
            raise InputError(
                f"the output head of the teacher {teacher!r} holds NaN or infinity: check its"
                " weights"
            )
        size, dim = answer.weight.shape
        return cls(size, dim, answer.hidden.dtype, _digest(answer.weight, answer.bias))

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> Self:
        """Return the method that a cache's manifest describes, or raise ValueError."""
        types = {"vocabulary": int, "dim": int, "stored": str, "head": str}
        if odd := odd_fields(manifest, types):
            raise ValueError(f"{', '.join(odd)}: missing or of the wrong type")
        if not re.fullmatch(r"[0-9a-f]{16}", manifest["head"]):  # it names a file
            raise ValueError(f"head is {manifest['head'][:50]!r}; expected a digest")
        stored = {str(dtype): dtype for dtype in DTYPES}.get(f"torch.{manifest['stored']}")
        if stored is None:
            raise ValueError(f"stored is {manifest['stored']!r}")
        return cls(manifest["vocabulary"], manifest["dim"], stored, manifest["head"])

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts for a report."""
        facts = {name: self.header[name] for name in ("stored", "dim")}
        if self._weight is not None:
            facts["head_bytes"] = sum(x.nbytes for x in (self._weight, self._bias) if x is not None)
        return facts

    def content(self, answer: LiveAnswer, batch: Batch, rows: Tensor) -> Content:
        """Return the column; `error` is 0, or NaN where a hidden state is not finite."""
        assert isinstance(answer, LinearTeacher)  # plan
        hidden = answer.hidden
        lost = torch.zeros(len(hidden), device=hidden.device)
        bad = ~hidden.isfinite().all(-1)
        return {"hidden": hidden, "lost": lost, "error": lost.masked_fill(bad, torch.nan)}

    def answer(self, column: Callable[[str], Tensor]) -> LinearTeacher:
        """Return the answer at some positions; the head stays on their device."""
        assert self._weight is not None, "load was not called"
        hidden = column("hidden")
        self._weight = self._weight.to(hidden.device)
        self._bias = None if self._bias is None else self._bias.to(hidden.device)
        return LinearTeacher(hidden.to(self._weight.dtype), self._weight, self._bias)

    def save(self, folder: Path, answer: LiveAnswer) -> list[Path]:
        """Write the head, unless an intact file of it exists; return the file."""
        assert isinstance(answer, LinearTeacher)  # plan
        try:
            self.load(folder)
        except CorruptFileError:
            parts = {"weight": answer.weight, "bias": answer.bias}
            head = {n: x.detach().cpu().clone() for n, x in parts.items() if x is not None}
            save_tensors(self._file(folder), head)
        return [self._file(folder)]

    def load(self, folder: Path) -> Self:
        """Load the head, or raise CorruptFileError."""
        file = self._file(folder)
        try:
            tensors = load_tensors(file)
        except FileNotFoundError as error:
            raise CorruptFileError(f"{file} is missing; {_REBUILD}") from error
        try:
            weight, bias = tensors["weight"], tensors.get("bias")
            digest = _digest(weight, bias)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            raise CorruptFileError(f"{file} holds no output head; {_REBUILD}") from error
        if digest != self.head:
            raise CorruptFileError(f"{file} holds another head than was written; {_REBUILD}")
        self._weight, self._bias = weight, bias
        return self

    def _file(self, folder: Path) -> Path:
        return folder / HEAD_FILES.replace("*", self.head)


METHODS: Mapping[str, type[CacheMethod]] = MappingProxyType(
    {method.name: method for method in (TopK, Sampled, LastHidden)}
)


def as_cached(answer: TopKTeacher) -> TopKTeacher:
    """Return an answer exactly as it would be read from a cache, bit for bit."""
    log_probs = answer.log_probs.clamp(min=LOWEST).half()
    return TopKTeacher(answer.indices, _rescaled(log_probs, answer.log_tail), answer.log_tail)


def widened(stored: Tensor) -> Tensor:
    """Return int64 of stored token ids; as int16 they are unsigned, as torch cannot add uint16."""
    ids = stored.long()
    return ids & 0xFFFF if stored.dtype == torch.int16 else ids


def _narrowest(largest: int) -> torch.dtype:
    """Return the smallest dtype for whole numbers up to `largest`; see `widened`."""
    if largest < 2**8:
        return torch.uint8
    return torch.int16 if largest < 2**16 else torch.int32


def _rescaled(log_probs: Tensor, log_tail: Tensor) -> Tensor:
    """Make the masses of the stored tokens sum to 1 minus the tail, float32 `[n, k]`."""
    return log_probs.float().log_softmax(-1) + torch.log1p(-log_tail.exp()).unsqueeze(-1)


def _logits(answer: FullAnswer, vocabulary: int | None) -> Callable[[int, int], Tensor]:
    """Return a function of `start, stop` that copies the logits of these positions as float32."""
    if isinstance(answer, LogitsTeacher):
        logits = answer.logits[:, :vocabulary]
        return lambda start, stop: logits[start:stop].to(torch.float32, copy=True)
    weight = answer.weight[:vocabulary]
    bias = None if answer.bias is None else answer.bias[:vocabulary]
    return lambda start, stop: F.linear(answer.hidden[start:stop], weight, bias).float()


def _sample(log_p: Tensor, p: Tensor, uniform: Tensor, k: int) -> Content:
    """Draw k tokens of probabilities `[n, vocab]` by one uniform number each, `[n, 1]`."""
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


def _digest(weight: Tensor, bias: Tensor | None) -> str:
    """Return a digest of dtype, shape and bytes."""
    digest = hashlib.sha256()
    for x in (weight, bias):
        if x is not None:
            digest.update(f"{x.dtype} {tuple(x.shape)}".encode())
            digest.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
