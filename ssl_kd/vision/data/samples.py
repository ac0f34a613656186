"""Define a data set of samples that a teacher embeds: images, texts or sounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ssl_kd.vision.data.usage import LeftOut, Usage, counted

NOUNS = {"image": "image", "text": "text", "audio": "sound", "features": "row"}
"""Kind of samples -> what messages call one of them."""


@dataclass(eq=False)
class SampleDataset:
    """A data set of samples of one `kind` with names and, if known, classes.

    `kind` is `image`, `text` or `audio`; a teacher embeds samples of its own kind.
    """

    name: str  # name or path
    split: str  # train or test
    ids: Sequence[str]  # unique; for folders the path relative to the root
    labels: np.ndarray | None  # int64 [n], -1 where unknown; None if no sample is labeled
    class_names: tuple[str, ...] | None
    fingerprint: str  # SHA-256 of the content
    left_out: Sequence[LeftOut] = ()  # what of the source is not in the data set

    kind: ClassVar[str]

    @property
    def pictured(self) -> bool:
        """Whether the samples are images."""
        return self.kind == "image"

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def usage(self) -> Usage:
        """What of the source is used, and what is left out."""
        used = counted(len(self), NOUNS[self.kind])
        if self.class_names is not None:
            used += f" of {counted(len(self.class_names), 'class', 'classes')}"
        return Usage(used, self.left_out)

    def file(self, i: int) -> Path | None:
        """Return the file of sample `i`, which is not read; None if it is no separate file."""
        return None

    def sample(self, i: int) -> Any:
        """Read sample `i` as the teacher gets it: an image, a text or a `Sound`.

        Raises:
            UnreadableSample: the sample cannot be read; the message says why.
        """
        raise NotImplementedError
