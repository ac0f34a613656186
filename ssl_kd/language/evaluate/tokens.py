"""Score a language model's predictions of held-out tokens, alone and against its teacher."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from firstnan.finite import compute_dtype
from ssl_kd.core.calibration import Reliability
from ssl_kd.language.losses.rows import outside_of

logger = logging.getLogger(__name__)


class TokenValues(NamedTuple):
    """Numbers per target token that replace its logits; all are `[n]`, of the same float dtype.

    Those of the comparison with a teacher are None without a teacher.
    """

    nll: Tensor  # negative log-likelihood of the target, in nats
    confidence: Tensor  # probability of the likeliest token
    correct: Tensor  # 1 where the likeliest token is the target, else 0
    kl: Tensor | None = None  # `KL(teacher || student)` in nats
    agrees: Tensor | None = None  # 1 where both have the same likeliest token, else 0
    acceptance: Tensor | None = None  # probability that the teacher accepts a drafted token


@torch.no_grad()
def token_values(
    logits: Tensor, targets: Tensor, teacher_logits: Tensor | None = None
) -> TokenValues:
    """Reduce the logits of n tokens to a few numbers per token, at temperature 1.

    `nll = -log q_target`, `kl = sum_v p_v (log p_v - log q_v)` and, for speculative sampling,
    `acceptance = sum_v min(p_v, q_v)`, with q of the student's logits `[n, V]` and p of the
    teacher's `[n, V']`. The comparisons use the common vocabulary: the first `min(V, V')` entries,
    without entries that are -inf at all n tokens of the student or of the teacher. Both
    distributions are renormalized over it. `kl` is inf at a token where only the student's logit of
    an entry is -inf.

    References:
        Leviathan et al., Fast inference from transformers via speculative decoding, ICML 2023,
        theorem 3.5 and corollary 3.6.
    """
    log_q = logits.to(compute_dtype(logits)).log_softmax(-1)
    top, choice = log_q.max(-1)
    nll = -log_q.gather(-1, targets[:, None])[:, 0]
    correct = (choice == targets).to(nll.dtype)
    if teacher_logits is None:
        return TokenValues(nll, top.exp(), correct)
    common = min(logits.shape[-1], teacher_logits.shape[-1])
    log_q, log_p = log_q[:, :common], teacher_logits[:, :common].to(log_q.dtype)
    if (outside := outside_of([(log_q, False), (log_p, True)])) is not None:
        log_q, log_p = log_q.clone(), log_p.clone()
        outside.fill_(log_q, -torch.inf)
        outside.fill_(log_p, -torch.inf)
    log_q, log_p = log_q.log_softmax(-1), log_p.log_softmax(-1)
    agrees = (log_q.argmax(-1) == log_p.argmax(-1)).to(nll.dtype)
    p, q = log_p.exp(), log_q.exp()
    # 0 log 0 = 0: what the teacher excludes does not count.
    kl = torch.where(p == 0, 0, p * (log_p - log_q)).sum(-1)
    return TokenValues(nll, top.exp(), correct, kl, agrees, torch.minimum(p, q).sum(-1))


def mean_comparison(
    values: Sequence[TokenValues], weights: Sequence[float] | None = None
) -> TokenValues:
    """Average the comparisons of one model with several teachers; None weighs them equally."""
    weights = weights or [1.0] * len(values)
    means = {
        name: sum(w * getattr(v, name) for w, v in zip(weights, values, strict=True)) / sum(weights)
        for name in ("kl", "agrees", "acceptance")
    }
    return values[0]._replace(**means)


class TokenScores:
    """Accumulate means over all target tokens of a text in float64, batch by batch.

    A batch with a non-finite number is excluded, so that a single NaN does not make the means NaN.
    If only the comparison with the teacher is not finite, only that comparison is excluded.
    """

    def __init__(self) -> None:
        self.tokens = 0  # target tokens in the means
        self.left_out: list[str] = []  # a sentence for each batch with a non-finite number
        self._bytes = 0
        self._sums: dict[str, float] = {}
        self._counted: dict[str, int] = {}
        self._reliability = Reliability()

    def add(
        self, chunks: Sequence[TokenValues], rows: Sequence[int], n_bytes: int | None = None
    ) -> None:
        """Add the values of one batch's target tokens; `rows` identifies the batch in `left_out`.

        `n_bytes` is the number of UTF-8 bytes of the target tokens' text, None if not known.
        """
        columns = {
            name: torch.cat(parts).cpu().double()
            for name in TokenValues._fields
            if (parts := [p for chunk in chunks if (p := getattr(chunk, name)) is not None])
        }
        if not columns or not (n := len(columns["nll"])):
            return
        bad = {name: int((~values.isfinite()).sum()) for name, values in columns.items()}
        if any(bad.values()):
            counts = ", ".join(f"{name} in {count}" for name, count in bad.items() if count)
            gapless = rows[-1] - rows[0] == len(rows) - 1 > 0
            blocks = f"{rows[0]} to {rows[-1]}" if gapless else ", ".join(map(str, rows))
            self.left_out.append(f"blocks {blocks}: not finite: {counts} of {n} tokens")
            logger.warning("A batch is excluded from evaluation means: %s", self.left_out[-1])
            if any(bad[name] for name in ("nll", "confidence", "correct")):
                return
            columns = {name: columns[name] for name in ("nll", "confidence", "correct")}
        self.tokens += n
        self._bytes += n_bytes or 0
        for name, values in columns.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(values.sum())
            self._counted[name] = self._counted.get(name, 0) + n
        self._reliability.add(columns["confidence"].numpy(), columns["correct"].numpy())

    @property
    def nll(self) -> float | None:
        """Mean negative log-likelihood of a token in nats; None without tokens."""
        return self._mean("nll")

    @property
    def perplexity(self) -> float | None:
        """`exp(nll)`; None without tokens, or beyond 1e304 (`nll` above 700)."""
        return math.exp(self.nll) if self.nll is not None and self.nll <= 700 else None

    @property
    def bits_per_byte(self) -> float | None:
        """`sum nll / bytes / ln 2`, with the bytes of the text in UTF-8; None without bytes.

        The number of bytes does not depend on the tokenizer, so models with different tokenizers
        can be compared.
        """
        return self._sums["nll"] / self._bytes / math.log(2) if self._bytes else None

    @property
    def agreement(self) -> float | None:
        """Share of tokens where student and teacher prefer the same token; None without teacher."""
        return self._mean("agrees")

    @property
    def kl(self) -> float | None:
        """Mean `KL(teacher || student)` of a token in nats; None without a teacher."""
        return self._mean("kl")

    @property
    def acceptance(self) -> float | None:
        """Mean probability that the teacher accepts a drafted token; None without a teacher."""
        return self._mean("acceptance")

    @property
    def ece(self) -> float | None:
        """Expected calibration error of the likeliest token, in [0, 1]; None without tokens."""
        return self._reliability.ece

    def table_row(self, name: str) -> dict[str, str | float | int | None]:
        """Return a row of the report's table: `name`, and each score as a finite number or None."""
        columns = ("perplexity", "nll", "bits_per_byte", "agreement", "kl", "acceptance")
        scores = {column: getattr(self, column) for column in (*columns, "ece")}
        return {"name": name, **scores, "left_out": len(self.left_out)}

    def _mean(self, name: str) -> float | None:
        return self._sums[name] / self._counted[name] if name in self._sums else None
