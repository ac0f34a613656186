"""The estimator: scikit-learn's checks, and behavior beyond them."""

import doctest
import hashlib
import inspect
import json
import pickle
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits, make_blobs
from sklearn.exceptions import NotFittedError
from sklearn.metrics import adjusted_rand_score
from sklearn.model_selection import GridSearchCV
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import parametrize_with_checks

import ssl_kd.vision.estimator
from ssl_kd import MultiHeadClusterer
from ssl_kd.core.files import CorruptFileError
from ssl_kd.vision.cache import EmbeddingStore
from ssl_kd.vision.model import ClusterModel
from ssl_kd.vision.run import n_clusters_of
from ssl_kd.vision.settings import VisionSettings
from tests.faults.matrix import row


def k_means(n_clusters: int) -> KMeans:
    options: dict[str, Any] = {"n_init": 10, "random_state": 0}
    return KMeans(n_clusters, **options)


def again(estimator: Any) -> Any:
    """`clone`, whose type is a union of everything."""
    return clone(estimator)


def small(n_clusters: Any = 3, **parameters) -> MultiHeadClusterer:
    """Few, narrow heads, on the CPU: enough for blobs."""
    few = {"n_heads": 8, "max_steps": 100, "batch_size": 64, "device": "cpu"}
    few |= {"hidden_dim": 16}
    return MultiHeadClusterer(n_clusters, **(few | parameters))


@pytest.fixture(scope="module")
def blobs() -> tuple[np.ndarray, np.ndarray]:
    found: Any = make_blobs(150, n_features=6, centers=3, cluster_std=0.5, random_state=0)
    return found[0].astype(np.float32), found[1]


@pytest.fixture(scope="module")
def fitted(blobs) -> MultiHeadClusterer:
    return small().fit(blobs[0])


@parametrize_with_checks([small(n_heads=2, max_steps=25)])
@pytest.mark.slow
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize(
    "check",
    [
        estimator_checks.check_parameters_default_constructible,
        estimator_checks.check_no_attributes_set_in_init,
        estimator_checks.check_fit2d_1sample,
        estimator_checks.check_n_features_in,
    ],
)
def test_some_of_scikit_learns_checks(check):
    check("MultiHeadClusterer", small(n_heads=2, max_steps=25))


@pytest.mark.parametrize("as_input", [list, np.array, lambda texts: [[text] for text in texts]])
def test_texts_are_refused_with_the_way_to_cluster_them(as_input):
    texts = as_input(["a good film", "dull", "fine"])
    with pytest.raises(ValueError, match=r"X has texts \(.*a good film.*\)") as refusal:
        small().fit(texts)
    way = "ssl_kd train --dataset FILE.csv --column NAME --teacher minilm"
    assert way in str(refusal.value)


def test_parameters_are_the_settings_with_their_defaults():
    parameters = inspect.signature(MultiHeadClusterer).parameters
    defaults = {name: p.default for name, p in parameters.items()}
    assert defaults.pop("n_clusters") == 10
    assert defaults.pop("random_state") == VisionSettings.seed
    assert defaults == {name: getattr(VisionSettings, name) for name in defaults}
    # Whatever is trained for can be asked for.
    trained = {"loss", "beta", "student_temp", "teacher_temp", "instance_weight"}
    assert trained | {"learning_rate", "clip_grad", "batch_size"} <= set(defaults)
    described = inspect.getdoc(MultiHeadClusterer) or ""
    assert all(f"\n    {name}: " in described for name in parameters)


def test_the_examples_in_the_docstring_run():
    assert doctest.testmod(ssl_kd.vision.estimator).failed == 0


def test_finds_clusters_and_predicts_held_out_samples(blobs):
    X, y = blobs
    clusterer = small().fit(X[:100])
    assert adjusted_rand_score(y[:100], clusterer.labels_) > 0.9
    assert adjusted_rand_score(y[100:], clusterer.predict(X[100:])) > 0.9


