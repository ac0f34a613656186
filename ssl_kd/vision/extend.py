"""More samples for a finished run: they join its clusters, and what is new is offered as new ones.

The run itself is only read. A new run folder is made under a hidden name and moved to its place
when it is whole, so that a kill at any moment leaves no half of one; the embeddings are kept, and
the same command goes on with them.
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
from ssl_kd.store import EmbeddingStore
from ssl_kd.teachers import Teacher
from ssl_kd.training.clock import Clock, no_progress
from ssl_kd.training.folder import RunFolder, RunFolderError, check_version, named_by_time
from ssl_kd.training.ranks import refuse_ranks
from ssl_kd.vision.assignments import Assignments, append_assignments, assignments_of, read_finished
from ssl_kd.vision.extract import fingerprint
from ssl_kd.vision.model import ClusterModel, has_pictures
from ssl_kd.vision.pipeline import save_model
from ssl_kd.vision.results import write_arrays
from ssl_kd.vision.run import (
    Dataset,
    Progress,
    Run,
    about_data,
    embedded,
    open_samples,
    pictures,
    teacher_of,
)
from ssl_kd.vision.settings import AnswerSettings, EmbeddingSettings, VisionSettings

logger = logging.getLogger(__name__)

# What people decided and called the clusters: it holds in the extended run, too.
DECIDED = ("curation.jsonl", "names.json")
# What an extension may be told; all else is the run's.
OWN = {"dataset", "device", "download", "extend", "force_recompute"}
OWN |= {"rebuild_damaged", "resume", "run_name", "runs_dir", "workers"}
# These too, but those of the run where they are not given.
OWN_IF_GIVEN = {"data_dir", "embeddings_dir", "labels"}


@dataclass(frozen=True)
class _Parent:
    """A finished run, as its files describe it."""

    path: Path
    config: dict[str, Any]
    metrics: dict[str, Any]

    @classmethod
    def of(cls, settings: AnswerSettings) -> _Parent:
        """The run that EXTEND names: a folder, or a name under RUNS_DIR.

        Raises:
            RunFolderError: there is none, it is not finished, or not of this mode.
        """
        found = run_to_extend(settings.extend or "", settings.runs_dir)
        config, metrics = read_finished(path := found.resolve(), "model.safetensors")
        check_version(path, config, VisionSettings)
        return cls(path, config, metrics)

    @property
    def known(self) -> list[str]:
        """Fingerprints of all the samples that are in it."""
        return [self.config["learns_from"], *(e["digest"] for e in self.extensions)]

    @property
    def extensions(self) -> list[dict[str, Any]]:
        """What was added before, in order."""
        return self.config.get("extensions", [])


def inherited(settings: VisionSettings, given: Mapping[str, Any]) -> VisionSettings:
    """The settings of the run that EXTEND names, and those that an extension has of its own.

    Args:
        settings: as file and flags say.
        given: those that were given for this command, by flag.

    Raises:
        RunFolderError: there is no finished run of that name.
        SettingsError: one that was given contradicts the run.
        InputError: the run has a head or teacher of somebody's own, which only its user may name.
    """
    if settings.resume:
        raise SettingsError(
            "RESUME is True, but an extension that was stopped begins anew, from the embeddings "
            "that it has: give the same command without --resume"
        )
    parent = _Parent.of(settings)
    run = VisionSettings.from_dict(parent.config["settings"])
    differ = [
        f"{name.upper()} is {value!r} here and {getattr(run, name)!r} there"
        for name, value in given.items()
        if name not in OWN | OWN_IF_GIVEN and value != getattr(run, name)
    ]
    if differ:
        raise SettingsError(
            f"{parent.path} is extended as it was trained: {'; '.join(differ)}. Leave the flag "
            "out, or train anew on all samples"
        )
    own_teacher = "." in run.teacher and ":" not in run.teacher
    for name, allowed in (("head", OWN_HEADS), ("teacher", () if own_teacher else [run.teacher])):
        value = getattr(run, name)
        path_of_file(
            value,
            value if getattr(settings, name) == value else None,
            allowed,
            what=name,
            file=parent.path / "config.json",
            way=f"--{name} {value}",
        )
    own = OWN | (OWN_IF_GIVEN & given.keys())
    return run.replace(**{name: getattr(settings, name) for name in own})


@default_torch_state()
def extend(settings: VisionSettings, *, progress: Progress | None = None) -> Run:
    """Add the samples of DATASET to the run that EXTEND names, in a run folder of their own.

    Args:
        settings: those that `inherited` gave.
        progress: called as `progress(stage, done, total, info)`.

    Raises:
        RunFolderError: no such run, one with these samples or another teacher's weights, or the
            folder's name is taken.
        SettingsError: the embeddings have another width than the run's.
    """
    refuse_ranks()
    tell = progress or no_progress
    parent, runs = _Parent.of(settings), Path(settings.runs_dir)
    if settings.run_name is not None:
        check_run_name(runs / settings.run_name, resume=False)
    clock, precision = Clock(), Precision.for_device(settings.device, settings.use_fp16)
    model = ClusterModel.from_pretrained(parent.path, head=settings.head)
    with clock("extract"):
        dataset, store, teacher = _embedded(settings, parent, model, precision, tell)

    staging = runs / ".extending"
    staging.mkdir(parents=True, exist_ok=True)
    with Lock(staging / ".lock"):
        for left in (p for p in staging.iterdir() if p.is_dir()):  # of a kill
            shutil.rmtree(left)
        with RunFolder(settings.replace(runs_dir=str(staging))) as folder:
            with clock("offer"):
                tell("offer", 0, 2, {})
                grown = model.extended(store.gather, store.n)
                tell("offer", 1, 2, {"new": grown.n_clusters - model.n_clusters})
                found = Assignments(store, settings, grown)
                tell("offer", 2, 2, {})
            split = f"extend{len(parent.extensions) + 1}"
            _write_config(folder, settings.dataset, parent, store, precision)
            save_model(grown, folder)
            append_assignments(folder.path, assignments_of(parent.path), found, split)
            typical = write_arrays(folder, found, grown.n_clusters, settings.seed)
            metrics = _judge(found, model, grown, split, typical) | {
                "dataset": about_data(dataset, {"train": store}, grown.n_clusters),
                "teacher": parent.metrics["teacher"],
                "seconds": clock.seconds,
            }
            for name in DECIDED:
                if (parent.path / name).is_file():
                    shutil.copyfile(parent.path / name, folder.path / name)
            if has_pictures(parent.metrics):
                metrics["dataset"]["pictured"] = True
            metrics["extended"] |= {"run": str(parent.path), "dataset": settings.dataset}
            folder.update_json("metrics.json", **metrics)
        folder.path = _moved(folder.path, runs, settings.run_name)
    folder.become_latest()
    return Run(folder.path, pictures(dataset, store))


def _moved(path: Path, runs: Path, name: str | None) -> Path:
    """Move the finished folder to its place, which it returns."""
    place = named_by_time(runs) if name is None else runs / name
    check_run_name(place, resume=False)
    if (lock := place / ".lock").exists():  # of a run that was killed before it wrote anything
        with Lock(lock):
            lock.unlink()
    (path / ".lock").unlink(missing_ok=True)
    os.rename(path, place)
    return place


def _embedded(
    settings: EmbeddingSettings,
    parent: _Parent,
    model: ClusterModel,
    precision: Precision,
    tell: Progress,
) -> tuple[Dataset, EmbeddingStore, Teacher]:
    """The new samples through the run's teacher, in a cache named after what they are."""
    dataset = open_samples(settings)
    teacher = teacher_of(settings, dataset, precision)
    width, weights = model.options["in_dim"], parent.metrics["teacher"]["weights"]
    if teacher.dim != width:
        raise SettingsError(
            f"{settings.dataset} has embeddings of {teacher.dim} dimensions by the teacher "
            f"{teacher.name}, but {parent.path} learnt from {width}: give samples of the same kind "
            "(for pixels: images of the same size, and both from a folder or both by name)"
        )
    if weights != teacher.weights_id:
        raise RunFolderError(
            f"the teacher {teacher.name} has other weights ({teacher.weights_id[:12]}) than when "
            f"{parent.path} was trained ({weights[:12]}): put those back, --teacher_weights FILE"
        )
    found = fingerprint(dataset, teacher, precision)
    if found.digest in parent.known:
        raise RunFolderError(
            f"{settings.dataset} holds the same samples as {parent.path}: name new ones by "
            "--dataset"
        )
    folder = Path(settings.embeddings_root) / f"extend-{found.digest[:12]}"
    logger.info("the embeddings of %s are kept in %s", settings.dataset, folder)
    store = embedded(settings, dataset, teacher, folder, "extend", precision, tell)
    return dataset, store, teacher


