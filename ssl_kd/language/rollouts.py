"""Rows that a student writes itself, so that its teacher can judge every token of them.

On-policy distillation: the student meets in training the prefixes that it will meet when it writes.
Which rows it continues in a step, and what it draws there, depends on the seed, the step, the row
and the weights: neither on the rows beside it, nor on the number of ranks, nor on a resume.

References:
    Agarwal et al., On-Policy Distillation of Language Models (GKD), ICLR 2024, algorithm 1: with
    probability lambda a sequence is the student's; no gradient flows through the sampling.
    Ko et al., DistiLLM-2: A Contrastive Approach, ICML 2025, equation 4: skew KL on the text of a
    prompt, skew reverse KL on what the student wrote after it.
"""

from __future__ import annotations

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

_CHOICE, _DRAW = 0, 1  # what the random numbers of a row are for
PROMPT_TOKENS = 16  # of a plain text, its start token included


Rollouts = Callable[[Sequence[Sequence[int]], Sequence[int], Sequence[int]], list[list[int]]]
"""Prompts, the most tokens for each, and their seeds -> the new tokens; see `Generated`."""


class Generated:
    """Rollouts by transformers' `generate`: padded on the left, with a KV cache.

    Tokens are drawn from `softmax(logits / temperature)` by inverting its
    distribution function at uniform numbers of each row's own generator. A row whose logits are not
    finite ends there: the loss of the next forward pass over it is then not finite.

    Args:
        model: a causal language model of transformers, with or without adapters.
        ends: tokens that end a continuation, at least one.
        vocabulary: tokens from here on are never drawn: padding, which another model may not have.
        temperature: 0 takes the likeliest tokens.
        batch_size: prompts at once.
        autocast: makes the context that the model runs in.

    Attributes:
        sick: how many continuations so far ended where the logits were not finite.
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
        self.vocabulary, self.sick = vocabulary, 0

    def __call__(
        self, prompts: Sequence[Sequence[int]], rooms: Sequence[int], seeds: Sequence[int]
    ) -> list[list[int]]:
        """Continue each prompt.

        Args:
            prompts: token ids, at least one each.
            rooms: how many tokens each continuation may have, 1 or more.
            seeds: of each, 0 to 2**63 - 1: the same seed, prompt and model give the same.

        Returns:
            The new tokens of each, up to and with the one that ends it, if one did.
        """
        found: list[list[int]] = [[] for _ in prompts]
        with evaluating(self.model), self.autocast():
            for some in self._batches([*map(len, prompts)], rooms):
                new = self._generate(
                    [prompts[i] for i in some],
                    max(rooms[i] for i in some),
                    [seeds[i] for i in some],
                )
                for i, tokens in zip(some, new, strict=True):
                    tokens = tokens[: rooms[i]]
                    end = next(
                        (at for at, t in enumerate(tokens, 1) if t in self.ends), len(tokens)
                    )
                    found[i] = tokens[:end]
        return found

    def _batches(self, lengths: Sequence[int], rooms: Sequence[int]) -> Iterator[list[int]]:
        """Prompts to run at once: none is led beyond the model's positions by the others' rooms."""
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
        steps: list[Any] = [draw] if self.temperature else [draw.likeliest]
        if self.temperature:
            steps.insert(0, TemperatureLogitsWarper(self.temperature))
        if self.vocabulary < causal.get_output_embeddings().weight.shape[0]:
            steps.insert(0, self._without_padding)
        # A model brings its own sampling settings, penalties too, which do not belong here.
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
                logits_processor=LogitsProcessorList(steps),
                max_new_tokens=n,
                eos_token_id=self.ends,
                pad_token_id=self.ends[0],
                do_sample=False,  # the last step leaves the drawn token alone
            )
        finally:
            causal.generation_config = own
        self.sick += int(draw.sick.sum())
        return out[:, width:].tolist()

    def _without_padding(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        padding = torch.arange(scores.shape[-1], device=scores.device) >= self.vocabulary
        return scores.masked_fill(padding, -torch.inf)


class _Draw:
    """Leaves of each row's scores the one token that is drawn; an end where they are not finite.

    Attributes:
        sick: bool `[row]`, which ended like that.
    """

    def __init__(self, width: int, n: int, seeds: Sequence[int], ends: Tensor) -> None:
        self._width, self._ends = width, ends
        numbers = [torch.rand(n, generator=_generator(seed), dtype=torch.float64) for seed in seeds]
        self._uniform = torch.stack(numbers).to(ends.device)
        self.sick = torch.zeros(len(seeds), dtype=torch.bool, device=ends.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniform = self._uniform[:, input_ids.shape[1] - self._width, None]
        # In the order of the vocabulary: sorted by probability, rounding would swap neighbours.
        mass = scores.double().softmax(-1).cumsum(-1)
        place = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)
        return self._only(input_ids, scores, place.clamp(max=scores.shape[-1] - 1))

    def likeliest(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self._only(input_ids, scores, scores.argmax(-1, keepdim=True))

    def _only(self, input_ids: Tensor, scores: Tensor, place: Tensor) -> Tensor:
        finite = scores.amax(-1).isfinite()  # of a NaN and an infinity alike
        self.sick |= ~finite & ~torch.isin(input_ids[:, self._width :], self._ends).any(1)
        place = place.where(finite[:, None], self._ends[0])
        return torch.full_like(scores, -torch.inf).scatter_(1, place, 0)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def prompt_length(blocks: Blocks, row: int) -> int:
    """How many tokens of a row, which holds one document, are its prompt.

    All before the first that counts, or all where none does. Where that is a start token alone, the
    row is of plain text, and its first PROMPT_TOKENS are the prompt, but never its last token.
    """
    length, counts = int((blocks.documents[row] > 0).sum()), blocks.counts[row]
    if not counts.any():
        return length
    if (first := int(counts.int().argmax())) > 1:
        return first
    return max(1, min(PROMPT_TOKENS, length - 1))


def continued(
    blocks: Blocks,
    rows: Sequence[int],
    seeds: Sequence[int],
    rollouts: Rollouts,
    *,
    max_new_tokens: int,
) -> tuple[Blocks, list[list[int]]]:
    """The prompts of some rows with other continuations; only these count.

    Args:
        blocks: text, one document a row.
        rows: which.
        seeds: of each.
        rollouts: writes the continuations.
        max_new_tokens: the most that a continuation may have.

    Returns:
        The rows, with the digest of `blocks`; and the continuations.

    Raises:
        InputError: a prompt leaves no room, or a continuation has more tokens than there is.
    """
    width = blocks.ids.shape[1]
    lengths = [prompt_length(blocks, row) for row in rows]
    prompts = [blocks.ids[row, :n].tolist() for row, n in zip(rows, lengths, strict=True)]
    rooms = [min(max_new_tokens, width - n) for n in lengths]
    if 0 in rooms:
        raise InputError(
            f"row {rows[rooms.index(0)]} is a prompt of all {width} tokens that there is room for, "
            "so nothing can follow it: shorten it"
        )
    new = rollouts(prompts, rooms, seeds)
    ids, counts = blocks.ids[list(rows)], torch.zeros((len(rows), width), dtype=torch.bool)
    documents = torch.zeros((len(rows), width), dtype=blocks.documents.dtype)
    for i, (n, room, tokens) in enumerate(zip(lengths, rooms, new, strict=True)):
        if len(tokens) > room:
            raise InputError(
                f"a rollout of row {rows[i]} has {len(tokens)} tokens, expected {room} at most"
            )
        ids[i, n : n + len(tokens)] = torch.tensor(tokens, dtype=ids.dtype)
        counts[i, n : n + len(tokens)] = True
        documents[i, : n + len(tokens)] = 1
    characters = torch.zeros(len(rows), dtype=blocks.row_characters.dtype)
    return replace(
        blocks, ids=ids, counts=counts, documents=documents, row_characters=characters
    ), new


class Written:
    """The batches of a step, of which the student writes ON_POLICY of the rows itself.

    Args:
        settings: ON_POLICY and MAX_NEW_TOKENS.
        blocks: text, one document a row.
        rollouts: the student's continuations, by its weights as they are when it is asked.
        ends: tokens that end a continuation.
        seed: of the run.
        both: whether a row that the student continues is learned from as text, too.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        blocks: Blocks,
        rollouts: Rollouts,
        ends: Sequence[int],
        *,
        seed: int,
        both: bool = False,
    ) -> None:
        self.settings, self.blocks, self.rollouts = settings, blocks, rollouts
        self.seed, self.both = seed, both
        self._ends = set(ends)

    def chosen(self, step: int, row: int) -> bool:
        """Whether the student writes a row of a step."""
        generator = _generator(self._seed(step, row, _CHOICE))
        return float(torch.rand((), generator=generator)) < self.settings.on_policy

    def _seed(self, step: int, row: int, what: int) -> int:
        return seed_of(self.seed, step, row, what)

    def batches(
        self, step: int, shares: Sequence[Tensor], device: torch.device
    ) -> tuple[list[Batch], dict[str, float]]:
        """The batches of some rows.

        Args:
            step: from 0.
            shares: int64 `[n]` each, the rows of each batch.
            device: where to.

        Returns:
            The batches, in each of them text first; and sums over all rows: `rows`, `written` (of
            these by the student), `tokens` that it wrote, and how many of its texts `ended`.
        """
        every = dict.fromkeys(row for share in shares for row in share.tolist())
        rows = [row for row in every if self.chosen(step, row)]
        seeds = [self._seed(step, row, _DRAW) for row in rows]
        most = self.settings.max_new_tokens
        own, new = continued(self.blocks, rows, seeds, self.rollouts, max_new_tokens=most)
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
        text = [row for row in rows if self.both or row not in place]
        by_student = [row for row in rows if row in place]
        parts = [self.blocks, text], [own, [place[row] for row in by_student]]

        def joined(name: str) -> Tensor:
            return torch.cat([getattr(blocks, name)[some] for blocks, some in parts])

        names = ("ids", "counts", "documents", "row_characters")
        whole = replace(self.blocks, **{name: joined(name) for name in names})
        batch = whole.batch(range(len(text) + len(by_student)), device)
        return replace(batch, rows=torch.tensor(text + by_student), written=len(by_student))


