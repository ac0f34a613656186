"""Images of more than 8 bits whose files could hold larger values than they do."""

import io
import struct
import zlib

import numpy as np
import pyarrow as arrow
import pytest
from PIL import Image
from pyarrow import parquet

from ssl_kd.core.images.levels import Extremes, Levels
from ssl_kd.vision.data import FeatureDataset, FolderDataset, decode, open_dataset
from ssl_kd.vision.data.media import PictureTable

RAMP = np.tile(np.linspace(0, 1, 64), (48, 1))


def save(path, values, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path, **options)
    return path


def of_bits(bits, scale=1.0, dtype=np.uint16):
    """Return a ramp from 0 to the largest value of some bits, times `scale`."""
    return np.rint(RAMP * (2**bits - 1) * scale).astype(dtype)


def color_png(colors):
    """Return a PNG of 16-bit colors `[h, w, 3 or 4]`, which Pillow does not write."""

    def chunk(name, data):
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    height, width, channels = colors.shape
    header = struct.pack(">IIBBBBB", width, height, 16, 2 if channels == 3 else 6, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colors)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


def seen(data, i):
    return np.asarray(data.image(i)).astype(float)


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_white_is_the_largest_value_of_the_bits_that_the_set_uses(tmp_path, bits, suffix):
    save(tmp_path / f"a.{suffix}", of_bits(bits, 0.2))
    save(tmp_path / f"b.{suffix}", of_bits(bits, 0.9))
    data = FolderDataset(tmp_path, "mine", "train")
    np.testing.assert_allclose(seen(data, 0), RAMP * 255 * 0.2, atol=0.6 + 128 / 2**bits)
    np.testing.assert_allclose(seen(data, 1), RAMP * 255 * 0.9, atol=0.6 + 128 / 2**bits)
    if bits == 16:
        assert data.levels == Levels() and data.usage.used == "2 images"
    else:
        assert data.levels == Levels(integers=(0, 2**bits - 1))
        text = f"integers from 0 (black) to {2**bits - 1} (white)"
        assert data.usage.used == f"2 images; values of more than 8 bits: {text}"
    # A file alone is scaled by what it can hold.
    alone = np.asarray(decode(tmp_path / f"b.{suffix}"))
    np.testing.assert_allclose(alone, of_bits(bits, 0.9) / 257, atol=0.51)


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("bits", [10, 12, 14])
def test_colors_of_fewer_bits_than_their_file(tmp_path, bits, channels):
    ramp = of_bits(bits, 0.9)
    colors = np.stack([ramp, ramp[:, ::-1], ramp // 3, np.full_like(ramp, 65535)], 2)
    (tmp_path / "a.png").write_bytes(color_png(colors[..., :channels]))
    data = FolderDataset(tmp_path, "mine", "train")
    assert data.levels == Levels(integers=(0, 2**bits - 1))
    expected = colors[..., :3] * (255 / (2**bits - 1))
    np.testing.assert_allclose(seen(data, 0), expected, atol=0.6)
    content = io.BytesIO((tmp_path / "a.png").read_bytes())
    same = np.asarray(decode(content, levels=data.levels))
    np.testing.assert_array_equal(same, np.asarray(data.image(0)))


FLOATS = {
    "unit": (1.0, 1.0),
    "ten": (10.0, 10.0),
    "small": (0.02, 0.02),
    "bytes": (250.0, 255.0),
    "sixteen bits": (60000.0, 65535.0),
    "large": (1e6, 1e6),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_scaled_by_a_usual_range_or_by_the_largest_value(tmp_path, name):
    largest, white = FLOATS[name]
    for file, share in (("a", 0.3), ("b", 1.0)):
        save(tmp_path / f"{file}.tif", (RAMP * largest * share).astype(np.float32))
    data = FolderDataset(tmp_path, "mine", "train")
    np.testing.assert_allclose(seen(data, 0), RAMP * largest * 0.3 * 255 / white, atol=0.6)
    np.testing.assert_allclose(seen(data, 1), RAMP * largest * 255 / white, atol=0.6)


def test_a_tag_declares_the_largest_value_of_a_file_and_of_the_set(tmp_path):
    dark = save(tmp_path / "dark.tif", of_bits(12, 0.1), tiffinfo={281: 4095})
    expected = RAMP * 255 * 0.1
    np.testing.assert_allclose(np.asarray(decode(dark)), expected, atol=0.6)
    data = FolderDataset(tmp_path, "mine", "train")
    assert data.levels == Levels(integers=(0, 4095))
    np.testing.assert_allclose(seen(data, 0), expected, atol=0.6)


def test_values_beyond_the_levels_are_clipped(tmp_path):
    bright = save(tmp_path / "a.png", of_bits(16))
    image = np.asarray(decode(bright, levels=Levels(integers=(0, 4095))))
    assert image[0, 0] == 0 and (np.diff(image[0].astype(int)) >= 0).all() and image[0, -1] == 255


def test_levels_count_as_content_where_they_are_not_those_of_the_files(tmp_path):
    for bits in (12, 16):
        save(tmp_path / str(bits) / "a.png", of_bits(bits))
        data = FolderDataset(tmp_path / str(bits), "mine", "train")
        alone = FolderDataset(tmp_path / str(bits), "mine", "train", levels=Levels())
        assert (data.fingerprint == alone.fingerprint) == (bits == 16)


def test_a_test_split_can_have_the_levels_of_the_training_split(tmp_path):
    save(tmp_path / "train" / "a.png", of_bits(12))
    save(tmp_path / "test" / "a.png", of_bits(12, 0.1))
    train = open_dataset(str(tmp_path), "train")
    assert isinstance(train, FolderDataset)
    test = open_dataset(str(tmp_path), "test", levels=train.levels)
    np.testing.assert_allclose(seen(test, 0), RAMP * 25.5, atol=0.6)


def test_levels_survive_a_file_and_a_mixed_set():
    extremes = [Extremes(0, 900, False, 65535), Extremes(0, 4000, False, 65535)]
    extremes += [Extremes(-2, 3, True), Extremes(0, 9, True)]
    levels = Levels.of(extremes)
    assert levels == Levels((0, 4095), (-2, 9))
    assert Levels.from_dict(levels.to_dict()) == levels
    assert Levels.from_dict(None) == Levels.of([]) == Levels()
    assert Levels.of([Extremes(0, 70000, False)]) == Levels((0, 70000))
    assert Levels.of([Extremes(0, 0, True)]) == Levels()


@pytest.mark.parametrize("by", ["content", "path"])
@pytest.mark.parametrize("with_features", [False, True])
def test_pictures_of_a_table_are_seen_as_those_of_a_folder(tmp_path, by, with_features):
    for name, share in (("a", 0.2), ("b", 0.9)):
        save(tmp_path / "images" / f"{name}.png", of_bits(12, share))
    folder = FolderDataset(tmp_path / "images", "mine", "train")
    files = [folder.image_file(i) for i in range(2)]
    pictures = [
        {"bytes": file.read_bytes() if by == "content" else None, "path": f"images/{file.name}"}
        for file in files
    ]
    columns = {"image": pictures} | (
        {"features": [[0.0, 1.0], [1.0, 0.0]]} if with_features else {}
    )
    parquet.write_table(arrow.table(columns), tmp_path / "t.parquet")
    table = open_dataset(str(tmp_path / "t.parquet"), "train")
    assert isinstance(table, FeatureDataset if with_features else PictureTable)
    rows = table.rows
    assert rows is not None and rows.levels == folder.levels == Levels(integers=(0, 4095))
    for i in range(2):
        np.testing.assert_array_equal(np.asarray(rows.image(i)), np.asarray(folder.image(i)))
    if isinstance(table, PictureTable):
        assert "integers from 0 (black) to 4095 (white)" in table.usage.used
        other = open_dataset(str(tmp_path / "t.parquet"), "train", levels=Levels())
        assert isinstance(other, PictureTable) and other.fingerprint != table.fingerprint
        assert np.asarray(other.image(1)).max() < 20
