"""Find the samples that are most similar to a text in the space of the teacher's embeddings."""

from __future__ import annotations

import logging
import threading
from functools import cached_property

from ssl_kd.core.errors import InputError
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.teachers.text_side import TextSide, has_text_side, load_text_side

logger = logging.getLogger(__name__)

MOST_FOUND = 48
LONGEST = 2000  # characters of a query
BLOCK = 65_536  # rows of embeddings in memory


class TextSearch:
    """Search the samples of a run by the meaning of a text.

    The teacher is loaded with the first query, on the CPU, in the thread that answers it.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._lock = threading.Lock()
        self._name = str(samples.settings["TEACHER"])

    @property
    def is_possible(self) -> bool:
        """Whether the teacher embeds texts, or has a text encoder that belongs to it."""
        return not self.obstacle

    @property
    def obstacle(self) -> str:
        """Why texts cannot be compared with the samples; empty if they can."""
        settings = self._samples.settings
        token, weights = settings.get("TOKEN", "class"), settings.get("TEACHER_WEIGHTS")
        if has_text_side(self._name, self._samples.kind, token=token, weights=weights):
            return ""
        return (
            f"the teacher {self._name!r} knows no texts, so only words can be searched: train with "
            "--teacher siglip2, clip or open_clip:NAME to search images by a text"
        )

    def find(self, text: str) -> list[tuple[int, float]]:
        """Return the rows of the most similar samples and their cosine, most similar first.

        Raises:
            InputError: the query is empty or too long, or the teacher knows no texts.
            MissingPackage: the teacher needs a package that is not installed.
            TeacherUnavailable: the weights of the teacher are not there.
        """
        text = text.strip()
        if not 0 < len(text) <= LONGEST:
            raise InputError(
                f"the query has {len(text):,} characters; expected 1 to {LONGEST:,} of them"
            )
        if self.obstacle:
            raise InputError(self.obstacle)
        with self._lock:  # the first query loads the teacher, and others wait for it
            side = self._side
            query = side.query(text)
        found: list[tuple[int, float]] = []
        for split, rows in self._samples.splits.items():
            for start, block in self._samples.store(split).blocks(BLOCK):
                similarities = side.similarities(query, block)
                best = similarities.topk(min(MOST_FOUND, len(similarities)))
                numbers = (rows.start + start + best.indices).tolist()
                found += zip(numbers, best.values.tolist(), strict=True)
        return sorted(found, key=lambda pair: -pair[1])[:MOST_FOUND]

    @cached_property
    def _side(self) -> TextSide:
        logger.info("loading the teacher %s to search by text", self._name)
        split = next(iter(self._samples.splits))
        fingerprint = self._samples.store(split).fingerprint
        return load_text_side(self._name, self._samples.kind, fingerprint)
