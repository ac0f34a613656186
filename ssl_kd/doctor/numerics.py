"""Head and losses on inputs that break other implementations: extremes, gradients, isolation."""

from __future__ import annotations

from collections.abc import Iterator

from ssl_kd.doctor.finding import Finding
from ssl_kd.vision.settings import VisionSettings

_DIM, _CLUSTERS, _HEADS, _BATCH = 32, 10, 4, 16


def _bank(settings: VisionSettings):
    """A small bank of the head that the settings name, and its weights."""
    from ssl_kd.heads import HeadBank, head_maker

    widths = {"hidden_dim": settings.hidden_dim, "bottleneck_dim": settings.bottleneck_dim}
    bank = HeadBank(head_maker(settings.head, _DIM, _CLUSTERS, **widths), _HEADS)
    return bank, bank.initial_weights(settings.seed)


def _batch(scale: float = 1.0):
    import torch

    return scale * torch.randn(_BATCH, _DIM, generator=torch.Generator().manual_seed(0))


def forward(settings: VisionSettings) -> Iterator[Finding]:
    """The head's logits are finite for ordinary and for extreme rows."""
    import torch

    bank, weights = _bank(settings)
    for name, x in (
        ("ordinary rows", _batch()),
        ("all-zero rows", _batch(0.0)),
        ("rows of 1e4", _batch(1e4)),
    ):
        logits = bank(bank.unflatten(weights), x)
        largest = logits.abs().max().item()
        fine = bool(torch.isfinite(logits).all())
        yield Finding(
            f"forward: {name}",
            f"{settings.head}: largest logit {largest:.3g}",
            "" if fine else "the head turns finite input into NaN or inf: look for a division or"
            " log in it that a row of zeros or of large values reaches",
        )  # fmt: skip


def losses(settings: VisionSettings) -> Iterator[Finding]:
    """The loss and its gradient survive what breaks the published form."""
    import torch

    from ssl_kd import losses

    even = torch.full((1, _CLUSTERS), 1 / _CLUSTERS)
    eye = torch.eye(_CLUSTERS)[None]  # one sample per cluster, one row each
    gone = torch.eye(_CLUSTERS)[:1]  # all mass on cluster 0: nine exact zeros
    for name, student, teacher, marginal in (
        ("fp16 logits of 6e4", (6e4 * eye).half(), (6e4 * eye).half(), even),
        ("fp16 logits of -6e4", (-6e4 * eye).half(), (6e4 * eye).half(), even),
        ("disjoint probabilities", 30 * eye, 30 * eye.roll(1, -1), even),
        ("all-equal logits", 0 * eye, 0 * eye, even),
        ("marginal of exactly 0", eye, 2 * eye, gone),
    ):
        student = student.clone().requires_grad_()
        loss = losses.beta_mi(
            student,
            teacher,
            marginal,
            beta=settings.beta,
            student_temperature=settings.student_temp,
            teacher_temperature=settings.teacher_temp,
        )
        (gradient,) = torch.autograd.grad(loss.sum(), student)
        size = gradient.float().abs().max().item()
        fine = bool(torch.isfinite(loss).all() and torch.isfinite(gradient).all())
        # At equal logits the symmetric loss has no gradient; at disjoint ones it must have one.
        fine = fine and not (name == "disjoint probabilities" and size == 0)
        yield Finding(
            f"loss: {name}",
            f"from {loss.min().item():.3g} to {loss.max().item():.3g}, gradient up to {size:.3g}",
            "" if fine else "raise STUDENT_TEMP and TEACHER_TEMP in config.py, and report this",
        )


def _step(settings: VisionSettings, weights):
    """Losses `[head]` and gradients `[head, parameter]` of one step of the bank."""
    import torch

    from ssl_kd import losses

    bank, _ = _bank(settings)
    weights = weights.clone().requires_grad_()
    x = _batch()
    logits = bank(bank.unflatten(weights), torch.cat([x, x + 0.1 * x.roll(1, 0)]))
    logits = logits.unflatten(1, (2, _BATCH))
    teacher = losses.log_probabilities(logits.detach(), settings.teacher_temp)
    marginal = teacher.exp().mean((1, 2))
    loss = losses.temi(
        logits, teacher, marginal, beta=settings.beta, student_temperature=settings.student_temp
    )
    # A sick head is cut out before the sum: NaN times 0 is NaN.
    torch.where(torch.isfinite(loss), loss, 0.0).sum().backward()
    assert weights.grad is not None
    return loss.detach(), weights.grad


def gradient_flow(settings: VisionSettings) -> Iterator[Finding]:
    """Every head and every parameter gets a gradient."""
    import torch

    from ssl_kd.guard.update import part_norms

    bank, weights = _bank(settings)
    _, gradients = _step(settings, weights)
    norms = part_norms(gradients)
    fine = bool(torch.isfinite(norms).all()) and bool((norms > 0).all())
    yield Finding(
        "gradient: every head",
        f"norms from {norms.min().item():.2g} to {norms.max().item():.2g}",
        "" if fine else "a head's gradient is zero or not finite: check the head's own code",
    )
    dead = [
        name
        for name, gradient in bank.unflatten(gradients).items()
        if not torch.isfinite(gradient).all() or not gradient.any()
    ]
    yield Finding(
        "gradient: every parameter",
        f"none or NaN in {', '.join(dead)}" if dead else "reaches each one, finite",
        "these parameters never learn: use them in forward, or remove them" if dead else "",
    )


def isolation(settings: VisionSettings) -> Iterator[Finding]:
    """A NaN put into one head's weights must not change one bit of another's loss or gradient."""
    import torch

    from ssl_kd.guard.update import part_norms

    sick = 1
    _, weights = _bank(settings)
    clean = _step(settings, weights)
    weights[sick, 0] = float("nan")
    loss, gradients = _step(settings, weights)
    others = [i for i in range(_HEADS) if i != sick]
    same = torch.equal(loss[others], clean[0][others])
    same = same and torch.equal(gradients[others], clean[1][others])
    seen = not torch.isfinite(loss[sick]) or not torch.isfinite(part_norms(gradients)[sick])
    yield Finding(
        "isolation: NaN in one head",
        f"the others are {'the same to the last bit' if same else 'CHANGED'};"
        f" the sick one is {'noticed' if seen else 'NOT noticed'}",
        ""
        if same and seen
        else "the heads are mixed somewhere: check `stacked` of the head's class",
    )
