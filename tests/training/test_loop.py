"""The training loop: a checkpoint is waited for before the next, and where the loop ends."""

import pytest

from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.training.loop import Pace, run_loop


class Learner:
    """Nothing is learned; a step may find that too few are healthy."""

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
    """What the loop does about checkpoints, in order, and what came of it."""
    told = []

    def on_checkpoint(done):
        def wait():
            told.append(f"wait {done}")
            if done in fails:
                raise OSError("No space left on device")

        told.append(f"save {done}")
        return wait

    asked = iter(range(100))
    loop = {"log_every": 1, "checkpoint_every": 2, "on_log": lambda row: None}
    loop |= {"on_checkpoint": on_checkpoint, "should_stop": lambda: next(asked) == stop}
    try:
        told.append(run_loop(learner, **loop))
    except (TooFewHealthyParts, OSError) as error:
        told.append(str(error))
    return told


def test_the_last_is_waited_for():
    assert saved(Learner(5)) == ["save 2", "wait 2", "save 4", "wait 4", "save 5", "wait 5", 5]


def test_so_is_that_of_a_run_that_is_told_to_stop():
    assert saved(Learner(5), stop=3) == ["save 2", "wait 2", "save 3", "wait 3", 3]


def test_so_is_that_of_a_run_that_cannot_continue():
    assert saved(Learner(5, sick=3)) == ["save 2", "wait 2", "save 4", "wait 4", "none is left"]


def test_one_that_is_not_written_is_an_error_or_at_the_end_a_warning(caplog):
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


@pytest.mark.parametrize("told", [None, {}, [1]])
def test_what_is_saved_at_once_is_not_waited_for(told):
    loop = {"log_every": 1, "checkpoint_every": 2, "on_log": lambda row: None}
    loop |= {"on_checkpoint": lambda done: told, "should_stop": lambda: False}
    assert run_loop(Learner(5), **loop) == 5
