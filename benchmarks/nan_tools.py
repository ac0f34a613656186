"""Compare tools that look for a NaN: what they name, what they stop, what they cost.

    pip install --target peers --no-deps sherlorch==0.1.0 stabilityguard==0.3.0 trainpulse==0.4.0
    python -m benchmarks.nan_tools              # writes docs/results.md
    python -m benchmarks.nan_tools --cost 60    # only what they cost, in ms and as a share

The packages are found with `PYTHONPATH=peers`. One that is not installed is left out, and `--tools`
chooses some; the table is then printed and not written.

- 200 faults from `benchmarks.diagnosis`, each operation in a module of its own. The true module is
  the first whose output is not finite; if the forward pass is finite, the last with the operation.
- 50 healthy steps of attention under a mask of -inf, which no tool should stop.
- A training of four heads on one trunk, 20 steps; in the tenth, the loss of one head is 0 / 0.
- The CPU time of a healthy step of a small transformer, in turns with the same step without a tool.

The tools, each as its authors publish it:

- anomaly mode: `torch.autograd.detect_anomaly()`, which Lightning's `detect_anomaly=True` switches
  on. It names an autograd node; we count a node as right if the true module made one of this name.
- forward hooks: on every module, as proposed in pytorch#182156, with inputs checked, so that the
  module that received a NaN is not named.
- dispatch mode: a `TorchDispatchMode` that checks the result of every operation, forward and
  backward, as proposed in pytorch#187653 (for #160016).
- loss check: stop if the loss or the gradient norm is not finite, as in torchtitan.
- sherlorch: `trace()` and `watch(model)`, then `diagnose` on the loss or, if that is finite, on the
  first bad gradient; gradients have no provenance, so that this raises a KeyError, which we count
  as found without a name. It names functions; `FUNCTIONS` translates them into operations.
- stabilityguard: `GuardedOptimizer` with `nan_action="raise"` where a fault is to be named, with
  `"skip"`, its default, in the training. It names no operation by design. Its "trigger layer" is
  one of the modules and weights with a bad gradient, in the order of a set of strings, so that the
  number of right modules differs from run to run unless `PYTHONHASHSEED` is set.
- trainpulse: a `Monitor` that gets the loss and the gradient norm after each backward pass, with an
  alert callback that stops the step. It sees numbers only, and so names nothing by design.
- the guard of this repository: `Watch` where a fault is to be named, `Guard(locate=True)` in the
  trainings.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import random
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.diagnosis import KINDS, Case, faulty_case, is_finite
from benchmarks.turns import (
    header,
    in_pairs,
    middle_half,
    row,
    table_head,
    table_line,
    write_section,
)
from firstnan import Guard
from firstnan.watch import Watch

FAULTS, HEALTHY, STEPS, PAIRS = 200, 50, 20, 15
RECORDER = "the guard's recorder"
PACKAGES = ("sherlorch", "stabilityguard", "trainpulse")
FUNCTIONS = {"linear": "addmm", "half": "_to_copy", "normalize": "div"}
"""The operation that fails in a function of another name."""

Backward = Callable[[Tensor], None]


class Found(RuntimeError):
    """Raised by a tool that has found a NaN; holds the operation and the module that it names."""

    def __init__(self, op: str = "", module: str = "") -> None:
        super().__init__(op, module)
        self.op, self.module = op, module


class Stage(nn.Module):
    """One operation of a case."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Steps(nn.Sequential):
    """The operations of a case, each in a module; the weights are its parameters."""

    def __init__(self, case: Case) -> None:
        super().__init__(*(Stage(function) for _, function in case.stages))
        for i, weight in enumerate(case.weights.values()):
            self.register_parameter(f"weight_{i}", weight)

    def truth(self, case: Case, op: str) -> tuple[str, set[str]]:
        """Return the module with the fault, and the autograd nodes that it makes."""
        xs = [case.x]
        for stage in self:
            xs.append(stage(xs[-1]))
        bad = [i for i, x in enumerate(xs[1:]) if not is_finite(x)]
        last = [i for i, (name, _) in enumerate(case.stages) if name == op]
        number = bad[0] if bad else last[-1] if last else len(self) - 1
        ahead: list[Any] = [self[number](xs[number].detach().requires_grad_()).grad_fn]
        names = set()
        while ahead:
            if (node := ahead.pop()) is not None:
                names.add(node.name())
                ahead += [following for following, _ in node.next_functions]
        return str(number), names


