"""A student that several ranks train: a copy on each, whose gradients DDP averages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ssl_kd.settings import SettingsError
from ssl_kd.training.process_group import ProcessGroup
from ssl_kd.training.ranks import Ranks

T = TypeVar("T")


def check_ranks(ranks: Ranks, batch_size: int) -> None:
    """Raise SettingsError if BATCH_SIZE is smaller than the number of ranks."""
    if batch_size < ranks.world:
        raise SettingsError(
            f"BATCH_SIZE is {batch_size}, the rows of all {ranks.world} ranks together:"
            f" set it to {ranks.world} or more (and lower GRADIENT_ACCUMULATION_STEPS), or start"
            " fewer processes"
        )


class DistributedStudent:
    """A student, and `extra` modules trained with it, as one module of all ranks."""

    def __init__(self, student: nn.Module, extra: list[nn.Module], ranks: ProcessGroup) -> None:
        self.ranks = ranks
        self._root: Any = _Root(student, extra)
        if ranks.world > 1:
            # Buffers are constants here; DDP would send them before each forward pass.
            names = [name for name, _ in self._root.named_buffers()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._root, names)
            self._root = DistributedDataParallel(self._root, gradient_as_bucket_view=True)

    def forward(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return `work(*arguments)`, run as the forward pass before a backward pass."""
        with self.ranks.waiting("a forward pass"):
            return self._root(work, *arguments)

    @contextlib.contextmanager
    def averaged(self, last: bool) -> Iterator[None]:
        """Wrap a forward and backward pass; DDP averages gradients only in the `last` of a step."""
        local = not last and isinstance(self._root, DistributedDataParallel)
        with self._root.no_sync() if local else contextlib.nullcontext():
            yield


class _Root(nn.Module):
    """A module whose forward pass calls a function, so that DDP's hooks also cover the head."""

    def __init__(self, student: nn.Module, extra: list[nn.Module]) -> None:
        super().__init__()
        self.student, self.extra = student, nn.ModuleList(extra)

    def forward(self, work: Callable[..., T], *arguments: Any) -> T:
        return work(*arguments)
