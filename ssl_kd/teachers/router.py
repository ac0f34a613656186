"""A mixture's router that learns from the student, as in Every Expert Matters.

Its weights are a part like any other: the guard judges them, leaves a sick step out, goes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ssl_kd.guard.events import Event
from ssl_kd.guard.faults import Stage
from ssl_kd.guard.loop import Guard
from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.guard.precision import promote_to_fp32
from ssl_kd.losses.routing import load_balance
from ssl_kd.teachers.mixture import Gates, Mixture, Routing

_PART = "router"
_FIRST_SCALE = 2.0**12


@dataclass(frozen=True)
class RouterRecord:
    """What became of one router step.

    Attributes:
        applied: whether the weights moved.
        loss: objective and regularisation; NaN and infinities as they came.
        grad_norm: of all router gradients, before clipping; NaN if there was no backward pass.
        drift: KL(original gate || now) before the update, mean over layers and real tokens.
        entropy: of the gates, mean over layers and real tokens, in nats.
        event: for the event log, when the guard saw a fault or the router stopped.
    """

    applied: bool
    loss: float
    grad_norm: float
    drift: float
    entropy: float
    event: Event | None = None


class RouterStep:
    """Trains the routers of a mixture, and nothing else, with an optimizer of their own.

    One step minimises KL(p || q), p the teacher with every expert active and q the student, which
    stays fixed, plus `balance * (CV(m)^2 + CV(P)^2)` summed over layers. The gradient of every
    router runs through the layers above it, so this is a backward pass through the frozen teacher.

    A router could win by imitating the student: KL(original gate || now) is measured at every step,
    and beyond `drift_limit` the router stays as it is for the rest of the run.

    `step` is the whole of it, for a loss that is computed in one pass. For several batches run
    `backward` of each loss, and of `regularisation`, inside `routed`, then `update`.

    Args:
        mixture: its model is frozen, except for the routers; those become float32.
        learning_rate: of AdamW, at least 0.
        weight_decay: of AdamW.
        balance: weight of the load balance, beta in the paper.
        max_norm: the norm of all router gradients is clipped to this.
        drift_limit: in nats, mean over layers and real tokens.
        gradient_checkpointing: layers are run again in the backward pass instead of kept in memory.
        scale_loss: for a float16 teacher: the loss is scaled, the scale halved when it overflows.

    Raises:
        ValueError: names the argument that is out of range.

    References:
        Every Expert Matters, arXiv 2502.12947, 2025, equation 9.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        learning_rate: float = 1e-5,
        weight_decay: float = 0.0,
        balance: float = 0.01,
        max_norm: float = 1.0,
        drift_limit: float = 0.5,
        gradient_checkpointing: bool = False,
        scale_loss: bool = False,
    ) -> None:
        at_least_0 = {
            "learning_rate": learning_rate,
            "weight_decay": weight_decay,
            "balance": balance,
        }
        for name, value in at_least_0.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be at least 0, got {value}")
        for name, value in (("max_norm", max_norm), ("drift_limit", drift_limit)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self.mixture = mixture
        self.balance, self.drift_limit = balance, drift_limit
        model: Any = mixture.model
        model.requires_grad_(False)
        self._parameters = mixture.router_parameters()
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)
        promote_to_fp32(model)
        self._checkpointed = gradient_checkpointing
        self.optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=learning_rate, weight_decay=weight_decay
        )
        self.guard = Guard(
            model,
            self.optimizer,
            {_PART: self._parameters.values()},
            clip_grad=max_norm,
            scaler=scale_loss,
        )
        if scale_loss:
            self.guard.scale.fill_(_FIRST_SCALE)
        self.stopped = False

    @contextmanager
    def routed(self, mask: Tensor | None = None) -> Iterator[Gates]:
        """Every expert active, gates recorded, layers checkpointed: for forward *and* backward.

        Args:
            mask: boolean `[batch, token]`, real tokens.
        """
        with (
            self.mixture.using(Routing("sar")),
            self.mixture.watch(mask, original=True) as gates,
            _checkpointing(self.mixture.model) if self._checkpointed else nullcontext(),
        ):
            yield gates

    def regularisation(self, gates: Gates) -> Tensor:
        """What is added to the objective, a scalar with gradient to the routers."""
        return self.balance * load_balance(gates.mass(), gates.counts()).sum()

    def step(
        self, objective: Callable[[], Tensor], mask: Tensor | None = None, *, step: int = 0
    ) -> RouterRecord:
        """One update of the routers, or none at all.

        Args:
            objective: runs the teacher, with gradient, and returns KL(p || q), a scalar with q
                detached: `token_kd(p_logits, q_logits, divergence="reverse_kl")`.
            mask: boolean `[batch, token]`, real tokens, for the load balance and the monitor.
            step: number of the step, for the event.

        Raises:
            ValueError: the objective did not run the teacher, or ran it without gradients.

        Returns:
            What was seen; with a loss or gradient that is not finite, or too much drift, every bit
            of routers and optimizer is as before, and `event` says so.
        """
        self.optimizer.zero_grad()
        with self.routed(mask) as gates:
            divergence = objective()
            if not (gates.logits and divergence.requires_grad):
                raise ValueError(
                    "the objective must run this teacher itself, with gradients on: a teacher from "
                    "a cache or under torch.no_grad() cannot train its router"
                )
            loss = divergence + self.regularisation(gates)
            if not self.stopped:
                self.backward(loss)
        return self.update(loss, gates, step=step)

    def backward(self, loss: Tensor) -> None:
        """Backward pass of a loss, scaled where this step scales; inside `routed`."""
        self.guard.backward({_PART: loss})

    @torch.no_grad()
    def update(self, loss: Tensor, gates: Gates, *, step: int = 0) -> RouterRecord:
        """Judge and apply the gradients that `backward` left at the routers; `step` ends with it.

        Args:
            loss: whose gradients they are.
            gates: of the forward pass.
            step: number of the step, for the event.
        """
        drift, entropy = (float(x.mean()) for x in (gates.drift(), gates.entropy()))
        seen = partial(RouterRecord, loss=float(loss), drift=drift, entropy=entropy)
        if self.stopped:
            return seen(applied=False, grad_norm=math.nan)
        if drift > self.drift_limit:
            self.stopped = True
            self.guard.discard()
            limit = self.drift_limit
            event = Stage.DRIFT.event(step, _PART, drift, drift=drift, limit=limit)
            return seen(applied=False, grad_norm=math.nan, event=event)
        scale, first = float(self.guard.scale[0]), len(self.guard.events)
        try:
            applied = bool(self.guard.step())
        except TooFewHealthyParts:
            applied, self.stopped = False, True
        self.optimizer.zero_grad()
        faults = [e for e in self.guard.events.events[first:] if Stage.of(e) is not None]
        norm = float(self.guard.grad_norm[0]) if math.isfinite(loss) else math.nan
        if not faults:
            return seen(applied=applied, grad_norm=norm)
        detail = gates.where_not_finite()
        detail += f"; loss scale {scale:g}" if scale > 1 else ""
        detail += "; the router is no longer trained" if self.stopped else ""
        value = float(loss) if faults[0].stage == "loss" else norm
        event = replace(faults[0], step=step, value=value, reason=faults[0].reason + detail)
        return seen(applied=applied, grad_norm=norm, event=event)

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-identical resume needs: routers, optimizer, guard, if stopped."""
        return {
            "routers": {name: p.detach().clone() for name, p in self._parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "guard": self.guard.state_dict(),
            "stopped": self.stopped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            ValueError: it belongs to other routers.
        """
        theirs = {name: value.shape for name, value in state["routers"].items()}
        ours = {name: value.shape for name, value in self._parameters.items()}
        if theirs != ours:
            differ = sorted(theirs.items() ^ ours.items())
            raise ValueError(f"this state belongs to other routers: {differ[0][0]} differs")
        with torch.no_grad():
            for name, value in state["routers"].items():
                self._parameters[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.guard.load_state_dict(state["guard"])
        self.stopped = state["stopped"]


@contextmanager
def _checkpointing(model: nn.Module) -> Iterator[None]:
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [
        layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)
    ]
    before = [(layer.gradient_checkpointing, layer.training) for layer in layers]
    for layer in layers:
        layer.gradient_checkpointing = True
        # By hand: the method's name changes between releases. Layers checkpoint only in training
        # mode; what is inside them stays in eval mode, so dropout stays off.
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.training = True
    try:
        yield
    finally:
        for layer, (checkpointing, training) in zip(layers, before, strict=True):
            layer.gradient_checkpointing, layer.training = checkpointing, training
