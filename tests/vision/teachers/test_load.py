import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ssl_kd.core.precision import Precision
from ssl_kd.core.settings import SettingsError
from ssl_kd.core.shards import FingerprintMismatch
from ssl_kd.vision.data import ArrayDataset, FeatureDataset
from ssl_kd.vision.extract import Extraction
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.teachers import DINOV2_MODELS, Features, Network, Pixels
from ssl_kd.vision.teachers.load import load_teacher
from ssl_kd.vision.teachers.weights import read_weights

timm = pytest.importorskip("timm")
SMALL = {"depth": 1, "img_size": 28}


def array_data(shape):
    rng = np.random.default_rng(0)
    return ArrayDataset("a", "train", rng.integers(0, 256, shape, dtype=np.uint8), None, None)


# --- without a network ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 4, 6, 3)])
def test_pixels_takes_its_shape_from_the_data(shape):
    data = array_data(shape)
    teacher = load_teacher("pixels", dataset=data)
    assert isinstance(teacher, Pixels) and teacher.dim == np.prod(shape[1:])
    assert data.arrays is not None and teacher.takes(data.arrays)
    fast = teacher.embed(teacher.from_arrays(data.arrays))
    slow = teacher.embed(torch.stack([teacher.preprocess(data.image(i)) for i in range(3)]))
    assert torch.equal(fast, slow) and fast.dtype == torch.float32
    assert fast.min() >= 0 and fast.max() <= 1
    if len(shape) == 3:
        np.testing.assert_allclose(fast, data.arrays.reshape(3, -1) / 255, rtol=1e-6)


def test_pixels_of_a_folder_are_colour_and_of_one_size():
    teacher = load_teacher("pixels")
    assert teacher.dim == 32 * 32 * 3 and teacher.weights_id == "none"
    for image in (Image.new("L", (1, 1)), Image.new("RGB", (50, 20))):
        assert teacher.preprocess(image).shape == (3, 32, 32)
    other = load_teacher("pixels", image_size=16, dataset=array_data((2, 8, 8)))
    assert other.dim == 256 and other.transform_id != teacher.transform_id
    assert isinstance(other, Pixels) and not other.takes(np.zeros((2, 8, 8), np.uint8))


def test_features_need_a_feature_file():
    data = FeatureDataset("f", "train", np.zeros((4, 7)))
    teacher = load_teacher("features", dataset=data)
    assert isinstance(teacher, Features) and teacher.dim == 7
    with pytest.raises(ValueError, match="TEACHER is 'features', but the data set holds images"):
        load_teacher("features", dataset=array_data((2, 8, 8)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "dinov"}, "TEACHER is 'dinov', but must be one of 'auto'"),
        ({"name": "timm:"}, "TEACHER is 'timm:', but must be"),
        ({"name": "dinov2_vits14_rg"}, "Did you mean dinov2_vits14_reg?"),
        ({"name": "timm:resnet18foo"}, "did you mean resnet18"),
        ({"name": "timm:resnet18.nothing"}, "Invalid pretrained tag"),
        ({"name": "torchvision:resnet1"}, "did you mean resnet18"),
        ({"name": "torchvision:resnet18", "token": "patch"}, "set it to 'class'"),
        ({"name": "pixels", "token": "cls"}, "TOKEN is 'cls', but must be one of 'class'"),
        ({"name": "pixels", "token": "patches"}, "teacher 'pixels' has no tokens: leave TOKEN at"),
        ({"name": "features", "token": "patch"}, "TOKEN is 'patch', but the teacher 'features'"),
        (
            {"name": "pixels", "image_size": 0},
            "IMAGE_SIZE is 0, but must be a whole",
        ),
        ({"name": "pixels", "weights": "w.pth"}, "has no weights"),
        ({"name": "franca", "weights": "w.pth"}, "is loaded from torch.hub alone"),
        ({"name": "hf:a/b", "weights": "w.pth"}, "a local model is hf:FOLDER"),
        ({"name": "dinov3_vit_s16"}, "Did you mean dinov3_vits16?"),
        ({"name": "siglip-2"}, "Did you mean siglip2?"),
        ({"name": "dinov2", "image_size": 225}, "expected a multiple of 14 .*, such as 224"),
    ],
)
def test_invalid_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_teacher(**arguments)


