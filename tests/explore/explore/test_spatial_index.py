"""The spatial index of the map holds every place; the middle of each part separates it."""

import numpy as np
import pytest

from ssl_kd_explore.explore.spatial_index import LEAF, spatial_index


def separated(values, start, stop, axis):
    """Whether the middle of every part separates it, along x and y in turn."""
    if stop - start - 1 <= LEAF:
        return True
    middle = (start + stop - 1) // 2
    part, at = values[start:stop, axis], values[middle, axis]
    return (
        (part[: middle - start] <= at).all()
        and (part[middle - start :] >= at).all()
        and separated(values, start, middle, 1 - axis)
        and separated(values, middle + 1, stop, 1 - axis)
    )


@pytest.mark.parametrize("n", [1, 3, 65, 5_001, 70_000])
def test_the_index_holds_all_places_in_order(n):
    places = np.random.default_rng(0).uniform(-1, 1, (n, 2)).astype(np.float32).round(2)
    index = spatial_index(places)
    rows = np.frombuffer(index, np.uint16 if n < 65_536 else np.uint32, n, 8)
    values = np.frombuffer(index[-8 * n :], np.float32).reshape(n, 2)
    assert len(index) % 8 == 0 and index[:2] == b"\xdb\x17"
    assert np.array_equal(np.sort(rows), np.arange(n)) and np.array_equal(values, places[rows])
    assert separated(values, 0, n, 0)
