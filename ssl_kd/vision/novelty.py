"""How far out a sample lies, by the density around it: a score for everyone, noise for no one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssl_kd.guard.precision import default_torch_state

# Training samples that are kept to compare with; a random part of more loses next to nothing.
REFERENCE_ROWS = 5_000
# Neighbours whose mean distance counts; with fewer, outliers side by side vouch for each other.
NEIGHBOURS = 10
# Of a length, beside the direction: chosen among 0.1 and 0.3 by the AUROC of left-out classes,
# noise and blends of two samples; more would drown the direction.
LENGTH_WEIGHT = 0.3
SHORTEST = 1e-3  # of the median length: what is nearer to the middle has no direction
# In units of a direction's length: nearer than rounding is the same sample, and a crowd of
# duplicates is no denser than this.
SAME, DENSEST = 1e-5, 1e-3
QUERIES = 1024
LEAST_WIDTH = 8  # of narrower embeddings a point on the diagonal may well be a sample


class Novelty(nn.Module):
    """The share of training samples that lie less far out than a sample.

    A row becomes its direction and the logarithm of its length, `z = (x / |x|, 0.3 log |x|)`, and
    its direction from the origin o of the embeddings, `(x - o) / |x - o|`: centred rows alone would
    call the zero embedding, which lies in the middle of sparse ones, the most typical of all. With
    `D(z)` the mean distance to the ten nearest training samples `N(z)`,

        far(z) = D(z) / sqrt(mean_{j in N(z)} D(z_j))

    lies half-way between the distance itself (Sun et al.), which calls every sample of a sparse
    cluster an outlier, and that in units of the neighbours' own (LOF), which calls none one that
    lies among outliers. The greater of the shares of training samples with a smaller far(z) and
    with a smaller D(z) counts, so that what is beyond all of them in either is beyond them. The
    score is the place of this among the training samples' own, each of which was left out when its
    own was computed: samples never seen, of the same source, have scores spread evenly over [0, 1].
    A training sample that is given again is recognised and left out as well.

    Args:
        dim: width d of the rows.
        n: rows kept to compare with, at least 2.

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
        self.k = min(NEIGHBOURS, n - 1)
        self.register_buffer("reference", torch.zeros(n, dim + 1))
        self.register_buffer("spacing", torch.zeros(n))  # D of each
        self.register_buffer("reach", torch.zeros(n))  # distance of its last neighbour
        self.register_buffer("own", torch.zeros(n))  # how far out they lie themselves, ascending
        self.register_buffer("places", torch.zeros(n))  # and by the greater share, ascending
        self.register_buffer("length", torch.ones(()))
        self.register_buffer("origin", torch.zeros(dim))

    @classmethod
    @default_torch_state()
    @torch.no_grad()
    def fit(cls, x: Tensor, origin: Tensor | None = None) -> Novelty:
        """Compare with these rows from now on.

        Args:
            x: `[n, d]`, finite, n at least 2: of very many a random `REFERENCE_ROWS`.
            origin: `[d]`, where the zero embedding lies among them; None: at 0.

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

        Of two thresholds the higher one calls fewer samples noise; 0.99 calls so about one in a
        hundred of those that come from where the training samples came from.
        """
        headings = self._headings(self.reference)
        places = [
            self._greater_share(*self._far(self.polar(block), headings))
            for block in (x.split(QUERIES) if len(x) else [])
        ]
        found = torch.cat(places) if places else self.own[:0]
        return torch.searchsorted(self.places, found).float() / len(self.own)

    @property
    def rows(self) -> Tensor:
        """The rows to compare with, as they came: `[n, d]` float32, the inverse of `polar`."""
        log_length = self.reference[:, -1:].double() / LENGTH_WEIGHT
        return (self.reference[:, :-1] * log_length.exp() * self.length.double()).float()

    def polar(self, x: Tensor) -> Tensor:
        """Rows `[batch, d]` -> `[batch, d + 1]` float32: direction, and what the length counts."""
        x = x.double() / self.length.double()  # squares of 1e19 overflow in float32
        length = x.norm(dim=1, keepdim=True) + SHORTEST
        return torch.cat([x / length, LENGTH_WEIGHT * length.log()], 1).float()

    def _headings(self, z: Tensor) -> Tensor:
        """Polar rows `[batch, d + 1]` with the direction from the origin: `[batch, 2 d + 1]`."""
        x = z[:, :-1].double() * (z[:, -1:].double() / LENGTH_WEIGHT).exp()
        x = x - self.origin.double() / self.length.double()
        return torch.cat([(x / (x.norm(dim=1, keepdim=True) + SHORTEST)).float(), z], 1)

    def _far(self, z: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
        """How far out, `[batch]`, and the mean distance to the neighbours, `[batch]`.

        A neighbour's own spacing counts `z` as one of its neighbours. `reference` has the headings
        of all training samples.
        """
        distances, columns, known = self._nearest(z, reference)
        reach = self.reach[columns]
        nearer = (distances.minimum(reach) - reach).masked_fill(known.unsqueeze(1), 0) / self.k
        around = (self.spacing[columns] + nearer).mean(1)
        apart = distances.mean(1)
        return apart / around.clamp(min=DENSEST).sqrt(), apart

    def _greater_share(self, far: Tensor, apart: Tensor) -> Tensor:
        """The share of training samples that lie less far out, or that are less far apart."""
        less = torch.searchsorted(self.own, far), torch.searchsorted(self.spacing.sort()[0], apart)
        return torch.maximum(*less).float() / len(self.own)

    def _nearest(self, z: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The k nearest that are not the sample itself: distances and numbers `[batch, k]`.

        The third, `[batch]`, is whether the sample is one of the reference.
        """
        found, offsets = [], reference.square().sum(1) / 2
        for block in self._headings(z).split(QUERIES):
            products = torch.addmm(offsets, block, reference.T, beta=-1)
            columns = products.topk(self.k + 1).indices
            # Those came from a product, whose rounding hides small distances.
            exact = (reference[columns] - block.unsqueeze(1)).norm(dim=-1)
            exact, order = exact.sort(dim=1, stable=True)
            columns, known = columns.gather(1, order), exact[:, 0] <= SAME
            first = known.long().unsqueeze(1) + torch.arange(self.k, device=z.device)
            found.append((exact.gather(1, first), columns.gather(1, first), known))
        distances, columns, known = map(torch.cat, zip(*found, strict=True))
        return distances, columns, known


def is_dead(x: Tensor) -> Tensor:
    """Which embeddings `[n, D]` hold nothing: zeros, or one value throughout `LEAST_WIDTH` columns.

    They have no direction, or that of every other dead input: a blank image, a text without words.
    """
    same = (x == x[:, :1]).all(1)
    return same if x.shape[1] >= LEAST_WIDTH else same & (x[:, 0] == 0) & (x.shape[1] > 1)


def without_outliers(clusters: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Clusters `[n]`, -1 ("noise") where the outlier score `[n]` is above the threshold."""
    return clusters.masked_fill(scores > threshold, -1)
