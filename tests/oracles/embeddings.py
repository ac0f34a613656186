"""Compute scores of embeddings in float64 with plain loops, as the papers state them."""

import numpy as np


def alpha_req(x, first=11, last=100):
    """Fit log eigenvalues to log ranks by weighted normal equations, as Stringer et al. do."""
    eigenvalues = np.sort(np.linalg.eigvalsh(np.cov(x, rowvar=False)))[::-1][first - 1 : last]
    ranks = np.arange(first, first + len(eigenvalues), dtype=float)
    design = np.stack([-np.log(ranks), np.ones_like(ranks)], 1)
    weighted = design / ranks[:, None]
    return np.linalg.solve(weighted.T @ design, weighted.T @ np.log(eigenvalues))[0]


def lidar(views, delta=1e-4):
    """Build both scatter matrices view by view, and take the square root of the inverse."""
    n, q, d = views.shape
    mean = views.reshape(-1, d).mean(0)
    between, within = np.zeros((d, d)), np.zeros((d, d))
    for sample in views:
        center = sample.mean(0)
        between += np.outer(center - mean, center - mean) / (n - 1)
        for view in sample:
            within += np.outer(view - center, view - center) / (n * (q - 1))
    values, vectors = np.linalg.eigh(within + delta * np.eye(d))
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    eigenvalues = np.linalg.eigvalsh(root @ between @ root).clip(min=0)
    p = eigenvalues / eigenvalues.sum()
    return np.exp(-sum(share * np.log(share) for share in p if share > 0))
