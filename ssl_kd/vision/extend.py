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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ssl_kd import evaluate
from ssl_kd.files.lock import Lock
from ssl_kd.guard.precision import Precision, default_torch_state
from ssl_kd.heads import OWN_HEADS
from ssl_kd.settings import SettingsError
from ssl_kd.settings.early import check_run_name, run_to_extend
from ssl_kd.settings.import_paths import path_of_file
from ssl_kd.teachers import Teacher
from ssl_kd.training.clock import Clock, no_progress
from ssl_kd.training.folder import RunFolder, RunFolderError, check_version, named_by_time
from ssl_kd.training.ranks import refuse_ranks
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
from ssl_kd.vision.run import (
    Progress,
    Run,
    about_data,
    open_samples,
    pictures,
    teacher_of,
)
from ssl_kd.vision.settings import EmbeddingSettings, VisionSettings

logger = logging.getLogger(__name__)

DECIDED = "curation.jsonl"  # the decisions about clusters, which are copied to the extended run
# Settings that an extension does not take from the run.
OWN = {"dataset", "device", "download", "extend", "force_recompute"}
OWN |= {"rebuild_damaged", "resume", "run_name", "runs_dir", "workers"}
# Settings that an extension takes from the run unless they are set by a flag.
OWN_IF_GIVEN = {"data_dir", "embeddings_dir", "labels"}


@dataclass(frozen=True)
class _Parent:
    """Folder, `config.json` and `metrics.json` of the run to extend."""

    path: Path
    config: dict[str, Any]
    metrics: dict[str, Any]

    @classmethod
    def open(cls, extend: str | None, runs_dir: str) -> _Parent:
        """Read the run that EXTEND names: a folder, or the name of a run in RUNS_DIR.

        Raises:
            RunFolderError: the run does not exist, is not finished, or is no clustering run.
        """
        path = run_to_extend(extend or "", runs_dir).resolve()
        config, metrics = read_finished(path, "model.safetensors")
        check_version(path, config, VisionSettings)
        return cls(path, config, metrics)

    @property
    def extensions(self) -> list[dict[str, Any]]:
        """Entries of earlier extensions in `config.json`, in order."""
        return self.config.get("extensions", [])


