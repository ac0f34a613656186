"""Train the routers of a mixture-of-experts teacher for its student, under the guard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from firstnan.events import Event
from firstnan.faults import Stage
from firstnan.loop import Guard
from firstnan.parts import TooFewHealthyParts
from ssl_kd.core.precision import promote_to_fp32
from ssl_kd.language.losses.routing import load_balance
from ssl_kd.language.models.mixture import Gates, Mixture, Routing

_PART = "router"
_FIRST_SCALE = 2.0**12


@dataclass(frozen=True)
class RouterRecord:
    """Outcome of one router step."""

    applied: bool  # whether the weights changed
    loss: float  # objective plus load balance, possibly NaN or infinite
    grad_norm: float  # of all routers before clipping; NaN without a backward pass
    drift: float  # KL(original gate || gate) before the update, mean over layers and real tokens
    entropy: float  # of the gates in nats, mean over layers and real tokens
    event: Event | None = None  # if the step had a fault or the router was stopped


class RouterStep:
    """Train only the routers of a mixture of experts, with their own AdamW and guard.

    One step minimizes KL(p || q) + `balance * (CV(m)^2 + CV(P)^2)`. p is the teacher with every
    expert active, q the fixed student, m the tokens and P the gate probability of each expert; the
    second term is summed over layers. The backward pass runs through the frozen teacher, since the
    gradient of a router depends on the layers above it. A step that is not finite is skipped.

    A router could reduce this loss by making the teacher imitate the student. Therefore KL(original
    gate || gate) is measured at every step in nats, and a router that exceeds `drift_limit` is not
    trained any further. A float16 teacher needs `scale_loss`, a loss scale that is halved after an
    overflow.

    References:
        Every Expert Matters, arXiv 2502.12947, 2025, equation 9.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        learning_rate: float = 1e-5,
        balance: float = 0.01,
        drift_limit: float = 0.5,
        gradient_checkpointing: bool = False,
        scale_loss: bool = False,
    ) -> None:
        self.mixture, self.stopped = mixture, False
        self.balance, self.drift_limit = balance, drift_limit
        model: Any = mixture.model
        model.requires_grad_(False)
        self._parameters = mixture.router_parameters()
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)
        promote_to_fp32(model)
        self._checkpointed = gradient_checkpointing
        parameters = self._parameters.values()
        self.optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0)
        self.guard = Guard(
            model, self.optimizer, {_PART: parameters}, clip_grad=1.0, scaler=scale_loss
        )
        if scale_loss:
            self.guard.scale.fill_(_FIRST_SCALE)

    @contextmanager
    def routed(self, mask: Tensor | None = None) -> Iterator[Gates]:
        """Activate every expert and record the gates in the block, for the real tokens of a mask.

        The block must include the forward and the backward pass.
        """
        with (
            self.mixture.using(Routing("sar")),
            self.mixture.watch(mask, original=True) as gates,
            _checkpointing(self.mixture.model) if self._checkpointed else nullcontext(),
        ):
            yield gates

    def step(
        self, objective: Callable[[], Tensor], mask: Tensor | None = None, *, step: int = 0
    ) -> RouterRecord:
        """Update the routers once with the scalar `objective()`, KL(p || q) without gradient to q.

        If the loss or a gradient is not finite, or the drift is too large, routers and optimizer
        are bit-identical to their state before, and the record's `event` has the reason.
        """
        self.optimizer.zero_grad()
        with self.routed(mask) as gates:
            loss = objective() + self.balance * load_balance(gates.mass(), gates.counts()).sum()
            if not self.stopped:
                self.guard.backward({_PART: loss})
        return self._update(loss, gates, step=step)

    @torch.no_grad()
    def _update(self, loss: Tensor, gates: Gates, *, step: int) -> RouterRecord:
        """Check the gradients of the loss, and update the routers with them."""
        drift, entropy = (float(x.mean()) for x in (gates.drift(), gates.entropy()))
        record = partial(RouterRecord, loss=float(loss), drift=drift, entropy=entropy)
        if self.stopped:
            return record(applied=False, grad_norm=math.nan)
        if drift > self.drift_limit:
            self.stopped = True
            self.guard.discard()
            reason = f"KL(original gate || now) is {drift:.3g} nats, above {self.drift_limit}"
            reason += ": the router may be imitating the student"
            event = Event(step, _PART, "drift", reason, "stopped", drift)
            return record(applied=False, grad_norm=math.nan, event=event)
        scale, first = float(self.guard.scale[0]), len(self.guard.events)
        try:
            applied = bool(self.guard.step())
        except TooFewHealthyParts:
            applied, self.stopped = False, True
        self.optimizer.zero_grad()
        faults = [e for e in self.guard.events.events[first:] if Stage.of(e) is not None]
        norm = float(self.guard.grad_norm[0]) if math.isfinite(loss) else math.nan
        if not faults:
            return record(applied=applied, grad_norm=norm)
        detail = gates.where_not_finite()
        detail += f"; loss scale {scale:g}" if scale > 1 else ""
        detail += "; the router is no longer trained" if self.stopped else ""
        value = float(loss) if faults[0].stage == "loss" else norm
        event = replace(faults[0], step=step, value=value, reason=faults[0].reason + detail)
        return record(applied=applied, grad_norm=norm, event=event)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a bit-identical resume needs."""
        return {
            "routers": {name: p.detach().clone() for name, p in self._parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "guard": self.guard.state_dict(),
            "stopped": self.stopped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of the same routers."""
        with torch.no_grad():
            for name, value in state["routers"].items():
                self._parameters[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.guard.load_state_dict(state["guard"])
        self.stopped = state["stopped"]


@contextmanager
def _checkpointing(model: nn.Module) -> Iterator[None]:
    """Recompute the layers of a model in the backward pass, without dropout."""
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [
        layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)
    ]
    # A layer checkpoints only in training mode; the modules in it stay in evaluation mode.
    before = [(layer.gradient_checkpointing, layer.training) for layer in layers]
    for layer in layers:
        layer.gradient_checkpointing = layer.training = True
        # The method that sets this has different names in different releases.
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    try:
        yield
    finally:
        for layer, (checkpointing, training) in zip(layers, before, strict=True):
            layer.gradient_checkpointing, layer.training = checkpointing, training
