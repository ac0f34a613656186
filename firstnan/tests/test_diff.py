"""`python -m firstnan record` and `diff` name the first operation at which two runs differ."""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from firstnan import diff, trace
from firstnan._values import relative_difference, where_unequal
from firstnan.diff import Comparison, Recording
from tests.processes import free_port, python

LOOP = """
import sys

import torch
from torch import nn
from torch.nn import functional as F

CHANGE = sys.argv[1] if sys.argv[1:] else ""


def changed(name):
    return CHANGE == name


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.norm = nn.LayerNorm(8, eps=1e-3 if changed("eps") else 1e-5)
        self.drop = nn.Dropout(0.3 if changed("probability") else 0.1)
        self.out = nn.Linear(8, 20)

    def forward(self, ids):
        x = self.norm(self.table(ids))
        if changed("mask"):
            x = x.masked_fill(torch.arange(8) == 2, 0.0)
        x = torch.sigmoid(x) if changed("activation") else torch.tanh(x)
        if changed("numbers"):
            torch.rand(1)
        return self.out(self.drop(x))


torch.manual_seed(1 if changed("seed") else 0)
net = Net()
net.train(not changed("eval"))
if changed("frozen"):
    net.norm.weight.requires_grad_(False)
torch.manual_seed(2)
momentum = 0.5 if changed("momentum") else 0.9
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
if changed("optimizer"):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
data = torch.Generator().manual_seed(4 if changed("batch") else 3)
for step in range(9):
    ids = torch.randint(20, (4, 6), generator=data)
    logits = net(ids)
    labels = ids[:, :-1] if changed("shift") else ids[:, 1:]
    reduction = "sum" if changed("sum") else "mean"
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction=reduction)
    if changed("factor"):
        loss = loss * 4
    if not changed("zero_grad"):
        optimizer.zero_grad()
    loss.backward()
    if changed("clip"):
        nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=False)
    if changed("hidden"):
        with torch.no_grad():
            net.out.bias.data = net.out.bias + 1.0
    optimizer.step()
    print("loss", loss.item())
"""
CAUSES = {
    "seed": ("weights", "before", "other weights before the step"),
    "batch": ("batch", "before", "another batch"),
    "eps": ("arguments", "forward", "another eps"),
    "probability": ("arguments", "forward", "another probability of dropout"),
    "mask": ("operation", "forward", "a mask in B alone"),
    "activation": ("operation", "forward", "tanh in A, where B has sigmoid"),
    "numbers": ("random numbers", "forward", "other random numbers"),
    "eval": ("operation", "forward", "dropout in A alone"),
    "shift": ("part", "forward", "a shift by 1 entries"),
    "sum": ("arguments", "forward", "the reduction of the loss: mean in A, sum in B"),
    "factor": ("operation", "backward", "B alone multiplies by 4, which is T²"),
    "frozen": ("gradient", "update", "no gradient in B"),
    "zero_grad": ("operation", "backward", "added to earlier ones in B alone: zero_grad"),
    "clip": ("operation", "forward", "gradients are clipped in B alone"),
    "momentum": ("settings", "update", "other settings of the optimizer"),
    "optimizer": ("operation", "update", "SGD in A, Adam in B"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a function that records a changed loop in this process, once for each change."""
    folder = tmp_path_factory.mktemp("recordings")
    script = folder / "train.py"
    script.write_text(LOOP)
    patch = pytest.MonkeyPatch()

    def record(change, name=None):
        out = folder / (name or change or "plain")
        if not out.exists():
            patch.setattr(sys, "argv", [])
            patch.setattr(sys, "path", ["", *sys.path])
            assert trace.main(["--steps", "2", str(out), str(script), change]) == 0
        return out

    yield record
    patch.undo()


def compared(a, b, tolerance=0.0):
    return Comparison(Recording.read(a, 0), Recording.read(b, 0), tolerance).first()


def test_equal_runs_have_no_difference(recorded):
    again = recorded("", "again")
    assert compared(recorded(""), again) is None
    assert compared(recorded(""), again, None) is None


@pytest.mark.parametrize("change", CAUSES)
def test_a_change_is_named(recorded, change):
    what, direction, cause = CAUSES[change]
    found = compared(recorded(""), recorded(change))
    assert found is not None
    assert (found.what, cause in found.cause) == (what, True), found
    assert direction in {op.direction for op in (found.a, found.b) if op is not None}
    assert "step" in str(found)


def test_the_other_way_round_the_sides_are_exchanged(recorded):
    found = compared(recorded("factor"), recorded(""))
    assert found is not None and found.b is None and "A alone multiplies by 4" in found.cause


def test_the_place_is_the_module_and_the_line(recorded):
    found = compared(recorded(""), recorded("mask"))
    line = next(i for i, text in enumerate(LOOP.splitlines(), 1) if "masked_fill" in text)
    assert found is not None
    assert f"masked_fill, forward, in Net (recordings0/train.py:{line})" in str(found)
    backward = compared(recorded(""), recorded("factor"))
    assert backward is not None and backward.seen is not None
    assert "nll_loss_backward, backward" in str(backward.seen[0])


def test_the_command_ends_the_script_after_its_steps_and_prints_the_report(recorded, capsys):
    a, b = map(str, (recorded(""), recorded("momentum")))
    assert diff.main([a, b]) == 1
    printed = capsys.readouterr().out
    assert "momentum  0.9 in A, 0.5 in B, for norm.bias" in printed
    assert diff.main([a, str(recorded("", "again"))]) == 0
    assert "no difference: " in capsys.readouterr().out
    lines = (recorded("") / "rank0.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in lines) == 2


def test_a_weight_that_was_changed_by_hand_is_named(recorded):
    found = compared(recorded(""), recorded("hidden"))
    assert found is not None and found.what == "state"
    assert "weights that were changed before" in found.cause


def test_a_recorded_run_has_the_same_losses(tmp_path):
    (tmp_path / "train.py").write_text(LOOP)
    plain = python(tmp_path, "train.py", text=True).stdout.splitlines()
    result = python(tmp_path, "-m", "firstnan", "record", "a", "train.py", text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == plain[: len(result.stdout.splitlines())]
    assert "recorded: 3 updates" in result.stderr
    again = python(tmp_path, "-m", "firstnan", "record", "a", "train.py", text=True)
    assert again.returncode == 2 and "give another folder" in again.stderr
    bad = python(tmp_path, "-m", "firstnan", "diff", "a", "nothing", text=True)
    assert bad.returncode == 2 and "holds no recording of rank 0" in bad.stderr


OWN_OPTIMIZER = """
import sys

import torch
from torch import nn


class Own(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                with torch.no_grad():
                    g = p.grad
                    if "normed" in sys.argv:
                        g = g / torch.linalg.vector_norm(g)
                    p.add_(g, alpha=-group["lr"])


torch.manual_seed(0)
net = nn.Linear(8, 16)
optimizer = Own(net.parameters(), lr=0.2 if "rate" in sys.argv else 0.1)
for _ in range(2):
    optimizer.zero_grad()
    net(torch.randn(6, 8)).square().mean().backward()
    optimizer.step()
"""


def test_operations_of_an_update_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    script = tmp_path / "train.py"
    script.write_text(OWN_OPTIMIZER)

    def record(out, *words, flags=("--inside-updates",)):
        assert trace.main([*flags, "--steps", "2", str(tmp_path / out), str(script), *words]) == 0
        return tmp_path / out

    plain, normed = record("a"), record("b", "normed")
    found = compared(plain, normed)
    assert found is not None and found.b is not None
    assert found.cause == "other code of the optimizer's step: linalg_vector_norm in B alone"
    line = next(i for i, text in enumerate(OWN_OPTIMIZER.splitlines(), 1) if "vector_norm" in text)
    assert found.b.line.endswith(f"train.py:{line}")
    assert compared(plain, record("c")) is None
    found = compared(plain, record("d", "rate"))
    assert found is not None and found.what == "settings"
    found = compared(record("e", flags=()), record("f", "normed", flags=()))
    assert found is not None and "record both with --inside-updates" in found.cause


def test_the_entries_that_differ_are_named_by_a_second_recording(recorded, tmp_path, capsys):
    first = [str(recorded(change)) for change in ("", "mask")]
    assert diff.main(first) == 1
    numbers = re.search(
        r"A again with --values (\d+), B with --values (\d+)", capsys.readouterr().out
    )
    assert numbers is not None
    script = str(recorded("").parent / "train.py")
    again = [str(tmp_path / "a"), str(tmp_path / "b")]
    for out, number, change in zip(again, numbers.groups(), ("", "mask"), strict=True):
        assert trace.main(["--values", number, "--values", "999999", out, script, change]) == 0
        assert "no operation has the number 999999" in capsys.readouterr().err
    assert diff.main(again) == 1
    printed = capsys.readouterr().out
    assert "24 of 192 entries differ, at 2 of 8 along dimension 2; the largest" in printed, printed


def test_where_entries_differ():
    x = torch.arange(24.0).view(4, 6)
    assert where_unequal(x, x) == "no entry differs"
    y = x.clone()
    y[2, 1] += 5
    where = "1 of 24 entries differ, at 1 of 6 along dimension 1; the largest difference at"
    assert where_unequal(x, y) == f"{where} [2, 1]: 13 and 18"
    assert "the rows of A in another order" in where_unequal(x, x[[1, 0, 3, 2]])
    y = torch.randn(4, 6)
    y[:, 1:] = x[:, :-1]
    assert "B holds the values of A moved by 1 along dimension 1" in where_unequal(x, y)
    nan = torch.tensor([1.0, float("nan"), 3.0])
    assert where_unequal(nan, nan) == "no entry differs"
    assert "at [1]: nan and 0" in where_unequal(nan, nan.nan_to_num(0.0))
    assert "at []: 1 and 2" in where_unequal(torch.tensor(1), torch.tensor(2))


REGRESSION = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    x, y = torch.randn(6, 8), torch.randn(6)
    rows = (net(x)[:, 0] - y).square()
    optimizer.zero_grad()
    loss = LOSS
    loss.backward()
    optimizer.step()
"""
LOOPED = "sum(torch.sqrt(1e-9 + (net(r).sum() - t).abs() ** 4) for r, t in zip(x, y)) / 6"


def test_two_programs_are_compared_by_their_gradients(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for name, loss in (("mean", "rows.mean()"), ("sum", "rows.sum()"), ("loop", LOOPED)):
        (tmp_path / f"{name}.py").write_text(REGRESSION.replace("LOSS", loss))
        assert trace.main([str(tmp_path / name), str(tmp_path / f"{name}.py")]) == 0
    same = Comparison(*(Recording.read(tmp_path / name, 0) for name in ("mean", "loop")))
    assert same.gradients_alone == "the programs differ" and same.first() is None
    found = compared(tmp_path / "loop", tmp_path / "sum")
    assert found is not None and found.cause == "gradients in B are 6 times those in A"


COMPILED = """
import sys

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(net.parameters())
called = torch.compile(net) if "compile" in sys.argv else net
for _ in range(3):
    optimizer.zero_grad()
    called(torch.randn(6, 8)).square().mean().backward()
    optimizer.step()
"""


def test_a_compiled_model_is_recorded_without_compiling(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    script = tmp_path / "train.py"
    script.write_text(COMPILED)
    for name in ("plain", "compile"):
        assert trace.main([str(tmp_path / name), str(script), name]) == 0
        said = "torch.compile was off" in capsys.readouterr().err
        assert said == (name == "compile")
    assert compared(tmp_path / "plain", tmp_path / "compile") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0", "out", "train.py"], "--steps is 0; expected at least 1"),
        (["out", "nothing.py"], "nothing.py, which is not a file"),
    ],
)
def test_wrong_flags_are_refused(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert trace.main(words) == 2
    assert message in capsys.readouterr().err


def digest(values, dtype="float32", bits=None):
    facts = {"shape": [len(values)], "dtype": dtype, "values": values, "bits": bits}
    if dtype != "int64":
        facts["norm"] = sum(v * v for v in values) ** 0.5
    return facts


def test_relative_difference():
    assert relative_difference(digest([1.0, 2.0]), digest([1.0, 2.0])) == 0
    assert relative_difference(digest([3.0, 4.0]), digest([3.0, 4.0005])) == pytest.approx(
        1e-4, rel=1e-3
    )
    assert relative_difference(digest([1.0]), digest([1.0, 2.0])) == float("inf")
    nan, inf = float("nan"), float("inf")
    assert relative_difference(digest([nan, 1.0]), digest([nan, 1.0])) == 0
    assert relative_difference(digest([nan, 1.0]), digest([inf, 1.0])) == inf
    assert relative_difference(digest([1.0], "int64"), digest([2.0], "int64")) == inf


RANKS = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    x, y = torch.randn(8, 8).chunk(world)[rank], torch.randint(4, (8,)).chunk(world)[rank]
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    for p in net.parameters():
        if world > 1:
            dist.all_reduce(p.grad)
            p.grad /= 1 if "sum" in sys.argv else world
    optimizer.step()
"""


def test_a_missing_division_by_the_number_of_ranks_is_named(tmp_path):
    (tmp_path / "train.py").write_text(RANKS)

    def record(out, world, *words):
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        with ThreadPoolExecutor(world) as pool:
            ranks = [{**env, "WORLD_SIZE": str(world), "RANK": str(r)} for r in range(world)]
            command = ["-m", "firstnan", "record", "--steps", "2", out, "train.py", *words]
            codes = pool.map(lambda own: python(tmp_path, *command, env=own).returncode, ranks)
            assert [*codes] == [0] * world
        return tmp_path / out

    one, mean, total = record("one", 1), record("mean", 2), record("sum", 2, "sum")
    assert compared(one, mean) is None
    found = compared(one, total)
    assert found is not None and found.what == "gradient"
    assert "2 times those in A: a sum over ranks is not divided by their number" in found.cause
    found = compared(mean, total)
    assert found is not None and found.cause == "B divides by 1 instead of 2"
    assert (mean / "rank1.jsonl").is_file()
