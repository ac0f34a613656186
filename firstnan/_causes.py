"""Say in words what differs between two runs, and what is the likely cause."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from firstnan._recording import FACTORS, Digest, Operation, listed
from firstnan._values import in_words, ratio_of, values_in_words

_SHORT = 4  # operations of one run alone among which one is named as the cause


@dataclass
class Difference:
    """The first difference of two runs.

    Attributes:
        what: what differs: `weights`, `batch`, `random numbers`, `arguments`, `operation`, `part`,
            `dtype`, `gradient`, `settings`, `state` or `result`.
        cause: the likely cause in words.
        a: the operation of the first run; None if only the second has it.
        b: the operation of the second run.
        seen: the first pair whose results differ, if it is another one.
        lines: further facts, (name, text).
    """

    what: str
    cause: str
    a: Operation | None
    b: Operation | None
    seen: tuple[Operation, Operation] | None = None
    lines: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        """Return a report of a few lines."""
        first = self.a or self.b
        assert first is not None
        rows = [("step", f"{first.step}")]
        if self.a is not None and self.b is not None and str(self.a) == str(self.b):
            rows += [("first", str(first))]
        else:
            absent = "no such operation"
            rows += [("A", str(self.a or absent)), ("B", str(self.b or absent))]
        rows += self.lines
        rows.append(("cause", self.cause))
        if self.seen is not None:
            a, b = self.seen
            rows.append(("seen in", f"{a}: {values_in_words(a, b)}"))
        width = max(len(name) for name, _ in rows) + 2
        return "\n".join(f"{name:<{width}}{text}" for name, text in rows)


def unequal_before(x: Operation, y: Operation) -> Difference:
    """Explain that a tensor was different before the operations read it."""
    one, other = x.outputs[0], y.outputs[0]
    lines = [("values", in_words(one, other))]
    if x.op == "weight":
        when = (
            "a seed, an initialization or a checkpoint" if x.step == 1 else "an update in between"
        )
        if x.step == 1 and any(map(_is_garbage, (one, other))):
            when = "memory that was allocated and never written, by their size"
        return Difference("weights", f"other weights before the step: {when}", x, y, lines=lines)
    if x.op == "state":
        cause = "other state of the optimizer before the update: moments, as of a checkpoint"
        return Difference("state", cause, x, y, lines=lines)
    kinds = {one["dtype"], other["dtype"]}
    values = {*one.get("values", ()), *other.get("values", ())}
    if one["shape"] != other["shape"]:
        cause = "another batch: its shape differs"
    elif kinds == {"bool"} or values <= {0.0, 1.0, -math.inf} or min(values, default=0.0) < -1e4:
        cause = "another mask"
    elif len(kinds) > 1:
        cause = f"another dtype of the data: {one['dtype']} in A, {other['dtype']} in B"
    elif (ratio := ratio_of(one, other)) is not None:
        cause = f"the data in B are {ratio:.4g} times those in A: another scaling"
    else:
        cause = "another batch: other samples, another order, or other preprocessing"
    return Difference("batch", cause, x, y, lines=lines)


def _is_garbage(output: Digest) -> bool:
    """Return whether values are too small or too large for weights, and for a mask."""
    sizes = [abs(v) for v in output.get("values", ())]
    return any(0 < size < 1e-30 or 1e15 < size < 1e37 for size in sizes)


def missing_gradient(x: Operation, y: Operation) -> Difference | None:
    """Explain weights that have a gradient in one run alone, at an update of both."""
    missing = sorted((Counter(x.names) - Counter(y.names)) + (Counter(y.names) - Counter(x.names)))
    if not missing:
        return None
    which, op = ("B", y) if missing[0] in Counter(x.names) - Counter(y.names) else ("A", x)
    cause = f"no gradient in {which}: frozen, detached, or not used by the loss"
    if missing[0] not in op.held:
        cause = f"the optimizer of {which} does not have these weights"
    return Difference("gradient", cause, x, y, lines=[("weights", listed(missing))])


def is_drawn_again(op: Operation) -> bool:
    """Return whether an operation draws random numbers in the backward pass."""
    return op.is_random and op.direction == "backward"


def cause_of_one_run(alone_a: Sequence[Operation], alone_b: Sequence[Operation]) -> str:
    """Return the likely meaning of operations that only one run has."""
    names_a, names_b = ({op.name for op in ops} for ops in (alone_a, alone_b))
    many, only = ("B", alone_b) if len(alone_b) >= len(alone_a) else ("A", alone_a)
    few = "A" if many == "B" else "B"
    names = names_a | names_b
    outside = {op.name for op in only if op.direction == "forward" and not op.module}
    factors = [op for op in only if op.name in FACTORS and op.args.get("other")]
    if all(op.direction == "optimizer" for op in (*alone_a, *alone_b)):
        return f"other code of the optimizer's step: {only[0].op} in {many} alone"
    if any(map(is_drawn_again, only)):
        return (
            f"random numbers are drawn in the backward pass of {many} alone: a part of the forward "
            "pass that runs again there (activation checkpointing) draws others than before"
        )
    if {"sum", "mean"} <= names and ("mean" in names_a) != ("mean" in names_b):
        return f"a mean in {'A' if 'mean' in names_a else 'B'} alone, a sum in the other"
    if names & {"bernoulli", "native_dropout"}:
        return f"dropout in {many} alone: train() and eval(), or another probability"
    if names & {"masked_fill", "where"}:
        return f"a mask in {many} alone"
    if any(word in name for name in outside for word in ("vector_norm", "foreach_norm")):
        return f"gradients are clipped in {many} alone"
    if any(op.node == "AccumulateGrad" for op in only):
        return f"gradients are added to earlier ones in {many} alone: zero_grad, or accumulation"
    if factors and len(only) <= _SHORT:
        number = factors[0].args["other"]
        cause = f"{many} alone {FACTORS[factors[0].name]} by {number:g}"
        root = math.sqrt(number) if number > 1 else 0.0
        if 0 < root <= 10 and math.isclose(root % 0.5, 0, abs_tol=1e-9):
            cause += f", which is T² for a temperature of {root:g}"
        return cause
    if "_to_copy" in names and len(only) <= _SHORT:
        return f"a conversion to {only[0].args.get('dtype', 'another dtype')} in {many} alone"
    if all(op.direction == "backward" for op in (*alone_a, *alone_b)):
        return f"{many} alone has this backward pass: detach, no_grad or a frozen weight in {few}"
    if alone_a and alone_b:
        return f"{alone_a[0].op} in A, where B has {alone_b[0].op}"
    return f"{only[0].op} in {many} alone"


def cause_of_arguments(x: Operation, changed: Sequence[tuple[str, Any, Any]]) -> str:
    """Return the likely meaning of arguments that differ."""
    name, one, other = changed[0]
    are_numbers = all(type(n) in (int, float) for n in (one, other))
    if name == "reduction" and are_numbers:
        mine, theirs = (("none", "mean", "sum")[int(value)] for value in (one, other))
        return f"the reduction of the loss: {mine} in A, {theirs} in B"
    if name in ("training", "train"):
        return "train() in one run, eval() in the other"
    if name == "p":
        return "another probability of dropout"
    if "eps" in name:
        return "another eps"
    if name in ("dim", "dims"):
        return "another dimension"
    if name == "is_causal":
        return "another mask: causal in one run alone"
    if x.name in FACTORS and are_numbers:
        return f"B {FACTORS[x.name]} by {other:g} instead of {one:g}"
    return f"another argument: {name}"


def changed_items(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the arguments that differ, with both values."""
    names = dict.fromkeys([*one, *other])
    return [(n, one.get(n), other.get(n)) for n in names if one.get(n) != other.get(n)]
