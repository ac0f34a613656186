"""Update, snapshot and restore many heads at once, and leave the unhealthy ones unchanged.

All state of a part is one row of a matrix `[part, ...]`: its weights, both Adam moments, its EMA
teacher, its step count. A part that is not `healthy` keeps its row to the last bit, and no
operation mixes rows. Nothing here waits for the device: decisions are tensors, not Python branches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_BETA_1 = 0.9
_BETA_2 = 0.999
_EPS = 1e-8


def _column(per_part: Tensor, like: Tensor) -> Tensor:
    return per_part.view(-1, *[1] * (like.ndim - 1))


def keep_unless_(healthy: Tensor, old: Tensor, new: Tensor) -> None:
    """Overwrite the healthy rows of `old` with those rows of `new`, both `[part, ...]`."""
    torch.where(_column(healthy, old), new, old, out=old)


class only_healthy:
    """A context that undoes changes to `tensors` `[part, ...]` in rows that are not healthy.

    On a CPU, only unhealthy rows are copied; on other devices whole tensors are, since finding the
    rows would wait for the device.
    """

    def __init__(self, healthy: Tensor, *tensors: Tensor) -> None:
        self.healthy, self.tensors = healthy, tensors
        self.sick: Tensor | None = None
        self.kept: list[Tensor] = []

    def __enter__(self) -> None:
        if self.healthy.device.type == "cpu":
            self.sick = (~self.healthy).nonzero().flatten()
            self.kept = [tensor[self.sick] for tensor in self.tensors] if len(self.sick) else []
        else:
            self.kept = [tensor.clone() for tensor in self.tensors]

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            return
        for tensor, old in zip(self.tensors, self.kept, strict=False):
            if self.sick is None:
                torch.where(_column(self.healthy, tensor), tensor, old, out=tensor)
            else:
                tensor[self.sick] = old


def part_norms(gradients: Tensor) -> Tensor:
    """Return the L2 norm of each part's gradient, `[part, parameter]` -> `[part]` float32.

    A norm is not finite if an entry is not finite or the sum of squares overflows.
    """
    return torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float32)


def clip_factors(norms: Tensor, max_norm: float | None) -> Tensor:
    """Return the factor `[part]` that clips each part's norm to `max_norm`; 1 without a limit."""
    if max_norm is None:
        return torch.ones_like(norms)
    return (max_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)


def adamw_(
    weights: Tensor,
    gradients: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    steps: Tensor,
    *,
    learning_rate: float | Tensor,
    weight_decay: Tensor,
) -> None:
    """Take one AdamW step for every part, each with its own step count; use inside `only_healthy`.

    A zero gradient does not protect an unhealthy part: momentum and decay still move its weights.
    Weights, clipped gradients and moments are `[part, parameter]` float32, `steps` is `[part]`, and
    `weight_decay` is `[parameter]`, the decoupled decay (0 for biases). `learning_rate` may be a
    tensor without dimensions. All but the gradients and the last two change in place.

    References:
        Loshchilov & Hutter, Decoupled Weight Decay Regularization, algorithm 2.
    """
    steps.add_(1)
    exp_avg.lerp_(gradients, 1 - _BETA_1)
    exp_avg_sq.mul_(_BETA_2).addcmul_(gradients, gradients, value=1 - _BETA_2)
    # Bias corrections are per part: a part that skipped steps is younger than the others. expm1,
    # since 1 - 0.999 ** 1 has lost half its digits in float32.
    correct1 = _column(-torch.expm1(steps * math.log(_BETA_1)), weights)
    correct2 = _column(-torch.expm1(steps * math.log(_BETA_2)), weights)
    update = exp_avg_sq.sqrt()
    torch.addcmul(correct2.new_full((), _EPS), update, correct2.rsqrt(), out=update)
    torch.div(exp_avg, update, out=update)
    weights.mul_(1 - learning_rate * weight_decay)
    # `reciprocal * rate` has the same bits for a rate on the device and for a number.
    weights.addcmul_(update, correct1.reciprocal() * learning_rate, value=-1)


class RowParts:
    """Parts that are rows: row `i` of every `live` tensor `[part, ...]` belongs to part `i`.

    Training changes `live` in place. `fresh(part, step)` returns name -> re-initialized row.
    """

    note = ""  # for the event of a restored part

    def __init__(
        self,
        names: list[str],
        live: Mapping[str, Tensor],
        fresh: Callable[[int, int], Mapping[str, Tensor]],
    ) -> None:
        self.names = names
        self._live = live
        self._fresh = fresh
        self.good = {name: tensor.clone() for name, tensor in live.items()}
        device = next(iter(live.values())).device
        self.good_step = torch.zeros(len(names), dtype=torch.int32, device=device)

    def snapshot(self, rows: slice, healthy: Tensor, step: int) -> None:
        """Save the state of the `healthy` parts in `rows` if it is finite; does not wait.

        Call this before `step` is applied: its finite gradient showed that the state is good.
        """
        live = {name: tensor[rows] for name, tensor in self._live.items()}
        good = healthy & finite_rows(live)
        for name, tensor in live.items():
            keep_unless_(good, self.good[name][rows], tensor)
        before = self.good_step[rows]
        keep_unless_(good, before, torch.full_like(before, step))

    def finite(self) -> list[bool]:
        """Return whether the state of each part is finite; waits for the device."""
        return finite_rows(self._live).tolist()

    def restore(self, part: int) -> int:
        """Restore a part's last good state; return the step before which it was taken."""
        for name, tensor in self._live.items():
            tensor[part].copy_(self.good[name][part])
        return int(self.good_step[part])

    def reinitialize(self, part: int, step: int) -> None:
        """Re-initialize a part before `step`; the new state counts as good."""
        self.good_step[part] = step
        for name, row in self._fresh(part, step).items():
            self._live[name][part].copy_(row)
            self.good[name][part].copy_(row)


def finite_rows(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return whether the sum of each row is finite in every tensor, boolean `[part]`."""
    sums = [tensor.view(len(tensor), -1).sum(1) for tensor in tensors.values()]  # one pass each
    return torch.isfinite(torch.stack(sums)).all(0)