def test_training_data_is_predicted_as_labeled_and_probabilities_add_up(fitted, blobs):
    X, _ = blobs
    probabilities = fitted.predict_proba(X)
    np.testing.assert_array_equal(fitted.predict(X), fitted.labels_)
    assert fitted.labels_.dtype == np.int64 and fitted.labels_.shape == (150,)
    assert probabilities.dtype == np.float32 and probabilities.shape == (150, 3)
    np.testing.assert_array_equal(probabilities.argmax(1), fitted.labels_)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    np.testing.assert_array_equal(fitted.transform(X), probabilities)
    assert fitted.number_ is None
    assert fitted.n_features_in_ == 6 and not hasattr(fitted, "feature_names_in_")
    assert list(fitted.get_feature_names_out()) == [f"multiheadclusterer{k}" for k in range(3)]


def test_the_confidence_is_low_where_other_partitions_disagree():
    rng = np.random.default_rng(0)
    apart = rng.normal(size=(300, 6)) + 8 * np.eye(3, 6)[np.arange(300) % 3]
    one = rng.normal(size=(300, 6))  # three clusters where there are none
    sure, unsure = (small().fit(X) for X in (apart, one))
    assert sure.predict_proba(apart).max(1).mean() > 0.95
    assert unsure.predict_proba(one).max(1).mean() < 0.8
    model = unsure.model_
    calibrated = model.options["answer_temperature"]
    model.options["answer_temperature"] = 1.0
    np.testing.assert_array_equal(unsure.predict(one), unsure.labels_)  # the clusters are unchanged
    assert calibrated > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
def test_tensors_and_arrays_give_the_same_answer(blobs, dtype):
    x = torch.from_numpy(blobs[0]).mul(4).to(dtype)
    from_tensor = small(max_steps=5).fit(x)
    array = x.float().numpy() if dtype == torch.bfloat16 else x.numpy()
    from_array = small(max_steps=5).fit(array)
    np.testing.assert_array_equal(from_tensor.labels_, from_array.labels_)
    np.testing.assert_array_equal(from_tensor.predict_proba(x), from_array.predict_proba(array))


def test_tensors_that_numpy_lacks(blobs, fitted):
    x = torch.from_numpy(blobs[0])
    eight = x.to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(fitted.predict(eight), fitted.predict(eight.float()))
    negative = torch.complex(x, -x).conj().imag  # a view that is to be negated when it is read
    assert negative.is_neg()
    np.testing.assert_array_equal(fitted.predict(negative), fitted.predict(x))
    with pytest.raises(TypeError, match="on the meta device"):
        fitted.predict(x.to("meta"))


@pytest.mark.parametrize("names", [["a"], "abcdef", 6])
def test_names_that_do_not_fit_the_model_are_refused(fitted, tmp_path, names):
    fitted.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"feature_names": names}))
    with pytest.raises(CorruptFileError, match="config.json: feature_names is"):
        MultiHeadClusterer.from_pretrained(tmp_path)


class Dropped(torch.nn.Sequential):
    """A head that draws in each step."""

    def __init__(self, in_dim: int, n_clusters: int) -> None:
        super().__init__(torch.nn.Dropout(0.5), torch.nn.Linear(in_dim, n_clusters))


@row(162)
@pytest.mark.parametrize("head", [None, f"{__name__}.Dropped"])
def test_a_fit_leaves_random_numbers_of_other_threads_alone(blobs, head):
    def drawn(n: int | None, stop: threading.Event) -> list[Any]:
        values: list[Any] = []
        while n is None and not stop.is_set() or n is not None and len(values) < n:
            values.append((torch.rand(3).tolist(), np.random.rand(), random.random()))  # noqa: NPY002
            time.sleep(1e-5)
        return values

    def begin() -> None:
        torch.manual_seed(5)
        np.random.seed(5)  # noqa: NPY002
        random.seed(5)

    begin()
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(drawn, None, stop)
        small(max_steps=12, **({"head": head} if head else {})).fit(blobs[0])
        stop.set()
        beside = other.result()
    begin()
    assert len(beside) > 10 and beside == drawn(len(beside), stop)


