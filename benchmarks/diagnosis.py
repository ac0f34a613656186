"""Measure how often the diagnosis of an injected fault names the right operation and cause.

    python -m benchmarks.diagnosis    # 200 and 100 injections; writes docs/results.md

This file injects 200 faults into the heads; `benchmarks.diagnosis_language` injects 100 into
language students. Each injection puts one fault of known cause into a training step with random
sizes, depth, activation and loss. The true operation is known from how the step was built or, for
overflows, from running its stages in float64: it is the first stage whose exact result exceeds the
range of its dtype. A draw that leaves the loss and the gradients finite is repeated.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from benchmarks.turns import table_head, table_line, write_section
from firstnan.diagnosis import Cause, diagnose
from firstnan.microscope import Microscope

Stage = tuple[str, Callable[[Tensor], Tensor]]
Drawn = tuple[Cause, str, Cause, str, int]
"""The true cause and operation, the diagnosed ones, and the count of draws without a fault."""


@dataclass
class Case:
    """A training step with an injected fault, and its true operation and cause."""

    cause: Cause
    x: Tensor
    stages: list[Stage]
    weights: dict[str, nn.Parameter] = field(default_factory=dict)
    op: str | None = None  # None: the first stage whose float64 result overflows its dtype
    scale: float = 1.0

    def run(self) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the gradients of the weights."""
        x = self.x
        for _, stage in self.stages:
            x = stage(x)
        loss = x.float().sum() * self.scale
        weights = list(self.weights.values())
        return loss, list(torch.autograd.grad(loss, weights)) if weights else []

    def is_sick(self) -> bool:
        """Return whether the loss or a gradient is not finite."""
        return not is_finite(self.run())

    def diagnosed(self) -> tuple[Cause, str]:
        """Return the diagnosed cause and operation."""
        with Microscope({"input": self.x} | self.weights) as scope:
            loss, gradients = self.run()
        fault = scope.fault(loss, *gradients)
        return (Cause.UNKNOWN, "none") if fault is None else (diagnose(fault).cause, fault.op)

    @torch.no_grad()
    def origin(self) -> str | None:
        """Return the first stage whose float64 result exceeds the range of its dtype."""
        weights = {name: w.detach().clone() for name, w in self.weights.items()}
        exact, x = self.x.double(), self.x
        try:
            for w in self.weights.values():
                w.data = w.data.double()
            wide = []
            for _, stage in self.stages:
                exact = stage(exact)
                wide.append(float(exact.abs().max()))
        finally:
            for name, w in self.weights.items():
                w.data = weights[name]
        for (op, stage), largest in zip(self.stages, wide, strict=True):
            x = stage(x)
            if not largest <= torch.finfo(x.dtype).max:
                return op
        return None


def is_finite(values: object) -> bool:
    """Return whether all floating-point numbers and tensors in a tree are finite."""
    tensors = (torch.as_tensor(x) for x in tree_leaves(values) if isinstance(x, (float, Tensor)))
    return all(bool(torch.isfinite(x).all()) for x in tensors if x.is_floating_point())


def uniform(r: random.Random, low: float, high: float) -> float:
    return low * (high / low) ** r.random()


def batch(r: random.Random) -> Tensor:
    return torch.randn(r.randint(4, 48), r.randint(4, 48))


def network(r: random.Random, dim: int, dtype=torch.float32, bias=True):
    """Return a random MLP: its stages, its weights by name, and its output width."""
    act = r.choice([("aten.relu", F.relu), ("aten.gelu", F.gelu), ("aten.tanh", torch.tanh)])
    stages, weights = [], {}
    depth = r.randint(1, 4)
    for i in range(depth):
        width = r.randint(3, 32)
        w = nn.Parameter((torch.randn(width, dim) / dim**0.5).to(dtype))
        weights[f"weight {i}.weight"] = w
        b = None
        if bias:
            b = nn.Parameter((torch.randn(width) * 0.1).to(dtype))
            weights[f"weight {i}.bias"] = b
        op = "aten.addmm" if bias else "aten.mm"
        stages.append((op, lambda x, w=w, b=b: F.linear(x, w, b)))
        if i < depth - 1:
            stages.append(act)
        dim = width
    return stages, weights, dim


