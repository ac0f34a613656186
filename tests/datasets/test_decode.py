import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageFile

from ssl_kd.datasets import UnreadableImage, decode
from tests.faults.matrix import row


@pytest.fixture
def awkward(shared_data):
    return shared_data / "images" / "awkward"


def test_every_awkward_file_decodes_or_is_named(awkward):
    expected = json.loads((awkward / "expected.json").read_text())
    assert len(expected) == 28
    for name, fact in expected.items():
        if not fact["loads"]:
            with pytest.raises(UnreadableImage) as error:
                decode(awkward / name, name)
            assert error.value.id == name
            assert fact["error"] in error.value.reason
            assert str(awkward) not in error.value.reason
            continue
        image = decode(awkward / name)
        assert image.mode in ("L", "RGB")
        width, height = fact["size"]
        turned = fact.get("exif_orientation") in (6, 8)
        assert image.size == ((height, width) if turned else (width, height))
        # Where PIL's plain conversion is right ours must agree with it.
        if name not in ("grey16.png", "float32.tiff", "rgba.png", "grey_alpha_LA.png"):
            if "transparent" not in name:
                mean = np.asarray(image.convert("RGB"), np.float64).mean((0, 1))
                np.testing.assert_allclose(mean, fact["mean_rgb"], atol=0.1)


def test_red_block_is_at_the_top_left_after_exif(awkward):
    for number in (3, 6, 8):
        image = decode(awkward / f"exif_orientation_{number}.jpg")
        assert image.size == (96, 64)
        red, green, blue = np.asarray(image, np.float64)[2:12, 2:12].mean((0, 1))
        assert red > 200 and green < 60 and blue < 60


def test_float_and_sixteen_bits_are_scaled_not_clipped(awkward, tmp_path):
    assert np.asarray(decode(awkward / "float32.tiff")).mean() == pytest.approx(127.5, abs=1)
    ramp = np.tile(np.linspace(0, 65535, 96), (8, 1)).astype(np.uint16)
    for name in ("ramp.png", "ramp.tiff"):
        Image.fromarray(ramp).save(tmp_path / name)
        got = np.asarray(decode(tmp_path / name), np.float64)
        np.testing.assert_allclose(got, ramp / 257, atol=0.51)
    stored = np.asarray(Image.open(awkward / "grey16.png"), np.float64)
    np.testing.assert_allclose(np.asarray(decode(awkward / "grey16.png")), stored / 257, atol=0.51)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[0.0, 0.5, 1.0]], [[0, 128, 255]]),
        ([[0.0, 100.0, 255.0]], [[0, 100, 255]]),
        ([[0.0, 257.0, 65535.0]], [[0, 1, 255]]),
        ([[-1.0, 0.0, 1.0]], [[0, 128, 255]]),
        ([[-7.0, -7.0, -7.0]], [[0, 0, 0]]),
    ],
)
def test_float_range_is_the_smallest_that_holds(tmp_path, values, expected):
    Image.fromarray(np.array(values, np.float32)).save(tmp_path / "f.tiff")
    assert np.asarray(decode(tmp_path / "f.tiff")).tolist() == expected


def test_nan_pixels_are_refused(tmp_path):
    Image.fromarray(np.array([[0.0, np.nan]], np.float32)).save(tmp_path / "f.tiff")
    with pytest.raises(UnreadableImage, match="NaN"):
        decode(tmp_path / "f.tiff", "f")


def test_alpha_is_laid_on_white(awkward, tmp_path):
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[0, 0] = (0, 0, 0, 255)
    rgba[0, 1] = (200, 0, 0, 128)
    Image.fromarray(rgba).save(tmp_path / "a.png")
    image = np.asarray(decode(tmp_path / "a.png")).astype(int)
    assert image[0, 0].tolist() == [0, 0, 0]
    assert image[1, 1].tolist() == [255, 255, 255]
    np.testing.assert_allclose(image[0, 1], [227, 127, 127], atol=1)
    for name in ("rgba.png", "grey_alpha_LA.png", "palette_transparent_P.png"):
        source = np.asarray(Image.open(awkward / name).convert("RGBA"), np.float64)
        alpha = source[..., 3:] / 255
        assert alpha.min() < 1
        on_white = source[..., :3] * alpha + 255 * (1 - alpha)
        np.testing.assert_allclose(np.asarray(decode(awkward / name)), on_white, atol=1.01)


def test_a_bomb_is_refused_and_the_switches_of_pil_stay(awkward):
    before = Image.MAX_IMAGE_PIXELS
    with pytest.raises(UnreadableImage, match="bomb"):
        decode(awkward / "bomb_182Mpx_1bit.png")
    assert Image.MAX_IMAGE_PIXELS == before and ImageFile.LOAD_TRUNCATED_IMAGES is False


MEASURE = """
import resource, sys
from PIL import Image
from ssl_kd.datasets.decode import decode
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
decode(sys.argv[1])
for path in sys.argv[2:]:
    before = peak()
    image = decode(path)
    print((peak() - before) / (image.width * image.height))
"""


@row(168)
@pytest.mark.skipif(sys.platform != "linux", reason="getrusage counts otherwise")
def test_decoding_takes_as_much_memory_as_is_reckoned_with(tmp_path):
    side = 3000
    Image.new("L", (9, 9)).save(tmp_path / "first.png")
    Image.new("I;16", (side, side), 300).save(tmp_path / "16.png")
    Image.new("LA", (side, side), (1, 2)).save(tmp_path / "la.png")
    exif = Image.Exif()
    exif[0x112] = 6
    Image.new("RGB", (side, side)).save(tmp_path / "turned.jpg", exif=exif)
    paths = [tmp_path / name for name in ("first.png", "16.png", "la.png", "turned.jpg")]
    done = subprocess.run([sys.executable, "-c", MEASURE, *paths], capture_output=True, check=True)
    sixteen, transparent, turned = map(float, done.stdout.split())
    assert sixteen < 4 and transparent < 9 and turned < 9  # bytes a pixel; they were 6, 20 and 8


@pytest.mark.parametrize("format", ["png", "webp", "jpg"])
def test_the_memory_of_decoding_is_limited(tmp_path, monkeypatch, format):
    limit = {"png": 256, "webp": 161, "jpg": 256}[format]
    monkeypatch.setattr(sys.modules["ssl_kd.datasets.decode"], "LARGEST", 1 << 19)
    path = tmp_path / f"x.{format}"
    Image.new("RGB", (limit, limit)).save(path)
    assert decode(path).size == (limit, limit)
    Image.new("RGB", (limit + 4, limit)).save(path)
    if format == "jpg":  # decoded at half its size
        assert decode(path).size == ((limit + 4) // 2, limit // 2)
        return
    message = rf"decoding {limit + 4} x {limit} pixels \(RGB\) takes 0 MiB; expected at most 0"
    with pytest.raises(UnreadableImage, match=message):
        decode(path)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK", "I", "F"])
def test_every_kind_is_turned_as_its_file_says(tmp_path, mode):
    exif = Image.Exif()
    exif[0x112] = 6
    path = tmp_path / {"CMYK": "x.jpg", "I": "x.tiff", "F": "x.tiff"}.get(mode, "x.png")
    Image.new(mode, (200, 150)).save(path, exif=exif)
    seen = decode(path)
    assert seen.size == (150, 200) and seen.mode in ("L", "RGB")
