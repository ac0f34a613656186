"""Let a model continue rows of text: the student in each step, or a model before training.

In on-policy distillation (ON_POLICY), the student continues some rows of each step, so that it is
trained on the prefixes that it generates itself (Agarwal et al., GKD, ICLR 2024, algorithm 1; no
gradient flows through the sampling). The chosen rows and their continuations depend on the seed,
the step, the row and the weights, but not on other rows, the number of ranks, or a resume.

In sequence-level distillation (TEACHER_TEXT), the teacher continues rows once, and the student is
trained on the continuations (Kim and Rush, EMNLP 2016). In offline on-policy distillation
(STUDENT_TEXT), the student continues rows once, so that a cache can hold the teacher's answers to
them (Wu et al., Lightning OPD, arXiv 2604.13010).
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ssl_kd.core.errors import InputError
from ssl_kd.core.files import load_tensors, save_tensors
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.clock import Progress
from ssl_kd.core.runs.ranks import Ranks
from ssl_kd.core.seeds import seed_of
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.evaluate.generation import Autocast, end_tokens
from ssl_kd.language.models.causal import CausalLM, evaluating, n_ids, positions, without_adapters
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.settings.groups import RolloutSettings, TrainingSettings
from ssl_kd.language.text.blocks import Batch, Blocks, digest_of
from ssl_kd.language.text.rows import rows_of_step
from ssl_kd.language.train.objective import Objective

logger = logging.getLogger(__name__)

_CHOICE, _DRAW = 0, 1  # distinguish the seeds of a row's choice and of its continuations
PROMPT_TOKENS = 16  # of a row of plain text, with the start token
GENERATED = Path("data")  # whose folders teacher_text and student_text hold continuations
COLUMNS = ("ids", "counts", "documents")
PART = 256  # rows in a file of continuations, and the most that an interruption loses

Continue = Callable[[Sequence[Sequence[int]], Sequence[int], Sequence[int]], list[list[int]]]
"""Function of prompts, their maximum numbers of new tokens, and their seeds, which returns the new
tokens of each prompt."""


@dataclass
class Sampler:
    """Sample continuations of prompts with `generate` of transformers.

    Each prompt has its own random generator. A token is drawn from `softmax(logits / temperature)`
    by inverting its distribution function at a uniform number; temperature 0 takes the most likely
    token. A row ends where its logits are not finite; `sick` counts these rows. Token ids from
    `vocabulary` on are padding and never drawn.
    """

    model: Any
    ends: list[int]
    _: KW_ONLY
    vocabulary: int = sys.maxsize
    temperature: float = 1.0
    batch_size: int = 8
    autocast: Autocast = nullcontext
    sick: int = 0

    def __call__(
        self, prompts: Sequence[Sequence[int]], rooms: Sequence[int], seeds: Sequence[int]
    ) -> list[list[int]]:
        """Continue each prompt; the result depends only on the prompt, its seed and the model.

        `rooms` are the maximum lengths of the continuations, including end tokens.
        """
        continuations: list[list[int]] = [[] for _ in prompts]
        with evaluating(self.model), self.autocast():
            for batch in self._batches(list(map(len, prompts)), rooms):
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

        causal = without_adapters(self.model)  # adapters stay in place
        device, width = next(causal.parameters()).device, max(map(len, prompts))
        gaps = [width - len(ids) for ids in prompts]
        draw = _Draw(width, n, seeds, torch.tensor(self.ends, device=device), self.temperature)
        processors: list[Any] = [draw]
        if self.vocabulary < causal.get_output_embeddings().weight.shape[0]:
            processors.insert(0, self._without_padding)
        # The model's own sampling settings and penalties must not apply.
        own, causal.generation_config = causal.generation_config, GenerationConfig()
        try:
            out = causal.generate(
                input_ids=torch.tensor(
                    [
                        [self.ends[0]] * gap + list(ids)
                        for gap, ids in zip(gaps, prompts, strict=True)
                    ],
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
        self.sick += int(draw.sick.sum())
        return out[:, width:].tolist()

    def _without_padding(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        padding = torch.arange(scores.shape[-1], device=scores.device) >= self.vocabulary
        return scores.masked_fill(padding, -torch.inf)


class _Draw:
    """Mask all scores but the sampled token's; if scores are not finite, sample the end token."""

    def __init__(
        self, width: int, n: int, seeds: Sequence[int], ends: Tensor, temperature: float
    ) -> None:
        self._width = width
        self._ends = ends
        self._temperature = temperature
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        numbers = [torch.rand(n, generator=g, dtype=torch.float64) for g in generators]
        self._uniform = torch.stack(numbers).to(ends.device)
        self.sick = torch.zeros(len(seeds), dtype=torch.bool, device=ends.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = scores.argmax(-1, keepdim=True)
        if self._temperature:
            uniform = self._uniform[:, input_ids.shape[1] - self._width, None]
            # In the order of the vocabulary: sorted by probability, rounding would swap neighbors.
            mass = (scores / self._temperature).double().softmax(-1).cumsum(-1)
            token = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)
            token = token.clamp(max=scores.shape[-1] - 1)
        finite = scores.amax(-1).isfinite()  # also False for NaN
        self.sick |= ~finite & ~torch.isin(input_ids[:, self._width :], self._ends).any(1)
        token = token.where(finite[:, None], self._ends[0])
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0)


