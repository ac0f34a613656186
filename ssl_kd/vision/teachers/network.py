"""Wrap a frozen network as a teacher, together with the preprocessing it was trained with."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor, nn

from ssl_kd.core.errors import InputError, brief
from ssl_kd.core.settings.import_paths import check_installed
from ssl_kd.core.shards.fingerprint import weights_id
from ssl_kd.vision.teachers.base import Teacher

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_MAX_ASPECT = 4


@dataclass(frozen=True)
class Transform:
    """Resize an image, crop its center, and normalize it.

    Attributes:
        size: input of the network in pixels: the side of a square, or (height, width).
        resize: side in pixels that the image is resized to before the crop, or (height, width).
        interpolation: `bilinear`, `bicubic` or another PIL filter, in lower case.
        mean: mean of each channel, for pixel values from 0 to 1.
        std: standard deviation of each channel.
        crop_mode: `center` resizes the shorter side to `resize` and keeps the aspect ratio;
            `squash` resizes both sides, ignoring the aspect ratio; `border` resizes the longer side
            and fills the rest with `mean`.
        rounds_down: whether the crop begins at the lower of the two pixels nearest to the center,
            as in transformers, instead of the even one, as in torchvision.
    """

    size: int | tuple[int, int]
    resize: int | tuple[int, int]
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    crop_mode: Literal["center", "squash", "border"] = "center"
    rounds_down: bool = False

    def __post_init__(self) -> None:
        """Raise MissingPackage without torchvision, which resizes images."""
        check_installed(["torchvision"], "vision", "The preprocessing of a network (Transform)")

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the input of the network, in pixels."""
        return _pair(self.size)

    def __call__(self, image: Image.Image) -> Tensor:
        """Resize and crop a decoded image; return it as uint8 `[3, height, width]`."""
        from torchvision.transforms import functional as F

        image = image.convert("RGB")
        mode = F.InterpolationMode(self.interpolation)
        height, width = self.shape
        if self.crop_mode == "center":
            # A 1000 x 1 image would grow to 256,000 x 256 pixels, and the crop keeps its center.
            limit = _MAX_ASPECT * min(image.size)
            if max(image.size) > limit:
                sides = [min(image.height, limit), min(image.width, limit)]
                image = F.center_crop(image, sides)  # type: ignore[arg-type, assignment]
        image = F.resize(image, self._resized(image), mode)  # type: ignore[arg-type, assignment]
        if self.crop_mode == "border":
            left, top = max(width - image.width, 0), max(height - image.height, 0)
            padding = [left // 2, top // 2, (left + 1) // 2, (top + 1) // 2]
            fill = [round(255 * value) for value in self.mean]
            image = F.pad(image, padding, fill=fill)  # type: ignore[arg-type, assignment]
        top, left = (image.height - height) // 2, (image.width - width) // 2
        if self.rounds_down and top >= 0 and left >= 0:
            image = image.crop((left, top, left + width, top + height))
        else:
            image = F.center_crop(image, [height, width])  # type: ignore[arg-type, assignment]
        pixels = torch.from_numpy(np.array(image))
        return rearrange(pixels, "height width channel -> channel height width")

    def _resized(self, image: Image.Image) -> list[int]:
        """Return the size to resize an image to: [height, width], or [shorter side]."""
        height, width = _pair(self.resize)
        if self.crop_mode == "squash":
            return [height, width]
        if self.crop_mode == "center" and height == width:
            return [height]
        ratios = image.height / height, image.width / width
        ratio = min(ratios) if self.crop_mode == "center" else max(ratios)
        return [max(1, round(side / ratio)) for side in (image.height, image.width)]

    def normalize(self, batch: Tensor, out: Tensor | None = None) -> Tensor:
        """Normalize a batch of uint8 images `[image, 3, height, width]`.

        Args:
            batch: output of `__call__`, stacked, on any device.
            out: float32 buffer for the result, with as many elements as `batch`.

        Returns:
            float32 of the same shape, channels last in memory.
        """
        # (x / 255 - mean) / std as one multiplication and one addition per row of pixels:
        # three channels are too short an inner loop (8 times slower).
        rows = rearrange(batch, "image channel height width -> image height (width channel)")
        rows = rows.float() if out is None else out.view(rows.shape).copy_(rows)
        scale, shift = _affine(self.mean, self.std, batch.shape[-1], batch.device)
        torch.addcmul(shift, rows, scale, out=rows)
        pattern = "image height (width channel) -> image channel height width"
        return rearrange(rows, pattern, channel=batch.shape[1])

    def __str__(self) -> str:
        """Describe the preprocessing in one line, as stored in a cache of embeddings."""
        mode = "centre" if self.crop_mode == "center" else self.crop_mode  # as in older caches
        mean, std = ([round(v, 4) for v in values] for values in (self.mean, self.std))
        size, resize = (_text_of(sides) for sides in (self.size, self.resize))
        if self.rounds_down:
            mode += " rounded down"
        return f"{size} px of {resize} {self.interpolation} {mode}, mean {mean}, std {std}"


def _pair(sides: int | tuple[int, int]) -> tuple[int, int]:
    return (sides, sides) if isinstance(sides, int) else sides


def _grid(n: int, shape: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of `n` square patches of an input of this height and width."""
    rows = max(1, round(math.sqrt(n * shape[0] / shape[1])))
    if n % rows or rows * shape[1] != n // rows * shape[0]:
        raise InputError(
            f"the network returns {n} patch tokens for {shape[0]} x {shape[1]} pixels, which are "
            "not a grid of square patches: set TOKEN to 'class' or 'patch'"
        )
    return rows, n // rows


def _text_of(sides: int | tuple[int, int]) -> str:
    return str(sides) if isinstance(sides, int) else f"{sides[0]}x{sides[1]}"


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
        features: function that computes embeddings `[image, dim]`, or the tokens of all patches
            `[image, patch, dim]` row by row, from normalized images `[image, 3, height, width]`
            with `model`.
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
        blank = torch.zeros(1, 3, *transform.shape, dtype=torch.uint8)
        try:
            shape = self.embed(blank).shape
        except (AssertionError, RuntimeError) as error:
            size = _text_of(transform.size)
            raise InputError(
                f"IMAGE_SIZE is {size}, which {name} does not accept: {brief(error)}"
            ) from error
        self.dim = shape[-1]
        self.grid = _grid(shape[1], transform.shape) if len(shape) == 3 else None

    def to(self, device: str | torch.device) -> Network:
        """Move the teacher to a device, in place."""
        super().to(device)
        self.model.to(self.device)
        self._input = None
        return self

    def preprocess(self, image: Image.Image) -> Tensor:
        """Resize and crop an image for the network; return it as uint8 `[3, height, width]`."""
        return self.transform(image)

    @torch.inference_mode()
    def embed(self, batch: Tensor) -> Tensor:
        """Normalize a batch of images and return the embeddings, float32 `[image, dim]`.

        With a `grid`, they are `[image, patch, dim]`.
        """
        batch = batch.to(self.device, non_blocking=True)
        # One buffer for all batches, because new memory costs a page fault per page.
        if self._input is None or self._input.numel() != batch.numel():
            self._input = torch.empty(batch.numel(), device=batch.device)
        return self.features(self.transform.normalize(batch, out=self._input)).float()
