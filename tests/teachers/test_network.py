import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_kd.teachers import Network, Transform

timm = pytest.importorskip("timm")


def noise(width, height, mode="RGB"):
    rng = np.random.default_rng(width * height)
    # Smooth enough for resampling to be a matter of rounding only.
    small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC).convert(mode)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("crop_mode", ["center", "squash"])
@pytest.mark.parametrize(("width", "height"), [(40, 30), (31, 77), (32, 32), (5, 4)])
def test_input_equals_timms_own_transform(interpolation, crop_mode, width, height):
    from timm.data.transforms_factory import create_transform

    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    theirs: Any = create_transform(
        (3, 28, 28),
        interpolation=interpolation,
        crop_pct=0.875,
        crop_mode=crop_mode,
        mean=mean,
        std=std,
    )
    ours = Transform(28, 32, interpolation, mean, std, squash=crop_mode == "squash")
    assert math.floor(28 / 0.875) == 32
    image = noise(width, height)
    got = ours.normalize(ours(image)[None])[0]
    torch.testing.assert_close(got, theirs(image), rtol=1e-5, atol=1e-5)


def test_input_equals_torchvisions_own_transform():
    from torchvision.models import ResNet18_Weights

    preset = ResNet18_Weights.DEFAULT.transforms()
    ours = Transform(224, 256, "bilinear")
    image = noise(300, 260)
    got = ours.normalize(ours(image)[None])[0]
    torch.testing.assert_close(got, preset(image), rtol=1e-5, atol=1e-5)


def test_long_thin_and_gray_images():
    ours = Transform(28, 32)
    for size in ((1000, 1), (1, 1000), (1, 1), (20000, 3)):
        assert ours(noise(*size)).shape == (3, 28, 28)
    out = Transform(8, 8)(noise(8, 8, "L"))
    assert out.dtype == torch.uint8
    assert torch.equal(out[0], out[1]) and torch.equal(out[1], out[2])


def test_network_is_frozen_and_deterministic():
    model = timm.create_model("resnet18", pretrained=False, num_classes=0)
    teacher = Network("r", model, model, Transform(32, 32))
    assert teacher.dim == 512 and not teacher.model.training
    assert not any(p.requires_grad for p in model.parameters())
    batch = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    out = teacher.embed(batch)
    assert out.shape == (3, 512) and out.dtype == torch.float32 and out.is_inference()
    assert torch.equal(out, teacher.embed(batch))
    with torch.autocast("cpu", torch.bfloat16):
        assert teacher.embed(batch).dtype == torch.float32


def test_a_size_the_network_does_not_take():
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=1, pretrained=False, num_classes=0
    )
    with pytest.raises(ValueError, match=r"IMAGE_SIZE is 48, which v does not accept"):
        Network("v", model, model, Transform(48, 48))
