"""Names of clusters, from texts, a vocabulary that a CLIP knows, or a language model of yours."""

from ssl_kd.workbench.naming.captions import read_captions
from ssl_kd.workbench.naming.described import names_from_model
from ssl_kd.workbench.naming.names import Name, Names
from ssl_kd.workbench.naming.vocabulary import cluster_means, names_from_vocabulary
from ssl_kd.workbench.naming.words import class_tfidf, file_words, names_from_texts

__all__ = [
    "Name",
    "Names",
    "class_tfidf",
    "cluster_means",
    "file_words",
    "names_from_model",
    "names_from_texts",
    "names_from_vocabulary",
    "read_captions",
]
