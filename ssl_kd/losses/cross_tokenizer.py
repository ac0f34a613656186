"""Distillation between models whose tokenizers differ, on text aligned beforehand.

A row of logits is a position that predicts a token that counts; a group is a stretch of text that
both tokenizers cut at the same characters (`ssl_kd.datasets.aligned` finds them). Every loss
returns one value per group, `[group]`, float32 (float64 for float64). Gradients flow to the student
only, and a NaN stays in its group, for the guard to find.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ssl_kd.divergences import divergence_named
from ssl_kd.guard.finite import compute_dtype
from ssl_kd.losses.mutual_information import check_temperature
from ssl_kd.losses.rows import lifted, row_divergences, saturated


class Positions(NamedTuple):
    """The positions of one side that predict a token that counts, in order of the groups.

    Attributes:
        rows: `[n]` int64 into the flattened `[batch * token]` hidden states or logits; the token
            predicted is the one after it.
        targets: `[n]` int64, that token.
        groups: `[n]` int64 in `[0, G)`, the group it belongs to; ascending.
        first: `[G]` int64 into `rows`, the position that predicts the group's first token.
    """

    rows: Tensor
    targets: Tensor
    groups: Tensor
    first: Tensor


class VocabularyMap(NamedTuple):
    """The class in the common vocabulary of each token of one side.

    Attributes:
        classes: `[tokens]` int64; `size` for a token that belongs to none.
        size: number of classes.
    """

    classes: Tensor
    size: int


def _check_rows(student: Tensor, teacher: Tensor, kind: str) -> None:
    if len(student) != len(teacher):
        raise ValueError(
            f"{len(student)} {kind} of the student and {len(teacher)} of the teacher: "
            "both sides must come from the same alignment"
        )


def uld(student_logits: Tensor, teacher_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    r"""Universal logit distillation: L1 distance of the sorted next-token probabilities.

    $\sum_i |q_{(i)} - p_{(i)}|$, with student $q$ and teacher $p$ in descending order and the
    smaller vocabulary padded with zeros, in [0, 2]. The vocabularies need not correspond.

    Args:
        student_logits: `[group, vocabulary]`, at the positions that predict a group's first token.
        teacher_logits: `[group, vocabulary']` at the same character boundaries.
        temperature: divides the logits of both sides.

    References:
        Boizard et al., Towards Cross-Tokenizer Distillation: the Universal Logit Distillation Loss
        for LLMs, 2024, equation 5 (there by token index, here at common character boundaries).

    >>> uld(torch.zeros(1, 2), torch.zeros(1, 4))  # |1/2 - 1/4| twice, |0 - 1/4| twice
    tensor([1.])
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
    """Return `log sum_{v in class} softmax(logits)_v`, renormalised over the classes.

    Of logits `[row, vocabulary]`, entries beyond the map (padding of the output layer) are ignored.
    The result is `[row, class]`, -inf for a class without a token.
    """
    known = min(logits.shape[-1], len(vocabulary.classes))
    logits = saturated(logits[:, :known])
    index = vocabulary.classes[:known].expand(len(logits), -1)
    # Each class minus its own maximum: one that is 200 nats below the best keeps its gradient.
    largest = logits.new_full((len(logits), vocabulary.size + 1), -torch.inf)
    largest = largest.scatter_reduce(1, index, logits.detach(), "amax")
    shifted = (logits - largest.gather(1, index)).exp()
    mass = torch.zeros_like(largest).scatter_add(1, index, shifted)
    return torch.log_softmax((mass.log() + largest)[:, : vocabulary.size], dim=-1)


def chunk_log_likelihood(logits: Tensor, targets: Tensor, groups: Tensor, size: int) -> Tensor:
    r"""Return the log-probability $\sum_t \log p(x_t \mid x_{<t})$ `[size]` of each group's tokens.

    Each row of logits `[row, vocabulary]` predicts its target `[row]`, which belongs to its group
    `[row]`, below `size`. A group without a row has 0.
    """
    token = torch.log_softmax(saturated(logits), -1).gather(1, targets.unsqueeze(1)).squeeze(1)
    return token.new_zeros(size).index_add(0, groups, token)


