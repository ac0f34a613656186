"""Store a teacher's answers in a cache, and read them back: one class for each CACHE_METHOD."""

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
from einops import rearrange, repeat
from torch import Tensor
from typing_extensions import Self

from ssl_kd.core.errors import InputError
from ssl_kd.core.files import CorruptFileError, load_tensors, save_tensors
from ssl_kd.core.logits import saturate_
from ssl_kd.core.shards.shards import Columns, Content, Manifest, odd_fields
from ssl_kd.language.losses.rows import log_softmax_
from ssl_kd.language.losses.teacher_output import (
    LinearTeacher,
    LogitsTeacher,
    SampledTeacher,
    TeacherOutput,
    TopKTeacher,
)
from ssl_kd.language.losses.token_terms import CHUNK_BYTES
from ssl_kd.language.teachers.packed_tokens import grid, n_bytes, pack, round_to, unpack
from ssl_kd.language.text.blocks import Batch

HEAD_FILES = "teacher_head_*.pt"
LOWEST = torch.finfo(torch.float16).min  # a lower log-probability means a probability of 0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of stored hidden states
_REBUILD = "run cache_teacher.py --rebuild_damaged, which writes this file alone again"

FullAnswer = LinearTeacher | LogitsTeacher
LiveAnswer = FullAnswer | TopKTeacher  # a server returns only its top k


class CacheMethod(ABC):
    """Base class of the ways to store a teacher's answer in columns and to read it back."""

    name: ClassVar[str]  # value of CACHE_METHOD
    finite: ClassVar[tuple[str, ...]] = ()  # columns of finite numbers
    below_inf: ClassVar[tuple[str, ...]] = ()  # columns of logarithms, which may be -inf

    columns: Columns  # shape and dtype at one position
    header: Manifest  # entries of the manifest that describe the method
    # Smallest and largest valid number for each name that `numbers` returns.
    bounds: Mapping[str, tuple[float, float]] = MappingProxyType({})

    @classmethod
    @abstractmethod
    def plan(cls, answer: LiveAnswer, fingerprint: Manifest, vocabulary: int | None) -> Self:
        """Return the method for a teacher's answers, or raise InputError if it cannot store them.

        `fingerprint` has the fields of a `TeacherFingerprint`; `vocabulary` is the tokenizer's
        token count, None for all tokens of the teacher.
        """

    @classmethod
    @abstractmethod
    def from_manifest(cls, manifest: Manifest) -> Self:
        """Return the method of a cache from its manifest; raise ValueError if it is invalid."""

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the properties of the method that a report shows."""

    @abstractmethod
    def content(self, answer: LiveAnswer, batch: Batch, rows: Tensor) -> Content:
        """Return the columns to store for an answer at the positions `rows` of a batch, `[n, ...]`.

        Two more values describe each position: `lost`, the probability mass that is not stored, and
        `error` in nats, NaN for a faulty answer.
        """

    @abstractmethod
    def answer(self, column: Callable[[str], Tensor]) -> TeacherOutput:
        """Rebuild the answer at some positions from their stored columns, `column(name)`."""

    def numbers(self, column: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the numbers in some stored columns, `column(name)`, that have bounds."""
        names = [name for name in self.bounds if name in self.columns]
        return {n: widened(column(n)) if n == "tokens" else column(n) for n in names}

    def save(self, folder: Path, answer: LiveAnswer) -> list[Path]:
        """Write the data that all positions share, and return their files."""
        return []

    def load(self, folder: Path) -> Self:
        """Load the data that `save` wrote, or raise CorruptFileError."""
        return self

    def __str__(self) -> str:
        return f"{self.name} {next(iter(self.facts.values()))}"


