"""Recovery of parts: its reports and its actions, on two numbers per part."""

import math

import torch

from firstnan.faults import Stage, Thresholds
from firstnan.health import Health
from firstnan.recovery import Recovery

FEW = Thresholds(restore_after=3)
N = 3


class Bench:
    """Parts 0 to 2, whose weights begin at the part's number."""

    note = ""

    def __init__(self, thresholds=FEW):
        self.weights = torch.arange(N).float()[:, None].repeat(1, 2)
        self.good = self.weights.clone()
        self.names = [f"part {i}" for i in range(N)]
        self.begun = []
        self.health = Health.fresh(N)
        self.recovery = Recovery(self, self.health, {})
        self.thresholds = thresholds

    def finite(self):
        return self.weights.isfinite().all(1).tolist()

    def restore(self, part) -> int | None:
        self.weights[part] = self.good[part]
        return 0

    def reinitialize(self, part, step):
        self.begun.append((part, step))

    def step(self, step, sick=(), stage=Stage.LOSS):
        """One step of parts that are sick or not; the events of it."""
        stages = torch.tensor([int(stage) if i in sick else 0 for i in range(N)], dtype=torch.int8)
        norm = torch.tensor([7.0 + i for i in range(N)])
        self.health.record_(stages, norm, self.thresholds)
        return self.recovery.report(step, stages, torch.full((N,), math.nan), norm)


def test_every_step_of_every_part_is_counted_once_healthy_or_not():
    bench = Bench()
    assert bench.step(0) == [] == bench.step(1)
    bench.step(2, {1})
    assert bench.recovery.counts.sum(1).tolist() == [3, 3, 3]
    assert bench.recovery.counts[:, Stage.HEALTHY].tolist() == [3, 2, 3]
    assert bench.recovery.counts[:, Stage.LOSS].tolist() == [0, 1, 0]


def test_a_stopped_run_reports_whether_it_had_a_good_state():
    ends = []
    for restore in (lambda part: 0, lambda part: None):
        bench = Bench()
        bench.restore = restore
        for step in range(6):
            bench.step(step, {0, 1, 2})
            events, why = bench.recovery.escalate(step, FEW)
        ends.append((why, {event.action for event in events if event.part != "run"}))
    message = "no part had a healthy step in the last 3 steps"
    assert ends == [
        (f"{message}; the last good state was restored", {"restored to its state before step 1"}),
        (
            f"{message}; there is no good state to restore",
            {"left unchanged: there is no good state to restore"},
        ),
    ]


def test_the_first_step_has_the_number_that_the_caller_gives_it():
    bench = Bench()
    bench.recovery.first_step = 0
    (event,) = bench.step(0, {1})
    assert event.step == 0
    events = bench.recovery.give_up(4, "the end")
    assert {event.step for event in events} == {4}
    assert "restored to its state before step 0" in {event.action for event in events}


def test_an_event_names_its_part_and_the_number_that_was_bad():
    (event,) = Bench().step(4, {2}, Stage.SPIKE)
    assert (event.step, event.part, event.stage, event.value) == (5, "part 2", "spike", 9.0)
    (event,) = Bench().step(4, {1}, Stage.LOSS)
    assert event.part == "part 1" and math.isnan(event.value)


def test_a_part_is_reinitialized_when_restoring_does_not_help():
    bench = Bench()
    bench.health.streak[1], bench.health.restored[1] = 3, True
    ((event,), why) = bench.recovery.escalate(5, bench.thresholds)
    assert bench.begun == [(1, 6)] and event.action == "re-initialized" and not why


def test_a_stopping_run_restores_only_faulty_parts():
    bench = Bench(Thresholds(restore_after=3, stop_after=2))
    bench.step(0, {0, 1, 2})
    bench.step(1, {0, 1, 2})
    bench.health.retired[2], bench.health.streak[2] = True, 0
    bench.weights += 50
    bench.weights[2, 0] = math.nan  # retired, and hit from outside
    events, why = bench.recovery.escalate(1, bench.thresholds)
    assert bench.weights.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert [e.part for e in events] == ["part 0", "part 1", "part 2", "run"]
    assert events[-1].action == "stopped" and events[-1].reason == why
    assert not bench.health.streak.any()


def test_a_run_that_stops_leaves_a_healthy_part_as_it_is():
    bench = Bench(Thresholds(restore_after=3, min_parts=3))
    bench.health.streak[0] = 3
    bench.health.restored[0] = bench.health.reinitialized[0] = True
    bench.weights += 50
    events, why = bench.recovery.escalate(7, bench.thresholds)
    assert "only 2 of 3" in why and bench.weights.tolist() == [[0, 0], [51, 51], [52, 52]]
    assert [(e.step, e.part) for e in events] == [(8, "part 0"), (8, "run")]


def test_before_a_checkpoint_only_what_is_not_finite_is_restored():
    bench = Bench()
    bench.weights += 50
    bench.weights[1, 1] = math.inf
    (event,) = bench.recovery.restore_what_is_not_finite(9)
    assert (event.step, event.part, event.stage) == (10, "part 1", "weight")
    assert event.action == "restored to its state before step 1"
    assert bench.weights.tolist() == [[50, 50], [1, 1], [52, 52]]
    assert bench.recovery.restore_what_is_not_finite(10) == []


def test_the_diagnosis_advises_on_the_fault_seen_most_often():
    bench = Bench()
    for step in range(5):
        bench.step(step, {1}, Stage.SPIKE if step < 3 else Stage.LOSS)
    events, _ = bench.recovery.escalate(4, bench.thresholds)
    line = bench.recovery.diagnosis(5, events)
    assert line.startswith("part 1, 5 steps: ") and "\n" not in line  # the others were well
    assert "(3 times)" in line and "(2 times)" in line
    assert "It was restored to its state before step 1." in line
    assert line.endswith(f"What to change: {Stage.SPIKE.kind.advice}.")
    assert Bench().recovery.diagnosis(5) == ""
