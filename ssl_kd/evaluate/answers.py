"""Whether a generated answer is the right one: found in the text, and compared with tolerance.

math-verify (0.9) compares formulas that this module takes for text. It is not used, since it looks
for a number inside an answer: of the 35 pairs of different answers in our tests it takes 13 for the
same (`2x` and `2`, `2024-01-05` and `2024`, `A. Paris` and `A. London`), and words for none.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

TOLERANCE = 1e-4  # relative

# 1,234,567.8 or 12,34,567 or 1 234 567 or 1'234 or 1234.5 or .5
_WHOLE = r"[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}|[0-9]{1,3}(?:[ '][0-9]{3})+|[0-9]+"
_DECIMAL = rf"(?:(?:{_WHOLE})(?:\.[0-9]*)?|\.[0-9]+)"
_POWER = r" *(?:[x×*·]|\\times|\\cdot) *10\^\{?(?P<power>[+-]?[0-9]+)\}?"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?) *"
    rf"(?:(?:(?P<mixed>[0-9]+) )?(?P<over>{_DECIMAL}) */ *(?P<under>{_DECIMAL})"
    rf"|(?P<plain>{_DECIMAL})(?:[eE](?P<e>[+-]?[0-9]+)|{_POWER})?)"
    rf" *(?P<percent>%?) *(?P<unit>(?:[^\W\d_]|[°%/·*⁻.\- ]|\^-?[0-9])*)"
)
_LAST_NUMBER = re.compile(
    r"(?<![\w.])[+-]?[$€£¥₹]?"
    r"(?:(?:[0-9]+ )?[0-9]+/[0-9]+|[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)%?"
)
_SCALES = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_CHOICE = re.compile(r"(?:(?:option|choice|answer):? *)?\(?([a-z])(?:[).:](.*))?", re.IGNORECASE)
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
# Every minus and hyphen of Unicode, the typographic apostrophe, the fractions of one character.
_SIGNS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-")
    | {"\u2019": "'", "½": " 1/2", "¼": " 1/4", "¾": " 3/4"}
)
_MARKS = " *_`\"“”'"  # markdown and quotes around an answer


def extract_answer(text: str, *, last_number: bool = False) -> str | None:
    r"""Find the final answer in a text.

    Tried in this order: the last `<answer>…</answer>` (tags in any case), the last `\boxed{…}`
    (inside the tags first, then anywhere; nested braces are kept), what follows the first `####` on
    its line (GSM8K: a model that does not stop after it goes on to invent further questions).

    Args:
        text: What a model wrote, or a reference solution.
        last_number: Take the last number in the text where nothing else is found. A model that
            names no answer then gets one by chance: off unless asked for.

    Returns:
        The answer without surrounding space, or None where there is none or it is empty.

    References:
        Cobbe et al., "Training Verifiers to Solve Math Word Problems" (GSM8K), 2021.
        Hendrycks et al., "Measuring Mathematical Problem Solving With the MATH Dataset", 2021.

    Example:
        >>> extract_answer("6 * 7 is <answer>42</answer>")
        '42'
        >>> extract_answer(r"so \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
        >>> extract_answer("She has 3 + 4 = 7 left.\n#### 7")
        '7'
    """
    tagged = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL | re.IGNORECASE)
    found = _last_box(tagged[-1] if tagged else text)
    if found is None and tagged:
        found = tagged[-1]
    if found is None and (hashes := re.search(r"(?<!#)####(?!#)(.*)", text)):
        found = hashes[1]
    if found is None and last_number and (numbers := _LAST_NUMBER.findall(text.translate(_SIGNS))):
        found = numbers[-1]
    return (found or "").strip() or None


def same_answer(a: str, b: str, tolerance: float = TOLERANCE) -> bool:
    r"""Whether two answers say the same thing.

    Numbers are compared by value, `|a - b| <= tolerance * max(|a|, |b|)`: with or without thousands
    separators (`1,234`, `1 234`, `1'234`; a comma is never a decimal point), currency signs,
    Unicode minus, exponents (`1.2e3`, `1.2 × 10^3`), fractions (`1/2`, `1 1/2`, LaTeX's `\frac`)
    and `thousand` to `trillion`. `50%` equals both `50` and `0.5`. A unit behind a number is
    ignored where the other answer has none; two units must be the same (`5 km` is not `5 m`;
    nothing is converted). A lower-case letter that is no common unit is a variable: `2x` is not
    `2`.

    A letter alone is a choice: `B`, `(b)` and `B. 12 apples` are the same. Everything else is text,
    compared without case, surrounding punctuation and differences of white space.

    Args:
        a: One answer.
        b: The other; the order does not matter.
        tolerance: Largest relative difference of two equal numbers, at least 0. With the default of
            1e-4, whole numbers that differ by one are the same from 10,000 on: 0 tells them apart.

    Returns:
        True where they are the same.

    Raises:
        ValueError: If the tolerance is negative or not a number.

    Example:
        >>> same_answer("$1,234.50", "1234.5"), same_answer("1/2", "50%"), same_answer("(B)", "b")
        (True, True, True)
        >>> same_answer("5 km", "5 m"), same_answer("12", "13")
        (False, False)
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be a number from 0, got {tolerance}")
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
    p, q = _choice(a), _choice(b)
    if p is None or q is None or p[0] != q[0]:
        return False
    return not p[1] or not q[1] or same_answer(p[1], q[1], tolerance)


@dataclass(frozen=True)
class AnswerScores:
    """How many questions were answered, and how many rightly.

    Args:
        n: Questions.
        answered: Of those, how many had an answer that could be extracted.
        right: Of those, how many were right.
        faults: One sentence for each question whose generation failed. Such a question counts as
            not answered, and stays in `n`.
    """

    n: int
    answered: int
    right: int
    faults: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        answers: Sequence[str | None],
        references: Sequence[str],
        *,
        tolerance: float = TOLERANCE,
        faults: Sequence[str] = (),
    ) -> "AnswerScores":
        """Compare answers, None where there is none, with the references one by one."""
        given = [(a, b) for a, b in zip(answers, references, strict=True) if a is not None]
        right = sum(same_answer(a, b, tolerance) for a, b in given)
        return cls(len(references), len(given), right, tuple(faults))

    @property
    def accuracy(self) -> float | None:
        """Right answers per question, unanswered ones included; None without questions."""
        return self.right / self.n if self.n else None

    @property
    def answer_rate(self) -> float | None:
        """Share of the questions with an extractable answer; None without questions."""
        return self.answered / self.n if self.n else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the accuracy; None without questions."""
        return wilson_interval(self.right, self.n) if self.n else None


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95 % confidence interval of a share; sensible for few samples and at 0 and 1.

    Args:
        successes: From 0 to n.
        n: Samples, at least 1.

    Returns:
        Lower and upper bound in [0, 1].

    References:
        Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", 1927.

    Example:
        >>> low, high = wilson_interval(5, 10)
        >>> round(low, 3), round(high, 3)
        (0.237, 0.763)
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"expected 0 <= successes <= n and n >= 1, got {successes} of {n}")
    z, share = 1.959963984540054, successes / n
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    total = 1 + z * z / n
    # The bounds lie around the share; at 0 and 1 rounding would not know.
    low, high = (centre - half) / total, (centre + half) / total
    return max(0.0, min(share, low)), min(1.0, max(share, high))


class _Number(NamedTuple):
    value: float
    percent: bool
    unit: str  # "" where there is none


def _last_box(text: str) -> str | None:
    r"""What stands in the last `\boxed{…}` that is closed."""
    for start in reversed([m.end() for m in re.finditer(r"\\(?:boxed|fbox) *\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
    return None


def _cleaned(text: str) -> str:
    """One spelling for signs, spaces, currencies and LaTeX."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf) *\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dt]?frac *\{([^{}]*)\} *\{([^{}]*)\}", r" \1/\2", text)
    text = text.replace("{,}", ",").replace(r"\,", " ").replace(r"\!", "").replace(r"\%", "%")
    text = re.sub(r"\\?[$€£¥₹]", "", text).translate(_SIGNS)
    text = re.sub("10([⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+)", lambda m: "10^" + m[1].translate(_SUPERSCRIPT), text)
    return " ".join(text.split()).strip(_MARKS)


