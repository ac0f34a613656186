"""Evaluate language models on held-out text: token predictions, answers, generated texts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from itertools import islice
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from ssl_kd.language.evaluate.answers import TOLERANCE, AnswerScores, extract_answer
from ssl_kd.language.evaluate.generation import Autocast, generate, prompt_ids, repetition
from ssl_kd.language.evaluate.tokens import TokenScores, TokenValues, mean_comparison, token_values
from ssl_kd.language.losses.teacher_output import LinearTeacher, LogitsTeacher, logits_of
from ssl_kd.language.losses.token_distillation import next_token_targets
from ssl_kd.language.losses.token_terms import CHUNK_BYTES
from ssl_kd.language.models.causal import evaluating
from ssl_kd.language.models.frozen import FrozenTeacher, answer_at, linear_head
from ssl_kd.language.text.blocks import Batch, Blocks
from ssl_kd.language.text.records import Example
from ssl_kd.language.text.render import show_chat

logger = logging.getLogger(__name__)

PROMPT_CHARACTERS = 120

Predict = Callable[[Batch, Tensor], LinearTeacher | LogitsTeacher]
"""Map a batch and rows of its flattened `[batch * token]` positions to the model's output there."""


@torch.no_grad()
def judge_tokens(
    model: Any,
    blocks: Blocks,
    *,
    teachers: Sequence[Predict] = (),
    weights: Sequence[float] | None = None,
    batch_size: int = 8,
    autocast: Autocast = nullcontext,
) -> TokenScores:
    """Score a model's predictions of the target tokens of blocks, alone and against teachers.

    If `blocks` have tags, each row is compared with the teacher of its tag; otherwise, with all of
    them, and the means over the teachers have these `weights`.
    With a linear output layer, logits are computed one chunk of tokens at a time. A model of
    transformers runs under `autocast`, in evaluation mode and without KV cache; afterwards its
    training modes are restored. A `FrozenTeacher` runs in its own dtype. Teachers must be on the
    same device. Batches with non-finite values are not in the means; `left_out` lists them.
    """
    scores = TokenScores()
    with nullcontext() if isinstance(model, FrozenTeacher) else evaluating(model):
        if isinstance(model, FrozenTeacher):
            predict = model
            device = model.device
            autocast = nullcontext
        else:
            predict, device = _predictor(model), next(model.parameters()).device
        for tag, rows in _batches(blocks, batch_size):
            batch = blocks.batch(rows, device)
            positions, targets = next_token_targets(batch.input_ids, batch.counts)
            if len(targets):
                with autocast():
                    output = predict(batch, positions)
                own = teachers if blocks.tags is None else teachers[tag : tag + 1]
                answers = [teacher(batch, positions) for teacher in own]
                values = list(_values(output, answers, weights, targets, autocast))
                scores.add(values, rows, batch.target_bytes)
    return scores


def _batches(blocks: Blocks, batch_size: int) -> Iterator[tuple[int, list[int]]]:
    """Yield each batch of rows of one tag, after the tag; it is 0 for blocks without tags."""
    tags = [0] * len(blocks) if blocks.tags is None else blocks.tags.tolist()
    for tag in sorted({*tags}):
        rows = [row for row, each in enumerate(tags) if each == tag]
        for start in range(0, len(rows), batch_size):
            yield tag, rows[start : start + batch_size]


@dataclass(frozen=True)
class Generation:
    """A prompt, its reference, and the text that a model generated after the prompt."""

    where: str  # source of the prompt, such as `file.jsonl:17`
    prompt: str
    ids: list[int]  # tokens of the prompt
    reference: str  # the correct answer, or the continuation of the prompt in the data
    text: str = ""  # the generated text; empty if generation failed
    fault: str | None = None  # why generation failed


