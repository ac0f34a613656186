"""Add samples to a finished run: assign them to its clusters, or to new ones.

The original run is not modified. The extended run is written to a temporary folder, which is moved
into place when it is complete. After an interruption, the same command starts again and reuses the
stored embeddings.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssl_kd.core.errors import printable
from ssl_kd.core.files.lock import Lock
from ssl_kd.core.images.levels import Levels
from ssl_kd.core.precision import Precision, default_torch_state
from ssl_kd.core.runs.clock import Clock, no_progress
from ssl_kd.core.runs.folder import RunFolder, RunFolderError, check_version, named_by_time
from ssl_kd.core.runs.ranks import refuse_ranks
from ssl_kd.core.runs.writer import become_latest
from ssl_kd.core.settings import SettingsError
from ssl_kd.core.settings.early import check_run_name, run_to_extend
from ssl_kd.core.settings.import_paths import path_of_file
from ssl_kd.vision import evaluate
from ssl_kd.vision.assignments import (
    SplitAssignments,
    assignments_of,
    read_finished,
    write_assignments,
)
from ssl_kd.vision.extract import Dataset, Extraction, fingerprint
from ssl_kd.vision.model import ClusterModel, has_pictures
from ssl_kd.vision.pipeline import save_model
from ssl_kd.vision.results import write_arrays
from ssl_kd.vision.run import Progress, about_data, open_samples, teacher_of
from ssl_kd.vision.settings import EmbeddingSettings, VisionSettings
from ssl_kd.vision.sources import (
    SOURCES,
    Source,
    describe_source,
    read_sources,
    write_sources,
)
from ssl_kd.vision.teachers import Teacher
from ssl_kd.vision.train.heads import OWN_HEADS

logger = logging.getLogger(__name__)

DECIDED = "curation.jsonl"  # the decisions about clusters, which are copied to the extended run
# Settings that an extension does not take from the run.
OWN = {"dataset", "device", "download", "extend", "force_recompute"}
OWN |= {"rebuild_damaged", "resume", "run_name", "runs_dir", "workers"}
# Settings that an extension takes from the run unless they are set by a flag.
OWN_IF_GIVEN = {"data_dir", "embeddings_dir", "label_column", "labels"}


class _Parent:
    """The run to extend: its folder, `config.json` and `metrics.json`."""

    def __init__(self, settings: VisionSettings) -> None:
        self.path = run_to_extend(settings.extend or "", settings.runs_dir).resolve()
        self.config, self.metrics = read_finished(self.path, "model.safetensors")
        check_version(self.path, self.config, VisionSettings)
        self.extensions: list[dict[str, Any]] = self.config.get("extensions", [])


def inherited(settings: VisionSettings, given: Mapping[str, Any]) -> VisionSettings:
    """Return the settings of an extension: those of the run, except for the data and the output.

    `given` are the settings that were set by flags; none may contradict the run. A head or teacher
    outside this library must be among them.
    """
    if settings.resume:
        raise SettingsError(
            "RESUME is True, but an extension cannot be resumed: run the same command without "
            "--resume; it reuses the stored embeddings"
        )
    parent = _Parent(settings)
    run = VisionSettings.from_dict(parent.config["settings"])
    differ = [
        f"{name.upper()} is {value!r}, expected {getattr(run, name)!r} as in the run"
        for name, value in given.items()
        if name not in OWN | OWN_IF_GIVEN and not settings.agrees(name, getattr(run, name))
    ]
    if differ:
        raise SettingsError(
            f"an extension of {parent.path} uses the settings of that run: {'; '.join(differ)}. "
            "Omit the flag, or train a new run on all samples"
        )
    is_user_teacher = "." in run.teacher and ":" not in run.teacher
    allowed = {"head": OWN_HEADS, "teacher": () if is_user_teacher else [run.teacher]}
    for name, paths in allowed.items():
        value = getattr(run, name)
        trusted = value if getattr(settings, name) == value else None
        file, way = parent.path / "config.json", f"--{name} {value}"
        path_of_file(value, trusted, paths, what=name, file=file, way=way)
    own = OWN | (OWN_IF_GIVEN & given.keys())
    return run.replace(**{name: getattr(settings, name) for name in own})


@default_torch_state()
def extend(settings: VisionSettings, *, progress: Progress = no_progress) -> Path:
    """Add the samples of DATASET to the run that EXTEND names; return the folder of a new run.

    `settings` are those that `inherited` returns.
    """
    refuse_ranks()
    parent, runs = _Parent(settings), Path(settings.runs_dir)
    if settings.run_name is not None:
        check_run_name(runs / settings.run_name, resume=False)
    clock, precision = Clock(), Precision.for_device(settings.device, settings.use_fp16)
    model = ClusterModel.from_pretrained(parent.path, head=settings.head)
    with clock("extract"):
        levels = Levels.from_dict(parent.metrics["dataset"].get("levels"))
        dataset = open_samples(settings, levels)
        teacher = teacher_of(settings, dataset, precision)
        cache = _cache_folder(settings, parent, model, dataset, teacher, precision)
        options = {"precision": precision, "progress": progress} | settings.extract_options
        store = Extraction(dataset, teacher, cache, split="extend", **options).store()

    source = describe_source(dataset, store)
    _check_new(parent, settings.dataset, source)
    added = {
        "run": str(parent.path),
        "dataset": settings.dataset,
        "started_in": os.getcwd(),
        "n": store.n,
        "digest": store.fingerprint.digest,
        "embeddings": str(store.folder),
    }
    staging = runs / ".extending"
    staging.mkdir(parents=True, exist_ok=True)
    with Lock(staging / ".lock"):
        for leftover in (p for p in staging.iterdir() if p.is_dir()):  # from a killed extension
            shutil.rmtree(leftover)
        with RunFolder.open(settings.replace(runs_dir=str(staging))) as folder:
            with clock("offer"):
                progress("offer", 0, 2, {})
                extended = model.extended(store.gather, store.n)
                progress("offer", 1, 2, {"new": extended.n_clusters - model.n_clusters})
                assignments = SplitAssignments(store, extended, settings.seed)
                progress("offer", 2, 2, {})
            folder.write_config(
                VisionSettings.from_dict(parent.config["settings"]),
                learns_from=parent.config["learns_from"],
                precision=str(precision),
                extensions=[*parent.extensions, added],
                started_in=parent.config.get("started_in"),
            )
            save_model(extended, folder)
            before = parent.path / SOURCES
            split = f"extend{len(parent.extensions) + 1}"
            write_sources(folder.path, {split: source}, before)
            metrics = _write_results(folder, parent, model, extended, assignments)
            metrics["extended"] |= {name: added[name] for name in ("run", "dataset")}
            data = about_data({"train": dataset}, {"train": store}, extended.n_clusters)
            data["pictured"] |= has_pictures(parent.metrics)
            metrics |= {"dataset": data, "teacher": parent.metrics["teacher"]}
            if (parent.path / DECIDED).is_file():
                shutil.copyfile(parent.path / DECIDED, folder.path / DECIDED)
            folder.writer.update_json("metrics.json", **metrics, seconds=clock.seconds)
        path = _move(folder.path, runs, settings.run_name)
    become_latest(path)
    return path


def _check_new(parent: _Parent, name: str, new: Source) -> None:
    """Refuse samples that are all in the run already, and warn of some, by their content."""
    sources = read_sources(parent.path).values()
    known = {content for source in sources for content in source.identities} - {None}
    n, n_known = len(new.rows), sum(content in known for content in new.identities)
    if n_known == n:
        raise RunFolderError(
            f"all {n:,} samples of {name} are in {parent.path} already: pass new samples "
            "with --dataset"
        )
    if n_known:
        message = "%s of %s samples of %s are in %s already, and are added again"
        logger.warning(message, f"{n_known:,}", f"{n:,}", printable(name), parent.path)


def _move(path: Path, runs: Path, name: str | None) -> Path:
    """Move the complete run folder to its final path, and return that path."""
    place = named_by_time(runs) if name is None else runs / name
    check_run_name(place, resume=False)
    if (lock := place / ".lock").exists():  # from a run that was killed before it wrote anything
        with Lock(lock):
            lock.unlink()
    (path / ".lock").unlink(missing_ok=True)
    os.rename(path, place)
    return place


def _cache_folder(
    embedding: EmbeddingSettings,
    parent: _Parent,
    model: ClusterModel,
    dataset: Dataset,
    teacher: Teacher,
    precision: Precision,
) -> Path:
    """Return the folder for the new embeddings, after a check that they fit the run."""
    width, weights = model.options["in_dim"], parent.metrics["teacher"]["weights"]
    if teacher.dim != width:
        raise SettingsError(
            f"the embeddings of {embedding.dataset} by the teacher {teacher.name} have "
            f"{teacher.dim} dimensions; {parent.path} expects {width}: use samples of the same "
            "kind (for the teacher pixels: images of the same size)"
        )
    if weights != teacher.weights_id:
        raise RunFolderError(
            f"the teacher {teacher.name} has the weights {teacher.weights_id[:12]}, but "
            f"{parent.path} was trained with other weights ({weights[:12]}): pass the "
            "file of those weights with --teacher_weights"
        )
    digest = fingerprint(dataset, teacher, precision).digest
    if digest in (parent.config["learns_from"], *(e["digest"] for e in parent.extensions)):
        raise RunFolderError(
            f"{embedding.dataset} holds the same samples as {parent.path}: pass new samples "
            "with --dataset"
        )
    folder = Path(embedding.embeddings_root) / f"extend-{digest[:12]}"
    logger.info("the embeddings of %s are stored in %s", embedding.dataset, folder)
    return folder


def _write_results(
    folder: RunFolder,
    parent: _Parent,
    old: ClusterModel,
    extended: ClusterModel,
    assignments: SplitAssignments,
) -> dict[str, Any]:
    """Write assignments and arrays; return the entries of `metrics.json` about the new samples."""
    split, n_clusters = f"extend{len(parent.extensions) + 1}", extended.n_clusters
    write_assignments(folder.path, {split: assignments}, assignments_of(parent.path))
    store, typical = assignments.store, write_arrays(folder, assignments, n_clusters)
    sizes = evaluate.cluster_sizes(assignments.clusters, n_clusters).tolist()
    new_clusters = []
    for k in range(old.n_clusters, n_clusters):
        names = [store.ids[row] for row in typical[k].tolist() if row >= 0]
        new_clusters.append({"cluster": k, "size": sizes[k], "typical": names})
    score = evaluate.clustering_scores(assignments.all_labels, assignments.clusters)
    n_joined = sum(sizes[: old.n_clusters])
    note = f"{n_joined} joined, {store.n - n_joined} offered"
    return {
        "table": [{"name": "consensus", "split": split, **score, "note": note}],
        "cluster_sizes": sizes,
        "extended": {
            "split": split,
            "n": store.n,
            "joined": n_joined,
            "new_clusters": new_clusters,
        },
    }
