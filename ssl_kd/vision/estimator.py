"""Cluster an array of embeddings with a scikit-learn estimator."""

from __future__ import annotations

import logging
import numbers
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import (
    BaseEstimator,
    ClassNamePrefixFeaturesOutMixin,
    ClusterMixin,
    TransformerMixin,
)
from sklearn.metrics import adjusted_mutual_info_score
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor
from typing_extensions import Self

from firstnan.events import EventLog
from ssl_kd.core.errors import brief
from ssl_kd.core.files import CorruptFileError
from ssl_kd.core.precision import Precision, default_torch_state
from ssl_kd.core.runs.loop import run_loop
from ssl_kd.core.runs.ranks import refuse_ranks
from ssl_kd.core.settings.arguments import named_as_arguments
from ssl_kd.core.settings.import_paths import path_of_file
from ssl_kd.vision.cache import neighbors_in_memory
from ssl_kd.vision.cache.embeddings import odd_rows
from ssl_kd.vision.data.features import as_array
from ssl_kd.vision.fit import form_answer, log_method, make_trainer
from ssl_kd.vision.model import ROWS_PER_BLOCK, ClusterModel, folder_of, read_config
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.partition import modularity_of, partitions_of
from ssl_kd.vision.settings import AUTO, VisionSettings
from ssl_kd.vision.stages import Stages, Starts, first_of
from ssl_kd.vision.train.learner import HeadsLearner
from ssl_kd.vision.train.objectives import OBJECTIVES
from ssl_kd.vision.train.pairs import sample_rows
from ssl_kd.vision.training_rows import (
    GRAPH_ROWS,
    nearest_in_graph,
    other_rows,
    training_rows,
    unequal_columns,
)

logger = logging.getLogger(__name__)


