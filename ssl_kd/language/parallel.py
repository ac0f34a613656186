"""A student that several ranks train: a copy on each (DDP), or sharded over them (FSDP2)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ssl_kd.guard.norms import is_sharded, local
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import without_adapters
from ssl_kd.teachers.frozen import FrozenTeacher
from ssl_kd.training.process_group import ProcessGroup
from ssl_kd.training.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


def check_ranks(ranks: Ranks, batch_size: int, *, shard: bool) -> None:
    """Raise SettingsError if BATCH_SIZE or SHARD do not fit the number of ranks or the device."""
    if batch_size < ranks.world:
        raise SettingsError(
            f"BATCH_SIZE is {batch_size}, the rows of all {ranks.world} ranks together:"
            f" set it to {ranks.world} or more (and lower GRADIENT_ACCUMULATION_STEPS), or start"
            " fewer processes"
        )
    if shard and ranks.world == 1:
        raise SettingsError(
            "SHARD is True, but there is one process: start one for each GPU, torchrun"
            " --nproc_per_node N scripts/distill.py --shard ..., or set SHARD to False"
        )
    if shard and ranks.device == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise SettingsError(
            f"SHARD is True, but FSDP2 of torch {torch.__version__} does not support the CPU:"
            " install torch 2.7 or newer, use GPUs, or set SHARD to False"
        )


class DistributedStudent:
    """A student, and `extra` modules trained with it, as one module of all ranks.

    With `shard` the student may be on any device, and its weights are sharded in place.
    """

    def __init__(
        self,
        student: nn.Module,
        extra: list[nn.Module],
        device: torch.device,
        ranks: ProcessGroup,
        *,
        shard: bool,
    ) -> None:
        self.ranks, self.sharded = ranks, shard
        self._root: Any = _Root(student, extra)
        self._ddp: DistributedDataParallel | None = None
        if shard:
            from torch.distributed.fsdp import fully_shard

            mesh = _mesh(ranks.world, device)  # layer by layer: it may not fit on one device
            _shard_layers(student, mesh)
            fully_shard(self._root, mesh=mesh)
            return
        if ranks.world > 1:
            # Buffers are constants here; DDP would send them before each forward pass.
            names = [name for name, _ in self._root.named_buffers()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._root, names)
            self._ddp = DistributedDataParallel(self._root, gradient_as_bucket_view=True)

    def forward(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return `work(*arguments)`, run as the forward pass before a backward pass."""
        module = self._root if self._ddp is None else self._ddp
        with self.ranks.waiting("a forward pass"):
            return module(work, *arguments)

    def evaluate(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return `work(*arguments)`, which runs the student on every rank, without a backward."""
        try:
            return self._root(work, *arguments)
        finally:
            self._reshard()

    @contextlib.contextmanager
    def averaged(self, last: bool) -> Iterator[None]:
        """Wrap a forward and backward pass; DDP averages gradients only in the `last` of a step."""
        with contextlib.nullcontext() if last or self._ddp is None else self._ddp.no_sync():
            yield
        self._reshard()

    def _reshard(self) -> None:
        # Without a backward pass the root's weights would stay gathered, and miss an update.
        if self.sharded:
            self._root.reshard()

    def gathered(self, value: Any) -> Any:
        """Replace sharded tensors by full ones on the first rank's CPU, empty ones elsewhere.

        All ranks must call it.
        """
        if isinstance(value, Mapping):
            return {key: self.gathered(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.gathered(inner) for inner in value)
        if not isinstance(value, Tensor) or not is_sharded(value):
            return value
        with torch.no_grad():
            full = value.full_tensor()
        return full.cpu() if self.ranks.rank == 0 else torch.empty(0)

    def spread(self, full: Tensor, like: Tensor) -> Tensor:
        """Return what `gathered` returned, sharded as `like` is, from the first rank's tensor."""
        if not is_sharded(like):
            return full
        from torch.distributed.tensor import distribute_tensor

        if self.ranks.rank == 0:
            full = full.to(like.device, like.dtype)
        else:
            full = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return distribute_tensor(full, like.device_mesh, like.placements)

    def is_finite(self) -> bool:
        """Whether all weights are finite, on every rank."""
        bad = sum(not bool(torch.isfinite(local(p)).all()) for p in self._root.parameters())
        return self.ranks.sums("weights that are not finite", bad)[0] == 0


class _Root(nn.Module):
    """All trained modules as one, whose forward pass calls a function.

    The hooks of DDP and FSDP2 thus also cover losses that read the output head's weight, and
    generation.
    """

    def __init__(self, student: nn.Module, extra: list[nn.Module]) -> None:
        super().__init__()
        self.student, self.extra = student, nn.ModuleList(extra)

    def forward(self, work: Callable[..., T], *arguments: Any) -> T:
        return work(*arguments)


def shard_teacher(teacher: FrozenTeacher, device: torch.device, world: int) -> None:
    """Shard the weights of a teacher on the CPU over the ranks, in place.

    A layer is gathered on a rank only while it runs; embeddings and output head stay gathered after
    the first answer.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh(world, device)
    _shard_layers(teacher.model, mesh)
    fully_shard(teacher.model.base_model, mesh=mesh)
    teacher.model.to(device)  # the head, whose weight is part of every answer
    teacher.device = device


def _mesh(world: int, device: torch.device) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (world,))


def _shard_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    causal: Any = without_adapters(model)
    names = causal._no_split_modules or ()
    for module in [m for m in causal.modules() if type(m).__name__ in names]:
        fully_shard(module, mesh=mesh)
