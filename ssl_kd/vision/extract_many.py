"""The caches of all splits, filled by one process, by some of many, or by Ray; no training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ssl_kd.guard.precision import Precision
from ssl_kd.store.shards import Manifest
from ssl_kd.training.clock import Progress, no_progress
from ssl_kd.vision.extract import ExtractProgress, Share, extract_share
from ssl_kd.vision.run import Dataset, cache_folder, embedded, open_data
from ssl_kd.vision.settings import VisionSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Filled:
    """What came of one split.

    Attributes:
        manifest: of the cache's manifest, its file.
        told: what there is now, in words.
        complete: whether all shards are stored.
    """

    manifest: Path
    told: str
    complete: bool


def in_words(manifest: Manifest) -> str:
    """What a complete cache holds."""
    shards, rows = len(manifest["shards"]), manifest["statistics"]["rows"]
    gone = len(manifest["unreadable"])
    told = f"{rows} rows of {manifest['dim']}, {manifest['dtype']}, in {shards} shards"
    return told + f"; {gone} samples are left out" * (gone > 0)


class Splits:
    """The data of every split, and the teacher: what embedding any shard takes.

    Args:
        settings: all of them.
        shard_rows: samples per shard; None: about 256 MiB.

    Raises:
        SettingsError, InputError: data, teacher or settings do not go together.
    """

    def __init__(self, settings: VisionSettings, shard_rows: int | None = None) -> None:
        self.settings, self.shard_rows = settings, shard_rows
        self.precision = Precision.for_device(settings.device, settings.use_fp16)
        logger.info("%s", self.precision)
        sets, self.teacher = open_data(settings, self.precision)
        self.sets: dict[str, Dataset] = sets
        self.folder = cache_folder(settings, sets, self.teacher, self.precision)

    def share(
        self, split: str, only: slice, progress: Callable[[ExtractProgress], None] | None = None
    ) -> Share:
        """Embed some shards of a split, as `extract_share` does."""
        return extract_share(
            self.sets[split],
            self.teacher,
            self.folder,
            only,
            split=split,
            precision=self.precision,
            workers=self.settings.workers,
            force=self.settings.force_recompute,
            rebuild=self.settings.rebuild_damaged,
            shard_rows=self.shard_rows,
            progress=progress,
        )


def fill(
    settings: VisionSettings, *, shard_rows: int | None = None, progress: Progress | None = None
) -> list[Filled]:
    """Fill the caches of all splits in this process, or verify those that are there.

    Args:
        settings: all of them.
        shard_rows: samples per shard; None: about 256 MiB.
        progress: called as `progress(stage, done, total, info)`.

    Raises:
        SettingsError, InputError, FingerprintMismatch, CorruptFileError: as `extract`.
    """
    work = Splits(settings, shard_rows)
    found = []
    for split, dataset in work.sets.items():
        store = embedded(
            settings,
            dataset,
            work.teacher,
            work.folder,
            split,
            work.precision,
            progress or no_progress,
            shard_rows,
        )
        path = work.folder / f"{store.name}.json"
        found.append(Filled(path, in_words(store.manifest), True))
    return found


def fill_share(
    settings: VisionSettings,
    rank: int,
    world: int,
    *,
    shard_rows: int | None = None,
    progress: Progress | None = None,
) -> list[Filled]:
    """Embed the shards rank, rank + world, ... of all splits, beside other processes.

    Args:
        settings: the same in every process.
        rank: which of the processes this is, from 0.
        world: how many there are, now or ever.
        shard_rows: samples per shard; None: about 256 MiB. The first process decides.
        progress: called as `progress(stage, done, total, info)`, with this process's rows.

    Raises:
        SettingsError, InputError, FingerprintMismatch, CorruptFileError: as `extract`.
    """
    work = Splits(settings, shard_rows)

    def draw(p: ExtractProgress) -> None:
        if progress is not None:
            progress("extract", p.done, p.total, {"images/s": p.images_per_second})

    found = []
    for split in work.sets:
        share = work.share(split, slice(rank, None, world), draw)
        told = (
            f"this process has stored its {len(share.shards)} of {share.n_shards} shards; the one "
            "that stores the last completes the cache"
        )
        if share.waited:
            logger.info("%s", share.waited)
        if share.manifest is not None:
            told = in_words(share.manifest)
        path = work.folder / f"embeddings_{split}.json"
        found.append(Filled(path, told, share.manifest is not None))
    return found
