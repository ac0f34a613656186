"""Image towers of open_clip."""

import importlib.util
import json
import re

import pytest
import torch

from ssl_kd.core.errors import InputError, MissingPackage
from ssl_kd.vision.teachers import Network, load_teacher
from ssl_kd.vision.teachers.open_clip_models import open_clip_transform
from tests.vision.teachers.test_hf_models import picture

PREPROCESSING = {
    "size": (32, 32),
    "mean": [0.5, 0.4, 0.3],
    "std": [0.25, 0.2, 0.3],
    "interpolation": "bicubic",
    "resize_mode": "shortest",
}


def test_without_the_package_the_message_installs_it(monkeypatch):
    real = importlib.util.find_spec
    hidden = lambda name, *args: None if name == "open_clip" else real(name, *args)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(MissingPackage, match=re.escape("pip install 'ssl_kd[open_clip]'")):
        load_teacher("open_clip:ViT-B-32/openai")


@pytest.mark.parametrize(
    ("mode", "ours"), [("shortest", "center"), ("squash", "squash"), ("longest", "border")]
)
def test_the_preprocessing_of_a_tower(mode, ours):
    pytest.importorskip("torchvision")
    transform = open_clip_transform(PREPROCESSING | {"resize_mode": mode})
    assert transform.crop_mode == ours and transform.shape == (32, 32) and transform.resize == 32
    assert transform.mean == (0.5, 0.4, 0.3) and transform.interpolation == "bicubic"


@pytest.fixture
def local(tmp_path):
    """A tiny model of open_clip in a folder, and its name."""
    open_clip = pytest.importorskip("open_clip", reason="open_clip_torch is not installed")
    vision = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 32}
    text = {"context_length": 8, "vocab_size": 99, "width": 32, "heads": 2, "layers": 1}
    config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    torch.manual_seed(0)
    model = open_clip.CLIP(**config)
    torch.save(model.state_dict(), tmp_path / "open_clip_pytorch_model.bin")
    content = {"model_cfg": config, "preprocess_cfg": PREPROCESSING}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    return model.eval(), f"open_clip:local-dir:{tmp_path}"


def test_a_tower_embeds_as_open_clip(local):
    import open_clip  # pyright: ignore[reportMissingImports]

    model, name = local
    teacher = load_teacher(name)
    assert isinstance(teacher, Network) and teacher.dim == 16
    *_, prepare = open_clip.create_model_and_transforms(name.partition(":")[2])
    image = picture(50, 41)
    x = prepare(image)[None]
    batch = teacher.preprocess(image)[None]
    torch.testing.assert_close(teacher.transform.normalize(batch), x, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(
            teacher.embed(batch), model.encode_image(x), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ViT-B-32", {}, "expected open_clip:ViT-B-32/WEIGHTS, with one of: openai"),
        ("ViT-B-3/openai", {}, "did you mean ViT-B-32"),
        ("ViT-B-32/openai", {"token": "patch"}, "gives its image embedding alone"),
        ("ViT-B-32/openai", {"weights": "w.pt"}, "a local model is open_clip:local-dir:FOLDER"),
    ],
)
def test_invalid_names_and_settings_are_refused(name, options, message):
    pytest.importorskip("open_clip", reason="open_clip_torch is not installed")
    with pytest.raises(InputError, match=message):
        load_teacher(f"open_clip:{name}", **options)
