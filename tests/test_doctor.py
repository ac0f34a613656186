"""The doctor finds planted faults, names the remedy, and reports nothing on a healthy setup."""

import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from firstnan.events import Event
from ssl_kd import cli, doctor
from ssl_kd.core.files import sha256_file
from ssl_kd.core.precision import DeviceInfo, Precision
from ssl_kd.core.shards import Fingerprint
from ssl_kd.core.shards.shards import read_manifest, write_manifest
from ssl_kd.doctor import machine, own_data
from ssl_kd.vision.cache import EmbeddingStore, EmbeddingWriter

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A settings file in the current directory, a temporary one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # a path longer than its column would be cut in two
    path = tmp_path / "config.py"
    path.write_text(f"EMBEDDINGS_DIR = {str(tmp_path / 'embeddings')!r}\n")
    return path


def test_this_installation_passes(config, capsys):
    assert doctor.installation(config) == 0
    text = capsys.readouterr().out
    assert "FAULT" not in text and "0 faults" in text
    assert torch.__version__ in text and "precision" in text and "kernel float32" in text
    assert "writable" in text


def ask(config, capsys, check=doctor.nan_issues):
    """The exit code, and the output in one line."""
    code = check(config)
    return code, " ".join(capsys.readouterr().out.split())


def faults(config, capsys, check=doctor.installation):
    """The output of a check that ends in 1, in one line."""
    code, text = ask(config, capsys, check)
    assert code == 1
    return text


def test_a_package_that_does_not_import_names_the_remedy(config, capsys, monkeypatch):
    real = importlib.import_module

    def broken(name, *args):
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms does not exist")
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", broken)
    monkeypatch.setattr(machine, "_NEEDED", ["torch", "not_here_at_all"])
    monkeypatch.setattr(machine, "_OF_EXTRAS", {"torchvision": machine._OF_EXTRAS["torchvision"]})
    text = faults(config, capsys)
    assert "built for another torch, install both from one index" in text
    assert "make train" in text and "2 faults." in text


def test_a_missing_device_and_an_unwritable_folder_are_faults(config, capsys, tmp_path):
    (tmp_path / "file").write_text("")  # root may write anywhere, but not make a folder in a file
    runs = tmp_path / "file" / "runs"
    config.write_text(f"DEVICE = 'cuda:99'\nRUNS_DIR = {str(runs)!r}\n")
    text = faults(config, capsys)
    assert "set DEVICE in config.py" in text and "set RUNS_DIR in config.py" in text


def test_the_example_head_is_healthy(config, capsys):
    config.write_text(config.read_text() + "HEAD = 'heads.cosine_head.CosineHead'\n")
    assert doctor.nan_issues(config) == 0
    text = capsys.readouterr().out
    for check in ("forward", "fp16 logits of 6e4", "disjoint", "every head", "isolation", "cache"):
        assert check in text
    assert "FAULT" not in text


class LeakyHead(torch.nn.Linear):
    """A head that is not safe on zero rows, and has a parameter that it never uses."""

    def __init__(self, in_dim, n_clusters):
        super().__init__(in_dim, n_clusters)
        self.idle = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x / x.norm(dim=-1, keepdim=True))


def test_a_leaky_head_is_found(config, capsys, monkeypatch):
    monkeypatch.setattr("ssl_kd.vision.train.heads.bank.import_head", lambda path: LeakyHead)
    text = faults(config, capsys, doctor.nan_issues)
    assert "FAULT forward: all-zero rows" in text
    assert "FAULT gradient: every parameter none or NaN in idle" in text


def test_a_check_that_cannot_run_is_a_fault(config, capsys, monkeypatch):
    monkeypatch.setattr("ssl_kd.losses.temi", None)
    assert "FAULT gradients TypeError" in faults(config, capsys, doctor.nan_issues)


# --- the user's data ---- ---------------------------------------------------------------------

