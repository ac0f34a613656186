"""A finished run in other programs' formats, and on the Hugging Face hub."""

from ssl_kd.export.cards import dataset_card, model_card
from ssl_kd.export.content import Content
from ssl_kd.export.hub import HubRefused, push_run
from ssl_kd.export.registry import FORMATS, export

__all__ = [
    "FORMATS",
    "Content",
    "HubRefused",
    "dataset_card",
    "export",
    "model_card",
    "push_run",
]