def _write_config(
    folder: RunFolder, dataset: str, parent: _Parent, store: EmbeddingStore, precision: Precision
) -> None:
    """`config.json`: the run's settings, and what was added to it."""
    added = {
        "run": str(parent.path),
        "dataset": dataset,
        "n": store.n,
        "digest": store.fingerprint.digest,
        "embeddings": str(store.folder),
    }
    run = VisionSettings.from_dict(parent.config["settings"])
    kept = {"learns_from": parent.config["learns_from"], "precision": str(precision)}
    folder.write_config(run, **kept, extensions=[*parent.extensions, added])


def _judge(
    found: Assignments, old: ClusterModel, new: ClusterModel, split: str, typical: np.ndarray
) -> dict[str, Any]:
    """What `metrics.json` says of the new samples; their labels are read here for the first time.

    Args:
        found: where each new sample is.
        old: the run's model.
        new: the extended one.
        split: what the new samples are called.
        typical: `[cluster, 8]`, rows of the samples that are typical of each, -1 for none.
    """
    sizes = evaluate.cluster_sizes(found.members, new.n_clusters).tolist()
    offered = []
    for k in range(old.n_clusters, new.n_clusters):
        names = [found.store.ids[row] for row in typical[k].tolist() if row >= 0]
        offered.append({"cluster": k, "size": sizes[k], "typical": names})
    score = evaluate.clustering_scores(found.all_labels, found.clusters)
    joined = sum(sizes[: old.n_clusters])
    noise = found.store.n - len(found.members)
    note = f"{joined} joined, {len(found.members) - joined} offered"
    note += f", {noise} noise" if noise else ""
    return {
        "table": [{"name": "consensus", "split": split, **score, "note": note}],
        "cluster_sizes": sizes,
        "extended": {
            "split": split,
            "n": found.store.n,
            "joined": joined,
            "old_clusters": old.n_clusters,
            "new_clusters": offered,
        },
    }
