import copy
import gc
import hashlib
import importlib
import os
import random
import signal
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from ssl_kd.graph import form_ensemble
from ssl_kd.guard.precision import DeviceInfo
from ssl_kd.losses import linear_distillation
from tests.photos import photo_run
from tests.tiny import text_file, tiny

__all__ = ["photo_run", "text_file", "tiny"]  # fixtures of many folders

# Tensors in tests are small: more threads than two only wait for each other.
torch.set_num_threads(min(2, torch.get_num_threads()))
# What a shell starts with & ignores Ctrl-C, and so would the processes that tests stop by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # while tests are collected: what they import is no garbage


def pytest_collection_finish():
    """What is imported stays: no collection, such as that of each Trainer, looks through it."""
    importlib.import_module("tests.frozen")
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _each_ensemble_is_formed_once():
    """Its answer depends on its arguments alone, and is most of a tiny run."""
    known = {}

    def remembered(cosine, euclidean, together, n_clusters, progress, should_stop):
        seen = hashlib.sha256(repr(n_clusters).encode())
        for view in (cosine, euclidean):
            seen.update(view.rows.tobytes())
        for graph in (*cosine.graphs.values(), *euclidean.graphs.values(), together):
            seen.update(graph.indices.tobytes() + graph.data.tobytes())
        if (key := seen.digest()) not in known:
            views = cosine, euclidean, together
            found = form_ensemble(*views, n_clusters, progress, should_stop)
            if should_stop():
                return found
            known[key] = found
        return copy.deepcopy(known[key])

    with mock.patch("ssl_kd.vision.partition.form_ensemble", remembered):
        yield


@pytest.fixture
def kept_every_50_steps(monkeypatch):
    """Heads are kept as good twice as often: a short test can go back to a later state."""
    monkeypatch.setattr("ssl_kd.vision.step.SNAPSHOT_EVERY", 50)


@pytest.fixture
def free(monkeypatch):
    """Says whether a loss may look at numbers whenever it likes, as on the CPU."""
    module = sys.modules[linear_distillation.__module__]  # its name is the function's, too
    return lambda are: monkeypatch.setattr(module, "_reads_are_free", lambda device: are)


@pytest.fixture
def float16_here(monkeypatch):
    """Have this CPU compute in float16 where it is asked to, as a GPU without bf16 does."""
    monkeypatch.setattr(DeviceInfo, "halves", lambda device: ((torch.float16,), "emulated"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real images and models that lie beside the repository; not part of it."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("SSL_KD_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no shared data in {folder}; SSL_KD_SHARED_DATA names another place")
    return folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this machine cannot run, with the reason; `-m hub` asks for the network."""
    asked = str(config.getoption("-m"))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("hub") and "hub" not in asked:
            item.add_marker(pytest.mark.skip(reason="needs the network: run with -m hub"))
