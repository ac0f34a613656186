"""Use a mixture-of-experts teacher whose experts are chosen by ROUTER_MODE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from firstnan.events import Event
from ssl_kd.language.losses.teacher_output import TeacherOutput
from ssl_kd.language.losses.token_distillation import linear_distillation, next_token_targets
from ssl_kd.language.models.causal import CausalLM, without_adapters
from ssl_kd.language.models.frozen import FrozenTeacher, hidden_states
from ssl_kd.language.models.mixture import Mixture, Routing
from ssl_kd.language.models.router import RouterRecord, RouterStep
from ssl_kd.language.settings.groups import RouterSettings
from ssl_kd.language.teachers.base import Rows, TeacherContext, named_rows
from ssl_kd.language.teachers.live import Live
from ssl_kd.language.text.blocks import Batch

KA_LAMBDA = 0.05  # probability that the experts of a token are sampled in ROUTER_MODE ka


class Routed(Live):
    """A mixture-of-experts teacher, whose router is trained in mode `sar`.

    In `sar`, each batch first updates the router by `KL(p || q)`, where q is the fixed student, and
    then gets the answer p of the teacher with the new router (Every Expert Matters, arXiv
    2502.12947, 2025, section 3). `scale_loss` is for a float16 teacher. The model keeps its own
    experts and router until `begin`.
    """

    def __init__(
        self,
        frozen: FrozenTeacher,
        router: RouterSettings,
        *,
        scale_loss: bool = False,
        gradient_checkpointing: bool = False,
        lms: Sequence[CausalLM] = (),
    ) -> None:
        super().__init__(frozen, lms=lms)
        self.mode: Any = router.router_mode
        self.model = frozen.model
        self.device = frozen.device
        self.draws = router.draws
        self._settings, self._scale_loss = router, scale_loss
        self._checkpointing = gradient_checkpointing
        self.record: RouterRecord | None = None  # of the last router step
        self.ce: float | None = None  # of the teacher in that step, in nats per token
        self.events: list[Event] = []  # not yet in the event log
        self.router: RouterStep | None = None
        self.learns = True

    @classmethod
    def open(cls, context: TeacherContext, rows: Rows) -> Self:
        """Return the teacher, whose loss is scaled in float16."""
        return cls(
            context.frozen[0],
            context.settings,
            scale_loss=context.precision.teacher == torch.float16,
            gradient_checkpointing=context.settings.gradient_checkpointing,
            lms=context.lms,
        )

    def begin(self) -> None:
        """Take control of the experts, load ROUTER_WEIGHTS, and in `sar` make the optimizer."""
        self.mixture = Mixture(self.model)
        if self._settings.router_weights is not None:
            self.mixture.load_router(self._settings.router_weights)
        if self.mode == "sar":
            assert self.frozen[0].linear, "no mixture with a softmax gate caps or scales its logits"
            self.router = RouterStep(
                self.mixture,
                learning_rate=self._settings.router_lr,
                gradient_checkpointing=self._checkpointing,
                scale_loss=self._scale_loss,
            )

    def answer_once(self, batch: Batch, rows: Tensor) -> TeacherOutput:
        """Return the teacher's answer with one choice of experts, without training the router."""
        # From the random state of the step, so that a resumed run samples the same experts.
        seed = int(torch.randint(2**62, ())) if self.mode == "ka" else 0
        generator = torch.Generator().manual_seed(seed)
        with self.mixture.using(Routing(self.mode, KA_LAMBDA, generator=generator)):
            return self.frozen[0](batch, rows)

    def answer(self, batch: Batch, rows: Tensor, student: TeacherOutput) -> list[TeacherOutput]:
        """Return the answer for each draw of experts; in `sar`, train the router first."""
        if self.router is None:
            return [self.answer_once(batch, rows) for _ in range(self.draws)]
        if self.learns:
            self._learn(self.router, batch, student)
        with self.mixture.using(Routing("sar")):
            return [self.frozen[0](batch, rows)]

    def _learn(self, router: RouterStep, batch: Batch, student: TeacherOutput) -> None:
        rows, _ = next_token_targets(batch.input_ids, batch.counts)

        def objective() -> Tensor:
            ce, divergence = self._sums(batch, student) / max(len(rows), 1)
            self.ce = float(ce.detach())
            return divergence

        with torch.enable_grad():
            self.record = router.step(objective, batch.documents > 0)
        if (event := self.record.event) is not None:
            self.events.append(replace(event, reason=f"{named_rows(batch.rows)}: {event.reason}"))

    def _hidden(self, batch: Batch) -> Tensor:
        with torch.autocast(self.frozen[0].device.type, enabled=False):
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

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Do not train the router in the block."""
        before, self.learns = self.learns, False
        try:
            yield
        finally:
            self.learns = before

    def as_loaded(self) -> AbstractContextManager[None]:
        """Use the router in the block that the model was loaded with."""
        return self.mixture.original_router()

    def trained(self) -> dict[str, Tensor]:
        """Return the weights of the router, if it is trained."""
        if self.router is None:
            return {}
        return {f"router {name}": p for name, p in self.mixture.router_parameters().items()}

    def take_events(self) -> list[Event]:
        """Return the events of the router since the last call."""
        events, self.events = self.events, []
        return events

    def values(self) -> dict[str, float | None]:
        """Return the values of the last router step for the log."""
        if self.record is None:
            return {}
        return {
            "router": self.record.loss,
            "router_drift": self.record.drift,
            "router_entropy": self.record.entropy,
            "teacher_ce": self.ce,
        }

    def state(self) -> dict[str, Any]:
        """Return the state of the router and its optimizer, for a checkpoint."""
        return {} if self.router is None else self.router.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        if self.router is not None:
            self.router.load_state_dict(state)

    def save(self, folder: Path) -> None:
        """Write the router to `router.safetensors`, if it was trained."""
        if self.router is not None:
            self.mixture.save_router(folder / "router.safetensors")
