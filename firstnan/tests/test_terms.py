"""Loss terms of shared weights: the state and the messages of each."""

import math

import pytest
import torch

from firstnan._terms import LossTerms
from firstnan.faults import Stage, Thresholds

FEW = Thresholds(restore_after=3, dead_after=4)


def fed(*steps, name="kd"):
    """Steps of one or more `(loss, norm)`; the terms, and the events of each step."""
    terms, events = LossTerms(FEW, {stage: stage.kind.advice for stage in Stage}), []
    for number, batches in enumerate(steps):
        for loss, norm in batches:
            terms.judge(name, torch.tensor(loss), torch.tensor(norm))
        events.append(terms.record(number))
        terms.forget()
    return terms, events


@pytest.mark.parametrize(
    ("loss", "norm", "stage", "value"),
    [(math.inf, 1.0, "loss", math.inf), (2.0, -math.inf, "gradient", -math.inf)],
)
def test_an_event_of_a_term_shows_the_number_that_was_bad(loss, norm, stage, value):
    _, ((event,),) = fed([(loss, norm)])
    assert (event.step, event.part, event.stage, event.value) == (0, "kd", stage, value)
    assert event.action == "cut out"


def test_the_first_bad_batch_of_a_step_is_the_one_that_counts():
    terms, (events,) = fed([(1.0, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, 1.0)])
    assert [(event.stage, event.value) for event in events] == [("loss", math.inf)]
    assert terms.health["kd"].streak == 1


def test_a_dead_term_is_reported_but_not_cut_out():
    terms, events = fed(*[[(5.0, 0.0)]] * 5)
    assert [len(found) for found in events] == [0, 0, 0, 1, 0]
    ((event,),) = events[3:4]
    assert (event.stage, event.action, event.value) == ("dead", "reported", 0.0)
    assert terms.health["kd"].skipped == 0
