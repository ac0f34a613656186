"""Define what a teacher is loaded from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ssl_kd.core.errors import InputError
from ssl_kd.vision.teachers.weights import State, read_weights


@dataclass(frozen=True)
class Request:
    """A teacher to load: its name, and the settings that apply to it.

    Attributes:
        name: value of the setting TEACHER.
        weights: local file of the weights; None: the published ones.
        image_size: side of the input in pixels; None: the model's own.
        token: which output of the network is the embedding.
        dataset: data to embed, if they are known.
    """

    name: str
    weights: str | os.PathLike[str] | None = None
    image_size: int | None = None
    token: str = "class"
    dataset: Any = None

    @property
    def model(self) -> str:
        """The name after the first colon, as in `timm:NAME`."""
        return self.name.partition(":")[2]

    def read_state(self) -> State | None:
        """Return the tensors in the file of the weights; None if the published ones are used."""
        return None if self.weights is None else read_weights(self.weights)

    def refuse_weights(self, why: str) -> None:
        """Raise InputError if TEACHER_WEIGHTS is set; `why` follows the teacher's name."""
        if self.weights is not None:
            raise InputError(
                f"TEACHER_WEIGHTS is {os.fspath(self.weights)}, but the teacher {self.name!r} "
                f"{why}: leave TEACHER_WEIGHTS at None"
            )

    def refuse_token(self, why: str) -> None:
        """Raise InputError if TOKEN is set; `why` follows the teacher's name."""
        if self.token != "class":
            raise InputError(
                f"TOKEN is {self.token!r}, but the teacher {self.name!r} {why}: leave TOKEN at "
                "'class'"
            )

    def refuse_image_options(self) -> None:
        """Raise InputError if a setting is set that only teachers of images have."""
        self.refuse_weights("has its own; a local model is hf:FOLDER")
        self.refuse_token("embeds no images")
        if self.image_size is not None:
            raise InputError(
                f"IMAGE_SIZE is {self.image_size!r}, but the teacher {self.name!r} embeds no "
                "images: leave IMAGE_SIZE at None"
            )
