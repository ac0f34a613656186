"""A teacher's answers, stored once: a student then learns without its teacher in memory."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from ssl_kd.datasets.blocks import Batch, Blocks
from ssl_kd.errors import InputError
from ssl_kd.guard.memory import to_device_async
from ssl_kd.language.kept import HEADS, KINDS, Kept, Live
from ssl_kd.language.kept.distribution import widened
from ssl_kd.language.teacher_fingerprint import METHODS, TeacherFingerprint, identity
from ssl_kd.losses.teacher_output import TeacherOutput
from ssl_kd.losses.token_distillation import next_token_targets
from ssl_kd.store import ShardStore, ShardWriter
from ssl_kd.store.shards import Columns, Content, Manifest
from ssl_kd.teachers.finite import first_fault, in_words
from ssl_kd.training.process_group import ProcessGroup

__all__ = ["METHODS", "LiveTeacher", "TeacherCache", "TeacherFingerprint", "identity", "write"]

logger = logging.getLogger(__name__)

_NAME = "teacher"
_FACTS = ("bytes_per_token", "tail_mass", "fidelity_kl")
_SUMS = ("real", "lost", "error")
_FINITE = {name for kind in KINDS.values() for name in kind.finite}
_BELOW_INF = {name for kind in KINDS.values() for name in kind.below_inf}


class LiveTeacher(Protocol):
    """Computes a teacher's answer at the real positions of a batch: a `FrozenTeacher`."""

    device: torch.device

    def __call__(self, batch: Batch, rows: Tensor) -> Live:
        """Its answer at `rows` of the flattened `[batch * token]` positions."""
        ...


