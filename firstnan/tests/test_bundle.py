"""A bundle replays the same finding in another process, and a damaged one is refused."""

import json
import os
import subprocess
import sys

import pytest
import torch

from firstnan.bundle import _KEYS, BundleError, read, replay, save
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

    def forward(self, x):
        return self.last(self.scale(self.norm(self.first(x)) * x.any(1, True), {"by": 2.0}))


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
    command = [sys.executable, "-m", "firstnan", *words]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=HANG
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "net.py").write_text(NET)
    done = python(folder, "--bundle", "saved", "net.py")
    assert done.returncode == 3 and "in Net.scale (" in done.stderr and "row 3" in done.stderr
    return folder


@pytest.mark.parametrize("model", ["net:Net", "net:Scale"])
def test_another_process_finds_the_same_operation_and_rows(folder, model):
    done = python(folder, "replay", "saved/step2.safetensors", "--model", model)
    shown = done.stdout.partition("replayed: the same\n")[2]
    assert done.returncode == 0 and "aten.div, forward, in Net.scale (" in shown, done
    assert "step 2, row 3" in shown and "rows of the training data as they enter" in done.stdout


def test_the_file_has_only_the_module_of_the_finding_and_other_tools_read_it(folder):
    library = pytest.importorskip("safetensors.torch")
    file = folder / "saved" / "step2.safetensors"
    call, others = read(file)["call"], library.load_file(file)
    mine = [call.args[0], *call.gradients.values(), *call.random.values()]
    assert len(mine) == len(others) == 3 and call.args[1] == {"by": 2.0}
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
    "type torch.complex64": torch.complex64,
}


@pytest.mark.parametrize("message", BAD_OPTIONS)
def test_arguments_that_a_bundle_cannot_hold_do_not_end_the_script(tmp_path, message):
    watch = Watch(Root())
    x = -torch.ones(2, 1, requires_grad=True)
    watch.model(x, BAD_OPTIONS[message]).sum().backward()
    said = save(tmp_path / "new" / "a", watch, watch.explain())
    assert said.startswith("not saved: ") and message in said and not [*tmp_path.iterdir()]


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
    ("damage", "message"),
    [
        (lambda data: data[:5], "its header has"),
        (lambda data: data[:100], "its header has"),
        (lambda data: b"\xff" * 8 + data[8:], "its header has 18446744073709551615 bytes"),
        (lambda data: data[:-1], "has the bytes"),
        (lambda data: data + b"x", "not those that its hash was made of"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "not those that its hash was made of"),
        (lambda data: data.replace(b'"Net.scale', b'"Net.Scale', 1), "JSON|hash"),
        (lambda data: _change(data, dtype="PICKLE"), "the type 'PICKLE', expected"),
        (lambda data: _change(data, data_offsets=[1, 97]), "has the bytes 1 to 97"),
        (lambda data: _change(data, data_offsets=[0, 1 << 40]), "has the bytes 0 to 1099511627776"),
        (lambda data: _change(data, shape=[-6, -8]), r"a tensor has the shape \[-6, -8\]"),
        (lambda data: _change(data, shape=[1 << 62, 0]), "a tensor has the shape"),
        (lambda data: _change(data, shape="6"), "a tensor has the shape"),
        (lambda data: data[:8] + b"[" * (len(data) - 8), "RecursionError"),
    ],
)
def test_a_damaged_or_hostile_bundle_is_refused(folder, tmp_path, damage, message):
    file = tmp_path / "damaged.safetensors"
    file.write_bytes(damage((folder / "saved" / "step2.safetensors").read_bytes()))
    with pytest.raises(BundleError, match=f"is damaged, or is no bundle: .*({message})"):
        read(file)


def test_nothing_is_overwritten_and_nothing_is_unpickled(folder, monkeypatch):
    file = folder / "saved" / "step2.safetensors"
    before, target = file.read_bytes(), folder / "target"
    (folder / "saved" / "step2-2.safetensors").symlink_to(target)
    done = python(folder, "--bundle", "saved", "net.py")
    assert "bundle     saved/step2-3.safetensors, with rows of your data" in done.stderr
    assert read(folder / "saved" / "step2-3.safetensors")["step"] == 2
    assert file.read_bytes() == before and not target.exists()
    assert len([*file.parent.iterdir()]) == 3
    monkeypatch.setattr("pickle.Unpickler", None)
    monkeypatch.setattr("pickle.loads", None)
    monkeypatch.setattr(torch, "load", None)
    assert read(file)["step"] == 2
    monkeypatch.setitem(_KEYS, "step", str)
    with pytest.raises(BundleError, match="its 'step' is 2, expected <class 'str'>"):
        read(file)