CLASSES = ("round", "flat")


@pytest.fixture
def cache(config, tmp_path):
    """Write a cache of two shards, sample `s<i>` in row i, and settings that suit its size."""
    config.write_text(
        f"EMBEDDINGS_DIR = {str(tmp_path / 'embeddings')!r}\n"
        "N_HEADS = 3\nBATCH_SIZE = 16\nN_NEIGHBORS = 3\nHIDDEN_DIM = 8\n"
    )

    def make(x):
        n, dim = x.shape
        with EmbeddingWriter(
            tmp_path / "embeddings",
            "train",
            Fingerprint("pixels", "none", "none", "float32", "digits"),
            n,
            dim,
            labels=torch.arange(n) % len(CLASSES),
            ids=[f"s{i}" for i in range(n)],
            class_names=CLASSES,
            shard_rows=-(-n // 2),
        ) as writer:
            writer.append(x, torch.arange(n))
        return tmp_path / "embeddings"

    return make


def plant(folder, shard, change):
    """Change the embeddings of one shard as if they had always been so: checksums fit."""
    path = folder / "embeddings_train.json"
    manifest = read_manifest(path)
    entry = manifest["shards"][shard]
    content = torch.load(folder / entry["file"], weights_only=True)
    change(content["embeddings"])
    torch.save(content, folder / entry["file"])
    entry["sha256"] = sha256_file(folder / entry["file"])
    entry["bytes"] = (folder / entry["file"]).stat().st_size
    write_manifest(path, manifest)


def test_a_healthy_cache_is_used_for_real_steps(cache, config, capsys, monkeypatch):
    monkeypatch.setattr(own_data, "_PAIRED_ROWS", 20)
    folder = cache(torch.randn(40, 6))
    before = sorted(folder.iterdir())
    code, text = ask(config, capsys)
    assert code == 0 and "FAULT" not in text
    assert "40 rows of 6, checksums fit" in text
    assert "mean norm" in text and "0 zero rows" in text and "odd rows" not in text
    assert "3 steps of 3 heads, 2 clusters, on 20 of 40 rows: loss" in text
    assert sorted(folder.iterdir()) == before


def test_without_a_cache_it_says_what_was_not_checked(config, capsys):
    code, text = ask(config, capsys)
    assert code == 0
    assert "note cache: train none in" in text and "run python train.py, which writes it" in text
    assert "note run: first batches not checked: there is no usable cache" in text


def test_a_damaged_cache_is_found(cache, config, capsys):
    folder = cache(torch.randn(40, 6))
    shard = folder / "embeddings_train_00001.pt"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    code, text = ask(config, capsys)
    assert code == 1
    assert "FAULT cache: train CorruptFileError" in text and "--rebuild_damaged" in text
    assert "embeddings_train_00001.pt" in text and "not checked" in text


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e30])
def test_bad_rows_are_counted_and_the_first_is_named(cache, config, capsys, value):
    folder = cache(torch.randn(40, 6))

    def spoil(x):
        x[3, 1] = x[7, 0] = value

    plant(folder, 1, spoil)
    code, text = ask(config, capsys)
    assert code == 1
    assert "FAULT embeddings: train, bad row embeddings_train_00001.pt, row 3" in text
    assert "sample 's23'" in text and "2 of them bad" in text and "1 fault" in text
    assert "3 steps of 3 heads" in text  # of the other rows


@pytest.mark.parametrize(
    ("change", "status", "result"),
    [
        (
            lambda x: x * (torch.arange(40) != 5)[:, None],
            "note",
            "1 of 40 rows contain only zeros",
        ),
        (lambda x: x + 1e6, "note", "all rows have almost the same direction"),
        (lambda x: x * 0 + 1, "FAULT", "all rows are the same"),
    ],
)
def test_odd_rows_are_named(cache, config, capsys, change, status, result):
    cache(change(torch.randn(40, 6)))
    code, text = ask(config, capsys)
    assert code == (status == "FAULT") and f"{status} embeddings: train, odd rows {result}" in text


