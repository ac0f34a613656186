"""A finished run in other programs' formats, and on the Hugging Face hub."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssl_kd.workbench.export.cards import dataset_card, model_card
    from ssl_kd.workbench.export.content import Content
    from ssl_kd.workbench.export.hub import HubRefused, push_run
    from ssl_kd.workbench.export.registry import FORMATS, export

__all__ = ["FORMATS", "Content", "HubRefused", "dataset_card", "export", "model_card", "push_run"]


def __getattr__(name: str) -> object:
    # Late, so that what cannot be is refused before torch is imported.
    if name in __all__:
        homes = {"FORMATS": "registry", "export": "registry", "Content": "content"}
        home = homes.get(name, "cards" if name.endswith("card") else "hub")
        return getattr(importlib.import_module(f"ssl_kd.workbench.export.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
