from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_kd.core.errors import InputError
from ssl_kd.vision.teachers import Network, Transform
from ssl_kd.vision.teachers.load import load_teacher
from ssl_kd.vision.teachers.timm_models import timm_transform
from ssl_kd.vision.teachers.torchvision_models import torchvision_transform

timm = pytest.importorskip("timm")
create_transform = timm.data.create_transform
resolve_data_config = timm.data.resolve_data_config


def noise(width, height, mode="RGB"):
    rng = np.random.default_rng(width * height)
    # Smooth enough for resampling to be a matter of rounding only.
    small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC).convert(mode)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize(("crop_pct", "input_size"), [(0.875, (28, 28)), (1.1, (24, 40))])
@pytest.mark.parametrize(("width", "height"), [(40, 30), (31, 77), (32, 32), (5, 4)])
def test_input_equals_timms_own_transform(
    interpolation, crop_mode, crop_pct, input_size, width, height
):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    config = {"input_size": (3, *input_size), "interpolation": interpolation, "mean": mean}
    config |= {"crop_pct": crop_pct, "crop_mode": crop_mode, "std": std}
    assert_equal_input(config, noise(width, height))


def assert_equal_input(config, image):
    """Check that an image becomes what timm makes of it for a configuration of weights."""
    theirs: Any = create_transform(**resolve_data_config(pretrained_cfg=config))
    ours = timm_transform(config)
    got = ours.normalize(ours(image)[None])[0]
    torch.testing.assert_close(got, theirs(image), rtol=1e-5, atol=1e-5)
    assert got.shape == (3, *ours.shape) == (3, *config["input_size"][-2:])


def configurations():
    """Yield the module of each timm model, and each configuration of its weights."""
    for module in sorted(timm.list_modules()):
        for name in timm.list_models(module=module):
            for tagged in timm.list_pretrained(f"{name}.*") or [name]:
                config = timm.get_pretrained_cfg(tagged)
                if config is not None:
                    yield module, config.to_dict()


def kind(config):
    """Everything in a configuration that changes the input, except for its size."""
    data = resolve_data_config(pretrained_cfg=config)
    data["input_size"] = len(set(data["input_size"][-2:]))
    return str(sorted(data.items()))


@pytest.mark.parametrize("by", ["family", pytest.param("setting", marks=pytest.mark.slow)])
def test_input_of_every_family_equals_timms(by):
    chosen = {}
    for module, config in configurations():
        rare = config["crop_mode"] == "border" or len(set(config["input_size"][-2:])) == 2
        key = (module, rare) if by == "family" else str(config["input_size"]) + kind(config)
        if key not in chosen or config["input_size"] < chosen[key]["input_size"]:
            chosen[key] = config
    assert len(chosen) >= 90
    sizes = [(97, 211)] if by == "family" else [(97, 211), (160, 120), (640, 200)]
    for config in chosen.values():
        for size in sizes:
            assert_equal_input(config, noise(*size))


@pytest.mark.slow
@pytest.mark.parametrize("module", sorted(timm.list_modules()))
def test_a_wrapped_checkpoint_of_every_family_embeds_as_timm_does(module, tmp_path):
    """The smallest model of a family, with random weights in a checkpoint of Lightning."""
    models = timm.list_models(module=module)
    sizes = {}
    for name in sorted(models, key=len)[:6]:
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in timm.create_model(name).parameters())
    name = min(sizes, key=lambda name: sizes[name]) if sizes else ""
    if not sizes or sizes[name] > 120e6:
        pytest.skip("no model of this family is small")
    torch.manual_seed(0)
    model: Any = timm.create_model(name, pretrained=False).eval()
    state = {f"model.{key}": value for key, value in model.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "w.ckpt")
    try:
        teacher = load_teacher(f"timm:{name}", weights=tmp_path / "w.ckpt")
    except InputError as error:
        assert "does not accept" in str(error), error
        pytest.skip(str(error))
    image = noise(300, 260)
    theirs: Any = create_transform(**resolve_data_config(model=model))
    model.reset_classifier(0)
    with torch.no_grad():
        expected = model(theirs(image)[None])
    got = teacher.embed(teacher.preprocess(image)[None])
    # Random weights amplify rounding errors, so they are compared with the largest value.
    scale = float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-3 * scale)


@pytest.mark.parametrize("image_size", [None, 64])
def test_input_equals_torchvisions_for_every_model(image_size):
    from torchvision import models

    for name in models.list_models(module=models):
        preset: Any = models.get_model_weights(name)["DEFAULT"].transforms()
        ours = torchvision_transform(preset, image_size)
        image = noise(97, 131)
        if image_size is None:
            got = ours.normalize(ours(image)[None])[0]
            torch.testing.assert_close(got, preset(image), rtol=1e-5, atol=1e-5)
        else:  # the same share of the image is kept
            share = preset.crop_size[0] / preset.resize_size[0]
            assert ours.shape == (64, 64) and ours.resize == round(64 / share)


def test_long_thin_and_gray_images():
    ours = Transform(28, 32)
    border = Transform((28, 20), (32, 24), crop_mode="border")
    for size in ((1000, 1), (1, 1000), (1, 1), (20000, 3)):
        assert ours(noise(*size)).shape == (3, 28, 28)
        assert border(noise(*size)).shape == (3, 28, 20)
    assert str(ours).startswith("28 px of 32 bicubic centre, mean [0.485, ")
    assert str(border).startswith("28x20 px of 32x24 bicubic border, mean [0.485, ")
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
