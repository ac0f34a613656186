"""Create the trainer of the heads, plan its training, and form the clustering without labels."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from sklearn.metrics import mutual_info_score
from torch import Tensor

from firstnan.faults import Thresholds
from firstnan.parts import TooFewHealthyParts
from ssl_kd.core.memory import free_memory
from ssl_kd.core.precision import Precision
from ssl_kd.core.settings import SettingsError
from ssl_kd.vision.graph import Ensemble, agreement
from ssl_kd.vision.model import ROWS_PER_BLOCK, ClusterModel, logits_of
from ssl_kd.vision.model_parts import Projection, Splits, Tree
from ssl_kd.vision.novelty import REFERENCE_ROWS, Novelty
from ssl_kd.vision.partition import GraphAnswer
from ssl_kd.vision.settings import HeadSettings
from ssl_kd.vision.train.convergence import Convergence
from ssl_kd.vision.train.heads import HeadBank, check_answer, head_maker, parameters_of
from ssl_kd.vision.train.learner import Gather, Imitation, Plan
from ssl_kd.vision.train.objectives import OBJECTIVES, make_objective, objective_class
from ssl_kd.vision.train.objectives.check import check_objective
from ssl_kd.vision.train.pairs import PairSampler, judging_pairs, mutual_neighbors, sample_rows
from ssl_kd.vision.train.step import HeadTrainer

logger = logging.getLogger(__name__)

# Pairs of neighbors used to rank the heads: enough to resolve a difference of 0.01 nats, few enough
# to hold their embeddings in memory.
CONSENSUS_PAIRS = 20_000
CONVERGENCE_PAIRS = 4_000  # enough to tell whether the heads still improve
MIN_SAMPLES_PER_CLUSTER = 8  # with fewer samples, the confidence is not calibrated
SPLIT_ROWS = 100_000  # rows that fill empty clusters if the heads have no target partition
CALIBRATION_ROWS = 10_000  # at most; their votes are in memory
MAX_EPOCHS = 200
# The pointwise mutual information of two equal answers, log sum_k p_k^(2 beta) / pi_k, favors a
# sure answer above this BETA only; Adaloglou et al. (2023) use 0.6.
LEAST_SURE_BETA = 0.5
LARGE_DEPARTURE = 0.05  # of the heads from the partition that they learned
# Copies of the weights of each head: student, EMA teacher, two moments of AdamW, and the last good
# state of these four.
STORED_WEIGHTS = 8
# Range in which the temperature of the model's output is searched, and the number of bisections.
COLDEST = 0.05
HOTTEST = 20.0
HALVINGS = 40
ROWS_PER_HALVING = 512  # softmax of so many rows fits into a cache


def log_method(heads: HeadSettings) -> None:
    """Log the method, and warn if BETA does not reward sure answers."""
    logger.info("%s", heads.description)
    if heads.loss == "temi" and heads.beta <= LEAST_SURE_BETA:
        logger.warning(
            "BETA is %g: at 0.5 and below the loss scores an unsure answer as high as a sure one, "
            "so that clusters mix; the default is %g",
            *(heads.beta, HeadSettings.beta),
        )


def make_trainer(
    heads: HeadSettings,
    dim: int,
    n_clusters: int,
    precision: Precision,
    numbers: range | None = None,
) -> HeadTrainer:
    """Return a trainer of newly initialized heads, for projected embeddings of width `dim`.

    `numbers` are the indices of the heads that this process trains; None for all heads.
    """
    widths = {"hidden_dim": heads.hidden_dim, "bottleneck_dim": heads.bottleneck_dim}
    make = head_maker(heads.head, dim, n_clusters, **widths)
    thresholds = Thresholds(min_parts=-(-heads.n_heads // 4))  # a quarter of the heads
    numbers = range(heads.n_heads) if numbers is None else numbers
    _check_memory(heads, len(numbers), parameters_of(make), precision.device)
    bank = HeadBank(make, len(numbers), numbers.start)
    _check_memory(heads, len(numbers), bank.n_parameters, precision.device)
    if heads.loss not in OBJECTIVES:
        _check_own_loss(heads, n_clusters)
    trainer = HeadTrainer(bank, heads, precision, n_clusters, thresholds)
    check_answer(bank, trainer.state.student, dim, n_clusters)
    return trainer


def _check_own_loss(heads: HeadSettings, n_clusters: int) -> None:
    """Raise if the user's objective does not work, or does not read a setting that was changed."""
    reads_beta = "beta" in inspect.signature(objective_class(heads.loss)).parameters
    if heads.beta != HeadSettings.beta and not reads_beta:
        raise SettingsError(
            f"BETA is {heads.beta:g}, but has no effect with LOSS {heads.loss!r}, whose __init__ "
            "does not take beta: leave it out, or add the argument"
        )
    check_objective(heads.loss, make_objective(heads.loss, vars(heads)), n_clusters)


