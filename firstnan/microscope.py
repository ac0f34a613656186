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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from firstnan.norms import as_reals, stored

_OWN = [str(file) for file in Path(__file__).parent.glob("*.py")]  # not its tests
_PASSED_OVER = (os.path.dirname(torch.__file__) + os.sep, *_OWN)
_RERUN = os.path.join(os.path.dirname(__file__), "watch.py")  # calls the model, as a loop does

# Operations that overwrite their first argument without reading it, and that do not set memory.
_OVERWRITES = {"copy", "fill", "zero", "normal", "uniform", "bernoulli", "random", "exponential"}
_UNINITIALIZED = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}


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
        """Return a line such as `float32 [2, 64], -1.2 to 3.4, 5 of 128 zero, 1 of 128 NaN`."""
        facts = [f"{self.dtype} {list(self.shape)}"]
        if self.low is not None:
            facts.append(f"{self.low:.3g} to {self.high:.3g}")
        for count, name in ((self.zeros, "zero"), (self.nans, "NaN"), (self.infs, "inf")):
            if count:
                facts.append(f"{count} of {self.size} {name}")
        return ", ".join(facts)


@dataclass(frozen=True)
class Place:
    """A line of source code."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        """Return a line such as `models/my_model.py:31: return x.log()`."""
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Made:
    """How a tensor was made."""

    op: str
    numbers: tuple[float, ...]  # the scalar arguments
    parents: tuple[Made, ...]  # how the inputs were made
    largest: float  # magnitude among the inputs


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
    module: str | None = None


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
                origin = self._origin_of.get(_key(result))
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
        if op in _UNINITIALIZED or func.is_view:  # a view is followed by its storage
            return out
        numbers = [float(x) for x in tree_leaves((args, kwargs)) if type(x) in (int, float)]
        numbers += [x.item() for x, _ in reads if x.ndim == 0 and not x.is_complex()]
        parents = tuple(m for _, x in reads if (m := self._made.get(_key(x))) is not None)
        sizes = (as_reals(x).abs() for x, _ in reads if x.numel())
        largest = max((float(size.max()) for size in sizes), default=0.0)
        made = Made(op.rpartition(".")[2].rstrip("_"), tuple(numbers), parents, largest)
        for x in outputs:
            self._made[self._keep(x)] = made
        if bad := [x for x in outputs if _is_bad(x)]:
            constant = any(not math.isfinite(n) for n in numbers)
            note = partial(self._note, str(func.overloadpacket), made, [x for x, _ in reads], bad)
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
        known = [self._origin_of[_key(x)] for _, x in sick if _key(x) in self._origin_of]
        for seen, x in sick:
            if _key(x) not in self._origin_of:  # it was bad before anything was computed
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
            module=None if self._within is None else self._within(),
        )
        self._origins.append(fault)
        return len(self._origins) - 1

    def _leaf(self, x: Tensor) -> Fault:
        facts = (TensorFacts.of(x),)
        made = Made("none", (), (), facts[0].largest)
        name = self._name(x) or "input"
        return Fault("none", False, None, None, facts, facts, name, False, made, self._facts)

    def _name(self, x: Tensor) -> str | None:
        bad = [name for name, facts in self._facts.items() if facts.first_bad is not None]
        mine = {name: stored(self._named[name]) for name in bad}
        mine = {name: entries for name, entries in mine.items() if _key(entries) == _key(x)}
        exact = [name for name in mine if mine[name].data_ptr() == x.data_ptr()]
        return next(iter([*exact, *mine]), None)

    def _keep(self, x: Tensor) -> int:
        key = _key(x)
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


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _place(node: Any) -> Place | None:
    """Return the innermost line of the model outside torch; for a node, of its forward pass."""
    lines = [(frame.f_code.co_filename, n) for frame, n in traceback.walk_stack(sys._getframe())]
    if node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
        text = "".join(node.metadata.get("traceback_", []))
        lines = [*reversed(re.findall(r'File "(.+)", line (\d+)', text)), *lines]
    for file, number in lines:
        if file == _RERUN:
            return None
        if not file.startswith(_PASSED_OVER):
            return Place(file, int(number), linecache.getline(file, int(number)).strip())
    return None
