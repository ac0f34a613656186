"""Texts in the space of a teacher's embeddings."""

import pytest
import torch
from torch.nn import functional as F

from ssl_kd.core.errors import InputError, MissingPackage
from ssl_kd.core.shards.fingerprint import Fingerprint
from ssl_kd.vision.teacher_kinds import TIMM_MODELS
from ssl_kd.vision.teachers import load_teacher
from ssl_kd.vision.teachers.text_side import (
    OPEN_CLIP_MODELS,
    TextSide,
    has_text_side,
    load_text_side,
)
from tests.tiny_encoders import sentence, text_encoder
from tests.vision.teachers.test_hf_models import TEXT, VISION, saved, siglip, tf, vit
from tests.vision.teachers.test_hf_models import clip as clip_of_images
from tests.vision.teachers.test_open_clip_models import local

__all__ = ["local", "saved"]


def fingerprint_of(teacher):
    return Fingerprint(teacher.name, teacher.weights_id, teacher.transform_id, "float32", "data")


@pytest.mark.parametrize(
    ("name", "kind", "options", "expected"),
    [
        ("minilm", "text", {}, True),
        ("package.module.Class", "text", {}, True),
        ("clip", "image", {}, True),
        ("siglip2_large", "image", {}, True),
        ("open_clip:ViT-B-32/openai", "image", {}, True),
        ("clip", "image", {"token": "patch"}, False),
        ("clip", "image", {"weights": "w.pt"}, False),
        ("dinov2", "image", {}, False),
        ("resemblyzer", "audio", {}, False),
        ("features", "features", {}, False),
    ],
)
def test_teachers_that_know_texts(name, kind, options, expected):
    assert has_text_side(name, kind, **options) is expected


def test_every_tower_with_texts_is_a_teacher():
    assert OPEN_CLIP_MODELS.keys() < TIMM_MODELS.keys()


def test_a_query_is_embedded_as_the_texts_were(tmp_path):
    name = f"hf:{text_encoder(tmp_path / 'encoder', normalized=False)}"
    teacher = load_teacher(name, dataset=type("Texts", (), {"kind": "text"}))
    texts = [sentence(n, n) for n in (3, 9, 17)]
    stored = torch.cat([teacher.embed([teacher.preprocess(text)]) for text in texts])
    side = load_text_side(name, "text", fingerprint_of(teacher))
    query = side.query(texts[1])
    assert query.norm() == pytest.approx(1, abs=1e-5)
    expected = F.cosine_similarity(stored, stored[1:2])
    torch.testing.assert_close(side.similarities(query, stored), expected, rtol=0, atol=1e-5)
    half = side.similarities(query, stored.half())
    torch.testing.assert_close(half, expected, rtol=0, atol=2e-3)


def test_other_weights_are_refused(tmp_path):
    name = f"hf:{text_encoder(tmp_path / 'encoder')}"
    other = Fingerprint(name, "0" * 64, "mean", "float32", "data")
    with pytest.raises(InputError, match="has changed since it embedded the samples"):
        load_text_side(name, "text", other)


def test_embeddings_are_projected_into_the_space_of_the_texts():
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(6, 4, generator=generator)
    x, text = torch.randn(5, 6, generator=generator), torch.randn(4, generator=generator)
    side = TextSide(lambda _: text, projection)
    expected = F.cosine_similarity(x @ projection, text[None])
    torch.testing.assert_close(side.similarities(side.query("a"), x), expected)


def test_without_open_clip_the_message_installs_it(monkeypatch):
    def missing(packages, extra, what):
        raise MissingPackage(f"{what} needs {packages[0]}: pip install 'ssl_kd[{extra}]'")

    monkeypatch.setattr("ssl_kd.vision.teachers.text_side.check_installed", missing)
    with pytest.raises(MissingPackage, match=r"Search by text with the teacher 'clip' .*\[open_cl"):
        load_text_side("clip", "image", Fingerprint("clip", "none", "", "float32", ""))


