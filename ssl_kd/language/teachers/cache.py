"""Write and read a cache of a teacher's answers, which replaces the teacher in training."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ssl_kd.core.errors import InputError
from ssl_kd.core.logits import check_temperature
from ssl_kd.core.memory import to_device_async
from ssl_kd.core.runs.process_group import ProcessGroup
from ssl_kd.core.settings import SettingsError
from ssl_kd.core.shards import ShardStore, ShardWriter
from ssl_kd.core.shards.fingerprint import BaseFingerprint
from ssl_kd.core.shards.shards import Columns, Content, Manifest
from ssl_kd.language.losses.divergences import DIVERGENCES, selects_by_student
from ssl_kd.language.losses.teacher_output import TeacherOutput
from ssl_kd.language.losses.token_distillation import next_token_targets
from ssl_kd.language.models.causal import CausalLM, tokenizer_id
from ssl_kd.language.models.finite import first_fault, in_words
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.teachers.cache_methods import HEAD_FILES, METHODS, CacheMethod, LiveAnswer
from ssl_kd.language.teachers.load import router_id
from ssl_kd.language.text.blocks import Batch, Blocks
from ssl_kd.language.text.dataset import TextDataset

logger = logging.getLogger(__name__)

_NAME = "teacher"
_SUMS = ("real", "lost", "error")
_FINITE = {name for method in METHODS.values() for name in method.finite}
_BELOW_INF = {name for method in METHODS.values() for name in method.below_inf}


@dataclass(frozen=True)
class TeacherFingerprint(BaseFingerprint):
    """All inputs that the content of a cache depends on.

    `k` and `temperature` are None for the method `hidden`, which does not depend on them.
    """

    way_out = (
        "To keep this cache, name another folder by --teacher_cache; to replace it, run "
        "cache_teacher.py --force_recompute with the settings of this run."
    )

    teacher: str  # name without the parent folder
    weights: str  # identity of the teacher's weights
    tokenizer: str  # identity of the tokenizer
    text: str  # identity of the documents and their order
    block_size: int  # tokens in a row
    packed: bool  # whether some row holds more than one document
    blocks: str  # identity of the rows of tokens and of their targets
    dtype: str  # dtype of the teacher's computation
    method: str  # topk, sample or hidden
    k: int | None  # tokens per position
    temperature: float | None  # temperature of the teacher's softmax

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; expected one of {', '.join(METHODS)}")
        if self.method == "hidden":
            object.__setattr__(self, "k", None)
            object.__setattr__(self, "temperature", None)
            return
        least = 2 if self.method == "sample" else 1
        if self.k is None or self.k < least:
            raise ValueError(f"k is {self.k}; expected at least {least}")
        if self.temperature is None:
            raise ValueError(f"temperature is None; expected a number for method {self.method!r}")
        check_temperature("temperature", self.temperature)


LiveTeacher = Callable[[Batch, Tensor], Any]
"""Function with a `device` that returns a teacher's `LiveAnswer` at positions of a batch."""