class _StoredTokens(CacheMethod):
    """Base class of methods that store k of `vocabulary` tokens at each position."""

    def __init__(self, k: int, temperature: float, vocabulary: int) -> None:
        self.k = k
        self.temperature = temperature
        self.vocabulary = vocabulary
        self.header = {"vocabulary": vocabulary}
        self.bounds = {
            "tokens": (0, vocabulary - 1),
            "log_probs": (-math.inf, 0.01),  # rounding may exceed 0
            "log_tail": (-math.inf, 0),
            "weights": (-1e-5, 1.01),
            "entropy": (-0.01, math.log(max(vocabulary, 1)) + 0.01),
        }

    @classmethod
    def plan(cls, answer: LiveAnswer, fingerprint: Manifest, vocabulary: int | None) -> Self:
        k = fingerprint["k"]
        if not isinstance(answer, TopKTeacher):
            tokens = _logits(answer, vocabulary)(0, 1).shape[-1]
        elif vocabulary is None or cls.name != "topk":
            raise InputError(
                f"CACHE_METHOD is {cls.name!r}; expected 'topk' for a teacher on a server, which "
                "returns only its most likely tokens"
            )
        else:
            tokens = vocabulary
        if k > tokens:
            raise InputError(
                f"k in CACHE_METHOD is {k}; expected at most {tokens}, the teacher's tokens"
            )
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
        """Apply `select(log_probs, probs, positions)` in chunks; it may overwrite its arguments.

        Logits beyond the vocabulary are padding and get no probability.
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
    """CACHE_METHOD topk: store the k most likely tokens, and the total mass of all others.

    The columns are `tokens` `[k]`, `log_probs` `[k]` (float16, of `softmax(logits / temperature)`)
    and `log_tail` (float32, log of the mass of all other tokens).
    """

    name = "topk"
    below_inf = ("log_probs", "log_tail")

    def __init__(self, k: int, temperature: float, vocabulary: int) -> None:
        super().__init__(k, temperature, vocabulary)
        self.columns = {
            "tokens": ((k,), _narrowest(vocabulary - 1)),
            "log_probs": ((k,), torch.float16),
            "log_tail": ((), torch.float32),
        }

    def content(self, answer: LiveAnswer, batch: Batch, rows: Tensor) -> Content:
        """Return the columns; `error` is the KL to the stored distribution with an even tail."""
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

        No token of the tail is more likely than the last of the top k.
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
        """Return the most likely tokens, rescaled so that all probabilities sum to 1."""
        log_tail = column("log_tail")
        log_probs = _rescaled(column("log_probs"), log_tail)
        return TopKTeacher(widened(column("tokens")), log_probs, log_tail)


class Sampled(_StoredTokens):
    """CACHE_METHOD sample: store k tokens in about 2 bytes each; the weights have the mean p.

    The most likely quarter of the k tokens is always stored. Their probabilities are rounded up or
    down at random, except for the most likely token, whose weight makes the sum 1. The others are
    drawn from the rest of the vocabulary and have equal weights: with n draws from a rest of mass
    s, token i is drawn n p_i / s times on average, which is rounded up or down and may exceed 1.

    The columns are `largest` (the most likely token), `kept` and `levels` (packed ids of the other
    stored ones, and indices of their rounded probabilities), `drawn` (packed ids), `share`
    (float32, the weight of each drawn token) and `entropy` (float32, of the full distribution).

    References:
        Anshumann et al., Sparse Logit Sampling, 2025, with k independent draws.
        Madow, On the theory of systematic sampling, II, 1949.
    """

    name = "sample"
    below_inf = ("share", "entropy")

    def __init__(self, k: int, temperature: float, vocabulary: int) -> None:
        super().__init__(k, temperature, vocabulary)
        self.header["layout"] = "packed"  # older caches lack it: their ids are not packed
        self.n_kept = max(1, k // 4) - 1
        self.n_drawn = k - self.n_kept - 1
        self.columns = {
            "largest": ((), _narrowest(vocabulary - 1)),
            "kept": ((n_bytes(self.n_kept, vocabulary),), torch.uint8),
            "levels": ((self.n_kept,), torch.uint8),
            "drawn": ((n_bytes(self.n_drawn, vocabulary),), torch.uint8),
            "share": ((), torch.float32),
            "entropy": ((), torch.float32),
        }

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> Self:
        """Return the method of a cache from its manifest; raise ValueError if it is invalid."""
        if manifest.get("layout") != "packed":
            raise ValueError("its samples are not in the layout 'packed'")
        return super().from_manifest(manifest)

    def content(self, answer: LiveAnswer, batch: Batch, rows: Tensor) -> Content:
        """Return the columns; `error` is that of the entropy as estimated from the sample."""
        width = batch.input_ids.shape[1]
        # A row's random numbers depend on its index alone, not on the batch or the device.
        drawn = [np.random.default_rng(row).random((width, 2)) for row in batch.rows.tolist()]
        uniform = rearrange(np.stack(drawn), "row token draw -> (row token) draw")
        uniform = torch.from_numpy(uniform)[rows.cpu()]
        assert not isinstance(answer, TopKTeacher)  # plan
        return self._in_chunks(
            answer, lambda log_p, p, positions: self._sample(log_p, p, uniform[positions])
        )

    def _sample(self, log_p: Tensor, p: Tensor, uniform: Tensor) -> Content:
        """Return the columns for distributions `[n, vocab]`, by two uniform numbers for each."""
        # In float32, the sum over a large vocabulary is coarser than a rare token's mass.
        exact = torch.float32 if p.device.type == "mps" else torch.float64
        uniform = uniform.to(p.device, exact)
        top, at = p.topk(1 + self.n_kept)
        rest = p.to(exact).scatter_(-1, at, 0)
        upto = rest.cumsum(-1)
        mass = upto[:, -1:]
        places = torch.arange(self.n_drawn, device=p.device)
        steps = (uniform[:, :1] + places) / self.n_drawn * mass
        drawn = torch.searchsorted(upto, steps, right=True)
        # Beyond the end only where no mass is left: the most likely token, with a weight of 0.
        drawn = torch.where(drawn < p.shape[-1], drawn, at[:, :1]).sort(-1).values
        levels = round_to(grid(self.vocabulary, exact, p.device), top[:, 1:], uniform[:, 1:])
        kept, order = at[:, 1:].sort(-1)
        columns = {"largest": at[:, 0], "levels": levels.gather(-1, order)}
        columns |= {"kept": pack(kept, self.vocabulary), "drawn": pack(drawn, self.vocabulary)}
        columns |= {"share": (mass[:, 0] / self.n_drawn).float(), "entropy": -(p * log_p).sum(-1)}
        stored = self.answer(columns.__getitem__)
        estimate = -(stored.weights * log_p.gather(-1, stored.indices)).sum(-1)
        is_first = F.pad(drawn.diff(dim=-1) != 0, (1, 0), value=True)
        covered = (rest.gather(-1, drawn) * is_first).sum(-1)
        return columns | {
            "lost": (mass[:, 0] - covered).clamp(min=0).float(),
            "error": (estimate - columns["entropy"]).abs(),
        }

    def answer(self, column: Callable[[str], Tensor]) -> SampledTeacher:
        """Return the stored tokens with weights that sum to 1."""
        largest, levels = widened(column("largest")).unsqueeze(-1), column("levels").long()
        kept = unpack(column("kept"), self.n_kept, self.vocabulary)
        drawn = unpack(column("drawn"), self.n_drawn, self.vocabulary)
        probs = grid(self.vocabulary, torch.float32, levels.device)[levels]
        share = repeat(column("share"), "row -> row drawn", drawn=self.n_drawn)
        weights = torch.cat([probs, share], -1)
        weights = torch.cat([1 - weights.sum(-1, keepdim=True), weights], -1)
        return SampledTeacher(torch.cat([largest, kept, drawn], -1), weights, column("entropy"))

    def numbers(self, column: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the tokens, weights and entropies."""
        answer = self.answer(column)
        return {"tokens": answer.indices, "weights": answer.weights, "entropy": answer.entropy}


