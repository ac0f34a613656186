import logging
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_kd.core.precision import Precision
from ssl_kd.core.shards import NonFiniteRow
from ssl_kd.vision.cache import EmbeddingStore
from ssl_kd.vision.data import ArrayDataset, FeatureDataset, FolderDataset, open_dataset
from ssl_kd.vision.extract import Extraction
from ssl_kd.vision.teachers import Teacher, load_teacher
from tests.faults.matrix import row as fault

CPU = Precision.for_device("cpu")


class Sums(Teacher):
    """Embeds an image as its mean and size; counts its calls and fails on request."""

    def __init__(self, fault=None):
        self.name = "sums"
        self.dim = 2
        self.transform_id = "4 px"
        self.sizes = []
        self.threads = set()
        self.fault = fault

    def preprocess(self, image):
        self.threads.add(threading.current_thread().name)
        image = image.convert("RGB").resize((4, 4))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def embed(self, batch):
        assert batch.dtype == torch.uint8
        if self.fault is not None:
            self.fault(batch)
        self.sizes.append(len(batch))
        mean = batch.float().mean((1, 2, 3))
        return torch.stack([mean, torch.ones_like(mean)], 1)


def arrays(n, labels=True):
    images = np.random.default_rng(0).integers(0, 256, (n, 4, 4, 3), dtype=np.uint8)
    return ArrayDataset("a", "train", images, np.arange(n) % 3 if labels else None, None)


def collect(rows):
    return lambda *progress: rows.append(progress)


def run(dataset, teacher, folder, **options):
    options = {"split": "train", "precision": CPU, "batch_size": 4} | options
    return Extraction(dataset, teacher, folder, **options).store()


def test_digits_are_stored_in_proportion(tmp_path):
    for split in ("train", "test"):
        data = open_dataset("digits", split)
        store = run(data, load_teacher("pixels", dataset=data), tmp_path, split=split)
        from sklearn.datasets import load_digits

        digits = load_digits(return_X_y=True)
        rows = [int(name.split("/")[1]) for name in store.ids]
        np.testing.assert_allclose(store.tensor(), digits[0][rows] * 15 / 255, rtol=1e-6)
        assert store.labels is not None
        np.testing.assert_array_equal(store.labels, digits[1][rows])
    opened = torch.load(tmp_path / "embeddings_train.pt", weights_only=True)
    assert opened["embeddings"].shape == (1437, 64)


def test_result_is_in_order_whatever_the_batches_and_threads(tmp_path):
    data = arrays(23)
    assert data.arrays is not None
    expected = torch.from_numpy(data.arrays).float().mean((1, 2, 3))
    for batch_size, workers in ((1, 1), (4, 3), (100, 0), (7, 8)):
        teacher = Sums()
        store = run(
            data, teacher, tmp_path / str(batch_size), batch_size=batch_size, workers=workers
        )
        torch.testing.assert_close(store.tensor()[:, 0], expected)
        assert max(teacher.sizes) == min(batch_size, 23)
        assert len(teacher.threads) <= (workers or torch.get_num_threads())
        assert "MainThread" not in teacher.threads
        assert store.labels is not None and store.labels.tolist() == [i % 3 for i in range(23)]


def test_a_complete_cache_is_opened_and_nothing_computed(tmp_path):
    data = arrays(5)
    first = run(data, Sums(), tmp_path).tensor()

    def never(batch):
        raise AssertionError("computed again")

    assert torch.equal(run(data, Sums(never), tmp_path).tensor(), first)
    assert torch.equal(run(data, Sums(never), tmp_path, rebuild=True).tensor(), first)


def test_pixels_do_not_depend_on_the_precision(tmp_path):
    data = open_dataset("digits", "test")
    teacher = load_teacher("pixels", dataset=data)
    first = run(data, teacher, tmp_path)
    half = Precision(torch.device("cpu"), torch.bfloat16, torch.float32, False, "test")
    assert torch.equal(run(data, teacher, tmp_path, precision=half).tensor(), first.tensor())


def test_nothing_is_written_outside_the_folder(tmp_path):
    root = tmp_path / "deep" / "root"
    odd = root / "dots.." / "a b é ; $(x).png"
    odd.parent.mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(odd)
    (root / "link.png").symlink_to(tmp_path / "nowhere.png")
    before = {p for p in tmp_path.rglob("*")}
    store = run(FolderDataset(root, "odd", "train"), Sums(), tmp_path / "cache")
    assert store.ids == ["dots../a b é ; $(x).png"]
    assert [entry["id"] for entry in store.manifest["unreadable"]] == ["link.png"]
    new = {p for p in tmp_path.rglob("*")} - before
    assert all(p.is_relative_to(tmp_path / "cache") for p in new)


