"""Export a finished run to other programs' formats and to the Hugging Face Hub."""

from ssl_kd_explore.export.registry import FORMATS, export

__all__ = ["FORMATS", "export"]
