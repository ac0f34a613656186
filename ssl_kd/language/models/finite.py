"""Find the weight or the operation that makes a language model's outputs NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from firstnan.diagnosis import HUGE, Cause, Diagnosis
from firstnan.microscope import Fault, Microscope
from ssl_kd.core.faults import diagnose
from ssl_kd.language.models.causal import evaluating
from ssl_kd.language.text.blocks import Batch


def not_finite(model: nn.Module) -> str | None:
    """Return the name of the first weight with a NaN or an infinity; None if there is none."""
    named = model.named_parameters()
    return next((name for name, p in named if not bool(torch.isfinite(p).all())), None)


def suspect_weights(model: nn.Module, owner: str) -> dict[str, Tensor]:
    """Return the weights, named `owner weight name`, that are not finite or implausibly large."""
    return {
        f"{owner} weight {name}": p.detach()
        for name, p in model.named_parameters()
        if not bool((p.detach().abs() < HUGE).all())
    }


@torch.no_grad()
def first_fault(
    model: Any,
    batches: Iterable[Batch],
    owner: str,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    known: Mapping[str, Any] | None = None,
) -> tuple[Fault, Diagnosis] | None:
    """Run a model on small batches until its logits contain a NaN, and find its operation.

    An infinity among the logits is not a fault, because losses and scores treat it as a saturated
    overflow. `known` holds settings by name in lower case, from which the diagnosis gives advice.
    """
    with evaluating(model):
        for batch in batches:
            inputs = batch.model_inputs()
            with autocast():
                if not bool(model(**inputs, use_cache=False).logits.isnan().any()):
                    continue
            with Microscope(suspect_weights(model, owner)) as scope, autocast():
                fault = scope.fault(model(**inputs, use_cache=False).logits)
            return None if fault is None else (fault, of_a_file(diagnose(fault, known)))
    return None


def of_a_file(diagnosis: Diagnosis) -> Diagnosis:
    """Adapt the remedy in a diagnosis of a bad weight to a weight that was read from a file."""
    if diagnosis.cause != Cause.POISONED_WEIGHT:
        return diagnosis
    remedy = "the model's file is damaged, or its training diverged: use another copy of the file"
    return dataclasses.replace(diagnosis, remedy=remedy)


def in_words(fault: Fault, diagnosis: Diagnosis) -> str:
    """Describe a fault in one line, with its operation, place, cause and remedy."""
    where = f"{fault.op}, {'backward' if fault.backward else 'forward'} pass"
    where += f", {fault.place}" if fault.place else ""
    change = "".join(f"; change {advice}" for advice in diagnosis.advice)
    return f"{where}: {diagnosis.cause.value}: {diagnosis.words}. {diagnosis.remedy}{change}"
