"""Whether a language model's answers are numbers, and which weight or operation spoils them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ssl_kd.datasets.blocks import Batch
from ssl_kd.guard.diagnosis import HUGE, Cause, Diagnosis, diagnose
from ssl_kd.guard.microscope import Fault, Microscope
from ssl_kd.teachers.causal import evaluating


def not_finite(model: nn.Module) -> str | None:
    """The first weight that holds a NaN or an infinity, by name; None if none does."""
    named = model.named_parameters()
    return next((name for name, p in named if not bool(torch.isfinite(p).all())), None)


def suspect_weights(model: nn.Module, who: str) -> dict[str, Tensor]:
    """`who weight name` -> each weight that is not finite, or larger than any healthy one.

    All of a large model would be too much to look at in float64.
    """
    return {
        f"{who} weight {name}": p.detach()
        for name, p in model.named_parameters()
        if not bool((p.detach().abs() < HUGE).all())
    }


@torch.no_grad()
def first_fault(
    model: Any,
    batches: Iterable[Batch],
    who: str,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    settings: Mapping[str, Any] | None = None,
) -> tuple[Fault, Diagnosis] | None:
    """Ask a model about batches until its logits are NaN; what made them so, and why.

    A single infinity is no fault: losses and scores take it for a saturated overflow.

    Args:
        model: a causal language model of transformers.
        batches: of its tokens, on its device; small ones, since all logits are held at once.
        who: `teacher` or `student`, for the names of its weights.
        autocast: makes the context that it runs in.
        settings: name in lower case -> value, for advice; see `diagnose`.

    Returns:
        The first operation whose NaN reached the logits, and the diagnosis; None where every batch
        is well.
    """
    with evaluating(model):
        for batch in batches:
            inputs = batch.model_inputs()
            with autocast():
                if not bool(model(**inputs, use_cache=False).logits.isnan().any()):
                    continue
            with Microscope(suspect_weights(model, who)) as scope, autocast():
                fault = scope.fault(model(**inputs, use_cache=False).logits)
            return None if fault is None else (fault, of_a_file(diagnose(fault, settings)))
    return None


def of_a_file(found: Diagnosis) -> Diagnosis:
    """The diagnosis of a weight that no step of the run has written, so that none can mend it."""
    if found.cause != Cause.POISONED_WEIGHT:
        return found
    remedy = "its file is damaged, or the training that made it diverged: take another copy of it"
    return dataclasses.replace(found, remedy=remedy)


def in_words(fault: Fault, diagnosis: Diagnosis) -> str:
    """A fault in one line: operation, place, cause and remedy."""
    where = f"{fault.op}, {'backward' if fault.backward else 'forward'} pass"
    where += f", {fault.place}" if fault.place else ""
    change = "".join(f"; change {advice}" for advice in diagnosis.advice)
    return f"{where}: {diagnosis.cause.value}: {diagnosis.words}. {diagnosis.remedy}{change}"
