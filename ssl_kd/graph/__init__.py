"""Partitions of a graph of neighbours: what the whole graph says, before any head is trained."""

from ssl_kd.graph.criterion import Graph, joint, partition_value, refine
from ssl_kd.graph.crowd import Crowd, View, agreement, ask_crowd, consensus
from ssl_kd.graph.fuzzy import fuzzy_graph
from ssl_kd.graph.kmeans import kmeans

__all__ = [
    "Crowd",
    "Graph",
    "View",
    "agreement",
    "ask_crowd",
    "consensus",
    "fuzzy_graph",
    "joint",
    "kmeans",
    "partition_value",
    "refine",
]
