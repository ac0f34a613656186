"""A student that several ranks train: whole on each by DDP, or in pieces by FSDP2."""

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
    """Refuse what so many ranks cannot do.

    Raises:
        SettingsError: BATCH_SIZE has no row for each rank; SHARD has one rank, or is on the CPU
            under a torch whose FSDP2 asks it for streams.
    """
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
            f"SHARD is True on the CPU, which FSDP2 of torch {torch.__version__} cannot do: install"
            " torch 2.7 or newer, use GPUs, or set SHARD to False"
        )


class DistributedStudent:
    """A student, and what learns beside it, as one module of all ranks.

    Args:
        student: on the device; with `shard` anywhere, and its weights become pieces, in place.
        beside: other modules that are trained.
        device: of this rank.
        team: the ranks that train it.
        shard: keep a piece of each weight on each rank.

    Attributes:
        sharded: whether a rank has pieces alone.
    """

    def __init__(
        self,
        student: nn.Module,
        beside: list[nn.Module],
        device: torch.device,
        team: ProcessGroup,
        *,
        shard: bool,
    ) -> None:
        self.team, self.sharded = team, shard
        self._root: Any = _Root(student, beside)
        self._ddp: DistributedDataParallel | None = None
        if shard:
            from torch.distributed.fsdp import fully_shard

            mesh = _mesh(team.world, device)  # layer by layer: it may not fit on one device
            _shard_layers(student, mesh)
            fully_shard(self._root, mesh=mesh)
            return
        if team.world > 1:
            # Buffers are constants here; DDP would send them before each forward pass.
            names = [name for name, _ in self._root.named_buffers()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._root, names)
            self._ddp = DistributedDataParallel(self._root, gradient_as_bucket_view=True)

    def forward(self, work: Callable[..., T], *arguments: Any) -> T:
        """What `work(*arguments)` returns, as the forward pass that a backward pass follows."""
        module = self._root if self._ddp is None else self._ddp
        with self.team.waiting("a forward pass"):
            return module(work, *arguments)

    def inside(self, work: Callable[..., T], *arguments: Any) -> T:
        """What `work(*arguments)` returns, which runs the student, on every rank alike.

        No backward pass follows.
        """
        try:
            return self._root(work, *arguments)
        finally:
            self._in_pieces()

    @contextlib.contextmanager
    def averaged(self, last: bool) -> Iterator[None]:
        """Around a forward pass with its backward pass.

        Args:
            last: of the step; DDP averages gradients in this one alone.
        """
        with contextlib.nullcontext() if last or self._ddp is None else self._ddp.no_sync():
            yield
        self._in_pieces()

    def _in_pieces(self) -> None:
        # Without a backward pass the root's weights would stay whole, and miss an update.
        if self.sharded:
            self._root.reshard()

    def gathered(self, value: Any) -> Any:
        """The value with whole tensors on the first rank's CPU in the place of sharded ones.

        All ranks call it; the others get empty tensors there.
        """
        if isinstance(value, Mapping):
            return {key: self.gathered(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.gathered(inner) for inner in value)
        if not isinstance(value, Tensor) or not is_sharded(value):
            return value
        with torch.no_grad():
            whole = value.full_tensor()
        return whole.cpu() if self.team.rank == 0 else torch.empty(0)

    def spread(self, whole: Tensor, like: Tensor) -> Tensor:
        """What `gathered` gave, as `like` is: in pieces of the first rank's tensor."""
        if not is_sharded(like):
            return whole
        from torch.distributed.tensor import distribute_tensor

        if self.team.rank == 0:
            whole = whole.to(like.device, like.dtype)
        else:
            whole = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return distribute_tensor(whole, like.device_mesh, like.placements)

    def is_finite(self) -> bool:
        """Whether all weights are, on every rank."""
        bad = sum(not bool(torch.isfinite(local(p)).all()) for p in self._root.parameters())
        return self.team.sums("weights that are not finite", bad)[0] == 0


class _Root(nn.Module):
    """What is trained, as one module whose forward pass is whatever is to be done with it.

    So that the hooks of DDP and FSDP2 are around all of it: of losses that take the weight of the
    output head, not its logits, and of generation.
    """

    def __init__(self, student: nn.Module, beside: list[nn.Module]) -> None:
        super().__init__()
        self.student, self.beside = student, nn.ModuleList(beside)

    def forward(self, work: Callable[..., T], *arguments: Any) -> T:
        return work(*arguments)


def shard_teacher(teacher: FrozenTeacher, device: torch.device, world: int) -> None:
    """Let each rank keep a piece of each weight of a teacher on the CPU, in place.

    A layer is whole on a rank only while it runs; embeddings and output head are from the first
    answer on.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh(world, device)
    _shard_layers(teacher.model, mesh)
    fully_shard(teacher.model.base_model, mesh=mesh)
    teacher.model.to(device)  # the head, whose weight every answer holds
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
