"""What a language model writes after a prompt, greedily, or why it wrote nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ssl_kd.teachers.causal import evaluating, positions
from ssl_kd.teachers.frozen import FrozenTeacher

logger = logging.getLogger(__name__)

Autocast = Callable[[], AbstractContextManager[Any]]


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    max_new_tokens: int = 64,
    *,
    ids: Sequence[list[int]] | None = None,
    batch_size: int = 8,
    autocast: Autocast = nullcontext,
) -> list[str]:
    """What a model writes after each prompt, greedily; the prompt is not repeated.

    Args:
        model: a causal language model of transformers, or a `FrozenTeacher`.
        tokenizer: its tokenizer; never changed.
        prompts: texts.
        max_new_tokens: tokens at most; fewer where the model's text or its positions end.
        ids: the prompts in tokens; None for `prompt_ids`, which a chat's template is not for.
        batch_size: prompts at once; padded on the left and masked, they do not see each other.
        autocast: makes the context that the model runs in; a `FrozenTeacher` has its own dtype.

    Returns:
        A text for each prompt. It is empty where generating failed; the log then says why.
    """
    ids = [prompt_ids(tokenizer, prompt) for prompt in prompts] if ids is None else ids
    texts = []
    for prompt, (text, fault) in zip(
        prompts,
        continue_prompts(model, tokenizer, ids, max_new_tokens, batch_size, autocast),
        strict=True,
    ):
        if fault is not None:
            logger.warning("Nothing is generated for the prompt %.60r: %s", prompt, fault)
        texts.append(text)
    return texts


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """A prompt as in training, see `make_blocks`: BOS where the tokenizer puts it, no EOS."""
    bos, of_nothing = tokenizer.bos_token_id, tokenizer("").input_ids
    start = [bos] if bos is not None and of_nothing[:1] == [bos] else []
    ids = start + tokenizer(prompt, add_special_tokens=False).input_ids
    # An empty prompt is the beginning of a text.
    return ids or [tokenizer.eos_token_id if bos is None else bos]


Continued = tuple[str, str | None]
"""The text, or why there is none."""


def continue_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    batch_size: int,
    autocast: Autocast,
) -> list[Continued]:
    """Continue each prompt; where a batch crashes, its prompts are tried one by one."""
    if isinstance(model, FrozenTeacher):
        with model.on_device():
            return continue_prompts(
                model.model, tokenizer, prompts, max_new_tokens, batch_size, nullcontext
            )
    room = positions(model) or sys.maxsize
    results: list[Continued] = [
        ("", f"the prompt has {len(ids)} tokens and the model {room} positions: shorten the prompt")
        for ids in prompts
    ]
    fits = [i for i, ids in enumerate(prompts) if len(ids) + max_new_tokens <= room]
    # What would reach the last position writes less, and alone: no other text is cut short for it.
    tight = [i for i, ids in enumerate(prompts) if room - max_new_tokens < len(ids) < room]
    batches = [fits[i : i + batch_size] for i in range(0, len(fits), batch_size)]
    batches += [[i] for i in tight]
    while batches:
        batch = batches.pop(0)
        chosen = [prompts[i] for i in batch]
        new = min(max_new_tokens, room - max(map(len, chosen)))
        try:
            with evaluating(model), autocast():
                texts = _greedy(model, tokenizer, chosen, new)
        except (RuntimeError, IndexError, ValueError) as error:
            texts = [("", f"{type(error).__name__}: {error}")]
            if len(batch) > 1:
                batches[:0] = [[i] for i in batch]
                continue
        for i, text in zip(batch, texts, strict=True):
            results[i] = text
    return results


class _Watch:
    """Notes the first new token of each text whose logits were not finite.

    Greedy search takes the largest logit, and a NaN counts as the largest: nothing would be raised.
    """

    def __init__(self, width: int, ends: Tensor) -> None:
        self.width, self.ends = width, ends
        self.first: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[:, self.width :]
        running = ~torch.isin(new, self.ends).any(1)
        for row in (running & ~scores.amax(-1).isfinite()).nonzero()[:, 0].tolist():
            self.first.setdefault(row, new.shape[1] + 1)
        return scores


def _greedy(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[Continued]:
    from transformers import LogitsProcessorList

    device = next(model.parameters()).device
    ends = end_tokens(model, tokenizer)
    inputs = _side_by_side(prompts, device)
    width = inputs["input_ids"].shape[1]
    watch = _Watch(width, torch.tensor(ends, device=device, dtype=torch.long))
    out = model.generate(
        **inputs,
        logits_processor=LogitsProcessorList([watch]),  # pyright: ignore[reportArgumentType]
        **_greedily(ends, max_new_tokens),
    )
    results: list[Continued] = []
    for row, (prompt, new) in enumerate(zip(prompts, out[:, width:].tolist(), strict=True)):
        if row in watch.first:
            results.append(("", f"logits not finite at new token {watch.first[row]}"))
            continue
        stop = next((i for i, token in enumerate(new) if token in ends), len(new))
        # Both with the prompt: alone, many tokenizers drop the space at the beginning.
        before, whole = (tokenizer.decode(x) for x in (prompt, prompt + new[:stop]))
        text = whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new[:stop])
        results.append((text, None))
    return results


def _greedily(ends: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
    """Return the arguments of a model's `generate` for greedy search.

    A model brings its own sampling settings: transformers warns that greedy search ignores them,
    and a penalty would not be ignored.
    """
    return {
        "max_new_tokens": max_new_tokens,
        "eos_token_id": list(ends) or None,
        "pad_token_id": ends[0] if ends else 0,
        "do_sample": False,
        "num_beams": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 50,
        "repetition_penalty": 1.0,
    }


def _side_by_side(prompts: Sequence[list[int]], device: torch.device) -> dict[str, Tensor]:
    """Prompts in one batch, padded on the left and masked."""
    width = max(map(len, prompts))
    gaps = [width - len(ids) for ids in prompts]
    ids = [[0] * gap + ids for gap, ids in zip(gaps, prompts, strict=True)]
    seen = [[0] * gap + [1] * (width - gap) for gap in gaps]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(seen, device=device),
    }


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a text, according to the model or the tokenizer."""
    ends = model.generation_config.eos_token_id
    listed = ends if isinstance(ends, list) else [ends]
    return sorted({token for token in (*listed, tokenizer.eos_token_id) if token is not None})
