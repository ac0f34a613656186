"""Does a server answer as the teacher that it stands for? Compared with that teacher here."""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_kd.datasets.blocks import Batch, make_blocks
from ssl_kd.doctor.finding import Finding
from ssl_kd.language.served import ServedTeacher
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.text_rows import texts_of
from ssl_kd.losses.token_distillation import next_token_targets
from ssl_kd.teachers.causal import CausalLM, load_causal_lm, positions
from ssl_kd.teachers.server import PromptTopK, ServerFailed

ROWS = 8  # of the text
# Of log-probabilities, in nats, weighted by probability. bf16 beside float32 is about 0.01.
SAME = 0.05
TRIED = "the served teacher"


def compare_served(settings: LanguageSettings) -> list[Finding]:
    """Ask the server about a few rows of the text, and the teacher of TEACHER_MODEL itself.

    The server agrees where its log-probabilities are within 0.05 nats of the teacher's, in a mean
    weighted by their probabilities.

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
        served = ServedTeacher.of(settings, size, local.tokenizer, torch.device("cpu"))
        answers = served.top_k_at(batch, rows)
    except ServerFailed as error:
        return [Finding(TRIED, str(error), "see how the server was started")]
    off, same_first = _distance(answers, _logits(local, batch)[rows])
    n, k = answers.tokens.shape
    seen = (
        f"{n} positions, {k} tokens at each: off by {off:.3g} nats on average (allowed {SAME:g}), "
        f"the likeliest token is the same at {same_first:.0%}"
    )
    change = (
        "serve TEACHER_MODEL in its own dtype, with its own tokenizer, and with log-probabilities "
        "before sampling (vLLM: --logprobs-mode raw_logprobs), prompt_logprobs[t] being of token t "
        "given those before it; or go on, if the teacher that is served is the one you mean"
    )
    return [Finding(TRIED, seen, "" if off <= SAME else change)]


@torch.no_grad()
def _logits(local: CausalLM, batch: Batch) -> Tensor:
    """Return the logits of every position, `[batch * token, vocab]`, float32."""
    return local.model(**batch.model_inputs(), use_cache=False).logits.float().flatten(0, 1)


def _distance(answers: PromptTopK, logits: Tensor) -> tuple[float, float]:
    """Compare a server's answers with logits `[n, vocab]` of the same positions.

    Returns:
        The mean difference of log-probabilities in nats, weighted by probability, and the share
        of the positions at which both have the same likeliest token.
    """
    log_p = logits.double().log_softmax(-1)
    weights = answers.log_probs.exp()
    apart = (answers.log_probs - log_p.gather(-1, answers.tokens)).abs()
    off = (weights * apart).sum() / weights.sum().clamp(min=1e-30)
    same = (log_p.argmax(-1) == answers.tokens[:, 0]).double().mean()
    return float(off), float(same)
