"""Name the operation that made a loss NaN or infinite, from what autograd saved of it.

A `Microscope` must be there when an operation runs. `origin_of` looks at a loss that has already
been computed, before its backward pass, which frees what was saved. It names fewer operations:
those whose saved tensors show that they made a bad entry, and from which each operation on the way
to the loss is known to pass on such an entry.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from firstnan.microscope import Fault, Made, TensorFacts

# What a bad entry becomes, by the name of an autograd node without `Backward0`. For operations that
# are linear, or that choose entries, the backward pass shows which entries depend on which.
_LINEAR = set(
    "Add Sub Rsub Neg Sum Mean Cumsum View UnsafeView ReshapeAlias Unsqueeze Squeeze T Transpose "
    "Permute Expand Repeat Alias Clone ToCopy Flip Roll Diagonal Cat Stack Unbind Split Select "
    "Slice Index IndexSelect Gather Where MaskedFill MaskedSelect Tril Triu NllLoss".split()
)
_LINEAR |= {"NllLoss2D"}
_KEEPS_BAD = set("Mul Log Log2 Log10 Log1P Sqrt Abs Prod MseLoss SmoothL1Loss HuberLoss".split())
_KEEPS_NAN = set(  # but not an infinity: the exponential of -inf is 0
    "Exp Exp2 Expm1 Sigmoid Tanh Relu LeakyRelu Softplus Gelu Silu LogSigmoid Clamp ClampMin "
    "ClampMax Maximum Minimum Rsqrt Reciprocal Acos Asin Atanh".split()
)
_KEEPS_NAN |= {"BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"}
_OVER_DIMS = {"LinalgVectorNorm", "Std", "Var", "Logsumexp"}  # Logsumexp keeps NaN only
_SOFTMAXES = {"Softmax", "LogSoftmax"}

_OF_INPUT = set("Log Log2 Log10 Log1P Acos Asin Atanh Acosh Lgamma Sinh Cosh Erfinv".split())
_EXPONENTIALS = {"Exp", "Exp2", "Expm1"}
_INVERSES = {"Rsqrt": -2, "Reciprocal": -1}  # the power of the result that is the input
_VIEWS = set("View UnsafeView ReshapeAlias Unsqueeze Squeeze T Transpose Permute Expand".split())
_VIEWS |= {"Select", "Slice", "Alias", "Diagonal", "Unbind", "Split"}
_OPS = {  # whose names follow no rule
    "Log1P": "log1p",
    "ToCopy": "_to_copy",
    "Softmax": "_softmax",
    "LogSoftmax": "_log_softmax",
    "CtcLoss": "_ctc_loss",
    "NllLoss": "nll_loss_forward",
    "NllLoss2D": "nll_loss2d_forward",
}
_CHOOSES = {"MaskedFill", "Where"}
_EXPS = {"exp", "exp2", "_softmax"}
_FLOAT8 = {x for x in vars(torch).values() if isinstance(x, torch.dtype) and "float8" in str(x)}
_UNKNOWN = Made("unknown", (), (), 0.0)
_DEPTH = 12  # operations before the bad one that its cause may depend on


@dataclass(frozen=True)
class Origin:
    """The first operation on a way to the loss whose result was not finite.

    Attributes:
        number: autograd's number of the operation, in the order of the forward pass.
        fault: the operation; its line, and inputs and outputs that autograd does not save, are
            missing.
        is_certain: whether all of its inputs were saved, and are finite.
    """

    number: int
    fault: Fault
    is_certain: bool

    @property
    def note(self) -> str:
        """A sentence on where the operation was found, and what is not known about it."""
        doubt = f", which does not show whether a value was bad before {self.fault.op}"
        return "read from the graph of the loss" + doubt * (not self.is_certain)


class _Reach(NamedTuple):
    """Which entries of a tensor make the loss bad, if they are bad; booleans of its shape."""

    nan: Tensor  # if NaN
    bad: Tensor  # if NaN or infinite

    def over(self, spread: Callable[[Tensor], Tensor]) -> _Reach:
        """Return what a function makes of both masks."""
        return _Reach(spread(self.nan), spread(self.bad))

    def only_nan(self) -> _Reach:
        """Return the masks behind an operation that an infinity may not survive."""
        return _Reach(self.nan, torch.zeros_like(self.bad))

    def hit(self, x: Tensor) -> Tensor:
        """Return which entries of a tensor are bad and make the loss bad."""
        return (x.isnan() & self.nan) | (x.isinf() & self.bad)


class _Clue(NamedTuple):
    """What was saved of an operation that may have made a bad entry."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    made: Tensor  # boolean of the output's shape: bad entries that this operation made
    has_all_inputs: bool = True
    divided: Tensor | None = None  # the divisor, or the base of a power


