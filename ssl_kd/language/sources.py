"""What teachers say of a batch: one that shares the tokenizer, a mixture of experts, a stranger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ssl_kd.guard.events import Event
from ssl_kd.language.alignment import AlignedBatch
from ssl_kd.language.blocks import Batch
from ssl_kd.language.judge import logits_of
from ssl_kd.language.projection import HiddenProjection
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.losses.cross_tokenizer import chunk_matching, hidden_matching, uld
from ssl_kd.losses.linear_distillation import Teacher, linear_distillation
from ssl_kd.losses.token_distillation import next_token_targets
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import FrozenTeacher, hidden_states, linear_head
from ssl_kd.teachers.mixture import Mixture, RouterRecord, RouterStep, Routing

Answer = Callable[[Batch, Tensor], Teacher]
"""A batch and its real positions, rows of the flattened `[batch * token]` -> the teacher's word."""


class Source(Protocol):
    """What the teacher says of a batch."""

    def __call__(self, batch: Batch, rows: Tensor, own: Teacher) -> Sequence[Teacher]:
        """Ask the teacher.

        Args:
            batch: rows of tokens.
            rows: int64 `[n]`, the real positions in the flattened `[batch * token]`.
            own: the student's own word on them, without gradient.

        Returns:
            Several, as of several draws of experts, count as their mean.
        """
        ...


class Plain:
    """Teachers that answer a batch and know of no student: live, or from caches.

    Args:
        answers: one, or the variants of a cache.

    Attributes:
        model: the live teacher's; None for a cache.
    """

    def __init__(self, *answers: Answer) -> None:
        self.answers = answers
        self.model: Any = getattr(answers[0], "model", None)

    def __call__(self, batch: Batch, rows: Tensor, own: Teacher) -> Sequence[Teacher]:
        """As `Source`."""
        return [answer(batch, rows) for answer in self.answers]


# The divergence D(p, q) by its name when the teacher p takes the student's place in the loss.
_SWAPPED = {"forward_kl": "reverse_kl", "reverse_kl": "forward_kl", "js": "js", "tvd": "tvd"}


