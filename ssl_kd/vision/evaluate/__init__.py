"""Score clusters and embeddings, and run baselines."""

from ssl_kd.core.calibration import calibration
from ssl_kd.vision.evaluate.agreement import neighbor_agreement
from ssl_kd.vision.evaluate.baselines import kmeans, spectral
from ssl_kd.vision.evaluate.clustering import (
    METRICS,
    Metric,
    accuracy,
    cluster_sizes,
    clustering_scores,
    collapsed,
    contingency,
    effective_clusters,
    match,
    rightly_placed,
)
from ssl_kd.vision.evaluate.few_shot import few_shot_probes
from ssl_kd.vision.evaluate.knn import knn_accuracy
from ssl_kd.vision.evaluate.layout import embedding_map
from ssl_kd.vision.evaluate.probe import linear_probe
from ssl_kd.vision.evaluate.rank import alpha_req, lidar, rankme
from ssl_kd.vision.evaluate.sgd_probe import sgd_probe

__all__ = [
    "METRICS",
    "Metric",
    "accuracy",
    "alpha_req",
    "calibration",
    "cluster_sizes",
    "clustering_scores",
    "collapsed",
    "contingency",
    "effective_clusters",
    "embedding_map",
    "kmeans",
    "few_shot_probes",
    "knn_accuracy",
    "lidar",
    "linear_probe",
    "match",
    "neighbor_agreement",
    "rankme",
    "rightly_placed",
    "sgd_probe",
    "spectral",
]
