"""Choose the active experts of a mixture-of-experts teacher, and load and save its routers.

Hooks on the routers of a Hugging Face model replace their decisions; the model's code is unchanged.

References:
    Every Expert Matters, arXiv 2502.12947, 2025: knowledge augmentation (`ka`) and the
    student-aware router (`sar`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstnan.finite import compute_dtype
from ssl_kd.core.errors import InputError
from ssl_kd.core.files import atomic_write_bytes
from ssl_kd.language.losses.routing import gate_entropy, gate_kl
from ssl_kd.language.models.dtypes import cast_input

ROUTERS: dict[str, bool | str] = {
    "MixtralTopKRouter": True,
    "OlmoeTopKRouter": "norm_topk_prob",
    "Qwen2MoeTopKRouter": "norm_topk_prob",
    "Qwen3MoeTopKRouter": "norm_topk_prob",
}
"""Maps each supported router class to whether it divides the weights of the chosen experts by
their sum. A string is the name of the router's attribute that holds this boolean.

To support another class, set `ROUTERS["TheirTopKRouter"] = True`. The class must be a module that
is called with hidden states `[..., dim]`, has `weight` `[expert, dim]`, `top_k` and optionally
`bias`, gates by a softmax over all experts, and returns `(logits, weights, index)`, where `weights`
and `index` are `[token, chosen]`.
"""

_ROUNDING = 2**-7  # of a row, since both sides may be bfloat16 after float16
_LOOKS_LIKE_A_ROUTER = re.compile(r"(Router|MoEGate|TopKGating)$")


@dataclass(frozen=True)
class Routing:
    """Choice of the experts that are active for a token.

    `native` is the original model, bit for bit; `all` uses every expert; `sar` too, with a router
    in training; `ka` uses all experts except one. In `ka` the active experts of a token in a layer
    are, with probability `lam`, sampled without replacement from the gate, and otherwise the
    experts with the largest gates. `pinned` uses the experts that another pass over the same tokens
    chose, `Gates.chosen`.
    """

    mode: Literal["native", "all", "ka", "sar", "pinned"] = "native"
    lam: float = 0.05
    generator: torch.Generator | None = None  # for `ka`; a resumed run must restore its state
    chosen: Mapping[int, Tensor] = field(default_factory=dict)  # for `pinned`, by layer


@dataclass
class Gates:
    """Gates of one forward pass, recorded by `Mixture.watch`, and statistics of real tokens."""

    mask: Tensor | None  # boolean [token], the real tokens of the flattened batch
    n_experts: int
    # by layer, [token, expert], with gradient
    logits: dict[int, Tensor] = field(default_factory=dict)
    # active experts by layer, [token, chosen]
    chosen: dict[int, Tensor] = field(default_factory=dict)
    original: dict[int, Tensor] = field(default_factory=dict)  # logits of the original routers

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
        """Return a phrase that names the first layer whose gate is not finite; empty if all are."""
        for layer in sorted(self.logits):
            if not self.logits[layer].isfinite().all():
                return f"; its gate is not finite from layer {layer} on"
        return ""

    def mass(self) -> Tensor:
        """Return gate probabilities summed over real tokens, `[layer, expert]`, with gradient."""
        logits = self._real(self.logits)
        return torch.stack([x.to(compute_dtype(x)).softmax(-1).sum(0) for x in logits])

    def counts(self) -> Tensor:
        """Return the number of real tokens of each expert, float32 `[layer, expert]`."""
        chosen = self._real(self.chosen)
        count = partial(torch.bincount, minlength=self.n_experts)
        return torch.stack([count(index.flatten()) for index in chosen]).float()

    def entropy(self) -> Tensor:
        """Return the mean entropy of the gates in nats, `[layer]`, with gradient."""
        return self._mean([gate_entropy(x) for x in self._real(self.logits)])

    def drift(self) -> Tensor:
        """Return the mean KL(original gate || gate) on the same inputs in nats, `[layer]`."""
        pairs = zip(self._real(self.original), self._real(self.logits), strict=True)
        return self._mean([gate_kl(before, now) for before, now in pairs])


class Mixture:
    """Control the routers of a mixture-of-experts language model.

    The softmax over the chosen experts is computed in float32. The weights of a token's experts sum
    to the same value as in the original model: to one if the original router renormalizes its k
    largest gates, and otherwise to the probability of these k (`norm_topk_prob=False`). Forcing
    a sum of one on the second kind of model would scale up the output of every layer.

    Hooks are added to the model, and copies of the model keep them. Shared experts are unchanged.
    Sigmoid gates (DeepSeek-V3, GLM-4-MoE) are not supported.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.routing = model, Routing()
        self.routers = find_routers(model)
        self.layers = len(self.routers)
        router = next(iter(self.routers.values()))
        self.n_experts, self.dim, self.k = *router.weight.shape, router.top_k
        value = ROUTERS[type(router).__name__]
        self._renormalizes = bool(getattr(router, value)) if isinstance(value, str) else value
        self._original = {
            name: value.detach().to("cpu", copy=True)
            for name, value in self.router_parameters().items()
        }
        self._gates: Gates | None = None
        self._watch_original = False
        for layer, (name, router) in enumerate(self.routers.items()):
            router.register_forward_pre_hook(cast_input)  # float32 in training
            router.register_forward_hook(partial(self._route, layer, name))

    @contextmanager
    def using(self, routing: Routing) -> Iterator[None]:
        """Use another routing in the block, which must include a checkpointed backward pass."""
        before, self.routing = self.routing, routing
        try:
            yield
        finally:
            self.routing = before

    @contextmanager
    def original_router(self) -> Iterator[None]:
        """Use the original routers in the block, for an evaluation unaffected by training."""
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
        """Record the gates of the first forward pass in the block, for the real tokens of a mask.

        With `original`, the logits of the original routers on the same inputs are recorded too.
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
        is_pinned = self.routing.mode == "pinned"
        index = self.routing.chosen[layer] if is_pinned else self._choose(exact.detach())
        weights = torch.softmax(exact.gather(1, index), dim=-1)
        if not self._renormalizes:
            mass = exact.softmax(-1)
            kept = mass.gather(1, index) if is_pinned else mass.topk(self.k, -1).values
            weights = weights * kept.sum(-1, keepdim=True)
        self._record(layer, name, hidden, logits, index)
        # The dtype of the model's own weights, except Mixtral's, which stay float32 in float64.
        dtype = torch.promote_types(output[1].dtype, logits.dtype)
        return logits, weights.to(dtype), index, *output[3:]

    def _choose(self, logits: Tensor) -> Tensor:
        """Return the active experts of each token, `[token, chosen]`."""
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
        gates.logits[layer], gates.chosen[layer] = logits, index
        if self._watch_original:
            with torch.no_grad():
                weight = self._original[f"{name}.weight"].to(hidden)
                bias = self._original.get(f"{name}.bias")
                bias = None if bias is None else bias.to(hidden)
                gates.original[layer] = F.linear(hidden, weight, bias)

    def save_router(self, path: str | os.PathLike[str]) -> None:
        """Write the routers to a small safetensors file."""
        from safetensors.torch import save

        tensors = {
            name: value.detach().cpu().contiguous()
            for name, value in self.router_parameters().items()
        }
        rows = json.dumps(self._original_rows()[0].tolist())
        atomic_write_bytes(Path(path), save(tensors, metadata={"original_rows": rows}))

    def load_router(self, path: str | os.PathLike[str]) -> None:
        """Load routers that `save_router` wrote for the same teacher, in the dtype of the file."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(f"ROUTER_WEIGHTS: there is no router file {path}")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise InputError(
                f"{path} is not a safetensors file ({error}): name the router.safetensors of a run"
            ) from error
        rows, norms = self._original_rows()
        try:
            saved = torch.tensor(json.loads(metadata.get("original_rows", "[]")), dtype=rows.dtype)
        except (ValueError, TypeError):
            saved = torch.empty(0)
        if saved.shape != rows.shape or not ((saved - rows).abs() <= _ROUNDING * norms).all():
            raise InputError(
                f"{path} is not a router of this teacher: original_rows differs, so the router was "
                "trained from other weights: use the teacher that the router was trained for"
            )
        parameters = self.router_parameters()
        for name, parameter in parameters.items():
            value = tensors.get(name)
            if value is None or value.shape != parameter.shape or not value.isfinite().all():
                raise InputError(
                    f"{path}: the tensor {name} is missing, not finite, or does not have the shape "
                    f"{list(parameter.shape)}: save the router again"
                )
        for name, parameter in parameters.items():
            parameter.data = tensors[name].to(parameter.device)

    def _original_rows(self) -> tuple[Tensor, Tensor]:
        """Return a checksum of each row of the original routers, `[row]`, and the rows' norms.

        A checksum depends on every weight of its row, and on the dtype only through rounding.
        """
        values = [torch.atleast_2d(value.double()) for value in self._original.values()]
        rows = [row for value in values for row in value]
        numbers = [row @ torch.arange(len(row), dtype=row.dtype).cos() for row in rows]
        return torch.stack(numbers), torch.stack([row.norm() for row in rows])


