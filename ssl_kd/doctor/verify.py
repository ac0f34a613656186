"""Check that a plain, a live and a cached loss agree on the user's models."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from ssl_kd.core.runs.clock import Progress, no_progress
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.losses.token_distillation import next_token_targets, token_kd
from ssl_kd.language.models.frozen import FrozenTeacher
from ssl_kd.language.models.mixture import Mixture, Routing, is_mixture
from ssl_kd.language.prepare import prepare
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.teachers.cache_methods import LastHidden
from ssl_kd.language.teachers.cached import Cached
from ssl_kd.language.teachers.live import Live
from ssl_kd.language.text.blocks import Batch, Blocks
from ssl_kd.language.train.step import Distiller, precision_of

logger = logging.getLogger(__name__)

ROWS = 4  # of the text: all logits of both models must fit in memory

Allowed = tuple[float, float]
"""The largest allowed relative difference of a value, and of a gradient."""

EXACT: Allowed = (1e-4, 1e-3)
HALF: Allowed = (2e-2, 5e-2)  # half-precision products are rounded differently
# The k most likely tokens give only a lower bound of the value, but the gradient is close.
SHORTENED: Allowed = (1e-1, 1e-1)
LEAST = 0.1  # nats; relative differences of smaller terms are taken relative to this


@dataclass(frozen=True)
class Agreement:
    """The difference between one way to compute the loss and the plain one."""

    way: str  # `plain`, `live` or `cache` with its method
    ce: float  # nats a token
    kd: float  # the divergence times temperature squared, nats a token
    ce_off: float  # relative to the plain value, or to 0.1 nats if that is smaller
    kd_off: float
    gradient_off: float  # norm of the difference, relative to the norm of the plain gradient
    allowed: Allowed

    @property
    def agrees(self) -> bool:
        """Whether all differences are within `allowed`; False for NaN."""
        value, gradient = self.allowed
        return max(self.ce_off, self.kd_off) <= value and self.gradient_off <= gradient


def verify(settings: LanguageSettings, *, progress: Progress = no_progress) -> list[Agreement]:
    """Compute the loss of a few rows in several ways, the plain way first, and compare them.

    `plain` uses the logits of both models, `token_kd` and PyTorch's cross-entropy; `live` is the
    loss of a training step; `cache` reads the teacher from TEACHER_CACHE, if set. Dropout is off,
    and nothing is trained. For a mixture of experts, `expert_changes` is logged.
    """
    _refuse(settings)
    settings = settings.replace(router_mode="native", legacy_clamp=None)
    precision = precision_of(settings)
    task = prepare(settings, precision, progress)
    assert isinstance(task.blocks, Blocks)
    (lm,), device = task.teacher.lms, precision.device
    frozen = FrozenTeacher(lm.model, device=device, dtype=precision.teacher)
    few = task.blocks.part(slice(ROWS))
    batch = few.batch(range(len(few)), precision.device)
    distiller = Distiller(task.student.model, settings, precision, Live(frozen))
    distiller.student.eval()
    exact = precision.student == precision.teacher == torch.float32
    close = EXACT if exact else HALF

    def measure(sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the terms' means over real tokens `[2]`, and the weighted loss's gradient."""
        terms = sums / max(int(batch.counts.sum()), 1)
        trained = [p for p in distiller.student.parameters() if p.requires_grad]
        loss = settings.alpha_ce * terms[0] + settings.alpha_kd * terms[1]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        return terms.detach(), torch.cat([g.detach().flatten() for g in gradients if g is not None])

    plain = measure(
        _plain(distiller, frozen, batch, settings.temperature, settings.kind_of_divergence)
    )

    def compare(way: str, allowed: Allowed) -> Agreement:
        values, gradient = measure(torch.stack(list(distiller.terms(batch).values())))
        off = (values - plain[0]).abs() / plain[0].abs().clamp(min=LEAST)
        distance = (gradient - plain[1]).norm() / plain[1].norm().clamp(min=1e-30)
        (ce, kd), (ce_off, kd_off) = values.tolist(), off.tolist()
        return Agreement(way, ce, kd, ce_off, kd_off, float(distance), allowed)

    ce, kd = plain[0].tolist()
    ways = [Agreement("plain", ce, kd, 0.0, 0.0, 0.0, close), compare("live", close)]
    if isinstance(task.teacher, Cached):
        distiller.teacher, method = task.teacher, task.teacher.cache.method
        allowed = SHORTENED
        if isinstance(method, LastHidden):
            allowed = close if method.stored == precision.teacher else HALF
        ways.append(compare(f"cache, {method}", allowed))
    for name, model in (("teacher", frozen.model), ("student", distiller.student)):
        if is_mixture(model):
            with precision.autocast() if name == "student" else nullcontext():
                logger.info("%s: %s", name, expert_changes(model, few, precision.device))
    return ways


