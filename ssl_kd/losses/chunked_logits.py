"""Logits of an output head, a chunk of rows at a time, and the gradients of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ssl_kd.guard.finite import compute_dtype

VOCABULARY_BLOCK = 8192  # rows of the output weights that a half-precision gradient takes at once


def _gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of d loss / d logits in the products: float16 would lose what is below 6e-8."""
    return torch.float32 if dtype == torch.float16 else dtype


class ChunkedLogits:
    """Logits from hidden states, and the gradients of hidden states, weight and bias.

    Args:
        hidden: `[n, dim]`.
        weight: `[vocab, dim]`.
        bias: `[vocab]` or None.
        chunk: rows of logits that exist at once.
        autocast: dtype of the products; None: that of the weight.
        needs: which of hidden, weight and bias need a gradient.

    Attributes:
        shape: of all logits.
        exact: dtype of the arithmetic on them.
        gradients: of hidden, weight and bias; None where none is needed.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk: int,
        autocast: torch.dtype | None,
        needs: tuple[bool, ...] = (False, False, False),
    ) -> None:
        dtype = weight.dtype
        if autocast is not None and dtype != torch.float64:
            dtype = autocast
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.shape = (len(hidden), len(weight))
        self.exact, self.device = compute_dtype(hidden), hidden.device
        size = (chunk, len(weight))
        self._logits = hidden.new_empty(size, dtype=dtype)
        same = _gradient_dtype(dtype) == dtype
        self._gradient = self._logits
        if any(needs) and not same:
            self._gradient = hidden.new_empty(size, dtype=_gradient_dtype(dtype))
        self.gradients: list[Tensor | None] = [
            x.new_zeros(x.shape, dtype=self.exact) if x is not None and needed else None
            for x, needed in zip((hidden, weight, bias), needs, strict=True)
        ]

    def logits(self, start: int, stop: int) -> Tensor:
        """`[chunk, vocab]`, in a buffer that the next call overwrites."""
        out = self._logits[: stop - start]
        if self.bias is None:
            return torch.mm(self.hidden[start:stop], self.weight.T, out=out)
        return torch.addmm(self.bias, self.hidden[start:stop], self.weight.T, out=out)

    def gradient(self, start: int, stop: int) -> Tensor:
        """Where the gradient of these rows' logits goes; may be the logits' own buffer."""
        return self._gradient[: stop - start]

    def accumulate(self, start: int, stop: int) -> None:
        """Add what `gradient(start, stop)` now holds to the gradients of the inputs."""
        rows, hidden = self._gradient[: stop - start], self.hidden[start:stop]
        d_hidden, d_weight, d_bias = self.gradients
        if d_bias is not None:
            d_bias += rows.sum(0, dtype=d_bias.dtype)
        exact = rows.dtype == self.weight.dtype != torch.bfloat16
        step = len(self.weight) if exact else VOCABULARY_BLOCK
        for first in range(0, len(self.weight), step):
            part = rows[:, first : first + step]
            if d_hidden is not None:
                weight = self.weight[first : first + step].to(rows.dtype)
                _add_product(d_hidden[start:stop], part, weight)
            if d_weight is not None:
                _add_product(d_weight[first : first + step], part.T, hidden.to(rows.dtype))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


class GivenLogits:
    """Logits that are there already, and their gradient; used as `ChunkedLogits` is."""

    def __init__(self, logits: Tensor, needed: bool) -> None:
        self._logits = logits
        self.shape = (logits.shape[0], logits.shape[1])
        self.exact, self.device = compute_dtype(logits), logits.device
        dtype = _gradient_dtype(logits.dtype)
        self.gradients: list[Tensor | None] = [
            logits.new_zeros(logits.shape, dtype=dtype) if needed else None,
            None,
            None,
        ]

    def logits(self, start: int, stop: int) -> Tensor:
        """`[chunk, vocab]`."""
        return self._logits[start:stop]

    def gradient(self, start: int, stop: int) -> Tensor:
        """Where the gradient of these rows goes."""
        return self.gradients[0][start:stop]  # pyright: ignore[reportOptionalSubscript]

    def accumulate(self, start: int, stop: int) -> None:
        """Nothing: the gradient of the logits is what was asked for."""
