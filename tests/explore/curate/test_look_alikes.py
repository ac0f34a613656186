"""Copies of images that were shrunk or compressed again, and images that only look alike."""

import io

import numpy as np
import pytest
from PIL import Image, ImageFilter

from ssl_kd_explore.curate import near_duplicates, odd_images
from ssl_kd_explore.curate.look_alikes import look_alikes, small_version
from tests.explore.curate.stores import write

SIZE = (96, 72)


def scene(seed, size=SIZE):
    """Return an image of a few soft shapes."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 255, (6, 8, 3), np.uint8))
    return image.resize(size, Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(1))


def copy_of(image, scale=1.0, quality=75):
    file = io.BytesIO()
    size = (round(image.width * scale), round(image.height * scale))
    image.resize(size, Image.Resampling.LANCZOS).save(file, "JPEG", quality=quality)
    return Image.open(file)


def pairs_of(images):
    ratios = np.array([image.width / image.height for image in images])
    first, second = look_alikes(np.stack([small_version(image) for image in images]), ratios)
    return list(zip(first.tolist(), second.tolist(), strict=True))


def test_copies_are_found_and_no_other_pair():
    images = [scene(seed) for seed in range(60)]
    ways = [(0.5, 75), (0.25, 60), (1, 20), (0.7, 40), (2, 75), (0.4, 30), (1, 5)]
    images += [copy_of(images[i], *way) for i, way in enumerate(ways)]
    assert pairs_of(images) == [(i, 60 + i) for i in range(len(ways))]


def flat(value, noise, seed):
    pixels = np.random.default_rng(seed).normal(value, noise, (*SIZE[::-1], 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def test_images_without_contrast_are_copies_of_none():
    images = [
        flat(value, noise, seed) for seed in range(5) for value in (0, 128, 255) for noise in (0, 3)
    ]
    assert pairs_of(images) == []


def test_gradients_colors_and_shapes_tell_images_apart():
    """All of these have the same difference hash."""
    ramp = np.tile(np.linspace(0, 255, SIZE[0]), (SIZE[1], 1))
    curves = [ramp, 255 * (ramp / 255) ** 3, 255 * (ramp / 255) ** 0.3]
    images = [Image.fromarray(curve.astype(np.uint8)) for curve in curves]
    red, blue = (np.zeros((*SIZE[::-1], 3), np.uint8) for _ in range(2))
    red[..., 0], blue[..., 2] = ramp * 0.38, ramp
    images += [Image.fromarray(red), Image.fromarray(blue)]
    images.append(images[0].resize((SIZE[0] * 2, SIZE[1])))
    assert pairs_of(images) == []


def test_a_group_has_the_copies_by_embedding_and_by_image(tmp_path):
    x = np.random.default_rng(0).normal(size=(43, 16)).astype(np.float32)
    x[40] = x[0]  # equal embeddings, other pictures
    images = [scene(seed) for seed in range(41)]
    images += [copy_of(images[1], 0.5), copy_of(images[0], 0.5)]
    store = write(tmp_path, x)
    assert [rows.tolist() for rows in near_duplicates(store).groups()] == [[0, 40]]
    checks = odd_images(store.ids, lambda row: images[row])
    copies = near_duplicates(store, pictures=checks)
    for threshold in (None, 0.999):
        groups = [rows.tolist() for rows in copies.groups(threshold)]
        assert groups == [[0, 40, 42], [1, 41]]
    assert copies.frame()["same_picture"].to_pylist() == [True, False, True, True, True]
    largest = copies.kept(sizes=checks.sizes)
    assert np.flatnonzero(~largest).tolist() == [40, 41, 42]


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_images(n):
    assert pairs_of([scene(0)] * n or [flat(0, 0, 0)]) == ([(0, 1)] if n == 2 else [])
