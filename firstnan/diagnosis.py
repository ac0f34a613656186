"""Infer the likely cause of a NaN or infinity, and what to change in the code."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from firstnan.microscope import Fault, Made, TensorFacts

_LOGS = {"log", "log2", "log10", "log1p", "xlogy"}
_ROOTS = {"sqrt", "rsqrt", "pow"}
_EXPS = {"exp", "exp2", "expm1", "sinh", "cosh"}
_DIVISIONS = {"div", "reciprocal", "rsqrt", "true_divide"}
_ELEMENTWISE = {"add", "sub", "rsub", "neg", "mul", "div", "clamp", "clamp_min", "clamp_max"}
_ELEMENTWISE |= {"maximum", "minimum", "where", "masked_fill", "_to_copy"}
_SUMS = {"sum", "mean", "nansum", "cumsum", "mm", "bmm", "mv", "dot", "addmm", "prod"}
_PRODUCTS = {"mm", "bmm", "mv", "dot", "addmm", "baddbmm", "_scaled_mm"}
# Operations that keep an exact 0, whatever it is.
_PASS = _ELEMENTWISE - {"sub", "rsub"} | {"sqrt", "rsqrt", "clone", "copy", "cat", "stack"}
_PASS |= {"index", "gather", "index_select", "relu", "threshold", "repeat", "log2", "log", "ceil"}
_PASS |= {"floor", "round", "sub", "rsub", "topk", "sort", "scatter", "index_put"}
# What a zero is by the operation that made it, and by what was there before.
_KINDS: dict[str, str] = dict.fromkeys(("linalg_vector_norm", "norm", "_foreach_norm"), "norm")
_KINDS |= dict.fromkeys(("cdist", "_cdist_forward", "_euclidean_dist", "norm_except_dim"), "norm")
_KINDS |= dict.fromkeys(("std", "var", "std_mean", "var_mean", "var_correction"), "spread")
_KINDS |= dict.fromkeys(("amax", "amin", "max", "min", "aminmax"), "largest")
_KINDS |= {"sigmoid": "sigmoid", "_softmax": "exp", "_safe_softmax": "exp"}
_KINDS |= dict.fromkeys(("ones", "zeros", "full", "ones_like", "zeros_like", "arange"), "constant")
_KINDS |= {"full_like": "constant", "scalar_tensor": "constant", "lift_fresh": "constant"}
_KINDS |= {"fill": "constant", "zero": "constant"}
_LEAVES: dict[str, str] = {"integers": "count", "weight": "weight", "mask": "mask", "data": "data"}
_LEAVES |= {"number": "number", "unknown": "unknown"}
# Nodes whose slope is infinite at the ends of their domain.
_STEEP = {"AcosBackward": "acos", "AsinBackward": "asin", "AtanhBackward": "atanh"}
_SOFTMAXES = {"_softmax", "_log_softmax", "_safe_softmax", "logsumexp"}

HUGE = 1e10  # no weight, embedding or activation of a healthy model reaches it
LARGE_WEIGHTS = 100.0  # root mean square of a tensor above which training counts as diverged


class Cause(str, Enum):
    """The causes of a NaN or infinity that a diagnosis can name."""

    FP16_OVERFLOW = "overflow in fp16"
    FP8_OVERFLOW = "overflow in fp8"
    EXPONENTIAL = "overflow of an exponential"
    LOG_OF_ZERO = "log of zero"
    ZERO_NORM = "zero norm"
    ROOT_OF_ZERO = "root of zero"
    ZERO_SUM = "zero sum"
    ZERO_SCALE = "zero scale"
    CONSTANT = "constant values"
    ZERO_DIVISOR = "division by zero"
    POISONED_WEIGHT = "poisoned weight"
    POISONED_INPUT = "poisoned input row"
    TEMPERATURE = "temperature too low"
    LEARNING_RATE = "learning rate too high"
    UNDERFLOW = "underflow to zero"
    DOMAIN = "outside its domain"
    MASKED = "everything masked"
    ZERO_TIMES_INFINITY = "zero times infinity"
    INFINITIES = "infinity minus infinity"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Diagnosis:
    """The likely cause of a fault, and what to do about it.

    Attributes:
        cause: the category of the cause.
        words: a sentence that describes what happened.
        remedy: what to change in the code or the data.
        advice: what else to change, such as settings, if the caller added any.
    """

    cause: Cause
    words: str
    remedy: str
    advice: tuple[Any, ...] = ()


_REMEDIES = {
    Cause.FP16_OVERFLOW: "compute this in float32: x.float() before the operation",
    Cause.FP8_OVERFLOW: "scale by the tensor's largest value, or clamp to torch.finfo(dtype).max",
    Cause.EXPONENTIAL: "stay in log space, or clamp the exponent (a log ratio to 20, for example)",
    Cause.LOG_OF_ZERO: "log_softmax(x) in place of log(softmax(x)); else clamp_min(tiny) first",
    Cause.ZERO_NORM: "firstnan.safe_normalize(x); for a root, add tiny under it",
    Cause.ROOT_OF_ZERO: "add tiny under the root; or torch.where on its input, not on its result",
    Cause.ZERO_SUM: "add tiny to the sum, or clamp_min(tiny), or leave out what sums to 0",
    Cause.ZERO_SCALE: "torch.where(largest > 0, scale, 1): a block of zeros needs no scale",
    Cause.CONSTANT: "add tiny to the std or range, or leave constant values unscaled",
    Cause.ZERO_DIVISOR: "clamp_min(tiny) or add tiny to the divisor; or torch.where on it, not on "
    "the result",
    Cause.POISONED_WEIGHT: "go back to an earlier state: the guard restores such a part, and a "
    "run resumes from its checkpoint. If the NaN returns without an update, test the memory",
    Cause.POISONED_INPUT: "rebuild or leave out that row of the data",
    Cause.TEMPERATURE: "raise the temperature, and subtract the maximum before any exponential "
    "(log_softmax does)",
    Cause.LEARNING_RATE: "lower the learning rate, clip gradients, restart from an earlier state",
    Cause.UNDERFLOW: "clamp the number to torch.finfo(x.dtype).tiny or above, or use log space",
    Cause.DOMAIN: "keep the input in the range where the operation is defined",
    Cause.MASKED: "leave at least one entry of each row unmasked, or drop such rows",
    Cause.INFINITIES: "mask with torch.finfo(x.dtype).min in place of -inf, or where the result is "
    "used",
    Cause.ZERO_TIMES_INFINITY: "replace the infinity where it is made: torch.where on the input of "
    "that operation, not on its result",
    Cause.UNKNOWN: "check the ranges of the inputs above",
}

# By what a divisor is: cause, words, and a remedy if that of the cause does not fit.
_DIVISORS: dict[str, tuple[Cause, str, str | None]] = {
    "norm": (Cause.ZERO_NORM, "a vector's length is exactly 0", None),
    "spread": (Cause.CONSTANT, "the std, var or range of equal values is exactly 0", None),
    "largest": (Cause.ZERO_SCALE, "the scale is exactly 0, as all values of a block are", None),
    "exp": (
        Cause.UNDERFLOW,
        "exponentials underflowed to 0",
        "subtract the row's maximum before exp, as softmax and logsumexp do",
    ),
    "sigmoid": (
        Cause.UNDERFLOW,
        "sigmoids underflowed to 0",
        "add tiny to the sum, or softmax(logsigmoid(x)) in place of sigmoid(x) / sum",
    ),
    "count": (
        Cause.MASKED,
        "a mean over nothing: the mask or count is empty",
        "divide by count.clamp_min(1), or leave out rows without an entry",
    ),
    "weight": (
        Cause.ZERO_SUM,
        "the weights, or their sum, are exactly 0",
        "initialize them otherwise; softmax(w) in place of w / w.sum() never divides by 0",
    ),
    "sum": (Cause.ZERO_SUM, "the sum is exactly 0", None),
    "difference": (Cause.ZERO_DIVISOR, "the divisor is the difference of two equal values", None),
    "deviation": (Cause.CONSTANT, "a value equals its mean", None),
    "mask": (Cause.ZERO_DIVISOR, "the divisor is given, and exactly 0", None),
    "data": (Cause.ZERO_DIVISOR, "the divisor is given, and exactly 0", None),
    "number": (Cause.ZERO_DIVISOR, "the divisor is the number 0", None),
    "unknown": (Cause.ZERO_DIVISOR, "the denominator is exactly 0", None),
}
_BY_ZERO = {cause for cause, _, _ in _DIVISORS.values()}
# Causes that a wider dtype may cure, in which small numbers are not 0.
OF_ZERO = _BY_ZERO - {Cause.MASKED} | {Cause.LOG_OF_ZERO, Cause.ROOT_OF_ZERO}
_CERTAIN = ("norm", "spread", "largest")  # also in a product with others
_LOG_REMEDIES = {
    "sigmoid": "F.logsigmoid(x) in place of log(sigmoid(x)); a loss that takes logits does it",
    "norm": "add tiny to the distance inside of the log, or leave out pairs of equal vectors",
    "count": "clamp_min(1) on the count, or leave out rows without an entry",
}


class Judgment(NamedTuple):
    """A cause, a sentence that describes it, and a remedy if that of the cause does not fit."""

    cause: Cause
    words: str
    remedy: str | None = None


def diagnose(fault: Fault) -> Diagnosis:
    """Return the likely cause of a `Microscope.fault`, and the code to change."""
    cause, sentence, remedy = _judge(fault)
    return Diagnosis(cause, sentence, remedy or _REMEDIES[cause])


def report(fault: Fault, diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return the (label, text) rows of a report: inputs, outputs, cause, settings and remedy."""
    rows = [("input", str(facts)) for facts in fault.inputs]
    rows += [("output", str(facts)) for facts in fault.outputs]
    made = zero_source(fault.divisor).made if diagnosis.cause in _BY_ZERO else None
    if made is not None:
        place = f" ({made.place})" if made.place else ""
        rows += [("divisor", f"aten.{made.op}{place}: {fault.divided}")]
    rows += [("cause", f"{diagnosis.cause.value}: {diagnosis.words}")]
    rows += [("change", str(advice)) for advice in diagnosis.advice]
    return [*rows, ("remedy", diagnosis.remedy)]


