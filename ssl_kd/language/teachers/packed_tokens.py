"""Pack token ids and probabilities into bytes, and read them back.

Ids are sorted and stored by the code of Elias and Fano. The `low` lowest bits of each id are stored
as they are. The bits above are stored in unary: a 1 bit for each multiple of `2^low` in ascending
order, and after each multiple a 0 bit for every id that it begins. So k ids below V always take
about `k (2 + log2(V / k))` bits, instead of `k log2(V)`.

References:
    Elias, Efficient storage and retrieval by content and address of static files, 1974.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


def n_bytes(k: int, vocabulary: int) -> int:
    """Return the number of bytes that k ids below `vocabulary` take."""
    low, n_high = _layout(k, vocabulary)
    return (k * low + n_high + 7) // 8


def _layout(k: int, vocabulary: int) -> tuple[int, int]:
    """Return the width of the low part of an id, and the number of bits of all high parts."""
    if k == 0:
        return 0, 0
    low = (vocabulary // k).bit_length() - 1
    return low, k + ((vocabulary - 1) >> low)


def pack(ids: Tensor, vocabulary: int) -> Tensor:
    """Pack ids `[n, k]`, ascending in each row and below `vocabulary`, into uint8 `[n, bytes]`."""
    n, k = ids.shape
    low, size = _layout(k, vocabulary)[0], n_bytes(k, vocabulary)
    widths, places = (torch.arange(m, device=ids.device) for m in (low, k))
    low_bits = rearrange(ids.unsqueeze(-1) >> widths & 1, "row id bit -> row (id bit)")
    high_bits = ids.new_ones(n, 8 * size - k * low).scatter_(1, (ids >> low) + places, 0)
    bits = torch.cat([low_bits, high_bits], 1)
    bits = rearrange(bits, "row (byte bit) -> row byte bit", bit=8)
    return (bits << torch.arange(8, device=ids.device)).sum(-1).to(torch.uint8)


def unpack(packed: Tensor, k: int, vocabulary: int) -> Tensor:
    """Return the int64 ids `[n, k]` of packed rows, -1 in a row that holds fewer than k ids.

    Zero bytes are valid: k times the id 0. A damaged row may give ids beyond the vocabulary.
    """
    low, n_high = _layout(k, vocabulary)
    places = torch.arange(k, device=packed.device)
    starts, padded = places * low, F.pad(packed, (0, 4)).int()  # an id reaches into 4 bytes at most
    low_parts = padded[:, starts // 8]
    for byte in range(1, (low + 14) // 8):
        low_parts |= padded[:, starts // 8 + byte] << 8 * byte
    low_parts = low_parts >> (starts % 8).int() & (1 << low) - 1
    at = torch.arange(k * low, k * low + n_high, device=packed.device)
    is_id = packed[:, at // 8] >> (at % 8).to(torch.uint8) & 1 == 0
    rank = is_id.cumsum(1, dtype=torch.int32)
    # Without `nonzero`, which would wait for the device: id j goes to column j, the rest to k.
    column = torch.where(is_id & (rank <= k), rank - 1, k).long()
    source = torch.arange(n_high, device=packed.device).expand_as(column)
    passed = source.new_zeros(len(packed), k + 1).scatter_(1, column, source)[:, :k] - places
    ids = (passed << low) + low_parts
    return torch.where(rank[:, -1:] < k, -1, ids)


def grid(vocabulary: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the 256 values of stored probabilities: 0, and 255 in a geometric series up to 1 / 2.

    Their ratio is 1.03 for up to 4,096 tokens and 1.05 for 262,144. The least one is at most
    1 / vocabulary, and so at most the probability of the most likely token.
    """
    lowest = -math.log2(max(vocabulary, 4096))
    return F.pad(torch.linspace(lowest, -1, 255, dtype=dtype, device=device).exp2(), (1, 0))


def round_to(values: Tensor, p: Tensor, uniform: Tensor) -> Tensor:
    """Round probabilities `[n, m]`, descending in each row, to uint8 indices of `values`.

    The mean over `uniform`, one number in [0, 1) for each row, is p. The first entries of a row
    that are rounded up number as many as their chances sum to, within 1. So the sum of the row's
    errors is at most the step between two values at its first entry.
    """
    p = p.to(values.dtype).clamp(max=0.5).contiguous()
    below = (torch.searchsorted(values, p, right=True) - 1).clamp(0, len(values) - 2)
    part = (p - values[below]) / (values[below + 1] - values[below])
    counts = (part.cumsum(-1) + uniform).floor()
    return (below + (F.pad(counts, (1, 0)).diff(dim=-1) > 0)).to(torch.uint8)
