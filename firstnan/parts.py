"""Divide a model and its optimizer into parts that are restored or re-initialized separately."""

from __future__ import annotations

import copy
from collections import UserList
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from firstnan._buffers import Buffers
from firstnan._norms import local, read
from firstnan._optimizers import Optimizers
from firstnan.errors import GUARD_STOPPED, UserError

SNAPSHOT_EVERY = 100  # steps between two snapshots of a part's state
WHOLE, SHARED = "model", "shared"  # the only part without `parts`; the part of all other weights

Parameters = nn.Module | Iterable[nn.Parameter]


class TooFewHealthyParts(UserError, RuntimeError):
    """Too few parts are healthy to continue training; the message says what was wrong with them."""

    exit_code = GUARD_STOPPED


@dataclass
class ModulePart:
    """A part's weights and buffers, and its last good state."""

    name: str
    weights: list[nn.Parameter]
    buffers: Buffers
    modules: list[nn.Module] = field(default_factory=list)
    good: dict[str, Any] | None = None
    due: int = 0  # the step from which the next snapshot may be taken

    @property
    def resets(self) -> list[Callable[[], object]]:
        """The `reset_parameters` methods of the part's modules."""
        children = [child for module in self.modules for child in module.modules()]
        methods = [getattr(child, "reset_parameters", None) for child in children]
        return [method for method in methods if callable(method)]


class ModuleParts(UserList[ModulePart]):
    """The parts of a model, with their optimizer state and buffers; takes the arguments of `Guard`.

    The last part is `shared` if some trained weights are in no named part.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        parts: Mapping[str, Parameters] | None,
        *,
        fresh_optimizer: bool = False,
    ) -> None:
        self._optimizers, self._fresh_optimizer = optimizers, fresh_optimizer
        self.data, shared = _divide(model, optimizers, parts)
        self._owned = {id(p) for p in self.weights()}
        self.names = [part.name for part in self]
        # Of each part, then the buffers of no part.
        self.buffers = [(part.name, part.buffers) for part in self] + [(SHARED, shared)]
        self.note = ", with a fresh optimizer" if fresh_optimizer else ""  # for events
        self.everywhere: Callable[[list[bool]], list[bool]] = list  # true on every rank

    def weights(self) -> list[nn.Parameter]:
        """Return the parameters of all parts."""
        return [p for part in self for p in part.weights]

    def check_gradients(self) -> None:
        """Raise ValueError if the optimizer would update a parameter that is in no part."""
        for group in self._optimizers.groups:
            if any(p.grad is not None and id(p) not in self._owned for p in group["params"]):
                raise ValueError(
                    "the optimizer has a gradient for a parameter that was added or unfrozen after "
                    "this Guard was made: make a new Guard"
                )

    def snapshot(self, parts: Sequence[int], step: int, every: int) -> None:
        """Copy the state of the parts whose snapshot is due to the CPU, if the state is finite.

        Call this before `step` is applied: its finite gradient showed that the state is good.
        """
        due = [self[part] for part in parts if step >= self[part].due]
        finite = self.everywhere(self._are_finite(due))
        for part, is_finite in zip(due, finite, strict=True):
            part.due = step + every
            if is_finite:
                part.good = {
                    "step": step,
                    "weights": [_to_cpu(p) for p in part.weights],
                    "state": [{k: _to_cpu(v) for k, v in row.items()} for row in self._state(part)],
                    "buffers": [_to_cpu(b) for b in part.buffers.live()],
                }

    def _state(self, part: ModulePart) -> list[dict[str, Any]]:
        return [dict(self._optimizers.state(p).get(p, {})) for p in part.weights]

    def _are_finite(self, parts: Sequence[ModulePart]) -> list[bool]:
        """Return whether weights and optimizer state of each are finite; wait once."""
        columns = []
        for part in parts:
            state = (value for row in self._state(part) for value in row.values())
            tensors = [local(v) for v in (*part.weights, *state) if isinstance(v, Tensor)]
            columns.append([~torch.isfinite(tensor).all() for tensor in tensors])
        return [not column.any() for column in read(columns, self[0].weights[0].device)]

    def finite(self) -> list[bool]:
        """Return whether the weights, optimizer state and buffers of each part are finite."""
        pairs = zip(self._are_finite(self), self, strict=True)
        return self.everywhere([finite and not part.buffers.spoiled() for finite, part in pairs])

    @torch.no_grad()
    def restore(self, part: int) -> int | None:
        """Restore a part's last good state; return the step of that state, or None without one."""
        mine = self[part]
        if mine.good is None:
            return None
        saved_rows = zip(mine.weights, mine.good["weights"], mine.good["state"], strict=True)
        for p, weight, saved in saved_rows:
            p.copy_(weight)
            if self._fresh_optimizer:
                self._optimizers.state(p).pop(p, None)
                continue
            live = self._optimizers.state(p)[p]
            for key in live.keys() - saved.keys():
                del live[key]
            for key, value in saved.items():
                if isinstance(value, Tensor) and key in live:
                    live[key].copy_(value)  # a step count may not be on its weight's device
                else:
                    live[key] = copy.deepcopy(value)
        mine.buffers.load(mine.good["buffers"])
        return mine.good["step"]

    @torch.no_grad()
    def reinitialize(self, part: int, step: int) -> None:
        """Re-initialize a part before `step`; torch's global random generators do not advance."""
        mine, seed = self[part], hash((step, part)) & (2**63 - 1)  # equal on all ranks
        gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
        with torch.random.fork_rng(gpus):
            torch.default_generator.manual_seed(seed)
            if gpus:
                torch.cuda.manual_seed_all(seed)
            for reset in mine.resets:
                reset()
        for p in mine.weights:
            self._optimizers.state(p).pop(p, None)
        mine.good, mine.due = None, 0
        mine.buffers.keep()

    def state_dict(self) -> dict[str, Any]:
        """Return the last good state of each part by name, for a checkpoint."""
        return {part.name: {"good": part.good, "due": part.due} for part in self}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; raise ValueError if its parts are not this guard's."""
        if list(state) != self.names:
            raise ValueError(
                f"the state has the parts {', '.join(state)}; this guard has "
                f"{', '.join(self.names)}: make the Guard with the same `parts` as before"
            )
        for part in self:
            part.good = copy.deepcopy(state[part.name]["good"])
            part.due = state[part.name]["due"]
            part.buffers.keep()


