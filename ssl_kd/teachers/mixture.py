"""Mixture-of-experts teachers: how many experts answer, and a router that learns from the student.

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
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_kd.errors import InputError
from ssl_kd.files import atomic_write_bytes
from ssl_kd.guard.finite import compute_dtype
from ssl_kd.losses.routing import gate_entropy, gate_kl

Mode = Literal["native", "all", "ka", "sar"]

ROUTERS: dict[str, bool | str] = {
    "MixtralTopKRouter": True,
    "OlmoeTopKRouter": "norm_topk_prob",
    "Qwen2MoeTopKRouter": "norm_topk_prob",
    "Qwen3MoeTopKRouter": "norm_topk_prob",
}
"""Router classes that can be steered, and whether they divide the chosen weights by their sum: yes,
no, or the name of the attribute that says so.

To add one, set `ROUTERS["TheirTopKRouter"] = True`. It must be a module that is called with hidden
states `[..., dim]`, holds `weight` `[expert, dim]` (and perhaps `bias`) and `top_k`, gates by a
softmax over all experts, and returns `(logits, weights, index)`, the last two `[token, chosen]`.
"""

_ROUNDING = 2**-7  # of a row: both sides may be bfloat16, after float16
_LOOKS_LIKE_A_ROUTER = re.compile(r"(Router|MoEGate|TopKGating)$")


@dataclass(frozen=True)
class Routing:
    """Which experts answer a token, and with what weight.

    Attributes:
        mode: `native`, as the model came, to the bit; `all`, every expert, the baseline; `ka`, per
            layer and token and with probability `lam` a subset sampled without replacement from the
            gate, otherwise the largest; `sar`, every expert, for a router that is being trained.
        lam: for `ka`, 0 to 1.
        subset: for `ka`, how many experts answer; None for all but one.
        generator: for `ka`, where its randomness comes from, on any device. Its state is all that a
            resumed run needs.

    Raises:
        ValueError: names the field.
    """

    mode: Mode = "native"
    lam: float = 0.05
    subset: int | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {self.mode!r}")
        if not 0 <= self.lam <= 1:
            raise ValueError(f"lam is a probability, 0 to 1, got {self.lam}")
        if self.mode == "ka" and self.generator is None:
            raise ValueError("mode 'ka' samples experts: give it a torch.Generator")


@dataclass
class Gates:
    """What the gates decided in one forward pass, over real tokens only; see `Mixture.watch`.

    Attributes:
        mask: boolean `[token]` over the flattened batch; None if all are real.
        n_experts: N.
        logits: by layer, `[token, expert]`, attached to the graph.
        chosen: by layer, `[token, chosen]`, the experts that answered.
        original: by layer, `[token, expert]`, the answer of the original router.
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
        # Rows are taken before any arithmetic: 0 times a NaN gradient would be NaN.
        rows = self.mask.nonzero().flatten()
        return [layer.index_select(0, rows.to(layer.device)) for layer in layers]

    def _mean(self, values: list[Tensor]) -> Tensor:
        return torch.stack([v.sum() / max(len(v), 1) for v in values])

    def where_not_finite(self) -> str:
        """The first layer whose gate is not finite, in words; empty if all are."""
        for layer in sorted(self.logits):
            if not self.logits[layer].isfinite().all():
                return f"; its gate is not finite from layer {layer} on"
        return ""

    def mass(self) -> Tensor:
        """P: gate probabilities summed over real tokens, `[layer, expert]`, with gradient."""
        logits = self._real(self.logits)
        return torch.stack([x.to(compute_dtype(x)).softmax(-1).sum(0) for x in logits])

    def counts(self) -> Tensor:
        """m: how many real tokens each expert answered, `[layer, expert]` float32."""
        chosen = self._real(self.chosen)
        count = partial(torch.bincount, minlength=self.n_experts)
        return torch.stack([count(index.flatten()) for index in chosen]).float()

    def entropy(self) -> Tensor:
        """Mean entropy of the gates, `[layer]` in nats, with gradient."""
        return self._mean([gate_entropy(x) for x in self._real(self.logits)])

    def drift(self) -> Tensor:
        """Mean KL(original gate || gate now) on the same hidden states, `[layer]` in nats."""
        if not self.original:
            raise ValueError("the original gates were not recorded: watch(mask, original=True)")
        pairs = zip(self._real(self.original), self._real(self.logits), strict=True)
        return self._mean([gate_kl(before, now) for before, now in pairs])


