"""Name the first operation whose result differs between two recordings of a training.

    python -m firstnan record A train.py
    python -m firstnan record B train.py --lr 3     # elsewhere, or another program
    python -m firstnan diff A B

Operations are paired in their order, by pass, module and name; what only one run has does not hide
what follows. Values are compared by all of their bits, or within a tolerance that follows the dtype
(`--tolerance`). The first pair whose results differ is traced back to what differs: a weight or a
batch that was different before, an operation that only one run has, other arguments, other random
numbers, or another result of the same operation on the same inputs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from firstnan._causes import (
    Difference,
    cause_of_arguments,
    cause_of_one_run,
    changed_items,
    is_drawn_again,
    missing_gradient,
    unequal_before,
)
from firstnan._pairs import by_name, paired
from firstnan._recording import FACTORS, Digest, Operation, Recording, ancestors, listed, loss_of
from firstnan._values import (
    in_words,
    ratio_of,
    relative_difference,
    usual_entry,
    where_unequal,
)
from firstnan.errors import BAD_INPUT, FAILED, OK, UserError
from firstnan.trace import N_VALUES

__all__ = ["Comparison", "Difference", "Recording"]

# Relative differences that rounding explains, by the narrower dtype: eight times its epsilon.
_ROUNDING = {"float64": 2e-15, "float32": 1e-6, "float16": 8e-3, "bfloat16": 6e-2}
_GROWTH = 4  # how much an operation may increase a difference that rounding made
_OF_SUMS = 1e-3  # relative difference of gradients that another order of summation explains
_ALIKE = 0.75  # share of operations in pairs, below which two programs are compared by gradients
_OF_BITS = ("torch", "machine", "gpu", "threads")  # facts of a process on which bits depend


class Comparison:
    """Pair the operations of two recordings, and find the first difference.

    Args:
        a: the first recording.
        b: the second recording.
        tolerance: relative difference that counts as none; 0 compares bits; None follows the dtypes
            (what eight roundings of the narrowest one on the way make).
    """

    def __init__(self, a: Recording, b: Recording, tolerance: float | None = 0.0) -> None:
        self.a = a
        self.b = b
        self.tolerance = tolerance
        self.pairs = paired(a.operations, b.operations)
        self._b_of = {x.number: y for x, y in self.pairs}
        self._a_of = {y.number: x for x, y in self.pairs}
        self._noise_a, self._noise_b = (_rounding(run.operations) for run in (a, b))

    def first(self) -> Difference | None:
        """Return the first difference; None if there is none."""
        if self.gradients_alone:
            return self._of_gradients()
        for x, y in self.pairs:
            # Adam turns the rounding of a gradient near 0 into a whole step.
            if x.direction == "optimizer" and self.tolerance != 0:
                continue
            if not self.same(x, y) and not self._is_rounding(x, y):
                return self._gradient_missing_before(x) or self._explain(x, y)
        return self._more_updates()

    def _more_updates(self) -> Difference | None:
        """Explain an update that only one run has, after all pairs are the same."""
        for op in self.a.operations:
            if op.direction == "update" and op.number not in self._b_of:
                return Difference(
                    "operation", "only A has this update: it made more steps", op, None
                )
        for op in self.b.operations:
            if op.direction == "update" and op.number not in self._a_of:
                return Difference(
                    "operation", "only B has this update: it made more steps", None, op
                )
        return None

    def same(self, x: Operation, y: Operation) -> bool:
        """Return whether two operations have the same results."""
        if len(x.outputs) != len(y.outputs) or x.names != y.names:
            return False
        return next(self._unequal(x, y), None) is None

    def _unequal(self, x: Operation, y: Operation) -> Iterator[int]:
        """Yield the indices of the results that differ."""
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = max(self._noise_a[x.number], self._noise_b[y.number])
        if x.key == ("update", "optimizer") and tolerance:
            # Adam turns the rounding of a gradient near 0 into a whole step.
            if x.op != y.op or x.settings != y.settings:
                yield 0
            return
        # Where terms cancel, as in a mean near 0, the error is relative to the terms.
        terms = [self.a.operations[number].outputs for number, *_ in x.inputs if tolerance]
        least = max((usual_entry(output) for outputs in terms for output in outputs), default=0.0)
        least = 0.0 if x.name in FACTORS else least
        for i, (one, other) in enumerate(zip(x.outputs, y.outputs, strict=False)):
            is_equal = all(one.get(k) == other.get(k) for k in ("shape", "dtype", "bits"))
            is_near = tolerance > 0 and relative_difference(one, other, least) <= tolerance
            if not is_equal and not is_near:
                yield i

    def _is_rounding(self, x: Operation, y: Operation) -> bool:
        """Return whether a difference is at most a few times that of the inputs."""
        if self.tolerance == 0 or x.direction == "before":
            return False
        if [d["shape"] for d in x.outputs] != [d["shape"] for d in y.outputs] or x.names != y.names:
            return False
        before = [
            relative_difference(*outputs)
            for one, other in zip(x.inputs, y.inputs, strict=False)
            if one[0] in self._b_of
            for outputs in zip(
                self.a.operations[one[0]].outputs,
                self.b.operations[other[0]].outputs,
                strict=False,
            )
        ]
        now = max(map(relative_difference, x.outputs, y.outputs), default=0.0)
        if x.name in FACTORS and x.args == y.args:  # a relative difference cannot grow by itself
            return now <= sum(before)
        usual = max(self._noise_a[x.number], self._noise_b[y.number], self.tolerance or 0.0)
        return now <= _GROWTH * min(usual, max(before, default=0.0))

    def _explain(self, x: Operation, y: Operation) -> Difference:
        """Trace the first pair whose results differ back to what differs."""
        if x.direction == "before":
            return unequal_before(x, y)
        if x.op == "gradients":
            return self._of_a_gradient(x, y)
        if x.direction == "optimizer" and (found := self._of_settings(*self._update_of(x, y))):
            return found
        alike = Counter(x.given) == Counter(y.given)
        for one, other in zip(x.inputs, y.inputs, strict=True) if alike else ():
            if found := self._of_input(one, other, x, y):
                return found
        if x.op != y.op:
            return Difference("operation", f"{x.op} in A, {y.op} in B", x, y)
        if x.direction == "update":
            return self._of_an_update(x, y)
        if not alike:
            lines = [(f"given in {side}", listed(op.given, 9)) for side, op in (("A", x), ("B", y))]
            odd = Counter(x.given) - Counter(y.given) or Counter(y.given) - Counter(x.given)
            which = "A" if Counter(x.given) - Counter(y.given) else "B"
            cause = f"{which} alone gives it {', '.join(odd)}"
            return Difference("arguments", cause, x, y, lines=lines)
        if changed := changed_items(x.args, y.args):
            lines = [(name, f"{one} in A, {other} in B") for name, one, other in changed]
            return Difference("arguments", cause_of_arguments(x, changed), x, y, lines=lines)
        if x.is_random:
            cause = "other random numbers: another seed, or other numbers were drawn before"
            return Difference("random numbers", cause, x, y)
        i = next(self._unequal(x, y), 0)
        lines = [("values", in_words(x.outputs[i], y.outputs[i]))]
        if (dtypes := _dtypes(x)) != _dtypes(y):
            cause = f"another dtype: {dtypes} in A, {_dtypes(y)} in B"
            return Difference("dtype", cause, x, y, lines=lines)
        return Difference("result", self._of_result(x, y), x, y, lines=lines)

    def _update_of(self, x: Operation, y: Operation) -> tuple[Operation, Operation]:
        """Return the updates during which two operations of an optimizer ran."""
        kind = ("update", "optimizer")
        a, b = self.a.operations[x.number :], self.b.operations[y.number :]
        return next(op for op in a if op.kind == kind), next(op for op in b if op.kind == kind)

    def _of_settings(self, x: Operation, y: Operation) -> Difference | None:
        """Explain settings of the optimizer that differ, if some do."""
        by_setting: dict[tuple[str, str, str], list[str]] = {}
        for name in x.names:
            for setting, one, other in changed_items(
                x.settings.get(name, {}), y.settings.get(name, {})
            ):
                by_setting.setdefault((setting, f"{one}", f"{other}"), []).append(name)
        if not by_setting:
            return None
        lines = [
            (setting, f"{one} in A, {other} in B, for {listed(names)}")
            for (setting, one, other), names in by_setting.items()
        ]
        return Difference("settings", "other settings of the optimizer", x, y, lines=lines)

    def _of_an_update(self, x: Operation, y: Operation) -> Difference:
        """Explain an optimizer's result from the same gradients."""
        if found := self._of_settings(x, y):
            return found
        i = next(self._unequal(x, y), 0)
        lines = [("weight", x.names[i]), ("values", in_words(x.outputs[i], y.outputs[i]))]
        cause = (
            "other state of the optimizer, as moments or a step count, other code of its step, or "
            "weights that were changed before; record both with --inside-updates to tell them apart"
        )
        return Difference("state", cause, x, y, lines=lines)

    def _of_a_gradient(self, x: Operation, y: Operation) -> Difference:
        """Explain a gradient that an update gets."""
        if found := missing_gradient(x, y):
            return found
        i = next(self._unequal(x, y), 0)
        if found := self._of_input(x.inputs[i], y.inputs[i], x, y):
            return found
        lines = [("weight", x.names[i]), ("values", in_words(x.outputs[i], y.outputs[i]))]
        cause = "the gradient was changed by what is not recorded, or holds an earlier one"
        return Difference("gradient", cause, x, y, lines=lines)

    def _gradient_missing_before(self, op: Operation) -> Difference | None:
        """Explain weights without a gradient, if `op` runs after the backward pass began."""
        if not any(x.direction == "backward" and x.number < op.number for x, _ in self.pairs):
            return None
        both = [(x, y) for x, y in self.pairs if x.step == op.step and x.op == "gradients"]
        return next((found for x, y in both if (found := missing_gradient(x, y))), None)

    def _of_input(
        self, one: Sequence[Any], other: Sequence[Any], x: Operation, y: Operation
    ) -> Difference | None:
        """Explain an input that has another value; None if it has the same."""
        p, q = self.a.operations[one[0]], self.b.operations[other[0]]
        is_pair = self._b_of.get(p.number) is q
        # Where results lie in memory in another order, so do the parts that are read.
        layouts = [[output["stride"] for output in op.outputs] for op in (p, q)]
        first = 1 if layouts[0] == layouts[1] else 2
        is_same_part = one[1] == other[1] and one[1 + first :] == other[1 + first :]
        if is_same_part and (is_pair or (p.outputs and self.same(p, q))):
            return None
        if is_pair:
            return self._of_part(one, other, x, y)
        alone_a = ancestors(p, self.a, self._b_of)
        alone_b = ancestors(q, self.b, self._a_of)
        if alone_a and alone_b and alone_a[0].kind == alone_b[0].kind:
            return self._explain(alone_a[0], alone_b[0])
        if not alone_a and not alone_b:
            lines = [("input A", str(p)), ("input B", str(q))]
            return Difference("operation", "reads another value", x, y, lines=lines)
        return self._of_one_run(alone_a, alone_b, (x, y))

    def _of_one_run(
        self,
        alone_a: Sequence[Operation],
        alone_b: Sequence[Operation],
        seen: tuple[Operation, Operation],
    ) -> Difference:
        """Explain operations that only one run has, and that lead to the first unequal result."""
        lines = [
            (f"only in {which}", listed([str(op) for op in ops]))
            for which, ops in (("A", alone_a), ("B", alone_b))
            if ops
        ]
        drawn = [[op for op in ops if is_drawn_again(op)] for ops in (alone_a, alone_b)]
        shown = drawn if any(drawn) else (alone_a, alone_b)
        first_a, first_b = (next(iter(ops), None) for ops in shown)
        cause = cause_of_one_run(alone_a, alone_b)
        collective = next((op for op in (*alone_a, *alone_b) if op.op.startswith("c10d.")), None)
        if collective is not None:
            first_a, first_b, cause = self._of_collective(collective)
        return Difference("operation", cause, first_a, first_b, seen, lines)

    def _of_collective(self, found: Operation) -> tuple[Operation | None, Operation | None, str]:
        """Return the operations of both runs, and the cause, for a collective without a pair."""
        is_a = self.a.operations[found.number] is found
        run, partner = (self.b, self._a_of) if is_a else (self.a, self._b_of)
        elsewhere = [
            op
            for op in run.operations
            if op.step == found.step and op.op == found.op and op.number not in partner
        ]
        other = next(iter(elsewhere), None)
        a, b = (found, other) if is_a else (other, found)
        name = "an all-reduce" if "allreduce" in found.op else found.op
        if other is None:
            return a, b, f"{name} is missing in {'B' if is_a else 'A'}"
        return a, b, f"{name} at another place: before or after other gradients were added"

    def _of_part(
        self, one: Sequence[Any], other: Sequence[Any], x: Operation, y: Operation
    ) -> Difference:
        """Explain that both runs read another part of one tensor."""
        views = [
            next((v for v in reversed(run.operations[: op.number]) if _reads(v, part)), None)
            for run, op, part in ((self.a, x, one), (self.b, y, other))
        ]
        lines = [
            (
                name,
                f"{part[1]}, strides {part[2]}, from entry {part[3]}" + (f", by {v}" if v else ""),
            )
            for name, part, v in (("part in A", one, views[0]), ("part in B", other, views[1]))
        ]
        cause = "another part of the same tensor is read"
        outputs = self.a.operations[one[0]].outputs
        if one[1] == other[1] and one[3] != other[3]:
            of_ids = any(output["dtype"].startswith("int") for output in outputs)
            cause += f": a shift by {abs(one[3] - other[3])} entries"
            if of_ids:
                cause += ", as of labels by one position"
        elif one[2] != other[2]:
            cause = "the same tensor is read in another order: transposed, permuted or reshaped"
        return Difference("part", cause, x, y, lines=lines)

    def _of_result(self, x: Operation, y: Operation) -> str:
        """Return why an operation with the same inputs may have another result."""
        products = ("mm", "bmm", "addmm", "conv", "attention", "linear")
        if any(word in x.op for word in products):
            for setting in ("tf32", "matmul_precision"):
                one, other = (run.about.get(setting) for run in (self.a, self.b))
                if one != other:
                    return f"the precision of products: {setting} is {one} in A, {other} in B"
        other = [n for n in _OF_BITS if self.a.about.get(n) != self.b.about.get(n)]
        if other:
            facts = (f"{n} {self.a.about.get(n)} in A, {self.b.about.get(n)} in B" for n in other)
            return f"another kernel: {'; '.join(facts)}"
        return "the same operation on the same inputs: a kernel that is not deterministic"

    @property
    def gradients_alone(self) -> str:
        """Why gradients alone are compared; empty if all operations are."""
        if self.a.about["world_size"] != self.b.about["world_size"]:
            return "the numbers of ranks differ"
        fewer = min(sum(map(_counts, run.operations)) for run in (self.a, self.b))
        n_pairs = sum(_counts(x) for x, _ in self.pairs)
        return "the programs differ" if n_pairs < _ALIKE * fewer else ""

    def _of_gradients(self) -> Difference | None:
        """Compare the gradients that the updates get, by the names of the weights.

        They are means over the batches of all ranks, and any program has them.
        """
        of_a, of_b = (
            {op.step: op for op in run.operations if op.op == "gradients"}
            for run in (self.a, self.b)
        )
        for step in sorted(of_a.keys() & of_b.keys()):
            x, y = of_a[step], of_b[step]
            pairs = [
                (i, j)
                for i, j in by_name(x.names, y.names)
                if x.outputs[i]["shape"] == y.outputs[j]["shape"]
            ]
            if not pairs:
                cause = "no weight has the same name and shape in both runs"
                return Difference("gradient", cause, x, y)
            unequal = [
                (x.names[i], x.outputs[i], y.outputs[j])
                for i, j in pairs
                if relative_difference(x.outputs[i], y.outputs[j]) > (self.tolerance or _OF_SUMS)
            ]
            if unequal:
                return self._of_unequal(x, y, unequal)
        return None

    def _of_unequal(
        self, x: Operation, y: Operation, unequal: Sequence[tuple[str, Digest, Digest]]
    ) -> Difference:
        sizes = [run.about["world_size"] for run in (self.a, self.b)]
        found = [ratio_of(one, other) for _, one, other in unequal]
        ratios = [ratio for ratio in found if ratio is not None]
        lines = [("compared", f"gradients alone, because {self.gradients_alone}")]
        lines += [("weights", listed([name for name, *_ in unequal]))]
        lines += [("values", in_words(*unequal[0][1:]))]
        cause = "other gradients: another batch, another loss, or no mean over the ranks"
        n, m = (op.args["backward passes"] for op in (x, y))
        if n != m:
            cause = (
                f"gradients of {n} backward passes in A, of {m} in B: each loss is a mean over its "
                "own tokens or samples, not over those of the update, or another batch"
            )
        if len(ratios) == len(found) and max(ratios) - min(ratios) <= 0.01 * max(ratios):
            ratio = max(ratios)
            cause = f"gradients in B are {ratio:.4g} times those in A"
            of_ranks = max(sizes) / min(sizes)
            if of_ranks > 1 and math.isclose(max(ratio, 1 / ratio), of_ranks, rel_tol=0.01):
                cause += ": a sum over ranks is not divided by their number, or is twice"
            elif n != m and math.isclose(ratio, m / n, rel_tol=0.01):
                cause += f": of {m} backward passes in B and {n} in A, not divided by their number"
        if n == m:
            return Difference("gradient", cause, x, y, lines=lines)
        losses = (loss_of(run, x.step) for run in (self.a, self.b))
        return Difference("gradient", cause, *losses, seen=(x, y), lines=lines)


