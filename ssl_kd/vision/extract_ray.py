"""Extraction on the machines of a Ray cluster: one row of a Ray data set is one of our shards.

Ray says where and when a shard is computed, and again where its worker died; what is computed is
saved by our own writer, so what is whole is known by the cache's manifest and nowhere else.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ssl_kd.datasets.text import first_few
from ssl_kd.errors import BAD_INPUT, FAILED, InputError, MissingPackage, UserError
from ssl_kd.training.clock import Progress, no_progress
from ssl_kd.vision.extract_many import Filled, Splits, in_words
from ssl_kd.vision.loading import ExtractionFailed
from ssl_kd.vision.settings import VisionSettings

logger = logging.getLogger(__name__)

# A machine may be taken back, but a shard that kills each worker must end: Ray tries without end.
ATTEMPTS = 4
Row = dict[str, Any]


class _Attempts:
    """How often each shard was begun; an actor of its own, which outlives the workers."""

    def __init__(self) -> None:
        self._begun: Counter[tuple[str, int]] = Counter()

    def begin(self, split: str, shard: int) -> int:
        """Count one more."""
        self._begun[split, shard] += 1
        return self._begun[split, shard]


class _Worker:
    """Embeds shards on one machine; data and teacher are loaded when the first one comes.

    Args:
        settings: all of them, as plain values.
        shard_rows: samples per shard; None: about 256 MiB.
        folder: where relative paths begin.
        path: where modules are found beside the machine's own: a teacher of somebody's own.
        begin: counts that a shard, by its split and number, is begun.
    """

    def __init__(
        self,
        settings: Row,
        shard_rows: int | None,
        folder: str,
        path: list[str],
        begin: Callable[[str, int], int],
    ) -> None:
        self.settings, self.shard_rows, self.folder, self.path = settings, shard_rows, folder, path
        self.begin = begin
        self._splits: Splits | None = None

    def __call__(self, row: Row) -> Row:
        """Embed one shard, `{"split", "shard"}`.

        What fails comes back in words: for an error Ray would run the shard again, end the others'
        work, and show its own stack.
        """
        told: Row = {"rows": 0, "told": "", "complete": False, "waited": "", "error": "", "code": 0}
        try:
            if self.begin(row["split"], row["shard"]) > ATTEMPTS:
                raise ExtractionFailed(
                    f"{ATTEMPTS} workers died of it: too little memory, or a file that crashes them"
                )
            share = self._loaded().share(row["split"], slice(row["shard"], row["shard"] + 1))
            told |= {"rows": share.rows, "waited": share.waited or ""}
            if share.manifest is not None:
                told |= {"told": in_words(share.manifest), "complete": True}
        except Exception as error:
            told |= _refusal(error)
        return {**row, **told}

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
    return {"error": words, "code": getattr(error, "exit_code", FAILED)}


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
        importlib.import_module("ray.data")
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
    with_modules = [os.path.abspath(place) for place in sys.path]
    attempts = ray.remote(_Attempts).options(num_cpus=0).remote()
    given = (plain, shard_rows, os.getcwd(), with_modules, partial(_begin, attempts))
    takes = {"num_cpus": cores, "num_gpus": gpus}
    # A worker's GPU decides the dtype, and with it how many rows make a shard.
    plan = ray.get(ray.remote(_plan).options(**takes).remote(given)) if gpus else _plan(given)
    if plan["error"]:
        raise _error(plan)
    settings = settings.replace(embeddings_dir=plan["folder"])
    plain = plain | {"EMBEDDINGS_DIR": plan["folder"], "FORCE_RECOMPUTE": False}  # begun by now
    tasks = [{"split": s, "shard": k} for s, count in plan["shards"].items() for k in range(count)]
    size = min(room, len(tasks))
    logger.info("%d shards, %d workers of %d cores and %d GPUs", len(tasks), size, cores, gpus)

    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    done = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map(
        _Worker,
        fn_constructor_args=(plain, *given[1:]),
        compute=ray.data.ActorPoolStrategy(size=size, max_tasks_in_flight_per_actor=1),
        **takes,
    )
    rows: list[Row] = []
    start = time.perf_counter()
    for row in done.iter_rows():
        rows.append(row)
        images = sum(row["rows"] for row in rows)
        rate = images / (time.perf_counter() - start)
        info = {"images/s": rate, "shards": f"{len(rows)}/{len(tasks)}"}
        progress("extract", images, plan["rows"], info)
    return _result(settings, rows, plan["shards"])


def _begin(attempts: Any, split: str, shard: int) -> int:
    return importlib.import_module("ray").get(attempts.begin.remote(split, shard))


def _plan(given: tuple) -> Row:
    return _Worker(*given).plan()


def _result(settings: VisionSettings, rows: list[Row], shards: dict[str, int]) -> list[Filled]:
    """What is there now; the shards that failed are an error that names them.

    Args:
        settings: all of them.
        rows: what came of each shard.
        shards: how many each split has.
    """
    for row in [row for row in rows if row["waited"]][:1]:
        logger.info("shard %d of %s: %s", row["shard"], row["split"], row["waited"])
    failed = [row for row in rows if row["error"]]
    if failed:
        if len(failed) == len(rows) and len({row["error"] for row in failed}) == 1:
            raise _error(failed[0])
        failed.sort(key=lambda row: (row["split"] != "train", row["shard"]))
        named = [f"shard {row['shard']} of {row['split']}: {row['error']}" for row in failed]
        raise _error(
            {
                "error": f"{len(failed)} of {len(rows)} shards failed, all others are stored: "
                + "; ".join(first_few(named, 3)),
                "code": failed[0]["code"],
            }
        )
    folder = Path(settings.embeddings_dir)
    whole = {row["split"]: row["told"] for row in rows if row["complete"]}
    if lacking := [_lacking(split, n, rows) for split, n in shards.items() if split not in whole]:
        raise ExtractionFailed(f"{'; '.join(lacking)}. Stored shards are kept: run again")
    return [Filled(folder / f"embeddings_{split}.json", whole[split], True) for split in shards]


def _lacking(split: str, n_shards: int, rows: list[Row]) -> str:
    """Why a split is not whole though no worker told of a failure."""
    came = {row["shard"] for row in rows if row["split"] == split}
    if lost := [str(shard) for shard in range(n_shards) if shard not in came]:
        return f"{split} is not whole: Ray gave nothing back of shard {', '.join(first_few(lost))}"
    return (
        f"{split} is not whole: each of its {n_shards} shards was stored, but a file was removed or"
        " changed before the last one was"
    )


def _error(row: Row) -> UserError:
    return (InputError if row["code"] == BAD_INPUT else ExtractionFailed)(row["error"])
