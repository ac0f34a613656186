"""What a language model is worth: its predictions on held-out blocks, its answers to questions."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssl_kd.datasets.blocks import Batch, Blocks
from ssl_kd.datasets.text import Example
from ssl_kd.evaluate.answers import TOLERANCE, AnswerScores, extract_answer
from ssl_kd.evaluate.tokens import TokenScores, TokenValues, token_values
from ssl_kd.losses.linear_distillation import CHUNK_BYTES, LinearTeacher, LogitsTeacher
from ssl_kd.losses.token_distillation import next_token_targets
from ssl_kd.teachers.causal import FrozenTeacher, hidden_states, linear_head

__all__ = ["Generation", "generate", "judge_answers", "judge_tokens"]

logger = logging.getLogger(__name__)

Autocast = Callable[[], AbstractContextManager[Any]]
Predict = Callable[[Batch, Tensor], LinearTeacher | LogitsTeacher]
"""A batch, and rows of its flattened `[batch * token]` positions -> the model's word there."""


@torch.no_grad()
def judge_tokens(
    model: Any,
    blocks: Blocks,
    *,
    teacher: Predict | None = None,
    batch_size: int = 8,
    autocast: Autocast = nullcontext,
) -> TokenScores:
    """How well a model predicts the targets of blocks, and how close it is to its teacher.

    Logits exist a chunk at a time where the heads are linear. Dropout is off and there is no KV
    cache; the model's modes come back afterwards.

    Args:
        model: a causal language model of transformers, or a `FrozenTeacher` to be judged itself.
        blocks: held-out text.
        teacher: a `FrozenTeacher` on the same device; None for no agreement and no divergence.
        batch_size: blocks of a forward pass.
        autocast: makes the context that the model runs in: `Precision.autocast`. (A `FrozenTeacher`
            runs in its own dtype.)

    Returns:
        The scores. Batches that are not finite are left out, and named by their blocks.
    """
    scores = TokenScores()
    with _evaluating(model):
        if isinstance(model, FrozenTeacher):
            predict, device, autocast = model, model.device, nullcontext
        else:
            predict, device = _predictor(model), _device(model)
        for start in range(0, len(blocks), batch_size):
            rows = range(start, min(start + batch_size, len(blocks)))
            batch = blocks.batch(rows, device)
            positions, targets = next_token_targets(batch.input_ids, batch.counts)
            if len(targets):
                with autocast():
                    said = predict(batch, positions)
                taught = teacher(batch, positions) if teacher is not None else None
                scores.add(list(_values(said, taught, targets, autocast)), rows, batch.characters)
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
    continued = _continue(
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
        said = f"{len(scores.faults)} of {scores.n} questions got no text, the first: "
        logger.warning("%s", said + scores.faults[0])
    return scores, generations


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    max_new_tokens: int = 64,
    *,
    batch_size: int = 8,
    autocast: Autocast = nullcontext,
) -> list[str]:
    """What a model goes on with after each prompt, greedily; the prompt is not repeated.

    Args:
        model: a causal language model of transformers, or a `FrozenTeacher`.
        tokenizer: its tokenizer; never changed.
        prompts: texts.
        max_new_tokens: tokens at most; fewer where the model's text or its positions end.
        batch_size: prompts at once; padded on the left and masked, they do not see each other.
        autocast: makes the context that the model runs in; a `FrozenTeacher` has its own dtype.

    Returns:
        A text for each prompt. It is empty where generating failed; the log then says why.
    """
    ids = [_prompt_ids(tokenizer, prompt) for prompt in prompts]
    texts = []
    for prompt, (text, fault) in zip(
        prompts,
        _continue(model, tokenizer, ids, max_new_tokens, batch_size, autocast),
        strict=True,
    ):
        if fault is not None:
            logger.warning("Nothing is generated for the prompt %.60r: %s", prompt, fault)
        texts.append(text)
    return texts


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
    said: LinearTeacher | LogitsTeacher,
    taught: LinearTeacher | LogitsTeacher | None,
    targets: Tensor,
    autocast: Autocast,
) -> Iterator[TokenValues]:
    vocabulary = len(said.weight) if isinstance(said, LinearTeacher) else said.logits.shape[-1]
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    for start in range(0, len(targets), size):
        chunk = slice(start, start + size)
        with autocast():
            logits = logits_of(said, chunk)
        teacher_logits = None if taught is None else logits_of(taught, chunk)
        yield token_values(logits, targets[chunk], teacher_logits)


