"""The doctor finds what is planted, names the way out, and is at ease where nothing is wrong."""

import importlib
import runpy
from pathlib import Path

import pytest
import torch

from ssl_kd import cli, doctor

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A settings file of a folder of its own, which is also where we are."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.py"
    path.write_text(f"EMBEDDINGS_DIR = {str(tmp_path / 'embeddings')!r}\n")
    return path


def test_this_installation_is_sound(config, capsys):
    assert doctor.installation(config) == 0
    text = capsys.readouterr().out
    assert "FAULT" not in text and "0 faults" in text
    assert torch.__version__ in text and "precision" in text and "kernel float32" in text
    assert "writable" in text


def test_torchvision_of_another_build_is_named(config, capsys, monkeypatch):
    real = importlib.import_module

    def broken(name, *args):
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms does not exist")
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", broken)
    assert doctor.installation(config) == 1
    text = capsys.readouterr().out
    assert "torchvision was built for another torch" in " ".join(text.split())
    assert "1 faults" in text


def test_a_missing_module_names_the_way(config, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_NEEDED", ["torch", "not_here_at_all"])
    assert doctor.installation(config) == 1
    assert "make train" in capsys.readouterr().out


def test_a_device_that_is_not_there_is_a_fault(config, capsys):
    config.write_text("DEVICE = 'cuda:99'\n")
    assert doctor.installation(config) == 1
    assert "set DEVICE in config.py" in " ".join(capsys.readouterr().out.split())


def test_a_folder_that_cannot_be_written_is_a_fault(config, capsys, tmp_path):
    (tmp_path / "file").write_text("")  # root may write anywhere, but nobody makes a folder in this
    config.write_text(f"RUNS_DIR = {str(tmp_path / 'file' / 'runs')!r}\n")
    assert doctor.installation(config) == 1
    assert "set RUNS_DIR in config.py" in " ".join(capsys.readouterr().out.split())


def test_the_numbers_are_healthy(config, capsys):
    assert doctor.nan_issues(config) == 0
    text = capsys.readouterr().out
    for tried in ("forward", "fp16 logits of 6e4", "disjoint", "every head", "isolation", "cache"):
        assert tried in text
    assert "FAULT" not in text


def test_the_example_head_is_healthy(config, capsys):
    config.write_text("HEAD = 'heads.cosine_head.CosineHead'\n")
    assert doctor.nan_issues(config) == 0, capsys.readouterr().out


class LeakyHead(torch.nn.Linear):
    """A head that is not safe on zero rows, and has a parameter that it never uses."""

    def __init__(self, in_dim, n_clusters):
        super().__init__(in_dim, n_clusters)
        self.idle = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x / x.norm(dim=-1, keepdim=True))


def test_a_leaky_head_is_found(config, capsys, monkeypatch):
    monkeypatch.setattr("ssl_kd.heads.bank.import_head", lambda path: LeakyHead)
    assert doctor.nan_issues(config) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "FAULT forward: all-zero rows" in text
    assert "FAULT gradient: every parameter none or NaN in idle" in text


def test_a_check_that_cannot_run_is_a_fault(config, capsys, monkeypatch):
    monkeypatch.setattr("ssl_kd.losses.beta_mi", None)
    assert doctor.nan_issues(config) == 1
    assert "FAULT losses TypeError" in " ".join(capsys.readouterr().out.split())


def test_a_damaged_cache_is_found(config, capsys, tmp_path):
    from ssl_kd.store import EmbeddingWriter, Fingerprint

    fingerprint = Fingerprint("pixels", "none", "none", "float32", "digits")
    folder = tmp_path / "embeddings"
    ids = [str(i) for i in range(8)]
    with EmbeddingWriter(
        folder, "train", fingerprint, 8, 4, labels=None, ids=ids, class_names=None
    ) as writer:
        writer.append(torch.randn(8, 4), torch.arange(8))
    assert doctor.nan_issues(config) == 0
    assert "8 rows of 4" in capsys.readouterr().out

    shard = folder / "embeddings_train.pt"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert doctor.nan_issues(config) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "FAULT cache: train" in text and "--force-recompute" in text


@pytest.mark.parametrize(
    ("script", "command"),
    [("test_installation", "installation"), ("test_nan_issues", "nan_issues")],
)
def test_the_scripts_pass_on_the_exit_code(script, command, monkeypatch):
    for code in (0, 1):
        monkeypatch.setattr(doctor, command, lambda code=code: code)
        with pytest.raises(SystemExit) as exit:
            runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
        assert exit.value.code == code


def test_a_bad_config_is_said_in_one_line(config, capsys):
    config.write_text("SEDE = 1\n")
    assert cli.main(["doctor"]) == 2
    assert "Did you mean SEED?" in capsys.readouterr().err