def origin_of(losses: Sequence[Tensor], is_left_out: Callable[[int], bool]) -> Origin | None:
    """Return the operation that made a loss NaN or infinite; None if the graph does not show it.

    Call this before the backward pass. Saved tensors with hooks, as those of activation
    checkpointing, are not read, since reading them would run a part of the model again.

    Args:
        losses: tensors that are not finite.
        is_left_out: returns whether the operation of this number cannot be the answer, as that of a
            model which a `Watch` runs again.
    """
    found: list[tuple[Any, _Clue]] = []
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for device in {loss.device.type for loss in losses}:
            stack.enter_context(torch.autocast(device, enabled=False))
        for loss in losses:
            found += _origins(loss, is_left_out)
        if not found:
            return None
        node, clue = min(found, key=lambda x: x[0]._sequence_nr())
        is_certain = clue.has_all_inputs and all(bool(x.isfinite().all()) for x in clue.inputs)
        return Origin(node._sequence_nr(), _fault(node, clue), is_certain)


def _origins(loss: Tensor, is_left_out: Callable[[int], bool]) -> list[tuple[Any, _Clue]]:
    """Return the operations that made an entry bad that made the loss bad."""
    edge, origins = torch.autograd.graph.get_gradient_edge(loss), []
    everywhere = torch.ones_like(loss, dtype=torch.bool)
    reaches = {edge.node: {edge.output_nr: _Reach(everywhere, everywhere)}}
    ahead: list[tuple[int, int, Any]] = [(-edge.node._sequence_nr(), 0, edge.node)]
    while ahead:  # later operations first
        node = heapq.heappop(ahead)[-1]
        reach = reaches.pop(node)
        try:
            if not is_left_out(node._sequence_nr()) and (clue := _clue(node, reach.get(0))):
                origins.append((node, clue))
            passed = _passed(node, reach)
        except RuntimeError:  # a tensor was overwritten since it was saved, or memory is full
            continue
        for (following, number), onto in passed:
            if following not in reaches:
                reaches[following] = {}
                heapq.heappush(ahead, (-following._sequence_nr(), id(following), following))
            before = reaches[following].get(number, onto)
            reaches[following][number] = _Reach(before.nan | onto.nan, before.bad | onto.bad)
    return origins


