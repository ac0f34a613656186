"""Embed a data set once, into the store: decoding ahead, resuming, naming what is wrong."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssl_kd.datasets import FeatureDataset, ImageDataset, UnreadableImage
from ssl_kd.datasets.text import first_few
from ssl_kd.errors import InputError
from ssl_kd.guard.memory import is_out_of_memory
from ssl_kd.guard.precision import Precision, default_torch_state
from ssl_kd.store import EmbeddingStore, EmbeddingWriter, Fingerprint
from ssl_kd.store.shards import Manifest
from ssl_kd.teachers import Features, Pixels, Teacher
from ssl_kd.vision.decode_pace import Clocked, Pace, keeping_up
from ssl_kd.vision.loading import Batch, ExtractionFailed, load, threads_ahead

logger = logging.getLogger(__name__)

_FEATURE_ROWS = 8192


class ExtractProgress(NamedTuple):
    """How far an extraction is.

    Attributes:
        done: samples handled, those of an earlier, interrupted run included.
        total: samples of the data set, or of a process's share of it.
        images_per_second: mean rate of this run.
        seconds_left: at that rate.
    """

    done: int
    total: int
    images_per_second: float
    seconds_left: float


class Share(NamedTuple):
    """What came of one process's share of an extraction.

    Attributes:
        shards: numbers of the shards in the whole data set that were this process's.
        computed: those of them that it computed now; the others were there.
        rows: how many samples are in these shards.
        n_shards: how many there are in all.
        manifest: of the cache, if it is complete; None while other processes' shards are missing.
        waited: what a GPU's teacher lost by waiting for images, a sentence; None: little.
    """

    shards: list[int]
    computed: list[int]
    rows: int
    n_shards: int
    manifest: Manifest | None
    waited: str | None


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


@default_torch_state()
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
    rebuild: bool = False,
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
        force: embed all of it, whatever is cached; that stays until the new cache is whole.
        rebuild: embed damaged shards again, and those that lack a sample which can be read now.
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
            damaged or bad, and not `force`; `rebuild` mends the last two.
    """
    _check(dataset, teacher, batch_size)
    expected, began = fingerprint(dataset, teacher, precision), time.perf_counter()
    if not (force or rebuild):
        try:
            store = EmbeddingStore.open(
                Path(folder), split, expect=expected, exclude_bad=exclude_bad
            )
            _name_left_out(store.manifest, store.folder, dataset)
            return _labelled(store, dataset)
        except FileNotFoundError:
            pass
    form = {"shard_rows": shard_rows, "exclude_bad": exclude_bad}
    form |= {"force": force, "rebuild": rebuild}
    with _writer(dataset, teacher, folder, split, expected, **form) as writer:
        waited = _fill(writer, dataset, teacher, precision, batch_size, workers, progress)
        store = writer.close()
    if force:
        _say_anew(store.n, split, store.folder, began)
    if waited:
        logger.info("%s", waited)
    _name_left_out(store.manifest, store.folder, dataset)
    return _labelled(store, dataset)


@default_torch_state()
def extract_share(  # noqa: D417, the others are those of `extract`
    dataset: ImageDataset | FeatureDataset,
    teacher: Teacher,
    folder: str | os.PathLike[str],
    only: slice,
    *,
    split: str,
    precision: Precision,
    batch_size: int = 64,
    workers: int = 0,
    force: bool = False,
    rebuild: bool = False,
    shard_rows: int | None = None,
    progress: Callable[[ExtractProgress], None] | None = None,
) -> Share:
    """Compute those of some shards that are not in the store yet, beside other processes.

    Any number of processes, on any machines that see the folder, may be at work on the same data,
    begin at any time, be killed and begin again, and have shards in common: the bytes are those of
    `extract`. Who sees that all shards are there makes the cache visible. Each verifies its own
    shards alone. The other arguments are those of `extract`, the same in every process.

    Args:
        only: the numbers of the shards: `slice(rank, None, world)`, `slice(k, k + 1)`.
        shard_rows: samples per shard; the first process to begin decides.
        force: embed these shards, whatever is cached; every process of them needs it.
        progress: called after each batch, with rows of these shards.

    Raises:
        ExtractionFailed, ValueError, FingerprintMismatch, CorruptFileError: as `extract`.
        LockHeld: a process changes the cache's manifest for minutes.
    """
    _check(dataset, teacher, batch_size)
    expected, began = fingerprint(dataset, teacher, precision), time.perf_counter()
    form = {"shard_rows": shard_rows, "only": only, "force": force, "rebuild": rebuild}
    with _writer(dataset, teacher, folder, split, expected, **form) as writer:
        computed = writer.absent
        waited = _fill(writer, dataset, teacher, precision, batch_size, workers, progress)
        manifest = writer.publish()
        shards, n = list(writer.shards), writer.n_shards
        share = Share(shards, computed, writer.rows, n, manifest, waited)
    if force:
        _say_anew(share.rows, split, Path(folder), began)
    if manifest is not None:
        if not manifest["statistics"]["rows"]:
            raise InputError(f"not one of the {len(dataset)} images of {dataset.name} can be read")
        if computed:
            _name_left_out(manifest, Path(folder), dataset)
    return share


