"""Finds the operation that made a step's numbers not finite, and says why in words.

Looking at every operation doubles the cost of a step, so this is for one step that is known to be
sick, run again: `with Microscope(named) as scope: ...`, then `scope.fault(loss)` and `diagnose`.
"""

from __future__ import annotations

import linecache
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc}
_SPARSE |= {torch.sparse_bsr, torch.sparse_bsc}

_TORCH = os.path.dirname(torch.__file__) + os.sep

# What overwrites its first argument without reading it, and what hands out memory as it finds it.
_OVERWRITES = {"copy", "fill", "zero", "normal", "uniform", "bernoulli", "random", "exponential"}
_UNINITIALISED = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}

_LOGS = {"log", "log2", "log10", "log1p", "xlogy"}
_ROOTS = {"sqrt", "rsqrt", "pow"}
_INVERSES = {"acos", "asin", "atanh"}
_NORMS = {"linalg_vector_norm", "norm", "_foreach_norm", "sqrt", "std", "var", "cdist"}
_EXPS = {"exp", "exp2", "expm1", "sinh", "cosh"}
_DIVISIONS = {"div", "reciprocal", "rsqrt", "true_divide"}
_ELEMENTWISE = {"add", "sub", "rsub", "neg", "mul", "div", "clamp", "clamp_min", "clamp_max"}
_ELEMENTWISE |= {"maximum", "minimum", "where", "masked_fill", "_to_copy"}
_SOFTMAXES = {"_softmax", "_log_softmax", "_safe_softmax", "logsumexp"}

HUGE = 1e10
"""No healthy weight, embedding or activation is this large."""

LARGE_WEIGHTS = 100.0
"""Root mean square of a tensor of weights from which training has run away."""


class Cause(str, Enum):
    """Why a number is not finite."""

    FP16_OVERFLOW = "overflow in fp16"
    LOG_OF_ZERO = "log of zero"
    ZERO_NORM = "zero norm"
    POISONED_WEIGHT = "poisoned weight"
    POISONED_INPUT = "poisoned input row"
    TEMPERATURE = "temperature too low"
    LEARNING_RATE = "learning rate too high"
    UNDERFLOW = "underflow to zero"
    DOMAIN = "outside its domain"
    MASKED = "everything masked"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class TensorFacts:
    """What is worth knowing of a tensor.

    Attributes:
        shape: its shape.
        dtype: its dtype, `float32`.
        low: smallest finite entry; None where there is none.
        high: largest finite entry.
        nans: entries that are NaN.
        infs: entries that are infinite.
        zeros: entries that are exactly 0.
        first_bad: index of the first entry that is not finite.
        rms: root mean square of the finite entries.
        outliers: entries above 1e3 and above 1e4 times the median size of those that are not 0;
            they were not learned.
    """

    shape: tuple[int, ...]
    dtype: str
    low: float | None
    high: float | None
    nans: int
    infs: int
    zeros: int
    first_bad: tuple[int, ...] | None
    rms: float
    outliers: int

    @classmethod
    def of(cls, x: Tensor) -> TensorFacts:
        """Look at a tensor of any dtype and layout."""
        shape, dtype = tuple(x.shape), str(x.dtype).removeprefix("torch.")
        x = x.detach()
        x = x if x.layout == torch.strided else x.to_dense()
        x = x.abs() if x.is_complex() else x
        finite = torch.isfinite(x)
        good = x[finite].double()
        bad = (~finite).nonzero()
        size = good.abs()
        limit = max(1e4 * float(size[size > 0].median()), 1e3) if (size > 0).any() else math.inf
        outliers = int((size > limit).sum())
        return cls(
            shape=shape,
            dtype=dtype,
            low=float(good.min()) if len(good) else None,
            high=float(good.max()) if len(good) else None,
            nans=int(torch.isnan(x).sum()),
            infs=int(torch.isinf(x).sum()),
            zeros=int((x == 0).sum()),
            first_bad=tuple(bad[0].tolist()) if len(bad) else None,
            rms=float(good.square().mean().sqrt()) if len(good) else 0.0,
            outliers=outliers,
        )

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def largest(self) -> float:
        """Largest absolute value among the finite entries."""
        return max(abs(self.low or 0.0), abs(self.high or 0.0))

    def __str__(self) -> str:
        """One line: `float32 [2, 64], -1.2 to 3.4, 5 zeros, 1 NaN`."""
        words = [f"{self.dtype} {list(self.shape)}"]
        if self.low is not None:
            words.append(f"{self.low:.3g} to {self.high:.3g}")
        for count, name in ((self.zeros, "zero"), (self.nans, "NaN"), (self.infs, "inf")):
            if count:
                words.append(f"{count} of {self.size} {name}")
        return ", ".join(words)


