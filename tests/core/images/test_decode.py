import io
import json
import subprocess
import sys
import types
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image, ImageFile

from ssl_kd.core.images import formats
from ssl_kd.vision.data import UnreadableImage, decode
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
from ssl_kd.core.images.decode import decode
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
    monkeypatch.setattr(sys.modules["ssl_kd.core.images.decode"], "LARGEST", 1 << 19)
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
def test_every_format_is_rotated_by_its_exif(tmp_path, mode):
    exif = Image.Exif()
    exif[0x112] = 6
    path = tmp_path / {"CMYK": "x.jpg", "I": "x.tiff", "F": "x.tiff"}.get(mode, "x.png")
    Image.new(mode, (200, 150)).save(path, exif=exif)
    seen = decode(path)
    assert seen.size == (150, 200) and seen.mode in ("L", "RGB")


CORNER = np.zeros((32, 48), np.uint8)
CORNER[:10, :14] = 255
CORNER[20:, 40:] = 85


def content(image, format, **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def in_mode(mode):
    """Return the image CORNER in a mode of Pillow."""
    if mode in ("I", "I;16"):
        return Image.fromarray((CORNER * 257.0).astype(np.int32 if mode == "I" else np.uint16))
    if mode == "F":
        return Image.fromarray(CORNER.astype(np.float32) / 255)
    if mode == "1":
        return Image.fromarray(CORNER > 128)
    image = Image.fromarray(CORNER).convert("RGB")
    return image.quantize(8) if mode == "P" else image.convert(mode)


FILES = [
    *[("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")],
    *[("TIFF", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F")],
    *[("JPEG", mode) for mode in ("L", "RGB", "CMYK")],
    *[("GIF", "P"), ("BMP", "RGB"), ("WEBP", "RGBA"), ("PPM", "L"), ("JPEG2000", "RGB")],
    ("AVIF", "RGB"),
]


@pytest.mark.parametrize(("format", "mode"), FILES)
def test_a_file_and_its_content_give_the_same_image(tmp_path, format, mode):
    if format not in formats.FORMATS:
        pytest.skip(f"this Pillow reads no {format}")
    data = content(in_mode(mode), format)
    (tmp_path / "x").write_bytes(data)
    of_file, of_content = decode(tmp_path / "x"), decode(io.BytesIO(data), "x")
    assert of_file.mode == of_content.mode
    np.testing.assert_array_equal(np.asarray(of_file), np.asarray(of_content))
    assert of_file.info["ssl_kd.bytes"] == of_content.info["ssl_kd.bytes"] == len(data)
    expected = (CORNER > 128) * 255 if mode == "1" else CORNER
    got = np.asarray(of_file.convert("L"), np.float64)
    assert np.abs(got - expected).mean() < (12 if mode == "CMYK" else 2)


def test_content_stays_open_after_it_is_decoded():
    file = io.BytesIO(content(in_mode("RGBA"), "PNG"))
    decode(file)
    assert decode(file).size == (48, 32)


TRANSPOSE = Image.Transpose
STORED = {
    5: TRANSPOSE.TRANSPOSE,
    6: TRANSPOSE.ROTATE_90,
    7: TRANSPOSE.TRANSVERSE,
    8: TRANSPOSE.ROTATE_270,
}
"""Orientation -> how the image CORNER is stored in a file with this tag."""


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F"])
def test_a_turned_tiff_is_shown_upright(tmp_path, mode, compression):
    expected = (CORNER > 128) * 255 if mode == "1" else CORNER
    for orientation, method in STORED.items():
        exif = Image.Exif()
        exif[0x112] = orientation
        stored = in_mode(mode).transpose(method)
        stored.save(tmp_path / "t.tif", exif=exif, compression=compression)
        got = np.asarray(decode(tmp_path / "t.tif").convert("L"), np.float64)
        assert got.shape == CORNER.shape
        assert np.abs(got - expected).mean() < 1, orientation


def refusal(source):
    with pytest.raises(UnreadableImage) as error:
        decode(io.BytesIO(source) if isinstance(source, bytes) else source, "x")
    return error.value.is_damaged, error.value.reason


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "PPM"])
def test_half_a_file_is_damaged(format):
    data = content(in_mode("L"), format)
    assert refusal(data[: len(data) // 2])[0] and refusal(b"")[0] and refusal(b"no image")[0]


def test_a_file_that_may_be_intact_is_not_called_damaged(tmp_path, monkeypatch):
    intact = [tmp_path / "missing.png", tmp_path, b"8BPS\0\1" + bytes(99)]
    of_five_channels = content(in_mode("L"), "TIFF", tiffinfo={277: 5})
    intact.append(of_five_channels)
    not_finite = Image.fromarray(np.array([[0.0, np.nan]], np.float32))
    intact.append(content(not_finite, "TIFF"))
    for source in intact:
        assert not refusal(source)[0], source
    data = content(in_mode("L"), "PNG")
    monkeypatch.setattr(sys.modules["ssl_kd.core.images.decode"], "LARGEST", 99)
    assert not refusal(data)[0]


HEIC = b"\0\0\0\x18ftypheic" + bytes(99)


@pytest.mark.skipif(find_spec("pillow_heif") is not None, reason="pillow-heif is installed")
def test_a_format_that_needs_a_package_names_it():
    is_damaged, reason = refusal(HEIC)
    assert not is_damaged and "install pillow-heif" in reason
    assert ".heic" not in formats.EXTENSIONS and ".jpe" in formats.EXTENSIONS


def test_a_plugin_of_pillow_is_used_if_it_is_installed(monkeypatch):
    class Red(ImageFile.ImageFile):
        format = "RED"

        def _open(self):
            self._mode, self._size, self.tile = "RGB", (2, 3), []
            self.im = Image.new("RGB", self._size, "red").im

    def register():
        Image.register_open("RED", Red, lambda head: head[8:12] == b"heic")

    plugin = formats.Plugin("RED", ".heic", "red", "red_plugin", "register")
    monkeypatch.setattr(formats, "_INSTALLED", [plugin])
    monkeypatch.setitem(sys.modules, "red_plugin", types.SimpleNamespace(register=register))
    monkeypatch.setattr(Image, "OPEN", Image.OPEN.copy())
    monkeypatch.setattr(Image, "ID", Image.ID.copy())
    assert decode(io.BytesIO(HEIC)).getpixel((0, 0)) == (255, 0, 0)
