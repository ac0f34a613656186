"""Image models of transformers, with tiny random weights in a folder."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ssl_kd.core.errors import InputError
from ssl_kd.vision.teachers import Network, TeacherUnavailable, load_teacher
from ssl_kd.vision.teachers.hf_models import processor_transform

tf = pytest.importorskip("transformers")
pytest.importorskip("torchvision")

VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
SQUARE = {"height": 32, "width": 32}


def vit():
    return tf.ViTModel(tf.ViTConfig(**VISION)), tf.ViTImageProcessor(size=SQUARE)


def dinov2():
    config = tf.Dinov2WithRegistersConfig(**VISION)
    processor = tf.BitImageProcessor(size={"shortest_edge": 36}, crop_size=32)
    return tf.Dinov2WithRegistersModel(config), processor


def dinov3():
    config = tf.DINOv3ViTConfig(**VISION, num_register_tokens=3)
    return tf.DINOv3ViTModel(config), tf.DINOv3ViTImageProcessor(size=SQUARE)


def clip():
    config = tf.CLIPConfig(vision_config=VISION, text_config=TEXT, projection_dim=16)
    processor = tf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32)
    return tf.CLIPModel(config), processor


def siglip():
    config = tf.SiglipConfig(vision_config=VISION, text_config=TEXT)
    return tf.SiglipModel(config), tf.SiglipImageProcessor(size=SQUARE)


def convnext():
    config = tf.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1])
    return tf.ConvNextModel(config), tf.ConvNextImageProcessor(size={"shortest_edge": 32})


def swin():
    config = tf.SwinConfig(
        image_size=32, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2]
    )
    return tf.SwinModel(config), tf.ViTImageProcessor(size=SQUARE)


# model: tokens before the patches; None: it has no patch tokens
MODELS = {vit: 1, dinov2: 5, dinov3: 4, clip: 1, siglip: 0, convnext: None, swin: None}


@pytest.fixture
def saved(tmp_path):
    """A function that saves a model with random weights, and returns it and its processor."""

    def save(make):
        torch.manual_seed(0)
        model, processor = make()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1 if parameter.ndim > 1 else 0.5)
        model.save_pretrained(tmp_path)
        processor.save_pretrained(tmp_path)
        return model.eval(), processor, f"hf:{tmp_path}"

    return save


def test_nothing_is_written_to_the_screen(saved, capfd):
    _, _, name = saved(vit)
    capfd.readouterr()  # saving has a progress bar
    load_teacher(name)
    assert capfd.readouterr() == ("", "")


def picture(width=50, height=41):
    small = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("make", MODELS)
def test_each_token_is_that_of_the_models_own_forward(make, saved):
    model, _, name = saved(make)
    prefix = MODELS[make]
    batch = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    teacher = load_teacher(name)
    assert isinstance(teacher, Network) and teacher.name == name
    x = teacher.transform.normalize(batch)
    with torch.no_grad():
        if make in (clip, siglip):
            out = model.get_image_features(pixel_values=x)
            expected = {"class": out.pooler_output}
        else:
            out = model(pixel_values=x, output_hidden_states=True)
            pooled = out.pooler_output.flatten(1) if prefix is None else out.last_hidden_state[:, 0]
            expected = {"class": pooled}
    if prefix is not None:
        assert out.last_hidden_state.shape[1] == prefix + 16
        expected["patch"] = out.last_hidden_state[:, prefix:].mean(1)
        expected["both"] = torch.cat([expected["class"], expected["patch"]], 1)
        expected["patches"] = out.last_hidden_state[:, prefix:]
    if make in (vit, dinov2, dinov3):
        norm = model.norm if make is dinov3 else model.layernorm
        layers = [norm(layer) for layer in out.hidden_states[-4:]]
        parts = [layer[:, 0] for layer in layers] + [layers[-1][:, prefix:].mean(1)]
        expected["last4"] = torch.cat(parts, 1)
    for token in ("class", "patch", "both", "last4", "patches"):
        if token in expected:
            embedded = load_teacher(name, token=token).embed(batch)
            torch.testing.assert_close(embedded, expected[token], rtol=1e-5, atol=1e-6)
        else:
            with pytest.raises(InputError, match=f"TOKEN is '{token}', but {re.escape(name)} has"):
                load_teacher(name, token=token)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("size", [(50, 41), (41, 50), (33, 32), (20, 100)])
def test_an_image_is_prepared_as_by_its_own_processor(make, size, saved):
    _, processor, name = saved(make)
    teacher = load_teacher(name)
    assert isinstance(teacher, Network)
    image = picture(*size)
    ours = teacher.transform.normalize(teacher.preprocess(image)[None])
    theirs = processor(image, return_tensors="pt")["pixel_values"]
    # transformers resizes tensors and we images: a value may differ by one of 255.
    steps = (ours - theirs).abs() * 255 * torch.tensor(processor.image_std).view(3, 1, 1)
    assert float(steps.max()) < 1.01 and float(steps.mean()) < 0.35


@pytest.mark.parametrize("make", [vit, dinov2, dinov3, clip, siglip, swin])
def test_another_image_size_is_accepted(make, saved):
    _, _, name = saved(make)
    teacher = load_teacher(name, image_size=48)
    assert isinstance(teacher, Network) and teacher.transform.shape == (48, 48)
    resize = {dinov2: 54}.get(make, 48)
    assert teacher.transform.resize in (resize, (resize, resize))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"longest_edge": 800, "shortest_edge": 600}}, "in a way that is not supported"),
        ({"size": {"height": 32, "width": 32}, "do_pad": True}, "in a way that is not supported"),
        ({"do_resize": False}, "in a way that is not supported"),
    ],
)
def test_a_processor_that_does_more_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        processor_transform(settings, name="hf:x")


def test_a_model_without_images_is_refused(tmp_path):
    tf.BertModel(tf.BertConfig(**TEXT, intermediate_size=32)).save_pretrained(tmp_path)
    with pytest.raises(TeacherUnavailable, match="Can't load image processor for"):
        load_teacher(f"hf:{tmp_path}")


def test_a_gated_repository_names_its_page(monkeypatch):
    from tests.vision.teachers.test_timm_models import gated

    def refuse(name):
        try:
            raise gated(403)
        except OSError as error:
            raise OSError(f"You are trying to access a gated repo {name}.") from error

    monkeypatch.setattr(tf.AutoImageProcessor, "from_pretrained", refuse)
    with pytest.raises(TeacherUnavailable, match="accept its license there, and log in with `hf"):
        load_teacher("hf:facebook/dinov3-vits16-pretrain-lvd1689m")
