"""Images for a teacher: decoded by threads, in order, between its batches or ahead of them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssl_kd.datasets import FeatureDataset, ImageDataset, UnreadableImage
from ssl_kd.errors import InputError, UserError
from ssl_kd.files import release_pages
from ssl_kd.teachers import Pixels, Teacher


class ExtractionFailed(UserError, RuntimeError):
    """A teacher failed; the message names the sample, or the first and last of the batch."""


class Batch(NamedTuple):
    """Some rows of a data set, decoded."""

    rows: Sequence[int]
    images: Tensor | None  # of the rows that could be read
    unreadable: Sequence[tuple[int, UnreadableImage]]


def threads_ahead(workers: int) -> int:
    """How many threads decode ahead of a GPU's teacher; `workers` 0: up to 16."""
    return workers or min(16, os.cpu_count() or 1)


def load(
    dataset: ImageDataset | FeatureDataset,
    teacher: Teacher,
    batches: Sequence[range],
    workers: int,
    *,
    ahead: bool,
) -> Generator[Batch, None, None]:
    """The batches, in order.

    Args:
        dataset: images, or features.
        teacher: says how an image is prepared.
        batches: rows of the data set.
        workers: threads that decode; 0 chooses.
        ahead: decode while the teacher, on a GPU, computes; else between its batches.

    Raises:
        ExtractionFailed: the teacher cannot prepare an image that can be read.
    """
    return (_load_ahead if ahead else _load_between)(dataset, teacher, batches, workers)


def _load_between(
    dataset: ImageDataset | FeatureDataset, teacher: Teacher, batches: Sequence[range], workers: int
) -> Generator[Batch, None, None]:
    """Decode each batch when it is asked for, its images by several threads.

    While a teacher computes on every core, decoding would delay all its threads at each of their
    barriers: 9 to 13 % instead of 2 to 4 % of the time.
    """
    with ThreadPoolExecutor(workers or torch.get_num_threads(), "decode") as pool:
        for rows in batches:
            yield _load(dataset, teacher, rows, pool.map)


def _load_ahead(
    dataset: ImageDataset | FeatureDataset, teacher: Teacher, batches: Sequence[range], workers: int
) -> Generator[Batch, None, None]:
    """Decode batches in order, by threads (PIL lets go of the interpreter), a few ahead."""
    workers = threads_ahead(workers)

    def load(rows: range) -> Batch:
        batch = _load(dataset, teacher, rows, map)
        if torch.cuda.is_available() and batch.images is not None:
            return batch._replace(images=batch.images.pin_memory())
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
    dataset: ImageDataset | FeatureDataset,
    teacher: Teacher,
    rows: range,
    each: Callable[..., Iterable[Any]],
) -> Batch:
    """Read some rows; `each` is `map`, or a thread pool's."""
    if isinstance(dataset, FeatureDataset):
        with np.errstate(over="ignore"):  # beyond float32 is infinite, which is an error later
            block = np.array(dataset.features[rows.start : rows.stop], dtype=np.float32)
        release_pages(dataset.features)
        return Batch(rows, torch.from_numpy(block), [])
    if isinstance(teacher, Pixels) and dataset.arrays is not None and teacher.takes(dataset.arrays):
        return Batch(rows, teacher.from_arrays(dataset.arrays[rows.start : rows.stop]), [])

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
        return Batch(kept, None, unreadable)
    # NumPy's stack, because torch's would start more threads beside the teacher's; channels last,
    # as images are in memory and as convolutions are fastest.
    return Batch(kept, torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2), unreadable)
