"""From settings to trainer, sampler and model: what a run and the estimator have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from ssl_kd.graph import Crowd, agreement
from ssl_kd.guard.faults import Thresholds
from ssl_kd.guard.memory import free_memory
from ssl_kd.guard.parts import TooFewHealthyParts
from ssl_kd.guard.precision import Precision
from ssl_kd.heads import HeadBank, check_answer, head_maker, parameters_of
from ssl_kd.settings import SettingsError
from ssl_kd.vision.confidence import temperature_for
from ssl_kd.vision.consensus import judging_pairs, neighbour_information, sample_rows, vote_tables
from ssl_kd.vision.convergence import ALONE, Convergence
from ssl_kd.vision.model import ROWS_PER_BLOCK, ClusterModel
from ssl_kd.vision.novelty import REFERENCE_ROWS, Novelty
from ssl_kd.vision.pairs import PairSampler, mutual_neighbours
from ssl_kd.vision.partition import GraphAnswer
from ssl_kd.vision.projection import Projection
from ssl_kd.vision.settings import HeadSettings
from ssl_kd.vision.splits import Splits
from ssl_kd.vision.step import HeadTrainer
from ssl_kd.vision.train import Gather, Plan
from ssl_kd.vision.tree import Tree

logger = logging.getLogger(__name__)

# Pairs of neighbours by which answers are judged: enough for a hundredth of a nat, few enough to
# hold their embeddings in memory.
CONSENSUS_PAIRS = 20_000
CONVERGENCE_PAIRS = 4_000  # and enough to see whether they still learn
LEAST_OF_EACH = 8  # samples for each cluster, or the confidence is the vote as it is
SPLIT_ROWS = 100_000  # among which heads that found the clusters themselves leave none empty
MOST_EPOCHS = 200
# Rows of weights of each head: student, EMA teacher, both moments, and these in their last good
# state.
WEIGHTS_KEPT = 8


def make_trainer(
    settings: HeadSettings,
    dim: int,
    n_clusters: int,
    precision: Precision,
    heads: range | None = None,
) -> HeadTrainer:
    """A bank of fresh heads for projected embeddings of width `dim`, and its guarded step.

    Args:
        settings: of the run.
        dim: width of the embeddings, projected.
        n_clusters: K.
        precision: dtypes and device.
        heads: numbers of those that this process trains; None: all.

    Raises:
        ValueError: the head's class cannot be built or gives no logits of clusters, or the heads
            do not fit into memory.
    """
    make = head_maker(
        settings.head,
        dim,
        n_clusters,
        hidden_dim=settings.hidden_dim,
        bottleneck_dim=settings.bottleneck_dim,
    )
    thresholds = Thresholds(min_parts=-(-settings.n_heads // 4))  # a quarter
    heads = range(settings.n_heads) if heads is None else heads
    _check_memory(settings, len(heads), parameters_of(make), precision.device)
    bank = HeadBank(make, len(heads), heads.start)
    _check_memory(settings, len(heads), bank.n_parameters, precision.device)
    trainer = HeadTrainer(bank, settings, precision, n_clusters, thresholds)
    check_answer(bank, trainer.state.student, dim, n_clusters)
    return trainer


def _check_memory(
    settings: HeadSettings, n_heads: int, n_parameters: int | None, device: torch.device
) -> None:
    """Refuse heads whose weights will not fit, before the system ends the process for them.

    Raises:
        SettingsError: names the settings to lower.
    """
    needed, free = WEIGHTS_KEPT * 4 * n_heads * (n_parameters or 0), free_memory(device)
    if needed > free:
        raise SettingsError(
            f"{n_heads} heads of {n_parameters:,} weights need {needed / 2**30:,.1f} GiB "
            f"with moments, EMA teacher and last good state, and {device} has "
            f"{free / 2**30:,.1f} GiB free: lower HIDDEN_DIM (now {settings.hidden_dim}) or "
            f"N_HEADS ({settings.n_heads})"
        )


def make_plan(
    settings: HeadSettings,
    trainer: HeadTrainer,
    neighbours: Tensor,
    gather: Gather,
    of_all: Callable[[Tensor], Tensor] = lambda mine: mine,
) -> Plan:
    """The training on pairs from neighbours `[n, k]`.

    Args:
        settings: of the run.
        trainer: of the heads that are judged.
        neighbours: `[n, k]` integer, nearest first.
        gather: reads embeddings, projected.
        of_all: from numbers `[head]` of the trainer's heads to those of all heads there are.
    """
    allowed = mutual_neighbours(neighbours)
    sampler = PairSampler(neighbours, allowed, settings.batch_size, settings.seed)
    given = [] if settings.max_steps is None else [settings.max_steps]
    if settings.epochs is not None:
        given.append(settings.epochs * sampler.steps_per_epoch)
    if given:
        return Plan(sampler, min(given), None)
    steps = MOST_EPOCHS * sampler.steps_per_epoch
    judge = _Judge(trainer, neighbours, gather, CONVERGENCE_PAIRS)
    first = 0 if settings.by_graph else ALONE
    until = Convergence(lambda: of_all(judge()[1]), trainer.n_clusters, steps, first)
    return Plan(sampler, steps, until)


class _Judge:
    """What each head tells about some pairs of neighbours, called whenever that is wanted.

    Attributes:
        rows: `[row]` int64, the samples of these pairs.
    """

    def __init__(self, trainer: HeadTrainer, neighbours: Tensor, gather: Gather, most: int) -> None:
        self._trainer, self._gather = trainer, gather
        pairs = judging_pairs(neighbours, trainer.settings.seed, most)
        self.rows, self._pairs = pairs.unique(return_inverse=True)

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Clusters of the rows `[head, row]`, and information in nats `[head]`, NaN of a sick."""
        clusters = head_clusters(self._trainer, self._gather, self.rows)
        state, n_clusters = self._trainer.state, self._trainer.n_clusters
        sound = (state.health.streak == 0) & ~state.health.retired
        healthy = (torch.isfinite(state.loss) & sound).cpu()
        information = torch.full((len(clusters),), torch.nan)
        for head in healthy.nonzero().flatten().tolist():
            first, second = clusters[head][self._pairs]
            information[head] = neighbour_information(first, second, n_clusters)
        return clusters, information


