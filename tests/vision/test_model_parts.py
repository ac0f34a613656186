"""Parts of the model: the projection, splits that leave no cluster empty, and the tree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_kd.vision.model_parts import Projection, Splits, Tree


@pytest.mark.parametrize("dim", [3, 19, 25])
def test_wide_rows_that_are_few_are_rotated_as_by_all_their_covariances(dim):
    x = torch.randn(20, 40) * torch.arange(1.0, 41)
    projection = Projection.fit(x, dim)
    basis = projection.basis
    assert basis is not None
    centred = (x - x.mean(0)).double()
    expected = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -min(dim, 19) :].flip(1)
    same = (basis[:, :19].double() * expected).sum(0).abs()
    torch.testing.assert_close(same, torch.ones_like(same))
    torch.testing.assert_close(basis.T @ basis, torch.eye(dim))
    assert abs(projection(x).square().mean() - 1) < 1e-5


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


def test_a_cluster_is_refilled_from_a_partition():
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
def test_rows_that_differ_by_one_bit_are_distinct_at_any_scale(scale):
    row = torch.full((1, 5), scale)
    x = torch.cat([row] * 6 + [torch.nextafter(row, torch.tensor(torch.inf))])
    splits = Splits.fit(x, torch.zeros(7, dtype=torch.int64), 2)
    assert splits(x, torch.zeros(7, dtype=torch.int64)).tolist() in ([0] * 6 + [1], [1] * 6 + [0])


# Three clusters on a line, of two parts each; the first two are one at the coarsest level.
X = torch.tensor([[0.0], [1.0], [10.0], [11.0], [30.0], [31.0]])
CLUSTERS = torch.tensor([0, 0, 1, 1, 2, 2])
LEVELS = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 1]])


def test_each_sample_lies_in_a_part_of_its_cluster():
    tree = Tree.fit(X, CLUSTERS, LEVELS, 3)
    assert tree.sizes == [6, 2]
    assert torch.equal(tree(X, CLUSTERS), LEVELS.T)
    # Nearer to a part of another cluster, but not of its own.
    assert tree(torch.tensor([[9.0]]), torch.tensor([0])).tolist() == [[1, 0]]
    x, clusters = torch.randn(200, 1) * 30, torch.arange(200) % 3
    finest, coarsest = tree(x, clusters).T
    assert torch.equal(finest // 2, clusters)
    assert torch.equal(coarsest, clusters // 2)


def test_later_clusters_are_a_branch_of_their_own():
    tree = Tree.fit(X, CLUSTERS, LEVELS, 3)
    assert tree(X[:2], torch.tensor([3, 4])).tolist() == [[6, 2], [7, 3]]
