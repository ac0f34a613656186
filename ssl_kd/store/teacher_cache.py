"""The teacher's distribution, stored once: a student then learns without its teacher in memory."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_kd.datasets.blocks import Batch, Blocks
from ssl_kd.errors import InputError
from ssl_kd.losses.linear_distillation import CHUNK_BYTES
from ssl_kd.losses.mutual_information import check_temperature
from ssl_kd.losses.rows import log_softmax_, saturate_
from ssl_kd.losses.teacher_output import (
    LinearTeacher,
    LogitsTeacher,
    SampledTeacher,
    TopKTeacher,
)
from ssl_kd.losses.token_distillation import next_token_targets
from ssl_kd.store import BaseFingerprint, ShardStore, ShardWriter
from ssl_kd.store.given import LOWEST, as_cached, given_top_k
from ssl_kd.store.given import rescaled as _rescaled
from ssl_kd.store.shards import Columns, Content, Manifest
from ssl_kd.teachers.causal import tokenizer_id
from ssl_kd.teachers.finite import first_fault, in_words
from ssl_kd.training.together import Team

if TYPE_CHECKING:
    from ssl_kd.datasets.text import TextDataset

__all__ = [
    "LiveTeacher",
    "TeacherCache",
    "TeacherFingerprint",
    "as_cached",
    "identity",
    "write",
]

logger = logging.getLogger(__name__)

METHODS = ("topk", "sample")
_NAME = "teacher"


class LiveTeacher(Protocol):
    """Computes a teacher's distribution at the real positions of a batch: a `FrozenTeacher`."""

    device: torch.device

    def __call__(self, batch: Batch, rows: Tensor) -> LinearTeacher | LogitsTeacher | TopKTeacher:
        """Its answer at `rows` of the flattened `[batch * token]` positions."""
        ...


@dataclass(frozen=True)
class TeacherFingerprint(BaseFingerprint):
    """Everything that decides what a cache of a teacher's distribution holds.

    Args:
        teacher: name of the teacher, without the folder it lies in.
        weights: identity of its weights.
        tokenizer: identity of the tokenizer.
        text: identity of the documents and their order.
        block_size: tokens in a row.
        packed: whether some row holds more than one document.
        blocks: identity of the rows of tokens, and of which count.
        dtype: what the teacher computed in.
        method: `topk` or `sample`.
        k: tokens at each position.
        temperature: of the teacher's softmax.
    """

    way_out = (
        "Replace it by cache_teacher.py --force_recompute with the settings of this run, or name "
        "another folder by --teacher_cache."
    )

    teacher: str
    weights: str
    tokenizer: str
    text: str
    block_size: int
    packed: bool
    blocks: str
    dtype: str
    method: str
    k: int
    temperature: float

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; expected one of {', '.join(METHODS)}")
        if self.k < 1:
            raise ValueError(f"k is {self.k}; expected at least 1")
        check_temperature("temperature", self.temperature)


def identity(
    teacher: str, weights: str, tokenizer: Any, dataset: TextDataset, blocks: Blocks
) -> dict[str, Any]:
    """The fields of a `TeacherFingerprint` that identify the teacher and the text.

    Args:
        teacher: name or path of the teacher.
        weights: its `weights_id`, which `files_id` gives without loading it.
        tokenizer: the tokenizer that made the blocks.
        dataset: the documents.
        blocks: their tokens, in rows.
    """
    return {
        "teacher": Path(teacher).name,
        "weights": weights,
        "tokenizer": tokenizer_id(tokenizer),
        "text": dataset.digest,
        "block_size": blocks.ids.shape[1],
        "packed": bool((blocks.documents > 1).any()),
        "blocks": blocks.digest,
    }


