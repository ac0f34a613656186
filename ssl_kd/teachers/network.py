"""Wrap a frozen network as a teacher, together with the preprocessing it was trained with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ssl_kd.errors import InputError, brief
from ssl_kd.teachers.base import Teacher
from ssl_kd.teachers.weights import weights_id

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_MAX_ASPECT = 4


@dataclass(frozen=True)
class Transform:
    """Resize an image, crop its center, and normalize it.

    Attributes:
        size: side of the square input of the network, in pixels.
        resize: length of the shorter side before the crop, in pixels.
        interpolation: `bilinear`, `bicubic` or another PIL filter, in lower case.
        mean: mean of each channel, for pixel values from 0 to 1.
        std: standard deviation of each channel.
        squash: whether to resize both sides to `resize`, ignoring the aspect ratio.
    """

    size: int
    resize: int
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    squash: bool = False

    def __call__(self, image: Image.Image) -> Tensor:
        """Resize and crop a decoded image; return it as uint8 `[3, size, size]`."""
        from torchvision.transforms import functional as F

        image = image.convert("RGB")
        # A 1000 x 1 image would grow to 256,000 x 256 pixels, and the crop keeps only its center.
        limit = _MAX_ASPECT * min(image.size)
        if max(image.size) > limit and not self.squash:
            image = F.center_crop(image, [min(image.height, limit), min(image.width, limit)])  # type: ignore[arg-type, assignment]
        side = [self.resize, self.resize] if self.squash else [self.resize]
        image = F.resize(image, side, F.InterpolationMode(self.interpolation))  # type: ignore[arg-type, assignment]
        image = F.center_crop(image, [self.size, self.size])  # type: ignore[arg-type, assignment]
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def normalize(self, batch: Tensor, out: Tensor | None = None) -> Tensor:
        """Normalize a batch of uint8 images `[image, 3, size, size]`.

        Args:
            batch: output of `__call__`, stacked, on any device.
            out: float32 buffer for the result, with as many elements as `batch`.

        Returns:
            float32 of the same shape, channels last in memory.
        """
        # (x / 255 - mean) / std as one multiplication and one addition per row of pixels:
        # three channels are too short an inner loop (8 times slower).
        n, channels, height, width = batch.shape
        rows = batch.permute(0, 2, 3, 1).reshape(n, height, width * channels)
        rows = rows.float() if out is None else out.view(rows.shape).copy_(rows)
        scale, shift = _affine(self.mean, self.std, width, batch.device)
        torch.addcmul(shift, rows, scale, out=rows)
        return rows.view(n, height, width, channels).permute(0, 3, 1, 2)

    def __str__(self) -> str:
        """Describe the preprocessing in one line, as stored in a cache of embeddings."""
        mode = "squash" if self.squash else "centre"
        mean, std = ([round(v, 4) for v in values] for values in (self.mean, self.std))
        return (
            f"{self.size} px of {self.resize} {self.interpolation} {mode}, mean {mean}, std {std}"
        )


@functools.lru_cache(maxsize=8)  # copying them for each batch would wait for the one before
def _affine(
    mean: tuple[float, ...], std: tuple[float, ...], width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return scale and shift of a row of `width` pixels, `[width * channel]` each."""
    with torch.inference_mode(False):
        scale = torch.tensor([1 / (255 * s) for s in std], device=device)
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device)
        return scale.repeat(width), shift.repeat(width)


class Network(Teacher):
    """Use a PyTorch network as a teacher.

    Args:
        name: name of the teacher, stored in a cache of its embeddings.
        model: network, which is frozen and set to evaluation mode.
        features: function that computes embeddings `[image, dim]` from normalized images
            `[image, 3, size, size]` with `model`.
        transform: preprocessing of the network.
        token: name of the token that `features` returns, stored in a cache of embeddings.

    Raises:
        ValueError: the network does not accept images of this size.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        features: Callable[[Tensor], Tensor],
        transform: Transform,
        token: str = "class",
    ) -> None:
        self.name = name
        # Channels last: 1.8 times as fast for EfficientNet-Lite0 on a CPU, the same numbers.
        self.model = model.requires_grad_(False).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.features = features
        self.transform = transform
        self.transform_id = f"{transform}, token {token}"
        self._input: Tensor | None = None
        self.weights_id = weights_id(model)
        blank = torch.zeros(1, 3, transform.size, transform.size, dtype=torch.uint8)
        try:
            self.dim = self.embed(blank).shape[1]
        except (AssertionError, RuntimeError) as error:
            raise InputError(
                f"IMAGE_SIZE is {transform.size}, which {name} does not accept: {brief(error)}"
            ) from error

    def to(self, device: str | torch.device) -> Network:
        """Move the teacher to a device, in place."""
        super().to(device)
        self.model.to(self.device)
        self._input = None
        return self

    def preprocess(self, image: Image.Image) -> Tensor:
        """Resize and crop an image for the network; return it as uint8 `[3, size, size]`."""
        return self.transform(image)

    @torch.inference_mode()
    def embed(self, batch: Tensor) -> Tensor:
        """Normalize a batch of images and return the embeddings, float32 `[image, dim]`."""
        batch = batch.to(self.device, non_blocking=True)
        # One buffer for all batches, because new memory costs a page fault per page.
        if self._input is None or self._input.numel() != batch.numel():
            self._input = torch.empty(batch.numel(), device=batch.device)
        return self.features(self.transform.normalize(batch, out=self._input)).float()
