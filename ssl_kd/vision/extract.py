"""Embed a data set with a frozen teacher, and store the embeddings for later runs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from ssl_kd.core.errors import InputError, UserError, first_few, printable
from ssl_kd.core.files import release_pages
from ssl_kd.core.memory import is_out_of_memory
from ssl_kd.core.precision import Precision, default_torch_state
from ssl_kd.core.runs.clock import Progress, no_progress
from ssl_kd.core.shards import Fingerprint
from ssl_kd.core.shards.shards import Manifest
from ssl_kd.vision.cache import EmbeddingStore, EmbeddingWriter
from ssl_kd.vision.data import FeatureDataset, ImageDataset, SampleDataset, UnreadableSample
from ssl_kd.vision.data.samples import NOUNS
from ssl_kd.vision.teachers import Features, Pixels, Teacher

logger = logging.getLogger(__name__)

Dataset = SampleDataset | FeatureDataset
_FEATURE_ROWS = 8192
_TEACHERS = {
    "features": "--teacher features",
    "image": "a teacher of images, such as --teacher dinov2",
    "text": "a teacher of texts, --teacher minilm or hf:NAME",
    "audio": "a teacher of sounds, --teacher resemblyzer or hf:NAME",
}
"""Kind of a data set -> the teachers that embed it."""
_TEXT_BATCHES = 16
"""Batches of texts that are read at once, and sorted by length: this saves most of the padding."""


class ExtractionFailed(UserError, RuntimeError):
    """A teacher failed; the message names the sample, or the first and last sample of the batch."""


class Batch(NamedTuple):
    """The prepared samples, or feature rows, of one batch."""

    rows: Sequence[int]  # the readable rows
    # `[row, ...]` of the readable rows, a tensor for each text or sound; None if there are none
    samples: Tensor | list[Tensor] | None
    unreadable: Sequence[tuple[int, UnreadableSample]]


class Share(NamedTuple):
    """The result of one process's share of an extraction."""

    shards: list[int]  # of this process
    rows: int  # samples in these shards
    n_shards: int  # of the whole data set
    manifest: Manifest | None  # of the complete cache; None while other shards are missing


def fingerprint(dataset: Dataset, teacher: Teacher, precision: Precision) -> Fingerprint:
    """Return the identity of the embeddings: teacher, weights, transform, dtype and data."""
    dtype = torch.float32 if isinstance(teacher, Pixels | Features) else precision.teacher
    return Fingerprint(
        teacher=teacher.name,
        weights=teacher.weights_id,
        transform=teacher.transform_id,
        dtype=str(dtype).removeprefix("torch."),
        data=dataset.fingerprint,
    )


@dataclasses.dataclass(frozen=True)
class SplitExtraction:
    """What to embed and store of one split of a data set, and how."""

    dataset: Dataset
    teacher: Teacher
    folder: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    split: str
    precision: Precision
    batch_size: int = 64  # samples per forward pass; halved whenever memory runs out
    workers: int = 0  # threads that decode; 0: up to 16 on a GPU, torch's number on a CPU
    force: bool = False  # embed all samples again; the old cache stays until the new is complete
    rebuild: bool = False  # repeat damaged shards, and those with a left-out image now readable
    shard_rows: int | None = None  # None: about 256 MiB; of several processes the first decides
    progress: Progress = no_progress

    def __post_init__(self) -> None:
        dataset, teacher = self.dataset, self.teacher
        if teacher.kind != dataset.kind:
            noun, hint = NOUNS[dataset.kind], ""
            rows = dataset.rows if isinstance(dataset, FeatureDataset) else None
            if rows is not None and rows.kind == teacher.kind and rows.media is not None:
                what = "pictures" if rows.pictured else f"{NOUNS[rows.kind]}s"
                hint = f"; --column {rows.media['column']} embeds the {what} of this table"
            raise InputError(
                f"TEACHER {teacher.name!r} and DATASET {dataset.name!r} do not go together: the "
                f"data set holds {noun}s, which need {_TEACHERS[dataset.kind]}{hint}"
            )
        if isinstance(dataset, FeatureDataset) and dataset.features.shape[1] != teacher.dim:
            raise InputError(
                f"the features of {dataset.name} have {dataset.features.shape[1]} dimensions; "
                f"expected {teacher.dim} as in DATASET: compute both with the same model"
            )

    @contextlib.contextmanager
    def loaded(self, batches: Sequence[range]) -> Iterator[tuple[Embed, Iterable[Batch]]]:
        """Return the function that embeds batches of rows, and the batches, which are decoded."""
        self.teacher.to(self.precision.device)
        load = _load_ahead if self.precision.device.type != "cpu" else _load_between
        decoded = load(self.dataset, self.teacher, batches, self.workers)
        with contextlib.closing(decoded):
            yield Embed(self.teacher, self.precision, self.batch_size), decoded