class TeacherCache(ShardStore):
    """A teacher's distribution at every real position of some blocks; replaces the teacher.

    Made by `open` or `write`. A row of the store is a row of the blocks, T positions long. Those
    whose next token does not count hold zeros: rows of one shape are worth the space.
    Columns, k tokens at each position:

    - `tokens`: as int16 they are unsigned, as torch has no arithmetic on uint16.
    - `topk`: `log_probs` float16 of `softmax(logits / temperature)`, and `log_tail` float32, of the
      mass of all other tokens. Reading rescales `log_probs`, so that all masses sum to 1.
    - `sample`: `weights` float16 of k tokens, drawn so that the expected weight of every token is
      its probability p, and `entropy` float32 of the whole distribution. Token i is drawn with
      probability min(1, p_i / t) and weighs max(p_i, t), where t is such that k are drawn: tokens
      above t are always drawn and keep their probability, the others represent each other. Drawn
      without replacement, so no token comes twice, and the weights sum to 1. Unused places weigh 0.
    - of each row: `real` positions, and over them the sums of the mass `lost` and of the `error`.

    References:
        Anshumann et al., "Sparse Logit Sampling: Accelerating Knowledge Distillation in LLMs",
        2025: why a sample teaches what the likeliest tokens cannot (there, k independent draws).
        Madow, "On the theory of systematic sampling, II", 1949: the draw.
    """

    fingerprint_type = TeacherFingerprint
    fields = {"vocabulary": int}
    fingerprint: TeacherFingerprint

    @classmethod
    def open(
        cls, folder: str | Path, expect: Mapping[str, Any] | None = None, *, verify: bool = True
    ) -> TeacherCache:
        """Open a cache.

        Args:
            folder: where it is.
            expect: fields of its `TeacherFingerprint`, by name, that it must have: those of
                `identity`, and the `temperature`. The others may be anything.
            verify: read everything once: checksums, and every row for NaN and infinities. Sizes
                and shapes are always compared.

        Raises:
            FileNotFoundError: there is no complete cache.
            FingerprintMismatch: it is of something else; the message names each difference.
            CorruptFileError: a file is damaged; the message names it.
            NonFiniteRow: a row is; the message names file, row and block.
        """
        manifest, _ = cls.describe(Path(folder) / f"{_NAME}.json")
        expected = replace(TeacherFingerprint(**manifest["fingerprint"]), **(expect or {}))
        return cls(folder, _NAME, expect=expected, verify=verify)

    @classmethod
    def columns(cls, manifest: Manifest) -> Columns:
        """The columns of a cache with this manifest."""
        fingerprint = TeacherFingerprint(**manifest["fingerprint"])
        positions = (fingerprint.block_size,)
        kept = (*positions, fingerprint.k)
        tokens = {"tokens": (kept, _narrowest(manifest["vocabulary"] - 1))}
        sums = {
            "real": ((), torch.int32),
            "lost": ((), torch.float64),
            "error": ((), torch.float64),
        }
        if fingerprint.method == "topk":
            distribution = {
                "log_probs": (kept, torch.float16),
                "log_tail": (positions, torch.float32),
            }
        else:
            distribution = {
                "weights": (kept, torch.float16),
                "entropy": (positions, torch.float32),
            }
        return tokens | distribution | sums

    @classmethod
    def faults(cls, content: Content, whole: bool) -> dict[int, str]:
        """Rows that hold a NaN or +inf; a log-probability of -inf is a probability of 0."""
        found: dict[int, str] = {}
        for name in ("log_probs", "log_tail", "weights", "entropy"):
            if name in content:
                peaks = content[name].flatten(1).amax(1)  # NaN for a row that holds one
                bad = ~(peaks < torch.inf)
                found |= {at: f"{name} is NaN or infinite" for at in bad.nonzero()[:, 0].tolist()}
        return found

    @classmethod
    def statistics(cls, content: Content) -> Manifest:
        """Sums over a shard's positions."""
        return {name: content[name].sum().item() for name in ("real", "lost", "error")}

    @classmethod
    def total(cls, entries: list[Manifest]) -> Manifest:
        """Means over all real positions."""
        sums = {n: sum(e["statistics"][n] for e in entries) for n in ("real", "lost", "error")}
        real = max(sums["real"], 1)
        return {
            "tokens": sums["real"],
            "bytes_per_token": sum(entry["bytes"] for entry in entries) / real,
            "tail_mass": sums["lost"] / real,
            "fidelity_kl": sums["error"] / real,
        }

    @property
    def digest(self) -> str:
        """SHA-256 of its manifest, which holds those of its files."""
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """The cache in numbers, for a report.

        `method`, `k`, and means over the real positions: `bytes_per_token` on the disk,
        `tail_mass` of the tokens that are not in the cache, and `fidelity_kl` in nats. That is, for
        `topk`, the KL divergence from the full distribution to the cached one, where the other
        tokens share the tail evenly. For `sample`, whose expected weights are the full
        distribution, it is how far from 0 the KL of a student that equals the teacher comes out at
        one position; over n positions the error of the mean is smaller by about the root of n.
        """
        statistics = self.manifest["statistics"]
        names = ("bytes_per_token", "tail_mass", "fidelity_kl")
        chosen = {"method": self.fingerprint.method, "k": self.fingerprint.k}
        return chosen | {name: statistics[name] for name in names}

    def __repr__(self) -> str:
        return f"TeacherCache({str(self.folder)!r}, n={self.n}, {self.facts()})"

    def __call__(self, batch: Batch, rows: Tensor) -> TopKTeacher | SampledTeacher:
        """The teacher's distribution at some positions of a batch, as of a `FrozenTeacher`.

        Args:
            batch: some rows of the blocks that the cache was written from.
            rows: int64 `[n]` into the flattened `[batch * token]` positions, real ones.

        Returns:
            On the device of `rows`, in float32.
        """
        width = batch.input_ids.shape[1]

        def column(name: str) -> Tensor:
            return self.take(name, batch.rows)[:, :width].flatten(0, 1).to(rows.device)[rows]

        tokens = _widened(column("tokens"))
        if self.fingerprint.method == "sample":
            weights = F.normalize(column("weights").float(), p=1, dim=-1)
            return SampledTeacher(tokens, weights, column("entropy"))
        log_tail = column("log_tail")
        return TopKTeacher(tokens, _rescaled(column("log_probs"), log_tail), log_tail)


