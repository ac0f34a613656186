"""`ssl_kd replay BUNDLE` for a step of a student: run it again with every operation checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssl_kd.datasets.aligned import AlignedBatch
from ssl_kd.datasets.blocks import Batch
from ssl_kd.errors import InputError
from ssl_kd.guard.precision import Precision
from ssl_kd.language.fault_explainer import examine, set_rng_state, trained
from ssl_kd.language.prepare import Task, make_distiller, prepare
from ssl_kd.language.rollouts import writer
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.sources import named_rows
from ssl_kd.language.step import Distiller
from ssl_kd.settings import SettingsError
from ssl_kd.training.clock import no_progress
from ssl_kd.training.fault_bundle import (
    DTYPES,
    Bundle,
    Replay,
    damaged,
    has_fields,
    load_bundle,
)

_REPLAY = {"mode": str, "student": str, "teacher": str, "scale": bool, "device": str, "exact": bool}
_REPLAY |= {"explained": str, "learns_from": str}
_CPU = torch.device("cpu")


def replay(path: str | Path) -> Replay:
    """Run the step of a bundle again, on the CPU, under the microscope.

    Text, teacher and tokenizers are opened as the run's settings say, from the folder that the run
    was started in; the student's trained weights are those of the bundle. Where these were over its
    size limit, the answer is what was found when the fault happened.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: it is damaged, no bundle, or of another version's settings.
        ValueError: it is not of this mode, or text or teacher are not those of the run.
    """
    bundle = load_bundle(path)
    settings, how = _settings(path, bundle)
    if bundle.left_out:
        lost = ("note", f"{len(bundle.left_out)} tensors were over the limit: not run again")
        return Replay(bundle, False, None, None, seen=(lost, ("then", how["explained"])))
    precision = Precision(
        device=_CPU,
        teacher=getattr(torch, how["teacher"]),
        student=getattr(torch, how["student"]),
        scale=how["scale"],
        why="a replay",
    )
    task = prepare(settings, precision, no_progress)
    if task.digest != how["learns_from"]:
        raise InputError(
            f"{path} cannot be run again: the data or the teacher are not those of the run. Put "
            "them back, or replay in the folder that the run was started in"
        )
    rows = bundle.indices
    if not len(rows) or not 0 <= int(rows.min()) <= int(rows.max()) < len(task.blocks):
        raise damaged(path, f"indices are not rows of the text, which has {len(task.blocks)}")
    distiller = make_distiller(task)
    _load(path, bundle, distiller)
    batch = _batch(distiller, task, bundle)
    with torch.random.fork_rng(devices=[]):
        set_rng_state({"cpu": bundle.tensors["rng cpu"]}, _CPU)
        found = examine(distiller, batch, bundle.event.part)
    if found is None:
        return Replay(bundle, False, None, None)
    sample = f"{named_rows(rows)} of the text"
    return Replay(bundle, True, *found, sample=sample)


def _batch(distiller: Distiller, task: Task, bundle: Bundle) -> Batch | AlignedBatch:
    """The rows of the step; those that the student wrote, it writes again."""
    rows = bundle.indices
    written = writer(distiller, task.blocks, task.student.tokenizer)
    if written is None:
        return task.blocks.batch(rows, _CPU)
    once = torch.tensor([*dict.fromkeys(rows.tolist())])  # twice: its text, and what it wrote
    return written.batches(bundle.event.step, [once], _CPU)[0][0]


def _settings(path: str | Path, bundle: Bundle) -> tuple[LanguageSettings, dict[str, Any]]:
    """The run's settings, and how the step was computed."""
    values = dict(bundle.settings)
    how = values.pop("replay", None)
    if not isinstance(how, dict) or how.get("mode") != "language":
        raise InputError(f"{path} is not a step of the language mode")
    if not has_fields(how, _REPLAY) or not {how["student"], how["teacher"]} <= {*DTYPES}:
        raise damaged(path, "its replay settings are not those of a step")
    if bundle.indices.ndim != 1 or bundle.indices.dtype != torch.int64:
        raise damaged(path, "indices are not int64 [row]")
    try:
        return LanguageSettings.from_dict(values).replace(resume=False, device="cpu"), how
    except SettingsError as error:
        raise damaged(path, str(error)) from error


@torch.no_grad()
def _load(path: str | Path, bundle: Bundle, distiller: Distiller) -> None:
    """Give the student, and what is trained beside it, the weights of the step."""
    for name, tensor in trained(distiller).items():
        saved = bundle.tensors.get(name)
        if saved is None or _kind(saved) != _kind(tensor):
            raise damaged(path, f"{name} is not {tensor.dtype} {list(tensor.shape)}")
        tensor.copy_(saved)
    saved = bundle.tensors.get("rng cpu")
    if saved is None or _kind(saved) != _kind(torch.get_rng_state()):
        raise damaged(path, "the state of the random numbers is missing, or of another torch")


def _kind(x: Tensor) -> tuple[torch.Size, torch.dtype, torch.layout]:
    return x.shape, x.dtype, x.layout
