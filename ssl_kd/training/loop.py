"""The one training loop: learn, look, log, evaluate, checkpoint, and stop between two steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.guard.precision import default_torch_state

logger = logging.getLogger(__name__)

R_co = TypeVar("R_co", covariant=True)


class Pace:
    """How many samples or tokens a second, without the time that is not spent on learning."""

    def __init__(self) -> None:
        self._began, self._n = time.perf_counter(), 0

    def add(self, n: int) -> None:
        """So many more were learned from."""
        self._n += n

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count."""
        before = time.perf_counter()
        yield
        self._began += time.perf_counter() - before

    def per_second(self) -> float:
        """Since this was asked last."""
        now = time.perf_counter()
        pace = self._n / max(now - self._began, 1e-9)
        self._began, self._n = now, 0
        return pace


class Learner(Protocol[R_co]):
    """What the loop trains; all of its state that a resumed run needs is its own to save.

    Attributes:
        pace: of its steps.
    """

    pace: Pace

    @property
    def steps(self) -> int:
        """Where training ends, exclusive; it may move while there are steps to do."""
        ...

    def learn(self, step: int) -> None:
        """Do one guarded step, whose random draws depend on the seed and the step alone.

        Raises:
            TooFewHealthyParts: training cannot continue; what is sick is back at its last good
                state.
        """
        ...

    def look(self, done: int, *, at_once: bool = False) -> None:
        """Read what the guard found, where that is due or wanted `at_once`.

        Raises:
            TooFewHealthyParts: as `learn`.
        """
        ...

    def before_checkpoint(self, done: int) -> None:
        """Restore what is not finite, so that no file carries it on."""
        ...

    def record(self, done: int) -> R_co:
        """What there is to log of the steps since the last record."""
        ...


class _Checkpoints:
    """The checkpoints of a loop, of which one may be on its way.

    Args:
        begin: saves, or begins to: see `on_checkpoint` of `run_loop`.
    """

    def __init__(self, begin: Callable[[int], object]) -> None:
        self._begin = begin
        self._under_way: object = None

    def settle(self) -> None:
        """Wait until the one that is on its way is saved."""
        wait, self._under_way = self._under_way, None
        if callable(wait):
            wait()

    def save(self, done: int) -> None:
        self.settle()
        self._under_way = self._begin(done)

    def save_last(self, done: int) -> None:
        """Save, where what cannot be written is no reason to lose what was trained."""
        try:
            self.settle()
        except OSError as error:
            logger.warning("a checkpoint before the last could not be written: %s", error)
        try:
            self.save(done)
            self.settle()
        except OSError as error:
            logger.warning("the last checkpoint, of step %d, could not be written: %s", done, error)


@default_torch_state()
def run_loop(
    learner: Learner[R_co],
    *,
    start: int = 0,
    log_every: int,
    checkpoint_every: int,
    eval_every: int | None = None,
    on_log: Callable[[R_co], object],
    on_eval: Callable[[int], object] = lambda done: None,
    on_checkpoint: Callable[[int], object],
    should_stop: Callable[[], bool],
) -> int:
    """Train from step `start` to where the learner ends.

    Args:
        learner: changed in place.
        start: first step, the number of steps already done.
        log_every: `on_log` gets a record this often, in steps, and at the end.
        checkpoint_every: `on_checkpoint(steps done)` is called this often, and at the end.
        eval_every: `on_eval(steps done)` is called this often, and at the end; None: never.
        on_log: writes.
        on_eval: evaluates.
        on_checkpoint: saves, or begins to: what it returns, where that can be called, is called
            before the next and before the loop ends, to wait until it is saved.
        should_stop: asked before every step; true saves and returns.

    Returns:
        The number of steps done; less than `learner.steps` if it was told to stop.

    Raises:
        TooFewHealthyParts: training cannot continue; the last good state of everything was saved
            before.
        OSError: a checkpoint could not be written while there were steps to do; of one that is
            written meanwhile it is raised at the next. At the end that is a warning: what was
            trained is in memory, and the caller saves it.
    """

    def is_due(done: int, every: int) -> bool:
        return done % every == 0 or done == learner.steps

    checkpoints = _Checkpoints(on_checkpoint)

    def checkpoint(done: int) -> None:
        learner.look(done, at_once=True)
        learner.before_checkpoint(done)
        if done == learner.steps:
            checkpoints.save_last(done)
        else:
            checkpoints.save(done)

    done = start
    try:
        while (step := done) < learner.steps:
            if should_stop():
                checkpoint(step)
                checkpoints.settle()
                return step
            done = step + 1
            learner.learn(step)
            learner.look(done)
            if is_due(done, log_every):
                on_log(learner.record(done))
            with learner.pace.paused():
                if eval_every is not None and is_due(done, eval_every):
                    on_eval(done)
                if is_due(done, checkpoint_every):
                    checkpoint(done)
    except TooFewHealthyParts:
        checkpoints.save_last(done)
        raise
    return done