def likelihood_matching(
    student_log_likelihood: Tensor, teacher_log_likelihood: Tensor, *, temperature: float = 100.0
) -> Tensor:
    r"""Approximate likelihood matching: distance of the probabilities that both give to a chunk.

    With $a = p(c)^{1/\tau}$ of the teacher and $b = q(c)^{1/\tau}$ of the student, the binary
    divergence "this chunk or another" is
    $\tau \, [a \log \frac{a}{b} + (1 - a) \log \frac{1 - a}{1 - b}]$.

    It is zero only where both agree (plain likelihood would also raise a chunk that the teacher
    finds unlikely), and a large temperature keeps a and b off 0, where the gradient of an
    improbable chunk would vanish. The factor tau keeps the size of the loss: for large tau it tends
    to $u \log(u / v) + v - u$ with the surprisals $u = -\log p(c)$ and $v = -\log q(c)$, in nats,
    which needs no normalisation by length.

    Both log-likelihoods are `[group]`, of `chunk_log_likelihood`; the temperature is tau.

    References:
        Minixhofer et al., Universal Cross-Tokenizer Distillation via Approximate Likelihood
        Matching, 2025, section 3 (there without the factor tau, at tau = 100 in their code).

    >>> likelihood_matching(torch.tensor([-1.0]), torch.tensor([-2.0]), temperature=1e4)
    tensor([0.3863])
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
    """Compute a divergence where one token matches one of the same text, likelihoods elsewhere.

    A matched group gets T^2 times the divergence of the two next-token distributions over the
    common vocabulary (`class_log_probabilities`); any other group `likelihood_matching` of its two
    chunk likelihoods. Both are in nats a group. With one tokenizer on both sides every group is
    matched and this is `token_kd`.

    Args:
        student_logits: `[n, vocabulary]`, of `student.rows`.
        teacher_logits: `[n', vocabulary']`, of `teacher.rows`.
        student: the student's positions.
        teacher: the teacher's positions, of the same G groups.
        matched: `[G]` bool.
        student_vocabulary: from the student's tokens to the common classes.
        teacher_vocabulary: from the teacher's tokens to the same classes.
        temperature: of the divergence.
        likelihood_temperature: of the likelihood matching.
        divergence: see `token_kd`.
    """
    check_temperature("temperature", temperature)
    kind = divergence_named(divergence)
    _check_rows(student.first, teacher.first, "groups")
    if student_vocabulary.size != teacher_vocabulary.size:
        raise ValueError(
            f"{student_vocabulary.size} classes of the student and {teacher_vocabulary.size} of "
            "the teacher: both maps must come from the same common vocabulary"
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


def hidden_matching(projected_student: Tensor, teacher_hidden: Tensor) -> Tensor:
    r"""Compute the mean squared distance of hidden states before the same character of the text.

    $\frac{1}{H} \| W h_i - g_i / \mathrm{rms}(g_i) \|^2$ for boundary i of the text, H wide. Only
    the student is projected: a projection of the teacher could map both sides to the same point. At
    unit root mean square the value begins near 1, whatever the size of the teacher's states. Only
    common boundaries are compared: between them one side has read text that the other has not.

    Args:
        projected_student: `[group, H]`, the student's hidden states through the projection.
        teacher_hidden: `[group, H]`, the teacher's at the same boundaries.

    References:
        Romero et al., FitNets: Hints for Thin Deep Nets, 2015, equation 3, a linear map in place of
        the regressor.

    >>> hidden_matching(torch.tensor([[1.0, 0.0]]), torch.tensor([[30.0, -30.0]]))
    tensor([0.5000])
    """
    _check_rows(projected_student, teacher_hidden, "aligned positions")
    if projected_student.shape[-1] != teacher_hidden.shape[-1]:
        raise ValueError(
            f"hidden size {projected_student.shape[-1]} of the projected student and "
            f"{teacher_hidden.shape[-1]} of the teacher: the projection must map to the teacher's "
            "size"
        )
    dtype = compute_dtype(projected_student)
    tiny = torch.finfo(dtype).tiny
    target = teacher_hidden.detach().to(dtype)
    # By the largest first: the squares of bfloat16's largest states overflow.
    target = target / target.abs().amax(-1, keepdim=True).clamp(min=tiny)
    target = target * target.square().mean(-1, keepdim=True).clamp(min=tiny).rsqrt()
    return (projected_student.to(dtype) - target).square().mean(-1)
