"""Undo what a bad batch did to buffers that forward passes change, such as BatchNorm statistics."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from firstnan._hooks import version_of, weakly
from firstnan._norms import read

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_FLOATS |= {torch.complex64, torch.complex128}


class Buffers:
    """Keep the buffers of some modules as they were before a step's forward pass.

    The values are copied at the end of each step; buffers written between steps are copied again at
    the next step's first forward pass. Writes through `.data` are missed, and so are writes before
    a forward pass that is compiled as a whole.

    A buffer counts as spoiled if it holds a NaN or infinity and did not before. So a mask of -inf,
    or an observer's bounds that start infinite, do not count. Buffers that are not persistent are
    caches, whose shape may change; they are not kept.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], weight: nn.Parameter) -> None:
        self._places = [
            (module, key, f"{name}.{key}" if name else key)
            for name, module in modules
            for key in module._buffers.keys()  # noqa: SIM118 - TorchScript's cannot be iterated
            if key not in module._non_persistent_buffers_set
        ]
        self._weight = weight
        self.keep()
        self.end_step()
        hook = weakly(self._begin)
        for module, _, name in {id(place[0]): place for place in self._places}.values():
            if isinstance(module, torch.jit.RecursiveScriptModule):  # pyright: ignore[reportPrivateImportUsage]
                raise ValueError(
                    f"the buffer {name} belongs to a scripted module (torch.jit.script), which "
                    "takes no hooks: make the Guard for the Python module, and script the module "
                    "after training"
                )
            handle = module.register_forward_pre_hook(hook)
            weakref.finalize(self, handle.remove)

    def __len__(self) -> int:
        return len(self._places)

    def live(self) -> list[Tensor | None]:
        """Return the current tensors of the buffers; a module may have replaced some."""
        return [module._buffers[key] for module, key, _ in self._places]

    def look(self, of: Sequence[Tensor | None] | None = None) -> list[Tensor]:
        """Return the largest magnitude, or NaN, in each buffer or tensor `of`; does not wait."""
        tensors = self.live() if of is None else of
        largest = [torch.zeros((), device=self._weight.device)] * len(tensors) if tensors else []
        floats = {
            i: b
            for i, b in enumerate(tensors)
            if b is not None and b.dtype in _FLOATS and b.layout == torch.strided and b.numel()
        }
        if floats:
            norms = torch._foreach_norm(list(floats.values()), math.inf)  # pyright: ignore
            for i, norm in zip(floats, norms, strict=True):
                largest[i] = norm
        return largest

    def _read(self, of: Sequence[Tensor | None] | None = None) -> list[float]:
        (largest,) = read([self.look(of)], self._weight.device)
        return largest.tolist()

    def keep(self, *, ask: bool = True) -> None:
        """Copy the buffers; `ask` the device which are finite, or use the last `spoiled` result."""
        self.kept = [None if b is None else b.clone() for b in self.live()]
        if ask:
            self._now = _badness(self._read())
        self._bad = list(self._now)
        self._mark()

    def _mark(self) -> None:
        self._at_keep = [(b, version_of(b)) for b in self.live()]
        self._written: dict[int, tuple[Tensor | None, Tensor | None]] = {}

    def end_step(self) -> None:
        """Make the next forward pass count as the start of a step."""
        self._begun = False

    def _begin(self, module: nn.Module, _: object) -> None:
        """Copy buffers that were written since the last step, before its first forward pass."""
        if self._begun or not (module.training or torch.is_grad_enabled()):
            return
        self._begun = True
        pairs = zip(self.live(), self._at_keep, strict=True)
        for i, (now, (tensor, version)) in enumerate(pairs):
            if now is not tensor or version_of(now) != version:
                self._written[i] = now, None if now is None else now.detach().clone()

    def _take_written(self) -> None:
        """Take over values written between steps, unless they are worse; may wait."""
        if not self._written:
            return
        live = self.live()
        worse = _badness(self._read([value for _, value in self._written.values()]))
        for (i, (source, value)), bad in zip(self._written.items(), worse, strict=True):
            before = self._at_keep[i][0]
            lent = source is not before and live[i] is before  # by functional_call
            if not lent and bad <= self._bad[i]:
                self.kept[i] = value
        self._written = {}

    @property
    def nan(self) -> str:
        """The names of buffers that held a NaN when they were last copied."""
        return self.names(i for i, bad in enumerate(self._bad) if bad == 2)

    def spoiled(self, largest: Sequence[float] | None = None) -> list[int]:
        """Return the indices of the spoiled buffers; `largest`, from `look`, avoids a wait."""
        self._now = _badness(self._read() if largest is None else largest)
        pairs = zip(self._now, self._bad, strict=True)
        return [i for i, (now, before) in enumerate(pairs) if now > before]

    def names(self, numbers: Iterable[int]) -> str:
        """Return the names of the buffers with these indices, separated by commas."""
        return ", ".join(self._places[i][2] for i in numbers)

    @torch.no_grad()
    def put_back(self, spoiled: Sequence[int] | None = None) -> None:
        """Restore the kept values, with `spoiled` only in the modules of these buffers."""
        self._take_written()
        modules = {id(self._places[i][0]) for i in spoiled or ()}
        for i, (module, _, _) in enumerate(self._places):
            if spoiled is None or id(module) in modules:
                self._set(i, self.kept[i])
                self._now[i] = self._bad[i]
        if spoiled is None:
            self._mark()

    @torch.no_grad()
    def load(self, values: Sequence[Tensor | None]) -> None:
        """Set all buffers to `values`, in the order of `live`, and keep them."""
        for i, value in enumerate(values):
            self._set(i, value)
        self.keep()

    def _set(self, i: int, value: Tensor | None) -> None:
        module, key, _ = self._places[i]
        now = module._buffers[key]
        if now is not None and value is not None:
            now.copy_(value)
        else:  # made by a forward pass, usually the first one
            where = self._weight.device
            module._buffers[key] = None if value is None else value.to(where, copy=True)


def _badness(largest: Iterable[float]) -> list[int]:
    """Return 0 for a finite buffer, 1 for a buffer with an infinity, 2 for one with a NaN."""
    return [2 if math.isnan(x) else int(math.isinf(x)) for x in largest]
