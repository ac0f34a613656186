import os
import sys

import numpy as np
import pytest
from PIL import Image

from ssl_kd.vision.data import ArrayDataset, FolderDataset, UnreadableImage


def picture(path, value=100, size=(4, 3)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 0, 0)).save(path)
    return path


def test_classes_are_the_first_level_at_any_depth_and_case(tmp_path):
    picture(tmp_path / "dog" / "a b.JPG")
    picture(tmp_path / "cat" / "deep" / "er" / "é.png")
    picture(tmp_path / "cat" / "x.JpEg")
    picture(tmp_path / "loose.webp")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    picture(tmp_path / "cat" / ".hidden.png")
    picture(tmp_path / ".git" / "x.png")
    (tmp_path / "empty").mkdir()
    data = FolderDataset(tmp_path, "mine", "train", labeled=True)
    assert data.ids == ["cat/deep/er/é.png", "cat/x.JpEg", "dog/a b.JPG", "loose.webp"]
    assert data.class_names == ("cat", "dog")
    assert data.labels is not None and data.labels.dtype == np.int64
    assert data.labels.tolist() == [0, 0, 1, -1]
    assert len(data) == 4 and data.image(2).size == (4, 3)


def test_folders_are_classes_only_on_request(tmp_path):
    picture(tmp_path / "loose.png")
    flat = FolderDataset(tmp_path, "album", "train", labeled=True)
    assert flat.folders == () and flat.labels is flat.class_names is None
    for name in ("2023/a.png", "2024/b.png", "misc/deep/c.png"):
        picture(tmp_path / name)
    data = FolderDataset(tmp_path, "album", "train")
    assert data.labels is None and data.class_names is None
    assert data.folders == ("2023", "2024", "misc")
    labeled = FolderDataset(tmp_path, "album", "train", labeled=True)
    assert labeled.class_names == data.folders and labeled.fingerprint == data.fingerprint


def test_a_folder_without_images_lists_the_known_formats(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"no image in .*\.jpg"):
        FolderDataset(tmp_path, "mine", "train")


@pytest.fixture
def linked(tmp_path):
    """Return a folder with links of every kind."""
    outside = picture(tmp_path / "outside" / "secret.png")
    (tmp_path / "outside" / "key.txt").write_text("not a picture")
    root = tmp_path / "root"
    inside = picture(root / "cat" / "a.png")
    (root / "cat" / "escape.png").symlink_to(outside)
    (root / "cat" / "dots.png").symlink_to("../../outside/secret.png")
    (root / "cat" / "kept.png").symlink_to(inside)
    (root / "cat" / "key.png").symlink_to(tmp_path / "outside" / "key.txt")
    (root / "cat" / "broken.png").symlink_to(root / "nowhere.png")
    (root / "cat" / "loop.png").symlink_to("loop.png")
    (root / "cat" / "zero.png").symlink_to("/dev/zero")
    (root / "cat" / "up").symlink_to("..")
    (root / "dog").symlink_to(tmp_path / "outside")
    return root


def verdicts(data):
    seen = {}
    for i, name in enumerate(data.ids):
        try:
            seen[name] = data.image(i).size
        except UnreadableImage as error:
            assert error.id == name
            seen[name] = error.reason.split(",")[0]
    return seen


def test_links_to_images_are_read_and_counted_and_no_others_are_followed(linked):
    data = FolderDataset(linked, "mine", "train")
    assert verdicts(data) == {
        "cat/a.png": (4, 3),
        "cat/broken.png": "a broken link",
        "cat/dots.png": (4, 3),
        "cat/escape.png": (4, 3),
        "cat/kept.png": (4, 3),
        "cat/key.png": "UnidentifiedImageError: cannot identify image file",
        "cat/loop.png": "a broken link",
        "cat/up": "a link to a folder",
        "cat/zero.png": "a broken link",
        "dog": "a link to a folder",
    }
    outside = os.path.realpath(linked.parent / "outside")
    assert data.usage.used == f"10 images in 1 folder, 3 of them links to files in {outside}"
    before = data.fingerprint
    picture(linked.parent / "outside" / "secret.png", value=7)
    assert FolderDataset(linked, "mine", "train").fingerprint != before


