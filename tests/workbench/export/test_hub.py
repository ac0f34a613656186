"""Pushed to a stand-in for the hub, and loaded from it again."""

import json

import numpy as np
import pytest
import torch
from huggingface_hub import constants

from ssl_kd import MultiHeadClusterer
from ssl_kd.errors import InputError
from ssl_kd.vision.model import ClusterModel
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.export.cards import HubRefused, push_run
from tests.faults.matrix import row as fault
from tests.workbench.export.hub_server import Hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with Hub() as found:
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_TOKEN", found.token)
        yield found


def test_a_run_pushed_is_loaded_again(photo_run, hub):
    samples = Samples(photo_run)
    where = push_run(samples, "me/photos", private=True, token=hub.token)
    assert where.endswith("me/photos") and hub.private == {"me/photos": True}
    files = {name for repo, name in hub.files if repo == "me/photos"}
    assert files == {"README.md", "config.json", "model.safetensors"}
    x = samples.store("test").tensor()
    own = MultiHeadClusterer.from_pretrained(photo_run).predict(x)
    loaded = MultiHeadClusterer.from_pretrained("me/photos")
    assert np.array_equal(loaded.predict(x), own)
    assert torch.equal(ClusterModel.from_pretrained("me/photos").predict(x), torch.tensor(own))
    card = hub.files["me/photos", "README.md"].decode()
    assert 'from_pretrained("me/photos")' in card
    assert "| train | 1.0000 |" in card


def test_nothing_of_the_machine_goes_out(photo_run, hub):
    push_run(Samples(photo_run), "me/photos", token=hub.token)
    place = str(photo_run.parents[1])
    for (_, name), data in hub.files.items():
        assert place.encode() not in data, name
    config = json.loads(hub.files["me/photos", "config.json"])
    assert "command" not in config and "DATASET" not in config["settings"]


@fault(136)
def test_what_the_hub_refuses(photo_run, hub):
    with pytest.raises(HubRefused, match="refused the upload of me/photos: .*401.*hf auth login"):
        push_run(Samples(photo_run), "me/photos", token="hf_wrong")
    with pytest.raises(InputError, match="'a b/c' is not a valid name"):
        push_run(Samples(photo_run), "a b/c", token=hub.token)
    assert not hub.files
    with pytest.raises(
        FileNotFoundError, match="no folder me/gone, and the Hugging Face Hub has no such model"
    ):
        MultiHeadClusterer.from_pretrained("me/gone")
