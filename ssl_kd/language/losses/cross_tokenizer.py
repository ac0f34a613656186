"""Losses for a teacher and a student with different tokenizers, on aligned text.

Each row of logits predicts one target token. A group is a stretch of text that begins and ends at
token boundaries of both tokenizers (`ssl_kd.language.text.aligned` finds the groups). The losses
return one value per group, `[group]`, float32 (float64 for float64 logits). Gradients flow to the
student only. A NaN affects the value of its own group only, so that the guard can locate it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import repeat
from torch import Tensor

from firstnan.finite import compute_dtype
from ssl_kd.core.logits import check_temperature, saturated
from ssl_kd.language.losses.divergences import divergence_named
from ssl_kd.language.losses.rows import lifted, row_divergences


class Positions(NamedTuple):
    """Positions of one model that predict target tokens, ordered by group."""

    rows: Tensor  # `[n]` int64, indices into the flattened `[batch * token]` logits
    targets: Tensor  # `[n]` int64, the next token at each of these positions
    groups: Tensor  # `[n]` int64 in `[0, G)`, ascending: the group of each target token
    first: Tensor  # `[G]` int64, indices into `rows` of each group's first token


class VocabularyMap(NamedTuple):
    """A map from the tokens of one model to the classes of a common vocabulary."""

    classes: Tensor  # `[token]` int64; `size` for a token without a class
    size: int  # number of classes


def _check_rows(student: Tensor, teacher: Tensor, kind: str) -> None:
    if len(student) != len(teacher):
        raise ValueError(
            f"there are {len(student)} {kind} of the student and {len(teacher)} of the teacher; "
            "expected equal numbers: take student and teacher from the same alignment"
        )


def uld(student_logits: Tensor, teacher_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    r"""Compute universal logit distillation: the L1 distance of sorted next-token probabilities.

    The loss `[group]` is $\sum_i |q_{(i)} - p_{(i)}|$, in [0, 2], with the probabilities of student
    $q$ and teacher $p$ in descending order and the smaller vocabulary padded with zeros. It needs
    no correspondence between the vocabularies. Row g of both logits `[group, vocabulary]` predicts
    at the same character boundary of the text.

    References:
        Boizard et al., Towards Cross-Tokenizer Distillation: the Universal Logit Distillation Loss
        for LLMs, 2024, equation 5 (there by token index, here at common character boundaries).
    """
    check_temperature("temperature", temperature)
    _check_rows(student_logits, teacher_logits, "aligned positions")
    student, teacher = (
        torch.softmax(saturated(logits) / temperature, -1).sort(-1, descending=True).values
        for logits in (student_logits, teacher_logits.detach())
    )
    missing = student.shape[-1] - teacher.shape[-1]
    student = torch.nn.functional.pad(student, (0, max(-missing, 0)))
    teacher = torch.nn.functional.pad(teacher, (0, max(missing, 0)))
    return (student - teacher.to(student.dtype)).abs().sum(-1)


def class_log_probabilities(logits: Tensor, vocabulary: VocabularyMap) -> Tensor:
    """Return the log-probability `log sum_{v in class} softmax(logits)_v` of each class.

    It is `[row, class]`, -inf for an empty class. Logits beyond the map (padding of the output
    layer) are ignored.
    """
    known = min(logits.shape[-1], len(vocabulary.classes))
    logits = saturated(logits[:, :known])
    index = repeat(vocabulary.classes[:known], "vocab -> row vocab", row=len(logits))
    # Each class minus its own maximum: one that is 200 nats below the best keeps its gradient.
    largest = logits.new_full((len(logits), vocabulary.size + 1), -torch.inf)
    largest = largest.scatter_reduce(1, index, logits.detach(), "amax")
    shifted = (logits - largest.gather(1, index)).exp()
    mass = torch.zeros_like(largest).scatter_add(1, index, shifted)
    return torch.log_softmax((mass.log() + largest)[:, : vocabulary.size], dim=-1)


def chunk_log_likelihood(logits: Tensor, targets: Tensor, groups: Tensor, size: int) -> Tensor:
    r"""Return each group's log-likelihood $\sum_t \log p(x_t \mid x_{<t})$ `[size]`."""
    token = torch.log_softmax(saturated(logits), -1).gather(1, targets.unsqueeze(1)).squeeze(1)
    return token.new_zeros(size).index_add(0, groups, token)


