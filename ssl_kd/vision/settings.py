"""Define and check the settings of the vision mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ssl_kd.core.settings import RunSettings, Settings, SettingsError, setting
from ssl_kd.core.settings import recipes as published
from ssl_kd.core.settings.import_paths import IMPORT_PATH
from ssl_kd.vision.foreign_names import ALIASES, INSTEAD
from ssl_kd.vision.recipes import RECIPES
from ssl_kd.vision.teacher_kinds import KINDS, TOKENS
from ssl_kd.vision.train.objectives import OBJECTIVES, make_objective

# Value of N_CLUSTERS: choose the number of clusters from the data.
AUTO = "auto"
# Folder in which EMBEDDINGS_DIR auto caches embeddings.
EMBEDDINGS = "data/embeddings"
# LOSS with which heads find clusters themselves: all but `fixed`, also an import path.
_LEARNS = "(?!fixed$).*"
# LOSS that may read BETA: `temi`, and the objective of a user.
_READS_BETA = r"temi|.*\..*"
# With CLUSTER_SIZES any, heads find no clusters.
_EVEN = {"cluster_sizes": "even"}
# Width of DINOv2's tokens, by the letter of the model's size.
DINOV2_WIDTHS = {"s": 384, "b": 768, "l": 1024, "g": 1536}

_OBJECTIVES = " | ".join(f"{name} ({kind.summary})" for name, kind in OBJECTIVES.items())


@dataclass(frozen=True)
class DataSettings(Settings):
    """Settings of the data set to cluster, and of where it is stored."""

    dataset: str = setting(
        "digits",
        "what to cluster: digits | cifar10 | cifar100 | stl10 | fashion_mnist | imagenet | path of"
        " a folder of images, or of sounds, at any depth | path of features (.npy .npz .pt"
        " .safetensors .h5ad), or of a table of features, texts, pictures or sound files (.parquet"
        " .csv .tsv .jsonl, or a folder of save_to_disk or of Parquet files)",
        section="Data",
    )
    dataset_test: str | None = setting(
        None,
        "held-out folder or file of features; None: the data set's own test split, if it has one",
    )
    labels: str = setting(
        "auto",
        "labels to score the answer by: folders (the first folder below DATASET is a file's"
        " class) | auto (those of a named data set or of a feature file; a folder has none) | none",
        "Never used for training. The folders of an album are not classes.",
        choices=("auto", "folders", "none"),
    )
    column: str | None = setting(
        None,
        "column (or array) that holds the features in a feature file, or the texts, pictures or"
        " sound files in a table, also of DATASET_TEST; None: the only list column, or one called"
        " features, embeddings, x or data; without features, pictures, sounds or a column text",
    )
    label_column: str | None = setting(
        None,
        "column (or array) that holds the labels in a feature file or table, also of DATASET_TEST;"
        " None: one called label, class or alike, or target or y if it has few values that are"
        " integers or text",
    )
    data_dir: str = setting("data", "folder of data sets, to which DOWNLOAD writes")
    download: bool = setting(
        False,
        "download the data set (torchvision's sets) where it is missing",
        "Off: no data set is downloaded.",
    )

    @property
    def open_options(self) -> dict[str, Any]:
        """Keyword arguments for `ssl_kd.vision.data.open_dataset`."""
        names = {n: getattr(self, n) for n in ("labels", "column", "label_column")}
        return {"root": self.data_dir, "download": self.download, **names}


@dataclass(frozen=True)
class TeacherSettings(Settings):
    """Settings of the frozen model that embeds the samples, and of the embedding cache."""

    teacher: str = setting(
        AUTO,
        "frozen model that embeds the images, texts or sounds: auto (chosen by the data) | pixels |"
        " dinov2 | dinov3 | siglip2 | pe | radio | aimv2 | tipsv2 | clip | franca |"
        " efficientnet_lite0 | efficientnet_lite1 | efficientnet_lite2 | timm:NAME |"
        " torchvision:NAME | open_clip:NAME | minilm (texts) | resemblyzer (voices) | hf:NAME"
        " (transformers, for all three) | package.module.Class (your own) | features (DATASET holds"
        " embeddings already)",
        "With auto: pixels for small gray images such as digits; for photographs dinov2 if its"
        " weights are cached or can be downloaded, else efficientnet_lite0; for texts minilm, for"
        " sounds resemblyzer, for embeddings features. The run says which one it took, and keeps"
        " it. Other sizes, such as dinov2_vitb14_reg or dinov3_vitl16, are listed in"
        " docs/images.md.",
        choices=(AUTO, *(name for kind in KINDS for name in kind.names)),
        forms=tuple(kind.form for kind in KINDS if kind.form is not None),
        known=tuple(name for kind in KINDS for name in kind.more),
        section="Teacher and embeddings",
    )
    teacher_weights: str | None = setting(
        None,
        "local file of the teacher's weights, for machines without a network; None: the published"
        " ones",
    )
    embedding_dim: int | None = setting(
        None,
        "width that the teacher's embeddings must have; None: any",
        "The run stops before it embeds anything if the teacher has another width.",
        low=1,
    )
    image_size: int | None = setting(
        None,
        "side of the teacher's input in pixels; None: the model's own (DINOv2: 224)",
        low=1,
        high=4096,
    )
    token: str = setting(
        "class",
        "which output of a vision transformer is the embedding: class (token) | patch (mean of the"
        " patch tokens) | both (concatenated) | last4 (class tokens of the last four layers, and"
        " the mean patch) | patches (all patch tokens, with train.py extract)",
        choices=tuple(TOKENS),
    )
    workers: int = setting(
        0,
        "threads that decode images; 0: chosen by the device",
        "They decode ahead of a GPU's teacher, and between the batches of a CPU's. Raise it if"
        " the progress bar waits for the disk.",
        low=0,
        high=256,
    )
    embeddings_dir: str = setting(
        AUTO,
        "where the teacher's embeddings are cached; auto: data/embeddings for digits by pixels,"
        " else data/embeddings/DATASET-TEACHER-DIGEST, a folder for each data set and teacher",
        "The digest is of all samples, the teacher's weights and its dtype: where one of them"
        " changes, another folder is taken.",
    )
    force_recompute: bool = setting(
        False, "embed all samples again; the old cache stays until the new one is complete"
    )
    rebuild_damaged: bool = setting(
        False, "embed damaged shards of the cache again; verified shards are kept"
    )

    def check_together(self) -> None:
        """Raise SettingsError if TEACHER does not fit TEACHER_WEIGHTS or EMBEDDING_DIM."""
        super().check_together()
        if self.teacher == AUTO and self.teacher_weights is not None:
            raise SettingsError(
                f"TEACHER_WEIGHTS is {self.teacher_weights!r}, but TEACHER is 'auto': set TEACHER "
                "to the model that these weights belong to"
            )
        if self.teacher.startswith("dinov2"):
            size = "s" if self.teacher == "dinov2" else self.teacher.removeprefix("dinov2_vit")[0]
            self.check_width(self.teacher, DINOV2_WIDTHS[size] * TOKENS[self.token])

    def check_width(self, teacher: str, width: int) -> None:
        """Raise SettingsError if EMBEDDING_DIM is set and `teacher` embeds in another width."""
        if self.embedding_dim in (None, width):
            return
        other = f"TEACHER to a model of width {self.embedding_dim}"
        for size, of_model in DINOV2_WIDTHS.items():
            if of_model == self.embedding_dim:
                other += f", such as dinov2_vit{size}14"
        source = teacher if self.token == "class" else f"{teacher} with TOKEN {self.token}"
        if teacher == "features":
            other = f"DATASET or COLUMN to embeddings of width {self.embedding_dim}"
        raise SettingsError(
            f"EMBEDDING_DIM is {self.embedding_dim}, but the embeddings of TEACHER {source} have "
            f"{width} dimensions: set EMBEDDING_DIM to {width} or None, or {other}"
        )

    @property
    def embeddings_root(self) -> str:
        """EMBEDDINGS_DIR; for `auto`, the parent of the automatically named folders."""
        return EMBEDDINGS if self.embeddings_dir == AUTO else self.embeddings_dir

    @property
    def extract_options(self) -> dict[str, Any]:
        """Keyword arguments for `ssl_kd.vision.extract.Extraction`."""
        force, rebuild = self.force_recompute, self.rebuild_damaged
        return {"workers": self.workers, "force": force, "rebuild": rebuild}


@dataclass(frozen=True)
class EmbeddingSettings(DataSettings, TeacherSettings):
    """All settings that determine the embeddings: data and teacher."""


@dataclass(frozen=True)
class GraphSettings(Settings):
    """Settings of the neighbor graph and of the number of clusters."""

    pca_dim: int | None = setting(
        256,
        "wider embeddings are reduced to this many principal components by PCA; None: never",
        "The heads then reach the same accuracy in a fraction of the time.",
        low=1,
        section="Neighbors and clusters",
    )
    standardize: bool = setting(
        False,
        "divide each column of the embeddings by its standard deviation, after subtracting its"
        " mean",
        "For tables whose columns have different units; not for embeddings of a network.",
    )
    n_neighbors: int = setting(
        20,
        "nearest neighbors that a sample may be paired with",
        "Fewer for small or many classes: clearly below the number of samples per class.",
        low=1,
    )
    n_clusters: int | Literal["auto"] | None = setting(
        None,
        "number of clusters; None: the number of classes if the data set has labels, else it is"
        " found; auto: it is found",
        low=2,
    )


@dataclass(frozen=True)
class HeadSettings(RunSettings):
    """Settings of the heads and of their training."""

    method: str = setting(
        "consensus",
        "what forms the clusters: consensus (partitions of the neighbor graph vote, and heads that"
        " start from them and learn by LOSS vote as one family more) | heads (these heads vote"
        " alone)",
        choices=("consensus", "heads"),
        only_with={"loss": _LEARNS, **_EVEN},
        section="Heads and their training",
    )
    cluster_sizes: str = setting(
        "even",
        "sizes of the clusters: even (similar) | any (very different, such as species or an album)",
        "With any, partitions vote by those methods that have no preferred size; heads, which"
        " have one, learn the answer but do not vote.",
        choices=("even", "any"),
    )
    n_heads: int = setting(
        16,
        "heads trained side by side",
        "More heads: a steadier answer, proportionally more time.",
        low=1,
        high=4096,
    )
    head: str = setting(
        "ssl_kd.heads.TEMIHead",
        "import path of the head's class, package.module.Class",
        "Your own head goes here, see heads/.",
        forms=(IMPORT_PATH,),
    )
    hidden_dim: int = setting(
        96,
        "width of a head's hidden layer; its bottleneck is half as wide",
        "Wider for high-dimensional embeddings and many classes.",
        low=1,
    )
    loss: str = setting(
        "temi",
        f"what the heads minimize to find clusters: {_OBJECTIVES} | package.module.Class (your"
        " own)",
        choices=tuple(OBJECTIVES),
        forms=(IMPORT_PATH,),
        only_with=_EVEN,
    )
    beta: float = setting(
        0.6,
        "exponent of the pairwise mutual information; 1: the plain objective",
        "Lower: more evenly sized clusters. At 0.5 and below unsure answers score as high as sure"
        " ones, and clusters mix.",
        above=0,
        high=1,
        only_with={"loss": _READS_BETA, **_EVEN},
    )
    student_temp: float = setting(
        0.1,
        "temperature of the students' softmax",
        "Lower: harder assignments.",
        low=0.05,
        high=100,
    )
    teacher_temp: float = setting(
        0.1,
        "temperature of the EMA teachers' softmax",
        "With LOSS sharpened at most STUDENT_TEMP.",
        low=0.04,
        high=100,
    )
    instance_weight: str = setting(
        "none",
        "weight of a pair in the loss: none | own (agreement of the head itself) | mean (of all"
        " heads, as in the paper; couples the heads)",
        choices=("none", "own", "mean"),
        only_with={"loss": _LEARNS, **_EVEN},
    )
    learning_rate: float = setting(
        4e-3,
        "peak learning rate of AdamW",
        "Lower it if the loss curves are jagged.",
        above=0,
        high=100,
    )
    clip_grad: float | None = setting(
        1.0, "largest gradient norm of each head; None: no clipping", above=0
    )
    batch_size: int = setting(256, "pairs per step", "Several times the number of clusters.", low=1)
    epochs: int | None = setting(
        None,
        "passes over the data in each stage of the training; None: until the heads have converged,"
        " at most 200",
        low=1,
    )
    max_steps: int | None = setting(
        None,
        "optimizer steps of each stage of the training; None: no limit but EPOCHS",
        "If both are set, the first to be reached ends the stage.",
        low=1,
    )
    use_fp16: bool = setting(
        False,
        "run the students in half precision where the device is faster with it (GPUs; CPUs with"
        " bf16 products)",
        "Weights and losses stay float32 in any case.",
    )

    @property
    def bottleneck_dim(self) -> int:
        """Width of the bottleneck before the last layer of a head: half of HIDDEN_DIM."""
        return max(1, self.hidden_dim // 2)

    @property
    def sizes(self) -> Literal["even", "any"]:
        """CLUSTER_SIZES, for `ssl_kd.vision.graph`."""
        return "any" if self.cluster_sizes == "any" else "even"

    @property
    def heads_vote(self) -> bool:
        """Whether heads find clusters by LOSS, and vote on the answer."""
        return self.loss != "fixed" and self.sizes == "even"

    @property
    def description(self) -> str:
        """A line that says which method these settings run."""
        if not self.heads_vote:
            why = (
                "LOSS is fixed"
                if self.loss == "fixed"
                else f"CLUSTER_SIZES is {self.cluster_sizes}"
            )
            return f"{why}: partitions of the neighbor graph vote, and the heads learn the answer"
        learn = (
            f"{self.n_heads} heads start from partitions of the neighbor graph and learn by LOSS"
        )
        if self.method == "heads":
            voters = f"{learn}, and the better half of them vote"
        else:
            voters = f"{learn}; the partitions vote, and the better half of the heads with them"
        start = f"METHOD is {self.method}, LOSS {self.loss}"
        return f"{start}: {voters}; all heads then learn the answer"

    def check_together(self) -> None:
        """Raise SettingsError if individually valid settings contradict each other."""
        super().check_together()
        if self.loss in OBJECTIVES:  # a user's objective is imported and checked by the run
            make_objective(self.loss, vars(self))


@dataclass(frozen=True)
class AnswerSettings(RunSettings):
    """Settings of the clustering result and of the files that a run writes."""

    extend: str | None = setting(
        None,
        "finished run that the samples of DATASET are added to: its folder, or its name under"
        " RUNS_DIR; None: train",
        "Teacher and clusters are those of the run; unlike samples form new clusters.",
        section="Answer and run",
    )
    recipe: str | None = setting(None, published.recipe_help(RECIPES), choices=tuple(RECIPES))
    baselines: bool = setting(
        True,
        "run k-means and, where the size allows, spectral clustering on the same embeddings, and"
        " a linear probe where there are labels (which are never used for training)",
    )
    log_every: int = setting(20, "steps between two lines of metrics.jsonl", low=1)
    checkpoint_every: int = setting(
        200,
        "steps between two checkpoints",
        "An interruption loses at most this many steps.",
        low=1,
    )


@dataclass(frozen=True)
class VisionSettings(EmbeddingSettings, GraphSettings, HeadSettings, AnswerSettings):
    """All settings of `train.py`; `config.py` holds the same names in UPPER_CASE."""

    free_on_resume: ClassVar[frozenset[str]] = RunSettings.free_on_resume | {
        "checkpoint_every",
        "data_dir",
        "download",
        "embeddings_dir",
        "force_recompute",
        "log_every",
        "rebuild_damaged",
        "workers",
    }

    chosen_by_run: ClassVar[frozenset[str]] = frozenset({"teacher"})

    recipes: ClassVar[Mapping[str, published.Recipe]] = RECIPES

    aliases: ClassVar[Mapping[str, str]] = ALIASES
    instead: ClassVar[Mapping[str, str]] = INSTEAD

    first: ClassVar[tuple[str, ...]] = tuple(
        "dataset teacher n_clusters n_heads epochs batch_size embeddings_dir force_recompute device"
        " runs_dir run_name resume recipe".split()
    )

    file_heading: ClassVar[str] = """\
The settings of `python train.py`: plain literals, read and never executed.

A flag of the same name beats the value here: `python train.py --n_heads 16` or `--n-heads 16`.
`python train.py --help_all` lists their values; unknown names and invalid values are refused.
"""
