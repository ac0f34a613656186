"""What new samples tell of clusters that were not there: found by a test, offered, remembered."""

from __future__ import annotations

import math

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from scipy.stats import binom
from torch import Tensor, nn

from ssl_kd.store import nearest_neighbours

# Batches in which nothing is new have a sample that says otherwise in one of a hundred.
CHANCE = 0.01
# Neighbours that are counted, at least: a class with fewer new samples is not seen.
NEIGHBOURS = 15
# That many times what the least probability possible needs: two thirds of them are enough.
SLACK = 1.5
# A cluster is not offered with fewer samples, nor with a smaller share of the new ones.
LEAST, LEAST_SHARE = 5, 0.01
# Nearest rows that say whether a sample is of an offered cluster, and how many have to.
VOTERS, MAJORITY = 5, 3
# Nearest neighbours that tie seeds together: with fewer a class falls into pieces, with more two
# classes become one (5, 7, 10 and 15 were tried on digits and Fashion-MNIST).
LINKS = 10
ROUNDS = 10  # of growing; it ends by itself in two to six
QUERIES = 1024


class NewClusters(nn.Module):
    """Clusters that came later, by the samples that they were found in.

    A sample is of one where its nearest row, among these and the training samples that a model
    keeps, is of that cluster, and three of the nearest five are. So a training sample that is kept
    never leaves its cluster: it is its own nearest row.

    Args:
        dim: width d of the rows.
        n: number m of them.
    """

    rows: Tensor
    clusters: Tensor

    def __init__(self, dim: int, n: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(n, dim))
        self.register_buffer("clusters", torch.zeros(n, dtype=torch.int64))

    def claims(self, z: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows are of an offered cluster.

        Args:
            z: `[batch, d]`.
            reference: `[r, d]`, the training samples.

        Returns:
            The cluster `[batch]` int64, counted from 0, -1 for none; and the share of the nearest
            five that are of it, `[batch]` in [0, 1].
        """
        pool = torch.cat([reference, self.rows])
        owner = torch.cat([self.clusters.new_full((len(reference),), -1), self.clusters])
        found = [owner[_nearest(block, pool)] for block in z.split(QUERIES)]
        owners = torch.cat(found) if found else owner.new_zeros(0, VOTERS)
        votes = (owners == owners[:, :1]).sum(1)
        of_one = (owners[:, 0] >= 0) & (votes >= MAJORITY)
        return torch.where(of_one, owners[:, 0], -1), votes / VOTERS


def _nearest(z: Tensor, pool: Tensor) -> Tensor:
    """The nearest rows `[batch, 5]` of the pool; among equals those that come first."""
    columns = torch.cdist(z, pool).topk(min(2 * VOTERS, len(pool)), largest=False).indices
    columns = columns.sort(dim=1).values
    # Those came from a product, whose rounding hides small distances.
    order = (pool[columns] - z.unsqueeze(1)).norm(dim=-1).sort(dim=1, stable=True).indices
    return columns.gather(1, order)[:, :VOTERS]


def find_new_clusters(
    reference: Tensor, old: Tensor, new: Tensor, joined: Tensor, device: str | torch.device = "cpu"
) -> Tensor:
    """Groups of new samples that lie where old ones do not, by more than chance.

    Were a cluster's new samples like its old ones, each neighbour of a new sample would be new with
    the probability `q_c = new_c / (new_c + old_c)` of the cluster c that the neighbour is in, and
    so the number of new ones among k neighbours at most binomial with the mean of these
    (Hoeffding). A sample with so many that the probability is below 0.01 / n is a seed. Seeds that
    are each other's neighbours form a group, and a group of five or more grows by the samples that
    are nearest to it. The shares of the clusters may differ between old and new as they like:
    another mixture of the old clusters is nothing new.

    Args:
        reference: `[r, d]`, old samples.
        old: `[r]` integer, their clusters.
        new: `[n, d]`, those of `comparable`.
        joined: `[n]` integer, the old cluster that is nearest to each.
        device: where neighbours are searched.

    Returns:
        `[n]` int64: the group of each new sample, largest first, or -1.

    References:
        Schilling, Multivariate two-sample tests based on nearest neighbors, JASA 1986.
        Hoeffding, On the distribution of the number of successes in independent trials, 1956.
    """
    found = torch.full((len(new),), -1)
    if len(new) < LEAST:
        return found
    # Copies of one sample are one sample: they would vouch for each other.
    rows = np.sort(np.unique(new.numpy(), axis=0, return_index=True)[1])
    n, r = len(rows), len(reference)
    clusters = np.concatenate([old.numpy(), joined.numpy()[rows]])
    counts = [np.bincount(part, minlength=clusters.max() + 1) for part in np.split(clusters, [r])]
    share = counts[1] / np.maximum(counts[0] + counts[1], 1)
    enough = math.log(CHANCE / n) / math.log(share[clusters[r:]].mean())
    k = min(max(NEIGHBOURS, math.ceil(SLACK * enough)), r + n - 1)
    pool = torch.cat([reference, new[rows]])
    near = nearest_neighbours(pool, k, metric="euclidean", device=device)[r:].numpy()

    chance = binom.sf((near >= r).sum(1) - 1, k, share[clusters[near]].mean(1))
    seeds = np.flatnonzero(chance < CHANCE / n)
    groups = _grown(_groups(seeds, near - r, n), near - r)
    sizes = np.bincount(groups[groups >= 0], minlength=1)
    kept = [g for g in np.argsort(-sizes, kind="stable") if sizes[g] >= max(LEAST, LEAST_SHARE * n)]
    for number, group in enumerate(kept):
        found[rows[groups == group]] = number
    return found


def comparable(old: Tensor, joined: Tensor) -> Tensor:
    """A random part of the new samples, with no more of a cluster than there are old ones.

    Args:
        old: `[r]` integer, the clusters of the old samples.
        joined: `[n]` integer, those of the new ones.

    Returns:
        Rows of new samples, int64, ascending: at most r.
    """
    order = torch.randperm(len(joined), generator=torch.Generator().manual_seed(0))
    clusters, by_cluster = joined[order].sort(stable=True)
    place = torch.arange(len(order)) - torch.searchsorted(clusters, clusters)  # in its cluster
    most = old.bincount(minlength=int(joined.max()) + 1)[clusters]
    return order[by_cluster[place < most]].sort().values


def _groups(seeds: NDArray, near: NDArray, n: int) -> NDArray:
    """The group of each of n samples, or -1: seeds that are each other's neighbours hang together.

    `near` `[n, k]` are the neighbours' numbers, negative for old samples.
    """
    is_seed = np.zeros(n, dtype=bool)
    is_seed[seeds] = True
    near = near[:, :LINKS]
    i, place = np.nonzero((near[seeds] >= 0) & is_seed[near[seeds].clip(0)])
    ties = sp.coo_matrix((np.ones(len(i)), (seeds[i], near[seeds][i, place])), (n, n)).tocsr()
    _, labels = connected_components(ties.multiply(ties.T), directed=False)
    sizes = np.bincount(labels[seeds], minlength=n)
    return np.where(is_seed & (sizes[labels] >= LEAST), labels, -1)


def _grown(groups: NDArray, near: NDArray) -> NDArray:
    """The groups, with the samples that three of the nearest five old or grouped rows are of."""
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
