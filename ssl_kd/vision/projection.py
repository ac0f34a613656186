"""What the heads see of an embedding: centred, rotated to fewer directions if wide, one scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssl_kd.errors import InputError


class Projection(nn.Module):
    """`(x - mean) @ basis`, or `(x - mean) * scale` where the embeddings are narrow already.

    One scale for all directions: the heads do not depend on the teacher's units, and directions
    that the teacher finds important stay so. The rotation to the leading principal components costs
    the heads nothing in accuracy and makes wide embeddings several times cheaper to train on.

    Args:
        in_dim: width D of the embeddings.
        dim: width d that the heads see, at most D; equal to it for no rotation.
    """

    mean: Tensor
    basis: Tensor | None
    scale: Tensor

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.in_dim, self.dim = in_dim, dim
        self.register_buffer("mean", torch.zeros(in_dim))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("basis", torch.eye(in_dim, dim) if dim < in_dim else None)

    @classmethod
    def fit(cls, x: Tensor, most: int | None) -> Projection:
        """The projection of a sample of embeddings to a mean of zero and a root mean square of one.

        Args:
            x: `[n, D]`, finite; ten thousand rows are plenty.
            most: rotate wider embeddings to this many principal components; None: never.

        Raises:
            ValueError: they are so small that float32 cannot scale them.
        """
        x = x.double()  # squares of 1e19 overflow in float32
        in_dim = x.shape[1]
        dim = in_dim if most is None else min(most, in_dim)
        projection = cls(in_dim, dim)
        mean = x.mean(0)
        centred = x - mean
        projection.mean.copy_(mean)
        if projection.basis is not None:
            projection.basis.copy_(_leading(centred, dim))
            centred = centred @ projection.basis.double()
        root_mean_square = float(centred.square().mean().sqrt())
        if 0 < root_mean_square < 1 / torch.finfo(torch.float32).max:
            raise InputError(
                f"the embeddings differ by {root_mean_square:.2g} only, which float32 cannot scale "
                "to 1: multiply them before they are saved"
            )
        projection.scale.fill_(1 / root_mean_square if root_mean_square > 0 else 1.0)
        return projection

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings `[batch, D]` -> `[batch, d]`, float32."""
        x = (x.float() - self.mean) * self.scale
        return x if self.basis is None else x @ self.basis


def _leading(centred: Tensor, dim: int) -> Tensor:
    """Rows `[n, D]` -> their `dim` leading principal directions, orthonormal columns `[D, dim]`."""
    n, in_dim = centred.shape
    if max(n, dim) >= in_dim:
        return torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -dim:].flip(1)
    more = torch.eye(max(n, dim) - n, in_dim).to(centred)  # rows span few of all D directions
    within, coordinates = torch.linalg.qr(torch.cat([centred, more]).T)
    return within @ _leading(coordinates[:, :n].T, dim)