def _divide(
    model: nn.Module,
    optimizers: Optimizers,
    named: Mapping[str, Parameters] | None,
) -> tuple[list[ModulePart], Buffers]:
    """Return the parts, and the buffers of modules that are in no part."""
    held = {id(p): p for group in optimizers.groups for p in group["params"]}
    for name, p in model.named_parameters():
        if id(p) in held and p.requires_grad and p.dtype == torch.float16:
            raise ValueError(
                f"parameter {name!r} is float16, expected float32 (float16 loses small updates):"
                " call model.float() before you make the optimizer, and compute in half precision"
                " under torch.autocast, with Guard(..., scaler=True)"
            )
    trainable = [p for p in model.parameters() if p.requires_grad]
    if trainable and not any(id(p) in held for p in trainable):
        raise ValueError(
            f"the optimizer holds none of the {len(trainable)} trainable parameters of the model: "
            "make it from this model's parameters (the parameters of a copy are other objects)"
        )
    if named is None:
        # In the model's order, in which clip_grad_norm_(model.parameters()) adds up.
        weights = list(({id(p): p for p in model.parameters() if id(p) in held} | held).values())
        buffers = Buffers(model.named_modules(), weights[0])
        return [ModulePart(WHOLE, weights, buffers, [model])], Buffers([], weights[0])
    if not named or SHARED in named:
        raise ValueError(
            f"parts has the names {list(named)}; expected one or more, none of them {SHARED!r}, "
            "which the guard uses for all other weights"
        )
    owner: dict[int, str] = {}
    parts, taken = [], set()
    for name, what in named.items():
        weights = _weights(name, what, held)
        for p in weights:
            if id(p) in owner:
                raise ValueError(
                    f"parts {name!r} and {owner[id(p)]!r} share a parameter of shape "
                    f"{tuple(p.shape)}: leave it out of both, or pass loss terms instead of parts"
                )
            owner[id(p)] = name
        modules = [what] if isinstance(what, nn.Module) else []
        inner = [pair for module in modules for pair in module.named_modules()]
        taken |= {id(module) for _, module in inner}
        parts.append(ModulePart(name, weights, Buffers(inner, weights[0]), modules))
    others = ((key, module) for key, module in model.named_modules() if id(module) not in taken)
    shared = Buffers(others, parts[0].weights[0])
    if rest := [p for key, p in held.items() if key not in owner and p.requires_grad]:
        parts.append(ModulePart(SHARED, rest, shared))
        shared = Buffers([], rest[0])
    return parts, shared


def _weights(name: str, what: Parameters, held: Mapping[int, nn.Parameter]) -> list[nn.Parameter]:
    """Return a part's trainable parameters without repeats; `what` is the value in `parts`."""
    weights: Any = what.parameters() if isinstance(what, nn.Module) else what
    if isinstance(weights, nn.Parameter):  # iterating over it would give its rows
        weights = [weights]
    weights = list(weights) if isinstance(weights, Iterable) else [weights]
    if not all(isinstance(p, nn.Parameter) for p in weights):
        raise ValueError(f"part {name!r} is {what!r}; expected a module or a list of parameters")
    weights = list({id(p): p for p in weights if p.requires_grad}.values())
    if not weights:
        raise ValueError(
            f"part {name!r} has no trainable parameter: leave the part out, or unfreeze its weights"
        )
    for p in weights:
        if id(p) not in held:
            raise ValueError(
                f"part {name!r} has a parameter of shape {tuple(p.shape)} that is not in the "
                "optimizer: make the optimizer from the parameters of all parts"
            )
    return weights


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)