class SickHead(nn.Linear):
    """NaN for any sample whose first number is negative."""

    def forward(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x) + x[:, :1].clamp(max=0).sqrt() * 0


class ClampedHead(nn.Linear):
    """No gradient gets through its clamp."""

    def forward(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x).clamp(9, 10)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (SickHead, r"FAULT run: \w+ head 0, head 1, head 2: .*, at step 1, 2, 3"),
        (ClampedHead, "FAULT run: dead heads head 0, 1, 2: the gradient is exactly zero"),
    ],
)
def test_a_fault_of_the_first_batches_names_its_heads(
    cache, config, capsys, monkeypatch, head, message
):
    monkeypatch.setattr("ssl_kd.vision.train.heads.bank.import_head", lambda path: head)
    cache(torch.randn(40, 6))
    code, text = ask(config, capsys)
    assert code == 1 and re.search(message, text)


@pytest.mark.parametrize(("steps", "status"), [(2, "note"), (3, "FAULT")])
def test_a_loss_scale_may_adjust_in_the_first_steps(steps, status):
    t4 = Precision.for_device(DeviceInfo("cuda", "T4", (7, 5)), use_fp16=True)
    events = [
        Event(step, f"head {head}", "gradient", "too large", "skipped")
        for step in range(steps)
        for head in range(48)
    ]
    (finding,) = own_data.faults_of(events, [], t4)
    assert finding.status == status and "USE_FP16 = False" in finding.change
    assert finding.check == "run: gradient"
    assert "head 4, and 43 more: too large, at step 0, 1" in finding.result


def test_a_row_that_goes_bad_at_run_time_is_named(cache, config, capsys, monkeypatch):
    folder = cache(torch.randn(40, 6))
    real = EmbeddingStore.gather

    def gather(store, rows):
        x = real(store, rows)
        if len(rows) == 2 * 16:  # the two views of a batch
            x[rows == 23] = float("nan")
        return x

    monkeypatch.setattr(EmbeddingStore, "gather", gather)
    config.write_text(config.read_text() + "MAX_STEPS = 40\n")
    monkeypatch.setattr(own_data, "_STEPS", 5)  # so that row 23 is drawn
    code, text = ask(config, capsys)
    assert code == 1 and folder.is_dir()
    assert "FAULT run: input batch: the embedding of row" in text and "sample 's" in text


def test_settings_that_a_run_refuses_are_faults(cache, config, capsys):
    cache(torch.randn(40, 6))
    config.write_text(config.read_text() + "N_CLUSTERS = 50\n")
    code, text = ask(config, capsys)
    assert code == 1 and "FAULT run: first batches N_CLUSTERS is 50" in text


def test_fp16_that_is_not_available_is_a_note(config, capsys, monkeypatch):
    monkeypatch.setattr("ssl_kd.core.precision._cpu_has_bf16_products", lambda: False)
    config.write_text("USE_FP16 = True\nDEVICE = 'cpu'\n")
    code, text = ask(config, capsys, doctor.installation)
    assert code == 0
    assert (
        "note precision cpu:" in text
        and "fp16 was requested and has no effect here, fp32 is used" in text
    )


# --- output -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "command"),
    [("test_installation", "installation"), ("test_nan_issues", "nan_issues")],
)
def test_the_scripts_pass_on_the_exit_code(script, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{script}.py"])
    for code in (0, 1):
        monkeypatch.setattr(doctor, command, lambda code=code: code)
        with pytest.raises(SystemExit) as exit:
            runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
        assert exit.value.code == code


def test_a_bad_config_is_one_line(config, capsys):
    config.write_text("SEDE = 1\n")
    assert cli.main(["doctor"]) == 2
    assert "Did you mean SEED?" in capsys.readouterr().err
