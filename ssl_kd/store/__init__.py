"""Cache teacher outputs in verified shards, and find nearest neighbors."""

from ssl_kd.store.approximate import find_neighbors, neighbors_in_memory
from ssl_kd.store.embeddings import EmbeddingStore, EmbeddingWriter
from ssl_kd.store.fingerprint import BaseFingerprint, Fingerprint, FingerprintMismatch
from ssl_kd.store.neighbors import nearest_neighbors
from ssl_kd.store.shards import NonFiniteRow, ShardStore
from ssl_kd.store.writer import ShardWriter

__all__ = [
    "BaseFingerprint",
    "EmbeddingStore",
    "EmbeddingWriter",
    "Fingerprint",
    "FingerprintMismatch",
    "NonFiniteRow",
    "ShardStore",
    "ShardWriter",
    "find_neighbors",
    "nearest_neighbors",
    "neighbors_in_memory",
]
