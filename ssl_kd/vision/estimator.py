"""The vision mode as a scikit-learn estimator: an array of embeddings in, clusters out."""

from __future__ import annotations

import itertools
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
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor
from typing_extensions import Self

from ssl_kd.datasets.features import as_array
from ssl_kd.files import CorruptFileError
from ssl_kd.guard.events import EventLog
from ssl_kd.guard.precision import Precision, default_torch_state
from ssl_kd.settings.arguments import named_as_arguments
from ssl_kd.settings.import_paths import path_of_file
from ssl_kd.store import nearest_neighbors
from ssl_kd.store.embeddings import odd_rows
from ssl_kd.training.loop import run_loop
from ssl_kd.training.ranks import refuse_ranks
from ssl_kd.training.stop import FinishEarly
from ssl_kd.vision.convergence import LOOKS
from ssl_kd.vision.fit import form_answer, make_plan, make_trainer
from ssl_kd.vision.hub import folder_of, push_saved
from ssl_kd.vision.model import ROWS_PER_BLOCK, ClusterModel, read_config
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.novelty import without_outliers
from ssl_kd.vision.objectives import OBJECTIVES
from ssl_kd.vision.partition import partition_of
from ssl_kd.vision.settings import AUTO, VisionSettings
from ssl_kd.vision.train import HeadsLearner
from ssl_kd.vision.training_rows import training_rows

logger = logging.getLogger(__name__)