def _judge(fault: Fault) -> Judgment:
    if fault.poisoned is not None:
        bad = (facts for facts in fault.inputs if facts.first_bad is not None)
        facts = fault.named.get(fault.poisoned) or next(bad)
        return Judgment(
            _kind(fault.poisoned), f"{fault.poisoned} came in not finite ({_damage(facts)})"
        )
    for name, facts in fault.named.items():
        only_one = not any(other != name for other in _runaway(fault.named))
        if 0 < facts.outliers <= max(facts.size // 100, facts.shape[-1]) and only_one:
            what = f"{name} holds {facts.outliers} of {facts.size} values as large as"
            return Judgment(_kind(name), f"{what} {facts.largest:.3g}, far above its other values")
        if _kind(name) == Cause.POISONED_INPUT and facts.largest >= HUGE:
            return Judgment(_kind(name), f"{name} reaches {facts.largest:.3g}")
    if runaway := _runaway(fault.named):
        name = max(runaway, key=lambda name: fault.named[name].rms)
        grown = f"{name} has grown to a root mean square of {fault.named[name].rms:.3g}"
        return Judgment(Cause.LEARNING_RATE, grown)

    op, node = fault.made.op, (fault.node or "").removesuffix("0")
    zero = any(facts.zeros for facts in fault.inputs)
    infinity = any(facts.infs for facts in fault.inputs)
    is_nan = any(facts.nans for facts in fault.outputs)
    if fault.masked and math.inf in fault.made.numbers and op != "masked_fill":
        return Judgment(
            Cause.UNKNOWN, f"{fault.op} was given an infinity, which reached the result"
        )
    if fault.masked:
        return Judgment(Cause.MASKED, "an infinity, for example from a mask, reached the result")
    if zero and infinity and op == "mul":
        sentence = "an infinity met a 0, for example of a mask applied later"
        return Judgment(Cause.ZERO_TIMES_INFINITY, sentence)
    if is_nan and infinity and op in _PRODUCTS:
        sentence = "an infinity in a product of matrices met a 0, or one of the other sign"
        return Judgment(Cause.ZERO_TIMES_INFINITY, sentence)
    if is_nan and infinity and op in _DIVISIONS:
        return Judgment(Cause.INFINITIES, "an infinity was divided by an infinity")
    is_sum = op in ("add", "sub", "rsub", "sum", "mean", "cumsum", "logaddexp")
    if is_nan and infinity and is_sum and not node.startswith("Logsumexp"):
        return Judgment(Cause.INFINITIES, f"{fault.op} met two infinities, for example of masks")
    if infinity and (op in _SOFTMAXES or node == "LogsumexpBackward"):
        return Judgment(Cause.MASKED, "every entry of a row is -inf: nothing is left to normalize")
    if is_nan and op in ("nll_loss_forward", "nll_loss2d_forward"):
        return Judgment(Cause.MASKED, _ignored(fault))
    if op == "_ctc_loss" and any(facts.infs for facts in fault.outputs):
        return Judgment(
            Cause.DOMAIN, "a CTC input is too short for its target: no alignment exists"
        )
    if is_nan and op in ("std", "var", "std_mean", "var_mean"):
        return Judgment(Cause.DOMAIN, "the std or var of one value is 0 / 0: use unbiased=False")
    low = min((facts.low for facts in fault.inputs if facts.low is not None), default=0.0)
    high = max((facts.high for facts in fault.inputs if facts.high is not None), default=0.0)
    if is_nan and not fault.backward:
        is_inverse = op in ("acos", "asin", "atanh")
        if (op in _LOGS | _ROOTS and low < 0) or (is_inverse and max(-low, high) > 1):
            outside = max(low, high, key=abs) if is_inverse else low
            return Judgment(Cause.DOMAIN, f"{fault.op} is not defined for {outside:.7g}")
        if op == "sqrt" and not fault.inputs:  # autograd saves its result alone
            return Judgment(Cause.DOMAIN, "the root of a negative number is NaN")
        if op == "mean" and any(facts.size == 0 for facts in fault.inputs):
            return Judgment(Cause.MASKED, "a mean over nothing: the mask leaves no entry")
    if op in _LOGS or (re.match(r"Log(2|10|1P)?Backward", node) and op in _DIVISIONS):
        return _logarithm(fault)
    by_zero = fault.divided is not None and fault.divided.zeros > 0
    if by_zero:
        return _division(fault, node)
    if is_nan and zero and op.startswith("_weight_norm"):
        what = "a row of the weight is exactly 0, and is divided by its length"
        return Judgment(Cause.ZERO_NORM, what, "initialize each row of the weight other than 0")
    return _overflow(fault)


def _ignored(fault: Fault) -> str:
    ignored = "every label is ignored: the loss is a mean over nothing"
    has_weights = len(fault.inputs) > 1
    return ignored.replace("ignored", "ignored, or its class has weight 0", has_weights)


def _runaway(named: dict[str, TensorFacts]) -> list[str]:
    return [name for name, facts in named.items() if "weight" in name and facts.rms > LARGE_WEIGHTS]


def _kind(name: str) -> Cause:
    return Cause.POISONED_INPUT if name.startswith("input") else Cause.POISONED_WEIGHT


def _damage(facts: TensorFacts) -> str:
    counts = ((facts.nans, "NaN"), (facts.infs, "inf"))
    bad = " and ".join(f"{count} of {facts.size} values {name}" for count, name in counts if count)
    return f"{bad}, the first at {list(facts.first_bad or ())}"


def _logarithm(fault: Fault) -> Judgment:
    """Judge a logarithm of an exact 0; the remedy follows from what made the 0."""
    source = zero_source(fault.made.parents[0]) if fault.made.op in _LOGS else None
    remedy = _LOG_REMEDIES.get(source.kind if source else "")
    return Judgment(Cause.LOG_OF_ZERO, "the logarithm was taken of an exact 0", remedy)


def _division(fault: Fault, node: str) -> Judgment:
    """Judge a division by 0, or a power of 0, by what the divisor is."""
    if node in _STEEP:
        return Judgment(Cause.DOMAIN, f"the slope of {_STEEP[node]} is infinite at -1 and at 1")
    source = zero_source(fault.divisor)
    is_root = re.match("(Sqrt|Rsqrt|Pow)Backward", node) is not None
    if source.kind == "norm":
        slope = is_root or re.match("(Norm|LinalgVectorNorm|Cdist)Backward", node)
        what = "the slope of a norm or root is infinite at 0" if slope else "a division by it"
        return Judgment(Cause.ZERO_NORM, f"a vector's length is exactly 0: {what}")
    if is_root and source.kind != "spread":
        root = "a power below 1" if node.startswith("Pow") else "a root"
        sentence = f"{root} was taken of an exact 0, where its slope is infinite"
        return Judgment(Cause.ROOT_OF_ZERO, sentence)
    cause, words, remedy = _DIVISORS[source.kind]
    is_nan = any(facts.nans for facts in fault.outputs)
    by = "0 / 0" if is_nan and not node else "a division by 0"
    sentence = f"{by}: {words}"
    if (facts := fault.divided) is not None and (rows := facts.rows_of_zeros):
        sentence += f", at {rows}"
    if source.made is not None and source.kind == "unknown":
        sentence += f"; it comes from aten.{source.made.op}"
    return Judgment(cause, sentence, remedy)


@dataclass(frozen=True)
class Source:
    """What a number that is exactly 0 was computed from: a key of `_DIVISORS`, and by what."""

    kind: str
    made: Made | None = None


def zero_source(made: Made | None, depth: int = 12) -> Source:
    """Return what a tensor is that holds an exact 0, by the operations that computed it."""
    if made is None or not depth:
        return Source("unknown")
    if made.op in _LEAVES:
        return Source(_LEAVES[made.op])
    if made.op in _KINDS:
        return Source(_KINDS[made.op], made)
    inner = [zero_source(parent, depth - 1) for parent in made.parents]
    kinds = {source.kind for source in inner} - {"constant"}
    if _is_square(made):
        return Source("deviation" if kinds == {"deviation"} else "square", made)
    if made.op == "abs":
        return Source("square", made)
    if made.op in _SUMS:
        if kinds == {"square"}:
            return Source("norm", made)
        if kinds == {"deviation"}:
            return Source("spread", made)
        is_named = len(kinds) == 1 and kinds <= {"count", "mask", "weight", "exp", "sigmoid"}
        kind = next(iter(kinds)) if is_named else "sum" if kinds else "count"
        return Source({"mask": "count"}.get(kind, kind), made)
    if made.op in ("sub", "rsub") and len(inner) > 1:
        from_mean = any(parent.op in ("mean", "var_mean") for parent in made.parents)
        is_range = kinds == {"largest"}
        kind = "deviation" if from_mean else "spread" if is_range else "difference"
        return Source(kind, made)
    if made.op in _EXPS and math.isinf(made.largest):  # the exponential of -inf
        below = [s for s in inner if s.kind == "largest"]
        return below[0] if below else Source("count", made)
    if made.op in _EXPS:
        return Source("exp", made)
    if made.op not in _PASS:
        return Source("unknown", made)
    if made.op == "mul" and 0.0 in made.numbers:
        return Source("number", made)
    is_shifted = made.op in ("add", "sub", "rsub") and any(made.numbers)  # by more than an eps
    for kind in _DIVISORS:  # in the order of how much they say
        for source in inner:
            is_alone = kinds == {kind} and not is_shifted
            if source.kind == kind and (kind in _CERTAIN or is_alone):
                return source
    return Source("square" if kinds == {"square"} else "unknown", made)


def _is_square(made: Made) -> bool:
    is_power = made.op == "pow" and 2.0 in made.numbers
    is_product = made.op in ("mul", "dot", "mm", "bmm") and len(made.parents) == 2
    return is_power or made.op == "square" or (is_product and made.parents[0] is made.parents[1])


def _overflow(fault: Fault) -> Judgment:
    out, limit = fault.outputs[0].dtype, _limit(fault)
    largest = max((facts.largest for facts in fault.inputs), default=0.0)
    factor, before, wanted = temperature(fault)
    if wanted:
        divided = f"values up to {before:.3g} were divided by {1 / factor:.3g}"
        return Judgment(Cause.TEMPERATURE, f"{divided}, which overflows {out}")
    sentence = f"values up to {largest:.3g} went into {fault.op}, and {out} ends at {limit:.3g}"
    if fault.made.op in _EXPS:
        sentence = f"the exponential of {largest:.3g}: {out} holds it up to {limit:.3g}"
        if not fault.inputs:  # autograd saves its result alone
            sentence = f"the exponential of a number above {limit:.3g}, which {out} cannot hold"
    if out.startswith(("float16", "float8")):
        return Judgment(Cause.FP8_OVERFLOW if "8" in out else Cause.FP16_OVERFLOW, sentence)
    if largest < HUGE:
        if fault.made.op in _EXPS:
            return Judgment(Cause.EXPONENTIAL, sentence)
        if any(facts.nans for facts in fault.outputs):
            sentence = f"{fault.op} made a NaN from finite values up to {largest:.3g}"
        return Judgment(Cause.UNKNOWN, sentence)
    return Judgment(Cause.LEARNING_RATE, sentence)


def _limit(fault: Fault) -> float:
    """Return the largest finite result of the operation; for an exponential, the largest input."""
    largest = torch.finfo(getattr(torch, fault.outputs[0].dtype)).max
    return math.log(largest) if fault.made.op in _EXPS else largest


def temperature(fault: Fault) -> tuple[float, float, float]:
    """Return the factor, the largest value before it, and a temperature to try (0 for none)."""
    (factor, before), limit = _sharpening(fault.made), _limit(fault)
    exponential = fault.made.op in _EXPS
    if not exponential:  # logits that overflow at any usual temperature have another cause
        limit = limit / 10 if fault.made.op in _SOFTMAXES | {"div", "mul"} else 0.0
    if not (2 < factor <= 1e4 and 0 < before < limit):
        return factor, before, 0.0
    enough = max(0.1, 2.5 / factor)
    if exponential:
        fits = before / (0.9 * limit)
        step = 10 ** math.floor(math.log10(fits)) / 10  # of the second digit
        enough = max(enough, math.ceil(fits / step) * step)
    return factor, before, enough


def _sharpening(made: Made, depth: int = 5) -> tuple[float, float]:
    """Return the largest scalar factor among the last operations, and the largest value before."""
    factors = [(0.0, 0.0)]
    number = abs(made.numbers[0]) if made.numbers else 0.0
    if made.op in ("div", "mul") and 0 < number < math.inf:
        factors.append((1 / number if made.op == "div" else number, made.largest))
    if depth > 0:
        near = [p for p in made.parents if p.op in _ELEMENTWISE]
        factors += [_sharpening(p, depth - 1) for p in near]
    return max(factors)