class Mixture:
    """Steers the routers of a mixture-of-experts language model.

    The gate's softmax runs in float32, over the chosen experts. What the chosen weights sum to is
    what they sum to in the model as it came: one where it renormalises the k largest, and their
    probability where it does not (`norm_topk_prob=False`). Those models learned with that smaller
    sum, and more experts at weight one scale up the output of every layer: a small OLMoE of 8
    experts, 2 active, trained on stories lost 0.094 and 0.047 nats per byte in mode `all` with
    weights that sum to one (two seeds), 0.058 and 0.030 as here.

    Shared experts stay as they are. Gates by a sigmoid (DeepSeek-V3, GLM-4-MoE) are refused.

    Args:
        model: a Hugging Face causal language model with routers of `ROUTERS`. It is given hooks; a
            copy made of it from now on would hold them, too.

    Attributes:
        model: the model.
        routers: its routers by name, in the order of the layers.
        layers: how many there are.
        n_experts: N, without shared experts.
        k: how many are active as the model came.

    Raises:
        ValueError: a dense model; routers of another kind; layers of different sizes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.routers: dict[str, Any] = _find_routers(model)
        shapes = {(*r.weight.shape, r.top_k) for r in self.routers.values()}
        if len(shapes) > 1:
            raise InputError(
                f"routers of one size were expected, got (experts, dim, k) of {sorted(shapes)}"
            )
        self.layers = len(self.routers)
        self.n_experts, self.dim, self.k = shapes.pop()
        if self.n_experts < 2:
            raise InputError(
                f"{type(model).__name__} has {self.n_experts} expert; expected at least 2"
            )
        self._renormalises = _renormalises(next(iter(self.routers.values())))
        self._original = {
            name: value.detach().to("cpu", copy=True)
            for name, value in self.router_parameters().items()
        }
        self._routing = Routing()
        self._gates: Gates | None = None
        self._watch_original = False
        self._hooks = []
        for layer, (name, router) in enumerate(self.routers.items()):
            self._hooks.append(router.register_forward_pre_hook(_in_dtype_of_router))
            self._hooks.append(router.register_forward_hook(partial(self._route, layer, name)))

    def remove(self) -> None:
        """Take the hooks off the model; the weights stay as they are."""
        for hook in self._hooks:
            hook.remove()

    @property
    def routing(self) -> Routing:
        """How tokens find experts now; set it to change that."""
        return self._routing

    @routing.setter
    def routing(self, routing: Routing) -> None:
        if routing.subset is not None and not 1 <= routing.subset <= self.n_experts:
            raise ValueError(
                f"subset is {routing.subset}, expected 1 to {self.n_experts}, the number of experts"
            )
        self._routing = routing

    @property
    def mode(self) -> Mode:
        """The mode of `routing`."""
        return self._routing.mode

    @contextmanager
    def using(self, routing: Routing) -> Iterator[None]:
        """Another routing for a while; with gradient checkpointing, until after the backward."""
        before, self.routing = self._routing, routing
        try:
            yield
        finally:
            self._routing = before

    @contextmanager
    def original_router(self) -> Iterator[None]:
        """The original routers for a while, for a judgement that does not move with them."""
        parameters = self.router_parameters()
        now = {name: parameter.data for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.data = self._original[name].to(parameter)
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = now[name]

    @contextmanager
    def watch(self, mask: Tensor | None = None, *, original: bool = False) -> Iterator[Gates]:
        """Record the gates of the first forward pass inside.

        Args:
            mask: boolean `[batch, token]`, real tokens; None for all.
            original: also what the original routers say on the same hidden states.

        Raises:
            ValueError: in the forward pass, a mask of another number of tokens.
        """
        flat = None if mask is None else mask.reshape(-1).bool()
        self._gates, self._watch_original = Gates(flat, self.n_experts), original
        try:
            yield self._gates
        finally:
            self._gates = None

    def router_parameters(self) -> dict[str, nn.Parameter]:
        """The router tensors and nothing else, named as in the model's state dict."""
        return {
            f"{name}.{key}": value
            for name, router in self.routers.items()
            for key, value in router.named_parameters(recurse=False)
        }

    def _route(
        self, layer: int, name: str, router: Any, args: tuple[Tensor], output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        hidden = args[0].reshape(-1, self.dim)
        if self.mode == "native":
            if self._gates is not None:
                with torch.no_grad():
                    self._record(layer, name, hidden, _gate(router, hidden), output[2])
            return None
        logits = _gate(router, hidden)
        exact = logits.to(compute_dtype(logits))
        index = self._choose(exact.detach())
        weights = torch.softmax(exact.gather(1, index), dim=-1)
        if not self._renormalises:
            weights = weights * exact.softmax(-1).topk(self.k, -1).values.sum(-1, keepdim=True)
        self._record(layer, name, hidden, logits, index)
        # The dtype of the model's own weights, but Mixtral's are float32 in float64, too.
        dtype = torch.promote_types(output[1].dtype, logits.dtype)
        return logits, weights.to(dtype), index, *output[3:]

    def _choose(self, logits: Tensor) -> Tensor:
        """Experts of each token, `[token, chosen]`."""
        routing, (tokens, experts) = self._routing, logits.shape
        if routing.mode != "ka":
            return torch.arange(experts, device=logits.device).expand(tokens, experts)
        generator = routing.generator
        assert generator is not None  # Routing saw to it
        draw = torch.rand(tokens, 1, generator=generator, device=generator.device)
        noise = torch.empty(tokens, experts, device=generator.device)
        noise.exponential_(generator=generator)
        # The largest of logits plus Gumbel noise are a sample without replacement from the softmax
        # (Kool et al., 2019); unlike multinomial it takes gates that underflow, and lets NaN pass.
        sampled = logits - noise.log().to(logits)
        scores = torch.where((draw < routing.lam).to(logits.device), sampled, logits)
        return scores.topk(routing.subset or experts - 1, dim=-1).indices

    def _record(self, layer: int, name: str, hidden: Tensor, logits: Tensor, index: Tensor) -> None:
        gates = self._gates
        # Checkpointed layers run again in the backward pass: the first run is the one that counts.
        # No operation with a gradient may be made here, for the second run would lack it.
        if gates is None or layer in gates.logits:
            return
        if gates.mask is not None and len(gates.mask) != len(logits):
            raise ValueError(
                f"the mask stands for {len(gates.mask)} tokens, the teacher saw {len(logits)}"
            )
        gates.logits[layer], gates.chosen[layer] = logits, index
        if self._watch_original:
            with torch.no_grad():
                weight = self._original[f"{name}.weight"].to(hidden)
                bias = self._original.get(f"{name}.bias")
                bias = None if bias is None else bias.to(hidden)
                gates.original[layer] = F.linear(hidden, weight, bias)

    def save_router(self, path: str | os.PathLike[str]) -> None:
        """Write the router tensors, as they are, to a small safetensors file."""
        from safetensors.torch import save

        tensors = {
            name: value.detach().cpu().contiguous()
            for name, value in self.router_parameters().items()
        }
        kept = self._identity() | {"original_rows": json.dumps(self._original_rows()[0].tolist())}
        atomic_write_bytes(Path(path), save(tensors, metadata=kept))

    def load_router(self, path: str | os.PathLike[str]) -> None:
        """Put routers from `save_router` back; tensors take the dtype of the file.

        Raises:
            FileNotFoundError: no such file.
            ValueError: it is no router file, or one of another teacher: the field that differs.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(f"no router file {path}")
        try:
            with safe_open(path, framework="pt") as file:
                kept = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise InputError(f"{path} is not a safetensors file: {error}") from error
        for key, own in self._identity().items():
            if kept.get(key) != own:
                raise InputError(
                    f"{path} is not a router of this teacher: {key} is {kept.get(key)!r} there and "
                    f"{own!r} here; load it onto the teacher that it was saved from"
                )
        try:
            theirs = torch.tensor(json.loads(kept.get("original_rows", "[]")), dtype=torch.float64)
        except (ValueError, TypeError, RuntimeError, OverflowError, RecursionError):
            theirs = torch.empty(0)
        own, norms = self._original_rows()
        if theirs.shape != own.shape or not ((theirs - own).abs() <= _ROUNDING * norms).all():
            raise InputError(
                f"{path} is not a router of this teacher: original_routers, from which it was "
                "adapted, have other weights; load it onto the teacher that it was saved from"
            )
        parameters = self.router_parameters()
        for name, parameter in parameters.items():
            value = tensors.get(name)
            if value is None or value.shape != parameter.shape or not value.isfinite().all():
                raise InputError(
                    f"{path}: {name} is missing, of another shape than {list(parameter.shape)}, or "
                    "not finite; save the router again"
                )
        for name, parameter in parameters.items():
            parameter.data = tensors[name].to(parameter.device)

    def _identity(self) -> dict[str, str]:
        """What a router file must agree in to the letter."""
        return {
            "architecture": type(self.model).__name__,
            "layers": str(self.layers),
            "experts": str(self.n_experts),
            "dim": str(self.dim),
        }

    def _original_rows(self) -> tuple[Tensor, Tensor]:
        """A number of each row of the original routers, `[row]`, and the row's norm.

        It depends on every weight, and on the dtype that they are loaded in by rounding alone.
        """
        values = [torch.atleast_2d(value.double()) for value in self._original.values()]
        rows = [row for value in values for row in value]
        numbers = [row @ torch.arange(len(row), dtype=row.dtype).cos() for row in rows]
        return torch.stack(numbers), torch.stack([row.norm() for row in rows])


def is_mixture(model: nn.Module) -> bool:
    """Whether a model has routers that `Mixture` can steer."""
    return any(type(module).__name__ in ROUTERS for module in model.modules())


def _find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Routers by name, in the order of the layers."""
    what, routers = type(model).__name__, {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in ROUTERS:
            routers[name] = module
        elif _LOOKS_LIKE_A_ROUTER.search(kind):
            sigmoid = hasattr(module, "e_score_correction_bias")
            why = (
                "which gates by a sigmoid with a correction bias, not by a softmax: adapting such "
                "routers is not supported"
                if sigmoid
                else f"which is not one of {', '.join(ROUTERS)}; if it gates by a softmax over all "
                "experts, add it to ssl_kd.teachers.mixture.ROUTERS"
            )
            raise InputError(
                f"{what} has routers of type {kind}, {why}. Use it with router_mode 'native'"
            )
    if not routers:
        raise InputError(
            f"{what} has no router, it is a dense model: router_mode must be 'native', or the "
            f"teacher a mixture of experts ({', '.join(ROUTERS)})"
        )
    return routers


def _renormalises(router: nn.Module) -> bool:
    says = ROUTERS[type(router).__name__]
    return bool(getattr(router, says)) if isinstance(says, str) else says


def _gate(router: Any, hidden: Tensor) -> Tensor:
    """Gate logits `[token, expert]`; what routers return first is not logits in every release."""
    return F.linear(hidden, router.weight, getattr(router, "bias", None))


def _in_dtype_of_router(router: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A router that is trained is float32 in a half-precision model."""
    return args[0].to(router.weight.dtype), *args[1:]
