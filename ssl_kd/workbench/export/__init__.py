"""A finished run in other programs' formats, and on the Hugging Face Hub."""

from ssl_kd.workbench.export.registry import FORMATS, export

__all__ = ["FORMATS", "export"]