@dataclass(frozen=True)
class Place:
    """A line of source."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        """`heads/my_head.py:31: return x.log()`."""
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True)
class _Made:
    """How a tensor came to be: the operation, its numbers, and how its inputs came to be."""

    op: str
    numbers: tuple[float, ...]
    parents: tuple[_Made, ...]
    largest: float


@dataclass(frozen=True)
class Fault:
    """The first operation whose output was not finite.

    Attributes:
        op: its name, `aten.log`; for a poisoned tensor the first operation that read it.
        backward: whether it ran in the backward pass.
        node: there, the autograd node it belongs to, `SqrtBackward0`.
        place: the line that called it; in the backward pass, the line whose gradient it computes.
        inputs: what it read.
        outputs: what it wrote.
        poisoned: name of the input that was not finite before the scope began.
        masked: whether the infinity was put there on purpose, as masks do.
    """

    op: str
    backward: bool
    node: str | None
    place: Place | None
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    poisoned: str | None
    masked: bool
    made: _Made
    named: dict[str, TensorFacts]


class Microscope(TorchDispatchMode):
    """Watches every operation, forward and backward, for the first that made NaN or infinity.

    An infinity may be meant: a mask, a branch that `torch.where` drops. So every origin is noted,
    the flow of what is not finite is followed from tensor to tensor, and `fault` names the first
    origin that reached the result one asks about. Backward passes have to run inside as well.

    Args:
        named: name -> tensor that exists beforehand. A name that begins with `input` is data, one
            with `weight` in it a weight, any other a piece of state.

    >>> with Microscope() as scope:
    ...     loss = torch.tensor([1.0, 0.0]).log().sum()
    >>> scope.fault(loss).op
    'aten.log'
    """

    def __init__(self, named: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self._named = dict(named or {})
        self._facts: dict[str, TensorFacts] = {}
        self._origins: list[Fault] = []
        # Per storage, since views share what is in them. The weak references keep an address from
        # being given to another storage, and keep no numbers in memory.
        self._alive: dict[int, StorageWeakRef] = {}
        self._made: dict[int, _Made] = {}
        self._origin_of: dict[int, int] = {}

    def __enter__(self) -> Microscope:
        self._facts = {name: TensorFacts.of(x) for name, x in self._named.items()}
        # Makes autograd remember which line of the forward pass each node comes from.
        self._anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._anomaly.__exit__()
        super().__exit__(*exception)

    def fault(self, *results: Tensor) -> Fault | None:
        """The first origin that reached the first result that is not finite; None if all are.

        Without results, the first origin at all, masks last.
        """
        if not results:
            return min(self._origins, key=lambda fault: fault.masked, default=None)
        for result in map(_entries, results):
            if _is_bad(result):
                origin = self._origin_of.get(_key(result))
                return self._origins[origin] if origin is not None else self._leaf(result)
        return None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Run one operation and look at what came out."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        op = func.overloadpacket._qualified_op_name.partition("::")[2]
        reads, written = _reads(func, op, args, kwargs)
        out = func(*args, **kwargs)
        outputs = _floating(out) or written
        if op in _UNINITIALISED or func.is_view:  # a view is followed by its storage
            return out
        self._follow(str(func.overloadpacket), args, kwargs, reads, outputs)
        return out

    def _follow(
        self,
        op: str,
        args: tuple,
        kwargs: dict,
        reads: list[tuple[Tensor, Tensor]],
        outputs: list[Tensor],
    ) -> None:
        numbers = [float(x) for x in tree_leaves((args, kwargs)) if type(x) in (int, float)]
        numbers += [x.item() for x, _ in reads if x.ndim == 0 and not x.is_complex()]
        parents = tuple(m for _, x in reads if (m := self._made.get(_key(x))) is not None)
        largest = max((_largest(x) for x, _ in reads), default=0.0)
        made = _Made(op.rpartition(".")[2].rstrip("_"), tuple(numbers), parents, largest)
        bad = [x for x in outputs if _is_bad(x)]
        origin = None
        if bad:
            origin = self._trace(op, made, reads, bad, any(not math.isfinite(n) for n in numbers))
        for x in outputs:
            self._made[self._keep(x)] = made
        for x in bad:
            self._origin_of[self._keep(x)] = origin  # type: ignore[assignment]

    def _trace(
        self,
        op: str,
        made: _Made,
        reads: list[tuple[Tensor, Tensor]],
        bad: list[Tensor],
        constant: bool,
    ) -> int:
        """Where the bad outputs come from: a known origin, or a new one."""
        sick = [(seen, x) for seen, x in reads if _is_bad(seen)]
        known = [self._origin_of[_key(x)] for _, x in sick if _key(x) in self._origin_of]
        for seen, x in sick:
            if _key(x) not in self._origin_of:  # it was so before anything was computed
                name = self._name(x)
                meant = name is None and not x.requires_grad and not torch.isnan(seen).any()
                if name is None and not meant:
                    name = "weight" if x.requires_grad else "input"
                known.append(self._note(op, made, reads, bad, poisoned=name, masked=meant))
                self._origin_of[self._keep(x)] = known[-1]
        real = [origin for origin in known if not self._origins[origin].masked]
        if real:
            return min(real)
        fresh_nan = any(torch.isnan(x).any() for x in bad)
        if known and not fresh_nan:
            return min(known)
        return self._note(op, made, reads, bad, masked=constant and not known and not fresh_nan)

    def _note(
        self,
        op: str,
        made: _Made,
        reads: list[tuple[Tensor, Tensor]],
        bad: list[Tensor],
        *,
        poisoned: str | None = None,
        masked: bool = False,
    ) -> int:
        node = None
        if torch._C._current_graph_task_id() != -1:
            node = torch._C._current_autograd_node()
        fault = Fault(
            op=op,
            backward=node is not None,
            node=None if node is None else node.name().rpartition("::")[2],
            place=_place(node),
            inputs=tuple(TensorFacts.of(x) for x, _ in reads),
            outputs=tuple(TensorFacts.of(x) for x in bad),
            poisoned=poisoned,
            masked=masked,
            made=made,
            named=self._facts,
        )
        self._origins.append(fault)
        return len(self._origins) - 1

    def _leaf(self, x: Tensor) -> Fault:
        """The fault of a result that no operation made."""
        facts = (TensorFacts.of(x),)
        made = _Made("none", (), (), facts[0].largest)
        name = self._name(x) or "input"
        return Fault("none", False, None, None, facts, facts, name, False, made, self._facts)

    def _name(self, x: Tensor) -> str | None:
        mine = [
            (name, entries)
            for name, tensor in self._named.items()
            if self._facts[name].first_bad is not None
            and _key(entries := _entries(tensor)) == _key(x)
        ]
        exact = [name for name, tensor in mine if tensor.data_ptr() == x.data_ptr()]
        return (exact or [name for name, _ in mine] or [None])[0]

    def _keep(self, x: Tensor) -> int:
        key = _key(x)
        if key not in self._alive:
            self._alive[key] = StorageWeakRef(x.untyped_storage())
        return key


def _reads(
    func: torch._ops.OpOverload, op: str, args: tuple, kwargs: dict
) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """(as it was, the tensor) of what an operation reads, and the tensors that it writes."""
    reads, written = [], []
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        tensors = _floating(value)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes:
            written += tensors
            if argument.kwarg_only or op.rstrip("_") in _OVERWRITES:
                continue
        reads += [(x.detach().clone() if writes else x, x) for x in tensors]
    return reads, written


def _floating(values: object) -> list[Tensor]:
    """The floating-point tensors in a tree, each as `_entries` has it."""
    return [
        _entries(x)
        for x in tree_leaves(values)
        if isinstance(x, Tensor)
        and (x.is_floating_point() or x.is_complex())
        and (x.layout == torch.strided or x.layout in _SPARSE)
        and x.device.type != "meta"
    ]


def _entries(x: Tensor) -> Tensor:
    """The dense tensor of what is stored in a sparse one; any other as it is."""
    if x.layout == torch.sparse_coo:
        return x._values()
    return x.values() if x.layout in _SPARSE else x


def _is_bad(x: Tensor) -> bool:
    return not bool(torch.isfinite(x).all())


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _place(node: Any) -> Place | None:
    """The innermost line outside torch; for a node of autograd, of the forward pass."""
    if node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
        entries = re.findall(
            r'File "(.+)", line (\d+)', "".join(node.metadata.get("traceback_", []))
        )
        for file, line in reversed(entries):
            if _is_outside(file):
                return _line(file, int(line))
    frame = sys._getframe()
    while frame is not None and not _is_outside(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


def _is_outside(file: str) -> bool:
    return file != __file__ and not file.startswith(_TORCH)


def _line(file: str, number: int) -> Place:
    return Place(file, number, linecache.getline(file, number).strip())


@dataclass(frozen=True)
class Advice:
    """A setting to change.

    Attributes:
        setting: its name.
        now: its value.
        value: the value to try.
    """

    setting: str
    now: Any
    value: Any

    def __str__(self) -> str:
        """`LEARNING_RATE 4 -> 0.4`."""
        return f"{self.setting.upper()} {_short(self.now)} -> {_short(self.value)}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Diagnosis:
    """Why, and what to do.

    Attributes:
        cause: in a word.
        words: what was seen.
        remedy: what to do about it.
        advice: settings to change for it, as far as they are known.
    """

    cause: Cause
    words: str
    remedy: str
    advice: tuple[Advice, ...]


_REMEDIES = {
    Cause.FP16_OVERFLOW: "compute this in float32: x.float() before the operation",
    Cause.LOG_OF_ZERO: "log_softmax(x) in place of log(softmax(x)); else clamp_min(tiny) first",
    Cause.ZERO_NORM: "ssl_kd.guard.safe_normalize(x); for a root, add tiny under it",
    Cause.POISONED_WEIGHT: "go back to a state before it: the guard restores such a part, and "
    "a run resumes from its checkpoint. If it returns without an update, suspect the memory",
    Cause.POISONED_INPUT: "rebuild or leave out that row of the data",
    Cause.TEMPERATURE: "raise the temperature, and subtract the maximum before any exponential "
    "(log_softmax does)",
    Cause.LEARNING_RATE: "lower the learning rate, clip gradients, start from an earlier state",
    Cause.UNDERFLOW: "keep it from 0 with a floor from torch.finfo, or compute in log space",
    Cause.DOMAIN: "keep its input where it is defined; find out why it left that range",
    Cause.MASKED: "leave at least one entry of each row unmasked, or drop such rows",
    Cause.UNKNOWN: "look at the ranges of the inputs",
}


def diagnose(fault: Fault, settings: Mapping[str, Any] | None = None) -> Diagnosis:
    """Say what a fault comes from.

    Args:
        fault: from `Microscope.fault`.
        settings: name in lower case -> value, as far as the caller has them; only settings that are
            in there are advised on: `teacher_temp`, `student_temp`, `learning_rate`, `clip_grad`,
            `use_fp16`, `force_recompute`.
    """
    cause, words = _judge(fault)
    advice = _advice(cause, fault, settings or {})
    return Diagnosis(cause, words, _REMEDIES[cause], tuple(advice))


def _judge(fault: Fault) -> tuple[Cause, str]:
    """Cause and words."""
    if fault.poisoned is not None:
        facts = fault.named.get(fault.poisoned) or _bad_input(fault)
        return _kind(fault.poisoned), f"{fault.poisoned} came in not finite ({_damage(facts)})"
    for name, facts in fault.named.items():
        alone = not any(other != name for other in _runaway(fault.named))
        if 0 < facts.outliers <= max(facts.size // 100, facts.shape[-1]) and alone:
            what = f"{name} holds {facts.outliers} of {facts.size} values as large as"
            return _kind(name), f"{what} {facts.largest:.3g}, far above its others"
        if _kind(name) == Cause.POISONED_INPUT and facts.largest >= HUGE:
            return _kind(name), f"{name} reaches {facts.largest:.3g}"
    if runaway := _runaway(fault.named):
        name = max(runaway, key=lambda name: fault.named[name].rms)
        words = f"{name} has grown to a root mean square of {fault.named[name].rms:.3g}"
        return Cause.LEARNING_RATE, words

    op, node = fault.made.op, (fault.node or "").removesuffix("0")
    zero = any(facts.zeros for facts in fault.inputs)
    if fault.masked and math.inf in fault.made.numbers and op != "masked_fill":
        return Cause.UNKNOWN, f"{fault.op} was given an infinity, which reached the result"
    if fault.masked:
        return Cause.MASKED, "an infinity that was put in, as by a mask, reached the result"
    if op in _SOFTMAXES and any(facts.infs for facts in fault.inputs):
        return Cause.MASKED, "every entry of a row is -inf: nothing is left to normalise"
    low = min((facts.low for facts in fault.inputs if facts.low is not None), default=0.0)
    high = max((facts.high for facts in fault.inputs if facts.high is not None), default=0.0)
    if any(facts.nans for facts in fault.outputs) and not fault.backward:
        if (op in _LOGS | _ROOTS and low < 0) or (op in _INVERSES and max(-low, high) > 1):
            return Cause.DOMAIN, f"{fault.op} is not defined for {low if low < 0 else high:.3g}"
    if op in _LOGS or (node.startswith("Log") and "Backward" in node and op in _DIVISIONS):
        return Cause.LOG_OF_ZERO, "the logarithm was taken of an exact 0"
    if zero and (op in _DIVISIONS or op == "pow"):
        return _division(fault, node)
    return _overflow(fault)


def _runaway(named: dict[str, TensorFacts]) -> list[str]:
    """Weights as large as no healthy training makes them; one poisoned entry is in one of them."""
    return [name for name, facts in named.items() if "weight" in name and facts.rms > LARGE_WEIGHTS]


def _kind(name: str) -> Cause:
    return Cause.POISONED_INPUT if name.startswith("input") else Cause.POISONED_WEIGHT


def _bad_input(fault: Fault) -> TensorFacts:
    return next(facts for facts in fault.inputs if facts.first_bad is not None)


def _damage(facts: TensorFacts) -> str:
    counts = ((facts.nans, "NaN"), (facts.infs, "inf"))
    seen = " and ".join(f"{count} of {facts.size} values {name}" for count, name in counts if count)
    return f"{seen}, the first at {list(facts.first_bad or ())}"


def _division(fault: Fault, node: str) -> tuple[Cause, str]:
    by_norm = fault.made.op == "rsqrt" or _ancestor(fault.made, _NORMS)
    norm_node = re.match("(Sqrt|Rsqrt|Std|Norm|LinalgVectorNorm|Div|Cdist)Backward", node)
    zero_by_zero = sum(facts.zeros > 0 for facts in fault.inputs) > 1
    if norm_node or (by_norm and not node) or (zero_by_zero and not node):
        what = "the slope of a norm or root is infinite at 0" if node else "a division by it"
        return Cause.ZERO_NORM, f"a vector's length is exactly 0: {what}"
    return Cause.UNDERFLOW, "a number that is divided by (or raised to a power) is exactly 0"


def _ancestor(made: _Made, ops: set[str], depth: int = 4) -> bool:
    return depth > 0 and any(p.op in ops or _ancestor(p, ops, depth - 1) for p in made.parents)


def _overflow(fault: Fault) -> tuple[Cause, str]:
    out, limit = fault.outputs[0].dtype, _limit(fault)
    largest = max((facts.largest for facts in fault.inputs), default=0.0)
    factor, before, wanted = _temperature(fault)
    if wanted:
        words = f"values up to {before:.3g} were divided by {1 / factor:.3g}, which overflows {out}"
        return Cause.TEMPERATURE, words
    words = f"values up to {largest:.3g} went into {fault.op}, and {out} ends at {limit:.3g}"
    if fault.made.op in _EXPS:
        words = f"the exponential of {largest:.3g}: {out} holds it up to {limit:.3g}"
    if out == "float16":
        return Cause.FP16_OVERFLOW, words
    return (Cause.LEARNING_RATE if largest >= HUGE else Cause.UNKNOWN), words


def _limit(fault: Fault) -> float:
    """The largest number that the operation's result can hold, or be the exponential of."""
    largest = torch.finfo(getattr(torch, fault.outputs[0].dtype)).max
    return math.log(largest) if fault.made.op in _EXPS else largest


