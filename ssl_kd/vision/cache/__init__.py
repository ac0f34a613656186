"""Cache embeddings in verified shards, and find nearest neighbors."""

from ssl_kd.vision.cache.approximate import find_neighbors, neighbors_in_memory
from ssl_kd.vision.cache.embeddings import EmbeddingStore, EmbeddingWriter
from ssl_kd.vision.cache.neighbors import nearest_neighbors

__all__ = [
    "EmbeddingStore",
    "EmbeddingWriter",
    "find_neighbors",
    "nearest_neighbors",
    "neighbors_in_memory",
]
