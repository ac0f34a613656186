"""`python -m firstnan` runs a script unchanged and names its first bad operation."""

import runpy
import sys
import textwrap
from types import SimpleNamespace

import pytest

import firstnan
from firstnan.script import main
from tests.processes import python

LOOP = """
import sys
import torch
from torch import nn

torch.manual_seed(0)


class Act(nn.Module):
    def forward(self, x):
        return {act}


net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Act(), nn.Dropout(0.1), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(net.parameters())
criterion = nn.CrossEntropyLoss()
for step in range(4):
    x = torch.randn(6, 4)
    if step == 2:
        x[4] = 0 if "zero" in sys.argv else x[4]
    with torch.no_grad():
        net(x)
    loss = criterion(net(x), torch.randint(3, (6,)))
    if step == 2 and "outside" in sys.argv:
        loss = (loss * 0).log()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("bits", float(sum(p.detach().double().sum() for p in net.parameters())), torch.rand(1).item())
"""


def write(folder, act="x", loop=LOOP):
    path = folder / "train.py"
    path.write_text(textwrap.dedent(loop).replace("{act}", act))
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs it in this process: exit code, stdout, stderr."""

    def started(*words):
        monkeypatch.setattr(sys, "argv", [])
        monkeypatch.setattr(sys, "path", ["", *sys.path])
        code = main([*map(str, words)])
        return SimpleNamespace(returncode=code, **capsys.readouterr()._asdict())

    return started


def test_a_healthy_script_prints_the_same_with_firstnan(tmp_path, run, capsys):
    script = write(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    plain, guarded = capsys.readouterr().out, run("--record", script, "a")
    assert plain == guarded.out and "bits" in plain and guarded.returncode == 0
    assert "4 optimizer steps, every loss and gradient finite" in guarded.err


def test_the_first_bad_step_names_the_operation_and_stops(tmp_path, run):
    script = write(tmp_path, "x.log()")
    done = run(script)
    assert done.returncode == 3 and "step 1:" in done.err and not done.out
    assert "aten.log, forward, in Sequential.2" in done.err and f"{script}:" in done.err
    assert "cause      outside its domain" in done.err


@pytest.mark.parametrize(("on_bad", "finite"), [("skip", True), ("go-on", False)])
def test_a_script_continues_with_or_without_the_bad_step(tmp_path, run, on_bad, finite):
    done = run("--on-bad", on_bad, write(tmp_path), "outside")
    assert done.returncode == 0 and ("bits nan" not in done.out) == finite
    expected = "step 3:\nfirst bad  aten.log, forward, outside of the model, step 3, all 6 rows\n"
    assert expected in done.err and "read from the graph of the loss; --every-op" in done.err


def test_every_op_names_what_is_outside_of_models(tmp_path, run):
    done = run("--every-op", write(tmp_path), "outside")
    assert done.returncode == 3 and "aten.log, forward, outside of the model" in done.err
    assert "loss = (loss * 0).log()" in done.err
    done = run("--every-op", write(tmp_path, "x.log()"))
    assert "aten.log, forward, in Sequential.2 (" in done.err


def test_a_loss_that_stays_behind_is_seen_although_every_gradient_is_zero(tmp_path, run):
    loop = LOOP.replace("torch.randint(3, (6,))", "torch.full((6,), -100)")
    done = run(write(tmp_path, loop=loop))
    assert done.returncode == 3 and "nll_loss_forward" in done.err
    assert "every label is ignored" in done.err


@pytest.mark.parametrize("fused", [False, True])
def test_a_falling_loss_scale_is_a_fault_only_if_it_never_fits(tmp_path, run, fused):
    loop = f"""
    import sys, torch
    from torch import nn
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, fused={fused})
    scaler = torch.amp.GradScaler("cpu")
    for step in range(20):
        loss = net(torch.ones(2, 4)).half().mean() * float(sys.argv[1])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """
    assert run(write(tmp_path, loop=loop), 1.0).returncode == 0
    never = run(write(tmp_path, loop=loop), "nan")
    assert never.returncode == 3 and "skipped at a loss scale of 65536" in never.err


def test_a_module_runs_by_name_and_exit_codes_pass_through(tmp_path):
    (tmp_path / "mine.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    done = python(tmp_path, "-m", "firstnan", "-m", "mine", "7")
    assert done.returncode == 7 and b"no optimizer took a step; nothing was checked" in done.stderr


def test_a_script_that_is_not_there_is_named(capsys):
    assert main(["nowhere.py"]) == 2
    assert "script is nowhere.py, which is not a file; expected" in capsys.readouterr().err


FOREIGN = """
import copy, pickle, torch
from torch import nn