def inherited(settings: VisionSettings, given: Mapping[str, Any]) -> VisionSettings:
    """Return the settings of an extension: those of the run, except for the data and the output.

    Args:
        settings: the settings of the command.
        given: the settings that were set by flags: name -> value.

    Raises:
        RunFolderError: EXTEND does not name a finished run.
        SettingsError: a flag contradicts a setting of the run.
        InputError: the run uses a head or teacher outside this library, and no flag names it.
    """
    if settings.resume:
        raise SettingsError(
            "RESUME is True, but an extension cannot be resumed: run the same command without "
            "--resume; it reuses the stored embeddings"
        )
    parent = _Parent.open(settings.extend, settings.runs_dir)
    run = VisionSettings.from_dict(parent.config["settings"])
    differ = [
        f"{name.upper()} is {value!r}, expected {getattr(run, name)!r} as in the run"
        for name, value in given.items()
        if name not in OWN | OWN_IF_GIVEN and value != getattr(run, name)
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
        path_of_file(
            value,
            value if getattr(settings, name) == value else None,
            paths,
            what=name,
            file=parent.path / "config.json",
            way=f"--{name} {value}",
        )
    own = OWN | (OWN_IF_GIVEN & given.keys())
    return run.replace(**{name: getattr(settings, name) for name in own})


@default_torch_state()
def extend(settings: VisionSettings, *, progress: Progress = no_progress) -> Run:
    """Add the samples of DATASET to the run that EXTEND names, in a new run folder.

    Args:
        settings: settings of the extension, as `inherited` returns them.
        progress: called with (stage, done, total, {}).

    Raises:
        RunFolderError: the run does not exist, has these samples already, or was trained with other
            weights of the teacher; or the new folder exists.
        SettingsError: the new embeddings and those of the run have different widths.
    """
    refuse_ranks()
    parent, runs = _Parent.open(settings.extend, settings.runs_dir), Path(settings.runs_dir)
    if settings.run_name is not None:
        check_run_name(runs / settings.run_name, resume=False)
    clock, precision = Clock(), Precision.for_device(settings.device, settings.use_fp16)
    model = ClusterModel.from_pretrained(parent.path, head=settings.head)
    with clock("extract"):
        dataset = open_samples(settings)
        teacher = teacher_of(settings, dataset, precision)
        cache = _cache_folder(settings, parent, model, dataset, teacher, precision)
        options = {"precision": precision, "progress": progress} | settings.extract_options
        store = Extraction(dataset, teacher, cache, split="extend", **options).store()

    staging = runs / ".extending"
    staging.mkdir(parents=True, exist_ok=True)
    with Lock(staging / ".lock"):
        for leftover in (p for p in staging.iterdir() if p.is_dir()):  # from a killed extension
            shutil.rmtree(leftover)
        with RunFolder(settings.replace(runs_dir=str(staging))) as folder:
            with clock("offer"):
                progress("offer", 0, 2, {})
                extended = model.extended(store.gather, store.n)
                progress("offer", 1, 2, {"new": extended.n_clusters - model.n_clusters})
                seed, threshold = settings.seed, settings.noise_threshold
                assignments = SplitAssignments(store, extended, seed, threshold)
                progress("offer", 2, 2, {})
            split = f"extend{len(parent.extensions) + 1}"
            added = {
                "run": str(parent.path),
                "dataset": settings.dataset,
                "n": store.n,
                "digest": store.fingerprint.digest,
                "embeddings": str(store.folder),
            }
            folder.write_config(
                VisionSettings.from_dict(parent.config["settings"]),
                learns_from=parent.config["learns_from"],
                precision=str(precision),
                extensions=[*parent.extensions, added],
            )
            save_model(extended, folder)
            write_assignments(folder.path, {split: assignments}, assignments_of(parent.path))
            typical = write_arrays(folder, assignments, extended.n_clusters, settings.seed)
            metrics = _metrics(assignments, model.n_clusters, extended.n_clusters, split, typical)
            metrics["extended"] |= {"run": str(parent.path), "dataset": settings.dataset}
            data = about_data(dataset, {"train": store}, extended.n_clusters)
            data["pictured"] |= has_pictures(parent.metrics)
            metrics |= {"dataset": data, "teacher": parent.metrics["teacher"]}
            if (parent.path / DECIDED).is_file():
                shutil.copyfile(parent.path / DECIDED, folder.path / DECIDED)
            folder.update_json("metrics.json", **metrics, seconds=clock.seconds)
        folder.path = _move(folder.path, runs, settings.run_name)
    folder.become_latest()
    return Run(folder.path, pictures(dataset, store))


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


def _metrics(
    assignments: SplitAssignments, n_old: int, n_clusters: int, split: str, typical: np.ndarray
) -> dict[str, Any]:
    """Return the entries of `metrics.json` about the new samples.

    `typical` `[cluster, 8]` has the rows of typical samples of each cluster, -1 for none.
    """
    store, n_members = assignments.store, len(assignments.members)
    sizes = evaluate.cluster_sizes(assignments.members, n_clusters).tolist()
    new_clusters = []
    for k in range(n_old, n_clusters):
        names = [store.ids[row] for row in typical[k].tolist() if row >= 0]
        new_clusters.append({"cluster": k, "size": sizes[k], "typical": names})
    score = evaluate.clustering_scores(assignments.all_labels, assignments.clusters)
    n_joined = sum(sizes[:n_old])
    note = f"{n_joined} joined, {n_members - n_joined} offered"
    note += f", {store.n - n_members} noise" if store.n > n_members else ""
    return {
        "table": [{"name": "consensus", "split": split, **score, "note": note}],
        "cluster_sizes": sizes,
        "extended": {
            "split": split,
            "n": store.n,
            "joined": n_joined,
            "old_clusters": n_old,
            "new_clusters": new_clusters,
        },
    }