# --- interruptions --------------------------------------------------------------------------------


def test_an_interrupted_extraction_continues_at_the_last_shard(tmp_path):
    data = arrays(40)
    whole = run(data, Sums(), tmp_path / "whole", shard_rows=10).tensor()

    def stop(batch):
        if len(teacher.sizes) == 6:
            raise KeyboardInterrupt

    teacher = Sums(stop)
    with pytest.raises(KeyboardInterrupt):
        run(data, teacher, tmp_path / "cut", shard_rows=10)
    with pytest.raises(FileNotFoundError):
        EmbeddingStore.open(tmp_path / "cut", "train")
    seen = []
    teacher = Sums()
    again = run(data, teacher, tmp_path / "cut", shard_rows=10, progress=collect(seen))
    assert torch.equal(again.tensor(), whole) and again.ids == data.ids
    # Two shards of ten were complete; row 20 starts a batch of its own on the grid of four.
    assert teacher.sizes == [4] * 5
    assert seen[0][1:3] == (24, 40) and seen[-1][1:3] == (40, 40)


def album(root, folders=("2023", "2024", "misc"), each=4):
    rng = np.random.default_rng(0)
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for i in range(each):
            pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{i}.png")
    return root


@fault(171)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("force", [False, True])
def test_an_extraction_continues_under_other_labels(tmp_path, first, force):
    root, cache = album(tmp_path / "album"), tmp_path / "cache"

    def data(labeled):
        return FolderDataset(root, "album", "train", labeled=labeled)

    def stop(batch):
        if len(failing.sizes) == 2:
            raise KeyboardInterrupt

    failing = Sums(stop)
    with pytest.raises(KeyboardInterrupt):
        run(data(first), failing, cache, shard_rows=4)
    again = Sums()
    store = run(data(not first), again, cache, shard_rows=4, force=force)
    embedded = sum(again.sizes)
    assert embedded == 12 if force else embedded <= 8  # complete shards are kept
    expected = [row // 4 for row in range(12)]
    if first:
        assert store.labels is None and store.class_names is None
    else:
        assert store.labels is not None and store.labels.tolist() == expected
        assert store.class_names == ("2023", "2024", "misc")
    for labeled in (False, True):
        opened = run(data(labeled), again, cache)
        assert (opened.labels is not None) == labeled
        assert opened.labels is None or opened.labels.tolist() == expected
    assert sum(again.sizes) == embedded


@fault(171)
def test_labels_of_a_cache_follow_the_classes_of_the_training_split_by_now(tmp_path):
    album(tmp_path / "data" / "train", ("cat", "dog"))
    album(tmp_path / "data" / "test", ("dog",))
    source, cache = str(tmp_path / "data"), tmp_path / "cache"

    def held_out():
        data = open_dataset(source, "test", labels="folders")
        return run(data, Sums(), cache, split="test")

    assert held_out().class_names == ("cat", "dog")
    album(tmp_path / "data" / "train", ("bird",))  # every class behind it has another number now
    store = held_out()
    assert store.class_names == ("bird", "cat", "dog") and store.labels is not None
    assert store.labels.tolist() == [2] * 4


@fault(171)
@pytest.mark.parametrize(
    ("folders", "classes"),
    [
        (("a\nb", "=x", "-1"), ("-1", "=x", "a\nb")),
        ((".hidden", "seen"), ("seen",)),
        (("deep/er", "deep/est"), ("deep",)),
        (("train", "trainer"), ("train", "trainer")),
        (("train", "test"), ()),
        (("Ä", "ä", "日本"), ("Ä", "ä", "日本")),
        (("1", "10", "2"), ("1", "10", "2")),
    ],
)
def test_folders_of_any_name_are_classes_on_request_alone(tmp_path, folders, classes):
    root = str(album(tmp_path / "album", folders))
    plain = open_dataset(root, "train")
    asked = open_dataset(root, "train", labels="folders")
    assert plain.labels is None and plain.class_names is None
    assert (asked.class_names or ()) == classes and list(asked.ids) == list(plain.ids)
    assert asked.fingerprint == plain.fingerprint
    if asked.labels is not None:
        firsts = [id.split("/")[0] for id in asked.ids]
        assert [classes[k] for k in asked.labels] == firsts


# --- memory and numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
)
def test_out_of_memory_halves_the_batch_and_continues(tmp_path, error, caplog):
    data = arrays(37)

    def small_memory(batch):
        if len(batch) > 3:
            raise error

    teacher = Sums(small_memory)
    with caplog.at_level(logging.WARNING):
        store = run(data, teacher, tmp_path / "small", batch_size=16)
    assert set(teacher.sizes) <= {1, 2} and sum(teacher.sizes) == 37
    assert "the teacher now embeds 2 images at a time" in caplog.text
    assert torch.equal(store.tensor(), run(data, Sums(), tmp_path / "large").tensor())


