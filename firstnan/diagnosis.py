"""Infer the likely cause of a NaN or infinity, and what to change in the code."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from firstnan.microscope import Fault, Made, TensorFacts

_LOGS = {"log", "log2", "log10", "log1p", "xlogy"}
_ROOTS = {"sqrt", "rsqrt", "pow"}
_NORMS = {"linalg_vector_norm", "norm", "_foreach_norm", "sqrt", "std", "var", "cdist"}
_EXPS = {"exp", "exp2", "expm1", "sinh", "cosh"}
_DIVISIONS = {"div", "reciprocal", "rsqrt", "true_divide"}
_ELEMENTWISE = {"add", "sub", "rsub", "neg", "mul", "div", "clamp", "clamp_min", "clamp_max"}
_ELEMENTWISE |= {"maximum", "minimum", "where", "masked_fill", "_to_copy"}
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
    POISONED_WEIGHT = "poisoned weight"
    POISONED_INPUT = "poisoned input row"
    TEMPERATURE = "temperature too low"
    LEARNING_RATE = "learning rate too high"
    UNDERFLOW = "underflow to zero"
    DOMAIN = "outside its domain"
    MASKED = "everything masked"
    ZERO_TIMES_INFINITY = "zero times infinity"
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
    Cause.POISONED_WEIGHT: "go back to an earlier state: the guard restores such a part, and a "
    "run resumes from its checkpoint. If the NaN returns without an update, test the memory",
    Cause.POISONED_INPUT: "rebuild or leave out that row of the data",
    Cause.TEMPERATURE: "raise the temperature, and subtract the maximum before any exponential "
    "(log_softmax does)",
    Cause.LEARNING_RATE: "lower the learning rate, clip gradients, restart from an earlier state",
    Cause.UNDERFLOW: "clamp the number to torch.finfo(x.dtype).tiny or above, or use log space",
    Cause.DOMAIN: "keep the input in the range where the operation is defined",
    Cause.MASKED: "leave at least one entry of each row unmasked, or drop such rows",
    Cause.ZERO_TIMES_INFINITY: "replace the infinity where it is made: torch.where on the input of "
    "that operation, not on its result",
    Cause.UNKNOWN: "check the ranges of the inputs above",
}


def diagnose(fault: Fault) -> Diagnosis:
    """Return the likely cause of a `Microscope.fault`, and the code to change."""
    cause, sentence = _judge(fault)
    return Diagnosis(cause, sentence, _REMEDIES[cause])


def report(fault: Fault, diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return the (label, text) rows of a report: inputs, outputs, cause, settings and remedy."""
    rows = [("input", str(facts)) for facts in fault.inputs]
    rows += [("output", str(facts)) for facts in fault.outputs]
    rows += [("cause", f"{diagnosis.cause.value}: {diagnosis.words}")]
    rows += [("change", str(advice)) for advice in diagnosis.advice]
    return [*rows, ("remedy", diagnosis.remedy)]