def _clue(node: Any, reach: _Reach | None) -> _Clue | None:
    """Return what was saved of an operation, if that shows that it made a bad entry."""
    if reach is None:
        return None
    name = _name(node)
    x = _saved(node, "self")
    out = _saved(node, "result")
    clue = None
    if name in _OF_INPUT and x is not None:
        out = getattr(torch, name.lower())(x)
        clue = _Clue([x], [out], reach.hit(out) & x.isfinite())
    elif name in ("Std", "Var") and x is not None:
        options = {"correction": node._saved_correction, "keepdim": node._saved_keepdim}
        out = getattr(torch, name.lower())(x, _dims(node) or None, **options)
        clue = _Clue([x], [out], reach.hit(out) & x.isfinite().all())
    elif name == "Pow" and x is not None:
        if (exponent := _exponent(node)) is not None:
            out = x.pow(exponent)
            divided = x if exponent < 0 else None
            clue = _Clue([x], [out], reach.hit(out) & x.isfinite(), divided=divided)
    elif name in _EXPONENTIALS and out is not None:
        clue = _Clue([], [out], out.isinf() & reach.bad, has_all_inputs=False)
    elif name == "Sqrt" and out is not None:
        clue = _Clue([], [out], out.isnan() & reach.nan, has_all_inputs=False)
    elif name in _INVERSES and out is not None and out.dtype != torch.float16:
        x = out.pow(_INVERSES[name])  # in float16, the inverse of a small number is infinite, too
        clue = _Clue([x], [out], out.isinf() & reach.bad, divided=x)
    elif name == "Div":
        clue = _division(node, x, reach)
    elif name == "Mean" and 0 in node._saved_self_sym_sizes:
        dtype = node._input_metadata[0].dtype
        empty = torch.empty(tuple(node._saved_self_sym_sizes), dtype=dtype)
        out = torch.full(reach.nan.shape, math.nan, dtype=dtype)
        clue = _Clue([empty], [out], reach.nan)
    elif name in ("NllLoss", "NllLoss2D") and x is not None and node._saved_reduction == 1:
        weight, total = _saved(node, "weight"), _saved(node, "total_weight")
        out = x.new_full((), math.nan)
        inputs = [x] if weight is None else [x, weight]
        is_empty = total is not None and not total and all(i.isfinite().all() for i in inputs)
        clue = _Clue(inputs, [out], reach.nan & is_empty)
    elif name == "CtcLoss" and (x := _saved(node, "log_probs")) is not None:
        out = _saved(node, "result0")
        clue = None if out is None else _Clue([x], [out], reach.hit(out) & x.isfinite().all())
    return clue if clue and bool(clue.made.any()) else None


def _division(node: Any, x: Tensor | None, reach: _Reach) -> _Clue | None:
    y = _saved(node, "other")
    if y is None:
        return None
    if x is None:  # whatever it is, divided by 0 it is infinite or NaN
        return _Clue([y], [], (y == 0) & reach.bad, has_all_inputs=False, divided=y)
    out = x / y
    return _Clue([x, y], [out], reach.hit(out) & x.isfinite() & y.isfinite(), divided=y)


def _passed(node: Any, reaches: dict[int, _Reach]) -> list[tuple[tuple[Any, int], _Reach]]:
    """Return the inputs of an operation with the entries that make the loss bad if they are bad."""
    name, edges = _name(node), node.next_functions
    onto: list[_Reach | None] = []
    if name in _LINEAR and not _has_hooks(node):
        nans = _depends_on(node, {i: reach.nan for i, reach in reaches.items()})
        bads = _depends_on(node, {i: reach.bad for i, reach in reaches.items()})
        pairs = zip(nans, bads, strict=True)
        onto = [None if x is None or y is None else _Reach(x, y) for x, y in pairs]
    elif 0 in reaches:
        for i, (edge, output) in enumerate(edges):
            size = None if edge is None else edge._input_metadata[output].shape
            onto.append(None if size is None else _keeps(node, name, reaches[0], i, size))
    pairs = zip(edges, onto, strict=False)
    return [(e, x) for e, x in pairs if e[0] is not None and x is not None and bool(x.nan.any())]


def _keeps(node: Any, name: str, reach: _Reach, number: int, size: torch.Size) -> _Reach | None:
    """Return the entries of one input, of this size, that make the loss bad if they are bad."""
    if name in _KEEPS_BAD or (name == "Div" and number == 0):
        return reach.over(lambda x: _spread(x, size))
    if name == "Pow" and (exponent := _exponent(node)) is not None and exponent > 0:
        return reach.over(lambda x: _spread(x, size))
    if name in _KEEPS_NAN or name == "Div":
        return reach.only_nan().over(lambda x: _spread(x, size))
    if name in ("Mm", "Bmm"):
        return reach.over(lambda x: x.any(-1 - number, keepdim=True).expand(size))
    if name in _SOFTMAXES:
        dim = _signed(node._saved_dim)
        return reach.only_nan().over(lambda x: x.any(dim, keepdim=True).expand(size))
    if name == "LinalgVectorNorm" and node._saved_ord <= 0:  # a count, or the smallest entry
        return None
    if name in _OVER_DIMS:
        reach = reach.only_nan() if name == "Logsumexp" else reach
        return reach.over(lambda x: _unreduced(node, x, size))
    return None


