"""An exported model, loaded by its name on the Hugging Face Hub."""

import json
from http.server import BaseHTTPRequestHandler

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import constants

from ssl_kd import MultiHeadClusterer
from ssl_kd.vision.model import MODEL_FILES, ClusterModel
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.export import export
from ssl_kd_explore.export.content import Content
from tests.faults.matrix import row as fault
from tests.local_server import LocalServer


def test_an_exported_model_is_loaded_from_the_hub_and_names_nothing_of_the_machine(
    photo_run, tmp_path, monkeypatch
):
    samples = Samples(photo_run)
    folder = export(Content.of(samples), "hf-model", tmp_path / "model")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files.keys() == {"README.md", "config.json", "model.safetensors"} > {*MODEL_FILES}
    assert not any(str(photo_run.parents[1]).encode() in data for data in files.values())
    config = json.loads(files["config.json"])
    assert "command" not in config and "DATASET" not in config["settings"]
    downloads = {"me/photos": str(folder)}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: downloads[name])
    x = samples.store("test").tensor()
    own = MultiHeadClusterer.from_pretrained(photo_run).predict(x)
    assert np.array_equal(MultiHeadClusterer.from_pretrained("me/photos").predict(x), own)
    assert torch.equal(ClusterModel.from_pretrained("me/photos").predict(x), torch.tensor(own))


@fault(136)
def test_a_model_that_is_not_on_the_hub_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with LocalServer(BaseHTTPRequestHandler) as hub:  # refuses every request
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        with pytest.raises(FileNotFoundError, match="no folder me/gone, and the Hugging Face Hub"):
            MultiHeadClusterer.from_pretrained("me/gone")
