import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from ssl_kd.vision.evaluate import few_shot
from ssl_kd.vision.evaluate.few_shot import few_shot_probes
from ssl_kd.vision.evaluate.rank import rankme


def blobs(n=60, classes=3, apart=6.0, seed=0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    return (rng.normal(size=(n, 5)) + apart * np.eye(5)[y]).astype(np.float32), y


def test_separate_classes_are_learned_from_one_sample_each():
    x, y = blobs(apart=30.0)
    rows = few_shot_probes(x, y, *blobs(apart=30.0, seed=1))
    assert [row["shots"] for row in rows] == [1, 5, 10]
    assert all(row["accuracy"] > 0.95 and row["note"] is None for row in rows)


def test_a_draw_equals_logistic_regression_on_all_samples_if_all_are_drawn():
    x, y = blobs(apart=1.0)
    test_x, test_y = blobs(apart=1.0, seed=1)
    (row,) = few_shot_probes(x, y, test_x, test_y, shots=[20], draws=2)
    mean = x.mean(0)
    scale = np.sqrt(((x - mean) ** 2).mean())
    classifier = LogisticRegression(max_iter=200).fit((x - mean) / scale, y)
    assert row["accuracy"] == pytest.approx(classifier.score((test_x - mean) / scale, test_y))
    assert row["deviation"] == pytest.approx(0)


def test_more_samples_are_better_and_draws_repeat_with_the_seed():
    x, y = blobs(n=300, apart=2.0)
    held_out = blobs(n=300, apart=2.0, seed=1)
    rows = few_shot_probes(x, y, *held_out)
    assert rows[0]["accuracy"] < rows[1]["accuracy"]
    assert rows[0]["deviation"] > rows[2]["deviation"]
    assert rows == few_shot_probes(x, y, *held_out)
    assert rows != few_shot_probes(x, y, *held_out, seed=1)


def test_without_held_out_data_the_other_training_samples_are_the_test():
    x, y = blobs(n=12, apart=30.0)
    one, five, _ = few_shot_probes(x, y)
    assert one["accuracy"] == 1
    assert five["accuracy"] is None and five["left_out"] == ["0", "1", "2"]
    assert five["note"] == "0 of 3 classes with 6 or more labeled samples; expected at least 2"


@pytest.mark.parametrize(
    ("y", "note"), [([-1] * 12, "no class with 2"), ([0] * 12, "1 of 1 classes with 2")]
)
def test_labels_that_are_too_few_are_explained(y, note):
    rows = few_shot_probes(blobs(n=12)[0], np.array(y), shots=[1])
    assert all(row["accuracy"] is None and row["note"].startswith(note) for row in rows)


def test_scale_and_origin_of_the_embeddings_change_nothing():
    x, y = blobs(apart=1.5)
    expected = [row["accuracy"] for row in few_shot_probes(x, y)]
    moved = [row["accuracy"] for row in few_shot_probes(8 * x + 16, y)]
    assert moved == pytest.approx(expected, abs=0.02)


def test_embeddings_that_are_all_equal_have_an_accuracy_of_chance():
    rows = few_shot_probes(np.ones((60, 4), np.float32), np.arange(60) % 3)
    assert rows[0]["accuracy"] == pytest.approx(1 / 3, abs=0.05)


def test_rankme_is_between_one_and_the_width():
    rng = np.random.default_rng(0)
    line = np.outer(rng.normal(size=50), rng.normal(size=8))
    assert rankme(line) == pytest.approx(1)
    assert rankme(np.eye(8)[np.arange(80) % 8]) == pytest.approx(8)
    assert 1 < rankme(rng.normal(size=(50, 8))) < 8
    assert rankme(np.zeros((3, 2))) == 1


def test_rankme_does_not_depend_on_the_scale_or_on_the_order():
    x = np.random.default_rng(0).normal(size=(50, 8))
    assert rankme(1e30 * x) == pytest.approx(rankme(x), rel=1e-4)
    assert rankme(x[::-1]) == pytest.approx(rankme(x))


def test_rankme_of_nothing_is_refused():
    with pytest.raises(ValueError, match="expected \\[n, d\\] with at least one row"):
        rankme(np.zeros((0, 3)))


def test_held_out_samples_without_labels_have_no_accuracy():
    x, y = blobs()
    rows = few_shot_probes(x, y, x, np.full(len(x), -1))
    assert [row["accuracy"] for row in rows] == [None, None, None]
    assert {row["note"] for row in rows} == {
        "no held-out sample has a label of a class that is not left out"
    }


def test_a_rare_class_is_left_out_and_named_and_the_others_are_scored():
    x, y = blobs(n=90, apart=30.0)
    is_rare = y == 2
    y[is_rare] = -1
    y[np.flatnonzero(is_rare)[:4]] = 2
    names = ["cat", "dog", "owl"]
    one, five, _ = few_shot_probes(x, y, class_names=names)
    assert one["left_out"] == [] and one["note"] is None
    assert five["accuracy"] > 0.95 and five["left_out"] == ["owl"]
    assert five["note"] == (
        "1 of 3 classes have fewer than 6 labeled samples and are left out: owl"
    )
    assert five["accuracy"] == few_shot_probes(x[y != 2], y[y != 2])[1]["accuracy"] == 1
    # Samples of the class that is left out are no part of the test either.
    test_y = np.arange(90) % 3
    held_out = few_shot_probes(x, y, blobs(n=90, apart=30.0, seed=1)[0], test_y, class_names=names)
    assert held_out[1]["left_out"] == ["owl"] and held_out[1]["accuracy"] > 0.95
    assert few_shot_probes(x, y, x, np.full(90, 2), shots=[5])[0]["accuracy"] is None


def test_fits_that_do_not_converge_are_counted(monkeypatch):
    monkeypatch.setattr(few_shot, "_MAX_ITER", 1)
    (row,) = few_shot_probes(*blobs(apart=1.0), shots=[5], draws=3)
    assert row["note"] == "3 of 3 fits stopped after 1 steps without convergence"
