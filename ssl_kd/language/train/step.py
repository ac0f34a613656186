"""Train a student for one step: loss terms, guarded backward pass, and update."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from firstnan.events import Event
from firstnan.faults import Thresholds
from firstnan.loop import Guard
from ssl_kd.core.faults import REMEDIES
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.fault_bundle import FlightRecorder
from ssl_kd.core.runs.process_group import ProcessGroup
from ssl_kd.core.runs.ranks import Ranks
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.models.dtypes import bitsandbytes
from ssl_kd.language.models.finite import in_words
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.settings.groups import TrainingSettings
from ssl_kd.language.teachers.base import Teacher, named_rows
from ssl_kd.language.text.aligned import AlignedBatch
from ssl_kd.language.text.blocks import Batch
from ssl_kd.language.train.fault_explainer import FaultExplainer, examine
from ssl_kd.language.train.objective import Objective, student_side
from ssl_kd.language.train.rows_left_out import FirstPass, rng_state, set_rng_state
from ssl_kd.language.train.success import Success

logger = logging.getLogger(__name__)

T = TypeVar("T")
RESTORE_AFTER = 20  # bad steps in a row before the student is restored, see STOP_AFTER


def check_ranks(ranks: Ranks, batch_size: int, router_mode: str = "native") -> None:
    """Raise SettingsError if BATCH_SIZE or ROUTER_MODE does not support the number of ranks."""
    if router_mode == "sar" and ranks.world > 1:
        raise SettingsError(
            f"ROUTER_MODE is 'sar', but {ranks.world} processes train together, and the router"
            " learns in a single one: start one process, or set ROUTER_MODE to 'all' or 'ka'"
        )
    if batch_size < ranks.world:
        raise SettingsError(
            f"BATCH_SIZE is {batch_size}, the rows of all {ranks.world} ranks together:"
            f" set it to {ranks.world} or more (and lower GRADIENT_ACCUMULATION_STEPS), or start"
            " fewer processes"
        )


def precision_of(run: TrainingSettings) -> Precision:
    """Return the dtypes of a run: MODEL_DTYPE if the device supports it, else suitable ones."""
    asked = {"auto": True, "float32": False}.get(
        run.model_dtype, getattr(torch, run.model_dtype, True)
    )
    if run.model_dtype == "auto" and run.device in ("auto", "cpu"):
        asked = Precision.for_device(run.device).device.type == "cuda"
    precision = Precision.for_device(run.device, asked)
    if run.model_dtype == "float32":
        precision = replace(precision, teacher=torch.float32)
    return precision


def optimizer_package(run: TrainingSettings, device: torch.device) -> Any:
    """Return bitsandbytes if OPTIM needs it, else None; raise an error if it cannot be used."""
    if not run.optim.endswith("8bit"):
        return None
    if run.optim.startswith("paged") and device.type != "cuda":
        raise SettingsError(
            f"OPTIM is {run.optim!r}, but the device is {device}, which has no pages: set OPTIM to"
            " 'adamw_8bit', which computes the same"
        )
    return bitsandbytes(f"OPTIM {run.optim}")


def make_optimizer(
    student: nn.Module, run: TrainingSettings, rate: float, device: torch.device
) -> torch.optim.Optimizer:
    """Return the AdamW of OPTIM; vectors (norms and biases) have no weight decay."""
    trained = [p for p in student.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": run.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options: Any = {
        "lr": rate,
        "betas": (run.adam_beta1, run.adam_beta2),
        "eps": run.adam_epsilon,
    }
    if (package := optimizer_package(run, device)) is not None:
        kinds, is_paged = package.optim, run.optim.startswith("paged")
        return (kinds.PagedAdamW8bit if is_paged else kinds.AdamW8bit)(groups, **options)
    fused = True if device.type in ("cpu", "cuda") else None  # one pass over the weights
    return torch.optim.AdamW(groups, **options, fused=fused)


@dataclass(frozen=True)
class StudentStep:
    """The result of a training step.

    `ce`, in nats per token, is absent if the step had no text. `kd`, absent without a teacher, is
    the divergence times temperature squared in nats per token, or the distance of ALIGN per group
    of tokens.
    """

    terms: dict[str, float]  # mean of each loss term, NaN if it was not finite
    loss: float  # weighted sum of the finite terms
    grad_norm: float  # before clipping
    updated: bool  # whether the student's weights changed
    tokens: int  # target tokens in the batches of all ranks
    router: dict[str, float | None]  # loss, drift and entropy of a router that is trained
    rollouts: dict[str, float | None] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)  # of a term's tokens that were learned

    @property
    def ce(self) -> float | None:
        """The cross-entropy with the text; None if the step had no text."""
        return self.terms.get("ce")

    @property
    def kd(self) -> float | None:
        """The distance to the teacher; None without a teacher."""
        return self.terms.get("kd")

    def learned(self, term: str) -> bool:
        """Return whether a loss term took part in the update of the student."""
        return self.updated and math.isfinite(self.terms.get(term, math.nan))


@dataclass(frozen=True)
class TokenCounts:
    """Numbers of target tokens of a step, over all ranks."""

    terms: dict[str, int]  # divisor of the mean of each term; `kd` may count groups of tokens
    of_text: int  # those among `ce` that the student did not generate

    def per_text_token(self, ce: float) -> float:
        """Return the mean `ce` over all tokens as one over those of text, NaN without any."""
        if self.of_text == self.terms["ce"]:
            return ce
        return ce * (self.terms["ce"] / self.of_text) if self.of_text else math.nan


class DistributedStudent:
    """A student that all ranks train together; DDP averages its gradients."""

    def __init__(self, student: nn.Module, ranks: ProcessGroup) -> None:
        self.ranks = ranks
        self._root: Any = _Root(student)
        if ranks.world > 1:
            # Buffers are constants here; DDP would send them before each forward pass.
            names = [name for name, _ in self._root.named_buffers()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._root, names)
            self._root = DistributedDataParallel(self._root, gradient_as_bucket_view=True)

    def forward(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return `work(*arguments)`, run as the forward pass before a backward pass."""
        with self.ranks.waiting("a forward pass"):
            return self._root(work, *arguments)

    @contextmanager
    def averaged(self, last: bool) -> Iterator[None]:
        """Wrap a forward and backward pass; DDP averages gradients only in the `last` of a step."""
        local = not last and isinstance(self._root, DistributedDataParallel)
        with self._root.no_sync() if local else nullcontext():
            yield