def prompt_length(blocks: Blocks, row: int) -> int:
    """Return the number of tokens in the prompt of a row that holds one document.

    The prompt ends before the first target. Plain text, in which at most a start token precedes it,
    has a prompt of PROMPT_TOKENS tokens, or fewer such that at least one token is left.
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

    Return the continued rows as blocks, which keep the digest of `blocks`, and the continuations
    alone. Raise InputError if a prompt fills its row.
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
    row_bytes = torch.zeros(len(rows), dtype=blocks.row_bytes.dtype)
    columns = {"ids": ids, "counts": counts, "documents": documents}
    return replace(blocks, **columns, row_bytes=row_bytes), new


@dataclass
class RolloutBatches:
    """Make the batches of a step, in which the student continues the share ON_POLICY of the rows.

    The rows of `blocks` hold one document each. `ends` are the tokens that end a continuation. With
    `keep_text`, the text of continued rows stays in the batch, too.
    """

    rollout: RolloutSettings
    blocks: Blocks
    sample: Continue
    ends: Sequence[int]
    _: KW_ONLY
    seed: int
    keep_text: bool = False

    def chosen(self, step: int, row: int) -> bool:
        """Return whether the student continues a row in a step."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, step, row, _CHOICE))
        return float(torch.rand((), generator=generator)) < self.rollout.on_policy

    def batches(
        self, step: int, shares: Sequence[Tensor], device: torch.device
    ) -> tuple[list[Batch], dict[str, float]]:
        """Return the batches of a step, in which rows of text precede the continued rows.

        `shares` are the indices of the rows in each batch. The second result has counts over all
        batches: `rows` (times NUM_GENERATIONS), `written` (continued rows), `tokens` (generated
        tokens) and `ended` (continuations that reached an end token).
        """
        distinct = dict.fromkeys(row for share in shares for row in share.tolist())
        n = self.rollout.num_generations
        rows = [row for row in distinct if self.chosen(step, row) for _ in range(n)]
        seeds = [seed_of(self.seed, step, row, _DRAW + i % n) for i, row in enumerate(rows)]
        most = self.rollout.max_new_tokens
        own, new = continue_rows(self.blocks, rows, seeds, self.sample, max_new_tokens=most)
        place = {row: range(i, i + n) for i, row in enumerate(rows) if i % n == 0}
        batches = [self._batch(share.tolist(), own, place, device) for share in shares]
        sums = {
            "rows": float(n * sum(map(len, shares))),
            "written": float(sum(batch.written for batch in batches)),
            "tokens": float(sum(map(len, new))),
            "ended": float(sum(bool(tokens) and tokens[-1] in self.ends for tokens in new)),
            **getattr(self.sample, "sums", {}),
        }
        return batches, sums

    def _batch(
        self, rows: list[int], own: Blocks, place: Mapping[int, range], device: torch.device
    ) -> Batch:
        text = [row for row in rows if self.keep_text or row not in place]
        by_student = [row for row in rows for _ in place.get(row, ())]
        parts = [self.blocks, text], [own, [i for row in rows for i in place.get(row, ())]]

        def joined(name: str) -> Tensor:
            return torch.cat([getattr(blocks, name)[chosen] for blocks, chosen in parts])

        names = ("ids", "counts", "documents", "row_bytes")
        blocks = replace(self.blocks, **{name: joined(name) for name in names})
        batch = blocks.batch(range(len(text) + len(by_student)), device)
        return replace(batch, rows=torch.tensor(text + by_student), written=len(by_student))


def rollout_batches(objective: Objective, blocks: Any, tokenizer: Any) -> RolloutBatches | None:
    """Return an object that makes batches with continuations; None if ON_POLICY is 0."""
    settings = objective.settings
    if not settings.on_policy:
        return None
    model, autocast = objective.student, objective.precision.autocast
    sample = sampler(settings, model, tokenizer, settings.batch_size, autocast)
    return RolloutBatches(
        settings,
        blocks,
        sample,
        sample.ends,
        seed=settings.seed,
        keep_text=settings.divergence == "distillm2",
    )


def sampler(
    rollout: RolloutSettings,
    model: Any,
    tokenizer: Any,
    batch_size: int,
    autocast: Autocast = nullcontext,
) -> Sampler:
    """Return a sampler of a model's continuations at ROLLOUT_TEMPERATURE."""
    return Sampler(
        model,
        end_tokens(without_adapters(model), tokenizer),
        vocabulary=n_ids(tokenizer),
        temperature=rollout.rollout_temperature,
        batch_size=batch_size,
        autocast=autocast,
    )


