"""Find the operation that made the first NaN or infinity of a step.

Checking every operation makes a step several times slower, so use this to run one bad step again:
`with Microscope(named) as scope: ...`, then `scope.fault(loss)`. For the cause of the fault, call
`firstnan.diagnosis.diagnose`.
"""

from __future__ import annotations

import linecache
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from firstnan._norms import as_reals, stored

_SPANS, _NAMED = 8, 4  # most spans of rows in a text; most rows without their count
_OWN = [str(file) for file in Path(__file__).parent.glob("*.py")]  # not its tests
_PASSED_OVER = (os.path.dirname(torch.__file__) + os.sep, *_OWN)
_RERUN = os.path.join(os.path.dirname(__file__), "watch.py")  # calls the model, as a loop does

# Operations that overwrite their first argument without reading it, and that do not set memory.
_OVERWRITES = {"copy", "fill", "zero", "normal", "uniform", "bernoulli", "random", "exponential"}
# Position of the argument by which an operation divides, or of the base of a power.
_DIVISORS = {"div": 1, "true_divide": 1, "reciprocal": 0, "rsqrt": 0, "pow": 0}
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
UNINITIALIZED = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}


@dataclass(frozen=True)
class TensorFacts:
    """Statistics of a tensor."""

    shape: tuple[int, ...]
    dtype: str  # such as `float32`
    low: float | None  # smallest finite entry; None without a finite entry
    high: float | None
    nans: int
    infs: int
    zeros: int
    first_bad: tuple[int, ...] | None  # index of the first entry that is not finite
    rms: float  # of the finite entries
    # Entries whose magnitude is above 1e3 and above 1e4 times the median of the nonzero ones; 0 if
    # at least 7/8 of the entries are 0.
    outliers: int
    bad_rows: tuple[int, ...] = ()  # first eight indices of the first dimension with a bad entry

    @classmethod
    def of(cls, x: Tensor) -> TensorFacts:
        """Compute the statistics of a tensor of any dtype and layout."""
        x = x.detach()
        x = x if x.layout == torch.strided or x.is_nested else x.to_dense()
        shape, dtype = tuple(stored(x).shape), str(x.dtype).removeprefix("torch.")
        x = stored(x).abs() if x.is_complex() else as_reals(x)
        finite = torch.isfinite(x)
        good = x[finite].double()
        bad = (~finite).nonzero()
        size = good.abs()
        nonzero = size[size > 0]
        usual = float(nonzero.median()) if 8 * len(nonzero) > len(size) else 0.0
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
            outliers=int((size > max(1e4 * usual, 1e3)).sum()),
            bad_rows=tuple(bad[:, 0].unique()[:8].tolist()) if x.ndim else (),
            rows=_rows(~finite),
            rows_of_zeros=_rows(x == 0),
        )

    rows: str = ""  # those with a bad entry, such as `rows 0 to 3, 7` or `all 8 rows`
    rows_of_zeros: str = ""  # those with a 0

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def largest(self) -> float:
        """Largest absolute value among the finite entries."""
        return max(abs(self.low or 0.0), abs(self.high or 0.0))

    def __str__(self) -> str:
        """Return a line such as `float32 [2, 64], -1.2 to 3.4, 5 of 128 zero, 1 of 128 NaN`."""
        facts = [f"{self.dtype} {list(self.shape)}"]
        if self.low is not None:
            facts.append(f"{self.low:.3g} to {self.high:.3g}")
        for count, name in ((self.zeros, "zero"), (self.nans, "NaN"), (self.infs, "inf")):
            if count:
                facts.append(f"{count} of {self.size} {name}")
        return ", ".join(facts)


