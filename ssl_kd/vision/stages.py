"""Plan the stages of the training: heads find clusters, then they learn the answer.

In the first stage each head starts from a partition of the neighbor graph: it learns the partition
by cross-entropy until it has nearly the partition's neighbor information, and goes on by LOSS. The
better half of the heads votes on the answer, as one family beside those of the graph (METHOD
consensus) or alone (METHOD heads). In the second stage all heads learn the answer by cross-entropy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firstnan.parts import TooFewHealthyParts
from ssl_kd.vision.fit import (
    CONSENSUS_PAIRS,
    CONVERGENCE_PAIRS,
    Judge,
    head_clusters,
    make_plan,
    neighbor_information,
)
from ssl_kd.vision.graph.ensemble import HEADS, VERY_MANY, Candidate
from ssl_kd.vision.graph.levels import in_order
from ssl_kd.vision.partition import GraphAnswer, Partitions
from ssl_kd.vision.settings import HeadSettings
from ssl_kd.vision.train.convergence import ALONE
from ssl_kd.vision.train.learner import Gather, Plan
from ssl_kd.vision.train.pairs import judging_pairs
from ssl_kd.vision.train.step import HeadTrainer
from ssl_kd.vision.training_rows import carried

logger = logging.getLogger(__name__)

KNOWN = 0.95  # share of a partition's information at which a head has learned it


@dataclass(frozen=True)
class Starts:
    """What the heads learn first: partitions of their own, or for want of goals the answer.

    Without either, they learn by LOSS from the first step on, and their vote is the answer.
    """

    clusters: Tensor | None = None  # int `[head, n]` partitions, or `[n]`, the answer
    goals: Tensor | None = None  # `[head]`, neighbor information at which a head goes on by LOSS


def first_of(partitions: Partitions, heads: HeadSettings) -> tuple[GraphAnswer | None, Starts]:
    """Return the answer, unless heads vote on it, and what the heads learn first.

    Heads vote where the partitions are of graphs, and of at most 200 clusters.
    """
    few = partitions.n_clusters <= VERY_MANY
    if heads.heads_vote and few and partitions.ensemble.by_graphs:
        return None, starts_of(partitions, heads)
    if heads.heads_vote:
        why = "the table is small" if few else f"there are more than {VERY_MANY} clusters"
        logger.info("partitions vote and heads do not, because %s", why)
    answer = partitions.answer()
    return answer, Starts(answer.clusters)


def spread(voters: Sequence[Candidate], n: int) -> list[Candidate]:
    """Choose `n` voters: as many of each family as it has, at most, and from all over its list."""
    families: dict[str, list[Candidate]] = {}
    for voter in voters:
        families.setdefault(voter.family, []).append(voter)
    counts = dict.fromkeys(families, 0)
    for _ in range(n):
        left = [name for name in families if counts[name] < len(families[name])] or list(families)
        counts[min(left, key=counts.__getitem__)] += 1
    return [
        families[name][turn * len(families[name]) // count]
        for name, count in counts.items()
        for turn in range(count)
    ]


def starts_of(partitions: Partitions, heads: HeadSettings) -> Starts:
    """Choose a partition for each head, from the voters of all families."""
    k = partitions.n_clusters
    voters = [v for v in partitions.ensemble.voters if v.clusters.max() < k]  # some have more
    chosen = np.stack([voter.clusters for voter in spread(voters, heads.n_heads)])
    clusters = torch.from_numpy(chosen)
    pairs = judging_pairs(partitions.neighbors, heads.seed, CONVERGENCE_PAIRS)
    ends = [of_head[pairs] for of_head in clusters]  # `[2, pair]` each
    known = [neighbor_information(a, b, k) for a, b in ends]
    return Starts(clusters.int(), KNOWN * torch.tensor(known))


def better_half(clusters: Tensor, information: Tensor) -> Tensor:
    """Return the partitions `[voter, n]` of the better half of the heads.

    `information` `[head]` is NaN for a head that failed.
    """
    healthy = information.isfinite().nonzero().flatten()
    order = healthy[information[healthy].argsort(descending=True, stable=True)]
    return clusters[order[: -(-len(order) // 2)]]


class Stages:
    """The stages in which the heads of one process learn; called between them, it forms the answer.

    Args:
        heads: the settings.
        trainer: of the heads of this process.
        neighbors: `[n, k]`, nearest first.
        gather: reads projected embeddings by row, of samples in the graph and then of others.
        starts: of the heads of all processes.
        partitions: of the neighbor graph; None on other processes than the first.
        others: `[m, k]`, the nearest samples in the graph of those beyond it, from which heads
            learn the answer as well; None: there are none.
        numbers: of the heads of this process among all; None: all.
        of_ranks: gathers a value from all processes.
        from_first: calls a function on the first process, and returns its result on all.

    Attributes:
        formed: the answer, on the first process, once it is formed.
    """

    def __init__(
        self,
        heads: HeadSettings,
        trainer: HeadTrainer,
        neighbors: Tensor,
        gather: Gather,
        starts: Starts,
        partitions: Partitions | None,
        *,
        others: Tensor | None = None,
        numbers: range | None = None,
        of_ranks: Callable[[Any], list[Any]] = lambda value: [value],
        from_first: Callable[[Callable[[], Any]], Any] = lambda form: form(),
    ) -> None:
        self.heads = heads
        self.trainer = trainer
        self.neighbors = neighbors
        self.gather = gather
        self.starts = starts
        self.partitions = partitions
        self.others = others
        self.of_ranks = of_ranks
        self.from_first = from_first
        numbers = range(heads.n_heads) if numbers is None else numbers
        self._own = slice(numbers.start, numbers.stop)
        self.formed: GraphAnswer | None = None

    def first(self) -> dict[str, Any]:
        """Return the arguments of `HeadsLearner` for the first stage and what follows it."""
        clusters, goals = self.starts.clusters, self.starts.goals
        if clusters is None:
            return {"plan": self._plan(self.neighbors, first=ALONE)}
        if goals is None:
            plan, clusters = self._learn(clusters)
            return {"plan": plan, "clusters": clusters}
        self.trainer.by_loss.fill_(False)
        plan = self._plan(self.neighbors, goals=goals[self._own])
        return {"plan": plan, "clusters": clusters[self._own], "answer": self}

    def _plan(self, neighbors: Tensor, **options: Any) -> Plan:
        inputs = self.heads, self.trainer, neighbors, self.gather
        return make_plan(*inputs, self.of_ranks, **options)

    def _learn(self, clusters: Tensor) -> tuple[Plan, Tensor]:
        """Return how all heads learn the answer `[n]`, and the answer for all samples."""
        if self.others is None:
            return self._plan(self.neighbors), clusters
        neighbors = torch.cat([self.neighbors.int(), self.others])
        return self._plan(neighbors), torch.cat([clusters, carried(clusters, self.others)])

    def __call__(self, found: Tensor | None) -> tuple[Plan, Tensor, Tensor]:
        """Return the plan of the second stage, its clusters, and the partitions of heads."""
        if found is None:
            judge = Judge(self.trainer, self.neighbors, self.gather, CONSENSUS_PAIRS)
            rows, (_, information) = torch.arange(len(self.neighbors)), judge()
            clusters = head_clusters(self.trainer, self.gather, rows).int()
            of_ranks = zip(*self.of_ranks((clusters, information)), strict=True)
            clusters, information = map(torch.cat, of_ranks)
            found = better_half(clusters, information)
        voters = found
        clusters = self.from_first(lambda: self._form(voters))
        return *self._learn(clusters), found

    def _form(self, found: Tensor) -> Tensor:
        assert self.partitions is not None
        alone = self.heads.method == "heads"
        if alone and not len(found):
            raise TooFewHealthyParts("all heads failed, so there is no answer: lower LEARNING_RATE")
        voters = [Candidate(HEADS, in_order(of_head.numpy())) for of_head in found.long()]
        self.formed = self.partitions.answer(voters, alone=alone)
        return self.formed.clusters
