"""A mixture-of-experts teacher with a choice of experts, whose router may learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ssl_kd.datasets.blocks import Batch
from ssl_kd.guard.events import Event
from ssl_kd.guard.seeds import seed_of, seeded
from ssl_kd.language.setting_groups import RouterSettings
from ssl_kd.language.sources import Answer, Source, named_rows
from ssl_kd.losses.teacher_output import TeacherOutput
from ssl_kd.losses.token_distillation import linear_distillation, next_token_targets
from ssl_kd.teachers.causal import without_adapters
from ssl_kd.teachers.frozen import FrozenTeacher, hidden_states
from ssl_kd.teachers.mixture import Gates, Mixture, Routing
from ssl_kd.teachers.router import RouterRecord, RouterStep
from ssl_kd.training.process_group import ProcessGroup

KA_LAMBDA = 0.05
"""Probability that the experts of a token are sampled in ROUTER_MODE ka."""


class Routed:
    """A mixture-of-experts teacher whose experts are chosen by ROUTER_MODE.

    In `sar` each step first moves the router towards the student, by `KL(p || q)` with the student
    q fixed, then the teacher answers with the router as it is now. A step of several batches is
    one step of the router, too; it costs one more forward pass of each model over them. So is a
    step of several ranks, whose routers stay the same.

    Args:
        frozen: the teacher, a mixture of experts.
        settings: ROUTER_MODE and those of the router.
        scale_loss: for a float16 teacher.
        gradient_checkpointing: of the teacher, where its router learns.

    Attributes:
        record: of the last router step; None before the first, and where no router learns.
        ce: the teacher's own cross-entropy in that step, nats a token.
        model: the teacher's.
        events: of the router steps, for the event log to fetch.

    References:
        Every Expert Matters, arXiv 2502.12947, 2025, section 3.
    """

    def __init__(
        self,
        frozen: FrozenTeacher,
        settings: RouterSettings,
        *,
        scale_loss: bool = False,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.frozen, self.settings = frozen, settings
        self.model = frozen.model
        self.mixture = Mixture(frozen.model)
        frozen.keep(self.mixture.router_parameters().values())
        if settings.router_weights is not None:
            self.mixture.load_router(settings.router_weights)
        self.record: RouterRecord | None = None
        self.ce: float | None = None
        self.events: list[Event] = []
        self.router: RouterStep | None = None
        self.learns = True
        self.team = ProcessGroup(frozen.device)
        if settings.router_mode == "sar":
            assert frozen.linear, "no mixture with a softmax gate caps or scales its logits"
            self.router = RouterStep(
                self.mixture,
                learning_rate=settings.router_lr,
                gradient_checkpointing=gradient_checkpointing,
                scale_loss=scale_loss,
            )

    def answer(self, batch: Batch, rows: Tensor) -> TeacherOutput:
        """One draw of a router that does not learn."""
        # Drawn from the step's own seed, so a resumed run samples the same experts.
        mode: Any = self.settings.router_mode
        seed = int(torch.randint(2**62, ())) if mode == "ka" else 0
        generator = torch.Generator().manual_seed(seed)
        with self.mixture.using(Routing(mode, KA_LAMBDA, generator=generator)):
            return self.frozen(batch, rows)

    def __call__(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """As `Source`."""
        settings = self.settings
        if self.router is None:
            return [self.answer(batch, rows) for _ in range(settings.draws)]
        if self.learns:
            self._learn(self.router, batch, student)
        with self.mixture.using(Routing("sar")):
            return [self.frozen(batch, rows)]

    def _learn(self, router: RouterStep, batch: Batch, student: TeacherOutput) -> None:
        """Move the router, and nothing else, towards what the student can follow."""
        rows, _ = next_token_targets(batch.input_ids, batch.counts)

        def objective() -> Tensor:
            ce, divergence = self._sums(batch, student) / max(len(rows), 1)
            self.ce = float(ce.detach())
            return divergence

        with torch.enable_grad(), self.frozen.on_device():
            self._note(router.step(objective, batch.documents > 0), batch.rows)

    @contextmanager
    def moved_once(
        self,
        batches: Sequence[Batch],
        student: Answer,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> Iterator[None]:
        """Let the router move once by all batches of a step, as by one large one.

        Args:
            batches: what the source is asked about inside.
            student: answers a batch, without gradient.
            autocast: of the student.
        """
        if self.router is not None and self.learns:
            with self.frozen.on_device():
                self._learn_from_all(batches, student, autocast)
        with fixed(self):
            yield

    def _learn_from_all(
        self,
        batches: Sequence[Batch],
        student: Answer,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """`_learn` from the sum of batches, with the activations of one at a time.

        The load balance is of the whole and no sum over batches: all gates are looked at first,
        without gradient, for its slope there; this slope then goes into each batch's own pass.
        """
        router, every = self.router, [next_token_targets(b.input_ids, b.counts)[0] for b in batches]
        assert router is not None
        tokens = self.team.sums("the router's tokens", sum(map(len, every)))[0]
        n, masks = max(tokens, 1), [batch.documents > 0 for batch in batches]
        gates = []
        for batch, mask in zip(batches, masks, strict=True):
            with torch.no_grad(), router.routed(mask) as seen:
                self._hidden(batch)
            gates.append(seen)
        whole, tokens = _joined(gates, self.team), [mask.numel() for mask in masks]
        router.optimizer.zero_grad()
        with torch.enable_grad():
            leaves = [whole.logits[layer].requires_grad_() for layer in sorted(whole.logits)]
            penalty = router.regularization(whole)
            slopes = torch.autograd.grad(penalty, leaves, retain_graph=True)
            if not router.stopped:
                # Its gradient of the weights themselves, the same on each rank.
                router.backward(penalty / self.team.world)
            sums = torch.zeros(2, device=penalty.device)
            parts = zip(*(slope.split(tokens) for slope in slopes), strict=True)
            for batch, rows, mask, slope in zip(batches, every, masks, parts, strict=True):
                with router.routed(mask) as seen:
                    with autocast():
                        found = self._sums(batch, student(batch, rows)) / n
                    layers = zip(sorted(seen.logits), slope, strict=True)
                    pull = sum((seen.logits[layer] * part).sum() for layer, part in layers)
                    if not router.stopped:
                        router.backward(found[1] + pull)
                sums += found.detach()
        if not router.stopped:
            self.team.sum_gradients(self.mixture.router_parameters().values())
        self.ce, divergence = self.team.sums("the router's losses", *sums.tolist())
        rows = torch.cat([batch.rows for batch in batches])
        self._note(router.update(divergence + penalty.detach(), whole), rows)

    def _hidden(self, batch: Batch) -> Tensor:
        with torch.autocast(self.frozen.device.type, enabled=False):
            return hidden_states(self.model, batch.model_inputs()).flatten(0, 1)

    def _sums(self, batch: Batch, student: TeacherOutput) -> Tensor:
        """`[2]`, sums over the batch: the teacher's cross-entropy, and KL(p || q) with q fixed."""
        rows, targets = next_token_targets(batch.input_ids, batch.counts)
        head = without_adapters(self.model).get_output_embeddings()
        return linear_distillation(
            self._hidden(batch)[rows],
            head.weight,
            head.bias,
            targets,
            [student],
            temperature=1.0,
            divergence="reverse_kl",  # KL(p || q), p in the student's place
            weights=(0.0, 1.0),
        )

    def _note(self, record: RouterRecord, rows: Tensor) -> None:
        self.record = record
        if (event := record.event) is not None:
            rows = torch.cat(self.team.of_all("the router's rows", rows))
            self.events.append(replace(event, reason=f"{named_rows(rows)}: {event.reason}"))

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the router and its optimizer."""
        return {} if self.router is None else self.router.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        if self.router is not None:
            self.router.load_state_dict(state)


class RoutedDraw:
    """One draw of experts for a cache: always the same for a batch of the same rows.

    The same rows in other batches are another draw.

    Args:
        routed: a mixture whose router does not learn.
        number: which draw.
        seed: of the run.
    """

    def __init__(self, routed: Routed, number: int, seed: int = 0) -> None:
        self.routed, self.number, self.seed = routed, number, seed
        self.device = routed.frozen.device

    def __call__(self, batch: Batch, rows: Tensor) -> Any:
        """As a `FrozenTeacher`."""
        seed = seed_of(self.seed, self.number, *batch.rows.tolist())
        with seeded(seed):
            return self.routed.answer(batch, rows)


@contextmanager
def fixed(source: Source | None) -> Iterator[None]:
    """Ask a teacher without its router learning from it."""
    if not isinstance(source, Routed):
        yield
        return
    before, source.learns = source.learns, False
    try:
        yield
    finally:
        source.learns = before


@dataclass
class _GatesOfAll(Gates):
    """The gates of a rank's tokens, with sums and means over the tokens of all ranks.

    Gradients are those of this rank's tokens.
    """

    team: ProcessGroup | None = None

    def mass(self) -> Tensor:
        return self._summed("mass", super().mass())

    def counts(self) -> Tensor:
        return self._summed("counts", super().counts())

    def _mean(self, values: list[Tensor]) -> Tensor:
        sums = torch.stack([v.sum() for v in values])
        found = self._summed("means", torch.cat([sums, sums.new_tensor([len(values[0])])]))
        return found[:-1] / found[-1].clamp(min=1)

    def _summed(self, what: str, x: Tensor) -> Tensor:
        assert self.team is not None
        here = x.detach()
        numbers = self.team.sums(f"the gates' {what}", *here.flatten().tolist())
        return x + (here.new_tensor(numbers).view_as(here) - here)


def _joined(parts: Sequence[Gates], team: ProcessGroup) -> Gates:
    """The gates of several forward passes as of one, on all ranks."""

    def every(name: str) -> dict[int, Tensor]:
        layers = [getattr(part, name) for part in parts]
        return {layer: torch.cat([some[layer] for some in layers]) for layer in layers[0]}

    masks = [part.mask for part in parts if part.mask is not None]
    names = ("logits", "chosen", "original")
    whole = torch.cat(masks), parts[0].n_experts, *map(every, names)
    return Gates(*whole) if team.world == 1 else _GatesOfAll(*whole, team=team)
