"""Evaluate frozen embeddings without labels, by the spectrum of their matrices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ssl_kd.vision.evaluate.sample import in_range, random_rows

MAX_ROWS = 25_600  # as in the RankMe paper
FITTED_RANKS = (11, 100)  # of the eigenvalues that the exponent is fitted to, from 1
FEWEST_RANKS = 10
DELTA = 1e-4  # as in the LiDAR paper


def rankme(x: NDArray, *, seed: int = 0, max_rows: int = MAX_ROWS) -> float:
    """Compute RankMe: the exponential of the entropy of the normalized singular values.

    Args:
        x: `[n, d]` embeddings, one row at least; they are not centered.
        seed: Seed of the random subset of a large set.
        max_rows: Largest number of rows; a larger set is replaced by a random subset.

    Returns:
        A number from 1 (all embeddings are multiples of one) to `min(n, d)`.

    References:
        Garrido et al., RankMe: Assessing the Downstream Performance of Pretrained Self-Supervised
        Representations by Their Rank, 2023, equation 1. It compares teachers of one kind; those of
        another width or training may differ in rank for other reasons.

    Example:
        >>> rankme(np.eye(4))
        4.0
    """
    values = np.linalg.svd(_sampled(x, seed, max_rows), compute_uv=False)
    return _effective_rank(values)


def alpha_req(x: NDArray, *, seed: int = 0, max_rows: int = MAX_ROWS) -> float | None:
    """Compute alpha-ReQ: the exponent of the power law of the eigenvalues of the covariance.

    Eigenvalue i of the covariance is modeled as `c i^(-alpha)`. The line `log c - alpha log i` is
    fitted to the logarithms of the eigenvalues of ranks 11 to 100, with weights 1 / i.

    Args:
        x: `[n, d]` embeddings, one row at least; their mean is subtracted.
        seed: Seed of the random subset of a large set.
        max_rows: Largest number of rows; a larger set is replaced by a random subset.

    Returns:
        The exponent. The paper finds the best representations near 1: a larger exponent means
        fewer directions, a smaller one more noise. None with fewer than 20 nonzero eigenvalues.

    References:
        Agrawal et al., alpha-ReQ: Assessing Representation Quality in Self-Supervised Learning by
        measuring eigenspectrum decay, 2022 (arXiv 2202.05808). The fit is that of Stringer et al.,
        High-dimensional geometry of population responses in visual cortex, 2019; the range of ranks
        differs between experiments, so exponents compare only for one range.
    """
    rows = _sampled(x, seed, max_rows)
    values = np.linalg.svd(rows - rows.mean(0), compute_uv=False) ** 2
    first, last = FITTED_RANKS
    values = values[values > values[0] * np.finfo(np.float32).eps ** 2][first - 1 : last]
    if len(values) < FEWEST_RANKS:
        return None
    ranks = np.arange(first, first + len(values))
    # polyfit weights residuals before they are squared.
    slope, _ = np.polyfit(np.log(ranks), np.log(values), 1, w=ranks**-0.5)
    return float(-slope)


def lidar(views: NDArray, *, delta: float = DELTA) -> float:
    """Compute LiDAR: the effective rank of a linear discriminant analysis of augmented views.

    Each sample is a class, and its views are the members. With the covariance `S_b` of the means of
    the samples and the mean covariance `S_w` of the views of a sample, it is the exponential of the
    entropy of the normalized eigenvalues of `(S_w + delta I)^(-1/2) S_b (S_w + delta I)^(-1/2)`.

    Args:
        views: `[n, view, d]` embeddings of augmented views, at least two samples of at least two
            views each.
        delta: Added to the diagonal of `S_w`, in squared units of the embeddings; positive.

    Returns:
        A number from 1 to `min(n - 1, d)`.

    References:
        Thilak et al., LiDAR: Sensing Linear Probing Performance in Joint Embedding SSL
        Architectures, 2023 (arXiv 2312.04000), section 4; without its 1e-7 within the logarithm.
    """
    if views.ndim != 3 or views.shape[0] < 2 or views.shape[1] < 2 or not views.shape[2]:
        raise ValueError(
            f"views has shape {views.shape}; expected [n, view, d] with at least two samples of at "
            "least two views each"
        )
    if not delta > 0:
        raise ValueError(f"delta is {delta}; expected a positive number, such as {DELTA}")
    views = views.astype(np.float64)
    means = views.mean(1)
    within = (views - means[:, None]).reshape(-1, views.shape[-1])
    scatter = within.T @ within / (len(means) * (views.shape[1] - 1))
    factor = np.linalg.cholesky(scatter + delta * np.eye(len(scatter)))
    # The squared singular values of L^-1 (m - mean)^T are the eigenvalues, up to a factor.
    whitened = np.linalg.solve(factor, (means - means.mean(0)).T)
    return _effective_rank(np.linalg.svd(whitened, compute_uv=False) ** 2)


def _sampled(x: NDArray, seed: int, max_rows: int) -> NDArray[np.float64]:
    if x.ndim != 2 or not x.size:
        raise ValueError(f"x has shape {x.shape}; expected [n, d] with at least one row")
    (rows,) = in_range(x[random_rows(len(x), max_rows, seed)])
    return rows.astype(np.float64)


def _effective_rank(values: NDArray[np.floating]) -> float:
    """Return `exp(entropy(values / sum))` of values that are not negative; 1 if all are 0."""
    if not values.sum() > 0:
        return 1.0
    share = values / values.sum()
    entropy = -(share * np.log(np.maximum(share, np.finfo(np.float64).tiny))).sum()
    return float(np.exp(entropy))