def _say_anew(n: int, split: str, folder: Path, began: float) -> None:
    seconds = time.perf_counter() - began
    logger.info("%d samples of %s were embedded anew in %.1f s: %s", n, split, seconds, folder)


def _labelled(store: EmbeddingStore, dataset: ImageDataset | FeatureDataset) -> EmbeddingStore:
    """The store with the labels that this run asks for, which an earlier one may not have."""
    labels = None if dataset.labels is None else torch.from_numpy(dataset.labels)[store.indices]
    store.relabel(labels, dataset.class_names)
    return store


def _check(dataset: ImageDataset | FeatureDataset, teacher: Teacher, batch_size: int) -> None:
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


def _writer(
    dataset: ImageDataset | FeatureDataset,
    teacher: Teacher,
    folder: str | os.PathLike[str],
    split: str,
    expected: Fingerprint,
    **form: Any,
) -> EmbeddingWriter:
    return EmbeddingWriter(
        Path(folder),
        split,
        expected,
        len(dataset),
        teacher.dim,
        dtype=None,  # what the teacher computes in
        labels=None if dataset.labels is None else torch.from_numpy(dataset.labels),
        ids=dataset.ids,
        class_names=dataset.class_names,
        back=partial(_is_back, dataset),
        **form,
    )


def _fill(
    writer: EmbeddingWriter,
    dataset: ImageDataset | FeatureDataset,
    teacher: Teacher,
    precision: Precision,
    batch_size: int,
    workers: int,
    progress: Callable[[ExtractProgress], None] | None,
) -> str | None:
    """Compute what the writer lacks; return what was lost by waiting for images, in words."""
    if isinstance(dataset, FeatureDataset):
        batch_size = _FEATURE_ROWS
    batches = writer.batches(batch_size)
    if not batches:
        return None
    teacher.to(precision.device)
    embed = _Embed(teacher, precision, batch_size)
    ahead = precision.device.type != "cpu"
    pace = Pace()
    with closing(load(dataset, teacher, batches, workers, ahead=ahead)) as loaded:
        _write(writer, dataset, embed, pace.each(loaded), progress)
    if embed.clocked is None:
        return None
    threads = threads_ahead(workers)
    return keeping_up(pace.images, pace.seconds, pace.waited, embed.clocked.seconds(), threads)


def _name_left_out(
    manifest: Manifest, folder: Path, dataset: ImageDataset | FeatureDataset
) -> None:
    left_out = manifest["unreadable"]
    if left_out:
        named = [f"{entry['id']} ({entry['reason']})" for entry in left_out]
        logger.warning(
            "%d of %d samples of %s are left out: %s. %s lists them",
            len(left_out),
            manifest["n"],
            manifest["split"],
            "; ".join(first_few(named, 5)),
            folder / f"embeddings_{manifest['split']}.json",
        )
    if back := [entry["id"] for entry in left_out if _is_back(dataset, entry)]:
        logger.warning(
            "%d of them can be read now, the first is %s: --rebuild_damaged embeds them",
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


def _write(
    writer: EmbeddingWriter,
    dataset: ImageDataset | FeatureDataset,
    embed: _Embed,
    loaded: Iterator[Batch],
    progress: Callable[[ExtractProgress], None] | None,
) -> None:
    total = writer.rows
    before = total - sum(stop - start for start, stop in writer.missing)
    began = time.perf_counter()
    seen = given = decoded = 0
    problem: UnreadableImage | None = None

    def store(rows: Sequence[int], arrived: Callable[[], Tensor]) -> None:
        embeddings = arrived()
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

    # One batch behind: a GPU computes the next batch while the last one is written.
    last: tuple[Sequence[int], Callable[[], Tensor]] | None = None
    for batch in loaded:
        rows = [*batch.rows, *(row for row, _ in batch.unreadable)]
        seen += sum(map(writer.lacks, rows))  # a batch may reach into shards that are stored
        decoded += len(rows)
        current = None
        if batch.images is not None:
            try:
                current = batch.rows, _sent_back(embed(batch.images).to(writer.dtype))
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
        if progress is not None:
            done = min(total, before + seen)
            rate = decoded / max(time.perf_counter() - began, 1e-9)
            progress(ExtractProgress(done, total, rate, (total - done) / rate))
    if last is not None:
        store(*last)
    if not given and not before and total == len(dataset):
        raise InputError(f"not one of the {total} images of {dataset.name} can be read: {problem}")


def _sent_back(embeddings: Tensor) -> Callable[[], Tensor]:
    """Start their copy to the CPU; what is returned waits for it, and for nothing behind it."""
    if embeddings.device.type != "cuda":
        return embeddings.cpu
    here, copied = embeddings.to("cpu", non_blocking=True), torch.cuda.Event()
    copied.record()

    def arrived() -> Tensor:
        copied.synchronize()
        return here

    return arrived


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
        self.clocked = Clocked(precision.device) if precision.device.type == "cuda" else None

    def __call__(self, images: Tensor) -> Tensor:
        if isinstance(self.teacher, Features):
            return images
        with self.clocked or nullcontext():
            return self._in_pieces(images)

    def _in_pieces(self, images: Tensor) -> Tensor:
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