def test_units_do_not_matter(blobs):
    X, _ = blobs
    labels = small(max_steps=10).fit_predict(X)
    for unit in (2**-20, 2**40):  # powers of two: exact in any arithmetic
        np.testing.assert_array_equal(small(max_steps=10).fit_predict(X * np.float32(unit)), labels)


def test_random_state_decides_the_seed(blobs):
    def weights(random_state) -> torch.Tensor:
        fitted = small(max_steps=2, n_heads=1, random_state=random_state).fit(blobs[0])
        return fitted.model_.weights

    assert torch.equal(weights(7), weights(np.int64(7)))
    assert not torch.equal(weights(7), weights(8))
    assert torch.equal(weights(np.random.RandomState(7)), weights(np.random.RandomState(7)))
    assert not torch.equal(weights(None), weights(None))
    shared = np.random.RandomState(7)
    assert not torch.equal(weights(shared), weights(shared))
    assert small(max_steps=2, random_state=7).fit(blobs[0]).settings_.seed == 7


def test_saved_and_loaded_again(fitted, blobs, tmp_path):
    X, _ = blobs
    fitted.save_pretrained(tmp_path / "model")
    loaded = MultiHeadClusterer.from_pretrained(str(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict_proba(X), fitted.predict_proba(X))
    assert loaded.get_params() == fitted.get_params()
    assert loaded.settings_ == fitted.settings_
    assert loaded.n_features_in_ == 6 and not hasattr(loaded, "labels_")
    with pytest.raises(ValueError, match="expecting 6 features"):
        loaded.predict(X[:, :5])
    np.testing.assert_array_equal(loaded.fit(X).labels_, fitted.labels_)
    loaded.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        first, second = (tmp_path / folder / name for folder in ("model", "again"))
        assert first.read_bytes() == second.read_bytes()


def test_a_run_folder_loads_and_a_fit_on_its_embeddings_is_the_same(photo_run):
    loaded = MultiHeadClusterer.from_pretrained(photo_run)
    settings = json.loads((photo_run / "config.json").read_text())["settings"]
    expected = [settings[name] for name in ("N_HEADS", "SEED")]
    assert [loaded.n_heads, loaded.random_state] == expected and loaded.n_clusters == 3
    x = EmbeddingStore.open(settings["EMBEDDINGS_DIR"], "train").tensor()
    fitted = again(loaded).fit(x)
    np.testing.assert_array_equal(loaded.predict_proba(x), fitted.predict_proba(x))


def test_the_number_of_clusters_can_be_found(blobs, tmp_path):
    x, truth = blobs
    clusterer = small(None, max_steps=50).fit(x)
    assert clusterer.n_clusters_ == clusterer.number_.n_clusters == 3
    assert adjusted_rand_score(truth, clusterer.labels_) == 1
    levels = clusterer.predict_levels(x)
    assert levels.shape == (len(x), len(clusterer.model_.options["levels"]))
    for level in levels.T:  # each is a part of a cluster
        assert len({*zip(level, clusterer.labels_, strict=True)}) == len(set(level))
    clusterer.save_pretrained(tmp_path)
    again = type(clusterer).from_pretrained(tmp_path)
    assert again.n_clusters == 3
    assert np.array_equal(again.predict_levels(x), levels)
    with pytest.raises(ValueError, match="there are 20 samples; expected at least 64"):
        small("auto").fit(x[:20])


@pytest.mark.slow
def test_a_grid_search_finds_the_number_of_clusters_without_labels(blobs):
    x, truth = blobs
    search = GridSearchCV(small(max_steps=30), {"n_clusters": [2, 3, 6]}, cv=2).fit(x)
    assert search.best_params_ == {"n_clusters": 3}
    best = search.best_estimator_
    assert -0.5 <= best.score(x) <= 1 and best.score(x) == best.score(x)
    assert best.score(x, truth) == pytest.approx(1)
    assert best.score(x, truth[::-1]) < 0.5
    with pytest.raises(ValueError, match="n_samples=1, but the score without y"):
        best.score(x[:1])


def test_none_estimates_k_as_in_a_settings_file_for_data_without_labels(blobs, caplog):
    x, truth = blobs
    caplog.set_level("INFO", "ssl_kd")
    none, auto = (small(n, max_steps=5).fit(x, truth) for n in (None, "auto"))
    np.testing.assert_array_equal(none.labels_, auto.labels_)
    assert none.n_clusters_ == 3 and none.settings_.n_clusters is None
    assert n_clusters_of(None, None, len(x)) is None and n_clusters_of(None, ["a", "b"], 9) == 2
    assert caplog.messages[0].startswith("METHOD is consensus, ")


@pytest.mark.parametrize(("method", "wanted"), [("consensus", 60), ("heads", 2), ("heads", 24)])
def test_as_many_clusters_as_are_wanted_are_returned(blobs, tmp_path, method, wanted):
    x = blobs[0][:90]
    clusterer = small(wanted, method=method, max_steps=5).fit(x)
    assert sorted(set(clusterer.labels_)) == list(range(wanted))
    np.testing.assert_array_equal(clusterer.predict(x), clusterer.labels_)
    probabilities = clusterer.predict_proba(x)
    np.testing.assert_array_equal(probabilities.argmax(1), clusterer.labels_)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    clusterer.save_pretrained(tmp_path)
    again = MultiHeadClusterer.from_pretrained(tmp_path)
    np.testing.assert_array_equal(again.predict_proba(x), probabilities)
    halves = np.concatenate([clusterer.predict(x[:70]), clusterer.predict(x[70:])])
    np.testing.assert_array_equal(halves, clusterer.labels_)


def test_levels_and_outlier_scores_of_the_samples_are_kept(blobs):
    x, _ = blobs
    clusterer = small().fit(x)
    levels = clusterer.levels_
    assert levels.dtype == np.int64 and levels.shape[1] == len(x)
    sizes = [len(set(level)) for level in levels]
    assert sizes == sorted(sizes) == clusterer.model_.options["levels"][::-1]  # coarse to fine
    for coarse, fine in zip(levels, levels[1:], strict=False):
        assert len({*zip(coarse, fine, strict=True)}) == len(set(fine))
    np.testing.assert_array_equal(levels, clusterer.predict_levels(x).T[::-1])
    np.testing.assert_array_equal(clusterer.outlier_score_, clusterer.outlier_scores(x))
    assert clusterer.outlier_score_.dtype == np.float32
    assert (clusterer.outlier_scores(x[:3] + 1000) == 1).all()
    clusterer.partial_fit(x[:40])
    assert clusterer.levels_.shape == (len(levels), 40) and len(clusterer.outlier_score_) == 40


@pytest.mark.slow
def test_partial_fit_adds_samples_and_the_clusters_that_they_offer(blobs, tmp_path):
    x, truth = blobs
    clusterer = small().partial_fit(x)  # not fitted: this fits
    assert np.array_equal(clusterer.labels_, small().fit(x).labels_)
    assert (clusterer.n_clusters_, len(clusterer.new_clusters_)) == (3, 0)
    before = clusterer.predict(x)
    far = np.random.default_rng(0).normal(x.mean(0) + 12, 0.5, (40, 6)).astype(np.float32)
    batch = np.concatenate([x[:30] + 0.01, far])
    clusterer.partial_fit(batch)
    assert (clusterer.n_clusters, clusterer.n_clusters_) == (3, 4)
    assert clusterer.new_clusters_.tolist() == [3] and len(clusterer.labels_) == 70
    assert np.array_equal(clusterer.labels_, clusterer.predict(batch))
    assert np.array_equal(clusterer.labels_[:30], before[:30])
    assert (clusterer.labels_[30:] == 3).mean() > 0.9
    assert np.array_equal(clusterer.predict(x), before)
    assert clusterer.predict_proba(batch).shape == (70, 4)
    np.testing.assert_allclose(clusterer.predict_proba(batch).sum(1), 1, rtol=1e-5)

    clusterer.save_pretrained(tmp_path)
    for other in (type(clusterer).from_pretrained(tmp_path), pickle.loads(pickle.dumps(clusterer))):
        assert other.n_clusters == 3 and other.new_clusters_.tolist() == [3]
        assert np.array_equal(other.predict(batch), clusterer.labels_)
    assert clusterer.fit(x).n_clusters_ == 3
    with pytest.raises(ValueError, match="is expecting 6 features"):
        clusterer.partial_fit(x[:, :5])
    with pytest.raises(NotFittedError):
        _ = small().n_clusters_


def test_a_mapped_file_is_predicted_in_blocks(fitted, blobs, tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", blobs[0])
    mapped, sizes = np.load(tmp_path / "x.npy", mmap_mode="r"), []
    monkeypatch.setattr("ssl_kd.vision.estimator.ROWS_PER_BLOCK", 40)
    predict = type(fitted.model_).predict
    monkeypatch.setattr(
        type(fitted.model_), "predict", lambda model, x: sizes.append(len(x)) or predict(model, x)
    )
    assert np.array_equal(fitted.predict(mapped), fitted.labels_)
    assert sizes == [40, 40, 40, 30]


def test_feature_names_survive_saving(blobs, tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(blobs[0], columns=list("abcdef"))
    fitted = small(max_steps=2).fit(frame)
    fitted.save_pretrained(tmp_path)
    loaded = MultiHeadClusterer.from_pretrained(tmp_path)
    np.testing.assert_array_equal(loaded.predict(frame), fitted.labels_)
    with pytest.raises(ValueError, match="feature names"):
        loaded.predict(frame.rename(columns={"a": "z"}))


@pytest.mark.parametrize("load", [MultiHeadClusterer, ClusterModel])
def test_a_flipped_byte_of_the_weights_is_refused_by_both_digests(load, fitted, tmp_path):
    fitted.save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    expected = json.loads(config.read_text())["model_sha256"]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptFileError, match=rf"{file} .* expected {expected}") as refused:
        load.from_pretrained(tmp_path)
    message = str(refused.value)
    assert hashlib.sha256(data).hexdigest() in message and "\n" not in message
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_sha256": None}))
    load.from_pretrained(tmp_path)  # without a digest nothing is compared


def test_a_folder_without_a_model_names_the_missing_file(fitted, tmp_path):
    (tmp_path / "f").write_text("mine")
    with pytest.raises(ValueError, match="f is a file; expected a folder"):
        fitted.save_pretrained(tmp_path / "f")
    assert (tmp_path / "f").read_text() == "mine"
    with pytest.raises(FileNotFoundError, match="nowhere has no config.json"):
        MultiHeadClusterer.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no model.safetensors.*finished run"):
        MultiHeadClusterer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("X", "error", "message"),
    [
        (np.zeros((1, 3)), ValueError, "minimum of 2"),
        (np.zeros((2, 3)), ValueError, "n_samples=2 is less than n_clusters=3"),
        (np.full((9, 3), np.nan), ValueError, "NaN"),
        (np.full((9, 3), 1e300), ValueError, "too large for dtype"),
        (csr_array(np.eye(9)), TypeError, "[Ss]parse"),
        (torch.eye(9).to_sparse(), TypeError, "pass a dense tensor"),
        (np.zeros((9, 3), dtype=complex), ValueError, "Complex"),
        (np.zeros(9), ValueError, "2D array"),
        ([["a", "b"]] * 9, ValueError, "convert string"),
    ],
    ids=lambda value: None,
)
def test_inputs_that_are_refused(X, error, message):
    with pytest.raises(error, match=message):
        small().fit(X)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"n_clusters": "many"}, "n_clusters is 'many'.*at least 2"),
        ({"n_clusters": 0}, "n_clusters is 0.*at least 2"),
        ({"n_heads": 2.5}, "n_heads is 2.5.*whole number"),
        ({"loss": "temy"}, "loss is 'temy'.*Did you mean temi"),
        ({"random_state": -1}, "random_state is -1"),
        ({"random_state": "seven"}, "cannot be used to seed"),
        ({"device": "abacus"}, "device is 'abacus'"),
        ({"loss": "sharpened", "teacher_temp": 0.9}, "^teacher_temp is 0.9 and student_temp 0.1"),
    ],
)
def test_parameters_that_are_refused_when_fitted(parameters, message, blobs):
    clusterer = small().set_params(**parameters)
    with pytest.raises(ValueError, match=message):
        clusterer.fit(blobs[0])


