"""Buffers that forward passes change, as a BatchNorm's statistics: what a step may do to them.

A batch that is left out of an update has already run through the modules, through those of others,
too: a trunk that parts share, a discriminator that only judges. None of it may stay in a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_FLOATS |= {torch.complex64, torch.complex128}


class Buffers:
    """The buffers of some modules, and the values that they go back to.

    A buffer is spoiled by a NaN or an infinity of a kind that it did not hold before: a mask of
    -inf, or the bounds of an observer, which begin infinite, are as they should be.

    Args:
        modules: name -> module, each with the buffers of its own that it saves. Those that a module
            does not save are caches: they may change their shape as they like.
        beside: a weight; buffers that have to be made anew are made where it is.

    Attributes:
        kept: the values to go back to; None where there was no tensor.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], beside: nn.Parameter) -> None:
        self._places = [
            (module, key, f"{name}.{key}" if name else key)
            for name, module in modules
            for key in module._buffers
            if key not in module._non_persistent_buffers_set
        ]
        self._beside = beside
        self.keep()

    def __len__(self) -> int:
        return len(self._places)

    def live(self) -> list[Tensor | None]:
        """The buffers as they are now: a module may have put another tensor in the place."""
        return [module._buffers[key] for module, key, _ in self._places]

    def look(self, zero: Tensor) -> list[Tensor]:
        """The largest magnitude in each buffer, NaN where there is one; waits for no device.

        Args:
            zero: a 0 on the device, for buffers that are always finite.
        """
        largest = [zero] * len(self)
        floats = {
            i: b
            for i, b in enumerate(self.live())
            if b is not None and b.dtype in _FLOATS and b.layout == torch.strided and b.numel()
        }
        if floats:
            norms = torch._foreach_norm([*floats.values()], math.inf)  # pyright: ignore
            for i, norm in zip(floats, norms, strict=True):
                largest[i] = norm
        return largest

    def _badness(self, largest: Sequence[float] | None = None) -> list[int]:
        """0 for a finite buffer, 1 for one with an infinity, 2 for one with a NaN."""
        if largest is None:  # ask the device
            zero = torch.zeros((), device=self._beside.device)
            numbers = [number.to(zero) for number in self.look(zero)]
            largest = torch.stack(numbers).tolist() if numbers else []
        return [2 if math.isnan(x) else int(math.isinf(x)) for x in largest]

    def keep(self, *, ask: bool = True) -> None:
        """Remember the buffers, for the next step to start from.

        Args:
            ask: the device which are finite; otherwise they are as `heal` saw and left them.
        """
        self.kept = [None if b is None else b.clone() for b in self.live()]
        self._bad = self._badness() if ask else self._now

    @property
    def nan(self) -> str:
        """The names of those that held a NaN when they were last kept."""
        pairs = zip(self._places, self._bad, strict=True)
        return ", ".join(name for (_, _, name), bad in pairs if bad == 2)

    def _spoiled(self) -> list[int]:
        pairs = zip(self._now, self._bad, strict=True)
        return [i for i, (now, before) in enumerate(pairs) if now > before]

    def are_well(self) -> bool:
        """Whether none is spoiled; waits for the device."""
        self._now = self._badness()
        return not self._spoiled()

    @torch.no_grad()
    def heal(self, largest: Sequence[float] | None = None) -> str:
        """Put back what is spoiled, together with the other buffers of its module.

        Args:
            largest: as `look` gave them; None: ask the device.

        Returns:
            The names of those that were spoiled; empty as a rule.
        """
        self._now = self._badness(largest)
        if not (spoiled := self._spoiled()):
            return ""
        modules = {id(self._places[i][0]) for i in spoiled}
        for i, (module, _, _) in enumerate(self._places):
            if id(module) in modules:
                self._put_back(i, self.kept[i])
                self._now[i] = self._bad[i]
        return ", ".join(self._places[i][2] for i in spoiled)

    @torch.no_grad()
    def put_back(self, values: Sequence[Tensor | None]) -> None:
        """Give the buffers the values that `live` showed."""
        for i, value in enumerate(values):
            self._put_back(i, value)
        self._now = [*self._bad]

    def _put_back(self, i: int, value: Tensor | None) -> None:
        module, key, _ = self._places[i]
        now = module._buffers[key]
        if now is not None and value is not None:
            now.copy_(value)
        else:  # made by a forward pass, the first one as a rule
            where = self._beside.device
            module._buffers[key] = None if value is None else value.to(where, copy=True)
