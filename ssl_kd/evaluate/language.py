"""What a language model is worth: its predictions on held-out blocks, its answers to questions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from ssl_kd.datasets.blocks import Batch, Blocks
from ssl_kd.datasets.records import Example
from ssl_kd.datasets.render import show_chat
from ssl_kd.evaluate.answers import TOLERANCE, AnswerScores, extract_answer
from ssl_kd.evaluate.generation import Autocast, continue_prompts, generate, prompt_ids
from ssl_kd.evaluate.texts import repetition
from ssl_kd.evaluate.tokens import TokenScores, TokenValues, token_values
from ssl_kd.losses.teacher_output import LinearTeacher, LogitsTeacher, logits_of
from ssl_kd.losses.token_distillation import next_token_targets
from ssl_kd.losses.token_terms import CHUNK_BYTES
from ssl_kd.teachers.causal import evaluating
from ssl_kd.teachers.frozen import FrozenTeacher, hidden_states, linear_head

logger = logging.getLogger(__name__)

PROMPT_CHARACTERS = 120

Predict = Callable[[Batch, Tensor], LinearTeacher | LogitsTeacher]
"""A batch, and rows of its flattened `[batch * token]` positions -> the model's answer there."""

Beside = Callable[[Batch, Tensor], LinearTeacher | LogitsTeacher | None]
"""The same of a teacher; None of a batch that it does not know."""


@torch.no_grad()
def judge_tokens(
    model: Any,
    blocks: Blocks,
    *,
    teacher: Beside | None = None,
    batch_size: int = 8,
    autocast: Autocast = nullcontext,
) -> TokenScores:
    """How well a model predicts the targets of blocks, and how close it is to its teacher.

    Logits exist a chunk at a time where the heads are linear. Dropout is off and there is no KV
    cache; the model's modes come back afterwards.

    Args:
        model: a causal language model of transformers, or a `FrozenTeacher` to be judged itself.
        blocks: held-out text.
        teacher: a `FrozenTeacher` on the same device, or a `RememberedTeacher`; None for no
            agreement and no divergence. They are means over the rows that it knows.
        batch_size: blocks of a forward pass.
        autocast: makes the context that the model runs in: `Precision.autocast`. (A `FrozenTeacher`
            runs in its own dtype.)

    Returns:
        The scores. Batches that are not finite are left out, and named by their blocks.
    """
    scores = TokenScores()
    with nullcontext() if isinstance(model, FrozenTeacher) else evaluating(model):
        if isinstance(model, FrozenTeacher):
            predict, device, autocast = model, model.device, nullcontext
        else:
            predict, device = _predictor(model), next(model.parameters()).device
        for start in range(0, len(blocks), batch_size):
            rows = range(start, min(start + batch_size, len(blocks)))
            batch = blocks.batch(rows, device)
            positions, targets = next_token_targets(batch.input_ids, batch.counts)
            if len(targets):
                with autocast():
                    answer = predict(batch, positions)
                teacher_answer = None if teacher is None else teacher(batch, positions)
                values = list(_values(answer, teacher_answer, targets, autocast))
                scores.add(values, rows, batch.characters)
    return scores