def _counts(op: Operation) -> bool:
    """Return whether an operation counts where two programs are compared."""
    return not op.is_view and op.direction != "optimizer"


def _rounding(operations: Sequence[Operation]) -> list[float]:
    """Return for each operation the relative error that its dtype, or one before it, makes."""
    noise: list[float] = []
    for op in operations:
        own = [_ROUNDING.get(output["dtype"], 0.0) for output in op.outputs]
        noise.append(max([*own, *(noise[number] for number, *_ in op.inputs)], default=0.0))
    return noise


def _reads(view: Operation, part: Sequence[Any]) -> bool:
    """Return whether a view makes this part of a tensor."""
    return view.is_view and any(i[0] == part[0] for i in view.inputs)


def _dtypes(x: Operation) -> str:
    return ", ".join(dict.fromkeys(output["dtype"] for output in x.outputs))


def _entries(found: Difference, a: Recording, b: Recording) -> list[tuple[str, str]]:
    """Return where the results of the pair that differs do, or how to find out."""
    x, y = found.seen or (found.a, found.b)
    if x is None or y is None or found.what == "settings":
        return []
    pairs = list(zip(a.values.get(x.number, ()), b.values.get(y.number, ()), strict=False))
    if pairs:
        return [
            ("entries", where_unequal(one, other) if one.shape == other.shape else "other shapes")
            for one, other in pairs
        ]
    if all(math.prod(output["shape"]) <= N_VALUES for output in x.outputs):
        return []
    how = f"record A again with --values {x.number}, B with --values {y.number}"
    return [("entries", how)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the first difference of two recordings; return 1 if there is one."""
    parser = argparse.ArgumentParser(
        prog="python -m firstnan diff",
        description="Name the first operation whose result differs between two recordings.",
    )
    parser.add_argument("a", type=Path, metavar="A", help="folder that `record` wrote")
    parser.add_argument("b", type=Path, metavar="B", help="the other one")
    about = (
        "largest relative difference that counts as none: bits, dtype (what rounding explains) or "
        "a number; default: bits, or dtype for other machines, threads or versions of torch"
    )
    parser.add_argument("--tolerance", type=_tolerance, default="default", help=about)
    parser.add_argument("--rank", type=int, default=0, help="process to compare (default: 0)")
    options = parser.parse_args(arguments)
    try:
        a, b = (Recording.read(folder, options.rank) for folder in (options.a, options.b))
    except (OSError, ValueError, UserError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    tolerance = options.tolerance
    if tolerance == "default":
        tolerance = 0.0 if all(a.about[n] == b.about[n] for n in _OF_BITS) else None
    comparison = Comparison(a, b, tolerance)
    found = comparison.first()
    if found is not None:
        found.lines += _entries(found, a, b)
        print(found)
        return FAILED
    way = {0.0: "bit for bit", None: "within the rounding of the dtypes"}
    words = way.get(tolerance, f"within {tolerance}")
    steps = max((x.step for x, _ in comparison.pairs if x.direction == "update"), default=0)
    what = f"{len(comparison.pairs):,} operations"
    if comparison.gradients_alone:
        what = f"gradients alone, because {comparison.gradients_alone}"
        words = f"within {tolerance or _OF_SUMS}"
    print(f"no difference: {what}, {steps} updates, {words}")
    return OK


def _tolerance(text: str) -> float | str | None:
    if text in ("bits", "dtype", "default"):
        return {"bits": 0.0, "dtype": None}.get(text, text)
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected bits, dtype or a number from 0, got {text}")
    return value