def judge_answers(
    model: Any,
    tokenizer: Any,
    examples: Iterable[Example],
    *,
    limit: int | None = None,
    batch_size: int = 8,
    max_new_tokens: int = 64,
    last_number: bool = False,
    tolerance: float = TOLERANCE,
    autocast: Autocast = nullcontext,
) -> tuple[AnswerScores, list[Generation]]:
    """Generate answers to questions greedily, and compare them with the references.

    A question is an example with a prompt and a completion, or with chat messages, whose completion
    or last assistant message contains an answer (`extract_answer`). Other examples are skipped, and
    only the first `limit` questions are used. If generation fails or logits become non-finite, the
    question counts as unanswered, and `faults` of the scores lists the reason. With `last_number`,
    the last number of a generated text counts if the text marks no answer. `autocast` returns the
    context for the model; a `FrozenTeacher` runs in its own dtype.
    """
    questions = list(islice(_questions(examples, tokenizer), limit))
    generations = _generations(
        model, tokenizer, questions, max_new_tokens, batch_size=batch_size, autocast=autocast
    )
    scores = AnswerScores.of(
        [None if g.fault else extract_answer(g.text, last_number=last_number) for g in generations],
        [g.reference for g in generations],
        tolerance=tolerance,
        faults=[f"{g.where}: {g.fault}" for g in generations if g.fault],
    )
    if scores.faults:
        counts = len(scores.faults), scores.n, scores.faults[0]
        logger.warning("Generation failed for %d of %d questions, first for %s", *counts)
    return scores, generations


def has_questions(examples: Iterable[Example], tokenizer: Any) -> bool:
    """Return whether `judge_answers` would find a question; the arguments are the same."""
    return any(True for _ in _questions(examples, tokenizer))


def _generations(
    model: Any, tokenizer: Any, questions: list[Generation], max_new_tokens: int, **options: Any
) -> list[Generation]:
    """Fill in what a model generates after each prompt."""
    texts = generate(model, tokenizer, [q.ids for q in questions], max_new_tokens, **options)
    return [replace(q, text=t, fault=f) for q, (t, f) in zip(questions, texts, strict=True)]


def _predictor(model: Any) -> Predict:
    is_linear = linear_head(model) is not None  # probes by a forward pass: once
    return lambda batch, rows: answer_at(model, batch.model_inputs(), rows, linear=is_linear)


def _values(
    output: LinearTeacher | LogitsTeacher,
    answers: Sequence[LinearTeacher | LogitsTeacher],
    weights: Sequence[float] | None,
    targets: Tensor,
    autocast: Autocast,
) -> Iterator[TokenValues]:
    """Yield the values of the target tokens, one chunk of tokens at a time."""
    linear = isinstance(output, LinearTeacher)
    vocabulary = len(output.weight) if linear else output.logits.shape[-1]
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    for start in range(0, len(targets), size):
        chunk = slice(start, start + size)
        with autocast():
            logits = logits_of(output, chunk)
        each = [token_values(logits, targets[chunk], logits_of(a, chunk)) for a in answers]
        yield mean_comparison(each, weights) if each else token_values(logits, targets[chunk])


def _questions(examples: Iterable[Example], tokenizer: Any) -> Iterator[Generation]:
    for example in examples:
        question = _question(example, tokenizer) if example.text is None else None
        if question and (answer := extract_answer(question.reference)) is not None:
            yield replace(question, reference=answer)


def _question(example: Example, tokenizer: Any) -> Generation | None:
    """Split an example into a prompt and its continuation.

    Return None if the chat template rejects the messages, if there are messages to train on but
    none has the role `assistant`, or if the example has images.
    """
    if example.images:
        return None
    if example.messages is not None:
        messages = list(example.messages)
        while messages and not example.is_prompt and messages[-1]["role"] != "assistant":
            messages.pop()
        if not messages:
            return None
        rest = "" if example.is_prompt else messages.pop()["content"]
        try:
            prompt, _ = show_chat(messages, example.tools, tokenizer, prompt=True)
        except TemplateError:  # `make_blocks` lists such examples
            return None
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        return Generation(example.where, prompt, ids, rest)
    if example.text is None:
        prompt, rest = example.prompt or "", example.completion or ""
    else:
        end = example.text.rfind(" ", 0, PROMPT_CHARACTERS)
        end = PROMPT_CHARACTERS if end < 1 else end
        prompt, rest = example.text[:end], example.text[end : 4 * end]
    return Generation(example.where, prompt, prompt_ids(tokenizer, prompt), rest)