@dataclass(frozen=True)
class Generation:
    """What a model went on with after a prompt.

    Attributes:
        where: where the question was read: `file.jsonl:17`.
        prompt: what the model was given.
        text: what it wrote; empty where that failed.
        reference: the answer that is right.
        fault: why there is no text; None where there is one.
    """

    where: str
    prompt: str
    text: str
    reference: str
    fault: str | None = None


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
    """Ask a model questions, greedily, and compare its answers.

    A question is an example with a prompt and a completion, or chat messages up to the assistant's
    last, of which `extract_answer` finds an answer in what is learned; other examples are passed
    over. A generation that fails, or whose logits are not finite before it ends, counts as not
    answered and is named in the scores' `faults`.

    Args:
        model: a causal language model of transformers, or a `FrozenTeacher`.
        tokenizer: its tokenizer; never changed.
        examples: held-out examples.
        limit: questions asked at most, the first ones; None for all.
        batch_size: questions asked at once.
        max_new_tokens: of an answer, at most; fewer where the model's positions end.
        last_number: see `extract_answer`; for what the model writes, not for the references.
        tolerance: relative, see `same_answer`.
        autocast: makes the context that the model runs in; a `FrozenTeacher` has its own dtype.

    Returns:
        The scores, and what was generated, a question each.
    """
    questions = list(islice(_questions(examples, tokenizer), limit))
    continued = continue_prompts(
        model, tokenizer, [q.ids for q in questions], max_new_tokens, batch_size, autocast
    )
    generations = [
        Generation(q.where, q.prompt, text, q.reference, fault)
        for q, (text, fault) in zip(questions, continued, strict=True)
    ]
    scores = AnswerScores.of(
        [None if g.fault else extract_answer(g.text, last_number=last_number) for g in generations],
        [g.reference for g in generations],
        tolerance=tolerance,
        faults=[f"{g.where}: {g.fault}" for g in generations if g.fault],
    )
    if scores.faults:
        found = len(scores.faults), scores.n, scores.faults[0]
        logger.warning("%d of %d questions got no answer, the first: %s", *found)
    return scores, generations


# --- tokens ---------------------------------------------------------------------------------------


def _predictor(model: Any) -> Predict:
    head = linear_head(model)  # a probe by a forward pass: once, and not for each batch

    def predict(batch: Batch, rows: Tensor) -> LinearTeacher | LogitsTeacher:
        inputs = batch.model_inputs()
        if head is None:
            return LogitsTeacher(model(**inputs, use_cache=False).logits.flatten(0, 1)[rows])
        hidden = hidden_states(model, inputs).flatten(0, 1)[rows]
        return LinearTeacher(hidden, head.weight, head.bias)

    return predict


def _values(
    answer: LinearTeacher | LogitsTeacher,
    teacher_answer: LinearTeacher | LogitsTeacher | None,
    targets: Tensor,
    autocast: Autocast,
) -> Iterator[TokenValues]:
    """What is known of each target token, a chunk of logits at a time."""
    linear = isinstance(answer, LinearTeacher)
    vocabulary = len(answer.weight) if linear else answer.logits.shape[-1]
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    for start in range(0, len(targets), size):
        chunk = slice(start, start + size)
        with autocast():
            logits = logits_of(answer, chunk)
        teacher_logits = None if teacher_answer is None else logits_of(teacher_answer, chunk)
        yield token_values(logits, targets[chunk], teacher_logits)


# --- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Question:
    where: str
    prompt: str
    ids: list[int]
    reference: str


def _questions(examples: Iterable[Example], tokenizer: Any) -> Iterator[_Question]:
    for example in examples:
        asked = _asked(example, tokenizer) if example.text is None else None
        if asked and (answer := extract_answer(asked.reference)) is not None:
            yield replace(asked, reference=answer)


def _asked(example: Example, tokenizer: Any) -> _Question | None:
    """What any kind of example asks, with its own continuation.

    None where the tokenizer's template refuses the messages, none of them is the assistant's, or
    there are images, which nothing is asked about.
    """
    if example.images:
        return None
    if example.messages is not None:
        messages = list(example.messages)
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        if not messages:
            return None
        try:
            prompt, _ = show_chat(messages[:-1], example.tools, tokenizer, prompt=True)
        except TemplateError:  # the blocks name such an example among those left out
            return None
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        return _Question(example.where, prompt, ids, messages[-1]["content"])
    if example.text is None:
        prompt, rest = example.prompt or "", example.completion or ""
    else:
        end = example.text.rfind(" ", 0, PROMPT_CHARACTERS)
        end = PROMPT_CHARACTERS if end < 1 else end
        prompt, rest = example.text[:end], example.text[end : 4 * end]
    return _Question(example.where, prompt, prompt_ids(tokenizer, prompt), rest)


