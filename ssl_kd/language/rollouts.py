"""Let the student continue rows of text in each step, and train it on the continuations.

In on-policy distillation (ON_POLICY), the student is trained on the prefixes that it generates
itself (Agarwal et al., GKD, ICLR 2024, algorithm 1); no gradient flows through the sampling. The
chosen rows and their continuations depend on the seed, the step, the row and the weights, but not
on other rows, the number of ranks, or a resume.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ssl_kd.datasets.blocks import Batch, Blocks
from ssl_kd.errors import InputError
from ssl_kd.evaluate.generation import Autocast, end_tokens
from ssl_kd.guard.seeds import seed_of
from ssl_kd.language.objective import Objective
from ssl_kd.language.setting_groups import RolloutSettings
from ssl_kd.teachers.causal import evaluating, n_ids, positions, without_adapters

logger = logging.getLogger(__name__)

_CHOICE, _DRAW = 0, 1  # distinguish the seeds of a row's choice and of its continuation
PROMPT_TOKENS = 16  # of a row of plain text, with the start token

Continue = Callable[[Sequence[Sequence[int]], Sequence[int], Sequence[int]], list[list[int]]]
"""Function of prompts, their maximum numbers of new tokens, and their seeds, which returns the new
tokens of each prompt."""


class Sampler:
    """Sample continuations of prompts with `generate` of transformers.

    Each prompt has its own random generator. A token is drawn from `softmax(logits / temperature)`
    by inverting its distribution function at a uniform number; temperature 0 takes the most likely
    token. A row ends where its logits are not finite. Token ids from `vocabulary` on are padding
    and never drawn.
    """

    def __init__(
        self,
        model: Any,
        ends: Sequence[int],
        *,
        vocabulary: int = sys.maxsize,
        temperature: float = 1.0,
        batch_size: int = 8,
        autocast: Autocast = nullcontext,
    ) -> None:
        self.model, self.ends, self.batch_size = model, list(ends), batch_size
        self.temperature, self.autocast = temperature, autocast
        self.vocabulary = vocabulary

    def __call__(
        self, prompts: Sequence[Sequence[int]], rooms: Sequence[int], seeds: Sequence[int]
    ) -> list[list[int]]:
        """Return the continuation of each prompt, which depends on its seed and the model alone.

        `rooms` are the largest lengths of the continuations, end tokens included.
        """
        continuations: list[list[int]] = [[] for _ in prompts]
        with evaluating(self.model), self.autocast():
            for batch in self._batches([*map(len, prompts)], rooms):
                new = self._generate(
                    [prompts[i] for i in batch],
                    max(rooms[i] for i in batch),
                    [seeds[i] for i in batch],
                )
                for i, tokens in zip(batch, new, strict=True):
                    tokens = tokens[: rooms[i]]
                    ends = (at for at, t in enumerate(tokens, 1) if t in self.ends)
                    continuations[i] = tokens[: next(ends, len(tokens))]
        return continuations

    def _batches(self, lengths: Sequence[int], rooms: Sequence[int]) -> Iterator[list[int]]:
        """Yield the indices of prompts that fit into one batch within the model's positions."""
        most = positions(self.model) or sys.maxsize
        batch: list[int] = []
        for i in sorted(range(len(lengths)), key=lambda i: -rooms[i]):
            full = len(batch) == self.batch_size
            if batch and (full or lengths[i] + rooms[batch[0]] > most):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _generate(
        self, prompts: Sequence[Sequence[int]], n: int, seeds: Sequence[int]
    ) -> list[list[int]]:
        from transformers import GenerationConfig, LogitsProcessorList
        from transformers.generation.logits_process import TemperatureLogitsWarper

        causal = without_adapters(self.model)  # adapters stay in place
        device, width = next(causal.parameters()).device, max(map(len, prompts))
        gaps = [width - len(ids) for ids in prompts]
        draw = _Draw(width, n, seeds, torch.tensor(self.ends, device=device))
        processors: list[Any] = [draw] if self.temperature else [draw.greedy]
        if self.temperature:
            processors.insert(0, TemperatureLogitsWarper(self.temperature))
        if self.vocabulary < causal.get_output_embeddings().weight.shape[0]:
            processors.insert(0, self._without_padding)
        # The model's own sampling settings and penalties must not apply.
        own, causal.generation_config = causal.generation_config, GenerationConfig()
        try:
            out = causal.generate(
                input_ids=torch.tensor(
                    [[self.ends[0]] * gap + [*ids] for gap, ids in zip(gaps, prompts, strict=True)],
                    device=device,
                ),
                attention_mask=torch.tensor(
                    [[0] * gap + [1] * (width - gap) for gap in gaps], device=device
                ),
                logits_processor=LogitsProcessorList(processors),
                max_new_tokens=n,
                eos_token_id=self.ends,
                pad_token_id=self.ends[0],
                do_sample=False,  # the last processor leaves only the drawn token
            )
        finally:
            causal.generation_config = own
        return out[:, width:].tolist()

    def _without_padding(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        padding = torch.arange(scores.shape[-1], device=scores.device) >= self.vocabulary
        return scores.masked_fill(padding, -torch.inf)


class _Draw:
    """Mask all scores but the sampled token's; if scores are not finite, sample the end token."""

    def __init__(self, width: int, n: int, seeds: Sequence[int], ends: Tensor) -> None:
        self._width, self._ends = width, ends
        numbers = [torch.rand(n, generator=_generator(seed), dtype=torch.float64) for seed in seeds]
        self._uniform = torch.stack(numbers).to(ends.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniform = self._uniform[:, input_ids.shape[1] - self._width, None]
        # In the order of the vocabulary: sorted by probability, rounding would swap neighbors.
        mass = scores.double().softmax(-1).cumsum(-1)
        token = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)
        return self._only(scores, token.clamp(max=scores.shape[-1] - 1))

    def greedy(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self._only(scores, scores.argmax(-1, keepdim=True))

    def _only(self, scores: Tensor, token: Tensor) -> Tensor:
        finite = scores.amax(-1).isfinite()  # also False for NaN
        token = token.where(finite[:, None], self._ends[0])
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def prompt_length(blocks: Blocks, row: int) -> int:
    """Return the number of tokens in the prompt of a row that holds one document.

    The prompt ends before the first target, or with the row if there is none. Plain text, in which
    at most a start token precedes the first target, has a prompt of PROMPT_TOKENS tokens, or fewer
    such that at least one token is left.
    """
    length, counts = int((blocks.documents[row] > 0).sum()), blocks.counts[row]
    if not counts.any():
        return length
    if (first := int(counts.int().argmax())) > 1:
        return first
    return max(1, min(PROMPT_TOKENS, length - 1))


def continue_rows(
    blocks: Blocks,
    rows: Sequence[int],
    seeds: Sequence[int],
    sample: Continue,
    *,
    max_new_tokens: int,
) -> tuple[Blocks, list[list[int]]]:
    """Replace the text after the prompts of some rows by continuations, which become the targets.

    Return the continued rows with the digest of `blocks`, and the continuations alone. Raise
    InputError if a prompt fills its row.
    """
    width = blocks.ids.shape[1]
    lengths = [prompt_length(blocks, row) for row in rows]
    prompts = [blocks.ids[row, :n].tolist() for row, n in zip(rows, lengths, strict=True)]
    rooms = [min(max_new_tokens, width - n) for n in lengths]
    if 0 in rooms:
        raise InputError(
            f"the prompt of row {rows[rooms.index(0)]} fills all {width} tokens of the row: shorten"
            " the prompt, or raise BLOCK_SIZE, to make room for a continuation"
        )
    new = sample(prompts, rooms, seeds)
    ids, counts = blocks.ids[list(rows)], torch.zeros((len(rows), width), dtype=torch.bool)
    documents = torch.zeros((len(rows), width), dtype=blocks.documents.dtype)
    for i, (n, tokens) in enumerate(zip(lengths, new, strict=True)):
        ids[i, n : n + len(tokens)] = torch.tensor(tokens, dtype=ids.dtype)
        counts[i, n : n + len(tokens)] = True
        documents[i, : n + len(tokens)] = 1
    characters = torch.zeros(len(rows), dtype=blocks.row_characters.dtype)
    columns = {"ids": ids, "counts": counts, "documents": documents}
    return replace(blocks, **columns, row_characters=characters), new


class RolloutBatches:
    """Make the batches of a step, in which the student continues the share ON_POLICY of the rows.

    The rows of `blocks` hold one document each. `ends` are the tokens that end a continuation.
    """

    def __init__(
        self,
        rollout: RolloutSettings,
        blocks: Blocks,
        sample: Continue,
        ends: Sequence[int],
        *,
        seed: int,
    ) -> None:
        self.rollout, self.blocks, self.sample = rollout, blocks, sample
        self.seed, self._ends = seed, set(ends)

    def chosen(self, step: int, row: int) -> bool:
        """Return whether the student continues a row in a step."""
        generator = _generator(seed_of(self.seed, step, row, _CHOICE))
        return float(torch.rand((), generator=generator)) < self.rollout.on_policy

    def batches(
        self, step: int, shares: Sequence[Tensor], device: torch.device
    ) -> tuple[list[Batch], dict[str, float]]:
        """Return the batches of a step, in which rows of text precede the continued rows.

        `shares` are the indices of the rows in each batch. The second result has counts over all
        batches: `rows`, `written` (continued rows), `tokens` (generated tokens) and `ended`
        (continuations that reached an end token).
        """
        distinct = dict.fromkeys(row for share in shares for row in share.tolist())
        rows = [row for row in distinct if self.chosen(step, row)]
        seeds = [seed_of(self.seed, step, row, _DRAW) for row in rows]
        most = self.rollout.max_new_tokens
        own, new = continue_rows(self.blocks, rows, seeds, self.sample, max_new_tokens=most)
        place = {row: i for i, row in enumerate(rows)}
        batches = [self._batch(share.tolist(), own, place, device) for share in shares]
        sums = {
            "rows": float(sum(map(len, shares))),
            "written": float(sum(batch.written for batch in batches)),
            "tokens": float(sum(map(len, new))),
            "ended": float(sum(bool(tokens) and tokens[-1] in self._ends for tokens in new)),
        }
        return batches, sums

    def _batch(
        self, rows: list[int], own: Blocks, place: Mapping[int, int], device: torch.device
    ) -> Batch:
        text = [row for row in rows if row not in place]
        by_student = [row for row in rows if row in place]
        parts = [self.blocks, text], [own, [place[row] for row in by_student]]

        def joined(name: str) -> Tensor:
            return torch.cat([getattr(blocks, name)[chosen] for blocks, chosen in parts])

        names = ("ids", "counts", "documents", "row_characters")
        blocks = replace(self.blocks, **{name: joined(name) for name in names})
        batch = blocks.batch(range(len(text) + len(by_student)), device)
        return replace(batch, rows=torch.tensor(text + by_student), written=len(by_student))


def rollout_batches(objective: Objective, blocks: Any, tokenizer: Any) -> RolloutBatches | None:
    """Return an object that makes batches with continuations; None if ON_POLICY is 0."""
    settings, model = objective.settings, objective.student
    if not settings.on_policy:
        return None
    sample = Sampler(
        model,
        end_tokens(without_adapters(model), tokenizer),
        vocabulary=n_ids(tokenizer),
        temperature=settings.rollout_temperature,
        batch_size=settings.batch_size,
        autocast=objective.precision.autocast,
    )
    return RolloutBatches(settings, blocks, sample, sample.ends, seed=settings.seed)
