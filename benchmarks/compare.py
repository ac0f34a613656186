"""Measure how often `ssl_kd compare` picks the better clustering, and whether it knows how often.

    python -m benchmarks.compare --features FOLDER --cifar FOLDER --pool FOLDER   # can resume

A set is up to 1,000 samples with several embeddings: different teachers for images, different
descriptors where a set has them, otherwise the features with fewer dimensions, whitened, projected
at random, with noise, and a third of the columns. Each embedding is clustered by the consensus,
k-means, spectral clustering and communities with K given, and by k-means with 0.6 K and 1.6 K. Every
pair of these clusterings is a question; the clustering with the higher AMI is the better one. The
constants are fitted on every other family of sets; the table is about the families left out.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.metrics import adjusted_mutual_info_score, adjusted_rand_score

from benchmarks.regret import family, sets, table_line
from benchmarks.sets import Sources
from ssl_kd.graph import form_ensemble
from ssl_kd.graph.kmeans import kmeans
from ssl_kd.store import nearest_neighbors
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.partition import summed, views
from ssl_kd.workbench.compare.judgement import common_neighbors, value
