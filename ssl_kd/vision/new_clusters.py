"""Find clusters that are new among new samples, by a statistical test."""

from __future__ import annotations

import math

import numpy as np
import scipy
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from ssl_kd.vision.cache import nearest_neighbors

# Probability that new samples of the old clusters contain a seed of a new one.
CHANCE = 0.01
# Smallest number of neighbors; a class with fewer new samples is not detected.
NEIGHBORS = 15
# The number of neighbors is this multiple of the number that the smallest probability needs.
SLACK = 1.5
# Smallest size of a new cluster, and its smallest share of the new samples.
MIN_SIZE, MIN_SHARE = 5, 0.01
# Nearest rows that vote on whether a sample belongs to a new cluster, and the required votes.
VOTERS, MAJORITY = 5, 3
# Nearest neighbors that link seeds: with fewer a class falls into pieces, with more two classes
# become one (5, 7, 10 and 15 were tried on digits and Fashion-MNIST).
LINKS = 10
ROUNDS = 10  # maximum rounds of growing a group; two to six are usual
QUERIES = 1024  # rows that are compared at once


class NewClusters(nn.Module):
    """Clusters that were added after the training, defined by stored samples.

    A sample belongs to an added cluster if its nearest stored row and three of its nearest five
    belong to that cluster. Stored rows are the samples of added clusters and training samples. A
    stored training sample is its own nearest row, so its cluster does not change.
    """

    rows: Tensor  # `[n, dim]`
    clusters: Tensor  # `[n]`, counted from 0

    def __init__(self, dim: int, n: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(n, dim))
        self.register_buffer("clusters", torch.zeros(n, dtype=torch.int64))

    def claims(self, z: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
        """Find the added cluster of each row of `z` `[batch, d]`, if any.

        The clusters, `[batch]` int64, are counted from 0, with -1 for none. Also return the share
        of the row's nearest five rows that belong to the cluster of the nearest one, `[batch]`.
        """
        pool = torch.cat([reference, self.rows])
        owner = torch.cat([self.clusters.new_full((len(reference),), -1), self.clusters])
        blocks = [owner[_nearest(block, pool)] for block in z.split(QUERIES)]
        owners = torch.cat(blocks) if blocks else owner.new_zeros(0, VOTERS)
        votes = (owners == owners[:, :1]).sum(1)
        belongs = (owners[:, 0] >= 0) & (votes >= MAJORITY)
        return torch.where(belongs, owners[:, 0], -1), votes / VOTERS


def _nearest(z: Tensor, pool: Tensor) -> Tensor:
    """Return the indices of the nearest five rows of the pool, `[batch, 5]`, nearest first."""
    columns = torch.cdist(z, pool).topk(min(2 * VOTERS, len(pool)), largest=False).indices
    columns = columns.sort(dim=1).values
    # `cdist` hides small distances by rounding: compute these exactly.
    order = (pool[columns] - z.unsqueeze(1)).norm(dim=-1).sort(dim=1, stable=True).indices
    return columns.gather(1, order)[:, :VOTERS]


def find_new_clusters(reference: Tensor, old: Tensor, new: Tensor, joined: Tensor) -> Tensor:
    """Find groups of new samples in regions without old samples, by a significance test.

    The null hypothesis is that the new samples of each cluster are distributed like its old ones.
    A neighbor in cluster c is then new with probability `q_c = new_c / (new_c + old_c)`, and the
    number of new samples among k neighbors is bounded by a binomial distribution with the mean of
    the `q_c` (Hoeffding). A sample for which the probability of that many new neighbors is below
    0.01 / n is a seed. Mutual neighbors among the seeds form groups, and groups of at least five
    seeds grow by nearby samples. New proportions of the old clusters do not make a new cluster.

    From the old samples `reference` `[r, d]` in the clusters `old`, and `new` samples `[n, d]`,
    selected by `comparable`, in the predicted clusters `joined`, return the group of each new
    sample, `[n]` int64, largest group first; -1 for no group.

    References:
        Schilling, Multivariate two-sample tests based on nearest neighbors, JASA 1986.
        Hoeffding, On the distribution of the number of successes in independent trials, 1956.
    """
    result = torch.full((len(new),), -1)
    if len(new) < MIN_SIZE:
        return result
    # Copies count as one sample, since they are each other's neighbors.
    rows = np.sort(np.unique(new.numpy(), axis=0, return_index=True)[1])
    n, r = len(rows), len(reference)
    clusters = np.concatenate([old.numpy(), joined.numpy()[rows]])
    counts = [np.bincount(part, minlength=clusters.max() + 1) for part in np.split(clusters, [r])]
    share = counts[1] / np.maximum(counts[0] + counts[1], 1)
    needed = math.log(CHANCE / n) / math.log(share[clusters[r:]].mean())
    k = min(max(NEIGHBORS, math.ceil(SLACK * needed)), r + n - 1)
    pool = torch.cat([reference, new[rows]])
    near = nearest_neighbors(pool, k, metric="euclidean")[r:].numpy()

    chance = scipy.stats.binom.sf((near >= r).sum(1) - 1, k, share[clusters[near]].mean(1))
    seeds = np.flatnonzero(chance < CHANCE / n)
    groups = _grown(_groups(seeds, near - r, n), near - r)
    sizes = np.bincount(groups[groups >= 0], minlength=1)
    min_size = max(MIN_SIZE, MIN_SHARE * n)
    large = [g for g in np.argsort(-sizes, kind="stable") if sizes[g] >= min_size]
    for number, group in enumerate(large):
        result[rows[groups == group]] = number
    return result


def comparable(old: Tensor, joined: Tensor) -> Tensor:
    """Select new samples at random, from each cluster at most as many as it has old samples.

    From the clusters of the old samples and those of the new, return rows of the new, ascending.
    """
    order = torch.randperm(len(joined), generator=torch.Generator().manual_seed(0))
    clusters, by_cluster = joined[order].sort(stable=True)
    position = torch.arange(len(order)) - torch.searchsorted(clusters, clusters)  # in its cluster
    n_old = old.bincount(minlength=int(joined.max()) + 1)[clusters]
    return order[by_cluster[position < n_old]].sort().values


def _groups(seeds: NDArray, near: NDArray, n: int) -> NDArray:
    """Return the connected component of seeds to which each of n samples belongs, -1 if none.

    `near` `[n, k]` has the neighbors of each sample; a negative number stands for an old sample.
    """
    is_seed = np.zeros(n, dtype=bool)
    is_seed[seeds] = True
    near = near[:, :LINKS]
    i, column = np.nonzero((near[seeds] >= 0) & is_seed[near[seeds].clip(0)])
    links = sp.coo_matrix((np.ones(len(i)), (seeds[i], near[seeds][i, column])), (n, n)).tocsr()
    _, labels = connected_components(links.multiply(links.T), directed=False)
    sizes = np.bincount(labels[seeds], minlength=n)
    return np.where(is_seed & (sizes[labels] >= MIN_SIZE), labels, -1)


def _grown(groups: NDArray, near: NDArray) -> NDArray:
    """Add each sample to a group that has three of its nearest five old or grouped neighbors."""
    names, groups = np.unique(np.r_[-1, groups], return_inverse=True)
    groups = groups[1:] - 1  # counted from 0
    for _ in range(ROUNDS if len(names) > 1 else 0):
        owners = np.where(near >= 0, groups[near.clip(0)], -1)
        counted = (near < 0) | (owners >= 0)
        counted &= counted.cumsum(1) <= VOTERS
        votes = np.stack([(counted & (owners == g)).sum(1) for g in range(len(names) - 1)], 1)
        after = np.where(votes.max(1) >= MAJORITY, votes.argmax(1), -1)
        if (after == groups).all():
            break
        groups = after
    return groups