@dataclass(frozen=True)
class Reading:
    """Held-out text in the tokens of one model."""

    tokenizer: Any
    blocks: Blocks


@dataclass
class LanguageJudge:
    """Evaluate several models on the same held-out blocks, prompts and questions."""

    examples: Sequence[Example]  # held-out documents, the source of prompts and questions
    student: Reading  # for all models but a `FrozenTeacher`
    teacher: Reading | None = None  # for a `FrozenTeacher`
    _: KW_ONLY
    references: Sequence[Predict] = ()  # the teachers of `judge_tokens`
    weights: Sequence[float] | None = None  # of these teachers
    validation_blocks: Blocks | None = None  # for model selection; None: the student's blocks
    batch_size: int = 8
    answer_prompts: int = 100  # questions, at most
    generations: int = 4  # prompts whose generated texts are in the report
    max_new_tokens: int = 64
    autocast: Autocast = nullcontext
    # A context that restores the original routers of a mixture of experts: a teacher's routers may
    # be trained, and each evaluation compares with the same teacher.
    original_router: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __post_init__(self) -> None:
        readings = [self.student] if self.teacher is None else [self.student, self.teacher]
        by_example = (
            [q for reading in readings if (q := _question(example, reading.tokenizer)) is not None]
            for example in self.examples
        )
        complete = (questions for questions in by_example if len(questions) == len(readings))
        # The question in the student's tokens, then in the teacher's.
        self._prompts = list(islice(complete, self.generations))

    def validation(self, student: Any) -> TokenScores:
        """Score a student's predictions on the blocks for model selection."""
        blocks = self.student.blocks if self.validation_blocks is None else self.validation_blocks
        return self._scores(student, blocks)

    def _scores(self, model: Any, blocks: Blocks) -> TokenScores:
        with self.original_router():
            return judge_tokens(
                model,
                blocks,
                teachers=() if isinstance(model, FrozenTeacher) else self.references,
                weights=self.weights,
                batch_size=self.batch_size,
                autocast=self.autocast,
            )

    def row(self, name: str, model: Any) -> tuple[dict[str, Any], list[str]]:
        """Return the scores of a model on the held-out text, and its texts after each prompt."""
        reading, side = self.student, 0
        if isinstance(model, FrozenTeacher):
            assert self.teacher is not None
            reading, side = self.teacher, -1
        row = self._scores(model, reading.blocks).table_row(name)
        with self.original_router():
            answers, _ = judge_answers(
                model,
                reading.tokenizer,
                self.examples,
                limit=self.answer_prompts,
                max_new_tokens=self.max_new_tokens,
                autocast=self.autocast,
            )
            generations = _generations(
                model,
                reading.tokenizer,
                [pair[side] for pair in self._prompts],
                self.max_new_tokens,
                autocast=self.autocast,
            )
        for g in generations:
            if g.fault is not None:
                logger.warning("No text was generated for the prompt %.60r: %s", g.prompt, g.fault)
        texts = [generation.text for generation in generations]
        tokens = [reading.tokenizer(t, add_special_tokens=False).input_ids for t in texts]
        return row | {
            "repetition": repetition(tokens),
            "answer_accuracy": answers.accuracy,
            "answer_rate": answers.answer_rate,
            "n": answers.n,
            "interval": answers.interval,
        }, texts

    def side_by_side(self, generations: dict[str, list[str]]) -> list[dict[str, str]]:
        """Return a dict per prompt: the prompt, its reference, and the text of each model."""
        return [
            {"prompt": pair[0].prompt, "reference": pair[0].reference}
            | {name: texts[i] for name, texts in generations.items()}
            for i, pair in enumerate(self._prompts)
        ]
