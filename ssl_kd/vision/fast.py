"""The step made fast: compiled, or as one CUDA graph, whose kernels the host starts at once."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ssl_kd.guard.memory import is_out_of_memory, sent
from ssl_kd.settings import SettingsError

if TYPE_CHECKING:
    from ssl_kd.vision.step import HeadsStep, HeadTrainer

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
WARM_UP = 3  # steps of a shape before it is recorded, in which libraries choose their kernels

Replay = Callable[[], "HeadsStep"]
"""Does once more what was recorded; what it gives lies where the last replay's lay."""


def as_it_is(function: F) -> F:
    """The function."""
    return function


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
    # Threads of checkpoints and of prefetching go on meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = step()

    def replay() -> HeadsStep:
        graph.replay()
        return result

    return replay


@dataclass(frozen=True)
class _Recording:
    """One shape's replay, and the memory that it reads its arguments from."""

    slots: list[Tensor]
    replay: Replay


class Graphed:
    """A trainer's plain step, recorded once for each shape and then replayed.

    A recording is used when, from the same state, it has given what the step gives to the last bit;
    else a warning says so and steps run as they are: a run is resumed by steps of both kinds.

    Args:
        trainer: whose steps they are.
        record: what records one.
    """

    def __init__(
        self,
        trainer: HeadTrainer,
        record: Callable[[Replay, torch.device], Replay] = recorded,
    ) -> None:
        self._trainer, self._record = trainer, record
        self._seen: Counter[object] = Counter()
        self._recordings: dict[object, _Recording] = {}
        self._differs = False

    @classmethod
    def of(cls, trainer: HeadTrainer) -> Graphed | None:
        """For a trainer on a GPU; None on another device, which is said.

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
        inputs = [sent(x, device) for x in (views, learning_rate, given) if x is not None]
        shape = views.shape, given is None
        if shape not in self._recordings:
            self._seen[shape] += 1
            if self._differs or self._seen[shape] <= WARM_UP:
                return self._plain(inputs)
            return self._begin(shape, inputs)
        recording = self._recordings[shape]
        _fill(recording.slots, inputs)
        return recording.replay().clone()

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
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise SettingsError(
                f"CUDA_GRAPH: this step cannot be recorded: {str(error).splitlines()[0]}. Set "
                "CUDA_GRAPH to False; a head or loss of your own may not look at numbers"
            ) from error
        _fill(state, before)
        again = replay()
        pairs = zip([*state, *_all(again)], [*after, *_all(result)], strict=True)
        if all(_same_bits(mine, theirs) for mine, theirs in pairs):
            self._recordings[shape] = _Recording(slots, replay)
        else:
            _fill(state, after)
            self._differs = True
            logger.warning(
                "CUDA_GRAPH: the recorded step gave other bits than the step itself, so steps run "
                "as they are"
            )
        return result


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