def _folded(text: str) -> str:
    """Text for comparison; what is nothing but punctuation stays as it is."""
    return text.rstrip(".,;:!?" + _MARKS).casefold() or text


def _number(text: str) -> _Number | None:
    """The value of an answer that is one number; None where it is something else."""
    match = _NUMBER.fullmatch(text.rstrip(".,;:!?" + _MARKS))
    if match is None:
        return None
    first, _, rest = match["unit"].strip().partition(" ")
    scale = _SCALES.get(first.casefold())
    unit = rest if scale else f"{first} {rest}".strip()
    if unit and not (unit[0].isalpha() or unit[0] == "°"):
        return None
    if len(unit) == 1 and unit.islower() and unit not in "ghlms":
        return None
    if not {"and", "or"}.isdisjoint(unit.split()):
        return None
    exponent = match["e"] or match["power"]
    if match["plain"]:
        value = _decimal(match["plain"], exponent or "0")
    elif under := _decimal(match["under"]):
        value = _decimal(match["mixed"] or "0") + _decimal(match["over"]) / under
    else:
        return None
    value *= (scale or 1) * (-1 if match["sign"] == "-" else 1)
    # Case tells mW from MW, and nothing where a unit is spelt out.
    return _Number(value, bool(match["percent"]), unit if len(unit) <= 2 else unit.casefold())


def _decimal(text: str, exponent: str = "0") -> float:
    # As one literal: 10.0 ** 400 raises an OverflowError, "1e400" is inf.
    return float(re.sub("[, ']", "", text) + "e" + exponent)


def _choice(text: str) -> tuple[str, str] | None:
    """Letter of a multiple choice, and the text behind it."""
    match = _CHOICE.fullmatch(text)
    return (match[1].casefold(), (match[2] or "").strip()) if match else None
