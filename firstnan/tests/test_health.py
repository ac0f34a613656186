import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstnan.events import Event
from firstnan.faults import Observation, Stage, Thresholds, is_healthy
from firstnan.health import Health, rescale_
from tests.faults.matrix import row

DEFAULT = Thresholds()


def feed(health, norms, losses=None, thresholds=DEFAULT):
    """The stages of some steps of one part."""
    losses = [1.0] * len(norms) if losses is None else losses
    seen = []
    for norm, loss in zip(norms, losses, strict=True):
        norm, loss = torch.tensor([float(norm)]), torch.tensor([float(loss)])
        stage = Observation(health, loss, norm, thresholds).stage()
        health.record_(stage, norm, thresholds)
        seen.append(Stage(int(stage)))
    return seen


BAD = st.sampled_from([math.nan, math.inf, 1e30, 0.0, 1e6])


@given(
    struck=st.dictionaries(st.integers(30, 199), BAD, max_size=60),
    scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e4]),
    seed=st.integers(0, 100),
)
@settings(max_examples=20, deadline=None)
def test_no_fault_pollutes_the_median(struck, scale, seed):
    """Whatever comes between, a healthy norm passes and a spike of 1000 does not."""
    g = torch.Generator().manual_seed(seed)
    norms = (scale * (torch.randn(200, generator=g) * 0.3).exp()).tolist()
    for at, value in struck.items():
        # Runs of spikes are another matter: they are a new level after a while.
        if not any(at - i in struck for i in range(1, 5)):
            norms[at] = value * (scale if value == 1e6 else 1)
    health = Health.fresh(1)
    stages = feed(health, norms)
    healthy = [s for i, s in enumerate(stages) if i not in struck]
    assert set(healthy) == {Stage.HEALTHY}
    assert abs(float(health.level) - math.log(scale)) < 1.0
    assert feed(health, [1000 * scale]) == [Stage.SPIKE]


def test_the_earliest_stage_is_the_cause():
    health = Health.fresh(5)
    loss = torch.tensor([1.0, math.nan, 1.0, math.inf, 1.0])
    norm = torch.tensor([1.0, math.nan, math.inf, 1.0, 1.0])
    stage = Observation(health, loss, norm, DEFAULT).stage()
    assert stage.tolist() == [0, Stage.LOSS, Stage.GRADIENT, Stage.LOSS, 0]
    health.retired[4] = True
    assert Observation(health, loss, norm, DEFAULT).stage()[4] == Stage.RETIRED
    assert is_healthy(stage).tolist() == [True, False, False, False, True]


def test_the_numbers_of_the_stages_are_those_that_checkpoints_hold():
    """Version 0.1 wrote these; a new kind of fault takes the next number."""
    old = {"HEALTHY": 0, "LOSS": 2, "GRADIENT": 3, "SPIKE": 4, "DEAD": 5}
    old |= {"RETIRED": 6, "OVERFLOW": 7}
    numbers = {stage.name: int(stage) for stage in Stage}
    old |= {"WEIGHT": 10, "LARGE": 12, "BUFFER": 13}
    assert numbers == old  # 8, 9 and 11 were kinds of earlier commits; 1 is a caller's


def test_an_event_has_its_kind_of_fault():
    for stage in Stage:
        assert Stage.of(stage.event(3, "head 1")) is stage
    assert Stage.of(Event(3, "head 1", "escalation", "10 bad steps in a row", "retired")) is None


def test_a_median_is_trusted_the_more_the_more_norms_it_is_of():
    for norms, jump, stage in (
        (19, 9e3, Stage.HEALTHY),
        (20, 9e3, Stage.SPIKE),
        (0, 1e30, Stage.HEALTHY),  # nothing to judge it by
        (1, 5e4, Stage.HEALTHY),
        (1, 1e6, Stage.SPIKE),
        (4, 5e4, Stage.HEALTHY),
        (4, 1e6, Stage.SPIKE),
        (5, 5e4, Stage.SPIKE),  # no first steps of training come to this
    ):
        health = Health.fresh(1)
        feed(health, [1.0] * norms)
        assert feed(health, [jump]) == [stage]


def test_spikes_that_do_not_end_become_the_new_level():
    health = Health.fresh(1)
    assert set(feed(health, [1.0] * 40)) == {Stage.HEALTHY}
    stages = feed(health, [5000.0] * 8)
    assert stages == [Stage.SPIKE] * 5 + [Stage.HEALTHY] * 3
    assert health.skipped.item() == 5 and health.streak.item() == 0


@pytest.mark.parametrize("first", [1e8, 1e-8])
def test_the_median_gets_there_from_a_wild_first_norm(first):
    health = Health.fresh(1)
    feed(health, [first] + [1.0] * 39)
    assert abs(float(health.level)) < 1.1 and feed(health, [1e3]) == [Stage.SPIKE]


def test_an_overflow_of_the_loss_scale_is_skipped_but_costs_no_patience():
    health, norm = Health.fresh(2), torch.tensor([math.inf, math.inf])
    scale = torch.tensor([16.0, 1.0])
    for _ in range(12):
        stage = Observation(health, torch.ones(2), norm, DEFAULT, scale=scale).stage()
        health.record_(stage, norm, DEFAULT)
    assert stage.tolist() == [Stage.OVERFLOW, Stage.GRADIENT]
    assert health.skipped.tolist() == [12, 12] and health.streak.tolist() == [0, 12]
    assert health.escalate(DEFAULT) == ({1: "restore"}, "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("spike_factor", value) for value in (1.0, math.nan, math.inf, None)],
        *[("restore_after", value) for value in (0, -3, 2.5, None, True, "3")],
        *[("stop_after", value) for value in (0, 1.5)],
        *[("max_norm", value) for value in (0.0, math.nan, math.inf, "2", True)],
    ],
)
def test_a_threshold_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}; expected"):
        Thresholds(**{name: value})


