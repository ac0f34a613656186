"""Samples in the tree: nested for anyone, and a branch by itself for what was offered later."""

import torch

from ssl_kd.vision.tree import Tree

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


def test_what_was_offered_later_is_a_branch_by_itself():
    tree = Tree.fit(X, CLUSTERS, LEVELS, 3)
    assert tree(X[:2], torch.tensor([3, 4])).tolist() == [[6, 2], [7, 3]]
