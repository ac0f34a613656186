"""Scores of clusters and embeddings, and baselines, under the path that users import."""

from ssl_kd.vision.evaluate import (
    accuracy,
    calibration,
    cluster_sizes,
    clustering_scores,
    collapsed,
    contingency,
    effective_clusters,
    embedding_map,
    kmeans,
    knn_accuracy,
    linear_probe,
    match,
    rightly_placed,
    spectral,
)

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
