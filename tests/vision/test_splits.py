"""Empty clusters take a part of others: all K have a row wherever rows differ."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_kd.vision.splits import Splits


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 40), st.integers(0, 10**6))
def test_there_are_as_many_clusters_as_distinct_rows_allow(n, dim, n_clusters, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 3, (n, dim), generator=g).float()
    clusters = torch.randint(0, n_clusters, (n,), generator=g)
    target = torch.randint(0, n_clusters, (n,), generator=g)
    for wanted in (None, target):
        splits = Splits.fit(x, clusters, n_clusters, wanted)
        divided = splits(x, clusters)
        within = {(int(c), *row) for c, row in zip(clusters, x.tolist(), strict=True)}
        assert len(divided.unique()) == min(n_clusters, len(within))
        assert torch.equal(torch.cat([splits(x[:5], clusters[:5]), splits(x[5:], clusters[5:])]),
                           divided)  # fmt: skip


def test_a_cluster_gets_its_own_samples_where_a_partition_says_which():
    x = torch.cat([torch.zeros(10, 2), torch.ones(4, 2), torch.full((9, 2), -50.0)])
    x += 0.01 * torch.randn(23, 2)
    target = torch.tensor([0] * 10 + [1] * 4 + [2] * 9)
    merged = target.masked_fill(target == 1, 0)
    splits = Splits.fit(x, merged, 3, target)
    assert torch.equal(splits(x, merged), target)
    assert (splits.parents.tolist(), splits.parts.tolist()) == ([0], [1])


def test_the_widest_cluster_is_divided_where_no_partition_says_which():
    x = torch.tensor([0.0, 0.1, 5.0, 9.0, 5.1, 9.1]).unsqueeze(1)
    divided = Splits.fit(x, torch.tensor([0, 0, 2, 2, 2, 2]), 3)(
        x, torch.tensor([0, 0, 2, 2, 2, 2])
    )
    assert divided.tolist() == [0, 0, 2, 1, 2, 1]


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e18, 1e30])
def test_rows_that_differ_by_one_bit_are_told_apart_at_any_scale(scale):
    row = torch.full((1, 5), scale)
    x = torch.cat([row] * 6 + [torch.nextafter(row, torch.tensor(torch.inf))])
    splits = Splits.fit(x, torch.zeros(7, dtype=torch.int64), 2)
    assert splits(x, torch.zeros(7, dtype=torch.int64)).tolist() in ([0] * 6 + [1], [1] * 6 + [0])
