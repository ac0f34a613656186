"""Do all ways to compute the loss agree? Live, cached and in chunks, on the user's models."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from ssl_kd.datasets.blocks import Batch, Blocks
from ssl_kd.language.kept import LastHidden
from ssl_kd.language.prepare import Task, prepare
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.sources import Plain
from ssl_kd.language.step import Distiller, precision_of
from ssl_kd.language.teacher_cache import TeacherCache, TeacherFingerprint, identity, write
from ssl_kd.losses.token_distillation import linear_distillation, next_token_targets, token_kd
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import n_ids
from ssl_kd.teachers.frozen import FrozenTeacher, hidden_states
from ssl_kd.training.clock import Progress, no_progress

ROWS = 4  # of the text: whole logits of both models must fit in memory
CHUNK_TOKENS = 7  # a prime: the last chunk is an incomplete one

Allowed = tuple[float, float]
"""Largest relative difference of a value, and of a gradient."""

EXACT: Allowed = (1e-4, 1e-3)
HALF: Allowed = (2e-2, 5e-2)  # each way rounds its half-precision products at other places
STORED: Allowed = (1e-3, 1e-2)  # log-probabilities are stored in float16
# k tokens give only a lower bound of the value; what the student learns from is the gradient.
SHORTENED: Allowed = (1e-1, 1e-1)
LEAST = 0.1  # nats: of a term near zero, rounding is a large share


@dataclass(frozen=True)
class Agreement:
    """How far one way to compute the loss lies from the plain one.

    Attributes:
        way: which one.
        ce: cross-entropy, nats a token.
        kd: the divergence times temperature squared, nats a token.
        ce_off: difference to the plain value, relative to it, or to 0.1 nats where it is less.
        kd_off: the same.
        gradient_off: norm of the difference of the weighted loss's gradient in all trained weights,
            relative to the norm of the plain gradient.
        allowed: what is allowed of values and of the gradient.
    """

    way: str
    ce: float
    kd: float
    ce_off: float
    kd_off: float
    gradient_off: float
    allowed: Allowed

    @property
    def agrees(self) -> bool:
        """Whether all differences are as small as allowed; a NaN never is."""
        value, gradient = self.allowed
        return max(self.ce_off, self.kd_off) <= value and self.gradient_off <= gradient


def verify(settings: LanguageSettings, *, progress: Progress = no_progress) -> list[Agreement]:
    """Compute the loss of a few rows in every way that a run may, and compare.

    The plain way takes the models' own whole logits, `token_kd` and PyTorch's cross-entropy. The
    others: `live`, as a training step does; `chunked`, with the logits of seven tokens at a time,
    where they are linear in the hidden states; `cache, k = V`, from the whole vocabulary written to
    a temporary folder; `cache, hidden`, from the teacher's hidden states written there, where its
    logits are linear in them; and the cache of TEACHER_CACHE, if given.
    Dropout is off. Nothing is trained.

    Args:
        settings: teacher, student, text, loss and precision, as for a run.
        progress: as for a run.

    Returns:
        The plain way first, and how far each other one lies from it.

    Raises:
        SettingsError: no teacher, or one with another tokenizer: there is only one way then to
            compute the loss. And as by `prepare`.
    """
    _check(settings)
    settings = settings.replace(
        router_mode="native",
        legacy_clamp=None,
        teacher_offload=False,
        teacher_url=None,  # `compare_served` asks it
        teacher_cache=settings.teacher_cache if settings.teacher_url is None else None,
    )
    precision = precision_of(settings)
    task = prepare(settings, precision, progress)
    assert isinstance(task.blocks, Blocks) and task.teacher is not None
    frozen = task.frozen or FrozenTeacher(  # with a cache it is not loaded for work
        task.teacher.model, device=precision.device, dtype=precision.teacher
    )
    few = task.blocks.part(slice(ROWS))
    batch = few.batch(range(len(few)), precision.device)
    distiller = Distiller(task.student.model, settings, precision, Plain(frozen))
    distiller.student.eval()

    exact = precision.student == precision.teacher == torch.float32
    close = EXACT if exact else HALF
    plain = _measured(distiller, _plain(distiller, frozen, batch), batch)
    found = [_compared("plain", plain, plain, close)]

    def compare(way: str, terms: Tensor, allowed: Allowed) -> None:
        measured = _measured(distiller, terms, batch)
        found.append(_compared(way, measured, plain, allowed))

    def step() -> Tensor:  # as in training
        return torch.stack([*distiller.terms(batch).values()])

    compare("live", step(), close)
    if distiller.head is not None:
        compare("chunked", _in_chunks(distiller, frozen, batch), close)
    with tempfile.TemporaryDirectory() as folder:
        ways = {"k = V": ("topk", STORED if exact else HALF), "hidden": ("hidden", close)}
        for name, (method, allowed) in ways.items():
            if method == "topk" or frozen.linear:
                cache = _whole_cache(f"{folder}/{method}", method, frozen, few, task)
                distiller.source = Plain(cache)
                compare(f"cache, {name}", step(), allowed)
    if task.caches:
        distiller.source, kept = Plain(*task.caches), task.caches[0].kept
        allowed = SHORTENED
        if isinstance(kept, LastHidden):
            allowed = close if kept.stored == precision.teacher else HALF
        compare(f"cache, {kept}", step(), allowed)
    return found


def _check(settings: LanguageSettings) -> None:
    """Refuse what leaves nothing to compare."""
    if settings.teacher_model == "none" or settings.align != "auto":
        came = "TEACHER_MODEL 'none'" if settings.align == "auto" else f"ALIGN {settings.align!r}"
        raise SettingsError(
            f"{came} leaves nothing to compare: name a teacher with the student's tokenizer."
        )
    if len(settings.teacher_names) > 1:
        raise SettingsError(
            f"TEACHER_MODEL names {len(settings.teacher_names)} teachers: verify them one by one."
        )
    experts = settings.router_mode in ("all", "ka") or settings.router_weights is not None
    if settings.teacher_cache is not None and experts:
        raise SettingsError(
            "TEACHER_CACHE holds answers of other experts or routers (ROUTER_MODE "
            f"{settings.router_mode!r}, ROUTER_WEIGHTS {settings.router_weights!r}), and "
            "only the teacher as it came is compared: set TEACHER_CACHE to None."
        )


def agreement_table(found: Sequence[Agreement]) -> Table:
    """How far each way to compute the loss lies from the plain one."""
    title = "Losses in nats a token, and how far off the plain ones"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("way", no_wrap=True)
    for name in ("ce", "kd", "ce off", "kd off", "gradient off"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for way in found:
        values = [f"{value:.5g}" for value in (way.ce, way.kd)]
        values += [f"{value:.1g}" for value in (way.ce_off, way.kd_off, way.gradient_off)]
        limits = "allowed {:g}, gradient {:g}".format(*way.allowed)
        table.add_row(way.way, *values, "agrees" if way.agrees else f"DIFFERS: {limits}")
    return table


def _plain(distiller: Distiller, frozen: FrozenTeacher, batch: Batch) -> Tensor:
    """Both terms from whole logits, sums over the real tokens `[2]`."""
    settings, inputs = distiller.settings, batch.model_inputs()
    rows, targets = next_token_targets(batch.input_ids, batch.counts)
    mask = torch.zeros(batch.counts.numel(), dtype=torch.bool, device=rows.device)
    mask[rows] = True
    with torch.no_grad():
        teacher_logits = frozen.model(**inputs, use_cache=False).logits
    with distiller.precision.autocast():
        logits = distiller.student(**inputs, use_cache=False).logits
    kd = token_kd(
        logits,
        teacher_logits,
        mask=mask.view_as(batch.counts),
        temperature=settings.temperature,
        divergence=settings.kind_of_divergence,
    )
    ce = F.cross_entropy(logits.float().flatten(0, 1)[rows], targets)
    return torch.stack([ce, kd]) * len(rows)


def _in_chunks(distiller: Distiller, frozen: FrozenTeacher, batch: Batch) -> Tensor:
    """Both terms with the logits of a few tokens at a time."""
    settings, head = distiller.settings, distiller.head
    assert head is not None
    rows, targets = next_token_targets(batch.input_ids, batch.counts)
    with distiller.precision.autocast():
        hidden = hidden_states(distiller.student, batch.model_inputs()).flatten(0, 1)[rows]
        return linear_distillation(
            hidden,
            head.weight,
            head.bias,
            targets,
            [frozen(batch, rows)],
            temperature=settings.temperature,
            divergence=settings.kind_of_divergence,
            weights=(settings.alpha_ce, settings.alpha_kd),
            chunk_tokens=CHUNK_TOKENS,
        )


def _whole_cache(
    folder: str,
    method: str,
    frozen: FrozenTeacher,
    blocks: Blocks,
    task: Task,
) -> TeacherCache:
    """A cache of the first rows that holds the whole vocabulary, or all that decides it."""
    assert task.teacher is not None
    tokenizer, teacher = task.student.tokenizer, task.teacher
    vocabulary = min(n_ids(tokenizer), frozen.model.get_output_embeddings().weight.shape[0])
    fingerprint = TeacherFingerprint(
        **identity(teacher.name, teacher.weights_id, tokenizer, task.train_set, blocks),
        dtype=str(frozen.model.dtype).removeprefix("torch."),
        method=method,
        k=vocabulary,
        temperature=task.settings.temperature,
    )
    return write(frozen, blocks, folder, fingerprint, vocabulary=vocabulary)


@dataclass(frozen=True)
class _Measured:
    values: Tensor  # [2], means over the real tokens
    gradient: Tensor  # of the weighted loss in all trained weights


def _measured(distiller: Distiller, terms: Tensor, batch: Batch) -> _Measured:
    settings, terms = distiller.settings, terms / max(int(batch.counts.sum()), 1)
    trained = [p for p in distiller.student.parameters() if p.requires_grad]
    loss = settings.alpha_ce * terms[0] + settings.alpha_kd * terms[1]
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    return _Measured(
        terms.detach(), torch.cat([g.detach().flatten() for g in gradients if g is not None])
    )


def _compared(way: str, found: _Measured, plain: _Measured, allowed: Allowed) -> Agreement:
    off = (found.values - plain.values).abs() / plain.values.abs().clamp(min=LEAST)
    tiny = torch.finfo(torch.float32).tiny
    distance = (found.gradient - plain.gradient).norm() / plain.gradient.norm().clamp(min=tiny)
    (ce, kd), (ce_off, kd_off) = found.values.tolist(), off.tolist()
    return Agreement(way, ce, kd, ce_off, kd_off, float(distance), allowed)
