"""Find the samples of a run that are most similar to a sample or to an image."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from ssl_kd.datasets import open_dataset
from ssl_kd.datasets.decode import decode
from ssl_kd.errors import InputError
from ssl_kd.guard.finite import safe_normalize
from ssl_kd.guard.precision import Precision
from ssl_kd.store.neighbors import nearest_among, search_on
from ssl_kd.teachers import Teacher
from ssl_kd.vision.run import teacher_of
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.settings import VisionSettings

BLOCK = 65_536


class Search:
    """Exact search over all splits of a run, a block of embeddings at a time."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._teacher: Teacher | None = None
        self._lock = threading.Lock()

    def like_sample(self, row: int, k: int) -> list[int]:
        """Return the k samples most similar to another, the most similar first."""
        return self._nearest(self._samples.embeddings([row])[0], k, row)

    def like_image(self, data: bytes, k: int, name: str = "the image") -> list[int]:
        """Return the k samples most similar to an image; the run's teacher embeds it.

        Args:
            data: content of a file: JPEG, PNG, WebP ...
            k: how many.
            name: name of the image in errors.

        Raises:
            UnreadableImage: it is not an image.
            InputError: the run learned from features, so its teacher is unknown.
            TeacherUnavailable: the teacher cannot be loaded.
        """
        image = decode(io.BytesIO(data), name)
        with self._lock:  # requests come in threads, the teacher handles one at a time
            teacher = self._teacher or self._load()
            self._teacher = teacher
            x = teacher.embed(teacher.preprocess(image).unsqueeze(0))[0]
        return self._nearest(x.float().cpu(), k, -1)

    def _load(self) -> Teacher:
        samples = self._samples
        if samples.metrics["teacher"]["name"] == "features":
            raise InputError(
                "the run learned from features: the teacher that embeds images is unknown"
            )
        settings = VisionSettings.from_dict(samples.settings)
        dataset = open_dataset(settings.dataset, "train", root=settings.data_dir)
        return teacher_of(settings, dataset, Precision.for_device("cpu"))

    def _nearest(self, x: Tensor, k: int, excluded: int) -> list[int]:
        def candidates() -> Iterator[tuple[int, Tensor]]:
            for split, rows in self._samples.splits.items():
                for start, block in self._samples.store(split).blocks(BLOCK):
                    yield rows.start + start, safe_normalize(block)

        query, search = safe_normalize(x.unsqueeze(0)), search_on(torch.device("cpu"))
        nearest = nearest_among(query, torch.tensor([excluded]), candidates(), k, search)
        return [row for row in nearest[0].tolist() if row != excluded]
