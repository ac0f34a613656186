"""Scores that need no labels: alpha-ReQ and LiDAR, and the views that LiDAR compares."""

import numpy as np
import pytest
from PIL import Image

from ssl_kd.core.errors import InputError
from ssl_kd.core.precision import Precision
from ssl_kd.vision.augmented import augmented, embed_views
from ssl_kd.vision.data import ArrayDataset, UnreadableSample
from ssl_kd.vision.evaluate import alpha_req, lidar
from ssl_kd.vision.teachers import load_teacher
from tests.oracles import embeddings as oracle

RNG = np.random.default_rng(0)


def power_law(exponent, n=400, d=120):
    """Rows whose covariance has the eigenvalues `i^-exponent`, around a mean that is not 0."""
    left = np.linalg.qr(RNG.normal(size=(n, d)))[0]
    left = np.linalg.qr(left - left.mean(0))[0]
    right = np.linalg.qr(RNG.normal(size=(d, d)))[0]
    return 3 + left * np.arange(1, d + 1) ** (-exponent / 2) @ right


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.5])
def test_the_exponent_of_a_power_law_is_found(exponent):
    x = power_law(exponent)
    assert alpha_req(x) == pytest.approx(exponent, abs=1e-3)
    assert alpha_req(1e20 * x) == pytest.approx(exponent, abs=1e-3)


def test_the_exponent_is_that_of_the_plain_fit():
    x = RNG.normal(size=(300, 60)) @ RNG.normal(size=(60, 60))
    assert alpha_req(x) == pytest.approx(oracle.alpha_req(x), rel=1e-4)
    assert alpha_req(x, max_rows=100, seed=3) == alpha_req(x, max_rows=100, seed=3)


@pytest.mark.parametrize(
    "x", [RNG.normal(size=(100, 19)), RNG.normal(size=(12, 90)), np.ones((9, 40))]
)
def test_too_few_eigenvalues_have_no_exponent(x):
    assert alpha_req(x) is None


@pytest.mark.parametrize(("n", "q", "d"), [(20, 4, 6), (5, 3, 40)])
def test_lidar_is_that_of_the_plain_formula(n, q, d):
    views = 2 + RNG.normal(size=(n, 1, d)) + 0.3 * RNG.normal(size=(n, q, d))
    assert lidar(views) == pytest.approx(oracle.lidar(views), rel=1e-8)
    assert lidar(views, delta=0.1) == pytest.approx(oracle.lidar(views, 0.1), rel=1e-8)
    assert lidar(views) != pytest.approx(lidar(views, delta=0.1), rel=1e-3)


def test_lidar_counts_the_directions_that_tell_samples_apart():
    noise = 1e-2 * RNG.normal(size=(300, 8, 10))
    for directions in (1, 4):
        samples = np.zeros((300, 1, 10))
        samples[..., :directions] = RNG.normal(size=(300, 1, directions))
        assert lidar(samples + noise) == pytest.approx(directions, rel=0.05)
    assert lidar(np.zeros((3, 2, 4))) == 1.0


@pytest.mark.parametrize("shape", [(1, 2, 3), (4, 1, 3), (4, 3), (4, 2, 0)])
def test_lidar_needs_several_views_of_several_samples(shape):
    with pytest.raises(ValueError, match="at least two samples of at least two views"):
        lidar(np.zeros(shape))
    with pytest.raises(ValueError, match="delta is 0; expected a positive number"):
        lidar(np.zeros((2, 2, 2)), delta=0)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("size", [(1, 1), (1, 90), (40, 30)])
def test_views_are_random_crops_that_repeat_with_the_seed(mode, size):
    image = Image.fromarray(RNG.integers(0, 256, (*size[::-1], 3), np.uint8)).convert(mode)
    views = [augmented(image, np.random.default_rng(seed)) for seed in (0, 0, 1, 2)]
    assert all(v.mode == mode and v.width <= size[0] and v.height <= size[1] for v in views)
    first, again, *others = (v.tobytes() for v in views)
    assert first == again and (size == (1, 1) or first not in others)


class PartlyUnreadable(ArrayDataset):
    """Images of which the first 8 cannot be read."""

    def image(self, i):
        if i < 8:
            raise UnreadableSample(str(i), "is damaged")
        return super().image(i)


def test_views_are_embedded_for_the_images_that_can_be_read():
    arrays = RNG.integers(0, 256, (12, 8, 8), np.uint8)
    teacher, cpu = load_teacher("pixels", image_size=8), Precision.for_device("cpu")
    dataset = PartlyUnreadable("images", "train", arrays, None, None)
    views = embed_views(dataset, teacher, cpu, 5)
    assert views.shape == (4, 5, teacher.dim) and views.dtype == np.float32
    assert np.array_equal(views, embed_views(dataset, teacher, cpu, 5))
    assert len(embed_views(dataset, teacher, cpu, 2, max_samples=10)) < 4
    with pytest.raises(InputError, match="1 of 9 random images of images can be read"):
        embed_views(PartlyUnreadable("images", "train", arrays[:9], None, None), teacher, cpu, 2)