def _temperature(fault: Fault) -> tuple[float, float, float]:
    """Amplification seen, what it amplified, temperature to try; 0 where that is not the cause."""
    (factor, before), limit = _sharpening(fault.made), _limit(fault)
    exponential = fault.made.op in _EXPS
    if not exponential:  # logits that would overflow at any usual temperature are not its fault
        limit = limit / 10 if fault.made.op in _SOFTMAXES | {"div", "mul"} else 0.0
    if not (2 < factor <= 1e4 and 0 < before < limit):
        return factor, before, 0.0
    fits = _round_up(before / (0.9 * limit)) if exponential else 0.0
    return factor, before, max(0.1, fits, 2.5 / factor)


def _sharpening(made: _Made, depth: int = 5) -> tuple[float, float]:
    """The largest factor that a scalar multiplied by on the way here, and what it multiplied."""
    found = (0.0, 0.0)
    number = abs(made.numbers[0]) if made.numbers else 0.0
    if made.op in ("div", "mul") and 0 < number < math.inf:
        found = (1 / number if made.op == "div" else number, made.largest)
    if depth > 0:
        near = [p for p in made.parents if p.op in _ELEMENTWISE]
        found = max([found, *(_sharpening(p, depth - 1) for p in near)])
    return found


def _round_up(x: float) -> float:
    step = 10 ** math.floor(math.log10(x)) / 10
    return math.ceil(x / step) * step


