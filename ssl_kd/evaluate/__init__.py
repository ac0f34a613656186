"""Score clusters and embeddings, and run baselines."""

from ssl_kd.evaluate.baselines import kmeans, spectral
from ssl_kd.evaluate.calibration import calibration, rightly_placed
from ssl_kd.evaluate.clustering import (
    accuracy,
    cluster_sizes,
    clustering_scores,
    collapsed,
    contingency,
    effective_clusters,
    match,
)
from ssl_kd.evaluate.knn import knn_accuracy
from ssl_kd.evaluate.layout import embedding_map
from ssl_kd.evaluate.probe import linear_probe

__all__ = [
    "accuracy",
    "calibration",
    "cluster_sizes",
    "clustering_scores",
    "collapsed",
    "contingency",
    "effective_clusters",
    "embedding_map",
    "kmeans",
    "knn_accuracy",
    "linear_probe",
    "match",
    "rightly_placed",
    "spectral",
]
