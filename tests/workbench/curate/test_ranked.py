"""Outliers, leaks, wrong labels, odd pictures and what to label next, with known answers."""

import numpy as np
import pytest
from PIL import Image
from sklearn.preprocessing import normalize

from ssl_kd.datasets import FolderDataset
from ssl_kd.errors import InputError
from ssl_kd.workbench.curate import herding, label_next, leaks, mislabelled, odd_images, outliers
from tests.faults.matrix import row as fault
from tests.workbench.curate.stores import distinct, write


def test_outliers_come_first(tmp_path):
    x, _ = distinct(300, 16)
    strange = 3 * np.random.default_rng(5).normal(size=(6, 16))
    found = outliers(write(tmp_path, np.concatenate([x, strange])))
    assert len(found) == 306 and set(found.top(6).rows) == set(range(300, 306))
    assert found.scores[0] == 1 and found.scores[-1] == 0
    assert (np.diff(found.columns["distance"]) <= 0).all()
    assert len(found.above(0.99)) == 4 and found.frame().column("file")[0].as_py() == (
        f"train/{found.rows[0]}.png"
    )
    assert len(outliers(write(tmp_path / "one", [[1.0, 2.0]]))) == 1


def test_a_group_from_elsewhere_and_a_faint_row_lie_out_at_any_scale(tmp_path):
    x = 6 + distinct(2000, 16)[0]
    # More than the nearest twenty, so that neighbours alone would vouch for them.
    group = -6 + 0.1 * np.random.default_rng(1).normal(size=(25, 16))
    rows = np.concatenate([x, group, 0.001 * x[:1]])
    strange = set(range(2000, 2026))
    found = outliers(write(tmp_path, rows))
    again = outliers(write(tmp_path / "again", rows), seed=1)
    assert found.rows[0] == 2025 and set(found.top(26).rows) == strange
    assert set(again.top(26).rows) == strange
    assert not np.array_equal(found.columns["distance"], again.columns["distance"])
    for name, scale in (("large", 1e9), ("small", 1e-9)):
        assert set(outliers(write(tmp_path / name, scale * rows)).top(26).rows) == strange


def test_among_few_rows_the_nearest_other_counts(tmp_path):
    x = np.concatenate([distinct(24, 8)[0], np.zeros((1, 8))])
    length = np.linalg.norm(x, axis=1, keepdims=True)
    z = np.c_[x / np.maximum(length, 1e-30), np.log(length / np.sort(length, 0)[12] + 1e-3)]
    apart = np.linalg.norm(z[:, None] - z, axis=2) + np.diag(np.full(25, np.inf))
    done = []
    found = outliers(write(tmp_path, x), progress=lambda *state: done.append(state))
    np.testing.assert_allclose(found.columns["distance"], apart.min(1)[found.rows], rtol=1e-4)
    assert found.rows[0] == 24 and done == [(25, 25)]


def test_test_samples_that_are_in_train(tmp_path):
    x, _ = distinct(400, 16)
    rng = np.random.default_rng(2)
    copies = np.concatenate([x[:5], x[5:10] + 0.01 * rng.normal(size=(5, 16))])
    train = write(tmp_path, x[:300])
    test = write(tmp_path, np.concatenate([x[300:], copies]), split="test")
    found = leaks(train, test)
    assert len(found) == 110
    assert sorted(found.above().rows) == list(range(100, 110))
    assert found.above().columns["train_row"][np.argsort(found.above().rows)].tolist() == list(
        range(10)
    )
    assert len(found.above(0.999999)) == 5 and len(found.above(-1.0)) == 110
    assert len(leaks(train, write(tmp_path / "b", x[300:], split="test")).above()) == 0


@fault(138)
def test_leaks_between_different_teachers_are_refused(tmp_path):
    train, test = write(tmp_path, np.eye(5)), write(tmp_path, np.eye(4), split="test")
    with pytest.raises(InputError, match="different teachers: features of 5 dimensions"):
        leaks(train, test)


@pytest.mark.parametrize("with_clusters", [False, True])
def test_wrong_labels_come_first(tmp_path, with_clusters):
    x, y = distinct(500, 16, clusters=5)
    given = y.copy()
    wrong = np.arange(0, 500, 25)
    given[wrong] = (given[wrong] + 2) % 5
    given[[3, 7]] = -1
    store = write(tmp_path, x, given)
    found = mislabelled(store, clusters=y if with_clusters else None)
    assert len(found) == 498 and set(found.top(20).rows) == set(wrong)
    assert (found.top(20).columns["suggested"] == y[found.top(20).rows]).all()
    assert (found.top(20).columns["label"] == given[found.top(20).rows]).all()


def test_labels_that_say_nothing_are_refused(tmp_path):
    with pytest.raises(InputError, match="labels of fewer than two classes"):
        mislabelled(write(tmp_path, np.eye(6)))
    with pytest.raises(InputError, match="got 3 labels for 6 samples"):
        mislabelled(write(tmp_path / "b", np.eye(6)), np.array([0, 1, 1]))


