"""Extraction on the machines of a Ray cluster: each worker is an actor that embeds whole shards.

Ray says where a shard is computed, and again where its worker died; what is computed is saved by
our own writer, so what is whole is known by the cache's manifest and nowhere else.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssl_kd.datasets.text import first_few
from ssl_kd.errors import BAD_INPUT, FAILED, InputError, MissingPackage, UserError
from ssl_kd.training.clock import Progress, no_progress
from ssl_kd.vision.extract_many import Filled, Splits, in_words
from ssl_kd.vision.loading import ExtractionFailed
from ssl_kd.vision.settings import VisionSettings

logger = logging.getLogger(__name__)

# A machine may be taken back, but a shard that kills each worker must end.
ATTEMPTS = 4
DEADLY = f"{ATTEMPTS} workers died of it: too little memory, or a file that crashes them"
Row = dict[str, Any]


class _Worker:
    """Embeds shards on one machine; data and teacher are loaded when the first one comes.

    What fails is returned in words: an exception of another machine may not be known here.

    Args:
        settings: all of them, as plain values.
        shard_rows: samples per shard; None: about 256 MiB.
        folder: where relative paths begin.
        path: where modules are found beside the machine's own: a user's teacher.
    """

    def __init__(self, settings: Row, shard_rows: int | None, folder: str, path: list[str]) -> None:
        self.settings, self.shard_rows, self.folder, self.path = settings, shard_rows, folder, path
        self._splits: Splits | None = None

    def embed(self, split: str, shard: int) -> Row:
        """Embed one shard; `complete` says whether its split is whole by now."""
        try:
            share = self._loaded().share(split, slice(shard, shard + 1))
        except Exception as error:
            return _refusal(error)
        whole = share.manifest is not None
        told = in_words(share.manifest) if share.manifest is not None else ""
        waited = share.waited or ""
        return {"rows": share.rows, "told": told, "complete": whole, "waited": waited, "error": ""}

    def plan(self) -> Row:
        """How many shards each split has, and rows; with FORCE_RECOMPUTE all are anew."""
        try:
            splits = self._loaded()
            found = {split: splits.share(split, slice(0)).n_shards for split in splits.sets}
            rows, folder = sum(map(len, splits.sets.values())), str(splits.folder)
            return {"shards": found, "rows": rows, "folder": folder, "error": ""}
        except Exception as error:
            return _refusal(error)

    def _loaded(self) -> Splits:
        if self._splits is None:
            os.chdir(self.folder)
            sys.path += [place for place in self.path if place not in sys.path]
            self._splits = Splits(VisionSettings.from_dict(self.settings), self.shard_rows)
        return self._splits


def _refusal(error: Exception) -> Row:
    words = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    code = getattr(error, "exit_code", FAILED)
    return {"rows": 0, "told": "", "complete": False, "waited": "", "error": words, "code": code}


def fill_by_ray(
    settings: VisionSettings, *, shard_rows: int | None = None, progress: Progress | None = None
) -> list[Filled]:
    """Fill the caches of all splits on the machines of a Ray cluster.

    The cluster is that of RAY_ADDRESS or of `ray start` on this machine; without one Ray runs here
    alone. Each machine needs this library, the data and EMBEDDINGS_DIR under the same paths. A
    worker takes one GPU, where there are any, and WORKERS cores; WORKERS 0: the cores that a
    machine has for each of its GPUs, or all of a machine without.

    Args:
        settings: all of them.
        shard_rows: samples per shard; None: about 256 MiB.
        progress: called as `progress(stage, done, total, info)` after each shard.

    Raises:
        MissingPackage: Ray is not installed.
        InputError, ExtractionFailed: what a worker says; where only some shards fail, which.
    """
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # of its own affairs
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise MissingPackage(
            f"--engine ray needs Ray ({error}): pip install 'ssl_kd[ray]', or --engine local"
        ) from error
    began = not ray.is_initialized()
    if began:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        return _fill(ray, settings, shard_rows, progress or no_progress)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExtractionFailed(
            f"Ray stopped: {type(error).__name__}: {reason}. Stored shards are kept: run again"
        ) from error
    finally:
        if began:
            ray.shutdown()


def workers_for(
    nodes: Sequence[Mapping[str, float]], device: str, cores: int
) -> tuple[int, int, int]:
    """How many workers a cluster has room for, and what each of them takes.

    Args:
        nodes: of each machine, how many `CPU` and `GPU` it has.
        device: DEVICE; `cpu` uses no GPU, `auto` those that there are.
        cores: of each worker; 0: as many as a machine has for each GPU, or all that it has.

    Returns:
        Workers, cores and GPUs of each.

    Raises:
        InputError: no machine has room for one, or a GPU is asked for and there is none.

    >>> workers_for([{"CPU": 64, "GPU": 4}, {"CPU": 64, "GPU": 4}, {"CPU": 8}], "auto", 0)
    (8, 16, 1)
    """
    with_gpu = [node for node in nodes if node.get("GPU", 0) >= 1]
    if device != "cpu" and with_gpu:
        each = cores or max(1, int(min(node["CPU"] // node["GPU"] for node in with_gpu)))
        room = sum(int(min(node["GPU"], node["CPU"] // each)) for node in with_gpu)
    elif device not in ("auto", "cpu"):
        raise InputError(
            f"DEVICE is {device!r}, but no machine of the Ray cluster has a GPU (it has "
            f"{[dict(node) for node in nodes]}): --device cpu"
        )
    else:
        able = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
        each = cores or min(able, default=1)
        room = sum(cpus // each for cpus in able)
    if not room:
        raise InputError(
            f"WORKERS is {cores}, but no machine of the Ray cluster has {each} cores (it has "
            f"{[dict(node) for node in nodes]}): lower WORKERS"
        )
    return room, each, int(device != "cpu" and bool(with_gpu))


def _fill(
    ray: Any, settings: VisionSettings, shard_rows: int | None, progress: Progress
) -> list[Filled]:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room, cores, gpus = workers_for(nodes, settings.device, settings.workers)
    plain = settings.replace(device="cuda" if gpus else "cpu", workers=cores).to_dict()
    given = shard_rows, os.getcwd(), [os.path.abspath(place) for place in sys.path]
    worker = ray.remote(_Worker).options(
        num_cpus=cores, num_gpus=gpus, max_restarts=-1, max_task_retries=ATTEMPTS - 1
    )
    if gpus:  # a worker's GPU decides the dtype, and with it how many rows make a shard
        planner = worker.remote(plain, *given)
        plan = ray.get(planner.plan.remote())
        ray.kill(planner)
    else:
        plan = _Worker(plain, *given).plan()
    if plan["error"]:
        raise _error(plan)
    plain |= {"EMBEDDINGS_DIR": plan["folder"], "FORCE_RECOMPUTE": False}  # begun by now
    tasks = deque((s, shard) for s, count in plan["shards"].items() for shard in range(count))
    n, size = len(tasks), min(room, len(tasks))
    logger.info("%d shards, %d workers of %d cores and %d GPUs", n, size, cores, gpus)

    idle, busy = [worker.remote(plain, *given) for _ in range(size)], {}
    rows: list[Row] = []
    start, images = time.perf_counter(), 0
    while tasks or busy:
        while tasks and idle:
            task, actor = tasks.popleft(), idle.pop()
            busy[actor.embed.remote(*task)] = task, actor
        (done,), _ = ray.wait(list(busy))
        (split, shard), actor = busy.pop(done)
        idle.append(actor)
        try:
            row = ray.get(done)
        except ray.exceptions.RayActorError:
            row = _refusal(ExtractionFailed(DEADLY))
        rows.append({"split": split, "shard": shard, **row})
        images += row["rows"]
        rate = images / (time.perf_counter() - start)
        progress("extract", images, plan["rows"], {"images/s": rate, "shards": f"{len(rows)}/{n}"})
    return _result(Path(plan["folder"]), rows)


def _result(folder: Path, rows: list[Row]) -> list[Filled]:
    """What is there now; the shards that failed are an error that names them.

    Args:
        folder: of the caches.
        rows: what came of each shard.
    """
    for row in [row for row in rows if row["waited"]][:1]:
        logger.info("shard %d of %s: %s", row["shard"], row["split"], row["waited"])
    failed = [row for row in rows if row["error"]]
    if failed:
        if len(failed) == len(rows) and len({row["error"] for row in failed}) == 1:
            raise _error(failed[0])
        failed.sort(key=lambda row: (row["split"] != "train", row["shard"]))
        named = [f"shard {row['shard']} of {row['split']}: {row['error']}" for row in failed]
        words = f"{len(failed)} of {len(rows)} shards failed, all others are stored: "
        raise _error({"error": words + "; ".join(first_few(named, 3)), "code": failed[0]["code"]})
    told = {row["split"]: row["told"] for row in rows if row["complete"]}
    splits = list(dict.fromkeys(row["split"] for row in rows))
    if lacking := [split for split in sorted(splits, reverse=True) if split not in told]:
        raise ExtractionFailed(
            f"{' and '.join(lacking)} not whole: each shard was stored, but a file was removed or "
            "changed before the last one was. Stored shards are kept: run again"
        )
    splits.sort(key=lambda split: split != "train")
    return [Filled(folder / f"embeddings_{split}.json", told[split], True) for split in splits]


def _error(row: Row) -> UserError:
    return (InputError if row["code"] == BAD_INPUT else ExtractionFailed)(row["error"])
