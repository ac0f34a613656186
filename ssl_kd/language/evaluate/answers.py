"""Extract the final answer from a generated text and compare it with the reference.

math-verify (0.9) also compares formulas. It is not used because it looks for a number anywhere in
an answer: it takes `2x` for `2`, `2024-01-05` for `2024` and `A. Paris` for `A. London`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import scipy  # its modules are imported on first use

TOLERANCE = 1e-4  # relative

_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?) *(?:(?P<over>{_DECIMAL}) */ *(?P<under>{_DECIMAL})"
    rf"|(?P<plain>(?:{_DECIMAL})(?:[eE][+-]?[0-9]+)?))"
    rf" *(?P<percent>%?) *(?P<unit>(?:[^\W\d_]|[°/·*.\- ]|\^-?[0-9])*)"
)
_LAST_NUMBER = re.compile(
    r"(?<![\w.])[+-]?[$€£¥₹]?"
    r"(?:[0-9]+/[0-9]+|[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)%?"
)
_SCALES = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_CHOICE = re.compile(r"(?:(?:option|choice|answer):? *)?\(?([a-z])(?:[).:](.*))?", re.IGNORECASE)
_MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"))
_MARKS = " *_`\"“”'"  # markdown and quotes around an answer
_END = ".,;:!?" + _MARKS


def extract_answer(text: str, *, last_number: bool = False) -> str | None:
    r"""Find the final answer in a text; None if there is none or it is empty.

    The first of these that the text contains is returned: the content of the last `\boxed{…}`
    inside the last `<answer>…</answer>` (tags in any case); that element's whole content; without
    the element, the content of the last `\boxed{…}` (nested braces are kept); the rest of the line
    after the first `####`. Later `####` are ignored, because a model of GSM8K that does not stop
    after its answer invents further questions.

    With `last_number`, the last number of a text without a marked answer is returned. This is off
    by default, because such a number may be correct by chance.

    Example:
        >>> extract_answer("6 * 7 is <answer>42</answer>")
        '42'
        >>> extract_answer(r"so \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
        >>> extract_answer("She has 3 + 4 = 7 left.\n#### 7")
        '7'
    """
    tagged = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL | re.IGNORECASE)
    answer = _last_box(tagged[-1] if tagged else text)
    if answer is None and tagged:
        answer = tagged[-1]
    if answer is None and (hashes := re.search(r"(?<!#)####(?!#)(.*)", text)):
        answer = hashes[1]
    if answer is None and last_number and (numbers := _LAST_NUMBER.findall(text.translate(_MINUS))):
        answer = numbers[-1]
    return (answer or "").strip() or None


def same_answer(a: str, b: str, tolerance: float = TOLERANCE) -> bool:
    r"""Return whether two answers have the same meaning.

    Numbers are compared by value, `|a - b| <= tolerance * max(|a|, |b|)`, with or without thousands
    separators (`1,234`; a comma is never a decimal point), currency signs, exponents (`1.2e3`) and
    fractions (`1/2`, LaTeX's `\frac`). `50%` equals both `50` and `0.5`. A unit is ignored if only
    one answer has a unit; otherwise the units must be equal and are not converted (`5 km` is not
    `5 m`). A lower-case letter that is not a common unit is a variable: `2x` is not `2`.

    A single letter is a choice: `B`, `(b)` and `B. 12 apples` are the same answer. All other
    answers are compared as text; case, surrounding punctuation and white space do not matter.

    Example:
        >>> same_answer("$1,234.50", "1234.5"), same_answer("1/2", "50%"), same_answer("(B)", "b")
        (True, True, True)
        >>> same_answer("5 km", "5 m"), same_answer("12", "13")
        (False, False)
    """
    if not tolerance >= 0:
        raise ValueError(
            f"tolerance is {tolerance}; expected a number of at least 0, such as {TOLERANCE:g}"
        )
    a, b = _cleaned(a), _cleaned(b)
    if a == b:
        return True
    x, y = _number(a), _number(b)
    if x is not None and y is not None:
        if x.unit and y.unit and x.unit != y.unit:
            return False
        scales = {1.0} if x.percent == y.percent else {1.0, 0.01}
        left, right = (x, y) if x.percent else (y, x)
        return any(math.isclose(left.value * s, right.value, rel_tol=tolerance) for s in scales)
    if x is not None or y is not None:
        return False
    if _folded(a) == _folded(b):
        return True
    p, q = _CHOICE.fullmatch(a), _CHOICE.fullmatch(b)
    if not p or not q or p[1].casefold() != q[1].casefold():
        return False
    return not p[2] or not q[2] or same_answer(p[2], q[2], tolerance)


@dataclass(frozen=True)
class AnswerScores:
    """Counts of a model's questions, answers and correct answers."""

    n: int  # questions, including those whose generation failed
    answered: int  # generated texts that contain an answer (`extract_answer`)
    right: int
    faults: tuple[str, ...] = ()  # one sentence for each question whose generation failed

    @classmethod
    def of(
        cls,
        answers: Sequence[str | None],
        references: Sequence[str],
        *,
        tolerance: float = TOLERANCE,
        faults: Sequence[str] = (),
    ) -> "AnswerScores":
        """Compare each answer (None if the text had no answer) with its reference."""
        pairs = [(a, b) for a, b in zip(answers, references, strict=True) if a is not None]
        right = sum(same_answer(a, b, tolerance) for a, b in pairs)
        return cls(len(references), len(pairs), right, tuple(faults))

    @property
    def accuracy(self) -> float | None:
        """Share of all questions that were answered correctly; None without questions."""
        return self.right / self.n if self.n else None

    @property
    def answer_rate(self) -> float | None:
        """Share of all questions that were answered; None without questions."""
        return self.answered / self.n if self.n else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the accuracy (Wilson, 1927); None without questions."""
        if not self.n:
            return None
        bounds = scipy.stats.binomtest(self.right, self.n).proportion_ci(method="wilson")
        return float(bounds.low), float(bounds.high)


class _Number(NamedTuple):
    value: float
    percent: bool
    unit: str  # "" for none


def _last_box(text: str) -> str | None:
    for start in reversed([m.end() for m in re.finditer(r"\\(?:boxed|fbox) *\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
    return None


def _cleaned(text: str) -> str:
    """Normalize signs, spaces, currencies and LaTeX."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf) *\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dt]?frac *\{([^{}]*)\} *\{([^{}]*)\}", r" \1/\2", text)
    text = text.replace("{,}", ",").replace(r"\,", " ").replace(r"\!", "").replace(r"\%", "%")
    text = re.sub(r"\\?[$€£¥₹]", "", text).translate(_MINUS)
    return " ".join(text.split()).strip(_MARKS)


def _folded(text: str) -> str:
    """Prepare text for comparison; text that is only punctuation is not changed."""
    return text.rstrip(_END).casefold() or text


def _number(text: str) -> _Number | None:
    """Parse an answer that is one number, with or without a unit."""
    match = _NUMBER.fullmatch(text.rstrip(_END))
    if match is None:
        return None
    first, _, rest = match["unit"].strip().partition(" ")
    scale = _SCALES.get(first.casefold())
    unit = rest if scale else f"{first} {rest}".strip()
    if unit and not (unit[0].isalpha() or unit[0] == "°"):
        return None
    is_variable = len(unit) == 1 and unit.islower() and unit not in "ghlms"
    if is_variable or not {"and", "or"}.isdisjoint(unit.split()):
        return None
    if match["plain"]:
        value = _decimal(match["plain"])
    elif under := _decimal(match["under"]):
        value = _decimal(match["over"]) / under
    else:
        return None
    value *= (scale or 1) * (-1 if match["sign"] == "-" else 1)
    # Case distinguishes mW from MW, and means nothing in a unit that is spelled out.
    return _Number(value, bool(match["percent"]), unit if len(unit) <= 2 else unit.casefold())


def _decimal(text: str) -> float:
    return float(text.replace(",", ""))
