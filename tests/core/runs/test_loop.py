"""The training loop waits for a checkpoint before the next one and at its end."""

import pytest

from firstnan.parts import TooFewHealthyParts
from ssl_kd.core.runs.loop import Pace, run_loop


class Learner:
    """Learns nothing; too few parts are healthy at the step `sick`."""

    def __init__(self, steps, sick=None):
        self.steps, self.sick, self.pace = steps, sick, Pace()

    def learn(self, step):
        if step == self.sick:
            raise TooFewHealthyParts("none is left")

    def look(self, done, *, at_once=False):
        pass

    def before_checkpoint(self, done):
        pass

    def record(self, done):
        return done


def saved(learner, stop=None, fails=()):
    """The loop's calls for checkpoints in order, and its result or error."""
    calls = []

    def on_checkpoint(done):
        def wait():
            calls.append(f"wait {done}")
            if done in fails:
                raise OSError("No space left on device")

        calls.append(f"save {done}")
        return wait

    steps = iter(range(100))
    loop = {"log_every": 1, "checkpoint_every": 2, "on_log": lambda row: None}
    loop |= {"on_checkpoint": on_checkpoint, "should_stop": lambda: next(steps) == stop}
    try:
        calls.append(run_loop(learner, **loop))
    except (TooFewHealthyParts, OSError) as error:
        calls.append(str(error))
    return calls


@pytest.mark.parametrize(
    ("sick", "stop", "expected"),
    [
        (None, None, ["save 2", "wait 2", "save 4", "wait 4", "save 5", "wait 5", 5]),
        (None, 3, ["save 2", "wait 2", "save 3", "wait 3", 3]),
        (3, None, ["save 2", "wait 2", "save 4", "wait 4", "none is left"]),
    ],
    ids=["finished", "stopped", "sick"],
)
def test_every_checkpoint_is_waited_for(sick, stop, expected):
    assert saved(Learner(5, sick), stop) == expected


def test_a_checkpoint_that_fails_is_an_error_or_at_the_end_a_warning(caplog):
    full = "No space left on device"
    assert saved(Learner(5), stop=3, fails={3}) == ["save 2", "wait 2", "save 3", "wait 3", full]
    assert saved(Learner(5), fails={2}) == ["save 2", "wait 2", full]
    assert not caplog.records
    assert saved(Learner(5), fails={5})[-1] == 5
    assert f"the last checkpoint, of step 5, could not be written: {full}" in caplog.text
    caplog.clear()
    assert saved(Learner(5, sick=3), fails={2, 4})[-3:] == ["save 4", "wait 4", "none is left"]
    assert f"a checkpoint before the last could not be written: {full}" in caplog.text
    assert f"the last checkpoint, of step 4, could not be written: {full}" in caplog.text


@pytest.mark.parametrize("result", [None, {}, [1]])
def test_synchronous_saves_are_not_waited_for(result):
    loop = {"log_every": 1, "checkpoint_every": 2, "on_log": lambda row: None}
    loop |= {"on_checkpoint": lambda done: result, "should_stop": lambda: False}
    assert run_loop(Learner(5), **loop) == 5