# --- one judge for a whole run --------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """Held-out text as a model reads it.

    Attributes:
        tokenizer: the model's tokenizer.
        blocks: the text in its tokens.
    """

    tokenizer: Any
    blocks: Blocks


class LanguageJudge:
    """Looks at models through the same held-out rows, prompts and questions.

    Args:
        examples: held-out documents, for prompts and questions.
        student: how every model but a `FrozenTeacher` reads them.
        teacher: how a `FrozenTeacher` does; None where there is none to be judged.
        beside: the teacher whose distributions the student's are compared with; None for no
            agreement and no divergence.
        validation: rows in the students' tokens, by which one of them is chosen; None: those of
            `student`.
        batch_size: blocks of a forward pass.
        answer_prompts: questions asked at most.
        generations: prompts that answers are kept of.
        max_new_tokens: of an answer, at most.
        autocast: makes the context that a student runs in.
        original_router: makes a context in which a mixture of experts has the routers that it came
            with: all rows of the table are beside one teacher, whatever its routers learn.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        student: Reading,
        teacher: Reading | None = None,
        *,
        beside: Beside | None = None,
        validation: Blocks | None = None,
        batch_size: int = 8,
        answer_prompts: int = 100,
        generations: int = 4,
        max_new_tokens: int = 64,
        autocast: Autocast = nullcontext,
        original_router: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._examples, self._student, self._teacher = examples, student, teacher
        self._validation = student.blocks if validation is None else validation
        self._beside, self._batch_size, self._answer_prompts = beside, batch_size, answer_prompts
        self._max_new_tokens, self._autocast, self._as_it_came = (
            max_new_tokens,
            autocast,
            original_router,
        )
        readings = [student] if teacher is None else [student, teacher]
        every = (
            [q for reading in readings if (q := _asked(example, reading.tokenizer)) is not None]
            for example in examples
        )
        # As the student reads it, and as the teacher does where there is one.
        both = (asked for asked in every if len(asked) == len(readings))
        self._prompts = list(islice(both, generations))

    def validation(self, student: Any) -> TokenScores:
        """Scores of a student on the rows that one is chosen by."""
        return self._scores(student, self._validation)

    def _scores(self, model: Any, blocks: Blocks) -> TokenScores:
        with self._as_it_came():
            return judge_tokens(
                model,
                blocks,
                teacher=None if isinstance(model, FrozenTeacher) else self._beside,
                batch_size=self._batch_size,
                autocast=self._autocast,
            )

    def row(self, name: str, model: Any) -> tuple[dict[str, Any], list[str]]:
        """A row of the report's table, of rows that no choice is made on; and what the model wrote.

        Args:
            name: of the row.
            model: a student, or a `FrozenTeacher`.

        Returns:
            The scores by name, and a text after each prompt.
        """
        reading = self._reading(model)
        row = self._scores(model, reading.blocks).table_row(name)
        with self._as_it_came():
            answers, _ = judge_answers(
                model,
                reading.tokenizer,
                self._examples,
                limit=self._answer_prompts,
                max_new_tokens=self._max_new_tokens,
                autocast=self._autocast,
            )
            texts = self._texts(model, reading.tokenizer)
        written = [reading.tokenizer(t, add_special_tokens=False).input_ids for t in texts]
        return row | {
            "repetition": repetition(written),
            "answer_accuracy": answers.accuracy,
            "answer_rate": answers.answer_rate,
            "n": answers.n,
            "interval": answers.interval,
        }, texts

    def _texts(self, model: Any, tokenizer: Any) -> list[str]:
        """What a model writes after each prompt; empty where that failed, and the log says why."""
        asked = [both[-1 if isinstance(model, FrozenTeacher) else 0] for both in self._prompts]
        return generate(
            model,
            tokenizer,
            [question.prompt for question in asked],
            self._max_new_tokens,
            ids=[question.ids for question in asked],
            autocast=self._autocast,
        )

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts that answers are kept of, in the student's tokens."""
        return [asked[0].ids for asked in self._prompts]

    def side_by_side(self, generations: dict[str, list[str]]) -> list[dict[str, str]]:
        """Each prompt with what each model wrote, and the text's own continuation."""
        return [
            {"prompt": asked[0].prompt, "reference": asked[0].reference}
            | {name: texts[i] for name, texts in generations.items()}
            for i, asked in enumerate(self._prompts)
        ]

    def _reading(self, model: Any) -> Reading:
        if not isinstance(model, FrozenTeacher):
            return self._student
        assert self._teacher is not None
        return self._teacher