def test_an_unfitted_estimator_is_refused(blobs, tmp_path):
    with pytest.raises(NotFittedError):
        small().predict(blobs[0])
    with pytest.raises(NotFittedError):
        small().save_pretrained(tmp_path)


@pytest.mark.gpu
def test_trains_on_a_gpu_and_predicts_on_the_cpu(blobs):
    X, y = blobs
    clusterer = small(device="cuda").fit(torch.from_numpy(X).cuda())
    assert clusterer.model_.weights.device.type == "cpu"
    assert adjusted_rand_score(y, clusterer.predict(X)) > 0.9


@pytest.mark.slow
def test_neither_the_order_of_samples_nor_copies_change_the_answer():
    x, y = load_digits(n_class=5, return_X_y=True)
    x = x[:150].astype(np.float32)
    r = np.random.default_rng(0)
    order, turn = r.permutation(150), np.linalg.qr(r.normal(size=(64, 64)))[0]
    labels = small(5).fit(x).labels_
    assert np.array_equal(small(5).fit(x[order]).labels_, labels[order])
    assert np.array_equal(small(5).fit(np.concatenate([x, x[7:9], x[7:8]])).labels_[:150], labels)
    assert np.mean(small(5).fit(3 * x @ turn).labels_ == labels) > 0.99


