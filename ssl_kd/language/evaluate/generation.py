"""Generate text greedily after prompts; a failed prompt is reported, and the others go on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ssl_kd.language.models.causal import evaluating, positions
from ssl_kd.language.models.frozen import FrozenTeacher

Autocast = Callable[[], AbstractContextManager[Any]]


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Tokenize a prompt as in training (`make_blocks`): BOS if the tokenizer adds it, no EOS."""
    bos, of_nothing = tokenizer.bos_token_id, tokenizer("").input_ids
    start = [bos] if bos is not None and of_nothing[:1] == [bos] else []
    ids = start + tokenizer(prompt, add_special_tokens=False).input_ids
    # An empty prompt starts a text.
    return ids or [tokenizer.eos_token_id if bos is None else bos]


Continued = tuple[str, str | None]
"""The generated text, empty if generation failed, and the reason of the failure or None."""


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    batch_size: int = 8,
    autocast: Autocast = nullcontext,
) -> list[Continued]:
    """Generate a text after each tokenized prompt, greedily; the prompt is not repeated.

    Generation ends at `max_new_tokens`, at an end-of-text token and at the model's last position.
    The prompts of a batch that raises are retried singly. `autocast` returns the context for the
    model; a `FrozenTeacher` runs in its own dtype.
    """
    if isinstance(model, FrozenTeacher):
        model, autocast = model.model, nullcontext
    room = positions(model) or sys.maxsize
    results: list[Continued] = [
        ("", f"the prompt has {len(ids)} tokens; expected less than the model's {room} positions")
        for ids in prompts
    ]
    fits = [i for i, ids in enumerate(prompts) if len(ids) + max_new_tokens <= room]
    # A prompt close to the last position runs alone, so that no other text is cut short.
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
    """Record the position of the first new token of each text whose logits were not finite.

    Greedy search would choose a NaN as the largest logit without raising an error.
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
    width = max(map(len, prompts))
    padding = [width - len(ids) for ids in prompts]
    ids = [[0] * n + ids for n, ids in zip(padding, prompts, strict=True)]
    mask = [[0] * n + [1] * (width - n) for n in padding]
    watch = _Watch(width, torch.tensor(ends, device=device, dtype=torch.long))
    out = model.generate(
        input_ids=torch.tensor(ids, device=device),
        attention_mask=torch.tensor(mask, device=device),
        logits_processor=LogitsProcessorList([watch]),  # pyright: ignore[reportArgumentType]
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        # A model's own sampling settings are overridden: a penalty would change greedy search.
        do_sample=False,
        num_beams=1,
        temperature=1.0,
        top_p=1.0,
        top_k=50,
        repetition_penalty=1.0,
    )
    results: list[Continued] = []
    for row, (prompt, new) in enumerate(zip(prompts, out[:, width:].tolist(), strict=True)):
        if row in watch.first:
            results.append(("", f"logits not finite at new token {watch.first[row]}"))
            continue
        stop = next((i for i, token in enumerate(new) if token in ends), len(new))
        # Decode both with the prompt: many tokenizers drop a leading space.
        before, whole = (tokenizer.decode(x) for x in (prompt, prompt + new[:stop]))
        text = whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new[:stop])
        results.append((text, None))
    return results


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids of the model's and the tokenizer's end-of-text tokens."""
    ends = model.generation_config.eos_token_id
    listed = ends if isinstance(ends, list) else [ends]
    return sorted({token for token in (*listed, tokenizer.eos_token_id) if token is not None})


def repetition(texts: Sequence[Sequence[Hashable]], n: int = 4) -> float | None:
    """Return the share of n-grams that occurred earlier in the same text, averaged over texts.

    `seq-rep-n = 1 - unique n-grams / n-grams`, from 0 to 1; None if no text has n tokens.

    References:
        Welleck et al., Neural text generation with unlikelihood training, ICLR 2020, equation 10.

    Example:
        >>> repetition([["so", "it", "goes"] * 3], n=3)
        0.5714285714285714
    """
    grams = [[tuple(text[i : i + n]) for i in range(len(text) - n + 1)] for text in texts]
    shares = [1 - len(set(row)) / len(row) for row in grams if row]
    return fmean(shares) if shares else None
