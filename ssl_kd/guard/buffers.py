"""Buffers that forward passes change, as a BatchNorm's statistics: what a step may do to them.

A batch that is left out of an update has already run through the modules, through those of others,
too: a trunk that parts share, a discriminator that only judges. None of it may stay in a buffer.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ssl_kd.guard.norms import narrow

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_FLOATS |= {torch.complex64, torch.complex128}


class _BeforeForward:
    """A forward pre-hook that a copy of the module, or a file that it is saved to, does not need.

    Args:
        watched: what to tell; None for nothing.
    """

    def __init__(self, watched: Buffers | None = None) -> None:
        self._watched = None if watched is None else weakref.ref(watched)

    def __call__(self, module: nn.Module, _: object) -> None:
        if torch.compiler.is_compiling() or self._watched is None:
            return
        training = module.training or torch.is_grad_enabled()  # else no step has begun
        if training and (watched := self._watched()) is not None:
            watched.begin()

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()


class Buffers:
    """The buffers of some modules, and the values that they go back to: before a step's forward.

    These are known from the end of the step before, but for buffers that were written since: they
    are looked at again at the step's first forward pass. What is written behind PyTorch's back (in
    `.data`), or before a forward pass that is compiled as a whole, is not seen.

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
            for key in module._buffers.keys()  # noqa: SIM118 - TorchScript's cannot be iterated
            if key not in module._non_persistent_buffers_set
        ]
        self._beside = beside
        self.keep()
        self.end_step()
        hook = _BeforeForward(self)
        for module, _, name in {id(place[0]): place for place in self._places}.values():
            if isinstance(module, torch.jit.RecursiveScriptModule):  # pyright: ignore[reportPrivateImportUsage]
                raise ValueError(
                    f"the buffer {name} is a scripted module's (torch.jit.script), which takes no "
                    "hooks: make the Guard around the Python module, and script it once trained"
                )
            handle = module.register_forward_pre_hook(hook)
            weakref.finalize(self, handle.remove)

    def __len__(self) -> int:
        return len(self._places)

    def live(self) -> list[Tensor | None]:
        """The buffers as they are now: a module may have put another tensor in the place."""
        return [module._buffers[key] for module, key, _ in self._places]

    def look(self, zero: Tensor, of: Sequence[Tensor | None] | None = None) -> list[Tensor]:
        """The largest magnitude in each buffer, NaN where there is one; waits for no device.

        Args:
            zero: a 0 on the device, for buffers that are always finite.
            of: tensors to look at in place of the buffers.
        """
        looked = self.live() if of is None else of
        largest = [zero] * len(looked)
        floats = {
            i: b
            for i, b in enumerate(looked)
            if b is not None and b.dtype in _FLOATS and b.layout == torch.strided and b.numel()
        }
        if floats:
            norms = torch._foreach_norm([*floats.values()], math.inf)  # pyright: ignore
            for i, norm in zip(floats, norms, strict=True):
                largest[i] = norm
        return largest

    def _badness(
        self, largest: Sequence[float] | None = None, of: Sequence[Tensor | None] | None = None
    ) -> list[int]:
        """0 for a finite buffer, 1 for one with an infinity, 2 for one with a NaN."""
        if largest is None:  # ask the device
            zero = torch.zeros((), device=self._beside.device)
            numbers = [narrow(number).to(zero) for number in self.look(zero, of)]
            largest = torch.stack(numbers).tolist() if numbers else []
        return [2 if math.isnan(x) else int(math.isinf(x)) for x in largest]

    def keep(self, *, ask: bool = True) -> None:
        """Remember the buffers, for the next step to start from.

        Args:
            ask: the device which are finite; else they are as `spoiled` saw and `heal` left them.
        """
        self.kept = [None if b is None else b.clone() for b in self.live()]
        self._bad = self._badness() if ask else self._now
        self._mark()

    def _mark(self) -> None:
        """What the buffers hold now is kept."""
        self._at_keep = [(b, _version(b)) for b in self.live()]
        self._written: dict[int, tuple[Tensor | None, Tensor | None]] = {}

    def end_step(self) -> None:
        """The next forward pass begins another step."""
        self._begun = False

    @torch.no_grad()
    def begin(self) -> None:
        """Before a forward pass, of which the step's first counts: see what was written since."""
        if self._begun:
            return
        self._begun = True
        pairs = zip(self.live(), self._at_keep, strict=True)
        for i, (now, (tensor, version)) in enumerate(pairs):
            if now is not tensor or _version(now) != version:
                self._written[i] = now, None if now is None else now.clone()

    def _take_written(self) -> None:
        """Go back to what was written between steps, where that was no worse; may wait."""
        if not self._written:
            return
        live = self.live()
        worse = self._badness(of=[value for _, value in self._written.values()])
        for (i, (source, value)), bad in zip(self._written.items(), worse, strict=True):
            before = self._at_keep[i][0]
            lent = source is not before and live[i] is before  # by functional_call
            if not lent and bad <= self._bad[i]:
                self.kept[i] = value
        self._written = {}

    @property
    def nan(self) -> str:
        """The names of those that held a NaN when they were last kept."""
        pairs = zip(self._places, self._bad, strict=True)
        return ", ".join(name for (_, _, name), bad in pairs if bad == 2)

    def spoiled(self, largest: Sequence[float] | None = None) -> list[int]:
        """Which buffers are spoiled now, by number; empty as a rule.

        Args:
            largest: as `look` gave them; None: ask the device.
        """
        self._now = self._badness(largest)
        pairs = zip(self._now, self._bad, strict=True)
        return [i for i, (now, before) in enumerate(pairs) if now > before]

    def are_well(self) -> bool:
        """Whether none is spoiled; waits for the device."""
        return not self.spoiled()

    def words(self, some: Iterable[int]) -> str:
        """The names of some buffers."""
        return ", ".join(self._places[i][2] for i in some)

    @torch.no_grad()
    def heal(self, spoiled: Sequence[int]) -> None:
        """Put buffers back that were spoiled, here or on another rank, with those of their modules.

        Args:
            spoiled: their numbers, once `spoiled` was asked.
        """
        if not spoiled:
            return
        self._take_written()
        modules = {id(self._places[i][0]) for i in spoiled}
        for i, (module, _, _) in enumerate(self._places):
            if id(module) in modules:
                self._put_back(i, self.kept[i])
                self._now[i] = self._bad[i]

    @torch.no_grad()
    def put_back(self, values: Sequence[Tensor | None] | None = None) -> None:
        """Give the buffers the values that `live` showed.

        Args:
            values: of `live`; None: those to go back to.
        """
        if values is None:
            self._take_written()
        for i, value in enumerate(self.kept if values is None else values):
            self._put_back(i, value)
        self._now = [*self._bad]
        if values is None:
            self._mark()

    def _put_back(self, i: int, value: Tensor | None) -> None:
        module, key, _ = self._places[i]
        now = module._buffers[key]
        if now is not None and value is not None:
            now.copy_(value)
        else:  # made by a forward pass, the first one as a rule
            where = self._beside.device
            module._buffers[key] = None if value is None else value.to(where, copy=True)


def _version(tensor: Tensor | None) -> int | None:
    """Grows with each write in place; None where it is not counted."""
    return None if tensor is None or tensor.is_inference() else tensor._version