class MultiHeadClusterer(
    ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, BaseEstimator
):
    """Cluster embeddings by the best partition of their neighbor graph, learned by voting heads.

    The graph of neighbors is searched for its best partition (`ssl_kd.graph`); each head learns to
    give a sample the cluster of its nearest neighbors in it. With `method="heads"` the heads find
    the clusters themselves, by self-distillation. The answer is what the best heads agree on,
    `p(c | x) = mean_h sum_k p_h(k | x) p_h(c | k)`. No label is used: `y` is ignored. Parameters
    are settings of `config.py`, with their meaning, range and default; the same embeddings and seed
    give the same answer as a run of `train.py`.

    Inputs are `[n, n_features]`: NumPy arrays, data frames of numbers, or tensors of any dtype and
    device; computed in float32, whatever autocast, gradient mode, default dtype or device is set
    around it. Outputs are NumPy arrays. Global random states are unchanged.

    Args:
        n_clusters: K, from 1 to the number of samples; None: it is found, among at least 64
            samples.
        pca_dim: wider embeddings are rotated to this many principal components; None: never.
        neighbours: nearest neighbors that a sample may be paired with; at most n - 1 are used.
        method: `graph`, the best partition of the graph of neighbors, which the heads learn, or
            `heads`, which find the clusters themselves; None: graph, unless `loss`, `beta` or
            `instance_weight` is changed.
        n_heads: heads trained side by side.
        head: import path of the head's class.
        hidden_dim: width of a head's hidden layer; its bottleneck is half as wide.
        loss: of `method="heads"`: `temi`, `sharpened` or the import path of an objective's class.
        beta: exponent of the pairwise mutual information, in (0, 1].
        student_temp: temperature of the students' softmax, at least 0.05.
        teacher_temp: temperature of the EMA teachers' softmax, at least 0.04.
        instance_weight: `none`, `own` or `mean`, the weight of a pair.
        learning_rate: peak learning rate of AdamW.
        clip_grad: largest gradient norm of a head; None: no clipping.
        batch_size: pairs per step; at most n are used.
        epochs: passes over the data; None: until the heads have converged, at most 200.
        max_steps: optimizer steps; None: no limit but `epochs`.
        noise_threshold: outlier score in (0, 1] above which a sample is noise, cluster -1; None:
            no sample is.
        use_fp16: run the students in half precision where the device gains by it.
        device: to train on, `auto`, `cpu`, `cuda`, `cuda:1` ...; predictions run on the CPU.
        random_state: an integer makes the result repeatable, a `RandomState` is drawn from once,
            None takes fresh entropy (and leaves NumPy's global state alone).

    Attributes:
        labels_: `[n]` int64, the cluster of each sample of the last `fit` or `partial_fit`, equal
            to `predict` of them; -1 for noise.
        levels_: `[level, n]` int64, the clusters of these samples at every level of the tree,
            coarsest first, noise included. No level with `method="heads"`.
        outlier_score_: `[n]` float32, `outlier_scores` of these samples.
        n_clusters_: number of clusters, including those that `partial_fit` added.
        new_clusters_: the numbers of the clusters that `partial_fit` added.
        number_: evidence for a number of clusters that was found: an interval and ranked levels
            (`ssl_kd.graph.levels.Evidence`); None where it was given, and after `from_pretrained`.
        n_iter_: number of training steps of `fit`.
        model_: the `ClusterModel` of the heads that vote, on the CPU.
        settings_: the `VisionSettings` of the training, with its seed.
        n_features_in_: width of the embeddings.
        feature_names_in_: their names, if they came in a data frame.

    References:
        Adaloglou et al., Exploring the Limits of Deep Image Clustering using Pretrained Models,
        BMVC 2023.

    >>> from sklearn.datasets import load_digits
    >>> from ssl_kd import MultiHeadClusterer
    >>> X, y = load_digits(n_class=3, return_X_y=True)
    >>> clusterer = MultiHeadClusterer(n_clusters=3, n_heads=8, max_steps=200).fit(X[:400])
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
        neighbours: int = VisionSettings.neighbours,
        method: str | None = VisionSettings.method,
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
        noise_threshold: float | None = VisionSettings.noise_threshold,
        use_fp16: bool = VisionSettings.use_fp16,
        device: str = VisionSettings.device,
        random_state: int | np.random.RandomState | None = VisionSettings.seed,
    ) -> None:
        self.n_clusters = n_clusters
        self.pca_dim = pca_dim
        self.neighbours = neighbours
        self.method = method
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
        self.noise_threshold = noise_threshold
        self.use_fp16 = use_fp16
        self.device = device
        self.random_state = random_state

    @default_torch_state()
    def partial_fit(self, X: ArrayLike | Tensor, y: object = None) -> Self:
        """Fit, or add samples to a fitted estimator: they join its clusters, or form new ones.

        Clusters keep their numbers, and nothing is trained. A group of samples unlike anything in
        the training data (`ssl_kd.vision.new_clusters`) becomes cluster `n_clusters_`,
        `n_clusters_ + 1`, ..., which `predict` returns from then on. `labels_` are those of this
        batch. A new cluster is found within one batch, so pass hundreds of samples at once.

        Args:
            X: embeddings `[n, n_features]`.
            y: ignored.

        Raises:
            ValueError: as `fit`, or the model stores no samples to compare with.
        """
        if not hasattr(self, "model_"):
            return self.fit(X)
        x = self._embeddings(X, reset=False)
        self.model_ = self.model_.extended(x.__getitem__, len(x))
        return self._set_labels(x)

    @property
    def n_clusters_(self) -> int:
        """Number of clusters, including those that `partial_fit` added."""
        check_is_fitted(self)
        return self.model_.n_clusters

    @property
    def new_clusters_(self) -> NDArray[np.int64]:
        """Numbers of the clusters that `partial_fit` added since `fit`, `[m]` int64."""
        check_is_fitted(self)
        return np.arange(self.model_.options["n_clusters"], self.n_clusters_)

    @default_torch_state()
    @named_as_arguments(VisionSettings, seed="random_state")
    def fit(self, X: ArrayLike | Tensor, y: object = None) -> Self:
        """Train the heads and form their answer.

        Of more than 10,000 rows METHOD graph trains on a random 10,000. Ctrl-C ends the search and
        the training early: the answer so far is stored, as after any `fit`, and then
        `KeyboardInterrupt` is raised; a second Ctrl-C ends at once.

        Args:
            X: embeddings `[n, n_features]`, n at least 2 and at least `n_clusters`.
            y: ignored.

        Raises:
            ValueError: a parameter out of range, too few samples, values that are not finite, or
                several processes that were started together.
            TooFewHealthyParts: no head could be trained.
        """
        refuse_ranks()
        settings = self._settings()
        x = self._embeddings(X, reset=True)
        n_clusters = 2 if settings.n_clusters == AUTO else int(settings.n_clusters or 1)
        if len(x) < n_clusters:
            raise ValueError(
                f"n_samples={len(x)} is less than n_clusters={n_clusters}: give more samples or "
                "ask for fewer clusters"
            )
        if message := odd_rows([x], n_clusters):
            logger.warning("embeddings: %s", message)
        with FinishEarly() as interruption:
            self._train(x, settings, n_clusters, interruption)
        return self

    def _train(
        self, x: Tensor, settings: VisionSettings, n_clusters: int, interruption: FinishEarly
    ) -> None:
        auto = settings.n_clusters == AUTO
        precision = Precision.for_device(settings.device, settings.use_fp16)
        rows = x
        if settings.searches_graph:
            k = None if auto else n_clusters
            rows = x[training_rows(len(x), x.__getitem__, settings.seed, k)]
        projection = Projection.fit(rows, settings.pca_dim)
        projected = projection(rows)
        gather = projected.__getitem__
        k = min(settings.neighbours, len(rows) - 1)
        neighbors = nearest_neighbors(rows, k, device=precision.device)
        partition, self.number_ = None, None
        if auto or (settings.by_graph and n_clusters > 1):
            partition = partition_of(
                None if auto else n_clusters,
                neighbors,
                rows.__getitem__,
                projected,
                precision.device,
                should_stop=lambda: interruption.wanted,
            )
            n_clusters, self.number_ = partition.n_clusters, partition.number
            partition = partition if settings.by_graph else None
        trainer = make_trainer(settings, projection.dim, n_clusters, precision)
        learner = HeadsLearner(
            trainer,
            make_plan(settings, trainer, neighbors, gather),
            gather,
            clusters=None if partition is None else partition.clusters,
            on_events=EventLog(announce=True).extend,
        )
        steps = itertools.count()
        self.n_iter_ = run_loop(
            learner, should_stop=lambda: next(steps) >= LOOKS[0] and interruption.wanted
        )
        answer = form_answer(settings, trainer, neighbors, gather, projection, partition)
        self.model_, self.settings_ = answer[0], settings
        self._set_labels(x)

    @default_torch_state()
    def predict(self, X: ArrayLike | Tensor) -> NDArray[np.int64]:
        """Return the cluster of each sample, `[n]` int64: the likeliest of `predict_proba`.

        It is -1 where `outlier_scores` is above the `noise_threshold` of `settings_`, if any. An
        array is read in blocks, so a mapped file (`np.load(file, mmap_mode="r")`) is never in
        memory as a whole.

        Raises:
            InputError: there is a threshold, and the model holds no outlier scores.
        """
        check_is_fitted(self)
        blocks: list[Any] = [X]
        if isinstance(X, np.ndarray) and X.ndim == 2 and len(X) > ROWS_PER_BLOCK:
            blocks = np.split(X, range(ROWS_PER_BLOCK, len(X), ROWS_PER_BLOCK))
        clusters = []
        for block in blocks:
            x = self._embeddings(block, reset=False)
            of_block, threshold = self.model_.predict(x), self.settings_.noise_threshold
            if threshold is not None:
                of_block = without_outliers(of_block, self.model_.outlier_scores(x), threshold)
            clusters.append(of_block.numpy())
        return np.concatenate(clusters)

    def _set_labels(self, x: Tensor) -> Self:
        clusters, scores = self.model_.predict(x), self.model_.outlier_scores(x)
        threshold = self.settings_.noise_threshold
        labels = clusters if threshold is None else without_outliers(clusters, scores, threshold)
        self.labels_, self.outlier_score_ = labels.numpy(), scores.numpy()
        self.levels_ = np.empty((0, len(x)), np.int64)
        if self.model_.tree is not None:
            self.levels_ = self.model_.predict_levels(x, clusters).numpy().T[::-1].copy()
        return self

    @default_torch_state()
    def outlier_scores(self, X: ArrayLike | Tensor) -> NDArray[np.float32]:
        """Return the share of training samples that are less far out, `[n]` float32 in [0, 1].

        0.99 is further out than 99 % of the training samples; 1 is beyond all of them. A training
        sample is compared with the others, so scores of new samples of the same source are spread
        evenly over [0, 1]. `ssl_kd.vision.novelty` has the formula.

        Raises:
            InputError: the model holds no outlier scores.
        """
        check_is_fitted(self)
        return self.model_.outlier_scores(self._embeddings(X, reset=False)).numpy()

    @default_torch_state()
    def predict_proba(self, X: ArrayLike | Tensor) -> NDArray[np.float32]:
        """Return the heads' mean vote, `[n, n_clusters]` float32, each row a distribution.

        The largest entry of a row is the confidence: how far the heads agree on that sample,
        calibrated without labels by the stability of the partition.
        """
        check_is_fitted(self)
        return self.model_.predict_proba(self._embeddings(X, reset=False)).numpy()

    def transform(self, X: ArrayLike | Tensor) -> NDArray[np.float32]:
        """Return `predict_proba`, `[n, n_clusters]` float32, as features for a next step."""
        return self.predict_proba(X)

    @default_torch_state()
    def predict_levels(self, X: ArrayLike | Tensor) -> NDArray[np.int64]:
        """Return the cluster of each sample at every level of the tree, `[n, level]` int64.

        The levels have `model_.options["levels"]` clusters, the finest first: 3 K of them, each
        part of one that `predict` returns, down to 5, each made of whole ones.

        Raises:
            InputError: there is no tree, because the heads found the clusters themselves.
        """
        check_is_fitted(self)
        return self.model_.predict_levels(self._embeddings(X, reset=False)).numpy()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `model.safetensors` and `config.json`, as a run folder has them."""
        check_is_fitted(self)
        settings = self.settings_.to_dict()
        config: dict[str, Any] = {
            "settings": {name: settings[name] for name in map(_setting, self.get_params())}
        }
        if hasattr(self, "feature_names_in_"):
            config["feature_names"] = list(self.feature_names_in_)
        self.model_.save_pretrained(folder, **config)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None
    ) -> str:
        """Upload to the Hugging Face hub with a card, for `from_pretrained(repo_id)`.

        Args:
            repo_id: `user/name`; created if it does not exist.
            private: whether the repository is private; None: as the account says.
            token: of the hub; None: the one that `hf auth login` stored.

        Returns:
            The URL of the repository.

        Raises:
            InputError: `repo_id` is not a valid name; HubRefused: the hub refused the upload.
        """
        check_is_fitted(self)
        sizes = self.n_clusters_, self.n_features_in_
        return push_saved(self.save_pretrained, *sizes, repo_id, private=private, token=token)

    @classmethod
    @default_torch_state()
    def from_pretrained(
        cls, folder: str | Path, *, head: str | None = None, loss: str | None = None
    ) -> Self:
        """Load what `save_pretrained` wrote, a finished run folder, or a model of the hub.

        Parameters are those of the training. A run folder's model takes embeddings of the run's
        teacher, not images.

        Args:
            folder: the folder; `user/name` of no folder is a model of the hub.
            head: import path of the head's class. Only this library's own head is imported because
                the folder names it; any other must be named here, because an import runs code.
            loss: import path of the objective's class, which another `fit` would import; named here
                for the same reason.

        Raises:
            FileNotFoundError: the folder does not exist or holds no trained model.
            CorruptFileError: one of its files is damaged, or a tensor is not finite; it is named.
            ValueError: its head or loss is not this library's and was not named here.
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
        loaded.model_, loaded.settings_, loaded.number_ = model, loaded._settings(), None
        loaded.n_features_in_ = model.options["in_dim"]
        if "feature_names" in config:
            names, width = config["feature_names"], loaded.n_features_in_
            if not isinstance(names, list) or len(names) != width:
                raise CorruptFileError(
                    f"{folder / 'config.json'}: feature_names is {str(names)[:80]}, expected a "
                    f"list of {width}, one for each dimension (in_dim): copy it again"
                )
            loaded.feature_names_in_ = np.array(names, dtype=object)
        return loaded

    def _settings(self) -> VisionSettings:
        """Return the checked parameters; `n_clusters` is None for a single cluster."""
        values = {_setting(name): _plain(value) for name, value in self.get_params().items()}
        if self.random_state is None:
            values["SEED"] = int(np.random.default_rng().integers(2**32))
        elif isinstance(self.random_state, numbers.Integral):
            values["SEED"] = int(self.random_state)
        else:
            random = check_random_state(self.random_state)
            values["SEED"] = int(random.randint(2**32, dtype=np.uint32))
        if values["N_CLUSTERS"] == 1:  # trivial, so no run may ask for it; scikit-learn's users may
            values["N_CLUSTERS"] = None
        elif values["N_CLUSTERS"] is None:  # an array declares no classes
            values["N_CLUSTERS"] = AUTO
        return VisionSettings.from_dict(values)

    def _embeddings(self, X: ArrayLike | Tensor, *, reset: bool) -> Tensor:
        """Return checked `[n, n_features]` float32 on the CPU, which may share memory with X."""
        with np.errstate(over="ignore"):  # too large for float32: an error that says so follows
            options = {"dtype": np.float32, "order": "C", "ensure_min_samples": 2 if reset else 1}
            x = validate_data(self, as_array(X), reset=reset, **options)
        return torch.from_numpy(np.require(x, requirements=["C", "W"]))

    @property
    def _n_features_out(self) -> int:
        return self.model_.n_clusters

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags


def _setting(parameter: str) -> str:
    return "SEED" if parameter == "random_state" else parameter.upper()


def _plain(value: Any) -> Any:
    """Convert a NumPy number or a `torch.device`, which a grid search may pass, to a setting."""
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, torch.device) else value
