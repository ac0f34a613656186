"""Test the data sets of the benchmarks, and the clusters assigned to noise."""

import numpy as np
import pytest
from PIL import Image

from benchmarks.peers import without_noise
from benchmarks.sets import SETS, Absent, Sources, long_tailed, shelf_of
from ssl_kd.vision.evaluate import accuracy, kmeans

SIZES = {
    "digits": (64, [141, 142, 143, 143, 143, 144, 144, 145, 146, 146]),
    "digits_lt10": (64, [14, 18, 23, 30, 39, 51, 66, 85, 110, 143]),
    "digits_lt100": (64, [1, 2, 3, 6, 11, 18, 30, 51, 85, 143]),
    "unequal": (32, [74, 98, 128, 168, 221, 290, 381, 500, 657, 863, 1133, 1487]),
    "many": (64, [50] * 200),
    "two": (32, [1500] * 2),
    "rare": (32, [50] + [550] * 9),
}
SHELVES = {
    "choose": """
        banking77_tfidf clinc150_tfidf cub10_googlenet digits faces_edolor fashion10k
        fashion10k_efficientnet flowers5_lite2 frogs_mfcc irmas_audio51 landuse21 letter26
        speakers6_resemblyzer spokendigits_mfcc trash6_lite2 umist usps_small webkb4_wordllama
    """,
    "report": """
        cifar10_resnet18_pca50 cifar_efficientnet coil20 coil20_clip gtzan_librosa57
        handwritten_mfeat monkeys10_lite1 mouse_bladder palm100 reuters8_wordllama
    """,
}  # decided before anything was run, never to be changed


def test_each_set_stays_on_its_shelf():
    for shelf, names in SHELVES.items():
        assert {shelf_of(name) for name in names.split()} == {shelf}


def test_the_source_decides_the_shelf():
    assert shelf_of("cifar10_resnet18_pca50_lt100") == shelf_of("cifar_anything") == "report"
    assert shelf_of("speakers6") == shelf_of("spokendigits") == "choose"
    assert shelf_of("speaker6") == "report"  # another source than speakers
    with pytest.raises(ValueError, match=r"'20newsgroups' .* rename its file"):
        shelf_of("20newsgroups")


@pytest.mark.parametrize("name", SIZES)
def test_a_set_has_the_declared_sizes_and_is_the_same_each_time(name):
    (x, y), (again, labels) = (SETS[name](Sources()) for _ in range(2))
    dim, sizes = SIZES[name]
    assert x.shape == (sum(sizes), dim) and x.dtype == np.float32 and y.dtype.kind == "i"
    assert sorted(np.bincount(y)) == sizes
    assert np.array_equal(x, again) and np.array_equal(y, labels)


@pytest.mark.parametrize("name", ["unequal", "two", "rare"])
def test_kmeans_is_wrong_on_the_synthetic_sets(name):
    x, y = SETS[name](Sources())
    assert accuracy(y, kmeans(x, y.max() + 1, n_init=2).clusters) < 0.8


def test_a_long_tail_takes_as_much_as_the_set_has():
    y = np.repeat([0, 1, 2], [40, 400, 400])
    x = np.stack([y, np.arange(len(y))], 1)
    orders = set()
    for seed in range(9):
        kept, labels = long_tailed(x, y, 100, seed)
        assert np.array_equal(kept[:, 0], labels) and len(set(kept[:, 1])) == len(kept)
        sizes = np.bincount(labels)
        orders.add(tuple(sizes.argsort()[::-1]))
        # The class of 40 samples limits the tail only where it is drawn as the largest class.
        assert sorted(sizes) == ([1, 4, 40] if sizes.argmax() == 0 else [4, 40, 400])
    assert len(orders) > 3


def test_an_error_about_missing_data_names_its_flag(tmp_path):
    image = tmp_path / "cifar" / "train" / "cat" / "1.png"
    image.parent.mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(image)
    empty = Sources(data_dir=tmp_path, cache=tmp_path)
    no_teacher = Sources(cifar=tmp_path / "cifar", teacher_weights=tmp_path / "none.safetensors")
    for name, sources, flag in (
        ("fashion", empty, "--data_dir"),
        ("fashion10k_efficientnet_lt10", empty, "--data_dir"),
        ("cifar_efficientnet", empty, "--cifar"),
        ("cifar_efficientnet", Sources(cifar=tmp_path / "elsewhere"), "--cifar"),
        ("cifar_efficientnet", no_teacher, "--teacher_weights"),
    ):
        with pytest.raises(Absent, match=flag):
            SETS[name](sources)


def test_noise_joins_the_majority_of_its_five_nearest_by_cosine():
    angles = np.radians([0, 1, 2, 80, 81, 82, 83, 50, 3, 51])
    lengths = np.array([9, 9, 9, 1, 1, 1, 1, 1, 1, 1])
    x = lengths[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)
    clusters = np.array([0, 0, 0, 1, 1, 1, 1, 2, -1, -1])
    # At 3 degrees, clusters 1 and 2 are nearer by distance, cluster 0 by angle.
    # At 51 degrees, the nearest sample is in cluster 2, the next four in cluster 1.
    assert without_noise(x, clusters).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 0, 1]
    assert clusters[8] == -1
    assert without_noise(x, np.full(10, -1)).tolist() == [0] * 10
    assert without_noise(x[:3], np.array([4, -1, -1])).tolist() == [4] * 3