def test_other_errors_are_not_treated_as_out_of_memory(tmp_path):
    def broken(batch):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        run(arrays(5), Sums(broken), tmp_path)
    assert not [t for t in threading.enumerate() if t.name.startswith("decode")]


class Sick(Sums):
    """Gives NaN for one image, by its first pixel."""

    def __init__(self, pixel, value):
        super().__init__()
        self.pixel, self.value = pixel, value

    def embed(self, batch):
        out = super().embed(batch)
        out[(batch[:, :, 0, 0] == self.pixel).all(1), 1] = self.value
        return out


NAMED = r"'sums' gives NaN .* 1 of 4 .*'a/train/6' \(row 6 of a"


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (float("nan"), ValueError, NAMED),
        (float("inf"), ValueError, NAMED),
        (1e30, NonFiniteRow, "a/train/6"),
    ],
)
def test_an_embedding_that_is_not_finite_or_out_of_range_is_named(tmp_path, value, error, message):
    data = arrays(12)
    assert data.arrays is not None
    with pytest.raises(error, match=message):
        run(data, Sick(torch.tensor(data.arrays[6, 0, 0]), value), tmp_path)


# --- features -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64, np.uint8])
def test_features_are_stored_as_they_are(tmp_path, dtype):
    features = np.random.default_rng(0).integers(0, 9, (20, 3)).astype(dtype)
    data = FeatureDataset("f", "train", features, ["b", "a"] * 10, list("abcdefghijklmnopqrst"))
    store = run(data, load_teacher("features", dataset=data), tmp_path)
    np.testing.assert_array_equal(store.tensor(), features.astype(np.float32))
    assert store.class_names == ("a", "b") and store.ids == list("abcdefghijklmnopqrst")


def test_rows_without_features_are_left_out_and_listed(tmp_path, caplog):
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    x[3, 1], x[[7, 8]] = np.nan, 0
    data = FeatureDataset("f", "train", x, np.arange(20) % 2)
    store = run(data, load_teacher("features", dataset=data), tmp_path, shard_rows=8)
    kept = [row for row in range(20) if row not in (3, 7, 8)]
    np.testing.assert_array_equal(store.tensor(), x[kept])
    assert store.ids == [str(row) for row in kept] and store.labels.tolist() == [
        r % 2 for r in kept
    ]
    left_out = [(entry["id"], entry["reason"][:20]) for entry in store.manifest["unreadable"]]
    zero = "all features are zero"[:20]
    assert left_out == [("3", "features contain NaN"), ("7", zero), ("8", zero)]
    assert not caplog.records  # the usage of the data set is logged once, by the run
    empty = FeatureDataset("f", "train", np.full((4, 3), np.nan, np.float32))
    with pytest.raises(ValueError, match="not one of the 4 rows of DATASET f can be used"):
        run(empty, load_teacher("features", dataset=empty), tmp_path / "empty")


def test_teacher_and_data_must_go_together(tmp_path):
    features = FeatureDataset("f", "train", np.ones((3, 2)))
    with pytest.raises(ValueError, match="need --teacher features"):
        run(features, Sums(), tmp_path)
    with pytest.raises(ValueError, match="do not go together"):
        run(arrays(3), load_teacher("features", dataset=features), tmp_path)


def test_a_teacher_with_wrong_preprocessing_is_refused(tmp_path):
    class Flat(Sums):
        def preprocess(self, image):
            return super().preprocess(image)[0]

    with pytest.raises(ValueError, match=r"'sums' prepares an image as \[4, 4\]; expected uint8 "):
        run(arrays(3), Flat(), tmp_path)


def test_a_real_teacher_on_real_images(shared_data, tmp_path):
    data = open_dataset(str(shared_data / "images" / "cifar10"), "test", labels="folders")
    file = shared_data / "models" / "efficientnet_lite0" / "model.safetensors"
    teacher = load_teacher("efficientnet_lite0", weights=file, image_size=64)
    store = run(data, teacher, tmp_path, split="test", batch_size=50)
    x = torch.nn.functional.normalize(store.tensor())
    similar = x @ x.T
    similar.fill_diagonal_(-1)
    assert store.labels is not None
    same = store.labels[similar.argmax(1)] == store.labels
    assert same.float().mean() > 0.4  # 0.1 by chance
