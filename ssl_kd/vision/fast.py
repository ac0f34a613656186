"""The step made fast: compiled, or as one CUDA graph, whose kernels the host starts at once."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ssl_kd.guard.memory import is_out_of_memory, to_device_async
from ssl_kd.settings import SettingsError

if TYPE_CHECKING:
    from ssl_kd.vision.step import HeadsStep, HeadTrainer

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
WARM_UP = 3  # steps of a shape before it is recorded, in which libraries choose their kernels

Replay = Callable[[], "HeadsStep"]
"""Does once more what was recorded; what it gives lies where the last replay's lay."""


def compiled(function: F) -> F:
    """The function by torch.compile, as one graph, for each shape anew.

    Raises:
        SettingsError: when called, it cannot be compiled.
    """
    fast = torch.compile(function, fullgraph=True, dynamic=False)

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException  # takes seconds to import

        try:
            return fast(*args)
        except TorchDynamoException as error:
            said = next(line for line in str(error).splitlines() if line.strip())
            raise SettingsError(
                f"COMPILE: torch.compile cannot compile this step: {said.strip()}. Set COMPILE to "
                "False; a head or loss of your own that is to be compiled may not look at numbers"
            ) from error

    return run  # pyright: ignore[reportReturnType]


def recorded(step: Replay, device: torch.device) -> Replay:
    """A step's kernels on a GPU, recorded and not run."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    # What other threads ask of the device meanwhile, such as that of checkpoints, is no fault.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = step()

    def replay() -> HeadsStep:
        graph.replay()
        return result

    return replay


class Graphed:
    """A trainer's plain step, recorded once for each shape and then replayed.

    A recording is used when, from the same state, it has given what the step gives to the last bit;
    else a warning says so and steps run as they are: a run has steps of both kinds. It writes into
    the memory that the trainer's state had when it was made, and takes that of a step for itself.

    Args:
        trainer: whose steps they are.
        record: what records one.

    Attributes:
        replays: how many steps were replayed.
    """

    def __init__(
        self, trainer: HeadTrainer, record: Callable[[Replay, torch.device], Replay] = recorded
    ) -> None:
        self._trainer, self._record = trainer, record
        self._seen: Counter[object] = Counter()
        # Of each shape, the memory that a replay reads its arguments from, and the replay.
        self._recordings: dict[object, tuple[list[Tensor], Replay]] = {}
        self._off, self.replays = False, 0

    @classmethod
    def of(cls, trainer: HeadTrainer) -> Graphed | None:
        """For a trainer on a GPU; None on another device, with a line in the log.

        Raises:
            SettingsError: its heads draw random numbers, which a recording would repeat.
        """
        device, bank = trainer.precision.device, trainer.bank
        if bank.draws:
            raise SettingsError(
                "CUDA_GRAPH is for heads that draw nothing, and these have dropout: set CUDA_GRAPH "
                "to False"
            )
        if device.type == "cuda":
            return cls(trainer)
        logger.info("CUDA_GRAPH is for GPUs: on %s steps run as they are", device)
        return None

    def __call__(self, views: Tensor, learning_rate: Tensor, given: Tensor | None) -> HeadsStep:
        """As `HeadTrainer.step`, of a step that keeps no state to go back to.

        Raises:
            SettingsError: the step cannot be recorded.
        """
        device = self._trainer.precision.device
        inputs = [
            to_device_async(x, device) for x in (views, learning_rate, given) if x is not None
        ]
        shape = tuple((x.shape, x.dtype) for x in inputs)
        if shape not in self._recordings:
            self._seen[shape] += 1
            if self._off or self._seen[shape] <= WARM_UP:
                return self._plain(inputs)
            return self._begin(shape, inputs)
        slots, replay = self._recordings[shape]
        _fill(slots, inputs)
        self.replays += 1
        return replay().clone()

    def _plain(self, inputs: list[Tensor]) -> HeadsStep:
        views, learning_rate, *given = inputs
        return self._trainer.plain_step(views, learning_rate, None, *given)

    def _begin(self, shape: object, inputs: list[Tensor]) -> HeadsStep:
        """One step, as it is; and recorded, if both change and give the same."""
        state = list(self._trainer.state.tensors().values())
        before = [tensor.clone() for tensor in state]
        result = self._plain(inputs)
        after = [tensor.clone() for tensor in state]
        slots = [x.clone() for x in inputs]
        try:
            replay = self._record(lambda: self._plain(slots), self._trainer.precision.device)
            _fill(state, before)
            pairs = zip([*after, *_all(result)], [*state, *_all(replay())], strict=True)
            same = all(_same_bits(mine, theirs) for mine, theirs in pairs)
        except RuntimeError as error:
            cause = error.__context__ or error  # what ended the recording, which then failed to end
            if not (is_out_of_memory(error) or is_out_of_memory(cause)):
                raise SettingsError(
                    f"CUDA_GRAPH: this step cannot be recorded: {str(cause).splitlines()[0]}. Set "
                    "CUDA_GRAPH to False; a head or loss of your own may not look at numbers"
                ) from error
            self._leave_off("there is no memory for a recording")
        else:
            if same:
                self._recordings[shape] = slots, replay
                return result
            self._leave_off("the recorded step gave other bits than the step itself")
        _fill(state, after)
        return result

    def _leave_off(self, why: str) -> None:
        self._off = True
        logger.warning("CUDA_GRAPH: %s, so steps run as they are", why)


def _all(result: HeadsStep) -> list[Tensor]:
    values = [getattr(result, field.name) for field in fields(result) if field.name != "before"]
    return [*values, *result.before.values()]


def _fill(slots: list[Tensor], values: list[Tensor]) -> None:
    for slot, value in zip(slots, values, strict=True):
        slot.copy_(value)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and type are equal to the bit, NaN or not."""
    x, y = (t.reshape(-1).contiguous().view(torch.uint8) for t in (a, b))
    return torch.equal(x, y)
