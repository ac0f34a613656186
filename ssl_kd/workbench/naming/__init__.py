"""Name clusters by the words of captions, and store the names."""

from ssl_kd.workbench.naming.contrastive_words import names_from_texts
from ssl_kd.workbench.naming.name_run import name_samples
from ssl_kd.workbench.naming.names import Name, Names

__all__ = ["Name", "Names", "name_samples", "names_from_texts"]