def _judge(fault: Fault) -> tuple[Cause, str]:
    if fault.poisoned is not None:
        bad = (facts for facts in fault.inputs if facts.first_bad is not None)
        facts = fault.named.get(fault.poisoned) or next(bad)
        return _kind(fault.poisoned), f"{fault.poisoned} came in not finite ({_damage(facts)})"
    for name, facts in fault.named.items():
        only_one = not any(other != name for other in _runaway(fault.named))
        if 0 < facts.outliers <= max(facts.size // 100, facts.shape[-1]) and only_one:
            what = f"{name} holds {facts.outliers} of {facts.size} values as large as"
            return _kind(name), f"{what} {facts.largest:.3g}, far above its other values"
        if _kind(name) == Cause.POISONED_INPUT and facts.largest >= HUGE:
            return _kind(name), f"{name} reaches {facts.largest:.3g}"
    if runaway := _runaway(fault.named):
        name = max(runaway, key=lambda name: fault.named[name].rms)
        grown = f"{name} has grown to a root mean square of {fault.named[name].rms:.3g}"
        return Cause.LEARNING_RATE, grown

    op, node = fault.made.op, (fault.node or "").removesuffix("0")
    zero = any(facts.zeros for facts in fault.inputs)
    infinity = any(facts.infs for facts in fault.inputs)
    is_nan = any(facts.nans for facts in fault.outputs)
    if fault.masked and math.inf in fault.made.numbers and op != "masked_fill":
        return Cause.UNKNOWN, f"{fault.op} was given an infinity, which reached the result"
    if fault.masked:
        return Cause.MASKED, "an infinity, for example from a mask, reached the result"
    if zero and infinity and op == "mul":
        return Cause.ZERO_TIMES_INFINITY, "an infinity met a 0, for example of a mask applied later"
    if infinity and (op in _SOFTMAXES or node == "LogsumexpBackward"):
        return Cause.MASKED, "every entry of a row is -inf: nothing is left to normalize"
    if is_nan and op in ("nll_loss_forward", "nll_loss2d_forward"):
        return Cause.MASKED, "every label is ignored: the loss is a mean over nothing"
    if op == "_ctc_loss" and any(facts.infs for facts in fault.outputs):
        return Cause.DOMAIN, "a CTC input is too short for its target: no alignment exists"
    if is_nan and op in ("std", "var", "std_mean", "var_mean"):
        return Cause.DOMAIN, "the std or var of one value is 0 / 0: use unbiased=False"
    low = min((facts.low for facts in fault.inputs if facts.low is not None), default=0.0)
    high = max((facts.high for facts in fault.inputs if facts.high is not None), default=0.0)
    if is_nan and not fault.backward:
        is_inverse = op in ("acos", "asin", "atanh")
        if (op in _LOGS | _ROOTS and low < 0) or (is_inverse and max(-low, high) > 1):
            return Cause.DOMAIN, f"{fault.op} is not defined for {low if low < 0 else high:.3g}"
    if op in _LOGS or (node.startswith("Log") and "Backward" in node and op in _DIVISIONS):
        return Cause.LOG_OF_ZERO, "the logarithm was taken of an exact 0"
    if zero and (op in _DIVISIONS or op == "pow"):
        return _division(fault, node)
    return _overflow(fault)


def _runaway(named: dict[str, TensorFacts]) -> list[str]:
    return [name for name, facts in named.items() if "weight" in name and facts.rms > LARGE_WEIGHTS]


def _kind(name: str) -> Cause:
    return Cause.POISONED_INPUT if name.startswith("input") else Cause.POISONED_WEIGHT


def _damage(facts: TensorFacts) -> str:
    counts = ((facts.nans, "NaN"), (facts.infs, "inf"))
    bad = " and ".join(f"{count} of {facts.size} values {name}" for count, name in counts if count)
    return f"{bad}, the first at {list(facts.first_bad or ())}"


def _division(fault: Fault, node: str) -> tuple[Cause, str]:
    by_norm = fault.made.op == "rsqrt" or _ancestor(fault.made, _NORMS)
    norm_node = re.match("(Sqrt|Rsqrt|Std|Norm|LinalgVectorNorm|Div|Cdist)Backward", node)
    zero_by_zero = sum(facts.zeros > 0 for facts in fault.inputs) > 1
    are_scalars = all(facts.size == 1 for facts in fault.inputs)
    if zero_by_zero and are_scalars and not node and not by_norm:
        return Cause.MASKED, "0 / 0: a mean over nothing"
    if norm_node or (by_norm and not node) or (zero_by_zero and not node):
        what = "the slope of a norm or root is infinite at 0" if node else "a division by it"
        return Cause.ZERO_NORM, f"a vector's length is exactly 0: {what}"
    return Cause.UNDERFLOW, "a divisor, or the base of a power, is exactly 0"


def _ancestor(made: Made, ops: set[str], depth: int = 4) -> bool:
    return depth > 0 and any(p.op in ops or _ancestor(p, ops, depth - 1) for p in made.parents)


def _overflow(fault: Fault) -> tuple[Cause, str]:
    out, limit = fault.outputs[0].dtype, _limit(fault)
    largest = max((facts.largest for facts in fault.inputs), default=0.0)
    factor, before, wanted = temperature(fault)
    if wanted:
        divided = f"values up to {before:.3g} were divided by {1 / factor:.3g}"
        return Cause.TEMPERATURE, f"{divided}, which overflows {out}"
    sentence = f"values up to {largest:.3g} went into {fault.op}, and {out} ends at {limit:.3g}"
    if fault.made.op in _EXPS:
        sentence = f"the exponential of {largest:.3g}: {out} holds it up to {limit:.3g}"
    if out.startswith(("float16", "float8")):
        return (Cause.FP8_OVERFLOW if "8" in out else Cause.FP16_OVERFLOW), sentence
    if largest < HUGE:
        return (Cause.EXPONENTIAL if fault.made.op in _EXPS else Cause.UNKNOWN), sentence
    return Cause.LEARNING_RATE, sentence


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
