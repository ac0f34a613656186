"""Run a recorded step of a student again with every operation checked (`ssl_kd replay BUNDLE`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssl_kd.core.errors import InputError
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.clock import no_progress
from ssl_kd.core.runs.fault_bundle import DTYPES, Bundle, Replay, damaged, has_fields, load_bundle
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.prepare import Prepared, make_distiller, prepare
from ssl_kd.language.rollouts import rollout_batches
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.teachers.base import named_rows
from ssl_kd.language.text.aligned import AlignedBatch
from ssl_kd.language.text.blocks import Batch
from ssl_kd.language.train.fault_explainer import examine, trained
from ssl_kd.language.train.rows_left_out import set_rng_state
from ssl_kd.language.train.step import Distiller

_REPLAY = {"mode": str, "student": str, "teacher": str, "scale": bool, "device": str, "exact": bool}
_REPLAY |= {"explained": str, "learns_from": str}
_CPU = torch.device("cpu")


def replay(path: str | Path) -> Replay:
    """Run the step of a bundle again on the CPU, and find the first operation that fails.

    Call this in the folder in which the run was started: its settings open text and teachers. If
    the student's weights exceeded the size limit of a bundle, or with ROLLOUT_URL, the explanation
    that the run recorded is returned instead.

    Raises:
        CorruptFileError: the file is damaged, is not a bundle, or has settings of another version.
        InputError: the bundle is not of the language mode, or text or teacher have changed.
    """
    bundle = load_bundle(path)
    settings, recorded = _settings(path, bundle)
    if bundle.left_out or settings.rollout_url:
        reason = f"{len(bundle.left_out)} tensors exceeded the size limit: not run again"
        if settings.rollout_url:
            reason = "the text that a server sampled (ROLLOUT_URL) is not stored: not run again"
        lost = ("note", reason)
        return Replay(bundle, False, None, None, seen=(lost, ("then", recorded["explained"])))
    precision = Precision(
        device=_CPU,
        teacher=getattr(torch, recorded["teacher"]),
        student=getattr(torch, recorded["student"]),
        scale=recorded["scale"],
        why="a replay",
    )
    prepared = prepare(settings, precision, no_progress)
    if prepared.digest != recorded["learns_from"]:
        raise InputError(
            f"{path} cannot be run again, because the text or the teacher has changed since the"
            " run: restore them, or start the replay in the folder in which the run was started"
        )
    rows, n_rows = bundle.indices, len(prepared.blocks)
    if not len(rows) or not 0 <= int(rows.min()) <= int(rows.max()) < n_rows:
        raise damaged(path, f"indices are not all from 0 to {n_rows - 1}, the rows of the text")
    distiller = make_distiller(prepared)
    _load(path, bundle, distiller)
    batch = _batch(distiller, prepared, bundle)
    with torch.random.fork_rng(devices=[]):
        set_rng_state({"cpu": bundle.tensors["rng cpu"]}, _CPU)
        fault = examine(distiller, batch, bundle.event.part)
    if fault is None:
        return Replay(bundle, False, None, None)
    return Replay(bundle, True, *fault, sample=f"{named_rows(rows)} of the text")


def _batch(distiller: Distiller, prepared: Prepared, bundle: Bundle) -> Batch | AlignedBatch:
    """Return the batch of the step, with the student's continuations generated again."""
    rows = bundle.indices
    rollouts = rollout_batches(distiller, prepared.blocks, prepared.student.tokenizer)
    if rollouts is None:
        return prepared.blocks.batch(rows, _CPU)
    return rollouts.batches(bundle.step, [rows], _CPU)[0][0]


def _settings(path: str | Path, bundle: Bundle) -> tuple[LanguageSettings, dict[str, Any]]:
    """Return the run's settings, and what the bundle says of the step (dtypes, device, fault)."""
    values = dict(bundle.settings)
    recorded = values.pop("replay", None)
    if not isinstance(recorded, dict) or recorded.get("mode") != "language":
        raise InputError(f"{path} is not a step of the language mode: expected a bundle of one")
    known = has_fields(recorded, _REPLAY)
    if not known or not {recorded["student"], recorded["teacher"]} <= {*DTYPES}:
        raise damaged(path, "the replay settings are incomplete or have a wrong type")
    if bundle.indices.ndim != 1 or bundle.indices.dtype != torch.int64:
        raise damaged(path, "indices are not int64 [row]")
    try:
        return LanguageSettings.from_dict(values).replace(resume=False, device="cpu"), recorded
    except SettingsError as error:
        raise damaged(path, str(error)) from error


@torch.no_grad()
def _load(path: str | Path, bundle: Bundle, distiller: Distiller) -> None:
    """Load the bundle's weights into the student and the router."""
    for name, tensor in trained(distiller).items():
        saved = bundle.tensors.get(name)
        if saved is None or _layout(saved) != _layout(tensor):
            expected = f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise damaged(path, f"the tensor {name!r} is missing or is not {expected}")
        tensor.copy_(saved)
    saved = bundle.tensors.get("rng cpu")
    if saved is None or _layout(saved) != _layout(torch.get_rng_state()):
        raise damaged(path, "the random state is missing, or was saved by another torch version")


def _layout(x: Tensor) -> tuple[torch.Size, torch.dtype, torch.layout]:
    return x.shape, x.dtype, x.layout