def _advice(cause: Cause, fault: Fault, settings: Mapping[str, Any]) -> list[Advice]:
    rate = settings.get("learning_rate")
    wanted: dict[str, Any] = {}
    if cause == Cause.TEMPERATURE:
        factor, _, enough = _temperature(fault)
        temperatures = ("student_temp", "teacher_temp")
        names = [n for n in temperatures if settings.get(n, math.inf) < enough]
        seen = [n for n in names if math.isclose(settings[n], 1 / factor, rel_tol=1e-3)]
        wanted = {name: enough for name in seen or names}
    elif cause == Cause.FP16_OVERFLOW:
        wanted = {"use_fp16": False}
    elif cause == Cause.LEARNING_RATE:
        wanted = {"learning_rate": None if rate is None else rate / 10}
        if settings.get("clip_grad", 1.0) is None:
            wanted["clip_grad"] = 1.0
    elif cause == Cause.POISONED_INPUT:
        wanted = {"force_recompute": True}
    elif cause in (Cause.LOG_OF_ZERO, Cause.ZERO_NORM, Cause.UNDERFLOW):
        half = any(facts.dtype == "float16" for facts in fault.inputs)
        wanted = {"use_fp16": False} if half else {}
    changes = {name: value for name, value in wanted.items() if name in settings}
    return [Advice(n, settings[n], v) for n, v in changes.items() if settings[n] != v]
