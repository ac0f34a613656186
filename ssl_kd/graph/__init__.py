"""Partitions of a graph of neighbours: what the whole graph says, before any head is trained."""

from ssl_kd.graph.criterion import Graph, Partition, joint, partition_value, refine
from ssl_kd.graph.fuzzy import fuzzy_graph
from ssl_kd.graph.kmeans import kmeans
from ssl_kd.graph.search import best_partitions

__all__ = [
    "Graph",
    "Partition",
    "best_partitions",
    "fuzzy_graph",
    "joint",
    "kmeans",
    "partition_value",
    "refine",
]