class MultiHeadClusterer(
    ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, BaseEstimator
):
    """Cluster embeddings by a vote of several methods and of heads, which learn the answer.

    Partitions of the graph of nearest neighbors by several methods vote (`ssl_kd.vision.graph`).
    Heads start from these partitions, go on by self-distillation, and vote with them; with
    `method="heads"` they vote alone. All heads then learn the answer. Predictions are the mean vote
    of the best heads, `p(c | x) = mean_h sum_k p_h(k | x) p_h(c | k)`. Labels are not used: `y` is
    ignored. Parameters are settings of `config.py` with the same meaning, range and default, and a
    run of `train.py` on the same embeddings with the same seed gives the same clusters.

    Inputs are `[n, n_features]`: NumPy arrays, data frames, or tensors of any dtype and device.
    Computation is in float32, independent of autocast, gradient mode, default dtype and default
    device. Outputs are NumPy arrays. Global random states are not changed.

    As usual in scikit-learn, NaN and infinity raise ValueError. Rows of zeros are samples, about
    which `fit` logs a warning. Remove rows that stand for missing embeddings first
    (`ssl_kd.vision.data.missing.missing_rows` finds them), as `train.py` does with feature files.

    Args:
        n_clusters: number of clusters K, from 1 to the number of samples. None or `auto` estimates
            K, which needs at least 64 samples. (None in `config.py` is the same for data without
            labels, such as an array; for a data set with labels it is their number of classes.)
        pca_dim: wider embeddings are rotated to this many principal components; None for never.
        standardize: divide each column by its standard deviation, after subtracting its mean. For
            tables whose columns have different units.
        n_neighbors: number of nearest neighbors of a sample in the graph; at most n - 1 are used.
        method: `consensus`, or `heads`; see above.
        cluster_sizes: `even`, or `any` if some clusters are many times larger than others.
        n_heads: number of heads.
        head: import path of the class of the heads.
        hidden_dim: width of the hidden layer of a head; the bottleneck is half as wide.
        loss: by which heads find clusters: `temi`, `sharpened`, `fixed` (they find none, and learn
            the answer alone) or the import path of an objective.
        beta: exponent of the pairwise mutual information, in (0, 1].
        student_temp: softmax temperature of the students, at least 0.05.
        teacher_temp: softmax temperature of the EMA teachers, at least 0.04.
        instance_weight: weighting of pairs: `none`, `own` or `mean`.
        learning_rate: peak learning rate of AdamW.
        clip_grad: maximum gradient norm of a head; None for no clipping.
        batch_size: pairs per step; at most n are used.
        epochs: passes over the data; None trains until convergence, at most 200 epochs.
        max_steps: maximum number of optimizer steps; None for no limit.
        use_fp16: train in half precision on devices where that is faster.
        device: device of the training, `auto`, `cpu`, `cuda`, `cuda:1` ...; predictions run on the
            CPU.
        random_state: integer seed, or a `RandomState` to draw the seed from; None for a random
            seed.

    Attributes:
        labels_: `[n]` int64, cluster of each sample of the last `fit` or `partial_fit`, equal to
            `predict` of these samples.
        levels_: `[level, n]` int64, cluster of each of these samples at every tree level, coarsest
            level first.
        outlier_score_: `[n]` float32, outlier score of each of these samples.
        number_: evidence for an estimated number of clusters: an interval, and ranked levels
            (`ssl_kd.vision.graph.number.Evidence`). None if `n_clusters` was set, and after
            `from_pretrained`.
        departure_: share of the training samples that the heads put into another cluster than the
            answer that they learned, 0 to 1; above 0.05 `fit` logs a warning. None after
            `from_pretrained`.
        n_iter_: number of training steps of `fit`.
        model_: the trained `ClusterModel`, on the CPU.
        settings_: the `VisionSettings` of the training, including the seed.
        n_features_in_: width of the embeddings.
        feature_names_in_: column names, if `fit` was given a data frame.

    References:
        Adaloglou et al., Exploring the Limits of Deep Image Clustering using Pretrained Models,
        BMVC 2023.

    >>> from sklearn.datasets import load_digits
    >>> from ssl_kd import MultiHeadClusterer
    >>> X, y = load_digits(n_class=3, return_X_y=True)
    >>> clusterer = MultiHeadClusterer(n_clusters=3, n_heads=4, max_steps=100).fit(X[:400])
    >>> clusters = clusterer.predict(X[400:])  # held out
    >>> from sklearn.metrics import normalized_mutual_info_score
    >>> bool(normalized_mutual_info_score(y[400:], clusters) > 0.8)
    True
    """

    n_features_in_: int
    feature_names_in_: NDArray[Any]

    def __init__(
        self,
        n_clusters: int | str | None = 10,
        *,
        pca_dim: int | None = VisionSettings.pca_dim,
        standardize: bool = VisionSettings.standardize,
        n_neighbors: int = VisionSettings.n_neighbors,
        method: str = VisionSettings.method,
        cluster_sizes: str = VisionSettings.cluster_sizes,
        n_heads: int = VisionSettings.n_heads,
        head: str = VisionSettings.head,
        hidden_dim: int = VisionSettings.hidden_dim,
        loss: str = VisionSettings.loss,
        beta: float = VisionSettings.beta,
        student_temp: float = VisionSettings.student_temp,
        teacher_temp: float = VisionSettings.teacher_temp,
        instance_weight: str = VisionSettings.instance_weight,
        learning_rate: float = VisionSettings.learning_rate,
        clip_grad: float | None = VisionSettings.clip_grad,
        batch_size: int = VisionSettings.batch_size,
        epochs: int | None = VisionSettings.epochs,
        max_steps: int | None = VisionSettings.max_steps,
        use_fp16: bool = VisionSettings.use_fp16,
        device: str = VisionSettings.device,
        random_state: int | np.random.RandomState | None = VisionSettings.seed,
    ) -> None:
        self.n_clusters = n_clusters
        self.pca_dim = pca_dim
        self.standardize = standardize
        self.n_neighbors = n_neighbors
        self.method = method
        self.cluster_sizes = cluster_sizes
        self.n_heads = n_heads
        self.head = head
        self.hidden_dim = hidden_dim
        self.loss = loss
        self.beta = beta
        self.student_temp = student_temp
        self.teacher_temp = teacher_temp
        self.instance_weight = instance_weight
        self.learning_rate = learning_rate
        self.clip_grad = clip_grad
        self.batch_size = batch_size
        self.epochs = epochs
        self.max_steps = max_steps
        self.use_fp16 = use_fp16
        self.device = device
        self.random_state = random_state

    @default_torch_state()
    def partial_fit(self, X: ArrayLike | Tensor, y: object = None) -> Self:
        """Assign more samples to the clusters of a fitted estimator, and add new clusters.

        The heads are not trained again, and clusters keep their numbers. A group of samples that is
        unlike the training data (`ssl_kd.vision.new_clusters`) becomes a new cluster with the
        number `n_clusters_`. New clusters are detected within one call, so pass hundreds of samples
        at once. `labels_` has the clusters of this call's samples. An estimator that is not fitted
        is fitted.

        Args:
            X: embeddings `[n, n_features]`.
            y: ignored.

        Raises:
            ValueError: `X` or a parameter is not valid, or the model stores no training samples.
        """
        if not hasattr(self, "model_"):
            return self.fit(X)
        x = self._embeddings(X, reset=False)
        self.model_ = self.model_.extended(x.__getitem__, len(x))
        return self._set_labels(x)

    @property
    def n_clusters_(self) -> int:
        """Number of clusters, including clusters that `partial_fit` added."""
        check_is_fitted(self)
        return self.model_.n_clusters

    @property
    def new_clusters_(self) -> NDArray[np.int64]:
        """Numbers of the clusters that `partial_fit` added, `[m]` int64."""
        check_is_fitted(self)
        return np.arange(self.model_.options["n_clusters"], self.n_clusters_)

    @default_torch_state()
    @named_as_arguments(VisionSettings, seed="random_state")
    def fit(self, X: ArrayLike | Tensor, y: object = None) -> Self:
        """Find the clusters of the samples, and train the heads that predict them.

        The clusters are found in a random 10,000 of the samples if there are more, or in 50 per
        cluster if these are more, at most 100,000. The heads learn them from the other samples as
        well, at most a million, of which each takes the cluster of the nearest samples.

        Args:
            X: embeddings `[n, n_features]`, n at least 2 and at least `n_clusters`.
            y: ignored.

        Raises:
            ValueError: a parameter is out of range, there are too few samples, or a value is not
                finite. Also raised in a distributed process group, which `fit` does not support.
            TooFewHealthyParts: the training of too many heads failed.
        """
        refuse_ranks()
        settings = self._settings()
        x = self._embeddings(X, reset=True)
        n_clusters = self._n_clusters(settings)
        if len(x) < (least := n_clusters or 2):
            raise ValueError(
                f"n_samples={len(x)} is less than n_clusters={least}: pass more samples, or "
                "reduce n_clusters"
            )
        if message := odd_rows([x], least):
            logger.warning("the embeddings are suspect: %s", message)
        log_method(settings)
        return self._train(x, settings, n_clusters)

    def _train(self, x: Tensor, settings: VisionSettings, n_clusters: int | None) -> Self:
        precision = Precision.for_device(settings.device, settings.use_fp16)
        in_graph = training_rows(len(x), x.__getitem__, settings.seed, n_clusters)
        rows, others = x[in_graph], other_rows(len(x), in_graph, settings.seed, n_clusters)
        if message := unequal_columns(rows, settings.standardize):
            logger.warning("%s", message)
        projection = Projection.fit(rows, settings.pca_dim, settings.standardize)
        projected, rows = projection(rows), projection.columns(rows)
        beyond = [projection(x[block]) for block in others.split(ROWS_PER_BLOCK)]
        gather = torch.cat([projected, *beyond]).__getitem__
        k = min(settings.n_neighbors, len(rows) - 1)
        neighbors = neighbors_in_memory(rows, k, device=precision.device)[0]
        partitions = partition = nearest = self.number_ = None
        starts = Starts()
        if n_clusters != 1:
            inputs = neighbors, rows.__getitem__, projected, precision.device
            partitions = partitions_of(n_clusters, *inputs, settings.sizes)
            n_clusters, self.number_ = partitions.n_clusters, partitions.number
            neighbors = partitions.neighbors
            partition, starts = first_of(partitions, settings)
            n = len(rows) + len(others)
            k = neighbors.shape[1]
            nearest = nearest_in_graph(gather, len(rows), n, k, precision.device)
        assert n_clusters is not None
        trainer = make_trainer(settings, projection.dim, n_clusters, precision)
        stages = Stages(settings, trainer, neighbors, gather, starts, partitions, others=nearest)
        learner = HeadsLearner(
            trainer,
            gather=gather,
            on_events=EventLog(announce=True).extend,
            **stages.first(),
        )
        self.n_iter_ = run_loop(learner)
        partition = partition or stages.formed
        answer = form_answer(settings, trainer, neighbors, gather, projection, partition)
        self.model_ = answer.model
        self.settings_ = settings
        self.departure_ = answer.departure
        return self._set_labels(x)

    @default_torch_state()
    def predict(self, X: ArrayLike | Tensor) -> NDArray[np.int64]:
        """Return the most probable cluster of each sample, `[n]` int64.

        A memory-mapped array (`np.load(file, mmap_mode="r")`) is read block by block.
        """
        check_is_fitted(self)
        blocks: list[Any] = [X]
        if isinstance(X, np.ndarray) and X.ndim == 2 and len(X) > ROWS_PER_BLOCK:
            blocks = np.split(X, range(ROWS_PER_BLOCK, len(X), ROWS_PER_BLOCK))
        clusters = [self.model_.predict(self._embeddings(x, reset=False)) for x in blocks]
        return torch.cat(clusters).numpy()

    def _set_labels(self, x: Tensor) -> Self:
        clusters = self.model_.predict(x)
        self.labels_, self.outlier_score_ = clusters.numpy(), self.model_.outlier_scores(x).numpy()
        self.levels_ = np.empty((0, len(x)), np.int64)
        if self.model_.tree is not None:
            self.levels_ = self.model_.predict_levels(x, clusters).numpy().T[::-1].copy()
        return self

    @default_torch_state()
    def outlier_scores(self, X: ArrayLike | Tensor) -> NDArray[np.float32]:
        """Return the outlier score of each sample, `[n]` float32 in [0, 1].

        The score is a percentile: 0.99 means more unusual than 99 % of the training samples. Scores
        of new samples from the same source are therefore spread evenly over [0, 1].
        `ssl_kd.vision.novelty` has the formula.

        Raises:
            InputError: the model has no outlier scores.
        """
        check_is_fitted(self)
        return self.model_.outlier_scores(self._embeddings(X, reset=False)).numpy()

    @default_torch_state()
    def predict_proba(self, X: ArrayLike | Tensor) -> NDArray[np.float32]:
        """Return cluster probabilities, the mean vote of the heads, `[n, n_clusters]` float32.

        The largest probability of a sample is its confidence. It is calibrated without labels, by
        the stability of the partition.
        """
        check_is_fitted(self)
        return self.model_.predict_proba(self._embeddings(X, reset=False)).numpy()

    @default_torch_state()
    def score(self, X: ArrayLike | Tensor, y: ArrayLike | None = None) -> float:
        """Return how well `predict(X)` fits; higher is better. `GridSearchCV` calls this.

        Without `y`, the score is the modularity of the predicted clusters in the graph of nearest
        neighbors of `X` (of a random 10,000 samples if there are more): the share of edges within
        clusters above what their sizes explain, from -0.5 to 1. It reads no labels, and is lower
        both for a divided and for a merged group, so it also compares numbers of clusters. With
        `y`, it is their adjusted mutual information with `y`: 1 for the same partition, about 0 for
        a random one.

        Args:
            X: embeddings `[n, n_features]`, at least two; held out, or those of `fit`.
            y: classes `[n]` to compare with, or None.
        """
        check_is_fitted(self)
        x = self._embeddings(X, reset=False)
        if y is not None:
            return float(adjusted_mutual_info_score(y, self.model_.predict(x)))
        if len(x) < 2:
            raise ValueError("n_samples=1, but the score without y compares at least 2 samples")
        x = x[sample_rows(len(x), self.settings_.seed, GRAPH_ROWS)]
        projection = self.model_.projection
        return modularity_of(self.model_.predict(x), projection.columns(x), projection(x))

    def transform(self, X: ArrayLike | Tensor) -> NDArray[np.float32]:
        """Return `predict_proba(X)`, `[n, n_clusters]` float32, as features for a pipeline."""
        return self.predict_proba(X)

    @default_torch_state()
    def predict_levels(self, X: ArrayLike | Tensor) -> NDArray[np.int64]:
        """Return the cluster of each sample at every tree level, `[n, level]` int64.

        Levels are ordered from fine to coarse and have `model_.options["levels"]` clusters. The
        clusters of a finer level are parts of the clusters of a coarser level.

        Raises:
            InputError: the model has no tree, because `method` was `heads`.
        """
        check_is_fitted(self)
        return self.model_.predict_levels(self._embeddings(X, reset=False)).numpy()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `model.safetensors` and `config.json` to a folder."""
        check_is_fitted(self)
        settings = self.settings_.to_dict()
        config: dict[str, Any] = {
            "settings": {name: settings[name] for name in map(_setting, self.get_params())}
        }
        if hasattr(self, "feature_names_in_"):
            config["feature_names"] = list(self.feature_names_in_)
        self.model_.save_pretrained(folder, **config)

    @classmethod
    @default_torch_state()
    def from_pretrained(
        cls, folder: str | Path, *, head: str | None = None, loss: str | None = None
    ) -> Self:
        """Load a fitted estimator, with the parameters of its training, from a folder or the Hub.

        The model of a run folder takes embeddings of the run's teacher, not images.

        Args:
            folder: a folder that `save_pretrained` wrote, the folder of a finished run, or the name
                of a model on the Hugging Face Hub, `user/name`.
            head: import path of the class of the heads. It is required for a class outside this
                library, because importing a class runs its code.
            loss: import path of the class of the objective, required for the same reason.

        Raises:
            FileNotFoundError: the folder does not exist or holds no trained model.
            CorruptFileError: a file is damaged, or a tensor is not finite.
            ValueError: the saved head or loss is not this library's and is not given here.
        """
        folder = folder_of(folder)
        config = read_config(folder)
        saved = config.get("settings", {})
        if "LOSS" in saved:
            way = f"from_pretrained(..., loss={saved['LOSS']!r})"
            file = folder / "config.json"
            saved["LOSS"] = path_of_file(
                saved["LOSS"], loss, OBJECTIVES, what="loss", file=file, way=way
            )
        model = ClusterModel.from_pretrained(folder, head=head)
        saved |= {
            "N_CLUSTERS": model.options["n_clusters"],
            "TEACHER_TEMP": model.temperature,
            **{name.upper(): model.options[name] for name in ("head", "hidden_dim")},
        }
        names = cls().get_params()
        loaded = cls(**{name: saved[_setting(name)] for name in names if _setting(name) in saved})
        loaded.model_, loaded.settings_ = model, loaded._settings()
        loaded.number_ = loaded.departure_ = None
        loaded.n_features_in_ = model.options["in_dim"]
        if "feature_names" in config:
            names, width = config["feature_names"], loaded.n_features_in_
            if not isinstance(names, list) or len(names) != width:
                raise CorruptFileError(
                    f"{folder / 'config.json'}: feature_names is {str(names)[:80]}; expected a "
                    f"list of {width} names, one for each dimension: copy the file again"
                )
            loaded.feature_names_in_ = np.array(names, dtype=object)
        return loaded

    @property
    def _n_features_out(self) -> int:
        return self.model_.n_clusters

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags

    def _settings(self) -> VisionSettings:
        """Convert the parameters to settings and check them."""
        values = {_setting(name): _plain(value) for name, value in self.get_params().items()}
        seed: Any = self.random_state
        if seed is None:
            seed = np.random.default_rng().integers(2**32)
        elif not isinstance(seed, numbers.Integral):
            seed = check_random_state(seed).randint(2**32, dtype=np.uint32)
        values["SEED"] = int(seed)
        if values["N_CLUSTERS"] == 1:  # valid in scikit-learn, but not as a setting of a run
            values["N_CLUSTERS"] = None
        return VisionSettings.from_dict(values)

    def _n_clusters(self, settings: VisionSettings) -> int | None:
        """Return the number of clusters, or None if it is to be found: an array has no classes."""
        if self.n_clusters == 1:
            return 1
        return None if settings.n_clusters == AUTO else settings.n_clusters

    def _embeddings(self, X: ArrayLike | Tensor, *, reset: bool) -> Tensor:
        """Check X and convert it to a float32 tensor `[n, n_features]` on the CPU."""
        options = {"dtype": np.float32, "order": "C", "ensure_min_samples": 2 if reset else 1}
        try:
            # Values too large for float32 become infinity, for which validate_data raises.
            with np.errstate(over="ignore"):
                x = validate_data(self, as_array(X), reset=reset, **options)
        except ValueError as error:
            if "could not convert string" not in str(error):
                raise
            raise ValueError(
                f"X has texts ({brief(error)}); expected embeddings [n, n_features]: embed the "
                "texts first, or cluster a table of them with `ssl_kd train --dataset FILE.csv "
                "--column NAME --teacher minilm`"
            ) from error
        return torch.from_numpy(np.require(x, requirements=["C", "W"]))


def _setting(parameter: str) -> str:
    return "SEED" if parameter == "random_state" else parameter.upper()


def _plain(value: Any) -> Any:
    """Convert a NumPy number or a `torch.device` to a plain Python value."""
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, torch.device) else value
