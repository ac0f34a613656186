"""Check the installation and the numerics, and print a remedy for each fault."""

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
    """Check packages, device, precision, kernels and folders, and print the findings.

    Args:
        config: the settings file; it may be missing.
        verbose: print each distinct warning with its count, not only their number.

    Returns:
        0 if there is no fault, else 1.
    """
    settings = _settings(config)
    folders = {"DATA_DIR": settings.data_dir, "EMBEDDINGS_DIR": settings.embeddings_root}
    checks = (
        machine.packages(),
        machine.device(settings.device, settings.use_fp16),
        machine.folders({**folders, "RUNS_DIR": settings.runs_dir}),
    )
    return report("Installation", checks, verbose)


def nan_issues(config: Path = Path("config.py"), *, verbose: bool = False) -> int:
    """Check heads, losses, gradients, cache and first training steps, and print the findings.

    Nothing is written to disk.

    Args:
        config: the settings file; it may be missing.
        verbose: print each distinct warning with its count, not only their number.

    Returns:
        0 if there is no fault, else 1.
    """
    from ssl_kd.doctor import numerics, own_data  # with torch, which takes seconds

    settings = _settings(config)
    checks = (
        numerics.forward(settings),
        numerics.losses(settings.beta, settings.student_temp, settings.teacher_temp),
        numerics.gradients(settings),
        own_data.own_data(settings),
    )
    return report("Numerics", checks, verbose)


def language_model(settings: LanguageSettings, *, verbose: bool = False) -> int:
    """Check a student's weights, loss, gradients and first training steps; print the findings.

    Args:
        settings: the settings of a run; STUDENT_MODEL, text and optimizer are used.
        verbose: print each distinct warning with its count, not only their number.

    Returns:
        0 if there is no fault, else 1.
    """
    from ssl_kd.doctor.gradients import gradients, open_model  # with torch

    lm, blocks = open_model(settings.student_model, settings)
    return report(f"Gradients of {lm.name}", [gradients(settings, lm, blocks)], verbose)


def _settings(config: Path) -> VisionSettings:
    return VisionSettings.from_file(config) if os.path.lexists(config) else VisionSettings()
