"""An exported model, loaded from a stand-in for the Hugging Face hub."""

import json

import numpy as np
import pytest
import torch
from huggingface_hub import constants

from ssl_kd import MultiHeadClusterer
from ssl_kd.vision.model import ClusterModel
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.export import export
from ssl_kd.workbench.export.content import Content
from tests.faults.matrix import row as fault
from tests.workbench.export.hub_server import Hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with Hub() as found:
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield found


def test_an_exported_model_is_loaded_from_the_hub_and_names_nothing_of_the_machine(
    photo_run, hub, tmp_path
):
    samples = Samples(photo_run)
    folder = export(Content.of(samples), "hf-model", tmp_path / "model")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files.keys() == {"README.md", "config.json", "model.safetensors"}
    assert not any(str(photo_run.parents[1]).encode() in data for data in files.values())
    config = json.loads(files["config.json"])
    assert "command" not in config and "DATASET" not in config["settings"]
    hub.files |= {("me/photos", name): data for name, data in files.items()}
    x = samples.store("test").tensor()
    own = MultiHeadClusterer.from_pretrained(photo_run).predict(x)
    assert np.array_equal(MultiHeadClusterer.from_pretrained("me/photos").predict(x), own)
    assert torch.equal(ClusterModel.from_pretrained("me/photos").predict(x), torch.tensor(own))


@fault(136)
def test_a_model_that_is_not_on_the_hub_is_named(hub):
    with pytest.raises(
        FileNotFoundError, match="no folder me/gone, and the Hugging Face Hub has no such model"
    ):
        MultiHeadClusterer.from_pretrained("me/gone")