class TeacherCache(ShardStore):
    """A teacher's answer at every real position of some blocks; replaces the teacher.

    Made by `open` or `write`. A row of the store is a row of the blocks, T positions long. Those
    whose next token does not count hold zeros: rows of one shape are worth the space. What is kept
    at a position is CACHE_METHOD's business (`ssl_kd.language.kept`); beside it there are, of each
    row, `real` positions, and over them the sums of the mass `lost` and of the `error`.

    Attributes:
        kept: how answers are kept.
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

    def __init__(self, folder: str | Path, name: str, **options: Any) -> None:
        super().__init__(folder, name, **options)
        self.kept = _kept(self.manifest).load(self.folder)

    @classmethod
    def columns(cls, manifest: Manifest) -> Columns:
        """The columns of a cache with this manifest."""
        positions = (manifest["fingerprint"]["block_size"],)
        sums = {"real": torch.int32, "lost": torch.float64, "error": torch.float64}
        kept = {
            name: ((*positions, *shape), dtype)
            for name, (shape, dtype) in _kept(manifest).columns.items()
        }
        return kept | {name: ((), dtype) for name, dtype in sums.items()}

    @classmethod
    def faults(cls, content: Content, whole: bool) -> dict[int, str]:
        """Rows that hold a NaN or an infinity; a log-probability of -inf is a probability of 0."""
        found: dict[int, str] = {}
        for name in (_FINITE | _BELOW_INF) & content.keys():
            column = content[name].flatten(1)
            bad = ~(column.amax(1) < torch.inf)  # NaN for a row that holds one
            if name in _FINITE:
                bad |= ~(column.amin(1) > -torch.inf)
            found |= {at: f"{name} is NaN or infinite" for at in bad.nonzero()[:, 0].tolist()}
        return found

    @classmethod
    def check_shard(cls, path: Path, entry: Manifest, manifest: Manifest) -> dict[int, str]:
        """As of any store; each row holds only what can be."""
        faults = super().check_shard(path, entry, manifest)
        shard, bounds = cls.read_shard(path, entry, manifest), _kept(manifest).bounds
        for at in range(len(shard["indices"])):
            for name in bounds.keys() & shard.keys():
                (low, high), row = bounds[name], shard[name][at]
                values = widened(row) if name == "tokens" else row
                least, most = values.min().item(), values.max().item()
                if not low <= least <= most <= high:
                    fault = f"{name} from {least:g} to {most:g}, expected {low:g} to {high:g}"
                    faults.setdefault(at, fault)
        return faults

    @classmethod
    def statistics(cls, content: Content) -> Manifest:
        """Sums over a shard's positions."""
        return {name: content[name].sum().item() for name in _SUMS}

    @classmethod
    def total(cls, entries: list[Manifest]) -> Manifest:
        """Means over all real positions."""
        sums = {n: sum(e["statistics"][n] for e in entries) for n in _SUMS}
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

        `method`, its `k` or what the hidden states are `stored` in, and means over the real
        positions: `bytes_per_token` on the disk (an output head, `head_bytes`, is there once),
        `tail_mass` of the tokens that are not in the cache, and `fidelity_kl` in nats. That is, for
        `topk`, the KL divergence from the full distribution to the cached one, where the other
        tokens share the tail evenly. For `sample`, whose expected weights are the full
        distribution, it is how far from 0 the KL of a student that equals the teacher comes out at
        one position; over n positions the error of the mean is smaller by about the root of n. For
        `hidden` it is 0.
        """
        statistics = self.manifest["statistics"]
        chosen = {"method": self.fingerprint.method, **self.kept.facts}
        return chosen | {name: statistics[name] for name in _FACTS}

    def __repr__(self) -> str:
        return f"TeacherCache({str(self.folder)!r}, n={self.n}, {self.facts()})"

    def __call__(self, batch: Batch, rows: Tensor) -> TeacherOutput:
        """The teacher's answer at some positions of a batch, as of a `FrozenTeacher`.

        Args:
            batch: some rows of the blocks that the cache was written from.
            rows: int64 `[n]` into the flattened `[batch * token]` positions, real ones.

        Returns:
            On the device of `rows`: a distribution in float32, or hidden states with the output
            head in the teacher's dtype.
        """
        width = batch.input_ids.shape[1]

        def column(name: str) -> Tensor:
            taken = self.take(name, batch.rows)[:, :width].flatten(0, 1)
            return to_device_async(taken, rows.device)[rows]

        return self.kept.answer(column)


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
    rebuild: bool = False,
    progress: Callable[[int, int], None] | None = None,
    team: ProcessGroup | None = None,
    in_step: bool = False,
) -> TeacherCache:
    """Store the teacher's answer at every real position.

    An interrupted run continues after its last complete shard, in the same batches. Logits exist
    for a chunk of tokens at a time.

    Args:
        teacher: a `FrozenTeacher`, which computes in `fingerprint.dtype`.
        blocks: rows of tokens.
        folder: where the cache goes.
        fingerprint: what is stored, and how: method, k and temperature.
        vocabulary: number of tokens that the tokenizer has: the teacher's logits beyond it are
            padding and get no mass, as a student may be padded differently. None: no padding.
            Hidden states are kept with the whole head, as a live teacher has it.
        batch_size: rows of a forward pass.
        shard_rows: rows in a file; None makes files of about 256 MiB.
        force: ask the teacher about everything again, whatever is there.
        rebuild: ask again about damaged files alone.
        progress: called with (rows done, rows) after each batch.
        team: ranks that write together, each every so many-th file; the bytes are those of one.
        in_step: whether the teacher answers only where all ranks ask it, as one in pieces does.

    Raises:
        RankLost: another rank does not answer.
        ValueError: k is larger than the vocabulary, the teacher's answers are NaN, or hidden
            states are asked of a teacher whose logits are more than a head makes of them.
        FingerprintMismatch, CorruptFileError, NonFiniteRow: what is cached is of something else,
            damaged or bad, and not `force` (nor, but for the first, `rebuild`).
        LockHeld: another process is writing here.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected at least 1")
    _, answer = _answer(teacher, blocks.batch([0], teacher.device))
    kept = KINDS[fingerprint.method].planned(answer, fingerprint, vocabulary)
    n, only, began = len(blocks), None, perf_counter()
    if team is not None and team.world > 1:
        only = slice(team.rank, None, team.world)
    with ShardWriter(
        TeacherCache,
        folder,
        _NAME,
        fingerprint,
        kept.header,
        ids=[f"block {row}" for row in range(n)],
        shard_rows=shard_rows,
        only=only,
        force=force,
        rebuild=rebuild,
    ) as writer:
        files = kept.save(writer.folder, answer)
        del answer  # its head may be a copy on the device
        batches = writer.batches(batch_size)
        others = [len(batches)] if team is None else team.of_all("batches", len(batches))
        for rows in batches:
            batch = blocks.batch(rows, teacher.device)
            writer.put(_content(teacher, batch, fingerprint, kept), batch.rows)
            if progress is not None:
                progress(rows.stop, n)
        for _ in range(max(others) - len(batches) if in_step else 0):
            _answer(teacher, blocks.batch([0], teacher.device))
        if team is not None:
            team.of_all("files of the cache", None)  # all are there
        cache = writer.close()
        if force:
            logger.info(
                "the teacher was asked anew about %s rows in %.1f s: %s",
                n,
                perf_counter() - began,
                cache.folder,
            )
        for left in set(cache.folder.glob(HEADS)) - set(files):  # of a cache that was replaced
            left.unlink(missing_ok=True)
        return cache


def _answer(teacher: LiveTeacher, batch: Batch) -> tuple[Tensor, Live]:
    rows, _ = next_token_targets(batch.input_ids, batch.counts)
    return rows, teacher(batch, rows)


def _kept(manifest: Manifest) -> Kept:
    return KINDS[TeacherFingerprint(**manifest["fingerprint"]).method].of(manifest)


@torch.no_grad()
def _content(
    teacher: LiveTeacher, batch: Batch, fingerprint: TeacherFingerprint, kept: Kept
) -> Content:
    """The columns of some rows, on the CPU."""
    rows, answer = _answer(teacher, batch)
    (b, width), n = batch.input_ids.shape, len(rows)
    found = {name: x.cpu() for name, x in kept.content(answer, batch, rows).items()}
    rows = rows.cpu()
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
