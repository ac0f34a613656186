"""Fill the embedding caches of all splits, alone or as one of several processes."""

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
    """The manifest's path of one split's cache, and a one-line summary of its content."""

    manifest: Path
    summary: str


def summary_of(manifest: Manifest) -> str:
    """Describe the content of a complete cache in one line."""
    shards, rows = len(manifest["shards"]), manifest["statistics"]["rows"]
    n_left_out = len(manifest["unreadable"])
    text = f"{rows} rows of {manifest['dim']}, {manifest['dtype']}, in {shards} shards"
    return text + f"; {n_left_out} samples are left out" * (n_left_out > 0)


class ExtractionJob:
    """Open the data of every split and the teacher, and embed all shards or a share of them.

    Args:
        settings: settings of the run.
        shard_rows: samples per shard; None: about 256 MiB. If several processes fill the cache,
            the first one decides.
        progress: called as `progress("extract", done, total, info)` with this process's rows.

    Raises:
        SettingsError: LABELS or DATASET_TEST does not fit DATASET.
        InputError: the teacher cannot embed this data set.
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
        """Fill the caches of all splits in this process; a complete cache is only verified.

        Raises:
            InputError: an embedding is not finite, or no image is readable.
            FingerprintMismatch: a cache belongs to another data set or teacher.
            CorruptFileError: a file of a cache is damaged.
        """
        return [
            Filled(self.folder / f"embeddings_{split}.json", summary_of(of_split.store().manifest))
            for split, of_split in self.extractions.items()
        ]

    def fill_share(self, rank: int, world: int) -> list[Filled]:
        """Embed the shards rank, rank + world, ... of all splits; other processes embed the rest.

        Args:
            rank: number of this process, from 0.
            world: number of processes; they need not run at the same time.

        Raises:
            InputError: an embedding is not finite, or no image is readable.
            FingerprintMismatch: a cache belongs to another data set or teacher.
            CorruptFileError: a file of a cache is damaged.
        """
        filled = []
        for split, of_split in self.extractions.items():
            share = of_split.share(slice(rank, None, world))
            if share.manifest is not None:
                summary = summary_of(share.manifest)
            else:
                summary = (
                    f"this process has stored its {len(share.shards)} of {share.n_shards} shards; "
                    "the cache is complete when the other processes have stored theirs"
                )
            filled.append(Filled(self.folder / f"embeddings_{split}.json", summary))
        return filled
