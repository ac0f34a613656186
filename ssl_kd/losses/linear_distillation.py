"""Cross-entropy and distillation from hidden states and output weights, a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssl_kd.divergences import DIVERGENCES, Divergence, divergence_named
from ssl_kd.guard.finite import compute_dtype
from ssl_kd.losses.mutual_information import check_temperature
from ssl_kd.losses.rows import log_softmax_, saturate_

if TYPE_CHECKING:
    from ssl_kd.losses.token_distillation import LegacyClamp

CHUNK_BYTES = 64 << 20  # of logits in float32: fewer, larger products than at 16 MiB
ROW_BYTES = 1 << 20  # of logits that the arithmetic takes at once on a CPU: stays in its cache
VOCABULARY_BLOCK = 8192  # rows of the output weights that a half-precision gradient takes at once


@dataclass(frozen=True)
class LinearTeacher:
    """A teacher by its last hidden states and output weights; logits exist a chunk at a time.

    Args:
        hidden: `[n, teacher_dim]`.
        weight: `[vocab, teacher_dim]`; the vocabulary may be padded differently from the student's.
        bias: `[vocab]` or None; an entry of -inf is outside the vocabulary.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class LogitsTeacher:
    """A teacher by its logits `[n, vocab]`; an entry that is -inf in every row is outside."""

    logits: Tensor


@dataclass(frozen=True)
class TopKTeacher:
    """A teacher by its k likeliest tokens; all others are one more outcome, on both sides.

    Args:
        indices: `[n, k]`, integer.
        log_probs: `[n, k]`, of `softmax(logits / temperature)`.
        log_tail: `[n]`, the log of the mass of all others; may be -inf.
    """

    indices: Tensor
    log_probs: Tensor
    log_tail: Tensor


@dataclass(frozen=True)
class SampledTeacher:
    """A teacher by importance-sampled tokens: an unbiased estimate of some divergences.

    Of those that have `from_samples` in `ssl_kd.divergences`: `forward_kl`.

    Args:
        indices: `[n, k]`, integer; a token may come up more than once.
        weights: `[n, k]`, of each draw, so that the expected weight of a token is its probability.
        entropy: `[n]`, of `softmax(logits / temperature)`, in nats.
    """

    indices: Tensor
    weights: Tensor
    entropy: Tensor


Teacher: TypeAlias = LinearTeacher | LogitsTeacher | TopKTeacher | SampledTeacher


@dataclass(frozen=True)
class _Objective:
    targets: Tensor | None
    teachers: Sequence[Teacher]
    temperature: float
    divergence: Divergence
    clamp: LegacyClamp | None
    common: int  # the vocabulary that student and teachers share: the first entries
    outside: Tensor | None  # entries among these that one of them leaves out
    chunk: int
    autocast: torch.dtype | None  # the dtype that products are in, instead of the inputs'


def _gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of d loss / d logits in the products: float16 would lose what is below 6e-8."""
    return torch.float32 if dtype == torch.float16 else dtype


class _LinearHead:
    """Logits from hidden states, and the gradients of hidden states, weight and bias."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        objective: _Objective,
        needs: tuple[bool, ...] = (False, False, False),
    ) -> None:
        dtype = weight.dtype
        if objective.autocast is not None and dtype != torch.float64:
            dtype = objective.autocast
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.shape = (len(hidden), len(weight))
        self.exact, self.device = compute_dtype(hidden), hidden.device
        size = (objective.chunk, len(weight))
        self._logits = hidden.new_empty(size, dtype=dtype)
        same = _gradient_dtype(dtype) == dtype
        self._gradient = self._logits
        if any(needs) and not same:
            self._gradient = hidden.new_empty(size, dtype=_gradient_dtype(dtype))
        self.gradients: list[Tensor | None] = [
            x.new_zeros(x.shape, dtype=self.exact) if x is not None and needed else None
            for x, needed in zip((hidden, weight, bias), needs, strict=True)
        ]

    def logits(self, start: int, stop: int) -> Tensor:
        """`[chunk, vocab]`, in a buffer that the next call overwrites."""
        out = self._logits[: stop - start]
        if self.bias is None:
            return torch.mm(self.hidden[start:stop], self.weight.T, out=out)
        return torch.addmm(self.bias, self.hidden[start:stop], self.weight.T, out=out)

    def gradient(self, start: int, stop: int) -> Tensor:
        """Where the gradient of these rows' logits goes; may be the logits' own buffer."""
        return self._gradient[: stop - start]

    def accumulate(self, start: int, stop: int) -> None:
        """Add what `gradient(start, stop)` now holds to the gradients of the inputs."""
        rows, hidden = self._gradient[: stop - start], self.hidden[start:stop]
        of_hidden, of_weight, of_bias = self.gradients
        if of_bias is not None:
            of_bias += rows.sum(0, dtype=of_bias.dtype)
        exact = rows.dtype == self.weight.dtype != torch.bfloat16
        step = len(self.weight) if exact else VOCABULARY_BLOCK
        for first in range(0, len(self.weight), step):
            part = rows[:, first : first + step]
            if of_hidden is not None:
                weight = self.weight[first : first + step].to(rows.dtype)
                _add_product(of_hidden[start:stop], part, weight)
            if of_weight is not None:
                _add_product(of_weight[first : first + step], part.T, hidden.to(rows.dtype))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