def _depends_on(node: Any, masks: dict[int, Tensor]) -> list[Tensor | None]:
    """Return which entries of the inputs of a linear operation its marked outputs depend on."""
    given = []
    for i, facts in enumerate(node._input_metadata):
        zeros = torch.zeros(facts.shape, dtype=facts.dtype, device=facts.device)
        given.append(masks[i].to(zeros) if i in masks else zeros)
    gradients = node(*given)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    return [x if x is None else x != 0 for x in gradients]


def _spread(mask: Tensor, size: torch.Size) -> Tensor:
    """Return the mask of an input that was broadcast, or that was reduced to one number."""
    return mask.expand(size) if mask.numel() == 1 else mask.float().sum_to_size(size) > 0


def _unreduced(node: Any, mask: Tensor, size: torch.Size) -> Tensor:
    """Return the mask of what was reduced over dimensions."""
    if not node._saved_keepdim:
        for dim in sorted(dim % len(size) for dim in _dims(node)):
            mask = mask.unsqueeze(dim)
    return mask.expand(size)


def _dims(node: Any) -> list[int]:
    """Return the dimensions of a reduction; empty for all."""
    return [_signed(dim) for dim in node._saved_dim or ()]


def _signed(number: int) -> int:
    """Return a negative number that autograd shows without its sign."""
    return number - 2**64 if number >= 2**63 else number


def _exponent(node: Any) -> float | None:
    """Return the exponent of a power if it is a number."""
    exponent = None if hasattr(node, "_raw_saved_exponent") else node._saved_exponent
    return float(exponent) if isinstance(exponent, (int, float)) else None


def _name(node: Any) -> str:
    """Return the name of an operation of torch, such as `Log`; empty for others."""
    match = re.fullmatch(r"(\w+?)Backward\d+", node.name())
    return match[1] if match else ""


def _has_hooks(node: Any) -> bool:
    """Return whether any tensor that an operation saved cannot be read, as it has hooks."""
    return any(_is_closed(node, name) for name in dir(node) if name.startswith("_raw_saved_"))


def _is_closed(node: Any, name: str) -> bool:
    """Return whether what an operation saved under a name cannot be read, as it has hooks."""
    raw = getattr(node, name)
    parts = raw if isinstance(raw, (tuple, list)) else [raw]
    if all(hasattr(part, "unpack_hook") for part in parts):  # not in torch 2.9 and older
        return any(part.unpack_hook is not None for part in parts)
    key = "firstnan", name
    if key not in node.metadata:  # the next time, our own hooks would be found
        node.metadata[key] = any(map(_refuses_hooks, parts))
    return node.metadata[key]


def _refuses_hooks(saved: Any) -> bool:
    """Return True if a saved tensor has hooks; else give it idle ones, which end its version check.

    So a tensor that was ever written in place, maybe since it was saved, counts as one with hooks.
    """
    versions = []

    def pack(x: Tensor) -> Tensor:
        versions.append(x._version)
        return x

    try:
        saved.register_hooks(pack, lambda x: x)
    except RuntimeError as error:
        return "already been set" in str(error)  # else nothing was saved
    return versions != [0]


def _saved(node: Any, name: str) -> Tensor | None:
    """Return a tensor that autograd saved, if there is one without hooks."""
    raw = f"_raw_saved_{name}"
    if not hasattr(node, raw) or _is_closed(node, raw):
        return None
    x = getattr(node, f"_saved_{name}")
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided:
        return None
    return None if x.is_complex() or x.dtype in _FLOAT8 else x.detach()


