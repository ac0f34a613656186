"""`ssl_kd replay BUNDLE`: one head's step, run again under the microscope, and what it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssl_kd.guard.health import Stage, is_healthy
from ssl_kd.guard.microscope import Diagnosis, Fault, Microscope, diagnose
from ssl_kd.guard.precision import Precision
from ssl_kd.guard.recorder import Bundle, load_bundle
from ssl_kd.heads import HeadBank, head_maker
from ssl_kd.vision.step import HeadTrainer, Objective, StepResult
from ssl_kd.vision.train import HeadFault

_HEAD = ("head", "hidden_dim", "bottleneck_dim")


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
        rows = [("fault", f"{bundle.part}, step {bundle.step}: {bundle.event.reason}")]
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
            if bundle.event.stage == Stage.SPIKE.name.lower():
                rows.append(("change", f"LEARNING_RATE {rate:g} -> {rate / 10:g}"))
        else:
            rows.append(("seen", "run again on the CPU, the same step is healthy"))
            rows.append(
                (
                    "meaning",
                    "the fault came from outside these numbers: a bit flipped in memory or on the "
                    "device, a kernel of that device, or a test that put it there. If it comes "
                    "back, test the memory and run with --device cpu",
                )
            )
        return "\n".join(f"{name:<9}{value}" for name, value in rows)


def bundle_of(
    trainer: HeadTrainer, fault: HeadFault, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What to hand to `FlightRecorder.record` after a step that left a head out.

    Such a head's state is what it was before the step, so it may be gathered afterwards, as long as
    no later step has updated it.

    Args:
        trainer: as the step left it.
        fault: the head and its step.
        settings: of the run; names as in `VisionSettings`.
    """
    state = trainer.state.rows(slice(fault.head, fault.head + 1))
    plain = {
        k: v for k, v in settings.items() if v is None or isinstance(v, bool | int | float | str)
    }
    replay = {
        "replay": {
            "n_clusters": trainer.n_clusters,
            "learning_rate": fault.learning_rate,
            "student": str(trainer.precision.student).removeprefix("torch."),
            "scale": trainer.precision.scale,
            "device": str(trainer.precision.device),
        }
    }
    return {
        "part": fault.event.part,
        "event": fault.event,
        "step": fault.event.step,
        "indices": fault.samples,
        "tensors": state.tensors() | {"views": fault.views},
        "settings": plain | dataclasses.asdict(trainer.objective) | replay,
    }


def replay(path: str | Path) -> Report:
    """Run the step of a bundle again, on the CPU, under the microscope.

    With `INSTANCE_WEIGHT` `mean` the weights are this head's own: bounded and summing to one like
    the mean, so what becomes NaN is the same.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: it is damaged, or no bundle.
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
    trainer = _trainer(bundle)
    views, state = bundle.tensors["views"], trainer.state
    named = {"input": views, "marginal": state.marginal, "loss scale": state.scale}
    for owner in ("student", "teacher"):
        weights = trainer.bank.unflatten(getattr(state, owner))
        named |= {f"{owner} weight {name}": weight for name, weight in weights.items()}
    with (
        trainer.bank.draws_seeded(hash((trainer.objective.seed, bundle.step))),
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
    sick = int(result.stage) in (Stage.TEACHER, Stage.LOSS, Stage.GRADIENT)
    return scope.fault() if fault is None and sick else fault


def _trainer(bundle: Bundle) -> HeadTrainer:
    settings, how = bundle.settings, bundle.settings["replay"]
    dim = bundle.tensors["views"].shape[-1]
    options = {name: settings[name] for name in _HEAD if name in settings}
    make = head_maker(options.pop("head"), dim, how["n_clusters"], **options)
    precision = Precision(
        device=torch.device("cpu"),
        teacher=torch.float32,
        student=getattr(torch, how["student"]),
        scale=how["scale"],
        why="a replay",
    )
    names = [field.name for field in dataclasses.fields(Objective)]
    objective = Objective(**{name: settings[name] for name in names})
    trainer = HeadTrainer(HeadBank(make, 1), objective, precision, how["n_clusters"])
    trainer.load(bundle.tensors)
    return trainer


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