@pytest.mark.parametrize("method", ["consensus", "heads"])
def test_many_rows_are_clustered_by_the_graph_of_a_part_of_them(monkeypatch, method):
    centres = 5 * np.eye(6)
    y = np.random.default_rng(0).integers(6, size=700)
    x = centres[y] + np.random.default_rng(1).normal(size=(700, 6))
    monkeypatch.setattr("ssl_kd.vision.training_rows.GRAPH_ROWS", 200)
    seen = []
    neighbors = ssl_kd.vision.estimator.neighbors_in_memory
    monkeypatch.setattr(
        ssl_kd.vision.estimator,
        "neighbors_in_memory",
        lambda x, k, **how: seen.append(len(x)) or neighbors(x, k, **how),
    )
    options = {"method": method, "n_heads": 2, "max_steps": 40, "random_state": 0}
    clusterer = MultiHeadClusterer(6, **options).fit(x)
    assert seen == [300]  # fifty for each cluster
    assert len(clusterer.labels_) == len(clusterer.outlier_score_) == 700
    assert len(clusterer.levels_)
    assert adjusted_rand_score(y, clusterer.labels_) > 0.9


def table_of_two_units():
    """Return 120 rows of 3 columns, of which the widest says nothing, and their three groups."""
    y = np.repeat(np.arange(3), 40)
    random = np.random.default_rng(0)
    x = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])[y] + 0.08 * random.normal(size=(120, 2))
    return np.c_[x, 1000 * random.normal(size=120)].astype(np.float32), y


def test_columns_of_different_units_are_named_or_standardized(tmp_path, caplog):
    x, y = table_of_two_units()
    options = {"n_heads": 2, "max_steps": 60, "random_state": 0}
    raw = MultiHeadClusterer(3, **options).fit(x)
    assert "3 columns were not standardized" in caplog.text
    assert adjusted_rand_score(y, raw.labels_) < 0.5
    caplog.clear()
    clusterer = MultiHeadClusterer(3, standardize=True, **options).fit(x)
    assert "standardized" not in caplog.text
    assert adjusted_rand_score(y, clusterer.labels_) > 0.9
    clusterer.save_pretrained(tmp_path)
    loaded = MultiHeadClusterer.from_pretrained(tmp_path)
    assert loaded.standardize
    assert np.array_equal(loaded.predict(x), clusterer.labels_)
    assert np.isfinite(loaded.score(x))


def test_a_constant_column_stays_zero_when_columns_are_standardized():
    x, _ = table_of_two_units()
    x[:, 1] = 5
    clusterer = MultiHeadClusterer(2, standardize=True, n_heads=2, max_steps=20).fit(x)
    assert np.isfinite(clusterer.predict_proba(x)).all()
