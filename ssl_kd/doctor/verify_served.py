"""Does a server answer as the teacher does that it stands for? Compared with that teacher here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ssl_kd.datasets.blocks import Batch, make_blocks
from ssl_kd.doctor.finding import Finding
from ssl_kd.language.served import ServedTeacher
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.text_rows import texts_of
from ssl_kd.losses.token_distillation import next_token_targets
from ssl_kd.teachers.causal import CausalLM, load_causal_lm, positions
from ssl_kd.teachers.http_client import short
from ssl_kd.teachers.server import PromptTopK, ServerFailed

ROWS = 8  # of the text
# Of log-probabilities, in nats, weighted by probability. bf16 beside float32 is about 0.01.
SAME = 0.05
NEAR = 0.5  # quantised, or trained a little further
ALIKE = 0.75  # share of the likeliest tokens: models of different training have fewer in common
EXPLAINED = 0.3  # the share of the difference that may be left by what explains it
TRIED = "the served teacher"


@dataclass(frozen=True)
class _Distance:
    """How far the server's log-probabilities are from those of logits."""

    off: float  # nats, a mean weighted by probability
    same_first: float  # share of the positions at which both have the same likeliest token


def compare_served(settings: LanguageSettings) -> list[Finding]:
    """Ask the server about a few rows of the text, and the teacher of TEACHER_MODEL itself.

    The server agrees where its log-probabilities are within 0.05 nats of the teacher's, in a mean
    weighted by their probabilities. Where they are not, it is said what would explain the
    difference: positions misaligned by one, another temperature, another tokenizer, lower
    precision, or another model.

    Args:
        settings: TEACHER_URL, and a TEACHER_MODEL whose weights are here; the text.

    Returns:
        One finding, a fault where they do not agree.

    Raises:
        FileNotFoundError, CausalLMUnavailable: the weights are not here.
        SettingsError: as by `texts_of`.
    """
    local = load_causal_lm(settings.teacher_model)
    texts, _ = texts_of(settings)
    size = min(settings.block_size, positions(local.model) or settings.block_size)
    blocks = make_blocks(texts, local.tokenizer, size, packing=False).part(slice(ROWS))
    batch = blocks.batch(range(len(blocks)))
    rows, _ = next_token_targets(batch.input_ids, batch.counts)
    try:
        served = ServedTeacher.of(settings, local.tokenizer, torch.device("cpu"))
        found = served.top_k_at(batch, rows)
        if (other := _other_tokenizer(served, batch, local)) is not None:
            return [other]
    except ServerFailed as error:
        return [Finding(TRIED, str(error), "see how the server was started")]
    return [_explained(found, _logits(local, batch), rows, batch)]


@torch.no_grad()
def _logits(local: CausalLM, batch: Batch) -> Tensor:
    """Of every position, `[batch * token, vocab]`, float32."""
    return local.model(**batch.model_inputs(), use_cache=False).logits.float().flatten(0, 1)


def _explained(found: PromptTopK, logits: Tensor, rows: Tensor, batch: Batch) -> Finding:
    """Whether they agree; and if not, why."""
    plain = _distance(found, logits[rows])
    n, k = found.tokens.shape
    seen = (
        f"{n} positions, {k} tokens at each: off by {plain.off:.3g} nats on average (allowed "
        f"{SAME:g}), the likeliest token is the same at {plain.same_first:.0%}"
    )
    if plain.off <= SAME:
        return Finding(TRIED, seen)
    width = batch.input_ids.shape[1]
    for shift, where in ((1, "one further on"), (-1, "one before")):
        inside = (rows % width + shift >= 0) & (rows % width + shift < width)
        moved = PromptTopK(*(column[inside] for column in found))
        if _distance(moved, logits[rows[inside] + shift]).off < EXPLAINED * plain.off:
            return Finding(
                TRIED,
                f"{seen}. Its answers are those of the position {where}: misaligned by one",
                "use a server whose prompt_logprobs[t] is of token t given those before it",
            )
    temperature = _temperature(found, logits[rows])
    heated = _distance(found, logits[rows] / temperature)
    if heated.off < EXPLAINED * plain.off:
        return Finding(
            TRIED,
            f"{seen}. It is the same model at temperature {temperature:.3g}, not 1",
            "have the server give log-probabilities before its sampling (vLLM: --logprobs-mode "
            "raw_logprobs)",
        )
    if plain.off <= NEAR and plain.same_first > ALIKE:
        return Finding(
            TRIED,
            f"{seen}. That is near, and not the same: lower precision (quantised), or weights that "
            "were trained a little further",
            "serve the weights of TEACHER_MODEL in its own dtype; or, if a quantised teacher is "
            "meant, go on: the student learns from what the server says",
        )
    return Finding(
        TRIED,
        f"{seen}. That is another model than TEACHER_MODEL",
        "serve TEACHER_MODEL, or name the model that is served",
    )


def _distance(found: PromptTopK, logits: Tensor) -> _Distance:
    log_p = logits.double().log_softmax(-1)
    weights = found.log_probs.exp()
    apart = (found.log_probs - log_p.gather(-1, found.tokens)).abs()
    off = (weights * apart).sum() / weights.sum().clamp(min=1e-30)
    same = (log_p.argmax(-1) == found.tokens[:, 0]).double().mean()
    return _Distance(float(off), float(same))


def _temperature(found: PromptTopK, logits: Tensor) -> float:
    """At which softmax(logits / T) has the server's differences between tokens: least squares."""
    here = logits.double().gather(-1, found.tokens)
    weights = found.log_probs.exp()
    x, y = (v - v[:, :1] for v in (here, found.log_probs.clamp(min=-1e3)))
    slope = float((weights * x * y).sum() / (weights * x * x).sum().clamp(min=1e-30))
    return 1 / slope if slope > 1e-3 else 1e3


def _other_tokenizer(served: ServedTeacher, batch: Batch, local: CausalLM) -> Finding | None:
    """A fault where the server writes other text for the same ids."""
    length = int((batch.documents[0] > 0).sum())
    said = served.server.texts(batch.input_ids[0, :length].tolist(), served.k)
    here = {i: local.tokenizer.decode([i]) for i in said}
    # One token alone may lose its space, or be part of a character.
    whole = [i for i in said if "�" not in said[i] + here[i]]
    other = [i for i in whole if said[i].strip(" ▁Ġ") != here[i].strip(" ▁Ġ")]
    if 2 * len(other) <= len(whole):
        return None
    i = other[0]
    return Finding(
        TRIED,
        f"it has another tokenizer: token {i} is {short(said[i])!r} there and {here[i]!r} "
        f"here, and so with {len(other)} of {len(whole)} tokens",
        "name the model that is served as TEACHER_MODEL",
    )
