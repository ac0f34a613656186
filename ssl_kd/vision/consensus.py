"""One answer from many heads, without labels: one partition names the clusters, the heads vote."""

from __future__ import annotations

import torch
from torch import Tensor


def judging_pairs(neighbours: Tensor, seed: int, most: int) -> Tensor:
    """Pairs of a sample and one of the nearest quarter of its neighbours, to judge heads by.

    All of them, mutual or not: training keeps to the safe pairs, and the doubtful ones are where a
    wrong partition shows.

    Args:
        neighbours: `[n, k]` integer, nearest first.
        seed: draws the sample where there are more pairs than `most`.
        most: largest number of pairs.

    Returns:
        `[2, pair]` int64 rows.
    """
    n = len(neighbours)
    near = neighbours[:, : -(-neighbours.shape[1] // 4)]
    if near.numel() <= most:
        others = near.long().flatten()
        return torch.stack([torch.arange(n).repeat_interleave(near.shape[1]), others])
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(n, (most,), generator=g)
    columns = torch.randint(near.shape[1], (most,), generator=g)
    return torch.stack([rows, near[rows, columns].long()])


def neighbour_information(first: Tensor, second: Tensor, n_clusters: int) -> float:
    """Mutual information between the clusters of samples and of their neighbours, in nats.

    It is what the TEMI loss estimates, for a hard partition: high when neighbours share a cluster
    *and* the clusters are many and even; 0 when everything is one cluster, at most `log K`. It is
    the judge without labels: where heads of nearly the same loss have fallen into different optima,
    it ranks them better than the loss does.

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


def vote_tables(clusters: Tensor, anchor: Tensor, n_clusters: int) -> Tensor:
    """Which cluster of one partition each cluster of each head stands for.

    A head that merged or split classes says so: the row of a cluster that covers two of the best
    head's is shared between them, and its vote decides neither.

    Args:
        clusters: `[head, n]` int64, each head's own.
        anchor: `[n]` int64, that partition: the one that they learnt, or the best head's.
        n_clusters: of either.

    Returns:
        `[head, cluster, n_clusters]` float32, each row a distribution; uniform for a cluster that
        the head never uses.
    """
    heads = torch.arange(len(clusters)).unsqueeze(1)
    cells = (heads * n_clusters + clusters) * n_clusters + anchor
    counts = torch.bincount(cells.flatten(), minlength=len(clusters) * n_clusters**2)
    counts = counts.view(len(clusters), n_clusters, n_clusters).float()
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts / total.clamp(min=1), 1 / n_clusters)


def sample_rows(n: int, seed: int, most: int) -> Tensor:
    """All rows in order, or a random sample of `most` of them in order."""
    if n <= most:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:most].sort().values
