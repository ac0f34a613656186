"""Find the number of clusters: at which different clustering methods agree with each other.

The score of K clusters is `Q(K) F(K)`. F is the agreement of five families of the consensus: each
divides the samples into K clusters, and the adjusted Rand index is averaged over pairs of families.
Q is the modularity of communities. F alone can be large for two or three clusters of any data, and
Q alone has its maximum at about ten clusters in any neighbor graph. The highest score often has too
many clusters, so the smallest K that is nearly best is used.

If clusters are well separated but long, communities, density peaks and density mass find the same
clusters, and most families divide them. Then their number is used instead of the score.

The score and the shares of its maximum were chosen by `benchmarks.number`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import threadpool_limits

from ssl_kd.core.errors import InputError
from ssl_kd.vision.graph.criterion import Graph, Ints, adjusted_rand_index
from ssl_kd.vision.graph.ensemble import WIDER, Candidate, mutual_agreement
from ssl_kd.vision.graph.kmeans import kmeans
from ssl_kd.vision.graph.layout import Density
from ssl_kd.vision.graph.levels import levels, modularity
from ssl_kd.vision.graph.spectral import on_sphere, spectral_coordinates

MOST = 250  # clusters, at most
MIN_SIZE = 16  # samples of a cluster on average
MIN_SAMPLES = 64  # in all
STEP = 1.08  # least factor between the numbers that are scored
SMOOTH = 0.1  # standard deviation of the Gaussian that smooths the score along log K
NEARLY_BEST = 0.96  # share of the highest score; the smallest number that has it is used
# The likely numbers have this share of the highest score, and are these multiples of that number.
PLAUSIBLE = 0.6
LOWEST = 0.5
HIGHEST = 1.5
# Larger numbers are not scored once the score has fallen this far, this factor above the best.
FALLEN, BEYOND = 0.8, 3
COMPARED = 2500  # samples, at most, of which partitions are compared
FIRST_VECTORS = 32
APART = 1.25  # two alternatives closer than this factor are one
# Mean adjusted Rand index of unanimous methods, of up to FEW clusters; below HOPELESS in the first
# layout the others are skipped.
UNANIMOUS = 0.97
FEW = 30
HOPELESS = 0.9


@dataclass(frozen=True)
class Level:
    """Score of a number of clusters."""

    n_clusters: int
    worth: float  # the score, `modularity * agreement`, smoothed along the logarithm of K
    modularity: float
    agreement: float  # adjusted Rand index of families of methods, mean over pairs of families


@dataclass(frozen=True)
class Evidence:
    """The likely numbers of clusters, and the one that is used."""

    n_clusters: int  # the smallest with at least 96 % of the highest score, or the unanimous one
    # From half to one and a half times that number, less those with under 60 % of that score.
    interval: tuple[int, int]
    ranked: list[Level]  # local maxima with at least 60 % of the highest score, best first


def number_of_clusters(
    graph: Graph, points: Sequence[NDArray], densities: Sequence[Density]
) -> Evidence:
    """Find the number of clusters, between 2 and 250, with at least 16 samples on average.

    The arguments are those of `Families`.

    Raises:
        InputError: If there are fewer than 64 samples.
    """
    check_enough(graph.n)
    most = min(MOST, graph.n // MIN_SIZE)
    with threadpool_limits(1):  # small products are faster with one thread
        # Refinement may leave a single community.
        partitions = levels(graph, most, seed=0) or {2: kmeans(points[0], 2, 0)}
        scored = _levels(graph, Families(graph, points, densities), partitions)
        number = unanimous(partitions, densities)
    best = max(level.worth for level in scored)
    if number is None:
        number = next(v.n_clusters for v in scored if v.worth >= NEARLY_BEST * best)
    plausible = [level for level in scored if level.worth >= PLAUSIBLE * best]
    likely = likely_numbers(number, [level.n_clusters for level in plausible])
    ranked = [
        level
        for level in sorted(plausible, key=lambda level: -level.worth)
        if level.worth >= max(o.worth for o in plausible if _near(o, level))
    ]
    return Evidence(number, (likely[0], likely[-1]), ranked)


def likely_numbers(number: int, plausible: Iterable[int]) -> list[int]:
    """Return `number` and the `plausible` numbers near it, the smallest first."""
    near = {k for k in plausible if LOWEST * number <= k <= HIGHEST * number}
    return sorted({number, *near})


def check_enough(n: int, left_out: int = 0) -> None:
    """Raise InputError if there are too few samples to find the number of clusters.

    `n` does not count the `left_out` samples, whose image or embedding cannot be used.
    """
    if n < MIN_SAMPLES:
        what = f"there are {n} samples"
        if left_out:
            what = (
                f"{n} of {n + left_out} samples are left after {left_out} were left out, for the"
                " reasons in the log"
            )
        raise InputError(
            f"{what}; expected at least {MIN_SAMPLES} to find the number of clusters: set it"
            " (setting N_CLUSTERS, argument n_clusters)"
        )


class Families:
    """Divide up to 2,500 of the samples of a graph into K clusters by each voting family.

    Args:
        graph: neighbor graph of n samples.
        points: rows `[n, d]` for k-means; one array or more.
        densities: layouts of neighbor graphs of the samples; one or more.
    """

    def __init__(
        self, graph: Graph, points: Sequence[NDArray], densities: Sequence[Density]
    ) -> None:
        self.rows = np.sort(np.random.default_rng(0).permutation(graph.n)[:COMPARED])
        self._graph, self._densities = graph, densities
        self._points = [x[self.rows] for x in points]
        self._vectors = spectral_coordinates(graph.matrix, FIRST_VECTORS)

    def candidates(self, communities: Ints, k: int) -> list[Candidate]:
        """Return partitions of the samples `rows` into k clusters; `communities` is `[n]`."""
        width = int(WIDER * k) + 1
        if width > self._vectors.shape[1]:
            self._vectors = spectral_coordinates(self._graph.matrix, 2 * width)
        coordinates = on_sphere(self._vectors[self.rows, :width])
        candidates = [Candidate("communities", communities[self.rows])]
        candidates += [Candidate("k-means", kmeans(x, k, 0)) for x in self._points]
        candidates.append(Candidate("spectral", kmeans(coordinates, k, 0)))
        for density in self._densities:
            candidates.append(Candidate("layout", kmeans(density.places[self.rows], k, 0)))
            candidates.append(Candidate("density leaves", density.leaves(k)[self.rows]))
        return candidates


def apart(numbers: Iterable[int], step: float = STEP) -> list[int]:
    """Return the smallest of the numbers, and others at least the factor `step` apart."""
    kept: list[int] = []
    for number in sorted(numbers):
        if not kept or number >= step * kept[-1]:
            kept.append(number)
    return kept


def smoothed(numbers: Sequence[int], scores: ArrayLike) -> NDArray[np.float64]:
    """Return the scores of numbers of clusters, smoothed along the logarithm of the number."""
    place = np.log(numbers)
    weights = np.exp(-0.5 * ((place[:, None] - place) / SMOOTH) ** 2)
    return weights @ np.asarray(scores) / weights.sum(1)


def _levels(graph: Graph, families: Families, partitions: Mapping[int, Ints]) -> list[Level]:
    """Return the levels that are scored; `partitions` are communities `[n]` by their number."""
    found: list[tuple[int, float, float]] = []
    scores: list[float] = []
    for k in apart(partitions):
        quality = modularity(graph, partitions[k], k)
        agreement = mutual_agreement(families.candidates(partitions[k], k))
        found.append((k, quality, agreement))
        scores.append(quality * max(agreement, 0.0))
        best = int(np.argmax(scores))
        if k >= BEYOND * found[best][0] and scores[-1] < FALLEN * scores[best]:
            break
    worths = smoothed([k for k, _, _ in found], scores)
    return [Level(k, float(w), q, f) for (k, q, f), w in zip(found, worths, strict=True)]


def unanimous(partitions: Mapping[int, Ints], densities: Sequence[Density]) -> int | None:
    """Return the number of clusters, up to 30, at which all methods agree best, or None.

    The methods are communities (`partitions` `[n]`, by number of clusters) and the density peaks
    and density mass of each layout.
    """
    best, number = UNANIMOUS, None
    for k, clusters in sorted(partitions.items()):
        if k > FEW:
            break
        similar, scores = [clusters], [0.0]
        for density in densities:
            similar += [density.peaks(k), density.heaviest(k)]
            scores = [adjusted_rand_index(a, b) for a, b in combinations(similar, 2)]
            if np.mean(scores) < HOPELESS:
                break
        if np.mean(scores) >= best:
            best, number = float(np.mean(scores)), k
    return number


def _near(a: Level, b: Level) -> bool:
    return 1 / APART < a.n_clusters / b.n_clusters < APART
