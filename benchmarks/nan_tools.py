"""Compare tools that look for a NaN: what they name, what they stop, what they cost.

    python -m benchmarks.nan_tools              # writes docs/results.md
    python -m benchmarks.nan_tools --cost 60    # only what they cost, in ms and as a share

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
- the guard of this repository: `Watch` where a fault is to be named, `Guard(locate=True)` in the
  trainings.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import random
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
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
def nothing(model: nn.Module) -> Iterator[None]:
    yield


@contextlib.contextmanager
def anomaly_mode(model: nn.Module) -> Iterator[None]:
    try:
        with torch.autograd.detect_anomaly():
            yield
    except RuntimeError as error:
        node = re.search(r"Function '(\w+)' returned nan", str(error))
        raise (Found(node[1]) if node else error) from error


@contextlib.contextmanager
def forward_hooks(model: nn.Module) -> Iterator[None]:
    def check(name: str, module: nn.Module, args: object, out: object) -> None:
        if not is_finite(out) and is_finite(args):
            raise Found(module=name)

    handles = [m.register_forward_hook(partial(check, n)) for n, m in model.named_modules()]
    try:
        yield
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
def dispatch_mode(model: nn.Module) -> Iterator[None]:
    with EveryResult():
        yield


@contextlib.contextmanager
def loss_check(model: nn.Module) -> Iterator[None]:
    yield
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if not bool(torch.isfinite(norm)):
        raise Found


@contextlib.contextmanager
def watch(model: nn.Module) -> Iterator[None]:
    watching = Watch(model)
    yield
    if (found := watching.explain()) is not None:
        if found.fault is None:
            raise Found
        raise Found(found.fault.op, (found.module or "").partition(".")[2])


TOOLS: dict[str, Callable[[nn.Module], contextlib.AbstractContextManager[None]]] = {
    "none": nothing,
    "anomaly mode": anomaly_mode,
    "forward hooks": forward_hooks,
    "dispatch mode": dispatch_mode,
    "loss check": loss_check,
    "the guard": watch,
}


def outcome(tool: str, model: nn.Module, loss: Callable[[], Tensor]) -> Found | None:
    """Run a step under a tool; return what it finds."""
    model.zero_grad()
    try:
        with TOOLS[tool](model):
            loss().backward()
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


def trained(tool: str) -> tuple[int, bool]:
    """Train four heads; return the updates of heads, and whether all weights are finite."""
    torch.manual_seed(0)
    model, updates = Heads(), 0
    optimizer = torch.optim.AdamW(model.parameters())
    heads: Mapping[str, nn.Module] = dict(model.heads.items())
    guard = Guard(model, optimizer, heads, locate=True) if tool == "the guard" else None
    with contextlib.suppress(Found):
        for step in range(STEPS):
            optimizer.zero_grad()
            with nothing(model) if guard else TOOLS[tool](model):
                features, losses = model(torch.randn(32, 8), float(step != STEPS // 2))
                if guard is not None:
                    guard.backward(losses, through=features)
                else:
                    torch.stack([*losses.values()]).sum().backward()
            if guard is not None:
                updates += len(guard.step() - {"shared"})
            else:
                optimizer.step()
                updates += len(heads)
    return updates, is_finite([*model.parameters()])


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
    labels = torch.randint(1000, x.shape[:-1]).flatten()
    optimizer = torch.optim.AdamW(model.parameters())
    guard = Guard(model, optimizer, locate=True) if tool == "the guard" else None
    recorder = Watch(model, record=True) if tool == RECORDER else None

    def seconds() -> float:
        optimizer.zero_grad()
        began = time.process_time()
        with nothing(model) if guard or recorder else TOOLS[tool](model):
            loss = F.cross_entropy(model(x).flatten(0, -2), labels)
            loss.backward() if guard is None else guard.backward(loss)
        if recorder is not None:
            recorder.forget()
        optimizer.step() if guard is None else guard.step()
        return time.process_time() - began

    return seconds


def cost(tool: str, model: nn.Module, x: Tensor, pairs: int) -> list[float]:
    """Return the CPU time of a healthy step under a tool, relative to that without, by pair."""
    return in_pairs(timer("none", model, x), timer(tool, model, x), pairs)[2]


def print_costs(pairs: int) -> None:
    """Print the milliseconds that each tool adds to a step, and their share of the step.

    The steps are short, so that milliseconds stand out from the noise.
    """
    print(f"{pairs} pairs, one thread, CPU time; middle half in parentheses\n")
    small = {f"{name}, width {n}": x for n in (32, 96) for name, x in models(n, 1).items()}
    header("tool", *small)
    for tool in (*TOOLS, RECORDER):
        cells = []
        for given in small.values():
            plain, under, ratios = in_pairs(timer("none", *given), timer(tool, *given), pairs)
            added = middle_half([1000 * (y - x) for x, y in zip(plain, under, strict=True)])
            step = f"{1000 * statistics.median(plain):.1f} ms"
            share = f"{100 * (statistics.median(ratios) - 1):.0f} %"
            cells.append(f"{added} ms, {share} of {step}")
        row(tool, *cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cost", type=int, metavar="PAIRS", help="only print what the tools cost")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # anomaly mode says that it is slow
    if args.cost:
        return print_costs(args.cost)
    found, alarms, transformer = faults(), false_alarms(), models()["transformer"]
    columns = ["tool", f"faults found, of {FAULTS}", "operation right", "module right"]
    columns += [f"healthy steps stopped, of {HEALTHY}", f"updates of heads, of {4 * STEPS}"]
    lines = [table_head([*columns, "all weights finite", "CPU time of a step"])]
    for tool in TOOLS:
        updates, finite = trained(tool)
        cells = [*found[tool], alarms[tool], updates, "yes" if finite else "no"]
        time_of_step = middle_half(cost(tool, *transformer, PAIRS))
        lines.append(table_line([tool, *map(str, cells), time_of_step]))
    text = "\n".join(lines) + "\n"
    write_section("nan_tools", text)
    print(text)


if __name__ == "__main__":
    main()