def _fault(node: Any, clue: _Clue) -> Fault:
    """Return the report of an operation, with the operations before it as far as they matter."""
    known: dict[Any, Made] = {}
    made, divisor = _made(node, known), None
    if clue.divided is not None:
        edge = node.next_functions[_name(node) == "Div"][0]
        divisor = _constant(node, clue.divided) if edge is None else _history(edge, known, _DEPTH)
    return Fault(
        op=f"aten.{made.op}",
        backward=False,
        node=None,
        place=None,
        inputs=tuple(map(TensorFacts.of, clue.inputs)),
        outputs=tuple(map(TensorFacts.of, clue.outputs)),
        poisoned=None,
        masked=False,
        made=made,
        named={},
        divisor=divisor,
        divided=None if clue.divided is None else TensorFacts.of(clue.divided),
    )


def _made(node: Any, known: dict[Any, Made], depth: int = _DEPTH) -> Made:
    """Return an operation with those before it; an operand that needs no gradient is unknown."""
    name, edges = _name(node), [edge for edge, _ in node.next_functions]
    parents = tuple(_UNKNOWN if x is None else _history(x, known, depth - 1) for x in edges)
    op = _OPS.get(name) or re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    numbers = (math.nan,) if name == "Rsub" else ()  # there is one, but it is not saved
    if name == "Pow" and (exponent := _exponent(node)) is not None:
        numbers = (exponent,)
    return Made(op, numbers, parents, 0.0)


def _history(node: Any, known: dict[Any, Made], depth: int) -> Made:
    """Return how a tensor was made, or that it is unknown where a 0 in it comes from."""
    if node in known:
        return known[node]
    name = _name(node)
    if node.name().endswith("AccumulateGrad"):
        made = Made("weight", (), (), 0.0)
    elif not name or not depth or name in _CHOOSES:
        made = _UNKNOWN
    else:
        made = _made(node, known, depth)
        if name in _VIEWS:
            made = made.parents[0]
        elif name in ("Mul", "Div"):
            made = _product(node, made)
        elif made.op in _EXPS and _may_be_infinite(made.parents):
            made = _UNKNOWN
    known[node] = made
    return made


def _product(node: Any, made: Made) -> Made:
    """Return a product or quotient by what may be 0 in it: not by a constant without a 0."""
    parents = []
    for name, (edge, _), parent in zip(
        ("self", "other"), node.next_functions, made.parents, strict=False
    ):
        constant = _saved(node, name) if edge is None else None
        if constant is None or not bool(constant.all()):
            parents.append(parent)
    return _UNKNOWN if _UNKNOWN in parents else replace(made, parents=tuple(parents))


def _may_be_infinite(parents: tuple[Made, ...]) -> bool:
    """Return whether one may be -inf, whose exponential is 0 without an underflow."""
    through = ("add", "sub", "mul", "div", "neg", "floor", "ceil", "round", "_to_copy")
    return any(
        x.op in ("unknown", "log", "log2", "log10")
        or (x.op in through and _may_be_infinite(x.parents))
        for x in parents
    )


def _constant(node: Any, y: Tensor) -> Made:
    """Return what a divisor without a gradient is, by its values."""
    is_count = not y.is_floating_point() or any(
        bool(((mask == 0) | (mask == 1)).all()) and bool(mask.sum() == y.sum())
        for mask in _masks(node.next_functions[0][0])
    )
    return Made("integers" if is_count else "unknown", (), (), 0.0)


def _masks(node: Any) -> Iterator[Tensor]:
    """Yield the tensors by which the entries of a sum were masked, as far as they are saved."""
    is_sum = False
    while node is not None and _name(node) in _VIEWS | {"Neg", "Sum", "Mul", "Where", "MaskedFill"}:
        is_sum |= _name(node) == "Sum"
        masks = [_saved(node, name) for name in ("self", "other", "condition", "mask")]
        for mask in [x for x in masks if x is not None and is_sum]:
            yield ~mask if _name(node) == "MaskedFill" else mask
        node = next((edge for edge, _ in node.next_functions if edge is not None), None)