def _rows(entries: Tensor) -> str:
    """Return the rows of a boolean tensor with a true entry, in words; "" without rows."""
    if entries.ndim < 2:  # of a vector, each number is a row
        entries = entries.unsqueeze(-1)
    is_in = entries.flatten(1).any(1) if entries.ndim > 1 and entries.numel() else entries
    numbers = is_in.nonzero().flatten().tolist() if len(is_in) > 1 else []
    if not numbers:
        return ""
    if len(numbers) == len(is_in):
        return f"all {len(is_in)} rows"
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [f"{a}" if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in spans]
    noun = "rows" if len(numbers) > 1 else "row"
    text = f"{noun} {', '.join(texts[:_SPANS])}"
    is_cut = len(texts) > _SPANS
    many = f" ({len(numbers)} of {len(is_in)})" if len(numbers) > _NAMED or is_cut else ""
    return f"{text}{', ...' * is_cut}{many}"


@dataclass(frozen=True)
class Place:
    """A line of source code."""

    file: str
    line: int
    text: str

    @classmethod
    def of(cls, file: str, line: int) -> Place:
        """Return a line of a file with its text."""
        return cls(file, line, linecache.getline(file, line).strip())

    def __str__(self) -> str:
        """Return a line such as `models/my_model.py:31: return x.log()`."""
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Made:
    """How a tensor was made.

    Attributes:
        op: the operation without `aten.`; of a tensor that existed before, `weight`, `mask` (all
            entries are 0 or 1) or `data`; `integers` or `number` if it does not hold floats.
        numbers: the scalar arguments.
        parents: how the inputs were made.
        largest: magnitude among the inputs.
        line: file and line that called the operation in the forward pass.
    """

    op: str
    numbers: tuple[float, ...]
    parents: tuple[Made, ...]
    largest: float
    line: tuple[str, int] | None = None

    @property
    def place(self) -> Place | None:
        """The source line that called the operation."""
        return None if self.line is None else Place.of(*self.line)


@dataclass(frozen=True)
class Fault:
    """The first operation whose output was not finite.

    Attributes:
        op: name of the operation, such as `aten.log`; if a tensor was bad before the scope began,
            the first operation that read the tensor.
        backward: whether the operation ran in the backward pass.
        node: the autograd node of an operation in the backward pass, such as `SqrtBackward0`.
        place: the source line that called the operation; in the backward pass, the line of the
            forward pass whose gradient it computes.
        inputs: statistics of the operation's inputs.
        outputs: statistics of the outputs that are not finite.
        poisoned: name of the input that was not finite before the scope began; None without one.
        masked: whether the infinity is a constant, as in masks.
        made: the operations that computed the output and its inputs.
        named: name -> statistics of the named tensors before the scope began.
        divisor: how the tensor was made by which the operation divides (the base of a power); None
            if it does not divide.
        divided: statistics of this tensor.
        module: name of the module in which the operation ran; None without `within`.
    """

    op: str
    backward: bool
    node: str | None
    place: Place | None
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    poisoned: str | None
    masked: bool
    made: Made
    named: dict[str, TensorFacts]
    divisor: Made | None = None
    divided: TensorFacts | None = None
    module: str | None = None


_INTEGRAL = Made("integers", (), (), 0.0)