def form_answer(
    settings: HeadSettings,
    trainer: HeadTrainer,
    neighbours: Tensor,
    gather: Gather,
    projection: Projection,
    found: GraphAnswer | None = None,
) -> tuple[ClusterModel, Tensor, Tensor]:
    """Rank the heads by what they tell about neighbours, and let the better half vote.

    The partition that they learnt names the clusters, or else the best head; no label is read.

    Args:
        settings: `seed` and the heads' shape.
        trainer: after training.
        neighbours: `[n, k]` integer, nearest first.
        gather: reads embeddings as the heads see them, projected.
        projection: how they come to be so; becomes part of the model.
        found: the partition that the heads learnt, and how stable it is; None: they found their
            own, and the confidence is their vote as it is.

    Returns:
        The model, on the CPU; the numbers of the heads that vote, best first; and of every head,
        `[head]`, its neighbour information in nats (NaN for one that is not healthy).

    Raises:
        TooFewHealthyParts: no head is healthy.
    """
    state, n_clusters = trainer.state, trainer.n_clusters
    judge = _Judge(trainer, neighbours, gather, CONSENSUS_PAIRS)
    clusters, information = judge()
    order = information.nan_to_num(-1.0).argsort(descending=True)
    order = order[: int(information.isfinite().sum())]
    if not len(order):
        raise TooFewHealthyParts("no head is healthy, so there is no answer to form")

    chosen = order[: -(-len(order) // 2)]  # the better half
    reference = gather(sample_rows(len(neighbours), settings.seed, REFERENCE_ROWS))
    novelty = Novelty.fit(reference, projection(torch.zeros(1, projection.in_dim))[0])
    model = ClusterModel(
        in_dim=projection.in_dim,
        head_dim=projection.dim,
        n_clusters=n_clusters,
        n_heads=len(chosen),
        head=settings.head,
        hidden_dim=settings.hidden_dim,
        bottleneck_dim=settings.bottleneck_dim,
        temperature=settings.teacher_temp,
        n_reference=len(novelty.own),
        levels=None if found is None else [int(level.max()) + 1 for level in found.levels],
    )
    model.novelty = novelty
    model.weights.copy_(state.teacher.cpu()[chosen])
    anchor = clusters[order[0]] if found is None else found.clusters[judge.rows]
    model.votes.copy_(vote_tables(clusters[chosen], anchor, n_clusters))
    model.projection.load_state_dict(projection.state_dict())
    most = len(neighbours) if found is not None else SPLIT_ROWS
    rows = sample_rows(len(neighbours), settings.seed, most)
    x = torch.cat([gather(block) for block in rows.split(ROWS_PER_BLOCK)])
    _fill_empty(model, x, None if found is None else found.clusters)
    if found is not None:
        _calibrate(model, x, found.crowd)
        if model.splits is not None:  # at that temperature other votes may be equal
            _fill_empty(model, x, found.clusters)
        model.tree = Tree.fit(x, found.clusters, found.levels, n_clusters)
    return model, chosen, information


@torch.no_grad()
def _fill_empty(model: ClusterModel, x: Tensor, target: Tensor | None) -> None:
    """Give each cluster that the vote leaves empty a part of another one.

    Args:
        model: of which heads and votes are set.
        x: training samples, projected.
        target: `[n]` int64, the partition that the heads learned; None: they found their own.
    """
    model.splits = None
    likeliest = torch.cat([model.answer(block).argmax(-1) for block in x.split(ROWS_PER_BLOCK)])
    splits = Splits.fit(x, likeliest, model.n_clusters, target)
    if n_splits := len(splits.parts):
        model.splits, model.options["n_splits"] = splits, n_splits
    left = model.n_clusters - len(splits(x, likeliest).unique())
    if left:
        logger.warning(
            "%d of the %d clusters stay empty: within the others all samples are the same. Ask for "
            "%d clusters",
            left,
            model.n_clusters,
            model.n_clusters - left,
        )


@torch.inference_mode()
def _calibrate(model: ClusterModel, x: Tensor, crowd: Crowd) -> None:
    """Make the model's mean confidence the square of how far the voters agree with the answer.

    Partitions share errors: on 37 sets the mean agreement was 16 points above the accuracy, and its
    square 11 points from it either way.
    """
    if len(crowd.clusters) < LEAST_OF_EACH * model.n_clusters:
        return  # of so few nothing can be said
    votes = torch.cat([model.vote(block) for block in x.split(ROWS_PER_BLOCK)])
    shares = agreement(crowd.voters, crowd.clusters).values()
    sure = (sum(shares) / len(shares)) ** 2
    model.options["answer_temperature"] = temperature_for(votes, sure)


@torch.inference_mode()
def head_clusters(trainer: HeadTrainer, gather: Gather, rows: Tensor) -> Tensor:
    """The cluster that each head's EMA teacher gives to some rows: `[head, row]` int64.

    `gather` reads embeddings as the heads see them, projected.
    """
    weights = trainer.state.teacher
    parameters = trainer.bank.unflatten(weights)
    blocks = [
        trainer.bank(parameters, gather(block).to(weights.device)).argmax(-1).cpu()
        for block in rows.split(ROWS_PER_BLOCK)
    ]
    return torch.cat(blocks, dim=1)
