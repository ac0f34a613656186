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


def installation(config: Path = Path("config.py")) -> int:
    """Check packages, device, kernels and folders; print the findings, and return 0 or 1."""
    settings = _settings(config)
    folders = {"DATA_DIR": settings.data_dir, "EMBEDDINGS_DIR": settings.embeddings_root}
    checks = (
        machine.packages(),
        machine.device(settings.device, settings.use_fp16),
        machine.folders({**folders, "RUNS_DIR": settings.runs_dir}),
    )
    return report("Installation", checks)


def nan_issues(config: Path = Path("config.py")) -> int:
    """Check heads, losses, cache and first training steps; print the findings, and return 0 or 1.

    Nothing is written to disk.
    """
    from ssl_kd.doctor import numerics, own_data  # with torch, which takes seconds

    settings = _settings(config)
    checks = (
        numerics.forward(settings),
        numerics.losses(settings),
        numerics.gradients(settings),
        own_data.own_data(settings),
    )
    return report("Numerics", checks)


def language_model(settings: LanguageSettings) -> int:
    """Check STUDENT_MODEL and its first training steps; print the findings, and return 0 or 1."""
    from ssl_kd.doctor.gradients import gradients, open_model  # with torch

    lm, blocks = open_model(settings.student_model, settings)
    return report(f"Gradients of {lm.name}", [gradients(settings, lm, blocks)])


def _settings(config: Path) -> VisionSettings:
    return VisionSettings.from_file(config) if os.path.lexists(config) else VisionSettings()