class Microscope(TorchDispatchMode):
    """Check every operation, forward and backward, for the first that makes a NaN or an infinity.

    An infinity may be intended, in a mask or in a branch that `torch.where` drops. So each origin
    is recorded and followed from tensor to tensor, and `fault` returns the first origin that
    reached a result. Run the backward pass inside the block, too.

    Args:
        named: name -> tensor that exists beforehand. Start the names of data with `input`, and use
            `weight` in the names of weights; other names count as state.
        within: function that returns the name of the module whose operations run now.

    >>> with Microscope() as scope:
    ...     loss = torch.tensor([1.0, 0.0]).log().sum()
    >>> scope.fault(loss).op
    'aten.log'
    """

    def __init__(
        self, named: Mapping[str, Tensor] | None = None, within: Callable[[], str] | None = None
    ) -> None:
        super().__init__()
        self._named, self._within = dict(named or {}), within
        self._facts: dict[str, TensorFacts] = {}
        self._origins: list[Fault] = []
        # Per storage, since views share what is in them. The weak references keep an address from
        # being given to another storage, and keep no numbers in memory.
        self._alive: dict[int, StorageWeakRef] = {}
        self._made: dict[int, Made] = {}
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
        """Return the origin of the first result that is not finite; None if all are finite.

        Without results, return the first recorded origin, preferring those that are not masks.
        """
        if not results:
            return min(self._origins, key=lambda fault: fault.masked, default=None)
        for result in map(stored, results):
            if _is_bad(result):
                origin = self._origin_of.get(storage_key(result))
                return self._origins[origin] if origin is not None else self._leaf(result)
        return None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Run one operation and check its results."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        op = func.overloadpacket._qualified_op_name.partition("::")[2]
        reads, written = _reads(func, op, args, kwargs)
        out = func(*args, **kwargs)
        outputs = _floating(out) or written
        if op in UNINITIALIZED or func.is_view:  # a view is followed by its storage
            return out
        numbers = [float(x) for x in tree_leaves((args, kwargs)) if type(x) in (int, float)]
        numbers += [x.item() for x, _ in reads if x.ndim == 0 and not x.is_complex()]
        parents = tuple(self._made_by(seen, x) for seen, x in reads)
        if any(isinstance(x, Tensor) and x.dtype in _INTEGERS for x in tree_leaves((args, kwargs))):
            parents = (*parents, _INTEGRAL)
        sizes = (as_reals(x).abs() for x, _ in reads if x.numel())
        largest = max((float(size.max()) for size in sizes), default=0.0)
        made = Made(
            op.rpartition(".")[2].rstrip("_"), tuple(numbers), parents, largest, source_line()
        )
        for x in outputs:
            self._made[self._keep(x)] = made
        if bad := [x for x in outputs if _is_bad(x)]:
            constant = any(not math.isfinite(n) for n in numbers)
            divisor = self._divisor(made.op, args)
            operands = [x for x, _ in reads], bad, divisor
            note = partial(self._note, str(func.overloadpacket), made, *operands)
            origin = self._trace(note, reads, bad, constant)
            for x in bad:
                self._origin_of[self._keep(x)] = origin
        return out

    def _trace(
        self,
        note: Callable[..., int],
        reads: list[tuple[Tensor, Tensor]],
        bad: list[Tensor],
        constant: bool,
    ) -> int:
        """Return the index of the origin of bad outputs; `note` records a new one."""
        sick = [(seen, x) for seen, x in reads if _is_bad(seen)]
        known = [
            self._origin_of[storage_key(x)] for _, x in sick if storage_key(x) in self._origin_of
        ]
        for seen, x in sick:
            if storage_key(x) not in self._origin_of:  # it was bad before anything was computed
                name = self._name(x)
                mask = name is None and not x.requires_grad and not torch.isnan(seen).any()
                if name is None and not mask:
                    name = "weight" if x.requires_grad else "input"
                known.append(note(poisoned=name, masked=mask))
                self._origin_of[self._keep(x)] = known[-1]
        real = [origin for origin in known if not self._origins[origin].masked]
        if real:
            return min(real)
        fresh_nan = any(torch.isnan(x).any() for x in bad)
        if known and not fresh_nan:
            return min(known)
        return note(poisoned=None, masked=constant and not known and not fresh_nan)

    def _note(
        self,
        op: str,
        made: Made,
        inputs: list[Tensor],
        bad: list[Tensor],
        divisor: tuple[Made, TensorFacts] | None,
        *,
        poisoned: str | None,
        masked: bool,
    ) -> int:
        """Record the running operation as an origin, and return its index."""
        is_backward = torch._C._current_graph_task_id() != -1
        node = torch._C._current_autograd_node() if is_backward else None
        fault = Fault(
            op=op,
            backward=node is not None,
            node=None if node is None else node.name().rpartition("::")[2],
            place=_place(node),
            inputs=tuple(map(TensorFacts.of, inputs)),
            outputs=tuple(map(TensorFacts.of, bad)),
            poisoned=poisoned,
            masked=masked,
            made=made,
            named=self._facts,
            divisor=divisor and divisor[0],
            divided=divisor and divisor[1],
            module=None if self._within is None else self._within(),
        )
        self._origins.append(fault)
        return len(self._origins) - 1

    def _made_by(self, seen: Tensor, x: Tensor) -> Made:
        """Return how a tensor was made, by its storage; `seen` holds its values."""
        made = self._made.get(storage_key(x))
        if made is not None:
            return made
        name = self._name_of(x) or ""
        values = as_reals(seen)
        op = "mask" if bool(((values == 0) | (values == 1)).all()) else "data"
        op = "weight" if name.startswith("weight") or (x.requires_grad and x.is_leaf) else op
        made = self._made[self._keep(x)] = Made(op, (), (), 0.0)
        return made

    def _divisor(self, op: str, args: tuple) -> tuple[Made, TensorFacts] | None:
        """Return how the tensor was made by which an operation divides, and its statistics."""
        number = _DIVISORS.get(op)
        value = None if number is None or number >= len(args) else args[number]
        if op == "pow" and isinstance(args[1], (int, float)) and args[1] >= 0:
            return None
        if isinstance(value, (int, float)):
            return Made("number", (float(value),), (), 0.0), TensorFacts.of(torch.tensor(value))
        if not isinstance(value, Tensor):
            return None
        floats = _floating(value)
        return (self._made_by(value, floats[0]) if floats else _INTEGRAL), TensorFacts.of(value)

    def _leaf(self, x: Tensor) -> Fault:
        facts = (TensorFacts.of(x),)
        made = Made("none", (), (), facts[0].largest)
        name = self._name(x) or "input"
        return Fault("none", False, None, None, facts, facts, name, False, made, self._facts)

    def _name(self, x: Tensor) -> str | None:
        bad = [name for name, facts in self._facts.items() if facts.first_bad is not None]
        return self._name_of(x, bad)

    def _name_of(self, x: Tensor, names: Iterable[str] | None = None) -> str | None:
        mine = {
            name: stored(self._named[name]) for name in (self._named if names is None else names)
        }
        mine = {
            name: entries
            for name, entries in mine.items()
            if storage_key(entries) == storage_key(x)
        }
        exact = [name for name in mine if mine[name].data_ptr() == x.data_ptr()]
        return next(iter([*exact, *mine]), None)

    def _keep(self, x: Tensor) -> int:
        key = storage_key(x)
        if key not in self._alive:
            self._alive[key] = StorageWeakRef(x.untyped_storage())
        return key


