"""Run the faulty step of a head again, and report the first operation that produced NaN or inf."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from firstnan.faults import Stage, is_healthy
from firstnan.microscope import Fault, Microscope
from ssl_kd.core.errors import InputError
from ssl_kd.core.faults import CHANGES, diagnose
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.fault_bundle import DTYPES, Bundle, Replay, damaged, has_fields, load_bundle
from ssl_kd.core.seeds import seed_of
from ssl_kd.core.settings import SettingsError
from ssl_kd.core.settings.import_paths import path_of_file
from ssl_kd.vision.fit import make_trainer
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train.heads import OWN_HEADS
from ssl_kd.vision.train.learner import HeadFault
from ssl_kd.vision.train.objectives import OBJECTIVES
from ssl_kd.vision.train.step import HeadTrainer

_REPLAY = {
    "mode": str,
    "learning_rate": float,
    "student": str,
    "scale": bool,
    "device": str,
    "exact": bool,
}


def bundle_of(trainer: HeadTrainer, fault: HeadFault, values: Mapping[str, Any]) -> Bundle:
    """Return a bundle for a step in which a head was faulty; `values` are the run's settings."""
    replay = {
        "mode": "vision",
        "learning_rate": fault.learning_rate,
        "student": str(trainer.precision.student).removeprefix("torch."),
        "scale": trainer.precision.scale,
        "device": str(trainer.precision.device),
        "exact": fault.exact,
    }
    tensors = fault.before | {"views": fault.views}
    if fault.targets is not None:
        tensors["given"] = fault.targets
    return Bundle(fault.event, fault.samples, tensors, {**values, "replay": replay})


def replay(path: str | Path, *, head: str | None = None, loss: str | None = None) -> Replay:
    """Run the recorded step on the CPU again, and trace each operation to locate the fault.

    `head` and `loss` are import paths, required for classes outside this library: an import runs
    code, so a path in the file is not trusted. With INSTANCE_WEIGHT `mean`, this head's own weights
    replace the mean over heads; both sum to one, so the same values become NaN.
    """
    bundle = load_bundle(path)
    if "replay" not in bundle.settings:
        raise InputError(f"{path} is not a step that can be run again: no replay settings")
    if bundle.left_out:
        raise InputError(
            f"{path} cannot be run again: {', '.join(bundle.left_out)} was over its size limit"
        )
    trainer = _trainer(path, bundle, head, loss)
    views, state = bundle.tensors["views"], trainer.state
    named = {"input": views, "marginal": state.marginal, "loss scale": state.scale}
    for owner in ("student", "teacher"):
        weights = trainer.bank.unflatten(getattr(state, owner))
        named |= {f"{owner} weight {name}": weight for name, weight in weights.items()}
    with (
        trainer.bank.draws_seeded(seed_of(trainer.settings.seed, bundle.step)),
        Microscope(named) as scope,
    ):
        rate = bundle.settings["replay"]["learning_rate"]
        result = trainer.step(views, rate, fixed_targets=bundle.tensors.get("given"))
    # Views are checked last: rows with NaN are left out of the step, so they affect no result.
    fault = scope.fault(result.loss, result.grad_norm, views)
    if fault is None and trainer.recovery.kinds[int(result.stage)].kind.not_finite:
        fault = scope.fault()
    reproduced = not bool(is_healthy(result.stage).all()) or bool(result.bad.any())
    return Replay(
        bundle=bundle,
        reproduced=reproduced,
        fault=fault,
        diagnosis=fault and diagnose(fault, bundle.settings, VisionSettings.learning_rate),
        sample="" if fault is None else _sample(bundle, fault),
        seen=_rows(bundle, float(result.grad_norm)) if reproduced else (),
    )


def _rows(bundle: Bundle, norm: float) -> tuple[tuple[str, str], ...]:
    """Return the rows of the report for a faulty step without a NaN."""
    rows = [("seen", f"no NaN or inf; the gradient's norm is {norm:.3g}")]
    stage = Stage.of(bundle.event)
    if stage is Stage.SPIKE:
        rate = bundle.settings["learning_rate"]
        rows.append(("change", f"LEARNING_RATE {rate:g} -> {rate / 10:g}"))
    if stage is not None and not stage.kind.not_finite and bundle.event.stage in CHANGES:
        rows.append(("remedy", CHANGES[bundle.event.stage]))
    return tuple(rows)


def _trainer(path: str | Path, bundle: Bundle, head: str | None, loss: str | None) -> HeadTrainer:
    """Return the trainer in its state before the step; raise CorruptFileError on missing data."""
    settings, tensors = dict(bundle.settings), bundle.tensors
    options = settings.pop("replay")
    views, marginal = tensors.get("views"), tensors.get("marginal")
    if not has_fields(options, _REPLAY) or options["student"] not in DTYPES:
        raise damaged(path, "the replay settings are incomplete or have a wrong type")
    if (
        views is None
        or (views.ndim, views.dtype, views.layout) != (3, torch.float32, torch.strided)
        or len(views) < 2
        or not views.numel()
    ):
        raise damaged(path, "views are not float32 [view, batch, dim] with two views or more")
    if bundle.indices.shape != views.shape[:2] or bundle.indices.dtype != torch.int64:
        raise damaged(path, "indices are not int64 [view, batch], one index per embedding")
    if marginal is None or marginal.ndim != 2 or marginal.shape[1] < 2:
        raise damaged(path, "marginal is not [1, cluster]")
    targets = tensors.get("given")
    if targets is not None and not (
        (targets.dtype, targets.shape) == (torch.int64, (1, *views.shape[:2]))
        and ((0 <= targets) & (targets < marginal.shape[1])).all()
    ):
        raise damaged(path, "the tensor `given` is not int64 [1, view, batch] of clusters")
    if odd := settings.keys() ^ VisionSettings.rules().keys():
        names = ", ".join(sorted(map(str, odd)))
        raise damaged(path, f"its settings are not those of this version: {names}")
    try:
        run = VisionSettings(**settings).replace(n_heads=1)
    except SettingsError as error:
        raise damaged(path, str(error)) from error
    for what, named, ours in (("head", head, OWN_HEADS), ("loss", loss, OBJECTIVES)):
        value = getattr(run, what)
        way = f"--{what} {value}"
        value = path_of_file(value, named, ours, what=what, file=path, way=way)
        run = run.replace(**{what: value})
    precision = Precision(
        device=torch.device("cpu"),
        teacher=torch.float32,
        student=getattr(torch, options["student"]),
        scale=options["scale"],
        why="a replay",
    )
    trainer = make_trainer(run, views.shape[2], marginal.shape[1], precision)
    trainer.by_loss.fill_(targets is None)
    for name, mine in trainer.state.tensors().items():
        saved = tensors.get(name)
        kind = (mine.shape, mine.dtype, mine.layout)
        if saved is None or (saved.shape, saved.dtype, saved.layout) != kind:
            dtype = str(mine.dtype).removeprefix("torch.")
            raise damaged(path, f"{name} is not {dtype} {list(mine.shape)}")
        mine.copy_(saved)
    return trainer


def _sample(bundle: Bundle, fault: Fault) -> str:
    """Return which sample has NaN or outliers in its embedding; empty if none has."""
    facts = fault.named["input"]
    if fault.poisoned == "input" and facts.first_bad is not None:
        view, position = facts.first_bad[:2]
    elif facts.outliers:
        largest = bundle.tensors["views"].abs().amax(2)
        view, position = divmod(int(largest.argmax()), largest.shape[1])
    else:
        return ""
    return f"row {int(bundle.indices[view, position])} of the training data"