class _GivenLogits:
    """Logits that are there already, and their gradient."""

    def __init__(self, logits: Tensor, needed: bool) -> None:
        self._logits = logits
        self.shape = (logits.shape[0], logits.shape[1])
        self.exact, self.device = compute_dtype(logits), logits.device
        dtype = _gradient_dtype(logits.dtype)
        self.gradients: list[Tensor | None] = [
            logits.new_zeros(logits.shape, dtype=dtype) if needed else None,
            None,
            None,
        ]

    def logits(self, start: int, stop: int) -> Tensor:
        return self._logits[start:stop]

    def gradient(self, start: int, stop: int) -> Tensor:
        return self.gradients[0][start:stop]  # pyright: ignore[reportOptionalSubscript]

    def accumulate(self, start: int, stop: int) -> None:
        pass


def _rows(teacher: Teacher, start: int, stop: int) -> Teacher:
    return type(teacher)(*(x[start:stop] for x in vars(teacher).values()))


def _top_k(
    teacher: TopKTeacher,
    log_q: Tensor,
    q: Tensor,
    divergence: Divergence,
    gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """The divergence over k + 1 outcomes; the tail's gradient is shared out as q has it."""
    indices = teacher.indices.long()
    tail = q.scatter(-1, indices, 0)
    tail_mass = tail.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)
    coarse_q = torch.cat([log_q.gather(-1, indices), tail_mass.log()], -1)
    coarse_p = torch.cat([teacher.log_probs, teacher.log_tail.unsqueeze(-1)], -1)
    coarse_p = saturate_(coarse_p.to(q.dtype, copy=True))
    value, slope = divergence.compute(coarse_p, coarse_p.exp(), coarse_q, coarse_q.exp(), gradient)
    if slope is None:
        return value, None
    return value, tail.mul_(slope[:, -1:] / tail_mass).scatter_(-1, indices, slope[:, :-1])


