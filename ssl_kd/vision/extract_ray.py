"""Fill the embedding caches on a Ray cluster, one task per shard.

Ray chooses the machine that computes a shard, and repeats the task if its worker dies. Only the
manifest of the cache records which shards are complete.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssl_kd.core.errors import BAD_INPUT, FAILED, InputError, MissingPackage, UserError, first_few
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.clock import Progress, no_progress
from ssl_kd.vision.extract import Extraction, ExtractionFailed, summary_of
from ssl_kd.vision.run import open_extractions
from ssl_kd.vision.settings import VisionSettings

logger = logging.getLogger(__name__)

# Machines may disappear, but a shard that kills every worker must not be repeated forever.
ATTEMPTS = 4
Row = dict[str, Any]


@functools.lru_cache(maxsize=1)
def _job(
    values: str, shard_rows: int | None, folder: str, path: tuple[str, ...]
) -> dict[str, Extraction]:
    """Open the data and the teacher for settings in JSON, once in each worker process.

    Relative paths are resolved in `folder`; a user's teacher is imported from the places in `path`.
    """
    os.chdir(folder)
    sys.path += [place for place in path if place not in sys.path]
    settings = VisionSettings.from_dict(json.loads(values))
    precision = Precision.for_device(settings.device, settings.use_fp16)
    return open_extractions(settings, precision, shard_rows=shard_rows)


def _embed(split: str, shard: int, *job: Any) -> Row:
    """Embed one shard; the result has a `summary` if the whole split is now stored.

    Errors are returned as text, because the driver may lack the exception's class.
    """
    try:
        share = _job(*job)[split].share(slice(shard, shard + 1))
    except Exception as error:
        return _failure(error)
    summary = None if share.manifest is None else summary_of(share.manifest)
    return {"rows": share.rows, "summary": summary, "error": ""}


def _plan(*job: Any) -> Row:
    """Count the shards of each split and all rows; with FORCE_RECOMPUTE start a new cache."""
    try:
        extractions = _job(*job)
        shards = {split: e.share(slice(0)).n_shards for split, e in extractions.items()}
        rows = sum(len(e.dataset) for e in extractions.values())
        folder = str(extractions["train"].folder)
        return {"shards": shards, "rows": rows, "folder": folder, "error": ""}
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> Row:
    message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    code = getattr(error, "exit_code", FAILED)
    return {"rows": 0, "summary": None, "error": message, "code": code}


def fill_by_ray(
    settings: VisionSettings, *, shard_rows: int | None = None, progress: Progress = no_progress
) -> list[tuple[Path, str]]:
    """Fill the caches of all splits on a Ray cluster; return each manifest's path and a summary.

    Connect to the cluster at RAY_ADDRESS or started by `ray start` on this machine; without one,
    run Ray on this machine alone. Each machine needs this library, the data and EMBEDDINGS_DIR
    under the same paths. A worker takes one GPU, if the cluster has any, and WORKERS cores. With
    WORKERS 0 a worker takes an equal share of the machine's cores for each GPU, or all cores of a
    machine without GPUs.
    """
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Ray's internal messages
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise MissingPackage(
            f"--engine ray needs Ray ({error}): pip install 'ssl_kd[ray]', or --engine local"
        ) from error
    starts_ray = not ray.is_initialized()
    if starts_ray:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cores, gpus = resources_for(nodes, settings.device, settings.workers)
        values = settings.replace(device="cuda" if gpus else "cpu", workers=cores).to_dict()
        path = tuple(os.path.abspath(place) for place in sys.path)
        resources = {"num_cpus": cores, "num_gpus": gpus, "max_retries": ATTEMPTS - 1}
        return _fill(ray, resources, values, (shard_rows, os.getcwd(), path), progress)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExtractionFailed(
            f"Ray stopped: {type(error).__name__}: {reason}. Stored shards are kept: run the same "
            "command again"
        ) from error
    finally:
        if starts_ray:
            ray.shutdown()


def resources_for(nodes: Sequence[Mapping[str, float]], device: str, cores: int) -> tuple[int, int]:
    """Return the numbers of cores and GPUs that each worker takes.

    `nodes` are the `CPU` and `GPU` counts of each machine. With `cores` 0, a worker takes the
    machine's cores divided by its GPUs, or all its cores.

    >>> resources_for([{"CPU": 64, "GPU": 4}, {"CPU": 64, "GPU": 4}, {"CPU": 8}], "auto", 0)
    (16, 1)
    """
    with_gpu = [node for node in nodes if node.get("GPU", 0) >= 1]
    if device not in ("auto", "cpu") and not with_gpu:
        raise InputError(
            f"DEVICE is {device!r}, but no machine of the Ray cluster has a GPU (resources: "
            f"{[dict(node) for node in nodes]}): set --device cpu"
        )
    gpus = int(device != "cpu" and bool(with_gpu))
    usable = with_gpu if gpus else [node for node in nodes if node.get("CPU", 0) >= 1]
    each = [node["CPU"] // (node["GPU"] if gpus else 1) for node in usable]
    cores = cores or max(1, int(min(each, default=1)))
    if not any(node["CPU"] >= cores for node in usable):
        raise InputError(
            f"WORKERS is {cores}, but no machine of the Ray cluster has so many cores (resources: "
            f"{[dict(node) for node in nodes]}): lower WORKERS"
        )
    return cores, gpus


def _fill(
    ray: Any, resources: Row, values: Row, place: tuple[Any, ...], progress: Progress
) -> list[tuple[Path, str]]:
    """Embed all shards; `values` and `place` become the arguments of `_job`."""
    # A worker's GPU decides the dtype, and with it how many rows make a shard.
    plan = ray.get(ray.remote(_plan).options(**resources).remote(json.dumps(values), *place))
    if plan["error"]:
        raise _error(plan)
    # The plan has started the new cache, which the tasks join.
    values |= {"EMBEDDINGS_DIR": plan["folder"], "FORCE_RECOMPUTE": False}
    job, embed = (json.dumps(values), *place), ray.remote(_embed).options(**resources)
    tasks = {
        embed.remote(split, shard, *job): (split, shard)
        for split, count in plan["shards"].items()
        for shard in range(count)
    }
    n, rows, images, start = len(tasks), list[Row](), 0, time.perf_counter()
    logger.info("%d shards; %d cores and %d GPUs per worker", n, *list(resources.values())[:2])
    while tasks:
        (done,), _ = ray.wait(list(tasks))
        split, shard = tasks.pop(done)
        try:
            row = ray.get(done)
        except ray.exceptions.WorkerCrashedError:
            message = f"{ATTEMPTS} workers died of it: out of memory, or a file crashes the decoder"
            row = _failure(ExtractionFailed(message))
        rows.append({"split": split, "shard": shard, **row})
        images += row["rows"]
        rate = images / (time.perf_counter() - start)
        progress("extract", images, plan["rows"], {"images/s": rate, "shards": f"{len(rows)}/{n}"})
    return _result(Path(plan["folder"]), rows)


def _result(folder: Path, rows: list[Row]) -> list[tuple[Path, str]]:
    """Return the caches in `folder`, or raise an error that names the shards that failed."""
    if failed := [row for row in rows if row["error"]]:
        if len(failed) == len(rows) and len({row["error"] for row in failed}) == 1:
            raise _error(failed[0])
        failed.sort(key=lambda row: (row["split"] != "train", row["shard"]))
        named = [f"shard {row['shard']} of {row['split']}: {row['error']}" for row in failed]
        message = f"{len(failed)} of {len(rows)} shards failed, all others are stored: "
        raise _error({"error": message + "; ".join(first_few(named, 3)), "code": failed[0]["code"]})
    summaries = {row["split"]: row["summary"] for row in rows if row["summary"] is not None}
    splits = sorted({row["split"] for row in rows}, reverse=True)  # train first
    if incomplete := [split for split in splits if split not in summaries]:
        raise ExtractionFailed(
            f"the cache of {' and '.join(incomplete)} is incomplete: a file was removed or changed "
            "while shards were being stored. Stored shards are kept: run the same command again"
        )
    return [(folder / f"embeddings_{split}.json", summaries[split]) for split in splits]


def _error(row: Row) -> UserError:
    return (InputError if row["code"] == BAD_INPUT else ExtractionFailed)(row["error"])
