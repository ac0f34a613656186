"""Scores of clusters and embeddings, and baselines, under the path that users import."""

from ssl_kd.vision.evaluate import *
