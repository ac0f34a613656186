"""What was learned: scores of clusters, embeddings, and the baselines they must beat."""

from ssl_kd.evaluate.baselines import Baseline, kmeans, spectral
from ssl_kd.evaluate.clustering import (
    accuracy,
    cluster_sizes,
    clustering_scores,
    collapsed,
    confusion,
    contingency,
    effective_clusters,
    match,
)
from ssl_kd.evaluate.knn import knn_accuracy
from ssl_kd.evaluate.layout import embedding_map
from ssl_kd.evaluate.probe import linear_probe

__all__ = [
    "Baseline",
    "accuracy",
    "cluster_sizes",
    "clustering_scores",
    "collapsed",
    "confusion",
    "contingency",
    "effective_clusters",
    "embedding_map",
    "kmeans",
    "knn_accuracy",
    "linear_probe",
    "match",
    "spectral",
]