class TeacherCache(ShardStore):
    """Cache of a teacher's answers at all positions of some rows of tokens whose next token counts.

    A row of the store belongs to one row of tokens and has the same length; positions whose next
    token does not count hold zeros. The columns are those of the CACHE_METHOD, the number of `real`
    positions of the row, and the sums over them of the mass `lost` and of the `error`.
    """

    fingerprint_type = TeacherFingerprint
    fields = {"vocabulary": int}
    fingerprint: TeacherFingerprint

    @classmethod
    def open(
        cls, folder: str | Path, expect: Mapping[str, Any] | None = None, *, verify: bool = True
    ) -> TeacherCache:
        """Open a cache whose `TeacherFingerprint` has the fields `expect`.

        `verify` checks checksums, and every row for NaN, infinities and values out of range.

        Raises:
            FileNotFoundError: the folder holds no complete cache.
            FingerprintMismatch: the cache has other values of the expected fields.
            CorruptFileError: a file is damaged.
            NonFiniteRow: a row holds invalid values.
        """
        manifest, _ = cls.describe(Path(folder) / f"{_NAME}.json")
        expected = replace(TeacherFingerprint(**manifest["fingerprint"]), **(expect or {}))
        return cls(folder, _NAME, expect=expected, verify=verify)

    def __init__(self, folder: str | Path, name: str, **options: Any) -> None:
        super().__init__(folder, name, **options)
        self.method = _method(self.manifest).load(self.folder)

    @classmethod
    def columns(cls, manifest: Manifest) -> Columns:
        """Return the columns of a cache with this manifest."""
        positions = (manifest["fingerprint"]["block_size"],)
        sums = {"real": torch.int32, "lost": torch.float64, "error": torch.float64}
        columns = {
            name: ((*positions, *shape), dtype)
            for name, (shape, dtype) in _method(manifest).columns.items()
        }
        return columns | {name: ((), dtype) for name, dtype in sums.items()}

    @classmethod
    def faults(cls, content: Content, whole: bool) -> dict[int, str]:
        """Return the rows with a NaN or an infinity, except for log-probabilities of -inf."""
        faults: dict[int, str] = {}
        for name in (_FINITE | _BELOW_INF) & content.keys():
            column = content[name].flatten(1)
            bad = ~(column.amax(1) < torch.inf)  # NaN for a row that holds one
            if name in _FINITE:
                bad |= ~(column.amin(1) > -torch.inf)
            faults |= {at: f"{name} is NaN or infinite" for at in bad.nonzero()[:, 0].tolist()}
        return faults

    @classmethod
    def check_shard(cls, path: Path, entry: Manifest, manifest: Manifest) -> dict[int, str]:
        """Return the faulty rows of a shard, including rows with values out of range."""
        faults = super().check_shard(path, entry, manifest)
        shard, method = cls.read_shard(path, entry, manifest), _method(manifest)
        for at in range(len(shard["indices"])):
            for name, values in method.numbers(lambda column, at=at: shard[column][at]).items():
                low, high = method.bounds[name]
                least = values.min()
                most = values.max()
                if not low <= least <= most <= high:
                    fault = f"{name} from {least:g} to {most:g}, expected {low:g} to {high:g}"
                    faults.setdefault(at, fault)
        return faults

    @classmethod
    def statistics(cls, content: Content) -> Manifest:
        """Return the sums over all positions of a shard."""
        return {name: content[name].sum().item() for name in _SUMS}

    @classmethod
    def total(cls, entries: list[Manifest]) -> Manifest:
        """Return the means over all real positions of the cache."""
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
        """Return the SHA-256 of the manifest, which contains the checksums of all files."""
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """Return properties of the cache for a report: of its method, and means over its tokens.

        `bytes_per_token` excludes the output head, `tail_mass` is not stored, and `fidelity_kl` in
        nats is the KL from the full to the cached distribution; with `sample`, it is the estimated
        KL of a student that equals the teacher.
        """
        statistics = self.manifest["statistics"]
        names = ("bytes_per_token", "tail_mass", "fidelity_kl")
        means = {name: statistics[name] for name in names}
        return {"method": self.fingerprint.method, **self.method.facts, **means}

    def __repr__(self) -> str:
        return f"TeacherCache({str(self.folder)!r}, n={self.n}, {self.facts()})"

    def __call__(self, batch: Batch, rows: Tensor) -> TeacherOutput:
        """Return the teacher's answer at real positions, as a `FrozenTeacher` does."""
        width = batch.input_ids.shape[1]

        def column(name: str) -> Tensor:
            values = self.take(name, batch.rows)[:, :width]
            values = rearrange(values, "row token ... -> (row token) ...")
            return to_device_async(values, rows.device)[rows]

        return self.method.answer(column)


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
    ranks: ProcessGroup | None = None,
) -> TeacherCache:
    """Write a cache of a teacher's answers at every real position.

    An interrupted run continues after its last complete file, with the same batches. With `ranks`,
    each process writes every n-th file. Logits beyond `vocabulary`, the tokenizer's token count,
    are padding without mass, but `hidden` stores the full output head. None for `shard_rows` means
    files of about 256 MiB. `progress` is called with (rows done, rows) after each batch.

    Raises:
        InputError: an answer of the teacher is NaN, or the method cannot store the answers.
        FingerprintMismatch: the folder holds another cache, and `force` is not set.
        CorruptFileError, NonFiniteRow: a file is damaged or a row is invalid, and neither `force`
            nor `rebuild` is set.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected at least 1")
    device = getattr(teacher, "__self__", teacher).device  # `teacher` may be a bound method
    _, answer = _answer(teacher, blocks.batch([0], device))
    method = METHODS[fingerprint.method].plan(answer, vars(fingerprint), vocabulary)
    n = len(blocks)
    only = None
    start = perf_counter()
    if ranks is None or ranks.rank == 0:
        _log_size(method, blocks)
    if ranks is not None and ranks.world > 1:
        only = slice(ranks.rank, None, ranks.world)
    with ShardWriter(
        TeacherCache,
        folder,
        _NAME,
        fingerprint,
        method.header,
        ids=[f"block {row}" for row in range(n)],
        shard_rows=shard_rows,
        only=only,
        force=force,
        rebuild=rebuild,
    ) as writer:
        files = method.save(writer.folder, answer)
        del answer  # its head may be a copy on the device
        for rows in writer.batches(batch_size):
            batch = blocks.batch(rows, device)
            writer.put(_content(teacher, batch, fingerprint, method), batch.rows)
            if progress is not None:
                progress(rows.stop, n)
        if ranks is not None:
            ranks.gather("files of the cache", None)  # wait until all are written
        cache = writer.close()
        if force:
            seconds = perf_counter() - start
            logger.info("recomputed %s rows in %.1f s: %s", n, seconds, cache.folder)
        for file in set(cache.folder.glob(HEAD_FILES)) - set(files):  # from a replaced cache
            file.unlink(missing_ok=True)
        return cache


def _log_size(method: CacheMethod, blocks: Blocks) -> None:
    """Log how much the columns of a cache take, without the output head and the manifest."""
    columns = method.columns.values()
    position = sum(math.prod(shape) * dtype.itemsize for shape, dtype in columns)
    positions, tokens = blocks.ids.numel(), max(int(blocks.counts.sum()), 1)
    logger.info(
        "the cache (%s) takes %.3g GiB: %d bytes for each of %s positions, %.0f per token that is"
        " learned",
        method,
        positions * position / 2**30,
        position,
        f"{positions:,}",
        positions * position / tokens,
    )


def _answer(teacher: LiveTeacher, batch: Batch) -> tuple[Tensor, LiveAnswer]:
    rows, _ = next_token_targets(batch.input_ids, batch.counts)
    return rows, teacher(batch, rows)


def _method(manifest: Manifest) -> CacheMethod:
    return METHODS[TeacherFingerprint(**manifest["fingerprint"]).method].from_manifest(manifest)


@torch.no_grad()
def _content(
    teacher: LiveTeacher, batch: Batch, fingerprint: TeacherFingerprint, method: CacheMethod
) -> Content:
    """Return the columns of some rows, on the CPU."""
    rows, answer = _answer(teacher, batch)
    (b, width), n = batch.input_ids.shape, len(rows)
    columns = {name: x.cpu() for name, x in method.content(answer, batch, rows).items()}
    rows = rows.cpu()
    row, position = rows // width, rows % width
    if len(bad := columns["error"].isnan().nonzero()):
        first, model = int(bad[0]), getattr(getattr(teacher, "__self__", teacher), "model", None)
        fault = None if model is None else first_fault(model, [batch], "teacher")
        raise InputError(
            f"the answer of the teacher {fingerprint.teacher!r} is NaN at {len(bad)} of {n} "
            f"positions, first in block {int(batch.rows[row[first]])}, "
            f"token {int(position[first])}: "
            + (in_words(*fault) if fault else "check the teacher's weights")
            + "; or compute in float32 (--model_dtype float32)" * (fingerprint.dtype == "float16")
        )
    content: Content = {"real": torch.bincount(row, minlength=b)}
    for name, values in columns.items():
        if name in ("lost", "error"):
            sums = torch.zeros(b, dtype=torch.float64)
            content[name] = sums.index_add_(0, row, values.double())
        else:
            content[name] = values.new_zeros(b, fingerprint.block_size, *values.shape[1:])
            content[name][row, position] = values
    return content


def cache_identity(
    settings: LanguageSettings, teacher: CausalLM, texts: TextDataset, blocks: Blocks
) -> dict[str, Any]:
    """Return the fields that the fingerprint of a cache must have for a run."""
    weights = teacher.weights_id
    if settings.router_mode != "native":
        weights += " all"
    if file_id := router_id(settings.router_weights):
        weights += f" router {file_id}"
    return {
        "teacher": Path(teacher.name).name,
        "weights": weights,
        "tokenizer": tokenizer_id(teacher.tokenizer),
        "text": texts.digest,
        "block_size": blocks.ids.shape[1],
        "packed": blocks.packed,
        "blocks": blocks.digest,
        "temperature": settings.temperature,
    }


def check_divergence(divergence: str, method: str) -> None:
    """Raise SettingsError if a cache written by this method does not support a divergence."""
    known = [name for name, entry in DIVERGENCES.items() if entry.from_samples]
    if method == "sample" and divergence not in known:
        raise SettingsError(
            f"DIVERGENCE is {divergence!r}; expected {' or '.join(known)} with a cache of "
            "CACHE_METHOD 'sample': change DIVERGENCE, or make a cache with CACHE_METHOD 'topk' or "
            "'hidden'"
        )
    if method == "topk" and selects_by_student(divergence):
        raise SettingsError(
            f"DIVERGENCE is {divergence!r}, but a cache of CACHE_METHOD 'topk' holds only the "
            "teacher's own likeliest tokens: set DIVERGENCE to 'reverse_kl', or make a cache with "
            "CACHE_METHOD 'hidden'"
        )