def likelihood_matching(
    student_log_likelihood: Tensor, teacher_log_likelihood: Tensor, *, temperature: float = 100.0
) -> Tensor:
    r"""Compute approximate likelihood matching: compare the probabilities of a chunk of text.

    With $a = p(c)^{1/\tau}$ for the teacher and $b = q(c)^{1/\tau}$ for the student, the loss
    `[group]` is the binary divergence of "this chunk or another one",
    $\tau \, [a \log \frac{a}{b} + (1 - a) \log \frac{1 - a}{1 - b}]$.

    It is zero only if both probabilities are equal; maximum likelihood would also raise the
    probability of a chunk that is unlikely for the teacher. At a large temperature tau, a and b are
    far from 0, where the gradient would vanish. Because of the factor tau, the loss has a limit for
    large tau, $u \log(u / v) + v - u$ with the surprisals $u = -\log p(c)$ and $v = -\log q(c)$, in
    nats, which needs no normalization by length.

    References:
        Minixhofer et al., Universal Cross-Tokenizer Distillation via Approximate Likelihood
        Matching, 2025, section 3 (there without the factor tau, at tau = 100 in their code).
    """
    check_temperature("temperature", temperature)
    _check_rows(student_log_likelihood, teacher_log_likelihood, "groups")
    dtype = compute_dtype(student_log_likelihood)
    eps = torch.finfo(dtype).eps  # keeps the gradient at surprisal 0 finite
    v = (eps - student_log_likelihood.to(dtype)) / temperature
    u = (eps - teacher_log_likelihood.detach().to(dtype)) / temperature
    other_u, other_v = -torch.expm1(-u), -torch.expm1(-v)
    values = (-u).exp() * (v - u) + other_u * (other_u.log() - other_v.log())
    return lifted(temperature * values)


def chunk_matching(
    student_logits: Tensor,
    teacher_logits: Tensor,
    student: Positions,
    teacher: Positions,
    matched: Tensor,
    student_vocabulary: VocabularyMap,
    teacher_vocabulary: VocabularyMap,
    *,
    temperature: float = 2.0,
    likelihood_temperature: float = 100.0,
    divergence: str = "forward_kl",
) -> Tensor:
    """Compute a divergence for one-token groups and likelihood matching for other groups.

    The loss of a `matched` group (one token of each model) is T^2 times the divergence of the
    next-token distributions over the common vocabulary. The loss of any other group is
    `likelihood_matching`. All values `[group]` are in nats. If student and teacher have the same
    tokenizer, all groups are matched and the loss equals `token_kd`.
    """
    check_temperature("temperature", temperature)
    kind = divergence_named(divergence)
    _check_rows(student.first, teacher.first, "groups")
    if student_vocabulary.size != teacher_vocabulary.size:
        raise ValueError(
            f"student_vocabulary has {student_vocabulary.size} classes and teacher_vocabulary "
            f"{teacher_vocabulary.size}; expected equal numbers: build both for the same classes"
        )
    n_groups = len(matched)
    teacher_logits = teacher_logits.detach()
    alike, others = matched.nonzero().squeeze(1), (~matched).nonzero().squeeze(1)
    divergences = row_divergences(
        class_log_probabilities(student_logits[student.first[alike]], student_vocabulary),
        class_log_probabilities(teacher_logits[teacher.first[alike]], teacher_vocabulary),
        temperature,
        kind,
    )
    number = torch.full((n_groups,), -1, device=others.device)
    number[others] = torch.arange(len(others), device=others.device)
    likelihoods = []
    for logits, side in ((student_logits, student), (teacher_logits, teacher)):
        group = number[side.groups]
        rows = (group >= 0).nonzero().squeeze(1)
        likelihoods.append(
            chunk_log_likelihood(logits[rows], side.targets[rows], group[rows], len(others))
        )
    rest = likelihood_matching(*likelihoods, temperature=likelihood_temperature)
    values = rest.new_zeros(n_groups).index_copy(0, alike, divergences)
    return values.index_copy(0, others, rest)
