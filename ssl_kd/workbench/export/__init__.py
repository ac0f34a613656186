"""A finished run in other programs' formats, and on the Hugging Face hub."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssl_kd.vision.hub import HubRefused
    from ssl_kd.workbench.export.cards import dataset_card, model_card, push_run
    from ssl_kd.workbench.export.content import Content
    from ssl_kd.workbench.export.registry import FORMATS, export

__all__ = ["FORMATS", "Content", "HubRefused", "dataset_card", "export", "model_card", "push_run"]
_HOMES = {"registry": ("FORMATS", "export"), "content": ("Content",)}


def __getattr__(name: str) -> object:
    # Late, so that invalid flags are refused before torch is imported.
    if name in __all__:
        homes = (home for home, names in _HOMES.items() if name in names)
        module = f"ssl_kd.workbench.export.{next(homes, 'cards')}"
        module = "ssl_kd.vision.hub" if name == "HubRefused" else module
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
