import gc
import importlib
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ssl_kd.core.precision import DeviceInfo
from ssl_kd.losses import linear_distillation
from tests.media_runs import sound_run, text_run
from tests.photos import photo_run
from tests.reuse import equal_results_are_reused
from tests.tiny import text_file, tiny

__all__ = ["photo_run", "sound_run", "text_file", "text_run", "tiny"]  # fixtures of many folders

# Tensors in tests are small: more than two threads only wait for each other.
torch.set_num_threads(min(2, torch.get_num_threads()))
# A process that a shell started with & ignores Ctrl-C, and so would those that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # while tests are collected: imported modules are never garbage


def pytest_collection_finish():
    """Exempt imported objects from garbage collection, which each Trainer triggers."""
    importlib.import_module("tests.frozen")
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded():
    """Start each test from the same random state."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _equal_results_are_reused():
    with equal_results_are_reused():
        yield


@pytest.fixture
def kept_every_50_steps(monkeypatch):
    """Save good states of heads twice as often, so that a short test can restore one."""
    monkeypatch.setattr("ssl_kd.vision.train.step.SNAPSHOT_EVERY", 50)


@pytest.fixture
def free(monkeypatch):
    """Return a function that sets whether losses may read tensor values, as is free on a CPU."""
    module = sys.modules[linear_distillation.__module__]  # the function has the same name
    return lambda are: monkeypatch.setattr(module, "_reads_are_free", lambda device: are)


@pytest.fixture
def float16_here(monkeypatch):
    """Let this CPU compute in float16, as a GPU without bfloat16 does."""
    monkeypatch.setattr(DeviceInfo, "halves", lambda device: ((torch.float16,), "emulated"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real images and models beside the repository, or skip the test."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("SSL_KD_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no shared data in {folder}; set SSL_KD_SHARED_DATA to its path")
    return folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that this machine cannot run, and without `-m hub` those of the network."""
    markers = str(config.getoption("-m"))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("hub") and "hub" not in markers:
            item.add_marker(pytest.mark.skip(reason="needs the network: run with -m hub"))
