"""Compute the embedding caches of all splits: in one process, in one of several, or on Ray."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from ssl_kd.guard.precision import Precision
from ssl_kd.store.shards import Manifest
from ssl_kd.training.clock import Progress, no_progress
from ssl_kd.vision.extract import Extraction
from ssl_kd.vision.run import cache_folder, open_data
from ssl_kd.vision.settings import VisionSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Filled:
    """The cache of one split: the path of its manifest, and what it holds, in words."""

    manifest: Path
    summary: str


def summary_of(manifest: Manifest) -> str:
    """Say in words what a complete cache holds."""
    shards, rows = len(manifest["shards"]), manifest["statistics"]["rows"]
    n_left_out = len(manifest["unreadable"])
    text = f"{rows} rows of {manifest['dim']}, {manifest['dtype']}, in {shards} shards"
    return text + f"; {n_left_out} samples are left out" * (n_left_out > 0)


class ExtractionJob:
    """The data of every split, and the teacher: all that embedding a shard needs.

    Args:
        settings: of the run.
        shard_rows: samples per shard; None: about 256 MiB. The first process to start decides.
        progress: called as `progress("extract", done, total, info)`, with this process's rows.

    Raises:
        SettingsError, InputError: data, teacher or settings do not go together.
    """

    def __init__(
        self,
        settings: VisionSettings,
        shard_rows: int | None = None,
        progress: Progress = no_progress,
    ) -> None:
        precision = Precision.for_device(settings.device, settings.use_fp16)
        logger.info("%s", precision)
        datasets, teacher = open_data(settings, precision)
        self.folder = cache_folder(settings, datasets, teacher, precision)
        options = {"precision": precision, "progress": progress, "shard_rows": shard_rows}
        options |= settings.extract_options
        self.extractions = {
            split: Extraction(dataset, teacher, self.folder, split=split, **options)
            for split, dataset in datasets.items()
        }

    def fill(self) -> list[Filled]:
        """Fill the caches of all splits in this process, or verify those that are complete.

        Raises:
            SettingsError, InputError, FingerprintMismatch, CorruptFileError: as `Extraction.store`.
        """
        return [
            Filled(self.folder / f"embeddings_{split}.json", summary_of(of_split.store().manifest))
            for split, of_split in self.extractions.items()
        ]

    def fill_share(self, rank: int, world: int) -> list[Filled]:
        """Embed the shards rank, rank + world, ... of all splits, while other processes do theirs.

        Args:
            rank: number of this process, from 0.
            world: number of processes, whether they run now or later.

        Raises:
            SettingsError, InputError, FingerprintMismatch, CorruptFileError: as `Extraction.store`.
        """
        filled = []
        for split, of_split in self.extractions.items():
            share = of_split.share(slice(rank, None, world))
            if share.manifest is not None:
                summary = summary_of(share.manifest)
            else:
                summary = (
                    f"this process has stored its {len(share.shards)} of {share.n_shards} shards; "
                    "the one that stores the last completes the cache"
                )
            filled.append(Filled(self.folder / f"embeddings_{split}.json", summary))
        return filled
