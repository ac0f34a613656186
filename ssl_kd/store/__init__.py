"""What a frozen teacher knows, written once: verified shards of embeddings, and neighbours."""

from ssl_kd.store.embeddings import EmbeddingStore, NonFiniteRow
from ssl_kd.store.fingerprint import Fingerprint, FingerprintMismatch
from ssl_kd.store.neighbours import cached_neighbours, nearest_neighbours
from ssl_kd.store.writer import EmbeddingWriter

__all__ = [
    "EmbeddingStore",
    "EmbeddingWriter",
    "Fingerprint",
    "FingerprintMismatch",
    "NonFiniteRow",
    "cached_neighbours",
    "nearest_neighbours",
]