def _check_memory(
    heads: HeadSettings, n_heads: int, n_parameters: int | None, device: torch.device
) -> None:
    """Raise SettingsError if the weights exceed the free memory of the device."""
    needed, free = STORED_WEIGHTS * 4 * n_heads * (n_parameters or 0), free_memory(device)
    if needed > free:
        raise SettingsError(
            f"{n_heads} heads of {n_parameters:,} weights need {needed / 2**30:,.1f} GiB "
            f"with moments, EMA teacher and last good state, but {device} has only "
            f"{free / 2**30:,.1f} GiB free: lower HIDDEN_DIM (now {heads.hidden_dim}) or "
            f"N_HEADS (now {heads.n_heads})"
        )


def make_plan(
    heads: HeadSettings,
    trainer: HeadTrainer,
    neighbors: Tensor,
    gather: Gather,
    of_ranks: Callable[[Tensor], list[Tensor]] = lambda values: [values],
    goals: Tensor | None = None,
    first: int = 0,
) -> Plan:
    """Plan a stage of the training on pairs from `neighbors` `[n, k]`, nearest first.

    `of_ranks` gathers the `[head]` values of each process from those of this trainer. Heads that
    learn fixed targets go on by LOSS when their neighbor information reaches `goals` `[head]`.
    `first` is the index of the first look at the heads.
    """
    allowed = mutual_neighbors(neighbors)
    sampler = PairSampler(neighbors, allowed, heads.batch_size, heads.seed)
    limits = [] if heads.max_steps is None else [heads.max_steps]
    if heads.epochs is not None:
        limits.append(heads.epochs * sampler.steps_per_epoch)
    judge = Judge(trainer, neighbors, gather, CONVERGENCE_PAIRS)
    imitation = None if goals is None else Imitation(lambda: judge()[1], goals)
    if limits:
        return Plan(sampler, min(limits), None, imitation)
    max_steps = MAX_EPOCHS * sampler.steps_per_epoch

    def information() -> Tensor:
        return torch.cat(of_ranks(judge()[1]))

    convergence = Convergence(information, trainer.n_clusters, max_steps, first)
    return Plan(sampler, max_steps, convergence, imitation)