@dataclasses.dataclass(frozen=True)
class Extraction(SplitExtraction):
    """Compute and store the embeddings of one split of a data set.

    An interrupted extraction continues after its last complete shard with the same batches, so the
    result does not depend on where it was interrupted. An unreadable sample is left out and listed
    under `unreadable` in the manifest.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher.grid is not None:
            raise InputError(
                "TOKEN is 'patches', which embeds every patch of an image: write the patches with "
                "`train.py extract --token patches`, and cluster them with --dataset and the "
                "folder that it names; or set TOKEN to 'patch', their mean in each image"
            )

    @property
    def file(self) -> Path:
        """Path of the manifest of the complete cache."""
        return Path(self.folder) / f"embeddings_{self.split}.json"

    @default_torch_state()
    def store(self) -> EmbeddingStore:
        """Compute the shards that are missing, and open the complete store."""
        expected = fingerprint(self.dataset, self.teacher, self.precision)
        store = None
        if not (self.force or self.rebuild):
            with contextlib.suppress(FileNotFoundError):
                store = EmbeddingStore.open(Path(self.folder), self.split, expect=expected)
        if store is None:
            with self._writer(None) as writer:
                self._fill(writer)
                store = writer.close()
        self._warn_of_left_out(store.manifest)
        # An earlier run may have used other labels.
        labels = self.dataset.labels
        labels = None if labels is None else torch.from_numpy(labels)[store.indices]
        store.relabel(labels, self.dataset.class_names)
        return store

    @default_torch_state()
    def share(self, only: slice) -> Share:
        """Compute some of the shards, while other processes compute the rest.

        Any number of processes may work on one folder, on different machines. A process may be
        killed and restarted, and two processes may compute the same shard: the files are
        byte-identical to those of `store`. The last process to finish publishes the cache. Each
        process verifies only its own shards, and all need the same arguments, including `force`.
        `only` selects the shards, as in `slice(rank, None, world)` or `slice(k, k + 1)`.
        """
        with self._writer(only) as writer:
            computed = writer.absent
            self._fill(writer)
            manifest = writer.publish()
            share = Share(list(writer.shards), writer.rows, writer.n_shards, manifest)
        if manifest is not None:
            if not manifest["statistics"]["rows"]:
                n, name = len(self.dataset), self.dataset.name
                raise InputError(f"not one of the {n} samples of DATASET {name} can be used")
            if computed:
                self._warn_of_left_out(manifest)
        return share

    def fill(self, rank: int = 0, world: int = 1) -> str:
        """Fill the cache as one of `world` processes, and describe it in one line.

        A single process verifies a cache that is complete; several need not run at the same time.
        """
        if world == 1:
            return summary_of(self.store().manifest)
        share = self.share(slice(rank, None, world))
        if share.manifest is not None:
            return summary_of(share.manifest)
        return (
            f"this process has stored its {len(share.shards)} of {share.n_shards} shards; the "
            "cache is complete when the other processes have stored theirs"
        )

    def _writer(self, only: slice | None) -> EmbeddingWriter:
        dataset = self.dataset
        return EmbeddingWriter(
            Path(self.folder),
            self.split,
            fingerprint(dataset, self.teacher, self.precision),
            len(dataset),
            self.teacher.dim,
            dtype=None,  # that of the teacher
            labels=None if dataset.labels is None else torch.from_numpy(dataset.labels),
            ids=dataset.ids,
            class_names=dataset.class_names,
            shard_rows=self.shard_rows,
            only=only,
            force=self.force,
            rebuild=self.rebuild,
            back=self._is_readable_now,
        )

    def _warn_of_left_out(self, manifest: Manifest) -> None:
        left_out = manifest["unreadable"]
        if left_out and not isinstance(self.dataset, FeatureDataset):
            named = [f"{entry['id']} ({entry['reason']})" for entry in left_out]
            counts, shown = (len(left_out), manifest["n"]), "; ".join(first_few(named, 5))
            message = "%d of %d samples of %s are left out: %s. All are listed in %s (unreadable)"
            logger.warning(message, *counts, self.split, shown, self.file)
        if readable := [entry["id"] for entry in left_out if self._is_readable_now(entry)]:
            message = "%d left-out samples can be read now, first %s: to embed them, add %s"
            logger.warning(message, len(readable), readable[0], "--rebuild_damaged")

    def _is_readable_now(self, entry: dict[str, Any]) -> bool:
        if isinstance(self.dataset, FeatureDataset) or entry["reason"].startswith("embedding is "):
            return False  # left out because its row was not finite
        try:
            self.teacher.preprocess(self.dataset.sample(entry["row"]))
        except UnreadableSample:
            return False
        return True

    def _fill(self, writer: EmbeddingWriter) -> None:
        """Compute the rows that are not stored yet, and append them to the writer."""
        rows = {"features": _FEATURE_ROWS, "text": _TEXT_BATCHES * self.batch_size}
        batches = writer.batches(rows.get(self.dataset.kind, self.batch_size))
        if batches:
            with self.loaded(batches) as (embed, loaded):
                _write(writer, self.dataset, embed, loaded, self.progress)
            if changed := self.teacher.report():
                logger.warning("%s (%s): %s", printable(self.dataset.name), self.split, changed)
        if self.force:
            message = "Embedded all %d samples of %s again: %s"
            logger.info(message, writer.rows, self.split, self.folder)


def summary_of(manifest: Manifest) -> str:
    """Describe the content of a complete cache in one line."""
    shards, rows = len(manifest["shards"]), manifest["statistics"]["rows"]
    n_left_out = len(manifest["unreadable"])
    text = f"{rows} rows of {manifest['dim']}, {manifest['dtype']}, in {shards} shards"
    return f"{text}; {n_left_out} samples are left out" if n_left_out else text


def check_finite(
    embeddings: Tensor, rows: Sequence[int], dataset: Dataset, teacher: Teacher
) -> None:
    """Raise InputError if an embedding of one of the `rows` is NaN or infinite."""
    if bad := (~embeddings.flatten(1).isfinite().all(1)).nonzero()[:, 0].tolist():
        row = rows[bad[0]]
        raise InputError(
            f"teacher {teacher.name!r} gives NaN or infinity for {len(bad)} of {len(rows)} "
            f"samples, first {dataset.ids[row]!r} (row {row} of {dataset.name}): remove the "
            "sample, check the teacher's weights, or compute in float32 (--device cpu, without "
            "--use_fp16)"
        )


def _write(
    writer: EmbeddingWriter,
    dataset: Dataset,
    embed: Embed,
    loaded: Iterable[Batch],
    progress: Progress,
) -> None:
    total = writer.rows
    before = total - sum(stop - start for start, stop in writer.missing)
    noun = NOUNS[dataset.kind]
    began = time.perf_counter()
    done = n_readable = n_decoded = 0
    problem: UnreadableSample | None = None

    def append(rows: Sequence[int], read: Callable[[], Tensor]) -> None:
        embeddings = read()
        check_finite(embeddings, rows, dataset, embed.teacher)
        writer.append(embeddings, torch.tensor(rows))

    # One batch behind: a GPU computes the next batch while the last one is written.
    last: tuple[Sequence[int], Callable[[], Tensor]] | None = None
    for batch in loaded:
        rows = [*batch.rows, *(row for row, _ in batch.unreadable)]
        done += sum(map(writer.lacks, rows))  # a batch may reach into shards that are stored
        n_decoded += len(rows)
        current = None
        if batch.samples is not None:
            try:
                current = batch.rows, _copy_to_cpu(embed(batch.samples).to(writer.dtype))
            except Exception as error:  # the teacher may be the user's
                first, final = (dataset.ids[row] for row in (batch.rows[0], batch.rows[-1]))
                raise ExtractionFailed(
                    f"teacher {embed.teacher.name!r} fails on the batch of {first} to {final}: "
                    f"{type(error).__name__}: {error}"
                ) from error
        if last is not None:
            append(*last)
        last = current
        for row, problem in batch.unreadable:
            if not isinstance(dataset, FeatureDataset):  # `usage` names the rows of features
                logger.warning("unreadable %s left out: %s", noun, problem)
            writer.skip(row, problem.id, problem.reason)
        n_readable += len(batch.rows)
        rate = n_decoded / max(time.perf_counter() - began, 1e-9)
        progress("extract", min(total, before + done), total, {f"{noun}s/s": rate})
    if last is not None:
        append(*last)
    if not n_readable and not before and total == len(dataset):
        raise InputError(
            f"not one of the {total} {noun}s of DATASET {dataset.name} can be used; the last "
            f"error: {problem}"
        )


def _copy_to_cpu(embeddings: Tensor) -> Callable[[], Tensor]:
    """Start the copy to the CPU; return a function that waits for this copy and returns it."""
    if embeddings.device.type != "cuda":
        return embeddings.cpu
    copy, copied = embeddings.to("cpu", non_blocking=True), torch.cuda.Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return copy

    return wait


class Embed:
    """Compute embeddings in the teacher's precision, and halve batches when memory runs out."""

    def __init__(self, teacher: Teacher, precision: Precision, batch_size: int) -> None:
        self.teacher = teacher
        self.limit = batch_size
        self.autocast = torch.autocast(
            precision.device.type,
            dtype=precision.teacher,
            enabled=precision.teacher != torch.float32,
        )

    def __call__(self, samples: Tensor | list[Tensor]) -> Tensor:
        """Return what the teacher embeds the prepared samples of a batch as."""
        if isinstance(self.teacher, Features):
            assert isinstance(samples, Tensor)
            return samples
        if isinstance(samples, Tensor):
            return self._in_pieces(samples)
        # Samples of similar length need the least padding; the longest first need the most memory.
        order = sorted(range(len(samples)), key=lambda i: -len(samples[i]))
        embeddings = self._in_pieces([samples[i] for i in order])
        in_order = torch.empty_like(embeddings)
        in_order[order] = embeddings
        return in_order

    def _in_pieces(self, samples: Tensor | list[Tensor]) -> Tensor:
        while True:
            starts = range(0, len(samples), self.limit)
            try:
                with torch.inference_mode(), self.autocast:
                    pieces = [self.teacher.embed(samples[i : i + self.limit]) for i in starts]
                return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if self.limit == 1:
                    kind = self.teacher.kind
                    way = "lower --image_size, or " if kind == "image" else ""
                    raise RuntimeError(
                        f"teacher {self.teacher.name!r} runs out of memory on a single "
                        f"{NOUNS[kind]}: {way}choose a smaller --teacher or another --device"
                    ) from error
            # Outside the except block, where the traceback no longer holds the tensors.
            self.limit = max(1, min(self.limit, len(samples)) // 2)
            noun = NOUNS[self.teacher.kind]
            logger.warning(
                "out of memory: the teacher now embeds %d %ss at a time", self.limit, noun
            )
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _load_between(
    dataset: Dataset, teacher: Teacher, batches: Sequence[range], workers: int
) -> Generator[Batch, None, None]:
    """Decode each batch when it is requested, with several threads.

    A teacher on the CPU uses every core. Decoding at the same time would delay its threads and
    cost 9 to 13 % of the time; decoding between batches costs 2 to 4 %.
    """
    with ThreadPoolExecutor(workers or torch.get_num_threads(), "decode") as pool:
        for rows in batches:
            yield _load(dataset, teacher, rows, pool.map)


def _load_ahead(
    dataset: Dataset, teacher: Teacher, batches: Sequence[range], workers: int
) -> Generator[Batch, None, None]:
    """Yield batches in order, while threads decode the next few (PIL releases Python's lock)."""
    workers = workers or min(16, os.cpu_count() or 1)

    def load(rows: range) -> Batch:
        batch = _load(dataset, teacher, rows, map)
        if torch.cuda.is_available() and isinstance(batch.samples, Tensor):
            return batch._replace(samples=batch.samples.pin_memory())
        return batch

    pool = ThreadPoolExecutor(workers, "decode")
    queue: deque[Future[Batch]] = deque()
    try:
        for rows in batches:
            queue.append(pool.submit(load, rows))
            if len(queue) > workers + 1:
                yield queue.popleft().result()
        while queue:
            yield queue.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _load(
    dataset: Dataset, teacher: Teacher, rows: range, map_rows: Callable[..., Iterable[Any]]
) -> Batch:
    """Read a batch of rows; `map_rows` is `map` or a thread pool's `map`."""
    if isinstance(dataset, FeatureDataset):
        missing = [row for row in rows if row in dataset.missing]
        kept = [row for row in rows if row not in dataset.missing]
        with np.errstate(over="ignore"):  # overflow becomes infinity, which is missing
            block = np.array(dataset.features[rows.start : rows.stop], dtype=np.float32)
        release_pages(dataset.features)
        left_out = [(r, UnreadableSample(dataset.ids[r], dataset.missing[r])) for r in missing]
        if missing:
            block = block[np.array(kept, dtype=np.int64) - rows.start]
        return Batch(kept, torch.from_numpy(block) if kept else None, left_out)
    arrays = dataset.arrays if isinstance(dataset, ImageDataset) else None
    if isinstance(teacher, Pixels) and arrays is not None and teacher.takes(arrays):
        return Batch(rows, teacher.from_arrays(arrays[rows.start : rows.stop]), [])

    def read(row: int) -> Any:
        try:
            prepared = teacher.preprocess(dataset.sample(row))
        except UnreadableSample as error:
            return UnreadableSample(dataset.ids[row], error.reason)  # a teacher knows no ids
        except Exception as error:  # the teacher may be the user's
            raise ExtractionFailed(
                f"{dataset.ids[row]} (row {row} of {dataset.name}) cannot be prepared for the "
                f"teacher {teacher.name!r}: {type(error).__name__}: {error}"
            ) from error
        if dataset.kind != "image":
            return prepared
        if prepared.ndim != 3:
            raise InputError(
                f"teacher {teacher.name!r} prepares an image as {list(prepared.shape)}; expected "
                "uint8 [channel, height, width]: correct its method preprocess"
            )
        return rearrange(prepared, "channel height width -> height width channel").numpy()

    readable: list[int] = []
    samples: list[Any] = []
    unreadable: list[tuple[int, UnreadableSample]] = []
    for row, sample in zip(rows, map_rows(read, rows), strict=True):
        if isinstance(sample, UnreadableSample):
            unreadable.append((row, sample))
        else:
            samples.append(sample)
            readable.append(row)
    if not samples or dataset.kind != "image":
        return Batch(readable, samples or None, unreadable)
    # NumPy's stack, because torch's would start more threads beside the teacher's; channels last,
    # as images are in memory and as convolutions are fastest.
    batch = torch.from_numpy(np.stack(samples))
    batch = rearrange(batch, "image height width channel -> image channel height width")
    return Batch(readable, batch, unreadable)
