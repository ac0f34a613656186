"""Check the configured head and loss on extreme inputs, and that a NaN stays in its head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ssl_kd import losses as library
from ssl_kd.doctor.finding import Finding
from ssl_kd.vision.settings import HeadSettings
from ssl_kd.vision.train.heads import HeadBank, head_maker
from ssl_kd.vision.train.rows import part_norms

_DIM = 32
_CLUSTERS = 10
_HEADS = 4
_BATCH = 16


def _bank(heads: HeadSettings) -> tuple[HeadBank, Tensor]:
    """Return a small bank of heads of the configured class, and its weights."""
    widths = {"hidden_dim": heads.hidden_dim, "bottleneck_dim": heads.bottleneck_dim}
    bank = HeadBank(head_maker(heads.head, _DIM, _CLUSTERS, **widths), _HEADS)
    return bank, bank.initial_weights(heads.seed)


def _rows(scale: float = 1.0) -> Tensor:
    return scale * torch.randn(_BATCH, _DIM, generator=torch.Generator().manual_seed(0))


def forward(heads: HeadSettings) -> Iterator[Finding]:
    """Check that the logits of the configured head are finite for ordinary and extreme rows."""
    bank, weights = _bank(heads)
    for name, scale in (("ordinary rows", 1.0), ("all-zero rows", 0.0), ("rows of 1e4", 1e4)):
        logits = bank(bank.unflatten(weights), _rows(scale))
        change = "the head turns finite input into NaN or inf: look for a division or a log in HEAD"
        result = f"{heads.head}: largest logit {logits.abs().max().item():.3g}"
        yield Finding(f"forward: {name}", result, "" if logits.isfinite().all() else change)


def losses(heads: HeadSettings) -> Iterator[Finding]:
    """Check loss and gradient on inputs for which the published formula overflows or underflows."""
    even = torch.full((1, _CLUSTERS), 1 / _CLUSTERS)
    eye = torch.eye(_CLUSTERS)[None]  # one sample per cluster
    one_cluster = torch.eye(_CLUSTERS)[:1]  # nine exact zeros
    for name, student, teacher, marginal in (
        ("fp16 logits of 6e4", (6e4 * eye).half(), (6e4 * eye).half(), even),
        ("fp16 logits of -6e4", (-6e4 * eye).half(), (6e4 * eye).half(), even),
        ("disjoint probabilities", 30 * eye, 30 * eye.roll(1, -1), even),
        ("all-equal logits", 0 * eye, 0 * eye, even),
        ("marginal of exactly 0", eye, 2 * eye, one_cluster),
    ):
        student = student.clone().requires_grad_()
        loss = library.beta_mi(
            student,
            teacher,
            marginal,
            beta=heads.beta,
            student_temperature=heads.student_temp,
            teacher_temperature=heads.teacher_temp,
        )
        (gradient,) = torch.autograd.grad(loss.sum(), student)
        size = gradient.float().abs().max().item()
        healthy = bool(loss.isfinite().all() and gradient.isfinite().all())
        # The gradient is rightly 0 at equal logits, but not at disjoint ones.
        healthy = healthy and not (name == "disjoint probabilities" and size == 0)
        yield Finding(
            f"loss: {name}",
            f"from {loss.min().item():.3g} to {loss.max().item():.3g}, gradient up to {size:.3g}",
            ""
            if healthy
            else "raise STUDENT_TEMP and TEACHER_TEMP in config.py; report this as a bug",
        )


def _step(heads: HeadSettings, bank: HeadBank, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses `[head]` and gradients `[head, parameter]` of one step of the bank."""
    weights = weights.clone().requires_grad_()
    x = _rows()
    logits = bank(bank.unflatten(weights), torch.cat([x, x + 0.1 * x.roll(1, 0)]))
    logits = logits.unflatten(1, (2, _BATCH))
    teacher = library.log_probabilities(logits.detach(), heads.teacher_temp)
    marginal = teacher.exp().mean((1, 2))
    loss = library.temi(
        logits, teacher, marginal, beta=heads.beta, student_temperature=heads.student_temp
    )
    # A sick head is removed before the sum, because NaN times 0 is NaN.
    (gradients,) = torch.autograd.grad(torch.where(loss.isfinite(), loss, 0.0).sum(), weights)
    return loss.detach(), gradients


def gradients(heads: HeadSettings) -> Iterator[Finding]:
    """Check the gradients of all heads, and that a NaN in one head does not affect the others.

    Loss and gradient of the other heads must stay the same to the last bit.
    """
    bank, weights = _bank(heads)
    loss, flat = _step(heads, bank, weights)
    norms = part_norms(flat)
    healthy = bool(norms.isfinite().all()) and bool((norms > 0).all())
    yield Finding(
        "gradient: every head",
        f"norms from {norms.min().item():.2g} to {norms.max().item():.2g}",
        "" if healthy else "the gradient of a head is zero or not finite: check the code of HEAD",
    )
    named = bank.unflatten(flat).items()
    dead = [name for name, value in named if not value.isfinite().all() or not value.any()]
    yield Finding(
        "gradient: every parameter",
        f"none or NaN in {', '.join(dead)}" if dead else "reaches all of them, finite",
        "these parameters never learn: use them in forward, or remove them" if dead else "",
    )
    sick, others = 1, [0, *range(2, _HEADS)]
    weights[sick, 0] = float("nan")
    sick_loss, sick_flat = _step(heads, bank, weights)
    same = torch.equal(sick_loss[others], loss[others])
    same = same and torch.equal(sick_flat[others], flat[others])
    detected = not (sick_loss[sick].isfinite() and part_norms(sick_flat)[sick].isfinite())
    yield Finding(
        "isolation: NaN in one head",
        f"the others are {'bit-identical' if same else 'CHANGED'}; the NaN is"
        f" {'detected' if detected else 'NOT detected'}",
        "" if same and detected else "one head affects another: check `stacked` in the class HEAD",
    )
