"""The doctor: checks the installation and the numerics, with a remedy for each fault."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ssl_kd.doctor import machine, numerics, own_data
from ssl_kd.doctor.finding import Finding, report
from ssl_kd.vision.settings import VisionSettings

if TYPE_CHECKING:
    from ssl_kd.language.settings import LanguageSettings
    from ssl_kd.store import EmbeddingStore

__all__ = ["Finding", "installation", "language_model", "nan_issues"]


def installation(config: Path = Path("config.py"), *, verbose: bool = False) -> int:
    """Print versions, device, precision and why, real kernels, and which folders can be written.

    Args:
        config: the settings file; it may be missing.
        verbose: print each distinct warning with its count; else only how many there were.

    Returns:
        0 if everything is sound, else 1.
    """
    settings = _settings(config)
    checks = (
        machine.packages(),
        machine.torchvision(),
        machine.device(settings),
        machine.neighbour_search(),
        machine.folders(settings),
    )
    return report("Installation", checks, verbose)


def nan_issues(config: Path = Path("config.py"), *, verbose: bool = False) -> int:
    """Print whether model, losses, gradients, cache and first steps are healthy.

    Nothing is written: the steps are those of a trainer that is thrown away.

    Args:
        config: the settings file; it may be missing.
        verbose: print each distinct warning with its count; else only how many there were.

    Returns:
        0 if everything is healthy, else 1.
    """
    settings = _settings(config)
    stores: dict[str, EmbeddingStore] = {}  # those that can be read; filled by `cache`
    checks = (
        numerics.forward(settings),
        numerics.losses(settings),
        numerics.gradient_flow(settings),
        numerics.isolation(settings),
        own_data.cache(settings, stores),
        own_data.embeddings(stores),
        own_data.first_batches(settings, stores),
    )
    return report("Numerics", checks, verbose)


def language_model(settings: LanguageSettings, *, verbose: bool = False) -> int:
    """Print the health of the student's weights, loss and gradients in its first steps on the text.

    Args:
        settings: those of a run; STUDENT_MODEL, DATA_PATH and those of the optimizer matter.
        verbose: print each distinct warning with its count; else only how many there were.

    Returns:
        0 if everything is healthy, else 1.
    """
    from ssl_kd.doctor.gradients import gradients, open_model  # torch takes seconds

    lm, blocks = open_model(settings.student_model, settings)
    return report(f"Gradients of {lm.name}", [gradients(settings, lm, blocks)], verbose)


def _settings(config: Path) -> VisionSettings:
    return VisionSettings.from_file(config) if os.path.lexists(config) else VisionSettings()