def test_a_model_of_open_clip_compares_images_with_texts(local, monkeypatch):
    """The cosine is that of `encode_image` and `encode_text`."""
    import open_clip  # pyright: ignore[reportMissingImports]

    model, name = local
    tokens = torch.tensor([[1, 5, 9, 98, 0, 0, 0, 0]])
    monkeypatch.setattr(open_clip, "get_tokenizer", lambda name: lambda texts: tokens)
    teacher = load_teacher(name)
    side = load_text_side(name, "image", fingerprint_of(teacher))
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    stored = teacher.embed(images)
    with torch.no_grad():
        x = model.encode_image(teacher.transform.normalize(images))  # pyright: ignore
        expected = F.cosine_similarity(x, model.encode_text(tokens))
    torch.testing.assert_close(side.similarities(side.query("a cat"), stored), expected)
    with pytest.raises(InputError, match="has changed since"):
        load_text_side(name, "image", Fingerprint(name, "0", "", "float32", ""))


def clip():
    """Build a CLIP whose texts end with the token of the tiny tokenizer, at which it pools."""
    config = tf.CLIPConfig(
        vision_config=VISION, text_config=TEXT | {"eos_token_id": 3}, projection_dim=16
    )
    return tf.CLIPModel(config), clip_of_images()[1]


@pytest.mark.parametrize("make", [clip, siglip])
def test_a_model_of_transformers_compares_images_with_texts(make, saved, tmp_path):
    """The cosine is that of the logits of the whole model."""
    transformers = pytest.importorskip("transformers")
    model, _, name = saved(make)
    assert has_text_side(name, "image") and not has_text_side(name, "image", token="patch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(text_encoder(tmp_path / "tokenizer"))
    tokenizer.save_pretrained(name.partition(":")[2])
    teacher = load_teacher(name)
    side = load_text_side(name, "image", fingerprint_of(teacher))
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    x = teacher.transform.normalize(images)  # pyright: ignore[reportAttributeAccessIssue]
    length = {"clip": 77, "siglip": 64}[make.__name__]
    tokens = tokenizer(["a red cat runs"], padding="max_length", max_length=length)
    ids, mask = (torch.tensor(tokens[key]) for key in ("input_ids", "attention_mask"))
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask if make is clip else None, pixel_values=x)
        expected = whole.logits_per_image[:, 0]
        if make is siglip:
            expected = expected - model.logit_bias
        expected = expected / model.logit_scale.exp()
    ours = side.similarities(side.query("a red cat runs"), teacher.embed(images))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    other = side.similarities(side.query("a blue dog sleeps"), teacher.embed(images))
    assert not torch.allclose(ours, other, rtol=0, atol=5e-5)  # five times the tolerance above


def test_an_image_model_without_texts_has_no_text_side(saved):
    assert not has_text_side(saved(vit)[2], "image")
    assert not has_text_side("hf:nobody/nothing-here", "image")


def test_the_models_of_open_clip_exist():
    open_clip = pytest.importorskip("open_clip", reason="open_clip_torch is not installed")
    for model, tag in OPEN_CLIP_MODELS.values():
        assert tag in open_clip.list_pretrained_tags_by_model(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip_vitb32", "siglip2_base"])
def test_a_tower_of_timm_ends_where_the_projection_begins(name, monkeypatch):
    """With equal random weights, timm's embedding gives the cosine of open_clip."""
    open_clip = pytest.importorskip("open_clip", reason="open_clip_torch is not installed")
    timm = pytest.importorskip("timm")
    from timm.models.vision_transformer import checkpoint_filter_fn

    real, model_name = open_clip.create_model, OPEN_CLIP_MODELS[name][0]
    model = real(model_name, pretrained=None).eval()
    monkeypatch.setattr(open_clip, "create_model", lambda *args, **kwargs: model)
    text = torch.randint(1, 400, (1, model.context_length))
    monkeypatch.setattr(open_clip, "get_tokenizer", lambda name: lambda texts: text)
    if hasattr(model.visual, "trunk"):
        tower = timm.create_model(TIMM_MODELS[name], num_classes=0).eval()
        tower.load_state_dict(model.visual.trunk.state_dict())
    else:
        tower = timm.create_model(TIMM_MODELS[name], num_classes=512).eval()
        tower.load_state_dict(checkpoint_filter_fn(model.state_dict(), tower))
        tower.reset_classifier(0)
    x = torch.randn(2, 3, 224, 224)
    side = load_text_side(name, "image", Fingerprint(name, "", "", "float32", ""))
    with torch.no_grad():
        expected = F.cosine_similarity(model.encode_image(x), model.encode_text(text))
        ours = side.similarities(side.query("a"), tower(x))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
