"""Answers in text: found, compared by meaning, and counted."""

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssl_kd.language.evaluate.answers import AnswerScores, extract_answer, same_answer

SAME = [
    ("  **42** ", "42"),
    ("1{,}234", "1234"),
    ("-$5", "$-5"),
    ("€ 3.50", "3.5 €"),
    (r"\$18.00", "18"),
    (".5", "0.5"),
    ("1/2", "0.5"),
    (r"\frac{1}{2}", "0.5"),
    (r"-\dfrac{3}{4}", "-0.75"),
    ("1/3", "0.33333"),
    ("5 million", "5,000,000"),
    ("50%", "0.5"),
    (r"12.5\%", "12.5 percent"),
    ("5 Hours", "5 hours."),
    ("9.81 m/s^2", "9.81"),
    ("20°", "20"),
    (r"7\text{ hours}", "7 hours"),
    ("10 dollars", "$10"),
    ("B", "(b)"),
    ("B.", "b)"),
    (r"\text{C}", "C"),
    ("Option D", "D"),
    ("B. 12 apples", "B"),
    ("B) 12 apples", "B: 12"),
    ("Paris", " paris. "),
    ('"New   York"', "new york"),
    ("STRASSE", "straße"),
    ("x = 3", "X = 3"),
    ("123456.7", "123457"),
    ("", "  "),
]
DIFFERENT = [
    ("42", "43"),
    ("42", "-42"),
    ("1000", "1001"),
    ("1,234", "1.234"),
    ("1,23", "1.23"),  # a comma is no decimal point
    ("1,23", "123"),
    ("0.5", "50"),
    ("0.50%", "0.5e-4"),
    ("1/2", "2/1"),
    ("1/0", "1/1"),
    ("1 1/2", "11/2"),
    ("5 km", "5 m"),
    ("5 mW", "5 MW"),
    ("5 million", "5"),
    ("2x", "2"),
    ("3i", "3"),
    (r"3\pi", "3"),
    ("5²", "5"),
    ("2½", "2"),
    ("4 or 5", "4"),
    ("2 and a half", "2"),
    ("10:30", "10"),
    ("2024-01-05", "2024"),
    ("(1, 2)", "1"),
    ("1/2/3", "0.5"),
    ("A", "B"),
    ("A. Paris", "A. London"),
    ("A", "apple"),
    ("A", "1"),
    ("Paris", "Paris, Texas"),
    ("yes", "no"),
    ("0", "0.0001"),
    ("1e400", "5"),
    ("", "0"),
    ("...", "!"),
]


@pytest.mark.parametrize(("a", "b"), SAME)
def test_same_answer(a, b):
    assert same_answer(a, b) and same_answer(b, a)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_different_answers(a, b):
    assert not same_answer(a, b) and not same_answer(b, a)


def test_tolerance_is_relative_and_stated():
    assert same_answer("10000", "10001") and not same_answer("10000", "10001", tolerance=0)
    assert same_answer("100", "104", tolerance=0.05) and not same_answer("0.0", "0.04", 0.05)
    for wrong in (-1e-4, math.nan):
        with pytest.raises(ValueError, match="tolerance is .*; expected a number of at least 0"):
            same_answer("1", "1", tolerance=wrong)


PIECES = st.sampled_from(
    [*"0123456789", *".,-+%$/ ()eEABabxm²½", "−", "\\frac{", "}", " million", "1e999", "…", "10^"]
)
ANSWERS = st.one_of(st.text(), st.lists(PIECES, max_size=12).map("".join))


@given(ANSWERS, ANSWERS)
@example("1" * 400 + "/" + "1" * 400, "1e400")
def test_same_answer_is_reflexive_and_symmetric(a, b):
    assert same_answer(a, a) and same_answer(b, b)
    assert same_answer(a, b) == same_answer(b, a)


@given(st.floats(-1e15, 1e15).filter(lambda x: abs(x) >= 1 or x == 0), st.booleans())
def test_a_number_is_itself_however_it_is_written(x, typographic):
    sign, size = ("-" if x < 0 else ""), abs(x)
    for written in (
        repr(x),
        json.dumps(x),
        f"{x:f}",
        f"{x:.8e}",
        f"{x:,.6f}",
        f"{x:+.6f}",
        f"{sign}${size:,.6f}",
        f"{x:.6f}%",
        f"{x:.6f} apples",
        f"{x:.6f}.".replace("..", "."),
    ):
        assert same_answer(written.replace("-", "−") if typographic else written, repr(x)), written


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so it is <answer>42</answer>.", "42"),
        ("<ANSWER>\n new york\n</ANSWER>", "new york"),
        ("<answer>3</answer>, no: <answer>4</answer>", "4"),
        ("<answer>a <answer>5</answer>", "5"),
        (r"<answer>it is $\boxed{7}$</answer> \boxed{8}", "7"),
        (r"thus \boxed{\frac{1}{\sqrt{2}}} holds", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{1} and then \boxed{2", "1"),
        (r"\fbox{9}", "9"),
        ("2 + 3 = 5\n#### 5", "5"),
        ("#### 1,080\nQuestion: what else?\n#### 12", "1,080"),
        ("#### $18 \nmore", "$18"),
        ("<answer>unfinished", None),
        ("<answer> </answer>", None),
        ("####", None),
        ("##### heading", None),
        (r"\boxed{", None),
        ("there are 12 of them", None),
        ("", None),
    ],
)
def test_answers_are_found(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She pays $1,234.50 in total.", "$1,234.50"),
        ("5-3 is 2, not \u22122", "-2"),
        ("from 10 to 3.", "3"),
        ("half of it, 1/2", "1/2"),
        ("there are 3 4", "4"),
        ("it grows by 12.5%.", "12.5%"),
        ("6e23 of them", "6e23"),
        ("version v2.5", None),
        ("<answer>1</answer> or 2", "1"),
        ("none at all", None),
    ],
)
def test_the_last_number_only_on_request(text, answer):
    assert extract_answer(text, last_number=True) == answer


def test_scores_count_every_question():
    references = ["1", "2", "3", "4"]
    scores = AnswerScores.of(["1.0", "5", None, "4"], references, faults=["question 3: no"])
    assert (scores.n, scores.answered, scores.right) == (4, 3, 2)
    assert (scores.accuracy, scores.answer_rate) == (0.5, 0.75)
    assert scores.faults == ("question 3: no",)
    assert AnswerScores.of(["104"], ["100"], tolerance=0.1).accuracy == 1
    none = AnswerScores.of([], [])
    assert none.accuracy is None and none.answer_rate is None and none.interval is None


@pytest.mark.parametrize(("k", "n"), [(0, 1), (0, 50), (7, 9), (1319, 1319)])
def test_the_interval_solves_the_score_equation(k, n):
    interval = AnswerScores(n, n, k).interval
    assert interval is not None and 0 <= interval[0] <= k / n <= interval[1] <= 1
    for bound in interval:  # (p - x)^2 = z^2 x (1 - x) / n
        gap = (k / n - bound) ** 2 - 1.959963984540054**2 * bound * (1 - bound) / n
        assert abs(gap) < 1e-12


def test_references_of_gsm8k_are_found_and_equal_themselves(shared_data):
    lines = (shared_data / "gsm8k" / "test.jsonl").read_text().splitlines()
    answers = [extract_answer(json.loads(line)["answer"]) for line in lines]
    assert len(answers) == 100 and all(answers)
    assert all(same_answer(a, f"${float(a.replace(',', '')):.2f}") for a in answers)