def test_one_of_each_part_is_asked_for_first(tmp_path):
    x, y = distinct(400, 16, clusters=8)
    store = write(tmp_path, 10 * x)
    found = label_next(store, 8)
    assert sorted(y[found.rows]) == list(range(8)) and len(found) == 8
    by_tree = label_next(store, 8, parents=y)
    assert sorted(y[by_tree.rows]) == list(range(8))
    labelled = np.isin(y, range(5)) & (np.arange(400) % 2 == 0)
    more = label_next(store, 3, labelled=labelled, parents=y)
    assert sorted(y[more.rows]) == [5, 6, 7]
    with pytest.raises(InputError, match="401 samples to label were asked for; expected 1 to 400"):
        label_next(store, 401)
    assert sorted(label_next(store, 400).rows) == list(range(400))
    partly = write(tmp_path / "partly", 10 * x, np.where(labelled, y, -1))
    assert np.array_equal(label_next(partly, 3, parents=y).rows, more.rows)
    wholly = write(tmp_path / "wholly", 10 * x, y)
    assert np.array_equal(label_next(wholly, 8).rows, found.rows)
    for wrong in ({"labelled": [3, 7]}, {"parents": y[:300]}):
        with pytest.raises(InputError, match=r"has (2|300) values for 400 samples; expected one"):
            label_next(store, 3, **wrong)


@pytest.mark.parametrize("with_parents", [False, True])
def test_each_adds_most_to_what_is_covered(tmp_path, with_parents):
    """By a formula of its own, which compares every choice."""
    x, y = distinct(60, 5, clusters=4)
    parents = y if with_parents else None
    found = label_next(write(tmp_path, x), 6, labelled=np.arange(60) < 3, parents=parents)
    u = np.asarray(normalize(x))
    u = np.asarray(normalize(u - u.mean(0)))
    alike = np.exp(-((u[:, None] - u[None]) ** 2).sum(2))  # exp(2 (cos - 1))
    alike = np.where(y == y[:, None], (1 + alike) / 2, 0) if with_parents else alike
    have = [0, 1, 2]
    for row, gain in zip(found.rows, found.scores, strict=True):
        covered = [alike[3:, [*have, other]].max(1).mean() for other in range(60)]
        assert row == int(np.argmax(covered))
        assert gain == pytest.approx(covered[row] - alike[3:, have].max(1).mean(), rel=1e-4)
        have.append(row)


def test_a_second_round_goes_on_where_the_first_stopped(tmp_path):
    x, _ = distinct(300, 8)
    store = write(tmp_path, x)
    whole = label_next(store, 50).rows
    first = label_next(store, 10).rows
    second = label_next(store, 40, labelled=np.isin(np.arange(300), first)).rows
    assert np.array_equal(whole, np.r_[first, second])


def test_rows_past_what_is_compared_at_once(tmp_path, monkeypatch):
    x, y = distinct(400, 16, clusters=8)
    store = write(tmp_path, 10 * x)
    monkeypatch.setattr(herding, "ROWS", 100)
    monkeypatch.setattr(herding, "LABELLED", 30)
    found = label_next(store, 8, seed=1)
    assert sorted(y[found.rows]) == list(range(8))
    assert np.array_equal(found.rows, label_next(store, 8, seed=1).rows)
    assert not np.array_equal(found.rows, label_next(store, 8, seed=2).rows)
    labelled = np.isin(y, range(5))
    assert sorted(y[label_next(store, 3, labelled=labelled).rows]) == [5, 6, 7]
    for n in (60, 399, 400):  # three parts or four
        rows = label_next(store, n).rows
        assert len(set(rows.tolist())) == n


def test_pictures_that_show_nothing(tmp_path):
    rng = np.random.default_rng(0)
    for name, size in {"a": 40, "b": 40, "c": 64, "tiny": 6}.items():
        pixels = rng.integers(0, 255, size=(size, size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    Image.open(tmp_path / "a.png").save(tmp_path / "again.bmp")  # equal pixels, another file
    Image.new("RGB", (50, 50), "white").save(tmp_path / "white.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    images = FolderDataset(tmp_path, "made", "train")
    found = odd_images(images.ids, images.image)
    table = found.frame().to_pydict()
    reasons = dict(zip(table["file"], table["reason"], strict=True))
    assert set(reasons) == {"white.png", "tiny.png", "broken.png"} and len(found) == 3
    assert reasons["white.png"] == "blank" and reasons["tiny.png"] == "tiny"
    assert reasons["broken.png"].startswith("unreadable: ")
    same = dict(zip(found.ids, found.same, strict=True))
    assert same["a.png"] == same["again.bmp"] and len(set(same.values())) == 6
    assert found.sizes[found.ids.index("c.png")] == 64 * 64