def _terms_(
    logits: Tensor,
    targets: Tensor | None,
    teachers: Sequence[Teacher],
    objective: _Objective,
    weights: tuple[float, float],
    gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and T^2 * divergence of each row, and their weighted gradient.

    Args:
        logits: `[r, vocab]`, in the dtype of the arithmetic; overwritten.
        targets: `[r]` or None.
        teachers: these rows of each teacher.
        objective: what to compute.
        weights: of the two gradients; that of a term with weight 0 is not looked at.
        gradient: `[r, vocab]`, gets the gradient; None for values alone.
    """
    clamp, inside = objective.clamp, None
    saturate_(logits)
    if clamp is not None:
        inside = logits.abs() <= clamp.logits
        logits.clamp_(-clamp.logits, clamp.logits)
    zero = logits.new_zeros(len(logits))
    ce = kd = zero
    written = False
    if targets is not None:
        column = targets.unsqueeze(-1)
        log_q, q = log_softmax_(logits, 1.0)  # shifts the logits, which changes no softmax
        ce = -log_q.gather(-1, column).squeeze(-1)
        ce, scale = _window(ce, clamp, weights[0])
        if gradient is not None and weights[0] != 0:
            q.scatter_add_(-1, column, q.new_full(column.shape, -1))
            torch.mul(q, scale, out=gradient)
            written = True
    if gradient is not None and not written:
        gradient.zero_()
    if teachers:
        t, wanted = objective.temperature, gradient is not None and weights[1] != 0
        log_q, q = log_softmax_(logits[:, : objective.common], t, objective.outside)
        for teacher in teachers:
            value, slope = _divergence_of(teacher, log_q, q, objective, wanted)
            value, scale = _window(value * t**2, clamp, weights[1] * t / len(teachers))
            kd = kd + value / len(teachers)
            if slope is not None and gradient is not None:
                gradient[:, : objective.common].addcmul_(slope, scale)
    if inside is not None and gradient is not None:
        gradient.masked_fill_(inside.logical_not_(), 0)
    return ce, kd


def _window(value: Tensor, clamp: LegacyClamp | None, scale: float) -> tuple[Tensor, Tensor]:
    """The value held in the old loss window, and its gradient's scale `[r, 1]`: 0 where held."""
    held = value
    if clamp is not None and clamp.high is not None:
        held = value.clamp(clamp.low, clamp.high)
    return held, (held == value).to(value.dtype).mul_(scale).unsqueeze(-1)


def _divergence_of(
    teacher: Teacher, log_q: Tensor, q: Tensor, objective: _Objective, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    if isinstance(teacher, TopKTeacher):
        return _top_k(teacher, log_q, q, objective.divergence, gradient)
    if isinstance(teacher, SampledTeacher):
        assert objective.divergence.from_samples is not None  # _check_teacher
        weights, entropy = teacher.weights.to(q.dtype), teacher.entropy.to(q.dtype)
        indices = teacher.indices.long()
        return objective.divergence.from_samples(indices, weights, entropy, log_q, q, gradient)
    assert isinstance(teacher, LogitsTeacher)  # _run has multiplied a LinearTeacher out
    logits = saturate_(teacher.logits[:, : objective.common].to(q.dtype, copy=True))
    if objective.clamp is not None:
        logits.clamp_(-objective.clamp.logits, objective.clamp.logits)
    log_p, p = log_softmax_(logits, objective.temperature, objective.outside)
    return objective.divergence.compute(log_p, p, log_q, q, gradient)


def _head(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    objective: _Objective,
    needs: tuple[bool, ...],
) -> _LinearHead | _GivenLogits:
    if weight is None:
        return _GivenLogits(x, needs[0])
    return _LinearHead(x, weight, bias, objective, needs)


def _run(
    head: _LinearHead | _GivenLogits, objective: _Objective, weights: tuple[float, float]
) -> Tensor:
    """The two sums over all tokens; what they add to the gradients is left in `head`."""
    n, vocab = head.shape
    chunk, targets = objective.chunk, objective.targets
    terms = torch.zeros((2, n), dtype=head.exact, device=head.device)
    if targets is None and not objective.teachers:
        return terms.sum(1)
    rows = chunk
    if head.device.type == "cpu":
        rows = min(chunk, max(1, ROW_BYTES // (vocab * head.exact.itemsize)))
    scratch = torch.empty((rows, vocab), dtype=head.exact, device=head.device)
    slope = torch.empty_like(scratch) if any(x is not None for x in head.gradients) else None
    # In half precision by its own dtype: what fits bfloat16 may be beyond autocast's float16.
    own = replace(objective, autocast=None)
    teachers = [
        _LinearHead(t.hidden, t.weight, t.bias, own if t.weight.itemsize == 2 else objective)
        if isinstance(t, LinearTeacher)
        else t
        for t in objective.teachers
    ]
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        logits = head.logits(start, stop)
        here = [
            LogitsTeacher(t.logits(start, stop))
            if isinstance(t, _LinearHead)
            else _rows(t, start, stop)
            for t in teachers
        ]
        for first in range(0, stop - start, rows):
            last = min(first + rows, stop - start)
            place = slice(start + first, start + last)
            part = None if slope is None else slope[: last - first]
            terms[0, place], terms[1, place] = _terms_(
                scratch[: last - first].copy_(logits[first:last]),
                None if targets is None else targets[place],
                [_rows(t, first, last) for t in here],
                objective,
                weights,
                part,
            )
            if part is not None:
                head.gradient(start, stop)[first:last] = part
        if slope is not None:
            head.accumulate(start, stop)
    return terms.sum(1)


def _factor(incoming: tuple[float, ...], weights: tuple[float, ...]) -> float | None:
    """By how much `incoming` is a multiple of `weights` (within rounding); None where it is not."""
    largest = max(range(len(weights)), key=lambda i: abs(weights[i]))
    if weights[largest] == 0 or incoming[largest] == 0:
        return None
    factor = incoming[largest] / weights[largest]
    fits = all(
        math.isclose(got, factor * weight, rel_tol=1e-6)
        for got, weight in zip(incoming, weights, strict=True)
    )
    return factor if fits else None


class _Distillation(torch.autograd.Function):
    """The two sums; their gradient is computed in the same pass over the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        objective: _Objective,
        weights: tuple[float, float],
        needs: tuple[bool, bool, bool],
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            head = _head(x, weight, bias, objective, needs)
            terms = _run(head, objective, weights)
        ctx.save_for_backward(x, weight, bias)
        ctx.objective, ctx.weights, ctx.needs = objective, weights, needs
        ctx.gradients = head.gradients
        return terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        ce, kd = grad.tolist()
        # A term that is not there has no gradient, whatever comes in for it.
        incoming = (
            ce if ctx.objective.targets is not None else 0.0,
            kd if ctx.objective.teachers else 0.0,
        )
        # Handed over, not kept: a gradient that nobody else holds becomes .grad without a copy.
        gradients, ctx.gradients = ctx.gradients, None
        factor, weights = _factor(incoming, ctx.weights), ctx.weights
        cut = factor is None
        if factor is None:
            # One term left is to the bit what it would have been alone: its own weight, one factor.
            weights = tuple(w if g else 0.0 for w, g in zip(ctx.weights, incoming, strict=True))
            factor = _factor(incoming, weights)
        if factor is None:
            factor, weights = 1.0, incoming
        if gradients is None or cut:  # a second backward, or a term was cut out
            objective = replace(
                ctx.objective,
                targets=ctx.objective.targets if weights[0] != 0 else None,
                teachers=ctx.objective.teachers if weights[1] != 0 else (),
            )
            gradients = None  # frees the memory for the new ones
            head = _head(x, weight, bias, objective, ctx.needs)
            with torch.autocast(x.device.type, enabled=False):
                _run(head, objective, (weights[0], weights[1]))
            gradients = head.gradients
        scaled = (
            None if g is None else (g if factor == 1 else g.mul_(factor)).to(like.dtype)
            for g, like in zip(gradients, (x, weight, bias), strict=True)
        )
        return *scaled, None, None, None


def _outside(x: Tensor | None, common: int) -> Tensor | None:
    """`[common]` bool, entries that are -inf in every row; None where there are no rows."""
    if x is None or not x.numel():
        return None
    return x.reshape(-1, x.shape[-1])[:, :common].amax(0) == -torch.inf


def _distil(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    targets: Tensor | None,
    teachers: Sequence[Teacher],
    temperature: float,
    divergence: str,
    weights: tuple[float, float],
    clamp: LegacyClamp | None,
    chunk_tokens: int | None,
) -> Tensor:
    n, vocab = len(x), x.shape[-1] if weight is None else len(weight)
    kind = divergence_named(divergence)
    check_temperature("temperature", temperature)
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens!r}, expected 1 or more, or None")
    if clamp is not None:
        clamp.check(vocab)
    for teacher in teachers:
        _check_teacher(teacher, n, vocab, divergence, clamp)
    if targets is not None and targets.shape != (n,):
        raise ValueError(f"targets {tuple(targets.shape)} do not fit {n} tokens, expected ({n},)")
    if targets is not None and n and not 0 <= targets.min() <= targets.max() < vocab:
        raise ValueError(
            f"targets go from {targets.min()} to {targets.max()}, expected 0 to {vocab - 1}: "
            "leave out the positions that do not count (next_token_targets)"
        )
    heads = [t.weight for t in teachers if isinstance(t, LinearTeacher)]
    given = [t.logits for t in teachers if isinstance(t, LogitsTeacher)]
    common = min([vocab, *(len(w) for w in heads), *(z.shape[-1] for z in given)])
    leave_out = [t.bias for t in teachers if isinstance(t, LinearTeacher)] + given
    masks = [_outside(y, common) for y in [x if weight is None else bias, *leave_out]]
    indices = None
    if teachers and any(mask is not None for mask in masks):
        anywhere = torch.stack([mask for mask in masks if mask is not None]).any(0)
        indices = anywhere.nonzero().flatten()
    device = x.device.type
    objective = _Objective(
        targets,
        teachers,
        temperature,
        kind,
        clamp,
        common,
        indices if indices is not None and len(indices) else None,
        min(chunk_tokens or max(1, CHUNK_BYTES // (4 * vocab)), max(1, n)),
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
    )
    weights = (weights[0] if targets is not None else 0.0, weights[1] if teachers else 0.0)
    needs = tuple(
        torch.is_grad_enabled() and y is not None and y.requires_grad for y in (x, weight, bias)
    )
    return _Distillation.apply(x, weight, bias, objective, weights, needs)  # pyright: ignore


def _check_teacher(
    teacher: Teacher, n: int, vocab: int, divergence: str, clamp: LegacyClamp | None
) -> None:
    kind = type(teacher).__name__
    for name, value in vars(teacher).items():
        if name not in ("weight", "bias") and len(value) != n:
            raise ValueError(f"{kind}.{name} has {len(value)} rows, the student {n}")
    estimated = [name for name, entry in DIVERGENCES.items() if entry.from_samples]
    if isinstance(teacher, SampledTeacher) and divergence not in estimated:
        raise ValueError(
            f"sampled tokens estimate {', '.join(estimated)}, not {divergence}: store the top k "
            "for that"
        )
    if isinstance(teacher, (TopKTeacher, SampledTeacher)):
        if clamp is not None:
            raise ValueError(
                f"legacy_clamp needs the teacher's logits, and a {kind} has none: "
                "use the live teacher, or leave the clamp out"
            )
        if n and not 0 <= teacher.indices.min() <= teacher.indices.max() < vocab:
            raise ValueError(
                f"{kind}.indices go from {teacher.indices.min()} to {teacher.indices.max()}, the "
                f"student's vocabulary to {vocab - 1}: not the same tokenizer"
            )


def linear_distillation(
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    targets: Tensor | None,
    teachers: Sequence[Teacher] = (),
    *,
    temperature: float,
    divergence: str = "forward_kl",
    weights: tuple[float, float] = (1.0, 1.0),
    legacy_clamp: LegacyClamp | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Cross-entropy and distillation of the logits `hidden @ weight.T + bias`, never held whole.

    The sums over n tokens of `-log softmax(z)[target]` and of `T^2 D(p, q)`, the latter averaged
    over the teachers. Both equal the unchunked ones within float32 rounding. Gradients are computed
    in the same pass, for the `weights` given; a backward pass that asks for another proportion (a
    guard cut one term out) makes a second pass, in which a term of weight 0 is not touched.

    Args:
        student_hidden: `[n, dim]`; the product is in its dtype (or autocast's), all else float32.
        student_weight: `[vocab, dim]`, of the same dtype.
        student_bias: `[vocab]` or None. An entry of -inf is outside the vocabulary for the
            distillation, as a teacher's is; other infinities count as +-65504.
        targets: `[n]` int64, or None: no cross-entropy (see `next_token_targets`).
        teachers: any number; where their vocabularies are shorter or longer than the student's,
            the common first part counts. No gradient flows into them. The logits of one in half
            precision are in its own dtype, whatever autocast is around.
        temperature: of both softmaxes in the distillation, in [1e-4, 1e4].
        divergence: as in `token_kd`; of a `SampledTeacher` one that has `from_samples`.
        weights: of cross-entropy and distillation in the loss that will be differentiated, up to
            a common factor. They do not scale what is returned.
        legacy_clamp: the old clamps of logits and of each token's terms; for comparison only.
        chunk_tokens: tokens whose logits exist at once; None: as many as fill 64 MiB.

    Returns:
        `[2]`, float32 (float64 for float64): the sum of cross-entropies, and of T^2 D.

    Raises:
        ValueError: names the argument that does not fit.

    >>> hidden, weight = torch.zeros(3, 4), torch.zeros(8, 4)
    >>> teacher = LinearTeacher(hidden, weight)
    >>> linear_distillation(hidden, weight, None, torch.zeros(3).long(), [teacher], temperature=2.0)
    tensor([6.2383, 0.0000])
    """
    if student_hidden.ndim != 2 or student_weight.shape[1:] != student_hidden.shape[1:]:
        raise ValueError(
            f"student_hidden {tuple(student_hidden.shape)} and student_weight "
            f"{tuple(student_weight.shape)} do not fit: expected [n, dim] and [vocab, dim]"
        )
    dtypes = student_hidden.dtype, student_weight.dtype
    if dtypes[0] != dtypes[1] and not torch.is_autocast_enabled(student_hidden.device.type):
        raise ValueError(
            f"student_hidden is {dtypes[0]} and student_weight {dtypes[1]}: cast one of them, or "
            "compute under autocast"
        )
    return _distil(
        student_hidden,
        student_weight,
        student_bias,
        targets,
        teachers,
        temperature,
        divergence,
        weights,
        legacy_clamp,
        chunk_tokens,
    )


def logits_distillation(
    student_logits: Tensor,
    targets: Tensor | None,
    teachers: Sequence[Teacher] = (),
    *,
    temperature: float,
    divergence: str = "forward_kl",
    weights: tuple[float, float] = (1.0, 1.0),
    legacy_clamp: LegacyClamp | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """`linear_distillation` for a head that is not linear: from its logits `[n, vocab]`.

    An entry that is -inf in every row is outside the vocabulary. Everything else as there.
    """
    if student_logits.ndim != 2:
        raise ValueError(f"student_logits {tuple(student_logits.shape)}, expected [n, vocab]")
    return _distil(
        student_logits,
        None,
        None,
        targets,
        teachers,
        temperature,
        divergence,
        weights,
        legacy_clamp,
        chunk_tokens,
    )
