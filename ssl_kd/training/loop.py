"""The training loop: learn, check, log, evaluate, checkpoint, and stop between two steps."""

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
    """Measures samples or tokens per second, without pauses."""

    def __init__(self) -> None:
        self._began, self._n = time.perf_counter(), 0

    def add(self, n: int) -> None:
        """Count this many more."""
        self._n += n

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block."""
        before = time.perf_counter()
        yield
        self._began += time.perf_counter() - before

    def per_second(self) -> float:
        """Return the rate since the last call."""
        now = time.perf_counter()
        rate = self._n / max(now - self._began, 1e-9)
        self._began, self._n = now, 0
        return rate


class Learner(Protocol[R_co]):
    """What the loop trains.

    Attributes:
        pace: of its steps.
    """

    pace: Pace

    @property
    def steps(self) -> int:
        """Where training ends, exclusive; it may change during training."""
        ...

    def learn(self, step: int) -> None:
        """Do one guarded step, whose random numbers depend on the seed and the step only.

        Raises:
            TooFewHealthyParts: training cannot continue; sick parts are back at their last good
                state.
        """
        ...

    def look(self, done: int, *, at_once: bool = False) -> None:
        """Read what the guard recorded, if it is time for that or `at_once`.

        Raises:
            TooFewHealthyParts: as `learn`.
        """
        ...

    def before_checkpoint(self, done: int) -> None:
        """Restore parts that are not finite, so that they are not saved."""
        ...

    def record(self, done: int) -> R_co:
        """Return the log record of the steps since the last one."""
        ...


@default_torch_state()
def run_loop(
    learner: Learner[R_co],
    *,
    start: int = 0,
    log_every: int = 20,
    checkpoint_every: int = 200,
    eval_every: int | None = None,
    on_log: Callable[[R_co], object] = lambda record: None,
    on_eval: Callable[[int], object] = lambda done: None,
    on_checkpoint: Callable[[int], object] = lambda done: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Train from step `start` to the learner's end.

    Args:
        learner: changed in place.
        start: number of steps already done.
        log_every: steps between two calls of `on_log(record)`, which also follows the last step.
        checkpoint_every: the same for `on_checkpoint(steps done)`.
        eval_every: the same for `on_eval(steps done)`; None: never.
        on_log: writes a record.
        on_eval: evaluates.
        on_checkpoint: saves, or starts saving and returns a function that waits for the end, which
            is called before the next checkpoint and before the loop returns.
        should_stop: called before every step; true saves a checkpoint and returns.

    Returns:
        The number of steps done.

    Raises:
        TooFewHealthyParts: training cannot continue; the last good state was saved.
        OSError: a checkpoint could not be written. After the last step this is only a warning,
            because the caller still saves what was trained.
    """
    pending: list[Callable[[], object]] = []

    def wait() -> None:
        while pending:
            pending.pop()()

    def save(done: int) -> None:
        wait()
        if callable(result := on_checkpoint(done)):
            pending.append(result)

    def save_last(done: int) -> None:
        try:
            wait()
        except OSError as error:
            logger.warning("a checkpoint before the last could not be written: %s", error)
        try:
            save(done)
            wait()
        except OSError as error:
            logger.warning("the last checkpoint, of step %d, could not be written: %s", done, error)

    def is_due(done: int, every: int) -> bool:
        return done % every == 0 or done == learner.steps

    def checkpoint(done: int) -> None:
        learner.look(done, at_once=True)
        learner.before_checkpoint(done)
        (save_last if done == learner.steps else save)(done)

    done = start
    try:
        while (step := done) < learner.steps:
            if should_stop():
                checkpoint(step)
                wait()
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
        save_last(done)
        raise
    return done