class _Root(nn.Module):
    """A module whose forward pass calls a function, so that DDP's hooks also cover the head."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student = student

    def forward(self, work: Callable[..., T], *arguments: Any) -> T:
        return work(*arguments)


class Distiller(Objective):
    """A student with its loss terms, optimizer and guard.

    Each loss term is a mean over the target tokens of a step, over all batches and ranks; `kd` of a
    teacher with another tokenizer is a mean over groups of tokens. The terms fail separately:

    - A row in which a term is not finite is left out of this term, and an event names the row. The
      divisor of the mean becomes the number of the tokens that remain, over all batches and ranks;
      batches of the step that came before are computed again with it.
    - A term without a finite row is left out of the step.
    - A step without a finite term, or without a token, is skipped.
    - The run ends after STOP_AFTER consecutive steps in which a term lost rows or was left out, or
      in which the student was not updated.

    With `torch.distributed`, every rank creates a distiller and calls `step` equally often.
    """

    def __init__(
        self,
        student: nn.Module,
        settings: LanguageSettings,
        precision: Precision,
        teacher: Teacher | None = None,
        events: Any = None,
        recorder: FlightRecorder | None = None,
    ) -> None:
        super().__init__(student, settings, precision, teacher)
        device = precision.device
        self.ranks = ProcessGroup(device)
        self.distributed = DistributedStudent(student, self.ranks)
        self.optimizer = make_optimizer(student, settings, settings.peak_lr, device)
        self.guard = Guard(
            student,
            self.optimizer,
            thresholds=Thresholds(
                spike_factor=settings.spike_factor,
                restore_after=RESTORE_AFTER,
                stop_after=settings.stop_after,
                max_norm=settings.grad_norm_threshold,
            ),
            clip_grad=settings.clip_grad,
            scaler=precision.scale,
            fresh_optimizer=True,
            events=events,
            advice=REMEDIES,
        )
        self.tokens = 0
        self.learned = dict.fromkeys(self.weights, 0)  # steps in which each term was used
        self.success = Success()
        self.recent: list[StudentStep] = []  # since the last log line
        self.explainer = FaultExplainer(self, self.guard, self.ranks, recorder)

    def step(self, batches: Sequence[Batch | AlignedBatch], learning_rate: float) -> StudentStep:
        """Train on some batches as if they were one large batch.

        Raise TooFewHealthyParts if training cannot continue; the student is then restored to its
        last good state.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self._count(batches)
        whole = self._remaining
        tokens = whole.terms["ce"]
        rng = rng_state(self.precision.device)
        if not tokens:  # no loss, so the guard sees nothing to update by, and counts the step
            event = Event(self.guard.step_number, "batch", "input", "no target token", "skipped")
            self.guard.events.extend([event])
        sums = self._accumulate(batches if tokens else [])
        if self._is_stale:
            self.guard.discard()
            set_rng_state(rng, self.precision.device)
            with self.teacher.fixed():
                sums = self._accumulate(batches, again=True)
        self.tokens += tokens
        if events := self.teacher.take_events():
            self.guard.events.extend([replace(e, step=self.guard.step_number) for e in events])
        router = self.teacher.values()
        # Copied while the guard waits for the device anyway.
        copied = torch.stack(list(sums.values())).to("cpu", non_blocking=True)
        explain = partial(self.explainer.explain, batches, rng)
        try:
            self.guard.before_step()
            explain()  # before the update, with the weights of the step
            self.guard.optimizer.step()
            updated = bool(self.guard.after_step(on_fault=explain))
        finally:
            self.optimizer.zero_grad()
        totals = self.ranks.sums(f"step {self.guard.step_number - 1}, the losses", *copied.tolist())
        means = {n: x / self.ranks.world for n, x in zip(sums, totals, strict=True) if tokens}
        weighted = [weight * means[name] for name, weight in self.weights.items() if name in means]
        finite = [value for value in weighted if math.isfinite(value)]
        if whole.of_text:
            means["ce"] = self._remaining.per_text_token(means["ce"])
        else:
            means.pop("ce", None)
        result = StudentStep(
            terms=means,
            loss=sum(finite) if finite else float("nan"),
            grad_norm=float(self.guard.grad_norm[0]),
            updated=updated,
            tokens=tokens,
            router=router,
        )
        result = replace(result, shares=self._shares(result, whole))
        self.success.add(result.shares)
        self.learned = {name: n + result.learned(name) for name, n in self.learned.items()}
        self.guard.stop_without(
            self.weights, ", in whole or of some rows" if self._has_lost else ""
        )
        return result

    def _accumulate(
        self, batches: Sequence[Batch | AlignedBatch], *, again: bool = False
    ) -> dict[str, Tensor]:
        """Compute the gradients of all batches; return each term's mean on this rank.

        `again` keeps the divisors, from which a first call subtracted the rows that were left out.
        """
        zero = torch.zeros((), device=self.precision.device)
        sums = dict.fromkeys(self._remaining.terms, zero)
        for i, batch in enumerate(batches):
            with self.distributed.averaged(last=i == len(batches) - 1):
                terms = self._learn_from(batch, is_first=i == 0, again=again)
            sums |= {name: sums[name] + term for name, term in terms.items()}
        return sums

    def _learn_from(self, batch: Any, *, is_first: bool, again: bool) -> dict[str, Tensor]:
        """Compute the gradients of one batch; return its share of each term's mean.

        If a term is not finite, the guard asks for the terms without the rows at fault. The tokens
        of these rows leave the divisors, so the gradients of earlier batches of the step are stale.
        The second time (`again`) the divisors are right from the beginning.
        """
        first = FirstPass(batch, rng_state(self.precision.device))
        terms = self._per_token(self.distributed.forward(self.terms, batch, first))

        def without_rows() -> dict[str, Tensor]:
            step = self.guard.step_number
            sums = self.distributed.forward(self.without_sick_rows, first)
            sums, events, lost = first.merge(self.ranks, step, terms, sums, self.lost)
            if not again:
                self.guard.events.extend(events)
                self._has_lost |= bool(events)
                self._subtract(lost)
                self._is_stale |= not is_first
            terms.update(self._per_token(sums))
            return self.weighted(terms)

        self.guard.backward(self.weighted(terms), again=without_rows)
        self.tied.check()
        return {name: term.detach() for name, term in terms.items()}

    def _per_token(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Divide sums over tokens by the numbers of tokens of the whole step."""
        return {name: term / self._divisor(name) for name, term in sums.items()}

    def _count(self, batches: Sequence[Batch | AlignedBatch]) -> None:
        """Count each term's target tokens, and those of text, over all ranks, for a new step."""
        local, text = self.counts(batches), sum(student_side(b).text_tokens for b in batches)
        what = f"step {self.guard.step_number}, the tokens"
        *terms, text = map(int, self.ranks.sums(what, *local.values(), text))
        self._remaining = TokenCounts(dict(zip(local, terms, strict=True)), text)
        self._has_lost = self._is_stale = False

    def _subtract(self, lost: Mapping[str, int]) -> None:
        """Subtract the tokens that all ranks left out of a batch from the divisors."""
        counts, what = self._remaining, f"step {self.guard.step_number}, the tokens left out"
        local = [lost.get(name, 0) for name in (*counts.terms, "text")]
        *terms, text = map(int, self.ranks.sums(what, *local))
        left = {name: n - less for (name, n), less in zip(counts.terms.items(), terms, strict=True)}
        self._remaining = TokenCounts(left, counts.of_text - text)

    def _shares(self, result: StudentStep, whole: TokenCounts) -> dict[str, float]:
        """Return the share of each term's tokens that updated the student in this step."""
        if not result.tokens:
            return dict.fromkeys(self.weights, 0.0)
        return {
            name: self._remaining.terms[name] / whole.terms[name] if result.learned(name) else 0.0
            for name in self.weights
            if name in result.terms and whole.terms[name]
        }

    def _divisor(self, name: str) -> float:
        """Return a term's tokens per rank, because gradients are averaged over ranks."""
        return max(self._remaining.terms[name], 1) / self.ranks.world

    def explain(self, batch: Batch | AlignedBatch, part: str = "model") -> str | None:
        """Run a batch again, check every operation, and describe the first fault and its fix."""
        fault = examine(self, batch, part)
        return None if fault is None else f"{named_rows(batch.rows)}: {in_words(*fault)}"

    def state(self) -> dict[str, Any]:
        """Return all the state that a checkpoint must save."""
        trained = {n: p.detach() for n, p in self.student.named_parameters() if p.requires_grad}
        return {
            "student": trained,
            "optimizer": self.optimizer.state_dict(),
            "guard": self.guard.state_dict(),
            "tokens": self.tokens,
            "learned": self.learned,
            "success": self.success.state(),
            "recent": [dataclasses.asdict(result) for result in self.recent],
            "explained": sorted(self.explainer.explained),
            "router": self.teacher.state(),
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned, on any number of ranks."""
        for name, p in self.student.named_parameters():
            if p.requires_grad:
                p.copy_(state["student"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.settings.optim.startswith("paged"):
            logger.warning("the state of a resumed paged optimizer stays in GPU memory")
        self.guard.load_state_dict(state["guard"])
        self.tokens, self.explainer.explained = state["tokens"], set(state["explained"])
        self.learned |= state["learned"]
        self.success = Success(**state.get("success", {}))
        self.recent = [StudentStep(**row) for row in state["recent"]]
        self.teacher.load(state["router"])
