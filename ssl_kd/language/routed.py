"""Use a mixture-of-experts teacher whose experts are chosen by ROUTER_MODE."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ssl_kd.datasets.blocks import Batch
from ssl_kd.guard.events import Event
from ssl_kd.language.setting_groups import RouterSettings
from ssl_kd.language.sources import Answer, Source, named_rows
from ssl_kd.losses.teacher_output import TeacherOutput
from ssl_kd.losses.token_distillation import linear_distillation, next_token_targets
from ssl_kd.teachers.causal import without_adapters
from ssl_kd.teachers.frozen import FrozenTeacher, hidden_states
from ssl_kd.teachers.mixture import Gates, Mixture, Routing
from ssl_kd.teachers.router import RouterRecord, RouterStep
from ssl_kd.training.process_group import ProcessGroup

KA_LAMBDA = 0.05  # probability that the experts of a token are sampled in ROUTER_MODE ka


class RoutedTeacher:
    """Return the answers of a mixture-of-experts teacher, and train its router in mode `sar`.

    In `sar`, each step first updates the router by `KL(p || q)`, where q is the fixed student, and
    then returns the answer p of the teacher with the new router. A step of several batches, or on
    several ranks, updates the router once, at the cost of one more forward pass of each model.

    Args:
        frozen: teacher, which must be a mixture of experts.
        router: ROUTER_MODE and the other settings of the router.
        scale_loss: whether to scale the router's loss, for a float16 teacher.
        gradient_checkpointing: whether to recompute the teacher's layers when the router is
            trained, to save memory.

    Attributes:
        record: outcome of the last router step; None before the first.
        ce: cross-entropy of the teacher in that step, in nats per token.
        events: events of router steps that are not yet in the event log.

    References:
        Every Expert Matters, arXiv 2502.12947, 2025, section 3.
    """

    def __init__(
        self,
        frozen: FrozenTeacher,
        router: RouterSettings,
        *,
        scale_loss: bool = False,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.frozen, self.model, self.device = frozen, frozen.model, frozen.device
        self.mixture = Mixture(frozen.model)
        self.mode: Any = router.router_mode
        self.draws = router.draws
        if router.router_weights is not None:
            self.mixture.load_router(router.router_weights)
        self.record: RouterRecord | None = None
        self.ce: float | None = None
        self.events: list[Event] = []
        self.router: RouterStep | None = None
        self.learns = True
        self.ranks = ProcessGroup(frozen.device)
        if self.mode == "sar":
            assert frozen.linear, "no mixture with a softmax gate caps or scales its logits"
            self.router = RouterStep(
                self.mixture,
                learning_rate=router.router_lr,
                gradient_checkpointing=gradient_checkpointing,
                scale_loss=scale_loss,
            )

    def answer(self, batch: Batch, rows: Tensor) -> TeacherOutput:
        """Return the teacher's answer with one choice of experts, without training the router."""
        # From the random state of the step, so that a resumed run samples the same experts.
        seed = int(torch.randint(2**62, ())) if self.mode == "ka" else 0
        generator = torch.Generator().manual_seed(seed)
        with self.mixture.using(Routing(self.mode, KA_LAMBDA, generator=generator)):
            return self.frozen(batch, rows)

    def __call__(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """Return the answer for each draw of experts; in `sar`, train the router first."""
        if self.router is None:
            return [self.answer(batch, rows) for _ in range(self.draws)]
        if self.learns:
            self._learn(self.router, batch, student)
        with self.mixture.using(Routing("sar")):
            return [self.frozen(batch, rows)]

    def _learn(self, router: RouterStep, batch: Batch, student: TeacherOutput) -> None:
        rows, _ = next_token_targets(batch.input_ids, batch.counts)

        def objective() -> Tensor:
            ce, divergence = self._sums(batch, student) / max(len(rows), 1)
            self.ce = float(ce.detach())
            return divergence

        with torch.enable_grad():
            self._note(router.step(objective, batch.documents > 0), batch.rows)

    @contextmanager
    def router_moves_once(
        self,
        batches: Sequence[Batch],
        student: Answer,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> Iterator[None]:
        """Update the router once from all batches of a step; it is fixed in the `with` block.

        Args:
            batches: batches of the step.
            student: function that returns the student's output for a batch, without gradient.
            autocast: function that returns the context in which the student runs.
        """
        if self.router is not None and self.learns:
            self._learn_from_all(self.router, batches, student, autocast)
        with router_fixed(self):
            yield

    def _learn_from_all(
        self,
        router: RouterStep,
        batches: Sequence[Batch],
        student: Answer,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Update the router by the sum of all batches, with the activations of one in memory.

        The load balance is not a sum over batches. A first pass without gradient therefore collects
        all gates and computes its gradient by the gate logits, which the backward pass of each
        batch then uses.
        """
        all_rows = [next_token_targets(b.input_ids, b.counts)[0] for b in batches]
        n_tokens = self.ranks.sums("the router's tokens", sum(map(len, all_rows)))[0]
        masks = [batch.documents > 0 for batch in batches]
        gates = []
        for batch, mask in zip(batches, masks, strict=True):
            with torch.no_grad(), router.routed(mask) as batch_gates:
                self._hidden(batch)
            gates.append(batch_gates)
        all_gates = _joined(gates, self.ranks)
        router.optimizer.zero_grad()
        with torch.enable_grad():
            leaves = [all_gates.logits[i].requires_grad_() for i in sorted(all_gates.logits)]
            penalty = router.regularization(all_gates)
            slopes = torch.autograd.grad(penalty, leaves, retain_graph=True)
            if not router.stopped:
                # The gradient of the load balance by the router weights is equal on all ranks.
                router.backward(penalty / self.ranks.world)
            sums = torch.zeros(2, device=penalty.device)
            sizes = [mask.numel() for mask in masks]
            parts = zip(*(slope.split(sizes) for slope in slopes), strict=True)
            for batch, rows, mask, slope in zip(batches, all_rows, masks, parts, strict=True):
                with router.routed(mask) as batch_gates:
                    with autocast():
                        means = self._sums(batch, student(batch, rows)) / max(n_tokens, 1)
                    layers = zip(sorted(batch_gates.logits), slope, strict=True)
                    pull = sum((batch_gates.logits[i] * part).sum() for i, part in layers)
                    if not router.stopped:
                        router.backward(means[1] + pull)
                sums += means.detach()
        if not router.stopped:
            self.ranks.sum_gradients(self.mixture.router_parameters().values())
        self.ce, divergence = self.ranks.sums("the router's losses", *sums.tolist())
        rows = torch.cat([batch.rows for batch in batches])
        self._note(router.update(divergence + penalty.detach(), all_gates), rows)

    def _hidden(self, batch: Batch) -> Tensor:
        with torch.autocast(self.frozen.device.type, enabled=False):
            return hidden_states(self.model, batch.model_inputs()).flatten(0, 1)

    def _sums(self, batch: Batch, student: TeacherOutput) -> Tensor:
        """Return the summed cross-entropy of the teacher and KL(p || q) with q fixed, `[2]`."""
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
            rows = torch.cat(self.ranks.of_all("the router's rows", rows))
            self.events.append(replace(event, reason=f"{named_rows(rows)}: {event.reason}"))

    def state(self) -> dict[str, Any]:
        """Return the state of the router and its optimizer, for a checkpoint."""
        return {} if self.router is None else self.router.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        if self.router is not None:
            self.router.load_state_dict(state)


@contextmanager
def router_fixed(source: Source | None) -> Iterator[None]:
    """Do not train the router of a teacher in the block, if the teacher has one."""
    if not isinstance(source, RoutedTeacher):
        yield
        return
    before, source.learns = source.learns, False
    try:
        yield
    finally:
        source.learns = before


@dataclass
class _GatesOfAllRanks(Gates):
    """Gates of this rank's tokens, whose sums and means run over the tokens of all ranks.

    Gradients flow only to this rank's tokens.
    """

    ranks: ProcessGroup | None = None

    def mass(self) -> Tensor:
        return self._summed("mass", super().mass())

    def counts(self) -> Tensor:
        return self._summed("counts", super().counts())

    def _mean(self, values: list[Tensor]) -> Tensor:
        sums = torch.stack([v.sum() for v in values])
        sums = self._summed("means", torch.cat([sums, sums.new_tensor([len(values[0])])]))
        return sums[:-1] / sums[-1].clamp(min=1)

    def _summed(self, what: str, x: Tensor) -> Tensor:
        assert self.ranks is not None
        own = x.detach()
        sums = self.ranks.sums(f"the gates' {what}", *own.flatten().tolist())
        return x + (own.new_tensor(sums).view_as(own) - own)


def _joined(parts: Sequence[Gates], ranks: ProcessGroup) -> Gates:
    """Join the gates of several forward passes and of all ranks."""

    def joined(name: str) -> dict[int, Tensor]:
        layers = [getattr(part, name) for part in parts]
        return {i: torch.cat([gates[i] for gates in layers]) for i in layers[0]}

    masks = torch.cat([part.mask for part in parts if part.mask is not None])
    fields = masks, parts[0].n_experts, *map(joined, ("logits", "chosen", "original"))
    return Gates(*fields) if ranks.world == 1 else _GatesOfAllRanks(*fields, ranks=ranks)
