"""`ssl_kd replay BUNDLE`: one head's step, run again under the microscope, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssl_kd.files import CorruptFileError
from ssl_kd.guard.faults import Stage, is_healthy
from ssl_kd.guard.microscope import Diagnosis, Fault, Microscope, diagnose
from ssl_kd.guard.precision import Precision
from ssl_kd.guard.recorder import Bundle, has_fields, load_bundle
from ssl_kd.seeds import seed_of
from ssl_kd.settings import SettingsError
from ssl_kd.vision.fit import make_trainer
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.step import HeadTrainer, StepResult
from ssl_kd.vision.train import HeadFault

_REPLAY = {"learning_rate": float, "student": str, "scale": bool, "device": str, "exact": bool}
_STUDENTS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Report:
    """What a replay found; as a string, what a person reads.

    Attributes:
        bundle: what was run again.
        reproduced: whether the step went wrong again.
        fault: the first operation whose output was not finite, if there is one.
        diagnosis: why, and what to change.
        grad_norm: of the replayed step.
    """

    bundle: Bundle
    reproduced: bool
    fault: Fault | None
    diagnosis: Diagnosis | None
    grad_norm: float

    def __str__(self) -> str:
        """A few lines: what, where, inputs, cause, what to change."""
        bundle, fault, diagnosis = self.bundle, self.fault, self.diagnosis
        event, exact = bundle.event, bundle.settings["replay"]["exact"]
        rows = [("fault", f"{event.part}, step {event.step}: {event.reason}")]
        if not exact:
            rows.append(("note", "the state is of a later step; the fault may not show"))
        if fault is not None and diagnosis is not None:
            where = f"backward pass ({fault.node})" if fault.backward else "forward pass"
            rows.append(("first op", f"{fault.op}, {where}"))
            rows += [("at", str(fault.place))] if fault.place else []
            rows += [("input", str(facts)) for facts in fault.inputs]
            rows += [("output", str(facts)) for facts in fault.outputs]
            rows.append(("cause", f"{diagnosis.cause.value}: {diagnosis.words}"))
            rows += [("sample", sample)] if (sample := _sample(bundle, fault)) else []
            rows += [("change", str(advice)) for advice in diagnosis.advice]
            rows.append(("remedy", diagnosis.remedy))
        elif self.reproduced:
            rate = bundle.settings["learning_rate"]
            rows.append(("seen", f"no NaN or inf; the gradient's norm is {self.grad_norm:.3g}"))
            if Stage.of(event) is Stage.SPIKE:
                rows.append(("change", f"LEARNING_RATE {rate:g} -> {rate / 10:g}"))
        else:
            device = bundle.settings["replay"]["device"]
            seen = f"recorded on {device}; run again on the CPU, the same step is healthy"
            rows.append(("seen", seen))
            if exact:
                meaning = (
                    "the fault came from outside these numbers: a bit flipped in memory or on the "
                    "device, a kernel of that device, or a test that put it there. If it comes "
                    "back, test the memory and run with --device cpu"
                )
                rows.append(("meaning", meaning))
        return "\n".join(f"{name:<9}{value}" for name, value in rows)


def bundle_of(trainer: HeadTrainer, fault: HeadFault, settings: Mapping[str, Any]) -> Bundle:
    """What to hand to `FlightRecorder.record` after a step that left a head out.

    Args:
        trainer: of the run.
        fault: the head, its step, and its state before it.
        settings: of the run: all of `VisionSettings`.
    """
    replay = {
        "learning_rate": fault.learning_rate,
        "student": str(trainer.precision.student).removeprefix("torch."),
        "scale": trainer.precision.scale,
        "device": str(trainer.precision.device),
        "exact": fault.exact,
    }
    return Bundle(
        event=fault.event,
        indices=fault.samples,
        tensors=fault.before | {"views": fault.views},
        settings={**settings, "replay": replay},
    )


def replay(path: str | Path) -> Report:
    """Run the step of a bundle again, on the CPU, under the microscope.

    With `INSTANCE_WEIGHT` `mean` the weights are this head's own: bounded and summing to one like
    the mean, so what becomes NaN is the same.

    The head's class is imported by the name in the bundle, and an import runs code: a bundle from
    somebody else can name any module, so replay only bundles that you trust.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: it is damaged, no bundle, or of another version's settings.
        ValueError: the batch was left out of it, it is not of this mode, or its head cannot be
            imported.
    """
    bundle = load_bundle(path)
    if "replay" not in bundle.settings:
        raise ValueError(f"{path} is not a step of the vision mode, which alone can be run again")
    if bundle.left_out:
        raise ValueError(
            f"{path} cannot be run again: {', '.join(bundle.left_out)} was over its size limit"
        )
    trainer = _trainer(path, bundle)
    views, state = bundle.tensors["views"], trainer.state
    named = {"input": views, "marginal": state.marginal, "loss scale": state.scale}
    for owner in ("student", "teacher"):
        weights = trainer.bank.unflatten(getattr(state, owner))
        named |= {f"{owner} weight {name}": weight for name, weight in weights.items()}
    with (
        trainer.bank.draws_seeded(seed_of(trainer.settings.seed, bundle.event.step)),
        Microscope(named) as scope,
    ):
        result = trainer.step(views, bundle.settings["replay"]["learning_rate"])
    fault = _fault(scope, result, views)
    return Report(
        bundle=bundle,
        reproduced=not bool(is_healthy(result.stage).all()) or bool(result.bad.any()),
        fault=fault,
        diagnosis=None if fault is None else diagnose(fault, bundle.settings),
        grad_norm=float(result.grad_norm),
    )


def _fault(scope: Microscope, result: StepResult, views: Tensor) -> Fault | None:
    # The views come last: the step leaves out a row that is not finite, so it harms nothing.
    fault = scope.fault(result.loss, result.grad_norm, views)
    sick = Stage(int(result.stage)).kind.not_finite
    return scope.fault() if fault is None and sick else fault


def _trainer(path: str | Path, bundle: Bundle) -> HeadTrainer:
    """The head as it was before the step.

    Raises:
        CorruptFileError: the bundle does not hold what such a step is computed from.
    """
    settings, tensors = dict(bundle.settings), bundle.tensors
    how = settings.pop("replay")
    views, marginal = tensors.get("views"), tensors.get("marginal")
    if not has_fields(how, _REPLAY) or how["student"] not in _STUDENTS:
        raise _damaged(path, "its replay settings are not those of a step")
    if (
        views is None
        or (views.ndim, views.dtype, views.layout) != (3, torch.float32, torch.strided)
        or len(views) < 2
        or not views.numel()
    ):
        raise _damaged(path, "views are not float32 [view, batch, dim], two views or more")
    if bundle.indices.shape != views.shape[:2] or bundle.indices.dtype != torch.int64:
        raise _damaged(path, "indices are not int64 [view, batch], one for each embedding")
    if marginal is None or marginal.ndim != 2 or marginal.shape[1] < 2:
        raise _damaged(path, "marginal is not [1, cluster]")
    if odd := settings.keys() ^ VisionSettings.rules().keys():
        names = ", ".join(sorted(map(str, odd)))
        raise _damaged(path, f"its settings are not those of this version: {names}")
    try:
        run = VisionSettings(**settings).replace(n_heads=1)
    except SettingsError as error:
        raise _damaged(path, str(error)) from error
    precision = Precision(
        device=torch.device("cpu"),
        teacher=torch.float32,
        student=getattr(torch, how["student"]),
        scale=how["scale"],
        why="a replay",
    )
    trainer = make_trainer(run, views.shape[2], marginal.shape[1], precision)
    for name, mine in trainer.state.tensors().items():
        saved = tensors.get(name)
        kind = (mine.shape, mine.dtype, mine.layout)
        if saved is None or (saved.shape, saved.dtype, saved.layout) != kind:
            words = str(mine.dtype).removeprefix("torch.")
            raise _damaged(path, f"{name} is not {words} {list(mine.shape)}")
        mine.copy_(saved)
    return trainer


def _damaged(path: str | Path, reason: str) -> CorruptFileError:
    return CorruptFileError(f"{path} cannot be run again: {reason}. Expected a bundle of a run.")


def _sample(bundle: Bundle, fault: Fault) -> str | None:
    """Which sample of the data a poisoned input row is."""
    facts = fault.named["input"]
    if fault.poisoned == "input" and facts.first_bad is not None:
        view, position = facts.first_bad[:2]
    elif facts.outliers:
        largest = bundle.tensors["views"].abs().amax(2)
        view, position = divmod(int(largest.argmax()), largest.shape[1])
    else:
        return None
    return f"row {int(bundle.indices[view, position])} of the training data"
