"""Names of clusters, from captions or file names, or by a language model of the user's."""

from ssl_kd.workbench.naming.captions import read_captions
from ssl_kd.workbench.naming.described import names_from_model
from ssl_kd.workbench.naming.names import Name, Names
from ssl_kd.workbench.naming.words import class_tfidf, file_words, names_from_texts

__all__ = [
    "Name",
    "Names",
    "class_tfidf",
    "file_words",
    "names_from_model",
    "names_from_texts",
    "read_captions",
]
