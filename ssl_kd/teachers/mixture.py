"""Mixture-of-experts teachers: how many experts are active, and routers that can be trained.

A Hugging Face model stays as it is; hooks on its routers replace what they decide. Knowledge
augmentation (`ka`) and the student-aware router (`sar`) are those of Every Expert Matters, arXiv
2502.12947, 2025.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_kd.errors import InputError
from ssl_kd.files import atomic_write_bytes
from ssl_kd.guard.finite import compute_dtype
from ssl_kd.losses.routing import gate_entropy, gate_kl

ROUTERS: dict[str, bool | str] = {
    "MixtralTopKRouter": True,
    "OlmoeTopKRouter": "norm_topk_prob",
    "Qwen2MoeTopKRouter": "norm_topk_prob",
    "Qwen3MoeTopKRouter": "norm_topk_prob",
}
"""Supported router classes, and whether they divide the chosen weights by their sum: yes, no, or
the name of the attribute that says so.

To add one, set `ROUTERS["TheirTopKRouter"] = True`. It must be a module that is called with hidden
states `[..., dim]`, holds `weight` `[expert, dim]` (and perhaps `bias`) and `top_k`, gates by a
softmax over all experts, and returns `(logits, weights, index)`, the last two `[token, chosen]`.
"""

_ROUNDING = 2**-7  # of a row, since both sides may be bfloat16 after float16
_LOOKS_LIKE_A_ROUTER = re.compile(r"(Router|MoEGate|TopKGating)$")


@dataclass(frozen=True)
class Routing:
    """Which experts are active for a token, and with what weight.

    Attributes:
        mode: `native`, the original model, bit for bit; `all`, every expert, the baseline; `ka`,
            all experts except one: per layer and token, with probability `lam`, sampled without
            replacement from the gate, otherwise the largest; `sar`, every expert, for a router in
            training.
        lam: for `ka`, from 0 to 1.
        generator: for `ka`, required, on any device. Its state is all that a resumed run needs.
    """

    mode: Literal["native", "all", "ka", "sar"] = "native"
    lam: float = 0.05
    generator: torch.Generator | None = None


@dataclass
class Gates:
    """What the gates decided in one forward pass, over real tokens only; see `Mixture.watch`.

    Attributes:
        mask: boolean `[token]` over the flattened batch; None if all are real.
        n_experts: N.
        logits: layer -> `[token, expert]`, with gradient.
        chosen: layer -> `[token, chosen]`, the active experts.
        original: layer -> `[token, expert]`, logits of the original router.
    """

    mask: Tensor | None
    n_experts: int
    logits: dict[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, Tensor] = field(default_factory=dict)
    original: dict[int, Tensor] = field(default_factory=dict)

    def _real(self, values: dict[int, Tensor]) -> list[Tensor]:
        layers = [values[layer] for layer in sorted(values)]
        if self.mask is None:
            return layers
        # Rows are selected before any arithmetic, because 0 times a NaN gradient is NaN.
        rows = self.mask.nonzero().flatten()
        return [layer.index_select(0, rows.to(layer.device)) for layer in layers]

    def _mean(self, values: list[Tensor]) -> Tensor:
        return torch.stack([v.sum() / max(len(v), 1) for v in values])

    def where_not_finite(self) -> str:
        """Name the first layer whose gate is not finite; empty if all are finite."""
        for layer in sorted(self.logits):
            if not self.logits[layer].isfinite().all():
                return f"; its gate is not finite from layer {layer} on"
        return ""

    def mass(self) -> Tensor:
        """P: gate probabilities summed over real tokens, `[layer, expert]`, with gradient."""
        logits = self._real(self.logits)
        return torch.stack([x.to(compute_dtype(x)).softmax(-1).sum(0) for x in logits])

    def counts(self) -> Tensor:
        """m: number of real tokens of each expert, `[layer, expert]` float32."""
        chosen = self._real(self.chosen)
        count = partial(torch.bincount, minlength=self.n_experts)
        return torch.stack([count(index.flatten()) for index in chosen]).float()

    def entropy(self) -> Tensor:
        """Mean entropy of the gates, `[layer]` in nats, with gradient."""
        return self._mean([gate_entropy(x) for x in self._real(self.logits)])

    def drift(self) -> Tensor:
        """Mean KL(original gate || gate) on the same hidden states, `[layer]` in nats."""
        if not self.original:
            raise ValueError("the original gates were not recorded: watch(mask, original=True)")
        pairs = zip(self._real(self.original), self._real(self.logits), strict=True)
        return self._mean([gate_kl(before, now) for before, now in pairs])


class Mixture:
    """Controls the routers of a mixture-of-experts language model.

    The gate's softmax runs in float32 over the chosen experts. Their weights sum to what they sum
    to in the original model: to one if it renormalizes the k largest, else to their probability
    (`norm_topk_prob=False`). Such models were trained with that smaller sum, and more experts at
    weight one scale up the output of every layer: a small OLMoE of 8 experts, 2 active, trained on
    stories lost 0.094 and 0.047 nats per byte in mode `all` with weights that sum to one (two
    seeds), 0.058 and 0.030 as here.

    Shared experts are unchanged. Sigmoid gates (DeepSeek-V3, GLM-4-MoE) are refused.

    Args:
        model: a Hugging Face causal language model with routers of `ROUTERS`. Hooks are added to
            it, and later copies of it have them, too.

    Attributes:
        model: the model.
        routing: which experts are active; assign to it to change that.
        routers: name -> router, in the order of the layers.
        layers: number of routers.
        n_experts: N, without shared experts.
        k: number of active experts in the original model.

    Raises:
        ValueError: a dense model, unsupported routers, or layers of different sizes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.routing = model, Routing()
        self.routers: dict[str, Any] = _find_routers(model)
        shapes = {(*r.weight.shape, r.top_k) for r in self.routers.values()}
        if len(shapes) > 1:
            raise InputError(
                f"expected routers of one size, got (experts, dim, k) of {sorted(shapes)}"
            )
        self.layers = len(self.routers)
        self.n_experts, self.dim, self.k = shapes.pop()
        if self.n_experts < 2:
            raise InputError(
                f"{type(model).__name__} has {self.n_experts} expert; expected at least 2"
            )
        self._renormalizes = _renormalizes(next(iter(self.routers.values())))
        self._original = {
            name: value.detach().to("cpu", copy=True)
            for name, value in self.router_parameters().items()
        }
        self._gates: Gates | None = None
        self._watch_original = False
        for layer, (name, router) in enumerate(self.routers.items()):
            router.register_forward_pre_hook(_cast_to_router)
            router.register_forward_hook(partial(self._route, layer, name))

    @contextmanager
    def using(self, routing: Routing) -> Iterator[None]:
        """Use another routing; with gradient checkpointing, until after the backward pass."""
        before, self.routing = self.routing, routing
        try:
            yield
        finally:
            self.routing = before

    @contextmanager
    def original_router(self) -> Iterator[None]:
        """Use the original routers, for an evaluation that does not change with training."""
        parameters = self.router_parameters()
        current = {name: parameter.data for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.data = self._original[name].to(parameter)
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = current[name]

    @contextmanager
    def watch(self, mask: Tensor | None = None, *, original: bool = False) -> Iterator[Gates]:
        """Record the gates of the first forward pass.

        Args:
            mask: boolean `[batch, token]`, real tokens; None for all.
            original: also record the original routers' logits on the same hidden states.

        Raises:
            ValueError: in the forward pass, if the mask has another number of tokens.
        """
        flat = None if mask is None else mask.reshape(-1).bool()
        self._gates, self._watch_original = Gates(flat, self.n_experts), original
        try:
            yield self._gates
        finally:
            self._gates = None

    def router_parameters(self) -> dict[str, nn.Parameter]:
        """Return the router tensors only, named as in the model's state dict."""
        return {
            f"{name}.{key}": value
            for name, router in self.routers.items()
            for key, value in router.named_parameters(recurse=False)
        }

    def _route(
        self, layer: int, name: str, router: Any, args: tuple[Tensor], output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        hidden = args[0].reshape(-1, self.dim)
        if self.routing.mode == "native":
            if self._gates is not None:
                with torch.no_grad():
                    self._record(layer, name, hidden, _gate(router, hidden), output[2])
            return None
        logits = _gate(router, hidden)
        exact = logits.to(compute_dtype(logits))
        index = self._choose(exact.detach())
        weights = torch.softmax(exact.gather(1, index), dim=-1)
        if not self._renormalizes:
            weights = weights * exact.softmax(-1).topk(self.k, -1).values.sum(-1, keepdim=True)
        self._record(layer, name, hidden, logits, index)
        # The dtype of the model's own weights, except Mixtral's, which stay float32 in float64.
        dtype = torch.promote_types(output[1].dtype, logits.dtype)
        return logits, weights.to(dtype), index, *output[3:]

    def _choose(self, logits: Tensor) -> Tensor:
        """Choose the active experts of each token, `[token, chosen]`."""
        tokens, experts = logits.shape
        if self.routing.mode != "ka":
            return torch.arange(experts, device=logits.device).expand(tokens, experts)
        generator = self.routing.generator
        assert generator is not None, "mode 'ka' samples experts: it needs a torch.Generator"
        draw = torch.rand(tokens, 1, generator=generator, device=generator.device)
        noise = torch.empty(tokens, experts, device=generator.device)
        noise.exponential_(generator=generator)
        # The largest of logits plus Gumbel noise are a sample without replacement from the softmax
        # (Kool et al., 2019). Unlike multinomial this works with gates that underflow or are NaN.
        sampled = logits - noise.log().to(logits)
        scores = torch.where((draw < self.routing.lam).to(logits.device), sampled, logits)
        return scores.topk(experts - 1, dim=-1).indices

    def _record(self, layer: int, name: str, hidden: Tensor, logits: Tensor, index: Tensor) -> None:
        gates = self._gates
        # Checkpointed layers run again in the backward pass; only the first run is recorded. The
        # second run must have the same operations, so none with a gradient may be added here.
        if gates is None or layer in gates.logits:
            return
        if gates.mask is not None and len(gates.mask) != len(logits):
            raise ValueError(
                f"the mask has {len(gates.mask)} tokens, the forward pass {len(logits)}"
            )
        gates.logits[layer], gates.chosen[layer] = logits, index
        if self._watch_original:
            with torch.no_grad():
                weight = self._original[f"{name}.weight"].to(hidden)
                bias = self._original.get(f"{name}.bias")
                bias = None if bias is None else bias.to(hidden)
                gates.original[layer] = F.linear(hidden, weight, bias)

    def save_router(self, path: str | os.PathLike[str]) -> None:
        """Write the router tensors to a small safetensors file."""
        from safetensors.torch import save

        tensors = {
            name: value.detach().cpu().contiguous()
            for name, value in self.router_parameters().items()
        }
        rows = json.dumps(self._original_rows()[0].tolist())
        metadata = self._identity() | {"original_rows": rows}
        atomic_write_bytes(Path(path), save(tensors, metadata=metadata))

    def load_router(self, path: str | os.PathLike[str]) -> None:
        """Load routers from `save_router`, in the dtype of the file.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: not a router file, or one of another teacher; names what differs.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(f"no router file {path}")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise InputError(f"{path} is not a safetensors file: {error}") from error
        for key, value in self._identity().items():
            if metadata.get(key) != value:
                raise InputError(
                    f"{path} is not a router of this teacher: {key} is {metadata.get(key)!r} in "
                    f"the file and {value!r} here; load it with the teacher it was saved from"
                )
        rows, norms = self._original_rows()
        try:
            saved = torch.tensor(json.loads(metadata.get("original_rows", "[]")), dtype=rows.dtype)
        except (ValueError, TypeError):
            saved = torch.empty(0)
        if saved.shape != rows.shape or not ((saved - rows).abs() <= _ROUNDING * norms).all():
            raise InputError(
                f"{path} is not a router of this teacher: original_rows differs, so it was trained "
                "from other router weights; load it with the teacher it was saved from"
            )
        parameters = self.router_parameters()
        for name, parameter in parameters.items():
            value = tensors.get(name)
            if value is None or value.shape != parameter.shape or not value.isfinite().all():
                raise InputError(
                    f"{path}: {name} is missing, not of the shape {list(parameter.shape)}, or not "
                    "finite; save the router again"
                )
        for name, parameter in parameters.items():
            parameter.data = tensors[name].to(parameter.device)

    def _identity(self) -> dict[str, str]:
        return {
            "architecture": type(self.model).__name__,
            "layers": str(self.layers),
            "experts": str(self.n_experts),
            "dim": str(self.dim),
        }

    def _original_rows(self) -> tuple[Tensor, Tensor]:
        """Return one number for each row of the original routers, `[row]`, and the rows' norms.

        It depends on every weight, and on the dtype only through rounding.
        """
        values = [torch.atleast_2d(value.double()) for value in self._original.values()]
        rows = [row for value in values for row in value]
        numbers = [row @ torch.arange(len(row), dtype=row.dtype).cos() for row in rows]
        return torch.stack(numbers), torch.stack([row.norm() for row in rows])


def is_mixture(model: nn.Module) -> bool:
    """Whether a model has routers that `Mixture` supports."""
    return any(type(module).__name__ in ROUTERS for module in model.modules())


def _find_routers(model: nn.Module) -> dict[str, nn.Module]:
    architecture, routers = type(model).__name__, {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in ROUTERS:
            routers[name] = module
        elif _LOOKS_LIKE_A_ROUTER.search(kind):
            reason = (
                f"which is not one of {', '.join(ROUTERS)}; if it gates by a softmax over all "
                "experts, add it to ssl_kd.teachers.mixture.ROUTERS"
            )
            if hasattr(module, "e_score_correction_bias"):
                reason = "which gates by a sigmoid with a correction bias, not by a softmax"
            raise InputError(
                f"{architecture} has routers of type {kind}, {reason}. Use router_mode 'native'"
            )
    if not routers:
        raise InputError(
            f"{architecture} has no router, it is a dense model: use router_mode 'native', or a "
            f"mixture of experts as the teacher ({', '.join(ROUTERS)})"
        )
    return routers


def _renormalizes(router: nn.Module) -> bool:
    value = ROUTERS[type(router).__name__]
    return bool(getattr(router, value)) if isinstance(value, str) else value


def _gate(router: Any, hidden: Tensor) -> Tensor:
    """Compute gate logits `[token, expert]`; some releases' routers do not return them."""
    return F.linear(hidden, router.weight, getattr(router, "bias", None))


def _cast_to_router(router: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast the input, since a router in training is float32 in a half-precision model."""
    return args[0].to(router.weight.dtype), *args[1:]