torch.manual_seed(0)


class Root(nn.Module):
    def forward(self, x):
        return (x * 0).sqrt() + x


net, other = nn.Sequential(nn.Linear(4, 8), Root(), nn.Linear(8, 8)), nn.Linear(8, 1)
sgd, adam = torch.optim.SGD(net.parameters()), torch.optim.Adam(other.parameters())
x = torch.randn(6, 4)
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    {
        "a generator": (
            "fake = net(x); other(fake.detach()).mean().backward(); adam.step()\n"
            "other(fake).mean().backward(); sgd.step()",
            "step 2:\nfirst bad  aten.div, backward, in Sequential.1 (",
        ),
        "a closure": (
            "sgd.step(lambda: net(x).mean().backward())",
            "step 1:\nfirst bad  aten.div, backward, in Sequential.1 (",
        ),
        "compiled in place": (
            "net.compile(backend='eager')\n"
            "net(x).mean().backward(); pickle.dumps(copy.deepcopy(net)); sgd.step()",
            "step 1:\nfirst bad  aten.div, backward, in Sequential.1 (",
        ),
        "an update of its own": (
            "for y in (1.0, torch.nan, 1.0): other(torch.full((2, 8), y)).sum().backward()",
            "step 1, backward pass 2:\nfirst bad  aten.addmm, forward, in Linear, step 1, a",
        ),
        "autograd.grad alone, of a bad loss": (
            "for y in (1.0, 1.0, torch.nan):\n"
            "    torch.autograd.grad(other(torch.full((2, 8), y)).sum(), other.weight)",
            "step 1, call 3 of autograd.grad:\nfirst bad  aten.addmm, forward, in Linear, step 1",
        ),
        "autograd.grad alone, of a log": (
            "for y in (1.0, 0.0):\n"
            "    torch.autograd.grad((other(net(x)) * y).abs().log().sum(), other.weight)",
            "step 1, call 2 of autograd.grad:\nfirst bad  aten.log, forward, outside of the model",
        ),
        "autograd.grad alone, of a good loss": (
            "for _ in range(2): torch.autograd.grad(net(x).sum(), [*net.parameters()])",
            "step 1, call 2 of autograd.grad:\nfirst bad  aten.div, backward, in Sequential.1 (",
        ),
        "a check before the backward pass": (
            "other(torch.full((2, 8), torch.nan)); exit(1)",
            "step 1, ended by the script:\nfirst bad  aten.addmm, forward, in Linear, step 1, a",
        ),
        "a check after it": (
            "net(x).mean().backward(); exit(1)",
            "step 1, ended by the script:\nfirst bad  aten.div, backward, in Sequential.1 (",
        ),
        "a bare except": (
            "try: net(x).mean().backward(); sgd.step()\nexcept: pass",
            "guard: 1 optimizer steps, not finite: 1",
        ),
    }.values(),
)
def test_a_foreign_script_is_read_right(tmp_path, run, body, expected):
    done = run(write(tmp_path, loop=FOREIGN + body))
    assert done.returncode == 3 and expected in done.err


def test_a_run_that_stays_faulty_reports_eight_times(tmp_path, run):
    body = "for i in range(12): net(x).mean().backward(); sgd.step()"
    done = run("--on-bad", "go-on", write(tmp_path, loop=FOREIGN + body))
    assert done.returncode == 0 and done.err.count("first bad") == 8 and "finite: 12" in done.err


