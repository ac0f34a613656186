"""The guard names the operation and the cause of public bugs, and docs/bugs.md quotes it."""

import re

import pytest
import torch

from benchmarks.public_bugs import PAGE, explain_all, is_right, updated
from firstnan.diagnosis import diagnose
from firstnan.microscope import Microscope
from firstnan.tests.public_bugs import BUGS

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom")
WRONG = {"meta-pytorch/torchrec!3891"}  # torch raises an error, and nothing is NaN


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.thread)
def test_the_operation_of_a_public_bug_is_named_with_its_cause(bug):
    _, report = explain_all(bug)
    assert is_right(bug, report) != (bug.thread in WRONG), report


def test_the_page_of_public_bugs_matches_the_guard():
    """`python -m benchmarks.public_bugs` writes it."""
    page = PAGE.read_text(encoding="utf-8")
    assert len(BUGS) == 25 and all(page.count(f"\n| [{bug.thread}](") == 1 for bug in BUGS)
    if torch.__version__.startswith(re.search(r"torch ([\d.]+)\)", page)[1]):
        exact, quoted = (re.sub(r"[\d.]+e\+\d+", "", text) for text in (updated(page), page))
        assert exact == quoted


@pytest.mark.parametrize(
    ("loss", "start", "words"),
    [
        (lambda x: (x.half() - 1e20).float().softmax(-1).sum(), 1, "float16 ends at"),  # apex#93
        (lambda x: torch.log1p(-x).exp().sum(), 1, "exact 0"),  # GLiNER2#155
    ],
)
def test_the_cause_of_a_public_kernel_is_named(loss, start, words):
    x = torch.full((3,), float(start), requires_grad=True)
    with Microscope() as scope:
        (y := loss(x)).backward()
    assert words in diagnose(scope.fault(y, x.grad)).words