def test_links_in_a_list_of_files_are_not_followed_out_of_the_folder(linked):
    paths = ["cat/a.png", "cat/escape.png", "cat/kept.png"]
    data = FolderDataset(linked, "mine", "train", paths=paths)
    assert verdicts(data) == {
        "cat/a.png": (4, 3),
        "cat/escape.png": "a symbolic link that leaves the data folder",
        "cat/kept.png": (4, 3),
    }
    assert data.usage.used == "3 images in 1 folder"


def test_files_that_are_not_read_are_counted_by_suffix_with_what_reads_them(tmp_path):
    picture(tmp_path / "a.png")
    for name in ("b.HEIC", "deep/c.heic", "d.cr2", "e.txt", "f", ".hidden.png", ".git/g.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    left_out = [str(part) for part in FolderDataset(tmp_path, "mine", "train").usage.left_out]
    assert left_out == [
        "2 files .heic (b.HEIC, deep/c.heic): install pillow-heif to read them",
        "1 file .cr2 (d.cr2): convert them to TIFF, with rawpy",
        "2 other files: no images: 1 .txt, 1 without a suffix",
        "2 hidden (.git/, .hidden.png): names that begin with a dot are skipped",
    ]
    (tmp_path / "a.png").unlink()
    with pytest.raises(FileNotFoundError, match="no image in .*2 files .heic .*pillow-heif"):
        FolderDataset(tmp_path, "mine", "train")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    data = FolderDataset(tmp_path, "mine", "train")
    with pytest.raises(UnreadableImage, match="device"):
        data.image(0)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux only")
def test_a_name_that_is_not_utf8_has_a_printable_id(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png")
    Image.new("L", (2, 2)).save(path)
    data = FolderDataset(tmp_path, "mine", "train")
    assert data.ids == ["caf\\xe9.png"]
    data.ids[0].encode("utf-8")
    assert data.image(0).size == (2, 2)


def test_fingerprint_follows_content_names_and_labels_not_times(tmp_path):
    def fingerprint():
        return FolderDataset(tmp_path, "mine", "train").fingerprint

    path = picture(tmp_path / "cat" / "a.png")
    picture(tmp_path / "dog" / "b.png")
    first = fingerprint()
    os.utime(path, (1, 1))
    assert fingerprint() == first
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert fingerprint() != first
    picture(path)
    assert fingerprint() == first
    path.rename(tmp_path / "dog" / "a.png")
    assert fingerprint() != first


def test_every_byte_of_a_large_set_counts(tmp_path, monkeypatch, caplog):
    from ssl_kd.vision.data import digests

    small = np.random.default_rng(0).random((5000, 3))
    before = digests.digest_array(small, np.arange(5000))
    monkeypatch.setattr(digests, "LARGE", 10)
    monkeypatch.setattr(digests, "BLOCK", 1000)
    assert digests.digest_array(small, np.arange(5000)) == before  # in blocks, the same
    small[5] += 1
    assert digests.digest_array(small, np.arange(5000)) != before

    for i in range(20):
        (tmp_path / f"{i:04}.png").write_bytes(bytes([i % 256]) * 20)
    before = FolderDataset(tmp_path, "mine", "train").fingerprint
    with caplog.at_level("INFO", "ssl_kd"):
        (tmp_path / "0004.png").write_bytes(b"y" * 20)
        assert FolderDataset(tmp_path, "mine", "train").fingerprint != before
    assert "reading all 0.0 GiB of the data" in caplog.text


def test_arrays_come_back_as_images():
    arrays = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    data = ArrayDataset("mine", "train", arrays, np.array([1, 0]), ("a", "b"))
    assert data.ids == ["mine/train/0", "mine/train/1"]
    assert data.image(1).mode == "L"
    np.testing.assert_array_equal(np.asarray(data.image(1)), arrays[1])
    other = ArrayDataset("mine", "train", arrays, np.array([0, 1]), ("a", "b"))
    assert other.fingerprint != data.fingerprint


def test_class_numbers_can_be_fixed_by_another_split(tmp_path):
    picture(tmp_path / "dog" / "a.png")
    names = ("ant", "cat", "dog")
    data = FolderDataset(tmp_path, "mine", "test", labeled=True, class_names=names)
    assert data.labels is not None
    assert data.labels.tolist() == [2] and data.class_names == ("ant", "cat", "dog")
    with pytest.raises(ValueError, match=r"\['dog'\]; expected those of the training"):
        FolderDataset(tmp_path, "mine", "test", labeled=True, class_names=("ant",))
