"""Compute outlier scores: how unusual a sample is among the training samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssl_kd.core.precision import default_torch_state

# Maximum number of stored training samples; more, at random, improve the scores very little.
REFERENCE_ROWS = 5_000
# Neighbors whose mean distance is used; with fewer, small groups of outliers look normal.
NEIGHBORS = 10
# Weight of the log length relative to the direction. Of 0.1 and 0.3, this one had the better AUROC
# for left-out classes, noise and blends of two samples; a larger one would hide the direction.
LENGTH_WEIGHT = 0.3
SHORTEST = 1e-3  # added to lengths, in units of the median length: short rows have no direction
# Maximum distance of two copies of a sample, and minimum mean distance around a sample.
SAME, DENSEST = 1e-5, 1e-3
QUERIES = 1024  # rows that are compared at once
MIN_WIDTH = 8  # in narrower embeddings, a row of equal values may be a real sample


class Novelty(nn.Module):
    """Score samples by the share of training samples that are less unusual.

    Let `D(z)` be the mean distance of a sample z to its ten nearest training samples `N(z)`, and

        far(z) = D(z) / sqrt(mean_{j in N(z)} D(z_j)).

    This is a compromise between the distance itself (Sun et al.), which marks all samples of a
    sparse cluster, and the distance relative to that of the neighbors (LOF), which misses samples
    in a group of outliers. Let s(z) be the larger of two shares: of training samples with a smaller
    far(z), and of training samples with a smaller D(z). The score is the share of training samples
    with a smaller s(z), where each was computed without the sample itself. Scores of new samples
    from the same source are therefore spread evenly over [0, 1]. A training sample that is scored
    again is recognized and is not its own neighbor.

    Distances are between vectors of the direction `x / |x|`, the weighted log length `0.3 log |x|`,
    and the direction `(x - o) / |x - o|` from the projected zero embedding o. Without the last
    part, an embedding of zeros would look typical, because centered samples surround it.

    References:
        Breunig et al., LOF: Identifying density-based local outliers, SIGMOD 2000.
        Sun et al., Out-of-distribution detection with deep nearest neighbors, ICML 2022, eq. 2.
    """

    reference: Tensor  # `[n, d + 1]`, the stored training samples in polar form
    spacing: Tensor  # `[n]`, D of each
    reach: Tensor  # `[n]`, distance to the last of the k neighbors
    own: Tensor  # `[n]`, far(z) of the stored samples, ascending
    places: Tensor  # `[n]`, s(z) of the stored samples, ascending
    length: Tensor  # median length
    origin: Tensor  # `[d]`, projection of the zero embedding

    def __init__(self, dim: int, n: int) -> None:
        super().__init__()
        self.k = min(NEIGHBORS, n - 1)
        self.register_buffer("reference", torch.zeros(n, dim + 1))
        for name in ("spacing", "reach", "own", "places"):
            self.register_buffer(name, torch.zeros(n))
        self.register_buffer("length", torch.ones(()))
        self.register_buffer("origin", torch.zeros(dim))

    @classmethod
    @default_torch_state()
    @torch.no_grad()
    def fit(cls, x: Tensor, origin: Tensor | None = None) -> Novelty:
        """Fit a scorer to projected embeddings `[n, d]`; `origin` None stands for zeros."""
        if len(x) < 2:
            raise ValueError(f"x has {len(x)} rows; expected at least 2 to compare with each other")
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
        """Return the outlier scores of rows `[batch, d]`, float32 in [0, 1]."""
        headings = self._headings(self.reference)
        places = [
            self._greater_share(*self._far(self.polar(block), headings))
            for block in (x.split(QUERIES) if len(x) else [])
        ]
        shares = torch.cat(places) if places else self.own[:0]
        return torch.searchsorted(self.places, shares).float() / len(self.own)

    @property
    def rows(self) -> Tensor:
        """The stored training samples `[n, d]` float32, recovered from their `polar` form."""
        log_length = self.reference[:, -1:].double() / LENGTH_WEIGHT
        return (self.reference[:, :-1] * log_length.exp() * self.length.double()).float()

    def polar(self, x: Tensor) -> Tensor:
        """Convert rows `[batch, d]` to direction and weighted log length, `[batch, d + 1]`."""
        x = x.double() / self.length.double()  # squares of 1e19 overflow in float32
        length = x.norm(dim=1, keepdim=True) + SHORTEST
        return torch.cat([x / length, LENGTH_WEIGHT * length.log()], 1).float()

    def _headings(self, z: Tensor) -> Tensor:
        """Add the direction from the origin to polar rows, `[batch, 2 d + 1]`."""
        x = z[:, :-1].double() * (z[:, -1:].double() / LENGTH_WEIGHT).exp()
        x = x - self.origin.double() / self.length.double()
        return torch.cat([(x / (x.norm(dim=1, keepdim=True) + SHORTEST)).float(), z], 1)

    def _far(self, z: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
        """Return far(z) and D(z), `[batch]` each; D of a neighbor includes z as a neighbor."""
        distances, columns, known = self._nearest(z, reference)
        reach = self.reach[columns]
        nearer = (distances.minimum(reach) - reach).masked_fill(known.unsqueeze(1), 0) / self.k
        around = (self.spacing[columns] + nearer).mean(1)
        apart = distances.mean(1)
        return apart / around.clamp(min=DENSEST).sqrt(), apart

    def _greater_share(self, far: Tensor, apart: Tensor) -> Tensor:
        """Return the larger share of training samples: with a smaller far(z), or a smaller D(z)."""
        less = torch.searchsorted(self.own, far), torch.searchsorted(self.spacing.sort()[0], apart)
        return torch.maximum(*less).float() / len(self.own)

    def _nearest(self, z: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return distances and indices of the k nearest training samples, `[batch, k]` each.

        The third result `[batch]` is True for samples that are training samples themselves.
        """
        blocks, offsets = [], reference.square().sum(1) / 2
        for block in self._headings(z).split(QUERIES):
            products = torch.addmm(offsets, block, reference.T, beta=-1)
            columns = products.topk(self.k + 1).indices
            # The products above hide small distances by rounding: compute these exactly.
            exact = (reference[columns] - block.unsqueeze(1)).norm(dim=-1)
            exact, order = exact.sort(dim=1, stable=True)
            columns, known = columns.gather(1, order), exact[:, 0] <= SAME
            first = known.long().unsqueeze(1) + torch.arange(self.k, device=z.device)
            blocks.append((exact.gather(1, first), columns.gather(1, first), known))
        distances, columns, known = map(torch.cat, zip(*blocks, strict=True))
        return distances, columns, known


def is_dead(x: Tensor) -> Tensor:
    """Mark rows of zeros, and wide rows of equal values, such as those of blank images."""
    same = (x == x[:, :1]).all(1)
    return same if x.shape[1] >= MIN_WIDTH else same & (x[:, 0] == 0) & (x.shape[1] > 1)
