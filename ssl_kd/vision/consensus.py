"""One answer from many heads, without labels: what the best of them agree on, by vote."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import scipy.sparse
import torch
from sklearn.cluster import KMeans
from sklearn.utils.extmath import randomized_svd
from torch import Tensor

logger = logging.getLogger(__name__)


def healthy_heads_by_loss(loss: Tensor, healthy: Tensor) -> Tensor:
    """The numbers of the healthy heads, lowest loss first.

    The loss is a fair judge without labels: heads of one objective on one set of data differ only
    in the optimum they fell into, and those of lower loss merge and split fewer classes.

    Args:
        loss: `[head]`, running mean.
        healthy: boolean `[head]`.

    Raises:
        ValueError: no head is healthy.
    """
    usable = healthy & torch.isfinite(loss)
    if not usable.any():
        raise ValueError("no head is healthy, so there is no answer to form")
    return torch.where(usable, loss, torch.inf).argsort()[: int(usable.sum())]


def consensus_partition(clusters: Tensor, n_clusters: int, seed: int) -> Tensor:
    """Spectral clustering of the heads' co-association, without ever forming it.

    Two samples are as close as the share of heads that put them together (Fred & Jain, 2005). That
    `[n, n]` matrix is `M M^T / heads`, with `M` the `[n, heads * clusters]` indicator matrix, so
    the eigenvectors that spectral clustering needs are the left singular vectors of the sparse
    `D^{-1/2} M`: time and memory grow with n, not with its square.

    Args:
        clusters: `[head, n]` int64, each head's own clusters in `[0, n_clusters)`.
        n_clusters: number of clusters of the answer.
        seed: of the singular vectors and of k-means.

    Returns:
        `[n]` int64.

    References:
        Fred & Jain, Combining Multiple Clusterings Using Evidence Accumulation, 2005; Shi & Malik,
        Normalized Cuts and Image Segmentation, 2000.
    """
    heads, n = clusters.shape
    columns = (clusters + n_clusters * torch.arange(heads).unsqueeze(1)).T.flatten().numpy()
    ones = np.ones(heads * n)
    starts = np.arange(0, heads * n + 1, heads)
    together = scipy.sparse.csr_matrix((ones, columns, starts), (n, heads * n_clusters))
    root = np.sqrt(together @ together.sum(0).A1)  # of each sample's degree; at least 1
    scaled = scipy.sparse.diags(1 / root) @ together
    # A block method: unanimous heads make the largest value K-fold, where Lanczos finds one vector.
    vectors = randomized_svd(scaled, min(n_clusters, n), n_iter=7, random_state=seed)[0]
    places = vectors / root[:, None]
    places /= np.abs(places).max()
    found = KMeans(n_clusters, n_init=10, random_state=seed).fit_predict(places)
    return torch.from_numpy(found.astype(np.int64))


def vote_tables(clusters: Tensor, partition: Tensor, n_clusters: int) -> Tensor:
    """Which cluster of the answer each cluster of each head stands for.

    Args:
        clusters: `[head, n]` int64, each head's own.
        partition: `[n]` int64, the answer.
        n_clusters: of either.

    Returns:
        `[head, cluster, n_clusters]` float32, each row a distribution; uniform for a cluster that
        the head never uses.
    """
    heads = torch.arange(len(clusters)).unsqueeze(1)
    cells = (heads * n_clusters + clusters) * n_clusters + partition
    counts = torch.bincount(cells.flatten(), minlength=len(clusters) * n_clusters**2)
    counts = counts.view(len(clusters), n_clusters, n_clusters).float()
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts / total.clamp(min=1), 1 / n_clusters)


def neighbour_information(first: Tensor, second: Tensor, n_clusters: int) -> float:
    """Mutual information between the clusters of samples and of their neighbours, in nats.

    It is what the TEMI loss estimates, for a hard partition: high when neighbours share a cluster
    *and* the clusters are many and even; 0 when everything is one cluster, at most `log K`.

    Args:
        first: `[pair]` int64, cluster of a sample.
        second: `[pair]` int64, cluster of its neighbour.
        n_clusters: K.
    """
    cells = torch.bincount(first * n_clusters + second, minlength=n_clusters**2).double()
    joint = cells.view(n_clusters, n_clusters)
    joint = (joint + joint.T) / joint.sum() / 2
    marginal = joint.sum(0)
    independent = marginal.unsqueeze(0) * marginal.unsqueeze(1)
    used = joint > 0
    return float((joint[used] * (joint[used] / independent[used]).log()).sum())


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The answer of some heads: how many, best first, their vote tables, and how good it is."""

    n_heads: int
    votes: Tensor
    information: float


def candidates(
    clusters: Tensor,
    first: Tensor,
    second: Tensor,
    n_clusters: int,
    seed: int,
    sizes: list[int],
) -> list[Candidate]:
    """The answers of the best head, of the best few, ... of all, with their neighbour information.

    Many heads average out each other's mistakes, but the worse ones share some: which weighs more
    depends on the data, and the information between neighbours tells without a label.

    Args:
        clusters: `[head, n]` int64, best head first.
        first: `[pair]` int64, positions in `n`.
        second: `[pair]` int64, positions of their neighbours.
        n_clusters: of the answer.
        seed: of the consensus.
        sizes: how many of the best heads form each answer.
    """
    found = []
    for size in sizes:
        some = clusters[:size]
        partition = some[0]
        if size > 1:
            partition = consensus_partition(some, n_clusters, seed)
        votes = vote_tables(some, partition, n_clusters)
        chosen = votes[torch.arange(size).unsqueeze(1), some].mean(0).argmax(-1)
        information = neighbour_information(chosen[first], chosen[second], n_clusters)
        found.append(Candidate(size, votes, information))
        logger.debug("answer of %d heads: %.4f nats between neighbours", size, information)
    return found


def sizes_to_try(n_heads: int, most: int | None) -> list[int]:
    """1, then the powers of two times three up to all heads: 1, 3, 6, 12, 24, 48."""
    most = n_heads if most is None else min(most, n_heads)
    doubling = [3 * 2**i for i in range(32) if 3 * 2**i < most]
    return sorted({1, *doubling, most})


def sample_rows(n: int, seed: int, most: int) -> Tensor:
    """All rows in order, or a random sample of `most` of them in order."""
    if n <= most:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:most].sort().values