def is_mixture(model: nn.Module) -> bool:
    """Return whether a model has routers that `Mixture` supports."""
    return any(type(module).__name__ in ROUTERS for module in model.modules())


def find_routers(model: nn.Module) -> dict[str, Any]:
    """Return a model's routers by name; raise InputError if `Mixture` cannot control them."""
    architecture = type(model).__name__
    routers: dict[str, Any] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in ROUTERS:
            routers[name] = module
        elif _LOOKS_LIKE_A_ROUTER.search(kind):
            reason = (
                f"which is not one of {', '.join(ROUTERS)}; if this router gates by a softmax over "
                "all experts, add its class to ssl_kd.language.models.mixture.ROUTERS"
            )
            if hasattr(module, "e_score_correction_bias"):
                reason = "which gates by a sigmoid with a correction bias, not by a softmax"
            raise InputError(
                f"{architecture} has routers of type {kind}, {reason}. Or set ROUTER_MODE 'native'"
            )
    if not routers:
        raise InputError(
            f"{architecture} has no router, because it is a dense model: set ROUTER_MODE 'native', "
            f"or use a mixture of experts as the teacher ({', '.join(ROUTERS)})"
        )
    shapes = {(*r.weight.shape, r.top_k) for r in routers.values()}
    if len(shapes) > 1 or min(shapes)[0] < 2:
        raise InputError(
            f"the routers of {architecture} have the sizes (experts, dim, k) {sorted(shapes)}; "
            "expected one, of 2 or more experts: use ROUTER_MODE 'native'"
        )
    return routers


def _gate(router: Any, hidden: Tensor) -> Tensor:
    """Compute gate logits `[token, expert]`, which some routers do not return."""
    return F.linear(hidden, router.weight, getattr(router, "bias", None))