@contextlib.contextmanager
def nothing(model: nn.Module) -> Iterator[Backward]:
    yield Tensor.backward


@contextlib.contextmanager
def anomaly_mode(model: nn.Module) -> Iterator[Backward]:
    try:
        with torch.autograd.detect_anomaly():
            yield Tensor.backward
    except RuntimeError as error:
        node = re.search(r"Function '(\w+)' returned nan", str(error))
        raise (Found(node[1]) if node else error) from error


@contextlib.contextmanager
def forward_hooks(model: nn.Module) -> Iterator[Backward]:
    def check(name: str, module: nn.Module, args: object, out: object) -> None:
        if not is_finite(out) and is_finite(args):
            raise Found(module=name)

    handles = [m.register_forward_hook(partial(check, n)) for n, m in model.named_modules()]
    try:
        yield Tensor.backward
    finally:
        for handle in handles:
            handle.remove()


class EveryResult(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        if "empty" not in func.name() and not is_finite(out):  # else uninitialized memory
            raise Found(str(func.overloadpacket))
        return out


@contextlib.contextmanager
def dispatch_mode(model: nn.Module) -> Iterator[Backward]:
    with EveryResult():
        yield Tensor.backward


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@contextlib.contextmanager
def loss_check(model: nn.Module) -> Iterator[Backward]:
    def backward(loss: Tensor) -> None:
        loss.backward()
        norm = nn.utils.get_total_norm(gradients(model))
        if not (torch.isfinite(loss) and torch.isfinite(norm)):
            raise Found

    yield backward


@contextlib.contextmanager
def watch(model: nn.Module) -> Iterator[Backward]:
    watching = Watch(model)
    yield Tensor.backward
    if (found := watching.explain()) is not None:
        if found.fault is None:
            raise Found
        raise Found(found.fault.op, (found.module or "").partition(".")[2])


@contextlib.contextmanager
def provenance(model: nn.Module) -> Iterator[Backward]:
    """Trace a step with sherlorch."""
    import sherlorch  # pyright: ignore[reportMissingImports]

    with sherlorch.trace() as tracker:
        tracker.watch(model, name="model")

        def backward(loss: Tensor) -> None:
            loss.backward()
            bad = [x for x in (loss, *gradients(model)) if tracker.has_issue(x)]
            if bad:
                try:
                    first = tracker.diagnose(bad[0]).culprits[0]
                except KeyError:
                    raise Found from None
                op = FUNCTIONS.get(first.op_name, first.op_name)
                raise Found(f"aten.{op}", (first.module_path or "").partition(".")[2])

        yield backward


@contextlib.contextmanager
def spike_guard(model: nn.Module) -> Iterator[Backward]:
    """Check a step with stabilityguard; its update is one of size 0."""
    from stabilityguard import GuardedOptimizer  # pyright: ignore[reportMissingImports]
    from stabilityguard.core.actions import (  # pyright: ignore[reportMissingImports]
        GradientSpikeError,
    )

    weights = list(model.parameters()) or [torch.zeros(1)]
    optimizer = GuardedOptimizer(torch.optim.SGD(weights, lr=0), model, nan_action="raise")

    def backward(loss: Tensor) -> None:
        loss.backward()
        try:
            optimizer.step()
        except GradientSpikeError as error:
            raise Found(module=error.layer) from error

    with contextlib.closing(optimizer), contextlib.redirect_stdout(io.StringIO()):
        yield backward


@contextlib.contextmanager
def monitor(model: nn.Module) -> Iterator[Backward]:
    """Report the loss and the gradient norm of a step to trainpulse."""
    from trainpulse import Monitor, MonitorConfig  # pyright: ignore[reportMissingImports]

    def stop(alert: object) -> None:
        raise Found

    metrics = Monitor(MonitorConfig(alert_callbacks=[stop]))

    def backward(loss: Tensor) -> None:
        loss.backward()
        metrics.log("loss", 0, loss.item())
        metrics.log("grad_norm", 0, nn.utils.get_total_norm(gradients(model)).item())

    yield backward


TOOLS: dict[str, Callable[[nn.Module], contextlib.AbstractContextManager[Backward]]] = {
    "none": nothing,
    "anomaly mode": anomaly_mode,
    "forward hooks": forward_hooks,
    "dispatch mode": dispatch_mode,
    "loss check": loss_check,
    "sherlorch": provenance,
    "stabilityguard": spike_guard,
    "trainpulse": monitor,
    "the guard": watch,
}
ALL = set(TOOLS)
MISSING = [name for name in PACKAGES if find_spec(name) is None]
for name in MISSING:
    del TOOLS[name]
# These wrap the optimizer or, as the recorder, the model.
IN_TRAINING = TOOLS | dict.fromkeys(["stabilityguard", "the guard", RECORDER], nothing)


def outcome(tool: str, model: nn.Module, loss: Callable[[], Tensor]) -> Found | None:
    """Run a step under a tool; return what it finds."""
    model.zero_grad()
    try:
        with TOOLS[tool](model) as backward:
            backward(loss())
    except Found as found:
        return found
    return None


def faults() -> dict[str, list[int]]:
    """Return for each tool the counts of faults found, with the operation, with the module."""
    counts = {tool: [0, 0, 0] for tool in TOOLS}
    r = random.Random(0)
    for i in range(FAULTS):
        case, op, _ = faulty_case(KINDS[i % len(KINDS)], r)
        model, x = Steps(case), case.x.requires_grad_(not case.weights)
        module, nodes = model.truth(case, op)
        for tool, count in counts.items():
            loss = lambda: model(x).float().sum() * case.scale  # noqa: B023, E731
            if (found := outcome(tool, model, loss)) is not None:
                right = found.op in nodes if "Backward" in found.op else found.op == op
                count[0] += 1
                count[1] += right
                count[2] += found.module == module or (right and "Backward" in found.op)
    return counts


def false_alarms() -> dict[str, int]:
    """Return for each tool the number of healthy steps with a mask that it stops."""
    counts = dict.fromkeys(TOOLS, 0)
    for seed in range(HEALTHY):
        torch.manual_seed(seed)
        model = nn.MultiheadAttention(16, 2, batch_first=True)
        x = torch.randn(2, 6, 16)
        mask = nn.Transformer.generate_square_subsequent_mask(6)
        for tool in TOOLS:
            loss = lambda: model(x, x, x, attn_mask=mask)[0].square().mean()  # noqa: B023, E731
            counts[tool] += outcome(tool, model, loss) is not None
    return counts


class Heads(nn.Module):
    """Four heads on a trunk; returns the features and the loss of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.heads = nn.ModuleDict({f"head_{i}": nn.Linear(16, 4) for i in range(4)})

    def forward(self, x: Tensor, divisor: float) -> tuple[Tensor, dict[str, Tensor]]:
        features = self.trunk(x).tanh()
        losses = {name: head(features).square().mean() for name, head in self.heads.items()}
        losses["head_1"] = losses["head_1"] * divisor / divisor
        return features, losses


def optimizer_under(
    tool: str, model: nn.Module, heads: Mapping[str, nn.Module] | None = None
) -> Any:
    """Return AdamW, in the wrapper of a tool that has one."""
    optimizer = torch.optim.AdamW(model.parameters())
    if tool == "the guard":
        return Guard(model, optimizer, heads, locate=True)
    if tool == "stabilityguard":
        from stabilityguard import GuardedOptimizer  # pyright: ignore[reportMissingImports]

        return GuardedOptimizer(optimizer, model)
    return optimizer


def trained(tool: str) -> tuple[int, bool]:
    """Train four heads; return the updates of heads, and whether all weights are finite."""
    torch.manual_seed(0)
    model, updates = Heads(), 0
    optimizer = optimizer_under(tool, model, dict(model.heads.items()))
    with contextlib.suppress(Found), contextlib.redirect_stdout(io.StringIO()):
        for step in range(STEPS):
            model.zero_grad()
            before = copy.deepcopy(model.heads.state_dict())
            with IN_TRAINING[tool](model) as backward:
                features, losses = model(torch.randn(32, 8), float(step != STEPS // 2))
                if isinstance(optimizer, Guard):
                    optimizer.backward(losses, through=features)
                else:
                    backward(torch.stack(list(losses.values())).sum())
            optimizer.step()
            after = model.heads.state_dict()
            updates += sum(not before[x].equal(after[x]) for x in after if x.endswith("weight"))
    return updates, is_finite(list(model.parameters()))


def models(width: int = 256, rows: int = 8) -> dict[str, tuple[nn.Module, Tensor]]:
    """Return a small transformer and an MLP for 1,000 classes, each with its inputs."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    transformer = nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Linear(width, 1000))
    mlp = [x for _ in range(4) for x in (nn.Linear(4 * width, 4 * width), nn.ReLU())]
    return {
        "transformer": (transformer, torch.randn(rows, 128, width)),
        "MLP": (nn.Sequential(*mlp, nn.Linear(4 * width, 1000)), torch.randn(64 * rows, 4 * width)),
    }


def timer(tool: str, model: nn.Module, x: Tensor) -> Callable[[], float]:
    """Return a healthy step of a copy of the model under a tool, which returns its CPU seconds."""
    model = copy.deepcopy(model)
    optimizer = optimizer_under(tool, model)
    recorder = Watch(model, record=True) if tool == RECORDER else None

    def seconds() -> float:
        model.zero_grad()
        # New ones: gradients of labels known by heart are denormal numbers, which are slow.
        labels = torch.randint(1000, x.shape[:-1]).flatten()
        began = time.process_time()
        with IN_TRAINING[tool](model) as backward:
            loss = F.cross_entropy(model(x).flatten(0, -2), labels)
            optimizer.backward(loss) if isinstance(optimizer, Guard) else backward(loss)
        if recorder is not None:
            recorder.forget()
        optimizer.step()
        return time.process_time() - began

    return seconds


def cost(tool: str, model: nn.Module, x: Tensor, pairs: int) -> list[float]:
    """Return the CPU time of a healthy step under a tool, relative to that without, by pair."""
    return in_pairs(timer("none", model, x), timer(tool, model, x), pairs)[2]


def print_costs(pairs: int) -> None:
    """Print the milliseconds that each tool adds to a step, and their share of the step.

    All steps but those of the last model are short, so that milliseconds stand out from the noise.
    """
    print(f"{pairs} pairs, one thread, CPU time; middle half in parentheses\n")
    named = {f"{name}, width {n}": x for n in (32, 96) for name, x in models(n, 1).items()}
    named["MLP, width 256"] = models()["MLP"]
    header("tool", *named)
    for tool in (*TOOLS, RECORDER):
        cells = []
        for given in named.values():
            with contextlib.redirect_stdout(io.StringIO()):  # stabilityguard prints spikes
                plain, under, ratios = in_pairs(timer("none", *given), timer(tool, *given), pairs)
            added = middle_half([1000 * (y - x) for x, y in zip(plain, under, strict=True)])
            step = f"{1000 * statistics.median(plain):.1f} ms"
            share = f"{100 * (statistics.median(ratios) - 1):.0f} %"
            cells.append(f"{added} ms, {share} of {step}")
        row(tool, *cells)


def compare() -> None:
    """Print the table, and write it to docs/results.md if it is that of all tools."""
    found, alarms, transformer = faults(), false_alarms(), models()["transformer"]
    columns = ["tool", f"faults found, of {FAULTS}", "operation right", "module right"]
    columns += [f"healthy steps stopped, of {HEALTHY}", f"updates of heads, of {4 * STEPS}"]
    lines = [table_head([*columns, "all weights finite", "CPU time of a step"])]
    print(lines[0], flush=True)
    for tool in TOOLS:
        updates, finite = trained(tool)
        cells = [*found[tool], alarms[tool], updates, "yes" if finite else "no"]
        time_of_step = middle_half(cost(tool, *transformer, PAIRS))
        lines.append(table_line([tool, *map(str, cells), time_of_step]))
        print(lines[-1], flush=True)
    if TOOLS.keys() == ALL:
        write_section("nan_tools", "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cost", type=int, metavar="PAIRS", help="only print what the tools cost")
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=list(TOOLS), metavar="TOOL")
    args = parser.parse_args()
    for tool in TOOLS.keys() - args.tools:
        del TOOLS[tool]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # anomaly mode says that it is slow
    if MISSING:
        print(f"left out, not installed: {', '.join(MISSING)} (pip install {' '.join(MISSING)})\n")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # stabilityguard writes reports into the working directory
        print_costs(args.cost) if args.cost else compare()


if __name__ == "__main__":
    main()
