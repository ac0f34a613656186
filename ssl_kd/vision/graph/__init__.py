"""Cluster the nodes of a neighbor graph, without training."""

from ssl_kd.vision.graph.criterion import Graph, joint, partition_value, refine
from ssl_kd.vision.graph.ensemble import Ensemble, View, agreement, consensus, form_ensemble, summed
from ssl_kd.vision.graph.fuzzy import fuzzy_graph

__all__ = [
    "Ensemble",
    "Graph",
    "View",
    "agreement",
    "form_ensemble",
    "consensus",
    "fuzzy_graph",
    "joint",
    "partition_value",
    "refine",
    "summed",
]
