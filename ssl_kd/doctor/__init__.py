"""The doctor: checks the installation and the numerics, with a remedy for each fault."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ssl_kd.doctor import machine
from ssl_kd.doctor.finding import Finding, report
from ssl_kd.vision.settings import VisionSettings

if TYPE_CHECKING:
    from ssl_kd.language.settings import LanguageSettings

__all__ = ["Finding", "installation", "language_model", "nan_issues"]


def installation(config: Path = Path("config.py"), *, verbose: bool = False) -> int:
    """Check and print packages, device, precision, kernels, and which folders are writable.

    Args:
        config: the settings file; it may be missing.
        verbose: print each distinct warning with its count, not only their number.

    Returns:
        0 if there is no fault, else 1.
    """
    found = _settings(config)
    folders = {"DATA_DIR": found.data_dir, "EMBEDDINGS_DIR": found.embeddings_root}
    checks = (
        machine.packages(),
        machine.device(found.device, found.use_fp16),
        machine.folders({**folders, "RUNS_DIR": found.runs_dir}),
    )
    return report("Installation", checks, verbose)


def nan_issues(config: Path = Path("config.py"), *, verbose: bool = False) -> int:
    """Check and print whether model, losses, gradients, cache and first steps are healthy.

    Nothing is written.

    Args:
        config: the settings file; it may be missing.
        verbose: print each distinct warning with its count, not only their number.

    Returns:
        0 if there is no fault, else 1.
    """
    from ssl_kd.doctor import numerics, own_data  # with torch, which takes seconds

    found = _settings(config)
    checks = (
        numerics.forward(found),
        numerics.losses(found.beta, found.student_temp, found.teacher_temp),
        numerics.gradients(found),
        own_data.own_data(found),
    )
    return report("Numerics", checks, verbose)


def language_model(settings: LanguageSettings, *, verbose: bool = False) -> int:
    """Check and print a student's weights, loss and gradients in its first steps on the text.

    Args:
        settings: of a run; STUDENT_MODEL, the text and the optimizer matter.
        verbose: print each distinct warning with its count, not only their number.

    Returns:
        0 if there is no fault, else 1.
    """
    from ssl_kd.doctor.gradients import gradients, open_model  # with torch

    lm, blocks = open_model(settings.student_model, settings)
    return report(f"Gradients of {lm.name}", [gradients(settings, lm, blocks)], verbose)


def _settings(config: Path) -> VisionSettings:
    return VisionSettings.from_file(config) if os.path.lexists(config) else VisionSettings()
