"""The settings of the vision mode: each field's type, range and meaning, in this one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ssl_kd.settings import RunSettings, SettingsError, setting

__all__ = ["SettingsError", "VisionSettings"]


@dataclass(frozen=True)
class VisionSettings(RunSettings):
    """Every setting of `train.py`; `config.py` holds the same names in UPPER_CASE."""

    free_on_resume: ClassVar[frozenset[str]] = RunSettings.free_on_resume | {
        "checkpoint_every",
        "data_dir",
        "download",
        "embeddings_dir",
        "extract_batch_size",
        "force_recompute",
        "log_every",
        "tensorboard",
        "workers",
    }

    # Data and folders
    dataset: str = setting(
        "digits",
        "digits, cifar10, cifar100, stl10, fashion_mnist, imagenet, a folder of images, or a file"
        " of features (.npy .npz .pt .safetensors .parquet)",
    )
    dataset_test: str | None = setting(
        None,
        "held-out folder or file of features; None: the data set's own test split, if it has one",
    )
    data_dir: str = setting("data", "folder of data sets")
    embeddings_dir: str = setting("data/embeddings", "folder of the teacher's cached embeddings")
    download: bool = setting(False, "download the data set where it is missing")

    # Teacher and extraction
    teacher: str = setting(
        "pixels",
        "frozen model that embeds the images; features: they are embeddings already",
        choices=("pixels", "features", "dinov2", "efficientnet_lite0"),
        forms=(("timm:NAME", "timm:.+"), ("torchvision:NAME", "torchvision:.+")),
    )
    dinov2_model: str = setting(
        "dinov2_vits14",
        "which DINOv2, where the teacher is dinov2",
        choices=tuple(f"dinov2_vit{size}14{reg}" for reg in ("", "_reg") for size in "sblg"),
    )
    teacher_source: str = setting(
        "auto",
        "where DINOv2 comes from; auto: torch.hub, then timm",
        choices=("auto", "hub", "timm", "local"),
    )
    teacher_weights: str | None = setting(
        None, "local file of the teacher's weights; None: its published ones"
    )
    image_size: int | None = setting(
        None,
        "side of the teacher's input in pixels; None: the model's own (DINOv2: 224)",
        low=1,
        high=4096,
    )
    token: str = setting(
        "class",
        "what a vision transformer hands over: class token, mean patch token, or both in a row",
        choices=("class", "patch", "both"),
    )
    embedding_dim: int | None = setting(
        None, "width the embeddings must have; None: the teacher's own", low=1
    )
    extract_batch_size: int = setting(
        64, "images per forward pass of the teacher; halved when memory runs out", low=1
    )
    workers: int = setting(
        0, "threads that decode images; 0: as many as fit the device", low=0, high=256
    )

    # Neighbours and heads
    pca_dim: int | None = setting(
        256, "rotate wider embeddings to this many principal components; None: never", low=1
    )
    neighbours: int = setting(20, "nearest neighbours that a sample may be paired with", low=1)
    mutual_neighbours: bool = setting(True, "pair only samples that are each other's neighbours")
    n_clusters: int | None = setting(
        None, "clusters; None: as many as the data set declares classes", low=2
    )
    n_heads: int = setting(48, "heads trained side by side", low=1, high=4096)
    head: str = setting(
        "ssl_kd.heads.TEMIHead", "import path of the head's class, package.module.Class"
    )
    hidden_dim: int = setting(96, "width of a head's hidden layer", low=1)
    bottleneck_dim: int = setting(48, "width before a head's last layer", low=1)

    # Loss
    loss: str = setting("temi", "what the heads minimise", choices=("temi", "sharpened"))
    beta: float = setting(
        0.6, "exponent of the pairwise mutual information; 1: plain", above=0, high=1
    )
    student_temp: float = setting(0.1, "temperature of the students' softmax", low=0.05, high=100)
    teacher_temp: float = setting(
        0.1, "temperature of the EMA teachers' softmax", low=0.04, high=100
    )
    instance_weight: str = setting(
        "none",
        "weight of a pair: none, the head's own agreement, or the mean agreement of all heads",
        choices=("none", "own", "mean"),
    )
    centering: str = setting(
        "center", "what keeps the sharpened loss from collapse", choices=("center", "sinkhorn")
    )
    marginal_momentum: float = setting(
        0.9, "momentum of the running marginal of the clusters", low=0, below=1
    )
    ema_momentum: float = setting(0.9, "momentum of the EMA teachers' weights", low=0, below=1)

    # Optimisation
    learning_rate: float = setting(4e-3, "peak learning rate of AdamW", above=0, high=100)
    warmup_fraction: float = setting(
        0.1, "share of the steps that warm up; the cosine follows", low=0, below=1
    )
    weight_decay: float = setting(1e-4, "decoupled weight decay of AdamW", low=0, high=10)
    clip_grad: float | None = setting(
        1.0, "largest gradient norm of a head; None: no clipping", above=0
    )
    batch_size: int = setting(256, "pairs per step", low=1)
    epochs: int = setting(200, "most passes over the data", low=1)
    max_steps: int = setting(800, "most steps; whichever of the two ends first", low=1)
    consensus_heads: int | None = setting(
        None, "heads that vote on the answer, the best ones; None: the better half", low=1
    )

    # Guard
    spike_factor: float = setting(
        100.0, "a head whose gradient norm is this many times its median is skipped", above=1
    )
    dead_after: int = setting(
        100, "steps of exactly zero gradient before a head is reported as dead", low=1
    )
    restore_after: int = setting(
        10,
        "bad steps in a row before a head goes back to its last good state; as many again before it"
        " is re-initialised, and again before it is retired",
        low=1,
    )
    min_heads: int | None = setting(
        None, "fewer heads than this left stop the run; None: a quarter of them", low=1
    )

    # Run
    log_every: int = setting(20, "steps between two lines of metrics.jsonl", low=1)
    checkpoint_every: int = setting(200, "steps between two checkpoints", low=1)
    keep_in_memory_gib: float = setting(
        2.0, "embeddings up to this many GiB live in memory, larger ones stay on disk", low=0
    )
    use_fp16: bool = setting(
        False, "run the students in half precision where the device gains by it"
    )
    device: str = setting(
        "auto",
        "where to compute; auto: a GPU if there is one",
        choices=("auto", "cpu", "cuda", "mps"),
        forms=(("cuda:N", r"cuda:\d+"),),
    )
    seed: int = setting(0, "seed of everything random", low=0, high=2**32 - 1)
    force_recompute: bool = setting(
        False,
        "rebuild cached embeddings that are damaged or of something else; verified shards are kept",
    )
    tensorboard: bool = setting(True, "write TensorBoard files into the run folder")
    probe: bool = setting(True, "judge the embeddings by a linear probe")
    baselines: bool = setting(True, "run k-means and spectral clustering beside")

    def check_together(self) -> None:
        """Raise SettingsError where settings that are fine alone do not fit together."""
        super().check_together()
        if self.loss == "sharpened" and self.teacher_temp > self.student_temp:
            raise SettingsError(
                f"TEACHER_TEMP is {self.teacher_temp:g} and STUDENT_TEMP {self.student_temp:g}, but"
                " with LOSS 'sharpened' the teacher's must not be the higher one."
            )
        if not all(part.isidentifier() for part in self.head.split(".")) or "." not in self.head:
            raise SettingsError(
                f"HEAD is {self.head!r}, but must be an import path such as 'heads.my_head.MyHead'."
            )