# --- real architectures, random weights -----------------------------------------------------------


def small_dinov2(name):
    torch.manual_seed(0)
    return timm.create_model(DINOV2_MODELS[name], pretrained=False, **SMALL)


@pytest.fixture
def shallow(monkeypatch):
    """DINOv2 with one block, so that a test takes no second."""
    create = timm.create_model

    def create_shallow(name, **kwargs):
        return create(name, **({"depth": 1} if "dinov2" in name else {}) | kwargs)

    monkeypatch.setattr(timm, "create_model", create_shallow)


def as_published(model):
    """timm's state dict of DINOv2 under the names of the published checkpoint."""
    state = dict(model.state_dict())
    if "reg_token" in state:
        state["register_tokens"] = state.pop("reg_token")
        state["pos_embed"] = torch.cat(
            [torch.zeros_like(state["cls_token"]), state["pos_embed"]], 1
        )
    state["mask_token"] = torch.zeros(1, state["cls_token"].shape[-1])
    return state


@pytest.mark.parametrize("name", ["dinov2_vits14", "dinov2_vits14_reg"])
@pytest.mark.parametrize("published", [True, False])
def test_dinov2_from_a_file(tmp_path, shallow, name, published):
    model = small_dinov2(name).eval()
    torch.save(as_published(model) if published else model.state_dict(), tmp_path / "w.pth")
    batch = torch.randint(0, 256, (2, 3, 28, 28), dtype=torch.uint8)
    embeddings = {}
    for token in ("class", "patch", "both", "patches"):
        teacher = load_teacher(
            name,
            weights=tmp_path / "w.pth",
            image_size=28,
            token=token,
        )
        assert isinstance(teacher, Network)
        embeddings[token] = teacher.embed(batch)
        assert teacher.name == f"{name} (timm)" and token in teacher.transform_id
        assert "bicubic" in teacher.transform_id and "0.485" in teacher.transform_id
    x = (batch / 255 - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor(
        [0.229, 0.224, 0.225]
    ).view(3, 1, 1)
    with torch.no_grad():
        tokens = model.forward_features(x)
    registers = 4 if name.endswith("reg") else 0
    assert tokens.shape[1] == 1 + registers + 4
    torch.testing.assert_close(embeddings["class"], tokens[:, 0], rtol=1e-4, atol=1e-4)
    patches = tokens[:, 1 + registers :]
    torch.testing.assert_close(embeddings["patches"], patches, rtol=1e-4, atol=1e-4)
    assert teacher.grid == (2, 2) and teacher.dim == 384  # of the last one
    torch.testing.assert_close(embeddings["patch"], patches.mean(1), rtol=1e-4, atol=1e-4)
    assert torch.equal(embeddings["both"], torch.cat([embeddings["class"], embeddings["patch"]], 1))


def test_dinov2_is_224_px_and_resamples_its_positions(tmp_path, shallow):
    model = timm.create_model(DINOV2_MODELS["dinov2_vits14"], pretrained=False)
    assert model.pos_embed.shape[1] == 1 + 37 * 37  # as published, for 518 px
    torch.save(as_published(model), tmp_path / "w.pth")
    teacher = load_teacher("dinov2", weights=tmp_path / "w.pth")
    assert teacher.transform_id.startswith("224 px of 224") and teacher.dim == 384
    assert isinstance(teacher, Network)
    assert teacher.model.pos_embed.shape[1] == 1 + 16 * 16  # type: ignore[union-attr]


class FakeHub(nn.Module):
    """A small network with the methods of the models on torch.hub."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 384))
        self.proj = nn.Conv2d(3, 384, 14, 14)

    def forward_features(self, x):
        patches = self.proj(x).flatten(2).transpose(1, 2)
        return {"x_norm_clstoken": patches[:, 0], "x_norm_patchtokens": patches}

    def get_intermediate_layers(self, x, n, return_class_token):
        assert return_class_token
        patches = self.forward_features(x)["x_norm_patchtokens"]
        return [(i * patches, i * patches[:, 0]) for i in range(12 - n, 12)]


@pytest.mark.parametrize(
    ("name", "repository", "model_name", "side"),
    [
        ("dinov2", "facebookresearch/dinov2", "dinov2_vits14", 28),
        ("franca", "valeoai/Franca", "franca_vitb14", 32),
        ("franca_vitl14", "valeoai/Franca", "franca_vitl14", 32),
    ],
)
def test_models_of_the_hub(name, repository, model_name, side, monkeypatch):
    model = FakeHub()

    def load(*names, **_):
        assert names == (repository, model_name)
        return model

    monkeypatch.setattr(torch.hub, "load", load)
    batch = torch.randint(0, 256, (2, 3, 28, 28), dtype=torch.uint8)
    embeddings = {}
    for token in ("class", "patch", "both", "last4", "patches"):
        teacher = load_teacher(name, image_size=28, token=token)
        assert teacher.name == f"{model_name} (hub)" and isinstance(teacher, Network)
        assert teacher.transform_id.startswith(f"28 px of {side} bicubic")
        embeddings[token] = teacher.embed(batch)
    with torch.no_grad():
        out = model.forward_features(teacher.transform.normalize(batch))
    patch = out["x_norm_patchtokens"].mean(1)
    torch.testing.assert_close(embeddings["class"], out["x_norm_clstoken"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(embeddings["patch"], patch, rtol=1e-4, atol=1e-4)
    assert torch.equal(embeddings["both"], torch.cat([embeddings["class"], embeddings["patch"]], 1))
    of_class = out["x_norm_clstoken"]
    last4 = torch.cat([8 * of_class, 9 * of_class, 10 * of_class, 11 * of_class, 11 * patch], 1)
    torch.testing.assert_close(embeddings["last4"], last4, rtol=1e-4, atol=1e-4)
    patches = out["x_norm_patchtokens"]
    torch.testing.assert_close(embeddings["patches"], patches, rtol=1e-4, atol=1e-4)


def test_a_classifier_of_several_layers_is_loaded_and_removed(tmp_path):
    model = timm.create_model("efficientvit_m0", pretrained=False, num_classes=7)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    assert {"model.head.bn.weight", "model.head.linear.weight"} <= state.keys()
    torch.save({"state_dict": state}, tmp_path / "w.ckpt")
    teacher = load_teacher("timm:efficientvit_m0", weights=tmp_path / "w.ckpt")
    assert teacher.dim == model.num_features


@pytest.mark.parametrize("classes", [7, 0])
def test_timm_from_a_file_with_any_classifier(tmp_path, classes):
    model = timm.create_model("resnet18", pretrained=False, num_classes=classes)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    teacher = load_teacher("timm:resnet18", weights=tmp_path / "w.pth", image_size=32)
    model.reset_classifier(0)
    assert isinstance(teacher, Network) and teacher.dim == 512
    batch = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        expected = model.eval()(teacher.transform.normalize(batch))
    torch.testing.assert_close(teacher.embed(batch), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="no patch tokens"):
        load_teacher("timm:resnet18", weights=tmp_path / "w.pth", token="both")


def test_the_teacher_of_a_self_distillation_checkpoint_is_loaded(tmp_path, caplog):
    caplog.set_level("INFO", "ssl_kd")
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **SMALL | {"img_size": 224})
    body = {f"backbone.{name}": value for name, value in model.state_dict().items()}
    head = {"head.mlp.0.weight": torch.zeros(8, 192), "head.last_layer.weight_g": torch.ones(8, 1)}
    student = {f"module.{name}": torch.zeros_like(value) for name, value in body.items()}
    torch.save({"student": student, "teacher": body | head, "epoch": 1}, tmp_path / "w.pth")
    create = timm.create_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timm, "create_model", lambda name, **kwargs: create(name, depth=1, **kwargs))
        teacher = load_teacher("timm:vit_tiny_patch16_224", weights=tmp_path / "w.pth")
    assert "teacher.backbone is removed" in caplog.text and "student, teacher.head" in caplog.text
    assert isinstance(teacher, Network)
    batch = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8)
    with torch.no_grad():
        expected = model.eval()(teacher.transform.normalize(batch))
    torch.testing.assert_close(teacher.embed(batch), expected, rtol=1e-4, atol=1e-4)


def test_weights_that_do_not_fit_are_refused_in_one_line(tmp_path):
    state = timm.create_model("resnet34", pretrained=False).state_dict()
    torch.save({f"model.{name}": value for name, value in state.items()}, tmp_path / "w.pth")
    for name in ("timm:resnet18", "torchvision:resnet18", "dinov2"):
        with pytest.raises(ValueError, match="do not fit.*(Missing|Unexpected) key") as error:
            load_teacher(name, weights=tmp_path / "w.pth")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_torchvision_from_a_file(tmp_path, name):
    from torchvision import models

    model = models.get_model(name, weights=None)
    in_lightning = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": in_lightning}, tmp_path / "w.pth")
    teacher = load_teacher(f"torchvision:{name}", weights=tmp_path / "w.pth", image_size=64)
    assert isinstance(teacher, Network)
    native = models.get_model_weights(name)["DEFAULT"].transforms()
    assert teacher.transform.mean == tuple(native.mean)
    assert teacher.transform.resize == round(64 * native.resize_size[0] / 224)
    batch = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    # The classifier on our features gives the original's logits.
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    with torch.no_grad():
        logits = model.eval()(teacher.transform.normalize(batch))
        torch.testing.assert_close(last(teacher.embed(batch)), logits, rtol=1e-3, atol=1e-4)


# --- real weights ---------------------------------------------------------------------------------


def test_real_efficientnet_classifies_real_photographs(shared_data):
    from sklearn.datasets import load_sample_images

    file = shared_data / "models" / "efficientnet_lite0" / "model.safetensors"
    teacher = load_teacher("efficientnet_lite0", weights=file)
    assert isinstance(teacher, Network)
    assert teacher.dim == 1280
    assert teacher.transform_id.startswith("224 px of 256 bicubic centre, mean [0.5, 0.5, 0.5]")
    classifier = read_weights(file)
    batch = torch.stack(
        [teacher.preprocess(Image.fromarray(image)) for image in load_sample_images().images]
    )
    logits = teacher.embed(batch) @ classifier["classifier.weight"].float().T
    best = (logits + classifier["classifier.bias"].float()).argmax(1)
    assert best.tolist() == [698, 985]  # palace, daisy


# --- by import path -------------------------------------------------------------------------------

OWN = '''
"""Teachers of a user: a network, and a plain function of the image."""

import numpy as np
import torch
from torch import nn

from ssl_kd.vision.teachers import Network, Teacher, Transform


class Small(Network):
    """A PyTorch network."""

    def __init__(self, weights=None, image_size=16):
        net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        if weights is not None:
            net.load_state_dict(torch.load(weights, weights_only=True))
        super().__init__("small", net, net, Transform(size=image_size, resize=image_size))


class MeanColour(Teacher):
    """No network at all."""

    dim = 3
    transform_id = "RGB"

    def preprocess(self, image):
        return torch.from_numpy(np.array(image.convert("RGB").resize((4, 4)))).permute(2, 0, 1)

    def embed(self, batch):
        return batch.to(self.device).float().mean((2, 3)) / 255


class Silent(MeanColour):
    """A network without a weights_id."""

    def __init__(self):
        self.net = nn.Linear(3, 3)


class Shapeless(MeanColour):
    dim = None


class Wordless(MeanColour):
    transform_id = 3


def function():
    pass
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The import path of each class of a module that a user wrote."""
    name = f"teachers_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda attribute: f"{name}.{attribute}"


def test_an_imported_teacher_gets_the_options_that_it_names(own, tmp_path):
    plain = load_teacher(own("MeanColour"))
    assert plain.name == own("MeanColour") and plain.weights_id == "none"
    white = plain.preprocess(Image.new("L", (9, 5), 255))
    assert torch.equal(plain.embed(white[None]), torch.ones(1, 3))

    first = load_teacher(own("Small"))
    assert isinstance(first, Network) and first.name == f"{own('Small')} (small)"
    assert first.transform.size == 16 and first.dim == 5  # the class's own default
    torch.save(first.model.state_dict(), tmp_path / "w.pt")
    again = load_teacher(own("Small"), weights=tmp_path / "w.pt", image_size=24)
    assert isinstance(again, Network) and again.transform.size == 24
    assert again.weights_id == first.weights_id and again.transform_id != first.transform_id


def test_a_cache_refuses_other_imported_classes_and_weights(own, tmp_path):
    data = array_data((3, 8, 8, 3))
    precision = Precision.for_device("cpu")

    def cached(teacher):
        return Extraction(
            data, teacher, tmp_path / "cache", split="train", precision=precision
        ).store()

    torch.manual_seed(0)
    teacher = load_teacher(own("Small"))
    store = cached(teacher)
    embedded = teacher.embed(torch.stack([teacher.preprocess(data.image(i)) for i in range(3)]))
    assert torch.equal(store.gather(torch.arange(3)), embedded)
    with pytest.raises(FingerprintMismatch, match="weights: cache has"):
        cached(load_teacher(own("Small")))  # new random weights
    with pytest.raises(FingerprintMismatch, match=f"this run needs '{own('MeanColour')}'"):
        cached(load_teacher(own("MeanColour")))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nowhere.MyTeacher", {}, "'nowhere.MyTeacher' cannot be imported: No module named"),
        (
            "Lost",
            {},
            "expected package.module.Class, in an installed package or below the current folder",
        ),
        ("function", {}, "expected a subclass of ssl_kd.vision.teachers.base.Teacher"),
        (
            "MeanColour",
            {"weights": "w.pt"},
            "does not accept weights 'w.pt': leave this setting at its default",
        ),
        (
            "MeanColour",
            {"image_size": 8},
            "add a parameter image_size to the __init__ of the class",
        ),
        ("MeanColour", {"token": "patch"}, "does not accept token 'patch'"),
        ("Silent", {}, "holds a network, but its weights_id is 'none'"),
        ("Shapeless", {}, "is None; expected int: set self.dim"),
        ("Wordless", {}, "is 3; expected str: set self.transform_id"),
    ],
)
def test_an_invalid_imported_teacher_is_named_with_the_way_out(own, name, options, message):
    path = name if "." in name else own(name)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        load_teacher(path, **options)
    assert repr(path) in str(refused.value)


def test_an_import_path_is_a_value_for_the_setting():
    assert VisionSettings(teacher="heads.my.Teacher").teacher == "heads.my.Teacher"
    for value in ("heads/my.py", "Teacher", ".Teacher", "a..B", "1a.B"):
        with pytest.raises(SettingsError, match="'package.module.Class', 'timm:NAME'"):
            VisionSettings(teacher=value)


@pytest.mark.parametrize("name", ["hf-hub:", "hf-hub:../../etc", "nowhere:x"])
def test_an_invalid_timm_path_is_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where ../../etc is nothing
    with pytest.raises(ValueError, match=f"^timm:{name}: "):
        load_teacher(f"timm:{name}")
