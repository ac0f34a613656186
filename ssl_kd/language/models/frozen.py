"""Run frozen causal language models as teachers that return hidden states instead of logits.

The logits over a real vocabulary are the largest tensor of a training step. If a teacher's logits
are `hidden @ weight.T + bias`, the teacher therefore returns the input of its output head together
with the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ssl_kd.language.losses.teacher_output import LinearTeacher, LogitsTeacher
from ssl_kd.language.models.causal import evaluating, without_adapters
from ssl_kd.language.models.dtypes import cast_weights


def hidden_states(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Return the input of a model's output head, `[batch, token, hidden]`."""
    causal = without_adapters(model)
    return causal.base_model(**inputs, use_cache=False).last_hidden_state


def linear_head(model: Any) -> nn.Linear | None:
    """Return the output head of a model if its logits are exactly `hidden @ weight.T + bias`.

    The model runs on four tokens, and the output of the head is replaced by large known numbers.
    The model must return these unchanged, which rules out a soft cap (Gemma 2) or a scale (Cohere,
    Granite) even if real logits are small. The input of the head must be `hidden_states(model)`.
    """
    causal = without_adapters(model)
    head = causal.get_output_embeddings()
    if hasattr(head, "modules_to_save"):  # PEFT's wrapper around the head and a trained copy
        copies = head.modules_to_save
        head = head.original_module if head.disable_adapters else copies[head.active_adapters[0]]
    plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    if not plain or causal.base_model is causal:
        return None
    calls: list[tuple[Tensor, Tensor]] = []

    def replace(_: nn.Module, arguments: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        known = torch.linspace(-100, 100, logits.numel(), device=logits.device)
        calls.append((arguments[0], known.to(logits.dtype).view_as(logits)))
        return calls[-1][1]

    ids = torch.arange(4, device=head.weight.device)[None] % len(head.weight)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    hook = head.register_forward_hook(replace)
    try:
        with evaluating(causal):
            logits = causal(**inputs, use_cache=False).logits
            hidden = hidden_states(causal, inputs)
    finally:
        hook.remove()
    if len(calls) != 1 or logits.shape != calls[0][1].shape or hidden.shape != calls[0][0].shape:
        return None
    head_input, known = calls[0]
    close = torch.allclose(head_input.float(), hidden.float(), rtol=1e-3, atol=1e-5, equal_nan=True)
    if not close or not torch.equal(logits.to(known.dtype), known):
        return None
    return head


def answer_at(
    model: Any, inputs: Mapping[str, Any], rows: Tensor, *, linear: bool
) -> LinearTeacher | LogitsTeacher:
    """Return a model's output at flattened positions: states and head if `linear`, else logits."""
    if not linear:
        return LogitsTeacher(model(**inputs, use_cache=False).logits.flatten(0, 1)[rows])
    hidden = hidden_states(model, inputs).flatten(0, 1)[rows]
    head = without_adapters(model).get_output_embeddings()
    bias = None if head.bias is None else head.bias.detach()
    return LinearTeacher(hidden, head.weight.detach(), bias)


class FrozenTeacher:
    """Run a causal language model without dropout, KV cache or gradients.

    The model is frozen, cast to `dtype` and moved to the device in place. Each call sets it to
    evaluation mode, in case `.train()` was called on it.
    """

    def __init__(
        self, model: Any, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        self.model = model.requires_grad_(False).eval()
        self.device = torch.device(device)
        if dtype is not None and model.dtype != dtype:
            cast_weights(model, dtype)
        self.model.to(self.device)
        self.linear = linear_head(model) is not None

    def __call__(self, batch: Any, rows: Tensor) -> LinearTeacher | LogitsTeacher:
        """Return the output for a `Batch` of token blocks at the positions `rows`; see `answer`."""
        return self.answer(batch.model_inputs(), rows)

    # Not inference_mode, whose tensors cannot be saved for a student's backward pass.
    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Any], rows: Tensor) -> LinearTeacher | LogitsTeacher:
        """Return hidden states `[n, hidden]` with the head, or logits `[n, vocab]`.

        They are in the teacher's dtype even under autocast. `rows` are int64 indices `[n]` into the
        flattened `[batch * token]` positions.
        """
        self.model.eval()
        with torch.autocast(self.device.type, enabled=False):
            return answer_at(self.model, inputs, rows, linear=self.linear)
