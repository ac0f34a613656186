"""Stages of training: starting partitions, the switch to the loss, and the voting heads."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score

from firstnan.parts import TooFewHealthyParts
from ssl_kd import MultiHeadClusterer
from ssl_kd.vision.cache import nearest_neighbors
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.partition import partitions_of
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.stages import KNOWN, Stages, Starts, better_half, first_of, starts_of
from ssl_kd.vision.train.learner import Imitation
from ssl_kd.vision.training_rows import carried
from tests.faults.inject import CPU, HEADS, make_trainer

DIGITS: Any = load_digits()
X, Y = torch.from_numpy(DIGITS.data[:300]).float(), DIGITS.target[:300]


@pytest.fixture(scope="module")
def partitions():
    neighbors = nearest_neighbors(X, 20)
    projected = Projection.fit(X, None)(X)
    return partitions_of(10, neighbors, X.__getitem__, projected, CPU.device)


def test_heads_start_from_the_families_in_turn(partitions):
    starts = starts_of(partitions, VisionSettings(n_heads=11))
    voters = {voter.clusters.tobytes(): voter.family for voter in partitions.ensemble.voters}
    families = [voters[clusters.numpy().tobytes()] for clusters in starts.clusters.long()]
    assert len(Counter(families)) == 5 and max(Counter(families).values()) <= 3
    assert starts.goals is not None and starts.goals.shape == (11,)
    assert (starts.goals > 0).all() and (starts.goals < KNOWN * np.log(10)).all()


def test_heads_alone_start_from_partitions_and_otherwise_the_answer_is_learned(partitions):
    for changes in ({"loss": "fixed"}, {"cluster_sizes": "any"}):
        answer, starts = first_of(partitions, VisionSettings(**changes))
        assert answer is not None and torch.equal(starts.clusters, answer.clusters)
        assert starts.goals is None
    answer, starts = first_of(partitions, VisionSettings())
    assert answer is None and len(starts.clusters) == 16


def test_the_better_half_of_the_healthy_heads_votes_best_first():
    clusters = torch.arange(5)[:, None].expand(5, 3)
    information = torch.tensor([0.1, torch.nan, 0.3, 0.2, torch.nan])
    assert better_half(clusters, information)[:, 0].tolist() == [2, 3]
    assert len(better_half(clusters, torch.full((5,), torch.nan))) == 0


def test_a_head_trains_by_the_loss_once_it_fits_its_partition():
    trainer, known = make_trainer(), torch.full((HEADS,), 0.5)
    trainer.by_loss.fill_(False)
    trainer.state.updates.fill_(7)
    imitation = Imitation(lambda: known, torch.full((HEADS,), 0.6))
    imitation.look(trainer, 25)
    assert not trainer.by_loss.any()
    known[0] = 0.7
    imitation.look(trainer, 30)  # no look is due
    assert not trainer.by_loss.any()
    imitation.look(trainer, 35)
    assert trainer.by_loss.tolist() == [True] + [False] * (HEADS - 1)
    assert trainer.state.updates.tolist() == [0] + [7] * (HEADS - 1)  # it begins again


def test_heads_that_all_failed_cannot_vote_alone(partitions):
    settings = VisionSettings(method="heads")
    inputs = make_trainer(), partitions.neighbors, X.__getitem__
    stages = Stages(settings, *inputs, Starts(), partitions)
    with pytest.raises(TooFewHealthyParts, match="all heads failed"):
        stages(torch.empty(0, len(X)))
    beside = Stages(VisionSettings(), *inputs, Starts(), partitions)
    _, answer, _ = beside(torch.empty(0, len(X)))
    assert torch.equal(answer, partitions.answer().clusters)


@pytest.mark.parametrize("method", ["consensus", "heads"])
def test_the_guides_older_values_break_no_clusters(method):
    """A slow rate takes longer; it does not end in other clusters."""
    older = {"beta": 0.5, "student_temp": 0.1, "teacher_temp": 0.05, "batch_size": 128}
    options = {"method": method, "n_heads": 6, "random_state": 0, **older}
    clusters = MultiHeadClusterer(10, learning_rate=5e-4, **options).fit_predict(X.numpy())
    assert adjusted_rand_score(Y, clusters) > 0.6


def test_heads_learn_the_answer_from_samples_beyond_the_graph(partitions):
    n, answer = len(partitions.neighbors), partitions.answer().clusters
    others = torch.arange(60, dtype=torch.int32).view(3, 20)
    inputs = make_trainer(), partitions.neighbors, torch.cat([X[:n], X[:3]]).__getitem__
    settings = VisionSettings(loss="fixed", batch_size=101)
    stages = Stages(settings, *inputs, Starts(answer), None, others=others)
    first = stages.first()
    assert first["plan"].sampler.n == n + 3
    assert first["clusters"][:n].equal(answer)
    assert first["clusters"][n:].equal(carried(answer, others))
    drawn = [torch.stack(first["plan"].sampler(step)) for step in range(3)]
    rows, near = torch.cat(drawn, 1)
    beyond = rows >= n
    assert beyond.sum() == 3  # one epoch
    assert near[beyond].equal(others[rows[beyond] - n, 0].long())  # no sample is mutual with these
