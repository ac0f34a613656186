import argparse
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ssl_kd.core.shards.fingerprint import weights_id
from ssl_kd.vision.teachers.weights import (
    read_weights,
    select_weights,
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


def test_a_file_is_read_under_the_full_names_of_its_tensors(tmp_path):
    state = net().state_dict()
    save_file(dict(state), tmp_path / "w.safetensors")
    assert read_weights(tmp_path / "w.safetensors").keys() == state.keys()
    arguments = argparse.Namespace(lr=0.1, output=Path("out"))  # as timm and DINO store them
    torch.save({"model": state, "epoch": 3, "args": arguments}, tmp_path / "w.pth")
    read = read_weights(tmp_path / "w.pth")
    assert read.keys() == {f"model.{name}" for name in state}
    assert all(torch.equal(read[f"model.{name}"], state[name]) for name in state)


def prefixed(prefix, state):
    return {f"{prefix}.{name}": value for name, value in state.items()}


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda good, other: good, ""),
        (lambda good, other: prefixed("module", good), "module is removed"),
        (lambda good, other: prefixed("state_dict.model", good), "state_dict.model is removed"),
        (lambda good, other: prefixed("module._orig_mod.model", good), "module.model, _orig_mod"),
        (
            lambda good, other: {k.replace("0.", "0._orig_mod."): v for k, v in good.items()},
            "_orig_mod is removed",
        ),
        (
            lambda good, other: (
                prefixed("teacher.module.backbone", good)
                | prefixed("student.module.backbone", other)
                | prefixed("teacher.module.head.mlp", other)
                | prefixed("optimizer.state.0", {"exp_avg": torch.ones(3)})
            ),
            "teacher.module.backbone is removed .*; "
            "not used: optimizer, student, teacher.module.head$",
        ),
        (
            lambda good, other: prefixed("state_dict_ema", good) | prefixed("state_dict", other),
            "state_dict_ema is removed .*; not used: state_dict$",
        ),
        (
            lambda good, other: (
                prefixed("state_dict.module.encoder_k", other)
                | prefixed("state_dict.module.encoder_q", good)
                | {"state_dict.module.encoder_q.fc.0.weight": torch.ones(2, 2)}
                | {"state_dict.module.queue": torch.ones(2, 2)}
            ),
            "encoder_q is removed .*; not used: state_dict.module.encoder_k, "
            "state_dict.module.encoder_q.fc, state_dict.module.queue$",
        ),
        (
            lambda good, other: (
                prefixed("model.net", good)
                | {"model.loss.weight": torch.ones(3), "n_averaged": torch.ones(1)}
            ),
            "model.net is removed .*; not used: model.loss, n_averaged$",
        ),
    ],
)  # fmt: skip
def test_known_wrappers_are_removed_and_named(wrap, message, caplog):
    caplog.set_level(logging.INFO, "ssl_kd")
    good, other = net().state_dict(), net().state_dict()
    selected = select_weights(wrap(good, other), net().to("meta").state_dict(), "w.pth")
    assert selected.keys() == good.keys()
    assert all(torch.equal(selected[name], good[name]) for name in good)
    assert (
        [*map(str, caplog.messages)] == []
        if not message
        else re.search(message, caplog.text.strip())
    )


def test_names_that_begin_like_a_wrapper_but_are_the_models_stay():
    model = nn.ModuleDict({"encoder": net(), "norm": nn.LayerNorm(2)})
    state = model.state_dict()
    assert select_weights(dict(state), state, "w").keys() == state.keys()
    # Of two nested copies, the one whose shapes fit.
    wide = nn.ModuleDict({"encoder": nn.Linear(9, 9)}).state_dict()
    assert select_weights(
        prefixed("teacher", wide) | prefixed("model", state), state, "w"
    ).keys() == (state.keys())
    # Only heads are left out: other unknown tensors stay, so that loading the model refuses them.
    more = {**state, "extra.weight": torch.ones(1), "projector.weight": torch.ones(1)}
    assert select_weights(more, state, "w").keys() == {*state, "extra.weight"}
    # A classifier is kept where its name is given.
    more = {**state, "fc.weight": torch.ones(1), "fc.2.weight": torch.ones(1)}
    assert select_weights(more, state, "w", ["fc"]).keys() == {*state, "fc.weight"}
    # Names that timm renames are found below the wrappers.
    renamed = {f"module.old_{name}": value for name, value in state.items()}
    assert select_weights(renamed, state, "w").keys() == {f"old_{name}" for name in state}


def test_files_without_weights_are_refused(tmp_path):
    torch.save({"w": Payload(str(tmp_path / "executed"))}, tmp_path / "code.pth")
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "noise.pth").write_bytes(b"\x80noise")
    (tmp_path / "noise.safetensors").write_bytes(b"noise")
    for name in ("code.pth", "empty.pth", "list.pth", "noise.pth", "noise.safetensors"):
        with pytest.raises(ValueError, match=name) as error:
            read_weights(tmp_path / name)
        assert ("save its state dict alone" in str(error.value)) == (name[0] in "cn")
        assert "\n" not in str(error.value)
    assert not (tmp_path / "executed").exists()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_weights(tmp_path / "absent.pth")