def sound_loss(r: random.Random, rows: int, width: int) -> list[Stage]:
    """Return a loss that is finite for any reasonable input."""
    target = torch.randint(width, (rows,))
    values = torch.randn(rows, width)
    log_softmax: Stage = ("aten._log_softmax", lambda x: F.log_softmax(x, -1))
    regression: list[Stage] = [("aten.mse_loss", lambda x: F.mse_loss(x, values.to(x.dtype)))]
    square: list[Stage] = [("aten.pow", lambda x: x.pow(2)), ("aten.mean", lambda x: x.mean())]
    entropy = [log_softmax, ("aten.nll_loss_forward", lambda x: F.nll_loss(x, target))]
    return r.choice([regression, square, entropy])


def poisoned_weight(r: random.Random) -> Case:
    x = batch(r)
    stages, weights, width = network(r, x.shape[1])
    case = Case(Cause.POISONED_WEIGHT, x, stages + sound_loss(r, len(x), width), weights)
    value = r.choice([float("nan"), float("inf"), -float("inf"), 1e30])
    name = r.choice(list(weights))
    weights[name].data.view(-1)[r.randrange(weights[name].numel())] = value
    if value != 1e30:
        case.op = "aten.addmm"  # the operation that reads it
    return case


def poisoned_input(r: random.Random) -> Case:
    x = batch(r)
    stages, weights, width = network(r, x.shape[1])
    case = Case(Cause.POISONED_INPUT, x, stages + sound_loss(r, len(x), width), weights)
    value = r.choice([float("nan"), float("inf"), 1e30])
    row = r.randrange(len(x))
    if r.random() < 0.5:
        x[row] = value
    else:
        x[row, r.randrange(x.shape[1])] = value
    if value != 1e30:
        case.op = "aten.addmm"
    return case


def fp16_overflow(r: random.Random) -> Case:
    x = batch(r)
    cause = Cause.FP16_OVERFLOW
    form = r.randrange(5)
    if form == 0:  # large activations are cast
        cast = [("aten._to_copy", lambda x: x.half() if x.dtype != torch.float64 else x)]
        return Case(cause, x * uniform(r, 1e5, 1e7), cast)
    stages, weights, width = network(r, x.shape[1], torch.float16)
    if form == 1:  # products of large activations
        x = x * uniform(r, 5e3, 2e4)
        stages += sound_loss(r, len(x), width)
    elif form == 2:  # a square
        x = x * uniform(r, 5e2, 5e3)
        stages += [r.choice([("aten.pow", lambda x: x.pow(2)), ("aten.mul", lambda x: x * x)])]
    elif form == 3:  # an exponential of healthy logits
        x = x * uniform(r, 10, 100)
        stages += [("aten.exp", torch.exp)]
    else:  # a loss scale that the gradients do not fit
        stages += [("aten._to_copy", lambda x: x.float()), ("aten.pow", lambda x: x.pow(2))]
        scale = uniform(r, 1e7, 1e9)
        return Case(cause, x.half(), stages, weights, "aten._to_copy", scale)
    return Case(cause, x.half(), stages, weights)


def log_of_zero(r: random.Random) -> Case:
    x = batch(r)
    half = r.random() < 0.3
    stages, weights, _ = network(r, x.shape[1], torch.float16 if half else torch.float32)
    x = x.half() if half else x
    spread = uniform(r, 40, 200) if half else uniform(r, 200, 2000)
    spreads = torch.full((len(x), 1), spread, dtype=x.dtype)
    stages += [("aten.mul", lambda x: x * spreads)]
    squash = r.choice([lambda x: torch.softmax(x, -1), torch.sigmoid, torch.relu])
    form = r.randrange(3)
    if form == 0:  # log of a probability
        last, op = lambda x: squash(x).log(), "aten.log"
    elif form == 1:  # entropy of a one-hot row: 0 * log 0
        last, op = lambda x: (lambda p: p * p.log())(squash(x)), "aten.log"
    else:  # masked in the forward pass, so that only the gradient is NaN
        last = lambda x: (lambda p: torch.where(p > 0, p.log(), 0))(squash(x))  # noqa: E731
        op = "aten.div"
    return Case(Cause.LOG_OF_ZERO, x, [*stages, (op, last)], weights, op)


