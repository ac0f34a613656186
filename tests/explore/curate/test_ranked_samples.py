"""Outliers, leaks, wrong labels and odd pictures, with known answers."""

import numpy as np
import pytest
from PIL import Image

from ssl_kd.core.errors import InputError
from ssl_kd.vision.data import FolderDataset
from ssl_kd_explore.curate import leaks, mislabeled, odd_images, outliers
from tests.explore.curate.stores import distinct, write
from tests.faults.matrix import row as fault


def test_outliers_come_first(tmp_path):
    x, _ = distinct(300, 16)
    strange = 3 * np.random.default_rng(5).normal(size=(6, 16))
    ranked = outliers(write(tmp_path, np.concatenate([x, strange])))
    assert len(ranked) == 306 and set(ranked.top(6).rows) == set(range(300, 306))
    assert ranked.scores[0] == 1 and ranked.scores[-1] == 0
    assert (np.diff(ranked.columns["distance"]) <= 0).all()
    assert len(ranked.above(0.99)) == 4
    assert ranked.frame().column("file")[0].as_py() == f"train/{ranked.rows[0]}.png"
    assert len(outliers(write(tmp_path / "one", [[1.0, 2.0]]))) == 1


def test_a_group_and_a_short_row_are_outliers_at_any_scale(tmp_path):
    x = 6 + distinct(2000, 16)[0]
    # More than the nearest twenty, so that nearest neighbors would not show them.
    group = -6 + 0.1 * np.random.default_rng(1).normal(size=(25, 16))
    rows = np.concatenate([x, group, 0.001 * x[:1]])
    ranked = outliers(write(tmp_path, rows))
    assert ranked.rows[0] == 2025
    scaled = [outliers(write(tmp_path / f"{scale}", scale * rows)) for scale in (1e9, 1e-9)]
    for one in (ranked, *scaled):
        assert set(one.top(26).rows) == set(range(2000, 2026))


def test_among_few_rows_the_nearest_other_counts(tmp_path):
    x = np.concatenate([distinct(24, 8)[0], np.zeros((1, 8))])
    length = np.linalg.norm(x, axis=1, keepdims=True)
    z = np.c_[x / np.maximum(length, 1e-30), np.log(length / np.sort(length, 0)[12] + 1e-3)]
    apart = np.linalg.norm(z[:, None] - z, axis=2) + np.diag(np.full(25, np.inf))
    progress = []
    ranked = outliers(write(tmp_path, x), progress=lambda *state: progress.append(state))
    np.testing.assert_allclose(ranked.columns["distance"], apart.min(1)[ranked.rows], rtol=1e-4)
    assert ranked.rows[0] == 24 and progress == [(25, 25)]


def test_test_samples_that_are_copies_of_training_samples(tmp_path):
    x, _ = distinct(400, 16)
    rng = np.random.default_rng(2)
    copies = np.concatenate([x[:5], x[5:10] + 0.01 * rng.normal(size=(5, 16))])
    train = write(tmp_path, x[:300])
    test = write(tmp_path, np.concatenate([x[300:], copies]), split="test")
    leaked = leaks(train, test)
    assert sorted(leaked.rows) == list(range(100, 110))
    assert leaked.columns["train_row"][np.argsort(leaked.rows)].tolist() == list(range(10))
    assert len(leaks(train, test, 0.999999)) == 5 and len(leaks(train, test, -1.0)) == 110
    assert len(leaks(train, write(tmp_path / "b", x[300:], split="test"))) == 0


@fault(138)
def test_leaks_between_different_teachers_are_refused(tmp_path):
    train, test = write(tmp_path, np.eye(5)), write(tmp_path, np.eye(4), split="test")
    with pytest.raises(InputError, match="different teachers: features with 5 dimensions"):
        leaks(train, test)


@pytest.mark.parametrize("with_clusters", [False, True])
def test_wrong_labels_come_first(tmp_path, with_clusters):
    x, y = distinct(500, 16, clusters=5)
    given = y.copy()
    wrong = np.arange(0, 500, 25)
    given[wrong] = (given[wrong] + 2) % 5
    given[[3, 7]] = -1
    ranked = mislabeled(write(tmp_path, x, given), clusters=y if with_clusters else None)
    first = ranked.top(20)
    assert len(ranked) == 498 and set(first.rows) == set(wrong)
    assert (first.columns["suggested"] == y[first.rows]).all()
    assert (first.columns["label"] == given[first.rows]).all()


def test_too_few_labels_are_refused(tmp_path):
    with pytest.raises(InputError, match="the labels of .* have fewer than two classes"):
        mislabeled(write(tmp_path, np.eye(6)))
    with pytest.raises(InputError, match="`labels` has 3 values; expected 6"):
        mislabeled(write(tmp_path / "b", np.eye(6)), np.array([0, 1, 1]))


def test_blank_tiny_and_broken_pictures(tmp_path):
    rng = np.random.default_rng(0)
    for name, size in {"a": 40, "b": 40, "c": 64, "tiny": 6}.items():
        pixels = rng.integers(0, 255, size=(size, size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    Image.new("RGB", (50, 50), "white").save(tmp_path / "white.png")
    for name in ("broken", "missing"):
        (tmp_path / f"{name}.png").write_bytes(b"no image")
    images = FolderDataset(tmp_path, "made", "train")
    (tmp_path / "missing.png").unlink()
    checks = odd_images(images.ids, images.image)
    assert [images.ids[row] for row in checks.unchecked] == ["missing.png"]
    table = checks.frame().to_pydict()
    reasons = dict(zip(table["file"], table["reason"], strict=True))
    assert reasons.pop("broken.png").startswith("unreadable: ")
    assert reasons.pop("missing.png").startswith("not checked: a broken link")
    assert reasons == {"white.png": "blank", "tiny.png": "tiny"}
    assert checks.sizes[checks.ids.index("c.png")] == 64 * 64
