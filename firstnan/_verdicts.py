"""Make a `Guard` take the same decisions on all ranks, and name the ranks that saw a fault."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from firstnan._hooks import nodes, weakly
from firstnan._norms import is_sharded, narrow
from firstnan.agreement import Agreement, several_ranks
from firstnan.parts import ModuleParts

OnRanks = dict[int, tuple[list[int], str]]  # part -> buffers, and the ranks on which they are bad


class _Agreed(NamedTuple):
    """Numbers about some losses that are equal on all ranks, on the CPU."""

    loss: Tensor  # `[loss]`, mean over the ranks that have the loss, or a value that is not finite
    norm: Tensor  # `[loss]`, largest gradient norm; NaN if one is NaN
    present: Tensor  # boolean `[loss]`, whether some rank has the loss
    bad_loss: Tensor  # boolean `[rank, loss]`, where the loss is not finite
    bad_norm: Tensor  # boolean `[rank, loss]`, where the gradient norm is not finite
    more: Tensor  # `[rank, n]`, further numbers of each rank


class Verdicts(Agreement):
    """Agree with the other ranks on every decision of one guard; one rank decides by itself."""

    def __init__(
        self, group: dist.ProcessGroup | Literal[False] | None, parts: ModuleParts, rules: str
    ) -> None:
        shapes = [[tuple(p.shape) for p in part.weights] for part in parts]
        made = f"a new Guard (parts {', '.join(parts.names)} of the shapes {shapes}; {rules})"
        super().__init__(group, parts[0].weights[0].device, made, 4 * len(parts) + 1)
        self._parts, self._weights = parts, parts.weights()
        self.healed: dict[int, set[int]] = {}  # part -> buffers put back since the last `step`
        self._checked = False
        self.forget()
        if self.world > 1:
            parts.everywhere = self._everywhere
            for i, part in enumerate(parts):  # a NaN in a backward pass reaches the first layer
                handle = part.weights[0].register_hook(weakly(self._probe, i))
                weakref.finalize(self, handle.remove)

    def forget(self) -> None:
        """Forget the previous step."""
        self._bad = torch.zeros(self.world, len(self._parts), dtype=torch.bool)
        self._evidence: list[Tensor] = []
        # Largest gradient entry of each part before the average over ranks, which spreads a NaN.
        devices = [part.weights[0].device for part in self._parts] if self.world > 1 else []
        self.probes = [torch.zeros((), device=device) for device in devices]

    def _probe(self, part: int, gradient: Tensor | None) -> None:
        # Does not wait. DDP passes None for a parameter that no loss reaches.
        if gradient is None:
            return
        gradient = gradient.detach()
        values = gradient._values() if gradient.is_sparse else gradient
        if values.numel():
            norm = torch.linalg.vector_norm(values, math.inf)
            self.probes[part] = torch.maximum(self.probes[part], narrow(norm))

    def _exchange_flags(self, what: str, flags: Sequence[bool]) -> Tensor:
        return self.exchange(what, torch.tensor(flags).float()) > 0

    def _everywhere(self, flags: Sequence[bool]) -> list[bool]:
        # If the list is empty on this rank, it is empty on all.
        return self._exchange_flags("the parts' states", flags).all(0).tolist() if flags else []

    def _agree(
        self, what: str, loss: Tensor, norm: Tensor, present: Tensor, *more: Tensor
    ) -> _Agreed:
        if self.world == 1:
            never = torch.zeros(1, len(loss), dtype=torch.bool)
            return _Agreed(loss, norm, present, never, never, torch.cat(more).unsqueeze(0))
        n = len(loss)
        flat = torch.cat([loss, torch.where(present, norm, 0), present, *more])
        table = self.exchange(what, flat.float())
        loss, norm, here, rest = table.tensor_split([n, 2 * n, 3 * n], dim=1)
        here = here > 0
        bad = here & ~torch.isfinite(loss)
        shares = torch.where(here, loss.double(), 0) / here.sum(0).clamp(min=1)
        limit = torch.finfo(torch.float32).max
        mean = shares.sum(0).clamp(-limit, limit).float()
        first_bad = loss.gather(0, bad.int().argmax(0, keepdim=True))[0]
        loss = torch.where(bad.any(0), first_bad, mean)
        return _Agreed(loss, norm.amax(0), here.any(0), bad, ~torch.isfinite(norm), rest)

    def check_graph(self, losses: Iterable[Tensor]) -> None:
        """Raise ValueError in the first step if reentrant checkpointing hides a loss's weights."""
        if self.world > 1 and not self._checked and not any(is_sharded(p) for p in self._weights):
            leaves(losses)
        self._checked = True

    def cut(self, step: int, sick: Iterable[int]) -> set[int]:
        """Return the parts that some rank has to leave out; `sick` holds this rank's."""
        mine = [i in sick for i in range(len(self._parts))]
        flags = self._exchange_flags(f"step {step}, the parts' losses", mine)
        self._bad |= flags
        return set(flags.any(0).nonzero().flatten().tolist())

    def terms(
        self, step: int, losses: Mapping[str, Tensor], loss: Tensor, norm: Tensor
    ) -> tuple[Tensor, Tensor, list[bool], list[str]]:
        """Return the losses, norms, needs of a gradient and bad ranks of the terms, as agreed."""
        needs = torch.tensor([term.requires_grad for term in losses.values()])
        what = f"step {step}, the loss terms {', '.join(losses)}"
        agreed = self._agree(what, loss, norm, torch.ones_like(needs), needs)
        evidence = zip(agreed.bad_loss.T, agreed.bad_norm.T, strict=True)
        where = [self.name_ranks(pair) for pair in evidence]
        return agreed.loss, agreed.norm, (agreed.more > 0).any(0).tolist(), where

    def backward(
        self, step: int, kept: Sequence[Tensor], left_out: Iterable[Tensor] | None
    ) -> bool:
        """Run the backward pass of the `kept` losses; return whether any weight has a gradient.

        DDP waits for every parameter that the forward pass used. So a parameter that only losses
        in `left_out` reach gets a gradient of zeros during the pass (a NaN loss times 0 would be
        NaN), which is removed afterwards. FSDP2 does not wait for weights that no loss reaches.
        """
        what = f"step {step}, the backward pass"
        if self.world == 1 or left_out is None or any(is_sharded(p) for p in self._weights):
            if kept:
                with self.waiting(what):
                    torch.autograd.backward(kept)
            return any(p.grad is not None for p in self._weights)
        reached = leaves(kept)
        others = {key: leaf for key, leaf in leaves(left_out).items() if key not in reached}
        bare = {key: leaf for key, leaf in others.items() if leaf.grad is None}
        mine = [id(p) in reached or p.grad is not None for p in self._weights]
        real = self._exchange_flags(what, mine).any(0)
        zeros = [torch.zeros_like(leaf) for leaf in others.values()]
        if roots := [*kept, *others.values()]:
            with self.waiting(what):
                torch.autograd.backward(roots, [*[None] * len(kept), *zeros])
        for p, somewhere in zip(self._weights, real.tolist(), strict=True):
            bare.pop(id(p), None)
            if not somewhere:
                p.grad = None
        for leaf in bare.values():  # a weight of another model, such as a discriminator
            leaf.grad = None
        return any(p.grad is not None for p in self._weights)

    def step(
        self, step: int, seen: tuple[Tensor, Tensor, Tensor, Tensor], spoiled: dict[int, list[int]]
    ) -> tuple[Tensor, Tensor, Tensor, OnRanks, OnRanks]:
        """Agree on the losses, gradients and buffers of a step.

        Takes this rank's loss, gradient norm, absence and probe `[part]`, and the indices of bad
        buffers by part. Returns the first three and the indices as agreed, and the indices of
        buffers that were put back since the last step.
        """
        if self.world == 1 and self.group is None and several_ranks():
            raise ValueError(
                "torch.distributed was initialized after this Guard was made, so the Guard would "
                "decide without the other ranks: make the Guard after init_process_group, or with "
                "group=False"
            )
        loss, norm, absent, probe = seen
        here, self.healed = (spoiled, self.healed), {}
        if self.world == 1:
            return loss, norm, absent, self._union([spoiled]), self._union([here[1]])
        some = torch.tensor([any(here)])
        agreed = self._agree(f"step {step}, the step", loss, norm, ~absent, probe, some)
        probes, some = agreed.more[:, :-1], bool(agreed.more[:, -1].any())
        self._evidence = [agreed.bad_loss, self._bad, ~torch.isfinite(probes), agreed.bad_norm]
        everywhere = self.gather(f"step {step}, the buffers", here) if some else [here]
        now, healed = (self._union(of_ranks) for of_ranks in zip(*everywhere, strict=True))
        return agreed.loss, agreed.norm, ~agreed.present, now, healed

    def _union(self, of_ranks: Sequence[Mapping[int, Iterable[int]]]) -> OnRanks:
        union = {}
        for part in sorted({part for buffers in of_ranks for part in buffers}):
            indices = {i for buffers in of_ranks for i in buffers.get(part, ())}
            where = self.name_ranks([torch.tensor([part in buffers for buffers in of_ranks])])
            union[part] = sorted(indices), where
        return union

    def where(self, part: int) -> str:
        """Return the ranks that saw a part's fault in this step, for the event's reason."""
        return self.name_ranks(table[:, part] for table in self._evidence)


def leaves(losses: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return id -> tensor for the leaf tensors that a backward pass of `losses` reaches."""
    reached: dict[int, Tensor] = {}
    for node in nodes(losses):
        name = type(node).__name__
        if name == "CheckpointFunctionBackward":
            raise ValueError(
                "with several ranks a Guard must know which weights each loss reaches; reentrant"
                " activation checkpointing hides them: pass use_reentrant=False to checkpoint, or"
                ' gradient_checkpointing_kwargs={"use_reentrant": False} to transformers'
            )
        if name == "AccumulateGrad":
            reached[id(node.variable)] = node.variable
    return reached
