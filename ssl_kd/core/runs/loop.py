"""Run the training loop: steps, logging, evaluation, checkpoints, and stopping on request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from firstnan.parts import TooFewHealthyParts
from ssl_kd.core.precision import default_torch_state

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
    """Interface of the object that `run_loop` trains."""

    pace: Pace

    @property
    def steps(self) -> int:
        """Total number of steps; it may change during training."""
        ...

    def learn(self, step: int) -> None:
        """Do one training step, with random numbers that depend only on the seed and the step.

        Raises TooFewHealthyParts if training cannot continue; failed parts of the model were then
        restored to their last good state.
        """
        ...

    def look(self, done: int, *, at_once: bool = False) -> None:
        """Read the faults that the guard recorded, if a reading is due or `at_once` is true.

        Raises TooFewHealthyParts as `learn` does.
        """
        ...

    def before_checkpoint(self, done: int) -> None:
        """Restore parts with NaN or infinity, so that the checkpoint does not contain them."""
        ...

    def record(self, done: int) -> R_co:
        """Return the log record of the steps since the last call."""
        ...


class _Checkpoints:
    """Call `on_checkpoint`, whose result, if it is a function, waits until the file is written."""

    def __init__(self, on_checkpoint: Callable[[int], object]) -> None:
        self._on_checkpoint = on_checkpoint
        self._pending: Callable[[], object] | None = None

    def wait(self) -> None:
        """Wait for the last checkpoint; raise OSError if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def save(self, done: int) -> None:
        """Wait for the checkpoint before, and start to save one."""
        self.wait()
        if callable(result := self._on_checkpoint(done)):
            self._pending = result

    def save_last(self, done: int) -> None:
        """Save a checkpoint and wait for it; log a write that fails, since the run ends anyway."""
        try:
            self.wait()
        except OSError as error:
            logger.warning("a checkpoint before the last could not be written: %s", error)
        try:
            self.save(done)
            self.wait()
        except OSError as error:
            logger.warning("the last checkpoint, of step %d, could not be written: %s", done, error)


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
    after_step: Callable[[], object] = lambda: None,
) -> int:
    """Train from step `start` until `learner.steps` steps are done; return the number of steps.

    Calls `after_step()` after each step. After each `log_every`, `eval_every` (None: never) and
    `checkpoint_every` steps, and after the last step, calls `on_log(record)`, `on_eval(steps done)`
    and `on_checkpoint(steps done)`. If `should_stop()` is true before a step, a checkpoint is saved
    and the loop returns. If `on_checkpoint` returns a function, it waits for the checkpoint: the
    loop calls it before the next checkpoint and before it returns.

    Raises:
        TooFewHealthyParts: training cannot continue; a checkpoint of the last good state was saved.
        OSError: a checkpoint could not be written. After the last step this is only a warning,
            because the caller still saves the trained model.
    """
    checkpoints = _Checkpoints(on_checkpoint)

    def is_due(done: int, every: int) -> bool:
        return done % every == 0 or done == learner.steps

    def checkpoint(done: int) -> None:
        learner.look(done, at_once=True)
        learner.before_checkpoint(done)
        (checkpoints.save_last if done == learner.steps else checkpoints.save)(done)

    done = start
    try:
        while (step := done) < learner.steps:
            if should_stop():
                checkpoint(step)
                checkpoints.wait()
                return step
            done = step + 1
            learner.learn(step)
            learner.look(done)
            after_step()
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