class Routed:
    """A mixture-of-experts teacher: its experts as ROUTER_MODE says, its router perhaps learning.

    In `sar` each batch first moves the router towards the student, by `KL(p || q)` with the student
    q fixed, then the teacher answers with the router as it is now; with ROUTER_JOINT it answers
    before its router moves, as one step of both would have it.

    Args:
        frozen: the teacher, a mixture of experts.
        settings: `router_*`, `ka_*` and the divergence.
        scale_loss: for a float16 teacher.

    Attributes:
        record: of the last router step; None before the first, and where no router learns.
        ce: the teacher's own cross-entropy in that step, nats a token.
        model: the teacher's.
        events: what the router step had to say, for the event log to fetch.

    References:
        Every Expert Matters, arXiv 2502.12947, 2025, section 3.
    """

    def __init__(
        self, frozen: FrozenTeacher, settings: LanguageSettings, *, scale_loss: bool = False
    ) -> None:
        self.frozen, self.settings = frozen, settings
        renorm: Any = None if settings.router_renorm == "auto" else settings.router_renorm
        self.model = frozen.model
        self.mixture = Mixture(frozen.model, renorm)
        if settings.router_weights is not None:
            self.mixture.load_router(settings.router_weights)
        self.record: RouterRecord | None = None
        self.ce: float | None = None
        self.events: list[Event] = []
        self.router: RouterStep | None = None
        self.learns = True
        if settings.router_mode == "sar":
            old = settings.router_joint
            self.router = RouterStep(
                self.mixture,
                learning_rate=settings.router_lr,
                balance=1e-3 if old else settings.router_beta,
                anchor=1e-4 if old else 0.0,
                entropy=1e-4 if old else 0.0,
                drift_limit=settings.router_drift,
                gradient_checkpointing=settings.gradient_checkpointing,
                scale_loss=scale_loss,
            )

    def answer(self, batch: Batch, rows: Tensor) -> Teacher:
        """One draw of a router that does not learn."""
        # Drawn from the step's own seed, so a resumed run samples the same experts.
        mode: Any = self.settings.router_mode
        seed = int(torch.randint(2**62, ())) if mode == "ka" else 0
        generator = torch.Generator().manual_seed(seed)
        with self.mixture.using(Routing(mode, self.settings.ka_lambda, generator=generator)):
            return self.frozen(batch, rows)

    def __call__(self, batch: Batch, rows: Tensor, own: Teacher) -> Sequence[Teacher]:
        """As `Source`."""
        settings = self.settings
        if self.router is None:
            draws = settings.ka_forwards if settings.router_mode == "ka" else 1
            return [self.answer(batch, rows) for _ in range(draws)]
        if self.learns and not settings.router_joint:
            self._learn(self.router, batch, own)
        with self.mixture.using(Routing("sar")):
            said = self.frozen(batch, rows)
        if self.learns and settings.router_joint:
            self._learn(self.router, batch, own)
        return [said]

    def _learn(self, router: RouterStep, batch: Batch, own: Teacher) -> None:
        """Move the router, and nothing else, towards what the student can follow."""
        settings, model = self.settings, self.frozen.model
        rows, targets = next_token_targets(batch.input_ids, batch.counts)
        head = linear_head(model)
        assert head is not None, "no mixture with a softmax gate caps or scales its logits"

        def objective() -> Tensor:
            with torch.autocast(self.frozen.device.type, enabled=False):
                hidden = hidden_states(model, batch.model_inputs()).flatten(0, 1)[rows]
            sums = linear_distillation(
                hidden,
                head.weight,
                head.bias,
                targets,
                [own],
                temperature=settings.temperature if settings.router_joint else 1.0,
                divergence=_SWAPPED[settings.kind_of_divergence]  # pyright: ignore[reportArgumentType]
                if settings.router_joint
                else "reverse_kl",  # KL(p || q), p in the student's place
                weights=(0.0, 1.0),
            )
            self.ce = float(sums[0].detach()) / max(len(rows), 1)
            return sums[1] / max(len(rows), 1)

        with torch.enable_grad():
            self.record = router.step(objective, batch.documents > 0)
        if (event := self.record.event) is not None:
            reason = f"{named_rows(batch.rows)}: {event.reason}"
            self.events.append(replace(event, reason=reason))

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the router and its optimizer."""
        return {} if self.router is None else self.router.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        if self.router is not None:
            self.router.load_state_dict(state)


def named_rows(rows: Tensor) -> str:
    """`rows 3, 17`: how a batch is named in an event."""
    return f"rows {', '.join(map(str, rows.tolist()))}"


class RoutedDraw:
    """One draw of experts for a cache: each row's is its own, whoever asks and in which batch.

    Args:
        routed: a mixture whose router does not learn.
        number: which draw.
    """

    def __init__(self, routed: Routed, number: int) -> None:
        self.routed, self.number, self.device = routed, number, routed.frozen.device

    def __call__(self, batch: Batch, rows: Tensor) -> Any:
        """As a `FrozenTeacher`."""
        seed = hash((self.routed.settings.seed, self.number, *batch.rows.tolist()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed % 2**63)
            return self.routed.answer(batch, rows)


@contextmanager
def fixed(source: Source | None) -> Iterator[None]:
    """Ask a teacher without its router learning from it."""
    if not isinstance(source, Routed):
        yield
        return
    source.learns = False
    try:
        yield
    finally:
        source.learns = True


def unfit_for_hidden(who: str, model: Any) -> SettingsError:
    """The error for a model that is met by its logits alone."""
    return SettingsError(
        f"ALIGN is 'hidden', but the {who}, {type(model).__name__}, caps or scales its logits and "
        "is met by these alone: set ALIGN to 'chunks' or 'uld'"
    )


class Aligned(torch.nn.Module):
    """A teacher with another tokenizer, followed as ALIGN says.

    Args:
        answer: the teacher; where it is a mixture of experts, with the routing it has.
        how: `hidden`, `uld` or `chunks`.
        settings: temperature and divergence.
        student_dim: width of the student, for the projection of `hidden`.
        teacher_dim: width of the teacher.

    Raises:
        SettingsError: `hidden`, and the teacher caps or scales its logits.

    Attributes:
        projection: for `hidden`, trained with the student; None otherwise.
    """

    def __init__(
        self, answer: Answer, settings: LanguageSettings, student_dim: int, teacher_dim: int
    ) -> None:
        super().__init__()
        self.answer, self.how, self.settings = answer, settings.align, settings
        self.projection = None
        if self.how == "hidden":
            if not getattr(answer, "linear", True):
                raise unfit_for_hidden("teacher", self.model)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(settings.seed)
                self.projection = HiddenProjection(teacher_dim, student_dim)

    @property
    def model(self) -> Any:
        """The teacher's."""
        return getattr(self.answer, "__self__", self.answer).model

    def forward(
        self, batch: AlignedBatch, hidden: Tensor | None, logits: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The distance to the teacher, a mean over groups of tokens, or tokens in `hidden`.

        Args:
            batch: the same text in both tokenizers.
            hidden: `[batch * token, dim]`, the student's hidden states; only `hidden` needs them.
            logits: rows of them -> the student's logits there.
        """
        settings = self.settings
        if self.projection is not None and hidden is not None:
            mine, theirs, weights = batch.overlap()
            # The rows that count alone: what else the teacher says may hold anything.
            rows, theirs = theirs.unique(return_inverse=True)
            taught: Any = self.answer(batch.teacher, rows)
            projected = self.projection(taught.hidden.float())
            return hidden_matching(hidden, projected, mine, theirs, weights)
        groups = batch.groups()
        mine, theirs = groups.student, groups.teacher
        if self.how == "uld":
            said: Any = self.answer(batch.teacher, theirs.rows[theirs.first])
            return uld(
                logits(mine.rows[mine.first]), logits_of(said), temperature=settings.temperature
            )
        said = self.answer(batch.teacher, theirs.rows)
        vocabulary = batch.vocabulary.to(mine.rows.device)
        return chunk_matching(
            logits(mine.rows),
            logits_of(said),
            mine,
            theirs,
            groups.matched,
            vocabulary.student,
            vocabulary.teacher,
            temperature=settings.temperature,
            divergence=settings.kind_of_divergence,
        )