def with_held_out_text(
    settings: LanguageSettings,
    blocks: Blocks,
    teachers: Sequence[CausalLM],
    precision: Precision,
    ranks: Ranks,
    progress: Progress,
) -> Blocks:
    """Return held-out rows in which the first teacher continues the prompts that have no text.

    The scores then compare the student with what the teacher says. If the rows have tags, each is
    continued by the teacher of its tag. Raise SettingsError without a local teacher.
    """
    alone = (~blocks.counts.any(1)).nonzero().flatten().tolist()
    due = sum(row < 2 * settings.eval_rows for row in alone)
    if not due:
        return blocks
    if not teachers or teachers[0].model is None:
        raise SettingsError(
            f"{len(alone)} of {len(blocks)} held-out rows are prompts without a text, which only a"
            " local teacher can continue: set EVAL_PATH to records with a text, or TEACHER_URL to"
            " None and TEACHER_MODEL to a local model"
        )
    logger.info("the teacher continues %d held-out prompts, to score its own text", due)
    tags = torch.zeros(len(blocks)) if blocks.tags is None else blocks.tags
    for tag, lm in enumerate(teachers):
        own = [row for row in alone if tags[row] == tag]
        due = sum(row < 2 * settings.eval_rows for row in own)
        rows = own[: -(-due // PART) * PART]
        blocks = with_text_by("teacher", settings, blocks, lm, precision, ranks, progress, rows)
    return blocks


def with_text_by(
    writer: Literal["teacher", "student"],
    settings: LanguageSettings,
    blocks: Blocks,
    lm: CausalLM,
    precision: Precision,
    ranks: Ranks,
    progress: Progress,
    rows: Sequence[int] | None = None,
) -> Blocks:
    """Return the text with continuations by a model in some rows, as TEACHER_TEXT or STUDENT_TEXT.

    The continuations are stored below `data/teacher_text` or `data/student_text`, and used again
    for the same model, text and settings. The first rank writes them, in this order. An interrupted
    run continues after the last complete file. The student has its weights from before training.
    """
    kind, by_student = f"{writer}_text", writer == "student"
    if rows is None:
        rows = _rows_to_continue(settings, getattr(settings, kind), len(blocks))
    if not rows:
        return blocks
    decisive = ("max_new_tokens", "rollout_temperature", "seed", kind)
    dtype = precision.student if by_student else lm.model.dtype
    key = [blocks.digest, lm.weights_id, str(dtype)]
    key += [str(getattr(settings, name)) for name in decisive]
    key += [settings.quantization] if settings.quantization else []
    folder = GENERATED / kind / hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
    files = [folder / f"part_{start // PART:05d}.pt" for start in range(0, len(rows), PART)]
    autocast = precision.autocast if by_student else nullcontext
    model = lm.model.to(precision.device)
    sample = sampler(settings, model, lm.tokenizer, settings.batch_size, autocast)
    most = settings.max_new_tokens

    def write_missing() -> None:
        for i, path in enumerate(files):
            if path.exists():
                continue
            part = rows[i * PART : (i + 1) * PART]
            seeds = [seed_of(settings.seed, row) for row in part]
            own, _ = continue_rows(blocks, part, seeds, sample, max_new_tokens=most)
            if sample.sick:
                raise InputError(
                    f"the logits of the {writer} {lm.name} are not finite in {sample.sick} of"
                    f" {len(part)} rows that it continues: try --model_dtype float32"
                )
            save_tensors(path, {name: getattr(own, name) for name in COLUMNS})
            progress(f"{writer}'s text", min((i + 1) * PART, len(rows)), len(rows), {})

    ranks.from_first(write_missing)
    logger.info("the %s's continuations of %d rows are in %s", writer, len(rows), folder)
    parts = [load_tensors(path) for path in files]
    columns = {name: getattr(blocks, name).clone() for name in COLUMNS}
    for name, column in columns.items():
        column[list(rows)] = torch.cat([part[name] for part in parts])
    row_bytes = blocks.row_bytes.clone()
    row_bytes[list(rows)] = 0  # unknown after a continuation
    digest = digest_of(*(column.numpy() for column in columns.values()))
    continued = replace(blocks, **columns, row_bytes=row_bytes, digest=digest)
    if not by_student:
        return continued
    is_own = torch.zeros(len(blocks), dtype=torch.bool).index_fill_(0, torch.tensor(rows), True)
    return replace(continued, by_student=is_own)


def _rows_to_continue(run: TrainingSettings, share: float, n: int) -> list[int]:
    """Return the rows that a model continues and training reads, rounded up to full files."""
    generator = torch.Generator().manual_seed(seed_of(run.seed, n))
    is_chosen = torch.zeros(n, dtype=torch.bool)
    is_chosen[torch.randperm(n, generator=generator)[: round(share * n)]] = True
    order = rows_of_step(0, n, n, run.seed)  # of the first epoch
    n_read = n
    if run.epochs is None:
        n_read = run.max_steps * run.batch_size * run.gradient_accumulation_steps
    due = int(is_chosen[order[:n_read]].sum())
    return order[is_chosen[order]][: -(-due // PART) * PART].tolist()
