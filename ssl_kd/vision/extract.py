"""Embed a data set once, into the store: decoding ahead, resuming, naming what is wrong."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssl_kd.datasets import FeatureDataset, ImageDataset, UnreadableImage
from ssl_kd.datasets.text import first_few
from ssl_kd.errors import InputError, UserError
from ssl_kd.guard.memory import is_out_of_memory
from ssl_kd.guard.precision import Precision, undisturbed
from ssl_kd.store import EmbeddingStore, EmbeddingWriter, Fingerprint, FingerprintMismatch
from ssl_kd.teachers import Features, Pixels, Teacher

__all__ = ["ExtractProgress", "extract", "fingerprint"]

logger = logging.getLogger(__name__)

_FEATURE_ROWS = 8192


class ExtractionFailed(UserError, RuntimeError):
    """A teacher failed; the message names the sample, or the first and last of the batch."""


class ExtractProgress(NamedTuple):
    """How far an extraction is.

    Attributes:
        done: samples handled, those of an earlier, interrupted run included.
        total: samples of the data set.
        images_per_second: mean rate of this run.
        seconds_left: at that rate.
    """

    done: int
    total: int
    images_per_second: float
    seconds_left: float


class _Batch(NamedTuple):
    rows: Sequence[int]
    images: Tensor | None  # of the rows that could be read
    unreadable: Sequence[tuple[int, UnreadableImage]]


def fingerprint(
    dataset: ImageDataset | FeatureDataset, teacher: Teacher, precision: Precision
) -> Fingerprint:
    """What embeddings of this data set by this teacher depend on."""
    plain = isinstance(teacher, Pixels | Features)
    dtype = torch.float32 if plain else precision.teacher
    return Fingerprint(
        teacher=teacher.name,
        weights=teacher.weights_id,
        transform=teacher.transform_id,
        dtype=str(dtype).removeprefix("torch."),
        data=dataset.fingerprint,
    )


@undisturbed()
def extract(
    dataset: ImageDataset | FeatureDataset,
    teacher: Teacher,
    folder: str | os.PathLike[str],
    *,
    split: str,
    precision: Precision,
    batch_size: int = 64,
    workers: int = 0,
    force: bool = False,
    exclude_bad: bool = False,
    shard_rows: int | None = None,
    progress: Callable[[ExtractProgress], None] | None = None,
) -> EmbeddingStore:
    """Open the embeddings of a data set, computing those that are not in the store yet.

    A complete cache is verified and opened; an interrupted one continues after its last complete
    shard, in the same batches, so the result does not depend on where it was interrupted. An image
    that cannot be read is left out and listed under `unreadable` in the manifest.

    Args:
        dataset: images, or features for the teacher `features`.
        teacher: is moved to `precision.device`.
        folder: where the cache is.
        split: `train` or `test`, part of the file names.
        precision: device and dtype of the teacher.
        batch_size: images per forward pass; halved whenever memory runs out.
        workers: threads that decode, ahead of a GPU's teacher or between the batches of a CPU's; 0
            chooses: up to 16, or as many as torch uses.
        force: replace a cache of something else, and rebuild damaged shards.
        exclude_bad: leave out samples whose embedding is not finite or out of range.
        shard_rows: samples per shard; None: about 256 MiB.
        progress: called after each batch.

    Returns:
        The store, embeddings in float32.

    Raises:
        ExtractionFailed: the teacher does, with a sample or a batch that the message names.
        ValueError: teacher and data set do not go together; an embedding is not finite (the
            message names the sample); not one image can be read.
        FingerprintMismatch, CorruptFileError, NonFiniteRow: what is cached is of something else,
            damaged or bad, and not `force`.
    """
    if isinstance(teacher, Features) != isinstance(dataset, FeatureDataset):
        raise InputError(
            f"data set {dataset.name!r} and teacher {teacher.name!r} do not go together: feature "
            "files need --teacher features, images any other"
        )
    if isinstance(dataset, FeatureDataset) and dataset.features.shape[1] != teacher.dim:
        raise InputError(
            f"the features of {dataset.name} have {dataset.features.shape[1]} dimensions, those "
            f"to learn from {teacher.dim}: both must be of one teacher"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    expected = fingerprint(dataset, teacher, precision)
    if not force:
        try:
            store = _open(dataset, Path(folder), split, expected, exclude_bad)
            _name_left_out(store, dataset)
            return store
        except FileNotFoundError:
            pass
    if isinstance(dataset, FeatureDataset):
        batch_size = _FEATURE_ROWS
    with EmbeddingWriter(
        Path(folder),
        split,
        expected,
        len(dataset),
        teacher.dim,
        labels=None if dataset.labels is None else torch.from_numpy(dataset.labels),
        ids=dataset.ids,
        class_names=dataset.class_names,
        shard_rows=shard_rows,
        force=force,
        exclude_bad=exclude_bad,
        back=partial(_is_back, dataset),
    ) as writer:
        if batches := writer.batches(batch_size):
            teacher.to(precision.device)
            embed = _Embed(teacher, precision, batch_size)
            on_cpu = precision.device.type == "cpu"
            load = _load_between if on_cpu else _load_ahead
            with closing(load(dataset, teacher, batches, workers)) as loaded:
                _write(writer, dataset, embed, loaded, progress)
        store = writer.close()
    _name_left_out(store, dataset)
    return store


def _name_left_out(store: EmbeddingStore, dataset: ImageDataset | FeatureDataset) -> None:
    left_out = store.manifest["unreadable"]
    if left_out:
        named = [f"{entry['id']} ({entry['reason']})" for entry in left_out]
        logger.warning(
            "%d of %d samples of %s are left out: %s. %s lists them",
            len(left_out),
            store.manifest["n"],
            store.split,
            "; ".join(first_few(named, 5)),
            store.folder / f"{store.name}.json",
        )
    if back := [entry["id"] for entry in left_out if _is_back(dataset, entry)]:
        logger.warning(
            "%d of them can be read now, the first is %s: --force-recompute embeds them",
            len(back),
            back[0],
        )


def _is_back(dataset: ImageDataset | FeatureDataset, entry: dict[str, Any]) -> bool:
    """Whether an image that could not be read can be now."""
    if isinstance(dataset, FeatureDataset) or entry["reason"].startswith("embedding is "):
        return False  # of another kind: its row was not finite
    try:
        dataset.image(entry["row"])
    except UnreadableImage:
        return False
    return True


def _open(
    dataset: ImageDataset | FeatureDataset,
    folder: Path,
    split: str,
    expected: Fingerprint,
    exclude_bad: bool,
) -> EmbeddingStore:
    """The cache, also one whose version compared a sample of large data only."""
    try:
        return EmbeddingStore.open(folder, split, expect=expected, exclude_bad=exclude_bad)
    except FingerprintMismatch as mismatch:
        expected = replace(expected, data=dataset.older_fingerprint)
        try:
            store = EmbeddingStore.open(folder, split, expect=expected, exclude_bad=exclude_bad)
        except FingerprintMismatch:
            raise mismatch from None
    logger.warning(
        "%s, %s: an earlier version made this cache and compared a sample of the data only; a "
        "change elsewhere in the data would go unseen. --force-recompute makes sure",
        folder,
        split,
    )
    return store


def _write(
    writer: EmbeddingWriter,
    dataset: ImageDataset | FeatureDataset,
    embed: _Embed,
    loaded: Iterator[_Batch],
    progress: Callable[[ExtractProgress], None] | None,
) -> None:
    total = len(dataset)
    before = total - sum(stop - start for start, stop in writer.missing)
    began = time.perf_counter()
    seen = given = 0
    problem: UnreadableImage | None = None

    def store(rows: Sequence[int], embeddings: Tensor) -> None:
        embeddings = embeddings.cpu()
        bad = (~embeddings.isfinite().all(1)).nonzero()[:, 0].tolist()
        if bad and not writer.exclude_bad:
            row = rows[bad[0]]
            raise InputError(
                f"teacher {embed.teacher.name!r} gives NaN or infinity for {len(bad)} of "
                f"{len(rows)} samples, first {dataset.ids[row]!r} (row {row} of {dataset.name}): "
                "take the sample out, check the weights, or compute in float32 (DEVICE cpu, "
                "USE_FP16 False)"
            )
        writer.append(embeddings, torch.tensor(rows))

    # One batch behind: a GPU computes the next batch while the last one is copied and written.
    last: tuple[Sequence[int], Tensor] | None = None
    for batch in loaded:
        current = None
        if batch.images is not None:
            try:
                current = batch.rows, embed(batch.images)
            except Exception as error:  # a teacher may be of a user's own
                first, final = (dataset.ids[row] for row in (batch.rows[0], batch.rows[-1]))
                raise ExtractionFailed(
                    f"teacher {embed.teacher.name!r} fails in the batch of {first} to {final}: "
                    f"{type(error).__name__}: {error}"
                ) from error
        if last is not None:
            store(*last)
        last = current
        for row, problem in batch.unreadable:
            logger.warning("left out: %s", problem)
            writer.skip(row, problem.id, problem.reason)
        given += len(batch.rows)
        seen += len(batch.rows) + len(batch.unreadable)
        if progress is not None:
            done = min(total, before + seen)
            rate = seen / max(time.perf_counter() - began, 1e-9)
            progress(ExtractProgress(done, total, rate, (total - done) / rate))
    if last is not None:
        store(*last)
    if not given and not before:
        raise InputError(f"not one of the {total} images of {dataset.name} can be read: {problem}")


class _Embed:
    """The teacher's forward pass, in its precision, in as many pieces as memory asks for."""

    def __init__(self, teacher: Teacher, precision: Precision, batch_size: int) -> None:
        self.teacher = teacher
        self.limit = batch_size
        self.autocast = torch.autocast(
            precision.device.type,
            dtype=precision.teacher,
            enabled=precision.teacher != torch.float32,
        )

    def __call__(self, images: Tensor) -> Tensor:
        if isinstance(self.teacher, Features):
            return images
        while True:
            try:
                with torch.inference_mode(), self.autocast:
                    pieces = [self.teacher.embed(piece) for piece in images.split(self.limit)]
                return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if self.limit == 1:
                    raise RuntimeError(
                        f"teacher {self.teacher.name!r} does not fit into memory with one image: "
                        "lower IMAGE_SIZE, or take a smaller teacher or another DEVICE"
                    ) from error
            # Outside the except block, where the traceback no longer holds the tensors.
            self.limit = max(1, min(self.limit, len(images)) // 2)
            logger.warning("out of memory: the teacher's batch is now %d images", self.limit)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _load_between(
    dataset: ImageDataset | FeatureDataset,
    teacher: Teacher,
    batches: Sequence[range],
    workers: int,
) -> Generator[_Batch, None, None]:
    """Decode each batch when it is asked for, its images by several threads.

    While a teacher computes on every core, decoding would delay all its threads at each of their
    barriers: 9 to 13 % instead of 2 to 4 % of the time.
    """
    with ThreadPoolExecutor(workers or torch.get_num_threads(), "decode") as pool:
        for rows in batches:
            yield _load(dataset, teacher, rows, pool.map)


def _load_ahead(
    dataset: ImageDataset | FeatureDataset,
    teacher: Teacher,
    batches: Sequence[range],
    workers: int,
) -> Generator[_Batch, None, None]:
    """Decode batches in order, by threads (PIL lets go of the interpreter), a few ahead."""
    workers = workers or min(16, os.cpu_count() or 1)

    def load(rows: range) -> _Batch:
        batch = _load(dataset, teacher, rows, map)
        if torch.cuda.is_available() and batch.images is not None:
            return batch._replace(images=batch.images.pin_memory())
        return batch

    pool = ThreadPoolExecutor(workers, "decode")
    queue: deque[Future[_Batch]] = deque()
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
    dataset: ImageDataset | FeatureDataset,
    teacher: Teacher,
    rows: range,
    each: Callable[..., Iterable[Any]],
) -> _Batch:
    """Read some rows; `each` is `map`, or a thread pool's."""
    if isinstance(dataset, FeatureDataset):
        with np.errstate(over="ignore"):  # beyond float32 is infinite, which is an error later
            block = np.array(dataset.features[rows.start : rows.stop], dtype=np.float32)
        return _Batch(rows, torch.from_numpy(block), [])
    if isinstance(teacher, Pixels) and dataset.arrays is not None and teacher.takes(dataset.arrays):
        return _Batch(rows, teacher.from_arrays(dataset.arrays[rows.start : rows.stop]), [])

    def read(row: int) -> np.ndarray | UnreadableImage:
        try:
            image = teacher.preprocess(dataset.image(row))
        except UnreadableImage as error:
            return error
        except Exception as error:  # a teacher may be of a user's own
            raise ExtractionFailed(
                f"{dataset.ids[row]} (row {row} of {dataset.name}) cannot be prepared for the "
                f"teacher {teacher.name!r}: {type(error).__name__}: {error}"
            ) from error
        if image.ndim != 3:
            raise InputError(
                f"teacher {teacher.name!r} prepares an image as {list(image.shape)}; its preprocess"
                " must return uint8 [channel, height, width]"
            )
        return image.permute(1, 2, 0).numpy()

    kept: list[int] = []
    images: list[Any] = []
    unreadable: list[tuple[int, UnreadableImage]] = []
    for row, found in zip(rows, each(read, rows), strict=True):
        if isinstance(found, UnreadableImage):
            unreadable.append((row, found))
        else:
            images.append(found)
            kept.append(row)
    if not images:
        return _Batch(kept, None, unreadable)
    # NumPy's stack, because torch's would start more threads beside the teacher's; channels last,
    # as images are in memory and as convolutions are fastest.
    return _Batch(kept, torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2), unreadable)
