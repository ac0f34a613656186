"""The models of timm by the names of their authors, and the outputs that TOKEN chooses."""

import re
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import GatedRepoError
from torch import nn

from ssl_kd.core.errors import InputError
from ssl_kd.vision.teacher_kinds import SHORT_NAMES, TIMM_MODELS
from ssl_kd.vision.teachers import Network, TeacherUnavailable, load_teacher
from ssl_kd.vision.teachers.timm_models import timm_transform

timm = pytest.importorskip("timm")


@pytest.mark.parametrize("name", TIMM_MODELS)
def test_every_name_has_published_weights_in_timm(name):
    model, _, tag = TIMM_MODELS[name].partition(".")
    assert timm.is_model(model)
    config = timm.get_pretrained_cfg(TIMM_MODELS[name])
    assert config.tag == tag and config.hf_hub_id


def test_a_family_stands_for_one_of_its_models():
    assert set(SHORT_NAMES.values()) <= TIMM_MODELS.keys()
    assert not SHORT_NAMES.keys() & TIMM_MODELS.keys()


@pytest.fixture
def small(monkeypatch):
    """A function that creates a model of five blocks; teachers are loaded with as many."""
    create = timm.create_model

    def create_small(name, **kwargs):
        sizes = {"depths": (1, 1, 1, 1)} if name.startswith("convnext") else {"depth": 5}
        return create(name, **sizes | kwargs)

    monkeypatch.setattr(timm, "create_model", create_small)
    return create_small


def random_weights(model, file):
    """Save other weights for every parameter than those that are zero or one at the start."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05 if parameter.ndim > 1 else 0.5)
    torch.save(model.state_dict(), file)
    return model.eval()


# name: side of the input, tokens before the patches, whether the first one is a class token
VITS = {
    "dinov3": (32, 5, True),
    "siglip2": (32, 0, False),
    "pe": (32, 1, True),
    "radio": (32, 8, True),
    "aimv2": (28, 0, False),
    "tipsv2": (28, 2, True),
    "clip": (32, 1, True),
}


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_each_token_of_each_family_is_that_of_timms_own_forward(name, small, tmp_path):
    side, prefix, has_class = VITS[name]
    options = {"global_pool": "token"} if name == "dinov3" else {}
    full = SHORT_NAMES[name]
    model = small(TIMM_MODELS[full], img_size=side, num_classes=0, **options)
    random_weights(model, tmp_path / "w.pth")
    batch = torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8)
    layers = []
    for block in model.blocks[-4:]:
        block.register_forward_hook(lambda _module, _input, output: layers.append(output))

    embeddings = {}
    for token in ("class", "patch", "both", *(["last4"] if has_class else [])):
        teacher = load_teacher(name, weights=tmp_path / "w.pth", image_size=side, token=token)
        assert isinstance(teacher, Network) and teacher.name == f"{full} (timm)"
        assert str(teacher.transform) == str(timm_transform(model.pretrained_cfg, side))
        embeddings[token] = teacher.embed(batch)
        assert teacher.dim == embeddings[token].shape[1]
    with torch.no_grad():
        x = teacher.transform.normalize(batch)
        tokens = model.forward_features(x)
        pooled = tokens[:, 0] if name == "dinov3" else model(x)
        normed = [model.norm(layer) for layer in layers[:4]]
    assert tokens.shape[1] == prefix + 4
    patch = tokens[:, prefix:].mean(1)

    def assert_close(token, expected):
        torch.testing.assert_close(embeddings[token], expected, rtol=1e-5, atol=1e-6 * scale)

    scale = max(float(tokens.abs().max()), 1)
    assert_close("class", pooled)
    assert_close("patch", patch)
    assert_close("both", torch.cat([pooled, patch], 1))
    if has_class:
        last = [layer[:, 0] for layer in normed] + [normed[-1][:, prefix:].mean(1)]
        assert_close("last4", torch.cat(last, 1))
        changed = (last[0] - last[3]).abs().max()
        assert changed > 0.01
    else:
        with pytest.raises(InputError, match="has no class token: set it to 'class', 'patch' or"):
            load_teacher(name, weights=tmp_path / "w.pth", image_size=side, token="last4")


def test_a_convnext_of_dinov3_pools_as_timm(small, tmp_path):
    model = small(TIMM_MODELS["dinov3_convnext_tiny"], num_classes=0)
    random_weights(model, tmp_path / "w.pth")
    options = {"weights": tmp_path / "w.pth", "image_size": 64}
    teacher = load_teacher("dinov3_convnext_tiny", **options)
    assert isinstance(teacher, Network)
    batch = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        expected = model(teacher.transform.normalize(batch))
    torch.testing.assert_close(teacher.embed(batch), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="no patch tokens: set it to 'class'"):
        load_teacher("dinov3_convnext_tiny", token="last4", **options)


def gated(status):
    url = "https://huggingface.co/timm/vit_small_patch16_dinov3.lvd1689m/resolve/main/config.json"
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    message = f"Cannot access gated repo for url {url}."
    return GatedRepoError(message, response=response)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("wrapped", [False, True])
def test_gated_weights_name_the_page_and_the_login(status, wrapped, monkeypatch):
    def refuse(*args, **kwargs):
        if not wrapped:
            raise gated(status)
        try:
            raise gated(status)
        except GatedRepoError as error:
            raise OSError("You are trying to access a gated repo.") from error

    monkeypatch.setattr(timm, "create_model", refuse)
    page = "https://huggingface.co/timm/vit_small_patch16_dinov3.lvd1689m"
    message = f"access to {page} is refused: check its name, accept its license there, and log in"
    with pytest.raises(TeacherUnavailable, match=re.escape(message)) as error:
        load_teacher("dinov3")
    assert "`hf auth login`" in str(error.value)
