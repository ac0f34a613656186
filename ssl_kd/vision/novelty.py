"""Outlier scores: how far out a sample lies, relative to the density around it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssl_kd.guard.precision import default_torch_state

# Stored training samples; a random part of more loses next to nothing.
REFERENCE_ROWS = 5_000
# Neighbors whose mean distance is used; with fewer, a few outliers side by side look normal.
NEIGHBORS = 10
# Of the length relative to the direction: chosen from 0.1 and 0.3 by the AUROC of left-out classes,
# noise and blends of two samples; a larger weight would hide the direction.
LENGTH_WEIGHT = 0.3
SHORTEST = 1e-3  # of the median length: a shorter row has no direction
# In units of a direction's length: distance of two copies of a sample, and smallest spacing of
# duplicates.
SAME, DENSEST = 1e-5, 1e-3
QUERIES = 1024
MIN_WIDTH = 8  # in narrower embeddings a constant row may be a sample


class Novelty(nn.Module):
    """Score a sample by the share of training samples that are less far out.

    A row becomes its direction and the logarithm of its length, `z = (x / |x|, 0.3 log |x|)`, and
    its direction from the origin o of the embeddings, `(x - o) / |x - o|`: from centered rows alone
    the zero embedding, in the middle of sparse ones, would seem the most typical of all. With
    `D(z)` the mean distance to the ten nearest training samples `N(z)`,

        far(z) = D(z) / sqrt(mean_{j in N(z)} D(z_j))

    is half-way between the distance itself (Sun et al.), which marks every sample of a sparse
    cluster, and the distance relative to that of the neighbors (LOF), which marks no sample among
    outliers. Of the shares of training samples with a smaller far(z) and with a smaller D(z), the
    greater one is compared with those of the training samples, each computed without the sample
    itself: new samples of the same source have scores spread evenly over [0, 1]. A training sample
    that comes again is recognized, and left out of its own neighbors.

    Args:
        dim: width d of the rows.
        n: number of stored rows, at least 2.

    References:
        Breunig et al., LOF: Identifying density-based local outliers, SIGMOD 2000.
        Sun et al., Out-of-distribution detection with deep nearest neighbors, ICML 2022, eq. 2.
    """

    reference: Tensor
    spacing: Tensor
    reach: Tensor
    own: Tensor
    places: Tensor
    length: Tensor
    origin: Tensor

    def __init__(self, dim: int, n: int) -> None:
        super().__init__()
        self.k = min(NEIGHBORS, n - 1)
        self.register_buffer("reference", torch.zeros(n, dim + 1))
        self.register_buffer("spacing", torch.zeros(n))  # D of each
        self.register_buffer("reach", torch.zeros(n))  # distance of its last neighbour
        self.register_buffer("own", torch.zeros(n))  # far(z) of each, ascending
        self.register_buffer("places", torch.zeros(n))  # the greater share of each, ascending
        self.register_buffer("length", torch.ones(()))
        self.register_buffer("origin", torch.zeros(dim))

    @classmethod
    @default_torch_state()
    @torch.no_grad()
    def fit(cls, x: Tensor, origin: Tensor | None = None) -> Novelty:
        """Return the scorer that compares with rows x `[n, d]`; `origin` is the projected zero.

        Raises:
            ValueError: fewer than two rows.
        """
        if len(x) < 2:
            raise ValueError(f"x has {len(x)} rows, expected at least 2 to compare with each other")
        novelty = cls(x.shape[1], len(x))
        median = x.double().norm(dim=1).median()
        novelty.length.copy_(median if median > 0 else torch.ones_like(median))
        if origin is not None:
            novelty.origin.copy_(origin)
        novelty.reference.copy_(novelty.polar(x))
        headings = novelty._headings(novelty.reference)
        distances, _, _ = novelty._nearest(novelty.reference, headings)
        novelty.spacing.copy_(distances.mean(1))
        novelty.reach.copy_(distances[:, -1])
        far, apart = novelty._far(novelty.reference, headings)
        novelty.own.copy_(far.sort().values)
        novelty.places.copy_(novelty._greater_share(far, apart).sort().values)
        return novelty

    def score(self, x: Tensor) -> Tensor:
        """Rows `[batch, d]` -> `[batch]` float32 in [0, 1], 1 beyond all training samples.

        A threshold of 0.99 marks about one in a hundred samples of the training data's source.
        """
        headings = self._headings(self.reference)
        places = [
            self._greater_share(*self._far(self.polar(block), headings))
            for block in (x.split(QUERIES) if len(x) else [])
        ]
        shares = torch.cat(places) if places else self.own[:0]
        return torch.searchsorted(self.places, shares).float() / len(self.own)

    @property
    def rows(self) -> Tensor:
        """The stored rows `[n, d]` float32, by the inverse of `polar`."""
        log_length = self.reference[:, -1:].double() / LENGTH_WEIGHT
        return (self.reference[:, :-1] * log_length.exp() * self.length.double()).float()

    def polar(self, x: Tensor) -> Tensor:
        """Rows `[batch, d]` -> `[batch, d + 1]` float32: direction, and weighted log length."""
        x = x.double() / self.length.double()  # squares of 1e19 overflow in float32
        length = x.norm(dim=1, keepdim=True) + SHORTEST
        return torch.cat([x / length, LENGTH_WEIGHT * length.log()], 1).float()

    def _headings(self, z: Tensor) -> Tensor:
        """Polar rows `[batch, d + 1]` -> `[batch, 2 d + 1]`, with the direction from the origin."""
        x = z[:, :-1].double() * (z[:, -1:].double() / LENGTH_WEIGHT).exp()
        x = x - self.origin.double() / self.length.double()
        return torch.cat([(x / (x.norm(dim=1, keepdim=True) + SHORTEST)).float(), z], 1)

    def _far(self, z: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
        """Return far(z) and D(z), `[batch]` each; a neighbor's spacing counts `z` as a neighbor.

        `reference` are the headings of all training samples.
        """
        distances, columns, known = self._nearest(z, reference)
        reach = self.reach[columns]
        nearer = (distances.minimum(reach) - reach).masked_fill(known.unsqueeze(1), 0) / self.k
        around = (self.spacing[columns] + nearer).mean(1)
        apart = distances.mean(1)
        return apart / around.clamp(min=DENSEST).sqrt(), apart

    def _greater_share(self, far: Tensor, apart: Tensor) -> Tensor:
        """Return the greater share of training samples, with a smaller far(z) or D(z)."""
        less = torch.searchsorted(self.own, far), torch.searchsorted(self.spacing.sort()[0], apart)
        return torch.maximum(*less).float() / len(self.own)

    def _nearest(self, z: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return distances and numbers of the k nearest others `[batch, k]`, and copies `[batch]`.

        A copy is a sample that is one of the reference.
        """
        blocks, offsets = [], reference.square().sum(1) / 2
        for block in self._headings(z).split(QUERIES):
            products = torch.addmm(offsets, block, reference.T, beta=-1)
            columns = products.topk(self.k + 1).indices
            # Those came from a product, whose rounding hides small distances.
            exact = (reference[columns] - block.unsqueeze(1)).norm(dim=-1)
            exact, order = exact.sort(dim=1, stable=True)
            columns, known = columns.gather(1, order), exact[:, 0] <= SAME
            first = known.long().unsqueeze(1) + torch.arange(self.k, device=z.device)
            blocks.append((exact.gather(1, first), columns.gather(1, first), known))
        distances, columns, known = map(torch.cat, zip(*blocks, strict=True))
        return distances, columns, known


def is_dead(x: Tensor) -> Tensor:
    """Return which embeddings `[n, D]` have no content: zeros, or one value in `MIN_WIDTH` columns.

    They are those of blank images or empty texts.
    """
    same = (x == x[:, :1]).all(1)
    return same if x.shape[1] >= MIN_WIDTH else same & (x[:, 0] == 0) & (x.shape[1] > 1)


def without_outliers(clusters: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Return clusters `[n]`, -1 (noise) where the outlier score `[n]` is above the threshold."""
    return clusters.masked_fill(scores > threshold, -1)
