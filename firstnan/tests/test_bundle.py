"""A bundle replays the same finding in another process, and a damaged one is refused."""

import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from firstnan import script
from firstnan.bundle import BundleError, main, read, replay, save
from firstnan.watch import Watch
from tests.processes import HANG, ROOT

NET = """
import torch
from torch import nn

class Scale(nn.Module):
    def forward(self, x, options):
        x = nn.functional.dropout(x, 0.5)
        return x * options["by"] / x.norm(dim=-1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8, affine=False)
        self.scale, self.last = Scale(), nn.Linear(8, 3)
        self.options = {"by": 2.0, "dtype": torch.half}

    def forward(self, x):
        return self.last(self.scale(self.norm(self.first(x)) * x.any(1, True), self.options))


if __name__ == "__main__":
    torch.manual_seed(0)
    net = Net().to(torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(3):
        x = torch.randn(6, 4).to(torch.bfloat16)
        x[3] *= step < 2
        optimizer.zero_grad()
        net(x).float().square().mean().backward()
        optimizer.step()
"""


def python(folder, *words):
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    options = {"capture_output": True, "text": True, "timeout": HANG}
    command = [sys.executable, "-m", "firstnan", *words]
    return subprocess.run(command, cwd=folder, env=env, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "net.py").write_text(NET)
    done = python(folder, "--bundle", "saved", "net.py")
    assert done.returncode == 3 and "in Net.scale (" in done.stderr and "row 3" in done.stderr
    return folder


@pytest.mark.parametrize("model", ["net:Net", pytest.param("net:Scale", marks=pytest.mark.slow)])
def test_another_process_finds_the_same_operation_and_rows(folder, model):
    done = python(folder, "replay", "saved/step3.safetensors", "--model", model)
    shown = done.stdout.partition("replayed: the same\n")[2]
    assert done.returncode == 0 and "aten.div, forward, in Net.scale (" in shown, done
    assert "step 3, row 3" in shown and "rows of the training data as they enter" in done.stdout


def test_the_file_has_only_the_module_of_the_finding_and_other_tools_read_it(folder):
    file = folder / "saved" / "step3.safetensors"
    call, others = read(file)["call"], safetensors.torch.load_file(file)
    mine = [call.args[0], *call.gradients.values(), *call.random.values()]
    assert len(mine) == len(others) == 3 and call.args[1] == {"by": 2.0, "dtype": torch.half}
    bits = [(y.dtype, y.shape, y.view(torch.uint8).tolist()) for y in others.values()]
    assert all((x.dtype, x.shape, x.detach().view(torch.uint8).tolist()) in bits for x in mine)
    with pytest.raises(BundleError, match="'weight' is .* in the model, expected missing"):
        replay(read(file), torch.nn.Linear(2, 2))


class Root(torch.nn.Module):
    def forward(self, x, options):
        return x.sqrt()


BAD_OPTIONS = {
    "dict with the key (0, 1)": {(0, 1): 2.0},
    "dict with the key 1": {"of": [{1: 2.0}]},
    "type torch.complex32": torch.complex32,
}


@pytest.mark.parametrize("message", BAD_OPTIONS)
def test_arguments_that_a_bundle_cannot_hold_do_not_end_the_script(tmp_path, message):
    watch = Watch(Root())
    x = -torch.ones(2, 1, requires_grad=True)
    watch.model(x, BAD_OPTIONS[message]).sum().backward()
    result = save(tmp_path / "new" / "a", watch, watch.explain())
    assert result.startswith("not saved: ") and message in result and not [*tmp_path.iterdir()]


def test_a_full_disk_leaves_no_file_and_does_not_end_the_script(tmp_path, monkeypatch):
    watch = Watch(torch.nn.Linear(1, 1))
    watch.model(torch.full((2, 1), torch.nan)).sum().backward()
    full, path = open("/dev/full", "wb"), tmp_path / "a"  # noqa: SIM115
    monkeypatch.setattr(type(path), "open", lambda path, mode: path.touch() or full)
    assert "not saved: [Errno 28]" in save(path, watch, watch.explain())
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr("firstnan.bundle.json.dumps", lambda *_, **__: 1 / 0)
    assert "not saved: ZeroDivisionError(" in save(path, watch, watch.explain())