class Judge:
    """Score each head by its neighbor information on a sample of neighbor pairs."""

    def __init__(
        self, trainer: HeadTrainer, neighbors: Tensor, gather: Gather, max_pairs: int
    ) -> None:
        self._trainer, self._gather = trainer, gather
        pairs = judging_pairs(neighbors, trainer.settings.seed, max_pairs)
        self.rows, self._pairs = pairs.unique(return_inverse=True)  # the samples in these pairs

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Return the clusters `[head, row]` and neighbor information `[head]` (NaN if failed)."""
        clusters = head_clusters(self._trainer, self._gather, self.rows)
        state, n_clusters = self._trainer.state, self._trainer.n_clusters
        sound = (state.health.streak == 0) & ~state.health.retired
        healthy = (torch.isfinite(state.loss) & sound).cpu()
        information = torch.full((len(clusters),), torch.nan)
        for head in healthy.nonzero().flatten().tolist():
            first, second = clusters[head][self._pairs]
            information[head] = neighbor_information(first, second, n_clusters)
        return clusters, information


@dataclass(frozen=True)
class Answer:
    """The model in which the better half of the heads votes."""

    model: ClusterModel  # on the CPU
    chosen: Tensor  # numbers of the heads that vote, best first
    information: Tensor  # `[head]` neighbor information in nats, NaN for an unhealthy head
    # Share of the training samples that the model puts into another cluster than the partition
    # that the heads learned; None if they learned none.
    departure: float | None


def form_answer(
    heads: HeadSettings,
    trainer: HeadTrainer,
    neighbors: Tensor,
    gather: Gather,
    projection: Projection,
    partition: GraphAnswer | None = None,
) -> Answer:
    """Rank the heads by neighbor information, and build the model in which the better half votes.

    Clusters are numbered as in `partition`, which the heads were trained on, or as in the best head
    if it is None; the confidence is then not calibrated. Labels are not read. If the answer differs
    from `partition` on many samples, a warning says so.
    """
    state, n_clusters = trainer.state, trainer.n_clusters
    judge = Judge(trainer, neighbors, gather, CONSENSUS_PAIRS)
    clusters, information = judge()
    order = information.nan_to_num(-1.0).argsort(descending=True)
    order = order[: int(information.isfinite().sum())]
    if not len(order):
        raise TooFewHealthyParts("all heads failed, so there is no clustering: lower LEARNING_RATE")

    chosen = order[: -(-len(order) // 2)]  # the better half
    reference = gather(sample_rows(len(neighbors), heads.seed, REFERENCE_ROWS))
    novelty = Novelty.fit(reference, projection(torch.zeros(1, projection.in_dim))[0])
    model = ClusterModel(
        in_dim=projection.in_dim,
        head_dim=projection.dim,
        n_clusters=n_clusters,
        n_heads=len(chosen),
        head=heads.head,
        hidden_dim=heads.hidden_dim,
        bottleneck_dim=heads.bottleneck_dim,
        temperature=heads.teacher_temp,
        n_reference=len(reference),
        standardized=projection.standardized,
        levels=None if partition is None else [int(of.max()) + 1 for of in partition.levels],
    )
    model.novelty = novelty
    model.weights.copy_(state.teacher.cpu()[chosen])
    anchor = clusters[order[0]] if partition is None else partition.clusters[judge.rows]
    model.votes.copy_(vote_tables(clusters[chosen], anchor, n_clusters))
    model.projection.load_state_dict(projection.state_dict())
    max_rows = SPLIT_ROWS if partition is None else len(neighbors)
    rows = sample_rows(len(neighbors), heads.seed, max_rows)
    x = torch.cat([gather(block) for block in rows.split(ROWS_PER_BLOCK)])
    if partition is not None:  # first, because the temperature can change which votes are equal
        _calibrate(model, x[sample_rows(len(x), heads.seed, CALIBRATION_ROWS)], partition.ensemble)
    answers = _fill_empty(model, x, None if partition is None else partition.clusters)
    departure = None
    if partition is not None:
        model.tree = Tree.fit(x, partition.clusters, partition.levels, n_clusters)
        departure = _departure(answers, partition.clusters, heads)
    return Answer(model, chosen, information, departure)


def _departure(answers: Tensor, clusters: Tensor, heads: HeadSettings) -> float:
    """Return the share of samples that the model moves to another cluster; warn if it is large."""
    departure = float((answers != clusters).double().mean())
    if departure > LARGE_DEPARTURE:
        remedy = "there, neighbors are of different clusters: check samples of low confidence"
        if heads.max_steps is not None or heads.epochs is not None:
            remedy = "leave out MAX_STEPS and EPOCHS, so that the heads train until they converge"
        logger.warning(
            "the heads put %.1f %% of the training samples into another cluster than the partition "
            "that they learned; %s",
            100 * departure,
            remedy,
        )
    return departure


@torch.no_grad()
def _fill_empty(model: ClusterModel, x: Tensor, target: Tensor | None) -> Tensor:
    """Fill each cluster that the vote leaves empty with a part of another, by `target` `[n]`.

    Return the model's clusters of `x`, `[n]`.
    """
    likeliest = torch.cat([model.answer(block).argmax(-1) for block in x.split(ROWS_PER_BLOCK)])
    splits = Splits.fit(x, likeliest, model.n_clusters, target)
    if n_splits := len(splits.parts):
        model.splits, model.options["n_splits"] = splits, n_splits
    answers = splits(x, likeliest)
    n_filled = len(answers.unique())
    if n_empty := model.n_clusters - n_filled:
        logger.warning(
            "%d of the %d clusters stay empty: no other cluster has distinct samples to split. "
            "Ask for %d clusters",
            *(n_empty, model.n_clusters, n_filled),
        )
    return answers


@torch.inference_mode()
def _calibrate(model: ClusterModel, x: Tensor, ensemble: Ensemble) -> None:
    """Set the temperature so that the mean confidence on `x` is the partitions' squared agreement.

    The partitions share errors, so the plain agreement is too high (docs/scores.md has numbers).
    """
    if len(ensemble.clusters) < MIN_SAMPLES_PER_CLUSTER * model.n_clusters:
        return
    votes = torch.cat([model.vote(block) for block in x.split(ROWS_PER_BLOCK)])
    shares = agreement(ensemble.by_all_methods, ensemble.clusters).values()
    confidence = (sum(shares) / len(shares)) ** 2
    model.options["answer_temperature"] = temperature_for(votes, confidence)


def temperature_for(probabilities: Tensor, confidence: float) -> float:
    """Return the temperature, from 0.05 to 20, at which the mean confidence is as given.

    Guo et al., On calibration of modern neural networks, ICML 2017, section 4.2, fit it to labels.
    """
    blocks = logits_of(probabilities).split(ROWS_PER_HALVING)
    low, high = math.log(COLDEST), math.log(HOTTEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        temperature = math.exp(middle)
        largest = torch.cat([torch.softmax(of / temperature, -1).amax(-1) for of in blocks])
        mean = float(largest.to(probabilities.dtype).double().mean())
        low, high = (middle, high) if mean > confidence else (low, middle)
    return math.exp((low + high) / 2)


def neighbor_information(first: Tensor, second: Tensor, n_clusters: int) -> float:
    """Return the mutual information of the clusters of samples and of their neighbors, in nats.

    The TEMI loss estimates this value, here for the hard partitions `first` and `second` `[pair]`:
    0 for a single cluster, at most `log K`. It ranks heads of nearly equal loss better.
    """
    cells = torch.bincount(first * n_clusters + second, minlength=n_clusters**2)
    joint = rearrange(cells, "(first second) -> first second", first=n_clusters)
    return float(mutual_info_score(None, None, contingency=(joint + joint.T).numpy()))


def vote_tables(clusters: Tensor, anchor: Tensor, n_clusters: int) -> Tensor:
    """Map each cluster of each head to a distribution over the clusters of a reference partition.

    From clusters `[head, n]` and reference clusters `anchor` `[n]`, return float32 distributions
    `[head, cluster, n_clusters]`, uniform for a cluster that the head never uses.
    """
    heads = torch.arange(len(clusters)).unsqueeze(1)
    cells = (heads * n_clusters + clusters) * n_clusters + anchor
    counts = torch.bincount(cells.flatten(), minlength=len(clusters) * n_clusters**2)
    sizes = {"head": len(clusters), "cluster": n_clusters}
    counts = rearrange(counts, "(head cluster anchor) -> head cluster anchor", **sizes).float()
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts / total.clamp(min=1), 1 / n_clusters)


@torch.inference_mode()
def head_clusters(trainer: HeadTrainer, gather: Gather, rows: Tensor) -> Tensor:
    """Return the cluster that each head's EMA teacher predicts for `rows`, int64 `[head, row]`."""
    weights = trainer.state.teacher
    parameters = trainer.bank.unflatten(weights)
    blocks = [
        trainer.bank(parameters, gather(block).to(weights.device)).argmax(-1).cpu()
        for block in rows.split(ROWS_PER_BLOCK)
    ]
    return torch.cat(blocks, dim=1)