def logits_of(said: LinearTeacher | LogitsTeacher, chunk: slice = slice(None)) -> Tensor:
    """Logits `[n, vocab]` of some positions."""
    if isinstance(said, LogitsTeacher):
        return said.logits[chunk]
    return F.linear(said.hidden[chunk], said.weight, said.bias)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode; each module's own mode comes back. A `FrozenTeacher` has no other mode."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


# --- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Question:
    where: str
    prompt: str
    ids: list[int]
    reference: str


def _questions(examples: Iterable[Example], tokenizer: Any) -> Iterator[_Question]:
    for example in examples:
        messages = list(example.messages or ())
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        solution = messages[-1]["content"] if messages else example.completion
        reference = extract_answer(solution or "")
        if reference is None:
            continue
        if messages:
            prompt = _chat_prompt(messages[:-1], tokenizer)
            if prompt is None:
                continue
            ids = tokenizer(prompt, add_special_tokens=False).input_ids
        else:
            prompt = example.prompt or ""
            ids = _prompt_ids(tokenizer, prompt)
        yield _Question(example.where, prompt, ids, reference)


def _chat_prompt(messages: list[Any], tokenizer: Any) -> str | None:
    """The messages by the tokenizer's own template; None where it refuses them."""
    from jinja2 import TemplateError

    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    except TemplateError:  # the blocks name such an example among those left out
        return None


def _prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """A prompt as in training, see `make_blocks`: BOS where the tokenizer puts it, no EOS."""
    bos, own = tokenizer.bos_token_id, tokenizer("").input_ids
    start = [bos] if bos is not None and own[:1] == [bos] else []
    ids = start + tokenizer(prompt, add_special_tokens=False).input_ids
    # Nothing at all is the beginning of a text.
    return ids or [tokenizer.eos_token_id if bos is None else bos]


Continued = tuple[str, str | None]  # the text, or why there is none


def _continue(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    batch_size: int,
    autocast: Autocast,
) -> list[Continued]:
    """Go on after each prompt; where a batch crashes, its prompts are tried one by one."""
    if isinstance(model, FrozenTeacher):
        with model.on_device():
            return _continue(
                model.model, tokenizer, prompts, max_new_tokens, batch_size, nullcontext
            )
    room = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    results: list[Continued] = [
        ("", f"the prompt has {len(ids)} tokens and the model {room} positions: shorten the prompt")
        for ids in prompts
    ]
    fits = [i for i, ids in enumerate(prompts) if len(ids) + max_new_tokens <= room]
    # What would reach the last position writes less, and alone: nobody else is cut short for it.
    tight = [i for i, ids in enumerate(prompts) if room - max_new_tokens < len(ids) < room]
    batches = [fits[i : i + batch_size] for i in range(0, len(fits), batch_size)]
    batches += [[i] for i in tight]
    while batches:
        batch = batches.pop(0)
        asked = [prompts[i] for i in batch]
        new = min(max_new_tokens, room - max(map(len, asked)))
        try:
            with _evaluating(model), autocast():
                texts = _greedy(model, tokenizer, asked, new)
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

    device = _device(model)
    ends = _end_tokens(model, tokenizer)
    padding = ends[0] if ends else 0
    width = max(map(len, prompts))
    gaps = [width - len(ids) for ids in prompts]
    ids = [[padding] * gap + ids for gap, ids in zip(gaps, prompts, strict=True)]
    seen = [[0] * gap + [1] * (width - gap) for gap in gaps]
    watch = _Watch(width, torch.tensor(ends, device=device, dtype=torch.long))
    out = model.generate(
        input_ids=torch.tensor(ids, device=device),
        attention_mask=torch.tensor(seen, device=device),
        logits_processor=LogitsProcessorList([watch]),  # pyright: ignore[reportArgumentType]
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=padding,
        # A model brings sampling settings of its own: transformers warns that greedy ignores them,
        # and a penalty would not be ignored.
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
        # Both with the prompt: alone, many tokenizers drop the space at the beginning.
        before, whole = (tokenizer.decode(x) for x in (prompt, prompt + new[:stop]))
        text = whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new[:stop])
        results.append((text, None))
    return results


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a text, by the model's word and the tokenizer's."""
    own = model.generation_config.eos_token_id
    listed = own if isinstance(own, list) else [own]
    return sorted({token for token in (*listed, tokenizer.eos_token_id) if token is not None})