def _change(data, **changes):
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    next(entry for name, entry in header.items() if name != "__metadata__").update(changes)
    start = json.dumps(header).encode()
    return len(start).to_bytes(8, "little") + start + data[8 + size :]


@pytest.mark.parametrize(
    "damage",
    [
        *[lambda data, size=size: data[:size] for size in (5, 100, -1)],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data + b"x",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data.replace(b"Net.scale", b"Net.Scale", 1),
        lambda data: _change(data, dtype="PICKLE"),
        *[lambda data, x=x: _change(data, data_offsets=x) for x in ([1, 97], [0, 1 << 40])],
        *[lambda data, x=x: _change(data, shape=x) for x in ([-6, -8], [1 << 62, 0], "6")],
        lambda data: data[:8] + b"[" * (len(data) - 8),
    ],
)
def test_a_damaged_or_hostile_bundle_is_refused(folder, tmp_path, damage):
    file = tmp_path / "damaged.safetensors"
    file.write_bytes(damage((folder / "saved" / "step3.safetensors").read_bytes()))
    with pytest.raises(BundleError, match="damaged, or is no bundle: .*(SafetensorError|its hash)"):
        read(file)


def test_nothing_is_overwritten_and_nothing_is_unpickled(folder, monkeypatch):
    file = folder / "saved" / "step3.safetensors"
    before, target = file.read_bytes(), folder / "target"
    (folder / "saved" / "step3-2.safetensors").symlink_to(target)
    done = python(folder, "--bundle", "saved", "net.py")
    assert "bundle     saved/step3-3.safetensors, with rows of your data" in done.stderr
    assert read(folder / "saved" / "step3-3.safetensors")["step"] == 3
    assert file.read_bytes() == before and not target.exists()
    assert len([*file.parent.iterdir()]) == 3
    monkeypatch.setattr("pickle.Unpickler", None)
    monkeypatch.setattr("pickle.loads", None)
    monkeypatch.setattr(torch, "load", None)
    assert read(file)["step"] == 3


@pytest.mark.parametrize("entries", [{"step": "2"}, {"args": {}}, {"args": [{"torch.dtype": "2"}]}])
def test_a_hostile_bundle_with_the_right_hash_is_refused(folder, monkeypatch, entries):
    def hostile(text, loads=json.loads, **hook):
        return loads(json.dumps(loads(text) | entries), **hook)

    monkeypatch.setattr("firstnan.bundle.json.loads", hostile)
    with pytest.raises(BundleError, match="'step' is '2', expected|'args' is {}, exp|KeyError.'2'"):
        read(folder / "saved" / "step3.safetensors")


def test_invalid_arguments_of_replay_name_the_expected_ones(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for word, what in (("saved", "a folder, exp"), ("no", "not a file, exp"), ("net.py", "dam")):
        assert main([word]) == 2 and f"{word} is {what}" in capsys.readouterr().err
    for model in ("net", "no:Net", "net:torch.zeros"):
        assert main(["saved/step3.safetensors", "--model", model]) == 2
        assert f"--model is {model!r}, expected MODULE:CALLABLE" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert script.main(["--bundle", "saved", "net.py"]) == 2
    assert "a bundle needs: pip install safetensors" in capsys.readouterr().err


def test_complex_weights_and_inputs_are_the_same_after_a_replay(tmp_path):
    watch = Watch(torch.nn.Linear(2, 2, dtype=torch.complex128))
    x = torch.full((3, 2), complex(1.0, torch.nan), dtype=torch.complex128)
    watch.model(x).abs().sum().backward()
    save(tmp_path / "a", watch, watch.explain())
    found = replay(read(tmp_path / "a"), torch.nn.Linear(2, 2, dtype=torch.complex128))
    assert found.fault.op == "aten.addmm" and found.fault.poisoned == "input 0"
