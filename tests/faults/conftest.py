"""Fixtures of the fault matrix: small real runs to inject into."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from ssl_kd import cli
from ssl_kd.vision.settings import VisionSettings
from tests.faults.inject import FAST, flags_of


@pytest.fixture(scope="session")
def digits():
    """Return 96 real digits, uint8 `[96, 8, 8]`, and their labels."""
    data = load_digits()
    return (data.images[:96] * 15).astype(np.uint8), data.target[:96]  # pyright: ignore


@pytest.fixture
def settings(tmp_path, digits):
    """Return a function that makes settings of a fast run on 64 digits from a features file."""
    images, labels = digits
    flat = images[:64].reshape(64, -1).astype(np.float32)
    np.savez(tmp_path / "digits.npz", features=flat, labels=labels[:64])

    def change(**changes):
        folders = {
            "dataset": str(tmp_path / "digits.npz"),
            "embeddings_dir": str(tmp_path / "embeddings"),
            "runs_dir": str(tmp_path / "runs"),
        }
        return VisionSettings(**{**FAST, **folders, **changes})

    return change


@pytest.fixture
def train_py(capfd, tmp_path):
    """Return a function that runs `train.py` in this process; it returns exit code and stderr."""

    def call(settings, *flags):
        capfd.readouterr()
        code = cli.train([*flags_of(settings), *flags], config=tmp_path / "no config.py")
        return code, capfd.readouterr().err

    return call


@pytest.fixture
def distill(capfd, tmp_path):
    """Return a function that runs `distill.py` in this process; it returns exit code and stderr."""

    def call(settings, **more):
        capfd.readouterr()
        code = cli.distill(flags_of(settings, **more), config=tmp_path / "no config.py")
        return code, capfd.readouterr().err

    return call


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    pytest.importorskip("transformers")
    from tests.faults.inject_language import World  # needs transformers

    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def world(models, tmp_path):
    """Return models and text, with a folder of this test for runs and corrupted models."""
    models.own, models.runs = tmp_path, tmp_path / "runs"
    return models
