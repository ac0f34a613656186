"""Score clusters, embeddings, predicted tokens and generated answers; run baselines."""

from ssl_kd.evaluate.answers import AnswerScores, extract_answer, same_answer
from ssl_kd.evaluate.baselines import Baseline, kmeans, spectral
from ssl_kd.evaluate.calibration import calibration, rightly_placed
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
from ssl_kd.evaluate.tokens import TokenScores, TokenValues, token_values

__all__ = [
    "AnswerScores",
    "Baseline",
    "TokenScores",
    "TokenValues",
    "accuracy",
    "calibration",
    "cluster_sizes",
    "clustering_scores",
    "collapsed",
    "confusion",
    "contingency",
    "effective_clusters",
    "embedding_map",
    "extract_answer",
    "kmeans",
    "knn_accuracy",
    "linear_probe",
    "match",
    "rightly_placed",
    "same_answer",
    "spectral",
    "token_values",
]