def test_optimizer_containers_and_failing_closures_count_no_step(tmp_path, run):
    body = """
from firstnan.tests.test_attached import Container
lbfgs = torch.optim.LBFGS(other.parameters())
for y in (1.0, torch.nan, 1.0):
    net(torch.ones(1, 4) * y).sum().backward(), Container([sgd]).step(), sgd.zero_grad()
    lbfgs.step(lambda: (loss := other(torch.ones(1, 8) * y).sum(), loss.backward())[0])
"""
    loop = (FOREIGN + body).replace("(x * 0).sqrt()", "0 * x")
    assert "finite: 2" in (done := run("--on-bad", "skip", write(tmp_path, loop=loop))).err
    assert done.returncode == 0


def test_a_step_with_extra_arguments_can_be_skipped(tmp_path, run):
    loop = """
    from firstnan.tests.test_attached import StackingMuon, nn, torch
    net = nn.Linear(4, 1, bias=False)
    optimizer = StackingMuon(net.parameters())
    for epoch in range(3):
        net(torch.full((2, 4), torch.nan if epoch == 1 else 1.0)).sum().backward()
        optimizer.step(epoch), optimizer.zero_grad()
    """
    done = run("--on-bad", "skip", write(tmp_path, loop=loop))
    assert done.returncode == 0 and "3 optimizer steps, not finite: 1" in done.err


def test_a_gradient_that_was_left_out_keeps_its_memory_for_a_cuda_graph(tmp_path, run):
    loop = """
    import torch
    from torch import nn
    net = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(net.parameters())
    for x in (1.0, torch.nan, 1.0):
        net(torch.full((2, 4), x)).sum().backward()
        optimizer.step()
        print("kept", net.weight.grad is not None)
        optimizer.zero_grad(set_to_none=False)
    """
    done = run("--on-bad", "skip", write(tmp_path, loop=loop))
    assert done.out.count("kept True") == 3 and "not finite: 1" in done.err


KINDS = {
    "complex weights": """
        class Wave(nn.Module):
            def __init__(self):
                super().__init__()
                self.filter = nn.Parameter(torch.randn(3, dtype=torch.cfloat))
            def forward(self, x):
                return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4)
        net = Wave()
    """,
    "complex double": "net = nn.Linear(4, 4, dtype=torch.cdouble)",
    "float8 buffers and activations": """
        class Low(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.seen = nn.Linear(4, 4), nn.Identity()
                self.register_buffer("table", torch.eye(4).to(torch.float8_e4m3fn))
            def forward(self, x):
                return self.seen(self.layer(x).to(torch.float8_e5m2)).float() @ self.table.float()
        net = Low()
    """,
    "a layer on the device meta": """
        net = nn.Linear(4, 4)
        net.left_out = nn.Linear(4, 4, device="meta")
    """,
    "sparse gradients": """
        net = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
        to_input = lambda x: x[:, 0].isfinite().long()
    """,
    "ragged rows": """
        net = nn.Linear(4, 4)
        to_input = lambda x: torch.nested.nested_tensor([*x.split([1, 2])], layout=torch.jagged)
        to_loss = lambda y: y.values().sum()
    """,
    "a scripted module": "net = torch.jit.script(nn.Linear(4, 4))",
    "a traced module": "net = torch.jit.trace(nn.Linear(4, 4), torch.ones(3, 4))",
    "gradients per sample": """
        net = nn.Linear(4, 4)
        def of_one(weights, x):
            return torch.func.functional_call(net, weights, (x,)).sum()
        def backward(x):
            weights = {name: p.detach() for name, p in net.named_parameters()}
            each = torch.func.vmap(torch.func.grad(of_one), (None, 0))(weights, x)
            for name, p in net.named_parameters():
                p.grad = each[name].sum(0)
    """,
}
KIND_LOOP = """
import torch
from torch import nn
to_input, to_loss = (lambda x: x), lambda y: y.abs().sum()
{made}
if "backward" not in globals():
    def backward(x):
        loss = to_loss(net(to_input(x)))
        (loss * x.sum().real).backward()
optimizer = torch.optim.SGD(net.parameters(), 0.01)
dtype = next(net.parameters()).dtype
for size in (1.0, 1.0, torch.nan):
    optimizer.zero_grad()
    backward(torch.full((3, 4), size, dtype=dtype if dtype == torch.cdouble else None))
    optimizer.step()
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")  # torch.jit and nested tensors are deprecated or prototypes
def test_tensors_of_every_kind_are_checked(tmp_path, run, kind):
    script = write(tmp_path, loop=KIND_LOOP.replace("{made}", textwrap.dedent(KINDS[kind])))
    for flags in ([], ["--record", "--every-op"]):
        done = run("--on-bad", "skip", *flags, script)
        assert done.returncode == 0, done.err
        assert "3 optimizer steps, not finite: 1" in done.err and "step 3" in done.err


BY_HAND = """
import torch
from torch import nn
net, mask = nn.Linear(4, 4), torch.tensor([1.0, 0.0, 1.0, 1.0])
for step in range(3):
    for p in net.parameters():
        p.grad = None
    y = (net(torch.ones(2, 4)) * mask).abs()
    loss = (torch.where(y > 0, y.sqrt(), y) if step == {bad} else y).mean()
    {update}