class LastHidden(CacheMethod):
    """CACHE_METHOD hidden: store the last hidden state at each position, and the output head once.

    The answer is bit-identical to the live teacher's. The column is `hidden` `[dim]`. The name of
    the head's file contains its digest, so a cache stays readable while another one replaces it.
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
        """Return the method, or raise InputError if logits are not linear in the hidden states."""
        teacher = fingerprint["teacher"]
        if not isinstance(answer, LinearTeacher):
            raise InputError(
                f"CACHE_METHOD is 'hidden'; expected 'topk' or 'sample', because the teacher "
                f"{teacher!r} caps or scales its logits"
            )
        # An entry of -inf in the bias marks a token outside the vocabulary.
        bias = answer.weight[:0] if answer.bias is None else answer.bias
        if not answer.weight.isfinite().all() or not (bias < torch.inf).all():
            raise InputError(
                f"the output head of the teacher {teacher!r} holds NaN or infinity: use an intact "
                "copy of its weights"
            )
        size, dim = answer.weight.shape
        return cls(size, dim, answer.hidden.dtype, _digest(answer.weight, answer.bias))

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> Self:
        """Return the method of a cache from its manifest; raise ValueError if it is invalid."""
        types = {"vocabulary": int, "dim": int, "stored": str, "head": str}
        if odd := odd_fields(manifest, types):
            raise ValueError(f"{', '.join(odd)}: missing or of the wrong type")
        if not re.fullmatch(r"[0-9a-f]{16}", manifest["head"]):  # it names a file
            raise ValueError(f"head is {manifest['head'][:50]!r}; expected 16 hexadecimal digits")
        stored = {str(dtype): dtype for dtype in DTYPES}.get(f"torch.{manifest['stored']}")
        if stored is None:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(f"stored is {manifest['stored']!r}; expected one of {names}")
        return cls(manifest["vocabulary"], manifest["dim"], stored, manifest["head"])

    @property
    def facts(self) -> dict[str, Any]:
        """Return the dtype and width of hidden states, and the size of the head if loaded."""
        facts = {name: self.header[name] for name in ("stored", "dim")}
        if self._weight is not None:
            facts["head_bytes"] = sum(x.nbytes for x in (self._weight, self._bias) if x is not None)
        return facts

    def content(self, answer: LiveAnswer, batch: Batch, rows: Tensor) -> Content:
        """Return the column; `error` is 0, or NaN if the hidden state is not finite."""
        assert isinstance(answer, LinearTeacher)  # plan
        hidden = answer.hidden
        lost = torch.zeros(len(hidden), device=hidden.device)
        bad = ~hidden.isfinite().all(-1)
        return {"hidden": hidden, "lost": lost, "error": lost.masked_fill(bad, torch.nan)}

    def answer(self, column: Callable[[str], Tensor]) -> LinearTeacher:
        """Return the hidden states with the head, which is moved to their device."""
        assert self._weight is not None, "load was not called"
        hidden = column("hidden")
        self._weight = self._weight.to(hidden.device)
        self._bias = None if self._bias is None else self._bias.to(hidden.device)
        return LinearTeacher(hidden.to(self._weight.dtype), self._weight, self._bias)

    def save(self, folder: Path, answer: LiveAnswer) -> list[Path]:
        """Write the head unless its file exists and is intact, and return the file."""
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
            raise CorruptFileError(
                f"{file} holds a different output head from the one in its name; {_REBUILD}"
            )
        self._weight, self._bias = weight, bias
        return self

    def _file(self, folder: Path) -> Path:
        return folder / HEAD_FILES.replace("*", self.head)


METHODS: Mapping[str, type[CacheMethod]] = MappingProxyType(
    {method.name: method for method in (TopK, Sampled, LastHidden)}
)


def as_cached(answer: TopKTeacher) -> TopKTeacher:
    """Round an answer as a `topk` cache does, so that it is bit-identical to a cached one."""
    log_probs = answer.log_probs.clamp(min=LOWEST).half()
    return TopKTeacher(answer.indices, _rescaled(log_probs, answer.log_tail), answer.log_tail)


def widened(stored: Tensor) -> Tensor:
    """Convert stored token ids to int64; int16 ids are unsigned, since torch lacks uint16."""
    ids = stored.long()
    return ids & 0xFFFF if stored.dtype == torch.int16 else ids


def _narrowest(largest: int) -> torch.dtype:
    """Return the smallest dtype for token ids up to `largest`, which `widened` reads."""
    if largest < 2**8:
        return torch.uint8
    return torch.int16 if largest < 2**16 else torch.int32


def _rescaled(log_probs: Tensor, log_tail: Tensor) -> Tensor:
    """Rescale the probabilities of the stored tokens to sum to 1 minus the tail."""
    return log_probs.float().log_softmax(-1) + torch.log1p(-log_tail.exp()).unsqueeze(-1)


def _logits(answer: FullAnswer, vocabulary: int | None) -> Callable[[int, int], Tensor]:
    """Return a function of `start, stop` that copies the logits of these positions as float32."""
    if isinstance(answer, LogitsTeacher):
        logits = answer.logits[:, :vocabulary]
        return lambda start, stop: logits[start:stop].to(torch.float32, copy=True)
    weight = answer.weight[:vocabulary]
    bias = None if answer.bias is None else answer.bias[:vocabulary]
    return lambda start, stop: F.linear(answer.hidden[start:stop], weight, bias).float()


def _digest(weight: Tensor, bias: Tensor | None) -> str:
    """Return a digest of the dtype, shape and values of an output head."""
    digest = hashlib.sha256()
    for x in (weight, bias):
        if x is not None:
            digest.update(f"{x.dtype} {tuple(x.shape)}".encode())
            digest.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