@dataclass(frozen=True)
class ExpertChanges:
    """How a mixture of experts differs between a batch and the same rows run one by one."""

    changed: float  # share of the predicting tokens that have other experts in some layer
    free: float  # largest difference of a target's log-probability, in nats
    pinned: float  # the same if the rows use the experts that the batch chose

    def __str__(self) -> str:
        return (
            f"{self.changed:.1%} of the tokens change experts if the rows of the batch run one by"
            f" one; the log-probability of a token then differs by up to {self.free:.2g} nats, and"
            f" by up to {self.pinned:.2g} with the experts pinned"
        )


@torch.no_grad()
def expert_changes(model: Any, rows: Blocks, device: torch.device) -> ExpertChanges:
    """Run a mixture of experts on a batch and row by row, and compare experts and predictions."""
    mixture = Mixture(model)

    def run(batch: Batch, routing: Routing) -> tuple[Tensor, Tensor]:
        """Return log-probabilities `[row, token]` and experts `[layer, row, token, chosen]`."""
        with mixture.using(routing), mixture.watch() as gates:
            logits = model(**batch.model_inputs(), use_cache=False).logits[:, :-1]
        log_probs = logits.float().log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])
        chosen = torch.stack([gates.chosen[layer] for layer in range(mixture.layers)])
        return log_probs[..., 0], chosen.view(mixture.layers, *batch.input_ids.shape, -1)

    expected, experts = run(rows.batch(range(len(rows)), device), Routing())
    changed, differences = [], []
    for i in range(len(rows)):
        row = rows.batch([i], device)
        at, width = row.counts[0, 1:].nonzero().flatten(), row.input_ids.shape[1]
        pinned = experts[:, i, :width]
        free, own = run(row, Routing())
        held, _ = run(row, Routing("pinned", chosen=dict(enumerate(pinned))))
        others = own[:, 0].sort(-1).values != pinned.sort(-1).values
        changed.append(others.any(-1).any(0)[at].float())
        differences.append((torch.cat([free, held]) - expected[i, : width - 1])[:, at].abs())
    largest = torch.cat(differences, 1).amax(1).tolist()
    return ExpertChanges(float(torch.cat(changed).mean()), *largest)


def _refuse(settings: LanguageSettings) -> None:
    """Raise SettingsError if there is no single local teacher with the student's tokenizer."""
    if settings.teacher_url is not None:
        raise SettingsError(
            f"TEACHER_URL is {settings.teacher_url!r}, but only a local teacher is compared: set"
            " TEACHER_URL to None, and TEACHER_MODEL to a folder with weights."
        )
    if settings.teacher_model == "none" or settings.align != "auto":
        option = "TEACHER_MODEL 'none'" if settings.align == "auto" else f"ALIGN {settings.align!r}"
        raise SettingsError(
            f"{option} leaves nothing to compare: set TEACHER_MODEL to a teacher with the student's"
            " tokenizer, and ALIGN to 'auto'."
        )
    if len(settings.teacher_names) > 1:
        raise SettingsError(
            f"TEACHER_MODEL names {len(settings.teacher_names)} teachers, expected one: verify them"
            " one by one."
        )
    experts = settings.router_mode == "all" or settings.router_weights is not None
    if settings.teacher_cache is not None and experts:
        raise SettingsError(
            f"TEACHER_CACHE was written with other experts or routers (ROUTER_MODE "
            f"{settings.router_mode!r}, ROUTER_WEIGHTS {settings.router_weights!r}), and only the "
            "original teacher is compared: set TEACHER_CACHE to None."
        )


def agreement_table(agreements: Sequence[Agreement]) -> Table:
    """Return a table of the losses, and how far each is from the plain implementation."""
    title = "Losses in nats a token, and differences from the plain ones"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("way", no_wrap=True)
    for name in ("ce", "kd", "ce off", "kd off", "gradient off"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for way in agreements:
        values = [f"{value:.5g}" for value in (way.ce, way.kd)]
        values += [f"{value:.1g}" for value in (way.ce_off, way.kd_off, way.gradient_off)]
        limits = "allowed {:g}, gradient {:g}".format(*way.allowed)
        table.add_row(way.way, *values, "agrees" if way.agrees else f"DIFFERS: {limits}")
    return table


def _plain(
    distiller: Distiller,
    frozen: FrozenTeacher,
    batch: Batch,
    temperature: float,
    divergence: str,
) -> Tensor:
    """Compute both loss terms from full logits; return their sums over the real tokens `[2]`."""
    inputs = batch.model_inputs()
    rows, targets = next_token_targets(batch.input_ids, batch.counts)
    mask = torch.zeros(batch.counts.numel(), dtype=torch.bool, device=rows.device)
    mask[rows] = True
    with torch.no_grad():
        teacher_logits = frozen.model(**inputs, use_cache=False).logits
    with distiller.precision.autocast():
        logits = distiller.student(**inputs, use_cache=False).logits
    mask = mask.view_as(batch.counts)
    kd = token_kd(logits, teacher_logits, mask=mask, temperature=temperature, divergence=divergence)
    ce = F.cross_entropy(logits.float().flatten(0, 1)[rows], targets)
    return torch.stack([ce, kd]) * len(rows)
