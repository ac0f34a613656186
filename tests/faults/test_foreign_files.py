"""Rows 86 to 97: what is read is checked, what is left out is said, nothing of a file is run."""

import json
import sys

import pytest
import torch

from ssl_kd import MultiHeadClusterer, cli
from ssl_kd.guard import Event, Precision
from ssl_kd.guard.recorder import save_bundle
from ssl_kd.heads import TEMIHead
from ssl_kd.vision.fit import make_trainer
from ssl_kd.vision.model import ClusterModel
from ssl_kd.vision.replay import bundle_of, replay
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train import HeadFault
from tests.faults.inject import one_line
from tests.faults.matrix import row

DIM, CLUSTERS = 4, 3


class OwnHead(TEMIHead):
    """A head of a user's own."""


OWN = f"{OwnHead.__module__}.{OwnHead.__qualname__}"


# --- 86: no import because a file says so ---------------------------------------------------------


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """The import path of a class whose module lies in `tmp_path / model` and leaves a trace."""
    folder = tmp_path / "model"
    folder.mkdir()
    code = "import pathlib, ssl_kd.heads\npathlib.Path(__file__).with_name('trace').touch()\n"
    (folder / "evil.py").write_text(code + "class Head(ssl_kd.heads.TEMIHead):\n    pass\n")
    monkeypatch.syspath_prepend(str(folder))
    yield "evil.Head"
    sys.modules.pop("evil", None)


def saved_model(folder, head):
    """A folder of JSON and safetensors whose config.json names a head."""
    model = ClusterModel(DIM, DIM, CLUSTERS, 2, hidden_dim=6, bottleneck_dim=4)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head": head}))
    return model


@row(86)
@pytest.mark.parametrize("kind", [MultiHeadClusterer, ClusterModel])
def test_a_head_that_a_folder_names_is_not_imported(kind, evil, tmp_path, caplog):
    folder = tmp_path / "model"
    saved_model(folder, evil)
    with pytest.raises(ValueError, match=r"config.json.* 'evil.Head'.*head='evil.Head'"):
        kind.from_pretrained(folder)
    assert not (folder / "trace").exists() and "evil" not in sys.modules
    with caplog.at_level("INFO", "ssl_kd"):  # what the caller names is
        kind.from_pretrained(folder, head=evil)
    assert (folder / "trace").exists()
    assert f"evil.Head: imported the module from {folder / 'evil.py'}" in caplog.text


@row(86)
@pytest.mark.parametrize("name", ["os.PathLike", "ssl_kd.__main__.main", "ssl_kd.cli.Head", 5, []])
def test_nothing_but_a_head_of_this_library_is_imported_unasked(name, tmp_path):
    saved_model(tmp_path, name)
    with pytest.raises(ValueError, match="nothing was imported"):
        ClusterModel.from_pretrained(tmp_path)


@row(86)
def test_a_loss_that_a_folder_names_is_not_taken_over(tmp_path):
    saved_model(tmp_path, "ssl_kd.heads.TEMIHead")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"settings": {"LOSS": "a.B"}}))
    with pytest.raises(ValueError, match=r"loss=\'a.B\'"):
        MultiHeadClusterer.from_pretrained(tmp_path)
    assert MultiHeadClusterer.from_pretrained(tmp_path, loss="mine.Own").loss == "mine.Own"


def bundle_file(path, **changes):
    """A bundle of a healthy step, with changed settings."""
    settings = VisionSettings(n_heads=2, hidden_dim=6, bottleneck_dim=4, batch_size=8)
    trainer = make_trainer(settings, DIM, CLUSTERS, Precision.for_device("cpu"))
    before = {name: tensor[:1].clone() for name, tensor in trainer.state.tensors().items()}
    event = Event(0, "head 0", "loss", "the loss is not finite", "skipped")
    views = torch.randn(2, 8, DIM)
    fault = HeadFault(0, event, torch.arange(16).view(2, 8), views, 1e-2, before, True)
    bundle = bundle_of(trainer, fault, {**vars(settings), **changes})
    save_bundle(path, bundle)
    return path


@row(86)
@pytest.mark.parametrize("what", ["head", "loss"])
def test_a_class_that_a_bundle_names_is_not_imported(what, evil, tmp_path, capfd):
    path = bundle_file(tmp_path / "b.pt", **{what: evil})
    assert cli.main(["replay", str(path)]) == 2
    assert f"name it yourself: --{what} evil.Head" in one_line(capfd.readouterr().err)
    assert not (tmp_path / "model" / "trace").exists()
    with pytest.raises(ValueError, match="nothing was imported"):
        replay(path)


@row(86)
def test_a_replay_imports_the_head_that_it_is_given(tmp_path, capfd):
    path = bundle_file(tmp_path / "b.pt", head="lost.Head")
    assert cli.main(["replay", "--head", OWN, str(path)]) == 1  # it runs, and is healthy
    assert "the same step is healthy" in capfd.readouterr().out
    assert cli.main(["replay", str(path), "--hed=x"]) == 2
