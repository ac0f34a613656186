"""Run the training loop: steps, logging, evaluation, checkpoints, and stopping on request."""

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
    """Measure the samples or tokens processed per second, excluding pauses."""

    def __init__(self) -> None:
        self._began, self._n = time.perf_counter(), 0

    def add(self, n: int) -> None:
        """Count `n` more samples or tokens."""
        self._n += n

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the `with` block from the measurement."""
        before = time.perf_counter()
        yield
        self._began += time.perf_counter() - before

    def per_second(self) -> float:
        """Return the samples or tokens per second since the last call."""
        now = time.perf_counter()
        rate = self._n / max(now - self._began, 1e-9)
        self._began, self._n = now, 0
        return rate


class Learner(Protocol[R_co]):
    """Interface of the object that `run_loop` trains.

    Attributes:
        pace: measures the speed of its steps.
    """

    pace: Pace

    @property
    def steps(self) -> int:
        """Total number of steps; it may change during training."""
        ...

    def learn(self, step: int) -> None:
        """Do one training step, with random numbers that depend only on the seed and the step.

        Raises:
            TooFewHealthyParts: training cannot continue; failed parts of the model were restored to
                their last good state.
        """
        ...

    def look(self, done: int, *, at_once: bool = False) -> None:
        """Read the faults that the guard recorded, if a reading is due or `at_once` is true.

        Raises:
            TooFewHealthyParts: training cannot continue, as in `learn`.
        """
        ...

    def before_checkpoint(self, done: int) -> None:
        """Restore parts with NaN or infinity, so that the checkpoint does not contain them."""
        ...

    def record(self, done: int) -> R_co:
        """Return the log record of the steps since the last call."""
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
    """Train from step `start` until `learner.steps` steps are done.

    Args:
        learner: the object to train; it is changed in place.
        start: number of steps already done.
        log_every: steps between two calls of `on_log(record)`, also called after the last step.
        checkpoint_every: steps between two calls of `on_checkpoint(steps done)`.
        eval_every: steps between two calls of `on_eval(steps done)`; None to never call it.
        on_log: writes a log record.
        on_eval: evaluates the model.
        on_checkpoint: saves a checkpoint, or starts to save one and returns a function that waits
            for it. That function is called before the next checkpoint and before the loop returns.
        should_stop: called before every step; if true, a checkpoint is saved and the loop returns.

    Returns:
        The number of steps done.

    Raises:
        TooFewHealthyParts: training cannot continue; a checkpoint of the last good state was saved.
        OSError: a checkpoint could not be written. After the last step this is only a warning,
            because the caller still saves the trained model.
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