def write(
    teacher: LiveTeacher,
    blocks: Blocks,
    folder: str | Path,
    fingerprint: TeacherFingerprint,
    *,
    vocabulary: int | None = None,
    batch_size: int = 8,
    shard_rows: int | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    team: Team | None = None,
    in_step: bool = False,
) -> TeacherCache:
    """Store the teacher's distribution at every real position.

    An interrupted run continues after its last complete shard, in the same batches. Logits exist
    for a chunk of tokens at a time.

    Args:
        teacher: a `FrozenTeacher`, which computes in `fingerprint.dtype`.
        blocks: rows of tokens.
        folder: where the cache goes.
        fingerprint: what is stored, and how: method, k and temperature.
        vocabulary: number of tokens that the tokenizer has: the teacher's logits beyond it are
            padding and get no mass, as a student may be padded differently. None: no padding.
        batch_size: rows of a forward pass.
        shard_rows: rows in a file; None makes files of about 256 MiB.
        force: replace a cache of something else, and rebuild damaged files alone.
        progress: called with (rows done, rows) after each batch.
        team: ranks that write together, each every so many-th file; the bytes are those of one.
        in_step: whether the teacher answers only where all ranks ask it, as one in pieces does.

    Raises:
        RankLost: another rank does not answer.
        ValueError: k is larger than the vocabulary, or the teacher's logits are NaN.
        FingerprintMismatch, CorruptFileError, NonFiniteRow: what is cached is of something else,
            damaged or bad, and not `force`.
        LockHeld: another process is writing here.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected at least 1")
    _, answer = _answer(teacher, blocks.batch([0], teacher.device))
    if not isinstance(answer, TopKTeacher):
        vocabulary = _logits(answer, vocabulary)(0, 1).shape[-1]
    elif vocabulary is None or fingerprint.method != "topk":
        raise InputError("a teacher that gives its top k takes a vocabulary and the method topk")
    if fingerprint.k > vocabulary:
        raise InputError(f"k is {fingerprint.k}, but the teacher has only {vocabulary} tokens")
    n, only = len(blocks), None
    if team is not None and team.world > 1:
        only = slice(team.rank, None, team.world)
    with ShardWriter(
        TeacherCache,
        folder,
        _NAME,
        fingerprint,
        {"vocabulary": vocabulary},
        ids=[f"block {row}" for row in range(n)],
        shard_rows=shard_rows,
        only=only,
        force=force,
    ) as writer:
        batches = writer.batches(batch_size)
        others = [len(batches)] if team is None else team.of_all("batches", len(batches))
        for rows in batches:
            batch = blocks.batch(rows, teacher.device)
            writer.put(_content(teacher, batch, fingerprint, vocabulary), batch.rows)
            if progress is not None:
                progress(rows.stop, n)
        for _ in range(max(others) - len(batches) if in_step else 0):
            _answer(teacher, blocks.batch([0], teacher.device))
        if team is not None:
            team.of_all("files of the cache", None)  # all are there
        return writer.close()


def _answer(
    teacher: LiveTeacher, batch: Batch
) -> tuple[Tensor, LinearTeacher | LogitsTeacher | TopKTeacher]:
    rows, _ = next_token_targets(batch.input_ids, batch.counts)
    return rows, teacher(batch, rows)


def _logits(
    answer: LinearTeacher | LogitsTeacher, vocabulary: int | None
) -> Callable[[int, int], Tensor]:
    """The first `vocabulary` logits of positions `start` to `stop`, a float32 copy."""
    if isinstance(answer, LogitsTeacher):
        logits = answer.logits[:, :vocabulary]
        return lambda start, stop: logits[start:stop].to(torch.float32, copy=True)
    weight = answer.weight[:vocabulary]
    bias = None if answer.bias is None else answer.bias[:vocabulary]
    return lambda start, stop: F.linear(answer.hidden[start:stop], weight, bias).float()


def _kept(
    answer: LinearTeacher | LogitsTeacher | TopKTeacher,
    n: int,
    fingerprint: TeacherFingerprint,
    vocabulary: int,
    uniforms: Tensor | None,
) -> Content:
    """What is kept of each of n positions, on the CPU; a chunk of their logits at a time."""
    if isinstance(answer, TopKTeacher):
        return {name: values.cpu() for name, values in given_top_k(answer, vocabulary).items()}
    logits, parts = _logits(answer, vocabulary), list[Content]()
    chunk = max(1, CHUNK_BYTES // (4 * vocabulary))
    for start in range(0, max(n, 1), chunk):
        stop = min(start + chunk, n)
        log_p, p = log_softmax_(saturate_(logits(start, stop)), fingerprint.temperature)
        if uniforms is None:
            parts.append(_top_k(log_p, fingerprint.k))
        else:
            parts.append(_sample(log_p, p, uniforms[start:stop], fingerprint.k))
    return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}


@torch.no_grad()
def _content(
    teacher: LiveTeacher, batch: Batch, fingerprint: TeacherFingerprint, vocabulary: int
) -> Content:
    """The columns of some rows, on the CPU."""
    rows, answer = _answer(teacher, batch)
    (b, width), n = batch.input_ids.shape, len(rows)
    rows = rows.cpu()
    uniforms = None
    if fingerprint.method == "sample":
        uniforms = _uniforms(batch.rows, fingerprint.block_size)[:, :width].flatten(0, 1)[rows]
    found = _kept(answer, n, fingerprint, vocabulary, uniforms)
    row, column = rows // width, rows % width
    if len(bad := found["error"].isnan().nonzero()):
        first, model = int(bad[0]), getattr(teacher, "model", None)
        fault = None if model is None else first_fault(model, [batch], "teacher")
        raise InputError(
            f"teacher {fingerprint.teacher!r} gives NaN at {len(bad)} of {n} positions, first in "
            f"block {int(batch.rows[row[first]])}, token {int(column[first])}: "
            + (in_words(*fault) if fault else "check its weights")
            + "; or compute in float32 (--model_dtype float32)" * (fingerprint.dtype == "float16")
        )
    content: Content = {"real": torch.bincount(row, minlength=b)}
    for name, values in found.items():
        if name in ("lost", "error"):
            sums = torch.zeros(b, dtype=torch.float64)
            content[name] = sums.index_add_(0, row, values.double())
        else:
            content[name] = values.new_zeros(b, fingerprint.block_size, *values.shape[1:])
            content[name][row, column] = values
    return content


def _top_k(log_p: Tensor, k: int) -> Content:
    """The k likeliest tokens, of log-probabilities `[n, vocab]`."""
    kept, tokens = log_p.topk(k)
    rest = log_p.scatter(-1, tokens, -torch.inf)
    log_tail = rest.logsumexp(-1)  # not 1 - sum: a small tail would cancel
    tail, others = log_tail.exp(), max(log_p.shape[-1] - k, 1)
    log_probs = kept.clamp(min=LOWEST).half()
    error = (kept.exp() * (kept - _rescaled(log_probs, log_tail))).sum(-1)
    shared = torch.where(tail > 0, tail * (log_tail - math.log(others)), 0.0)
    error = error - torch.special.entr(rest.exp()).sum(-1) - shared
    return {
        "tokens": tokens,
        "log_probs": log_probs,
        "log_tail": log_tail,
        "lost": tail,
        "error": error,
    }


def _sample(log_p: Tensor, p: Tensor, uniform: Tensor, k: int) -> Content:
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


def _uniforms(rows: Tensor, block_size: int) -> Tensor:
    """Numbers from 0 to 1, `[b, block_size, 1]`.

    A row's numbers depend on its index alone, neither on batches nor on the device.
    """
    drawn = [np.random.default_rng(row).random((block_size, 1)) for row in rows.tolist()]
    return torch.from_numpy(np.stack(drawn))


def _narrowest(largest: int) -> torch.dtype:
    """For whole numbers from 0; as int16 they are unsigned."""
    if largest < 2**8:
        return torch.uint8
    return torch.int16 if largest < 2**16 else torch.int32


def _widened(stored: Tensor) -> Tensor:
    whole = stored.long()
    return whole & 0xFFFF if stored.dtype == torch.int16 else whole
