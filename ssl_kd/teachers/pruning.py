"""A student cut out of its teacher: layers, channels and heads that matter most on some text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ssl_kd.datasets.blocks import Blocks
from ssl_kd.errors import InputError
from ssl_kd.guard.finite import safe_normalize
from ssl_kd.losses.rows import saturated
from ssl_kd.teachers.causal import evaluating
from ssl_kd.teachers.layers import decoder_layers, stack_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose layers are laid out as Llama's
FORM = "prune:LAYERS[xMLP[xDIM[xKV]]]"
_ROWS = 8  # of a forward pass


@dataclass(frozen=True)
class Importance:
    """How much each piece of a model does on some text; float64.

    Attributes:
        layers: `[layer]`, block influence: 1 - cosine of what goes into a layer and what comes out.
        mlp: `[layer, channel]`, root of the mean square of the gated activation.
        groups: `[layer, kv head]`, the same of what the heads that share keys and values put out.
        channels: `[layer + 1, dim]`, the same of what the norms of each layer, and the last norm,
            put out: of the embedding's channels.

    References:
        Layers: ShortGPT, arXiv 2403.03853, equation 1. Width: Minitron, arXiv 2407.14679, section
        2.2, aggregated by L2 over all tokens.
    """

    layers: Tensor
    mlp: Tensor
    groups: Tensor
    channels: Tensor


@dataclass(frozen=True)
class Cut:
    """What is left of a teacher.

    Attributes:
        layers: which are kept, in order.
        changes: of its configuration, beside the number of layers.
        state: the weights that are left, by the names of the smaller model.
    """

    layers: list[int]
    changes: dict[str, Any]
    state: dict[str, Tensor]


@torch.no_grad()
def importance_of(model: Any, blocks: Blocks) -> Importance:
    """Importances of a causal model's pieces, from one pass over some text.

    Args:
        model: of FAMILIES, where it is and in its dtype; sums are float64.
        blocks: the text, in its tokens.
    """
    layers, config = decoder_layers(model), model.config
    device = next(model.parameters()).device
    sums: dict[tuple[str, int], Tensor] = {}
    real = torch.empty(0)

    def add(kind: str, i: int, values: Tensor) -> None:
        total = values.flatten(0, 1)[real].double().sum(0)
        sums[kind, i] = sums[kind, i] + total if (kind, i) in sums else total

    def watch_layer(i: int, layer: nn.Module, inputs: Any, out: Any) -> None:
        after = out[0] if isinstance(out, tuple) else out
        before, after = (safe_normalize(saturated(x)) for x in (inputs[0], after))
        add("layers", i, (before - after).square().sum(-1, keepdim=True) / 2)

    def watch_input(kind: str, i: int, inputs: Any) -> None:
        x = saturated(inputs[0]).square()
        if kind == "groups":
            x = x.unflatten(-1, (config.num_key_value_heads, -1)).sum(-1)
        add(kind, i, x)

    with ExitStack() as stack:
        stack.enter_context(evaluating(model))

        def hook(module: nn.Module, see: Any, *, before: bool = False) -> None:
            add_hook = module.register_forward_pre_hook if before else module.register_forward_hook
            stack.callback(add_hook(see).remove)

        def norm(module: nn.Module, i: int) -> None:
            hook(module, lambda m, x, out: add("channels", i, saturated(out).square()))

        for i, layer in enumerate(layers):
            parts: Any = layer
            hook(layer, lambda m, x, out, i=i: watch_layer(i, m, x, out))
            hook(parts.mlp.down_proj, lambda m, x, i=i: watch_input("mlp", i, x), before=True)
            out = parts.self_attn.o_proj
            hook(out, lambda m, x, i=i: watch_input("groups", i, x), before=True)
            norm(parts.input_layernorm, i)
            norm(parts.post_attention_layernorm, i)
        norm(model.base_model.norm, len(layers))
        tokens = 0
        for start in range(0, len(blocks), _ROWS):
            batch = blocks.batch(range(start, min(start + _ROWS, len(blocks))), device)
            real = (batch.documents > 0).flatten()
            tokens += int(real.sum())
            model.base_model(**batch.model_inputs(), use_cache=False)

    def mean(kind: str) -> Tensor:
        found = [total for (name, _), total in sorted(sums.items()) if name == kind]
        return torch.stack(found).cpu() / tokens

    return Importance(
        mean("layers")[:, 0], mean("mlp").sqrt(), mean("groups").sqrt(), mean("channels").sqrt()
    )


def prune(spec: str, model: Any, blocks: Blocks) -> Cut:
    """Keep what matters most of a model, by its importance on some text.

    What is left out had the least: layers by block influence, channels of each layer's MLP and its
    key-value heads (with the heads that read them) by activation, channels of the embedding, which
    all layers share, by the sum over their norms. Norms' weights are scaled so that a channel that
    holds nothing could be left out without any change.

    Args:
        spec: `prune:LAYERS[xMLP[xDIM[xKV]]]`: how many are kept of layers, channels of the MLP,
            channels of the embedding, and key-value heads.
        model: a causal language model of FAMILIES; it is left alone.
        blocks: some hundred rows of the text, in its tokens.

    Raises:
        ValueError: the form of `spec`, more than there are, or another architecture.

    References:
        Minitron, arXiv 2407.14679.
    """
    config = model.config
    if config.model_type not in FAMILIES:
        raise InputError(
            f"student {spec!r}: {type(model).__name__} is not pruned here, only "
            f"{', '.join(FAMILIES)}: take layers:N, which cuts any architecture by depth"
        )
    kept_of = _sizes(spec, config)
    found = importance_of(model, blocks)
    layers = _best(found.layers, kept_of["layers"])
    dim, kv, heads = config.hidden_size, config.num_key_value_heads, config.num_attention_heads
    channels = _best(found.channels[[*layers, -1]].sum(0), kept_of["dim"])
    head_dim = getattr(config, "head_dim", None) or dim // heads
    stack, tensors = f"{stack_of(model)}.", model.state_dict()
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        number, _, part = name.removeprefix(stack).partition(".") if stack in name else ("", "", "")
        if not number:
            state[name] = _sliced(name, tensor, {}, channels)
        elif int(number) in layers:
            i = int(number)
            groups = _best(found.groups[i], kept_of["kv"])
            inner = {
                "mlp": _best(found.mlp[i], kept_of["mlp"]),
                "q": _runs(groups, head_dim * heads // kv),
                "kv": _runs(groups, head_dim),
            }
            state[f"{stack}{layers.index(i)}.{part}"] = _sliced(name, tensor, inner, channels)
    changes = {
        "intermediate_size": kept_of["mlp"],
        "hidden_size": kept_of["dim"],
        "num_key_value_heads": kept_of["kv"],
        "num_attention_heads": kept_of["kv"] * heads // kv,
        "head_dim": head_dim,
        "rms_norm_eps": config.rms_norm_eps * dim / kept_of["dim"],
    }
    return Cut(layers, changes, state)


def _sizes(spec: str, config: Any) -> dict[str, int]:
    """How many of each are kept."""
    there = {
        "layers": config.num_hidden_layers,
        "mlp": config.intermediate_size,
        "dim": config.hidden_size,
        "kv": config.num_key_value_heads,
    }
    match = re.fullmatch(r"prune:(\d+)(?:x(\d+))?(?:x(\d+))?(?:x(\d+))?", spec)
    if match is None:
        raise InputError(f"student {spec!r}: expected {FORM}, as in prune:4 or prune:4x512x256")
    asked = zip(there, match.groups(), strict=True)
    kept = {name: there[name] if n is None else int(n) for name, n in asked}
    for name, n in kept.items():
        if not 1 <= n <= there[name]:
            raise InputError(
                f"student {spec!r}: the teacher has {there[name]} of {name.upper()}; expected "
                f"{FORM} with 1 to {there[name]} there"
            )
    return kept


def _best(importance: Tensor, n: int) -> list[int]:
    """The `n` most important, in their order; of equal ones the first."""
    return sorted(importance.argsort(descending=True, stable=True)[:n].tolist())


def _runs(kept: Sequence[int], length: int) -> list[int]:
    """The channels of some heads, or groups of them."""
    return [i * length + j for i in kept for j in range(length)]


def _sliced(name: str, x: Tensor, inner: Mapping[str, list[int]], channels: list[int]) -> Tensor:
    """What is left of a tensor: rows put out, columns read."""
    if "norm" in name and "q_norm" not in name and "k_norm" not in name:
        return x[channels] * (len(x) / len(channels)) ** 0.5
    kinds = {"q_proj": "q", "k_proj": "kv", "v_proj": "kv", "gate_proj": "mlp", "up_proj": "mlp"}
    reads = {"o_proj": "q", "down_proj": "mlp"}
    for part, kind in kinds.items():
        if part in name:
            x = x[inner[kind]]
            return x if x.ndim == 1 else x[:, channels]
    for part, kind in reads.items():
        if part in name:
            return x[channels] if x.ndim == 1 else x[channels][:, inner[kind]]
    if "embed_tokens" in name or "lm_head" in name:
        return x[:, channels]
    return x.clone()
