"""Verified caches of embeddings, under the path that users import."""

from ssl_kd.core.shards import (
    BaseFingerprint,
    Fingerprint,
    FingerprintMismatch,
    NonFiniteRow,
    ShardStore,
    ShardWriter,
)
from ssl_kd.vision.cache import (
    EmbeddingStore,
    EmbeddingWriter,
    find_neighbors,
    nearest_neighbors,
    neighbors_in_memory,
)

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