"""


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize(
    "update",
    [
        "loss.backward(); [p.data.add_(p.grad, alpha=-0.1) for p in net.parameters()]",
        "loss.backward(); ps = list(net.parameters()); "
        "torch._foreach_add_([p.data for p in ps], [p.grad for p in ps], alpha=-0.1)",
    ],
)
def test_a_gradient_is_checked_where_the_script_updates_by_hand(tmp_path, run, bad, update):
    loop = BY_HAND.replace("{bad}", str(bad)).replace("{update}", update)
    done = run(write(tmp_path, loop=loop))
    assert done.returncode == 3 and f"backward pass {bad + 1}:" in done.err
    assert "the gradient there is not" in done.err  # the weights are still those of that pass
    done = run(write(tmp_path, loop=loop.replace(f"== {bad}", "== 9")))
    assert "3 gradient computations, every loss and gradient finite" in done.err


def test_the_summary_names_what_was_not_checked(tmp_path, run):
    loop = """
    import torch
    from torch import nn
    held, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(held.parameters())
    (held(torch.ones(1, 2)).sum() + other(torch.ones(1, 2)).sum()).backward()
    optimizer.step()
    """
    expected = "finite; gradients of 2 weights that no optimizer holds were not checked"
    assert expected in run(write(tmp_path, loop=loop)).err


def test_micro_batches_of_a_bad_first_step_are_one_fault(tmp_path, run):
    loop = """
    import torch
    from torch import nn
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters())
    for size in (1.0, torch.nan, 1.0):
        net(torch.full((1, 2), size)).sum().backward()
    optimizer.step()
    """
    done = run("--on-bad", "skip", write(tmp_path, loop=loop))
    assert done.err.count("first bad") == 1 and "1 optimizer steps, not finite: 1" in done.err


def test_a_gradient_of_torch_func_is_checked(tmp_path, run):
    loop = """
    import torch
    for size in (1.0, 1.0, 0.0):
        torch.func.grad(lambda w: (w * size).abs().sqrt().sum())(torch.ones(3))
    """
    done = run(write(tmp_path, loop=loop))
    assert done.returncode == 3 and "call 3 of autograd.grad" in done.err


def test_version_and_help_name_the_commands(tmp_path):
    version = python(tmp_path, "-m", "firstnan", "--version", text=True)
    assert version.stdout == f"firstnan {firstnan.__version__}\n"
    shown = python(tmp_path, "-m", "firstnan", "--help", text=True).stdout
    text = " ".join(shown.split())
    assert all(word in text for word in ("replay BUNDLE", "record FOLDER", "diff FOLDER"))