def zero_norm(r: random.Random) -> Case:
    x = batch(r)
    x[r.randrange(len(x))] = 0
    half = r.random() < 0.3
    dtype = torch.float16 if half else torch.float32
    stages, weights, width = network(r, x.shape[1], dtype, bias=False)
    forms: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("aten.div", lambda x: x / x.norm(dim=-1, keepdim=True)),
        ("aten.div", lambda x: x / (x * x).sum(-1, keepdim=True).sqrt()),
        ("aten.div", lambda x: x / x.abs().sum(-1, keepdim=True)),
        ("aten.rsqrt", lambda x: x * x.pow(2).sum(-1, keepdim=True).rsqrt()),
        ("aten.div", lambda x: x.pow(2).sum(-1).sqrt()),  # finite; its gradient is not
        ("aten.div", lambda x: (x - x.detach()).pow(2).mean(-1).sqrt()),  # the same
    ]
    if half:
        forms.append(("aten.div", lambda x: F.normalize(x, dim=-1)))  # its floor is 0 in fp16
    op, last = r.choice(forms)
    return Case(Cause.ZERO_NORM, x.to(dtype), [*stages, (op, last)], weights, op)


def temperature(r: random.Random) -> Case:
    """Return a step that overflows at a low temperature and is finite at a temperature of 1."""
    while True:
        low, sane = _temperatures(r, uniform(r, 1e-3, 0.05))
        if low.is_sick() and not sane.is_sick():
            return low


def _temperatures(r: random.Random, t: float) -> tuple[Case, Case]:
    x = batch(r)
    half = r.random() < 0.7
    dtype = torch.float16 if half else torch.float32
    stages, weights, _ = network(r, x.shape[1], dtype)
    loud = torch.full((len(x), 1), uniform(r, 0.5, 1000), dtype=dtype)
    naive: list[Stage] = [("aten.exp", torch.exp), ("aten.sum", lambda x: x.sum(-1))]
    safe: list[Stage] = [("aten._log_softmax", lambda x: F.log_softmax(x, -1))]
    loss = r.choice([naive, safe]) if half else naive
    multiplies = r.random() < 0.3

    def case(t: float) -> Case:
        divide: Stage = ("aten.div", lambda x: x / t)
        if multiplies:
            divide = ("aten.mul", lambda x: x * (1 / t))
        every = [*stages, ("aten.mul", lambda x: x * loud), divide, *loss]
        return Case(Cause.TEMPERATURE, x.to(dtype), every, weights)

    return case(t), case(1.0)


def learning_rate(r: random.Random) -> Case:
    """Take SGD or AdamW steps at a huge learning rate until the loss overflows."""
    x = batch(r)
    stages, weights, width = network(r, x.shape[1])
    case = Case(Cause.LEARNING_RATE, x, stages + sound_loss(r, len(x), width), weights)
    rate = uniform(r, 1e2, 1e8)
    optimizer = r.choice([torch.optim.SGD, torch.optim.AdamW])(list(weights.values()), lr=rate)
    for _ in range(30):
        loss, gradients = case.run()
        if not is_finite([loss, *gradients]):
            break
        for w, gradient in zip(weights.values(), gradients, strict=True):
            w.grad = gradient
        optimizer.step()
    return case


KINDS = (poisoned_weight, poisoned_input, fp16_overflow, log_of_zero, zero_norm)
KINDS += (temperature, learning_rate)


