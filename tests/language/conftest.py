"""Define fixtures for fast runs of the language mode on tiny models."""

import pytest

from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.teachers import server as module
from tests.served import Server

FAST = {
    "block_size": 24,
    "batch_size": 4,
    "max_steps": 6,
    "eval_every": 3,
    "checkpoint_every": 2,
    "log_every": 2,
    "eval_rows": 8,
    "generations": 1,
    "max_new_tokens": 3,
    "learning_rate": 1e-2,
    "temperature": 2.0,
    "device": "cpu",
}


@pytest.fixture(scope="session")
def models(tiny, tmp_path_factory):
    """Return a function that saves a model on first use and returns its folder."""
    root = tmp_path_factory.mktemp("models")

    def get(name):
        if not (root / name).exists():
            make = {
                "teacher": lambda path: tiny.folder(path),
                "gpt2": lambda path: tiny.folder(path, "GPT2"),
                "mixture": lambda path: tiny.folder(path, "Mixtral"),
                "foreign": lambda path: tiny.folder(path, tokenizer=tiny.other_tokenizer),
                "student": lambda path: tiny.folder(path, seed=4),
            }
            make[name](root / name)
        return str(root / name)

    return get


@pytest.fixture
def settings(tmp_path, text_file, models):
    """Return a function that makes settings of a fast run."""

    def change(**changes):
        paths = {"data_path": text_file, "runs_dir": str(tmp_path / "runs"), "run_name": "a"}
        paths |= {"teacher_model": models("teacher"), "student_model": "fresh:1x16"}
        return LanguageSettings(**{**FAST, **paths, **changes})

    return change


@pytest.fixture
def server(tiny, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    monkeypatch.setitem(module.CompletionServer.__init__.__kwdefaults__, "patience", 0.2)
    with Server(tiny.model(spread=0.3)) as running:  # the model of `models("teacher")`
        yield running