def seen_of(sums: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return totals of `Written.batches` for a log line, each with the number it is a mean over."""
    texts = sums["written"]
    return {
        "rollout_share": (texts, sums["rows"]),
        "rollout_tokens": (sums["tokens"], texts),
        "rollout_ended": (sums["ended"], texts),
    }


def writer(objective: Objective, blocks: Any, tokenizer: Any) -> Written | None:
    """Who makes the batches of a student that learns from its own text; None for any other.

    Args:
        objective: with the student and its settings.
        blocks: text, one document a row.
        tokenizer: the student's.
    """
    settings, model, precision = objective.settings, objective.student, objective.precision
    if not settings.on_policy:
        return None
    rollouts = sampler(settings, model, tokenizer, settings.batch_size, precision.autocast)
    how = {"seed": settings.seed, "both": settings.is_contrastive}
    return Written(settings, blocks, rollouts, rollouts.ends, **how)


def sampler(
    settings: RolloutSettings,
    model: Any,
    tokenizer: Any,
    batch_size: int,
    autocast: Autocast = nullcontext,
) -> Generated:
    """Return what samples a model's continuations at ROLLOUT_TEMPERATURE."""
    return Generated(
        model,
        end_tokens(without_adapters(model), tokenizer),
        vocabulary=n_ids(tokenizer),
        temperature=settings.rollout_temperature,
        batch_size=batch_size,
        autocast=autocast,
    )