def _reads(
    func: torch._ops.OpOverload, op: str, args: tuple, kwargs: dict
) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Return (value before, tensor) of what an operation reads, and the tensors it writes."""
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
    return [
        stored(x)
        for x in tree_leaves(values)
        if isinstance(x, Tensor)
        and (x.is_floating_point() or x.is_complex())
        and x.device.type != "meta"
    ]


def _is_bad(x: Tensor) -> bool:
    return not bool(torch.isfinite(as_reals(x)).all())


def storage_key(x: Tensor) -> int:
    """Return what identifies the storage of a tensor, which its views share."""
    return x.untyped_storage()._cdata


def _place(node: Any) -> Place | None:
    """Return the innermost line of the model outside torch; for a node, of its forward pass."""
    lines: list[tuple[str, str]] = []
    if node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
        text = "".join(node.metadata.get("traceback_", []))
        lines = list(reversed(re.findall(r'File "(.+)", line (\d+)', text)))
    line = _first((file, int(number)) for file, number in lines) or source_line()
    return None if line is None or line[0] == _RERUN else Place.of(*line)


def source_line() -> tuple[str, int] | None:
    """Return the file and line outside of torch that runs now."""
    stack = traceback.walk_stack(sys._getframe())
    return _first((frame.f_code.co_filename, number) for frame, number in stack)


def _first(lines: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """Return the first line of the model, or that of `watch.py` which runs it."""
    for file, number in lines:
        if file == _RERUN or not file.startswith(_PASSED_OVER):
            return file, number
    return None