def faulty_case(kind: Callable[[random.Random], Any], r: random.Random) -> tuple[Any, str, int]:
    """Draw cases until one has a fault; return it, its true operation and the count of redraws."""
    for redrawn in range(200):
        torch.manual_seed(r.randrange(2**31))
        case = kind(r)
        if case.cause == Cause.LEARNING_RATE and not is_finite(case.weights):
            continue  # the update itself overflowed: the cause is now a poisoned weight
        op = case.op or case.origin()
        if op is not None and case.is_sick():
            return case, op, redrawn
    raise RuntimeError(f"{kind.__name__}: none of 200 draws had a fault")


class Score:
    """The injections of one mode, and how many diagnoses are right."""

    def __init__(self, drawn: list[Drawn]) -> None:
        self.drawn, self.total = drawn, len(drawn)
        self.table = Counter((truth, diagnosed) for truth, _, diagnosed, *_ in drawn)
        self.redrawn = sum(redrawn for *_, redrawn in drawn)
        self.right_op = sum(op == diagnosed for _, op, _, diagnosed, _ in drawn)
        self.right_cause = sum(truth == diagnosed for truth, _, diagnosed, *_ in drawn)
        self.misses = [
            f"{i}: {truth.value} at {op}, diagnosed {diagnosed.value} at {diagnosed_op}"
            for i, (truth, op, diagnosed, diagnosed_op, _) in enumerate(drawn)
            if (truth, op) != (diagnosed, diagnosed_op)
        ]
        self.right = self.total - len(self.misses)


def measure(kinds: Sequence[Callable], injections: int) -> Score:
    """Inject faults of each kind and compare the diagnoses with the truth."""
    r, drawn = random.Random(0), list[Drawn]()
    for i in range(injections):
        case, op, redrawn = faulty_case(kinds[i % len(kinds)], r)
        drawn.append((case.cause, op, *case.diagnosed(), redrawn))
    return Score(drawn)


def section(score: Score) -> list[str]:
    """Return the counts and the confusion matrix of one mode as Markdown lines."""
    causes = [c for c in Cause if any(c in pair for pair in score.table)]

    def share(count: int) -> str:
        return f"{count} of {score.total} ({100 * count / score.total:.1f} %)"

    lines = [
        f"- operation and cause right: **{share(score.right)}**",
        f"- operation right: {share(score.right_op)}",
        f"- cause right: {share(score.right_cause)}",
        "",
        "Rows: what was injected. Columns: what was reported.",
        "",
        table_head(["", *(c.value for c in causes)]),
    ]
    for truth in causes:
        counts = [str(score.table[truth, cause] or "") for cause in causes]
        if any(counts):
            lines.append(table_line([truth.value, *counts]))
    return lines


def report(heads: Score, students: Score) -> str:
    """Return the section of `docs/results.md`."""
    lines = [
        f"""\
{heads.total} faults of a known cause in random steps (sizes, depth, activation, loss), each
diagnosed from the numbers alone. The truth comes from the injection. Draws in which the fault
harmed neither loss nor gradient, or whose first operation is not certain in advance
({heads.redrawn} more), were drawn again.
""",
        *section(heads),
        f"""
### Students of the language mode

{students.total} faults in random steps of distillation: tiny Llama, GPT-2 and Mixtral
models of random sizes and weights as student and teacher, random vocabulary, batch, divergence,
temperature and weights of the terms, in float32 or emulated float16, each in a guarded step whose
event is compared with the truth. Drawn again: {students.redrawn}.
""",
        *section(students),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    from benchmarks import diagnosis_language as language  # needs transformers

    began = time.perf_counter()
    logging.disable(logging.WARNING)  # the guards' warnings about injected faults
    heads = measure(KINDS, injections=200)
    students = measure(language.KINDS, injections=100)
    text = report(heads, students)
    write_section("diagnosis", text)
    seconds = f"{time.perf_counter() - began:.1f} s"
    print(text, *heads.misses, *students.misses, seconds, sep="\n")


if __name__ == "__main__":
    main()