def test_a_part_climbs_the_ladder_and_recovers():
    few = Thresholds(restore_after=2, forgive_after=4)
    health = Health.fresh(3)
    sick = torch.tensor([0, int(Stage.LOSS), 0], dtype=torch.int8)
    well, norm = torch.zeros(3, dtype=torch.int8), torch.ones(3)

    def bad(n=2):
        for _ in range(n):
            health.record_(sick, norm, few)
        return health.escalate(few)[0]

    assert bad(1) == {} and bad(1) == {1: "restore"}
    assert bad() == {1: "reinitialize"}
    for _ in range(4):
        health.record_(well, norm, few)
    assert bad() == {1: "restore"}  # forgiven: it begins again at the lowest rung
    assert bad() == {1: "retire"}  # but is re-initialised only once
    assert health.retired.tolist() == [False, True, False]
    retired = torch.tensor([0, int(Stage.RETIRED), 0], dtype=torch.int8)
    skipped = int(health.skipped[1])
    health.record_(retired, norm, few)
    assert health.escalate(few) == ({}, "") and int(health.skipped[1]) == skipped


def bad_steps(health, n, thresholds, which=None):
    """`n` steps whose losses are not finite: of all parts, or of those in `which`."""
    sick = torch.full_like(health.streak, int(Stage.LOSS), dtype=torch.int8)
    if which is not None:
        sick[[part for part in range(len(sick)) if part not in which]] = 0
    for _ in range(n):
        health.record_(sick, torch.ones(len(sick)), thresholds)


def test_a_run_stops_below_the_minimum_of_healthy_parts():
    few, health = Thresholds(restore_after=2, min_parts=2), Health.fresh(4)
    for part in (0, 1):
        for _ in range(3):
            bad_steps(health, 2, few, {part})
            actions, _ = health.escalate(few)
        assert actions == {part: "retire"}
    for _ in range(2):
        bad_steps(health, 2, few, {2})
        health.escalate(few)
    bad_steps(health, 2, few, {2})
    actions, why = health.escalate(few)
    assert not actions and re.search("only 1 of 4 parts are left .* at least 2", why)
    assert health.retired.tolist() == [True, True, False, False]  # what was not done is not noted


def test_a_run_stops_at_stop_after_bad_steps_of_every_part_and_no_earlier():
    impatient, health = Thresholds(restore_after=99, stop_after=5), Health.fresh(2)
    bad_steps(health, 1, impatient, {0})
    for _ in range(4):
        bad_steps(health, 1, impatient)
        assert health.escalate(impatient) == ({}, "")  # part 1 was well not so long ago
    bad_steps(health, 1, impatient)
    assert health.escalate(impatient) == ({}, "no part had a healthy step in the last 5 steps")


def test_a_part_is_restored_in_time_where_stopping_would_take_longer():
    patient, health = Thresholds(restore_after=2, stop_after=50), Health.fresh(2)
    bad_steps(health, 2, patient, {0})
    assert health.escalate(patient) == ({0: "restore"}, "")


@pytest.mark.parametrize("begun_anew", [False, True])
def test_a_reinitialized_part_is_judged_without_its_history(begun_anew):
    few, health = Thresholds(restore_after=2, forgive_after=99), Health.fresh(2)
    first = health.rows(slice(0, 1))
    feed(first, [1.0] * 40, thresholds=few)
    health.restored[0] = begun_anew
    bad_steps(health, 2, few, {0})
    assert health.escalate(few)[0] == {0: "reinitialize" if begun_anew else "restore"}
    stages = feed(first, [1e12] * 25, thresholds=few)
    assert (Stage.SPIKE in stages) != begun_anew


@row(163)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6])
def test_spikes_among_the_first_steps_are_found_each(scale):
    norms = [1.0, 1e6, 0.8, 1e6, 0.6, 0.5, 1e6]
    stages = feed(Health.fresh(1), [scale * norm for norm in norms])
    assert [i for i, stage in enumerate(stages) if stage == Stage.SPIKE] == [1, 3, 6]


def test_first_norms_that_fall_or_grow_quickly_are_all_healthy():
    for norms in (
        [10.0**-i for i in range(12)],  # as gradients do in the first steps
        [1e8, 1.0, 1e-3, 1.0, 2.0, 5.0],
        [3.0**i for i in range(20)],
    ):
        assert set(feed(Health.fresh(1), norms)) == {Stage.HEALTHY}


def test_small_first_norms_cost_at_most_two_steps():
    """As at a saddle, which one step of Adam leaves however small the gradient was."""
    stages = feed(Health.fresh(1), [1e-9, 1.0, 1.1, 0.9, 1.0, 1.2, 1.0])
    assert stages == [Stage.HEALTHY, *[Stage.SPIKE] * 2, *[Stage.HEALTHY] * 4]


def test_a_loss_scale_halves_on_overflow_and_doubles_after_many_updates():
    scale = torch.tensor([8.0, 8.0, 8.0, 8.0, 1.0, 65536.0, 8.0])
    healthy = torch.tensor([True, True, False, False, False, True, True])
    overflow = torch.tensor([False, False, True, False, True, False, False])
    steps = torch.tensor([499, 498, 499, 499, 499, 499, 500])
    rescale_(scale, healthy, overflow, steps)
    # grown, too early, halved, sick for another reason, floor, ceiling, too late
    assert scale.tolist() == [16.0, 8.0, 4.0, 8.0, 1.0, 65536.0, 8.0]
