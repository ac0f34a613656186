"""Embed random crops of images, so that LiDAR can compare views of a sample with other samples."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from ssl_kd.core.errors import InputError
from ssl_kd.core.precision import Precision
from ssl_kd.vision.data import ImageDataset, UnreadableSample
from ssl_kd.vision.extract import Embed
from ssl_kd.vision.teachers import Teacher

MAX_SAMPLES = 200
BATCH_SIZE = 64
AREA = (0.2, 1.0)  # of the image that a crop keeps
RATIO = (3 / 4, 4 / 3)  # width over height of a crop
JITTER = 0.4  # largest relative change of brightness, contrast and color


def augmented(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Return a random crop of an image, flipped in half of the cases, with its colors changed.

    These are the augmentations of SimCLR without gray images and blur; crops keep their size.
    """
    area, ratio = rng.uniform(*AREA), np.exp(rng.uniform(*np.log(RATIO)))
    width = min(image.width, max(1, round(np.sqrt(area * image.width * image.height * ratio))))
    height = min(image.height, max(1, round(np.sqrt(area * image.width * image.height / ratio))))
    left = int(rng.integers(image.width - width + 1))
    top = int(rng.integers(image.height - height + 1))
    image = image.crop((left, top, left + width, top + height))
    if rng.random() < 0.5:
        image = ImageOps.mirror(image)
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = enhance(image).enhance(rng.uniform(1 - JITTER, 1 + JITTER))
    return image


def embed_views(
    dataset: ImageDataset,
    teacher: Teacher,
    precision: Precision,
    n_views: int,
    *,
    seed: int = 0,
    max_samples: int = MAX_SAMPLES,
) -> NDArray[np.float32]:
    """Embed augmented views of random images.

    Args:
        dataset: Images; those that cannot be read are left out.
        teacher: A teacher of images.
        precision: Device and dtype of the teacher.
        n_views: Views of each image, at least 2.
        seed: Seed of the choice of images and of the augmentations.
        max_samples: Largest number of images.

    Returns:
        Embeddings float32 `[n, view, d]`.

    Raises:
        InputError: Fewer than two of the chosen images can be read.
    """
    rng = np.random.default_rng(seed)
    prepared = []
    for row in rng.permutation(len(dataset))[:max_samples].tolist():
        try:
            image = dataset.image(row)
            views = [teacher.preprocess(augmented(image, rng)) for _ in range(n_views)]
        except UnreadableSample:
            continue
        prepared.append(torch.stack(views))
    if len(prepared) < 2:
        raise InputError(
            f"{len(prepared)} of {min(len(dataset), max_samples)} random images of {dataset.name} "
            "can be read; LiDAR needs two: leave out --views"
        )
    teacher.to(precision.device)
    embed = Embed(teacher, precision, BATCH_SIZE)
    return torch.stack([embed(views).float().cpu() for views in prepared]).numpy()
