"""The command `ssl_kd curate`: write tables of duplicates, outliers, leaks and suspect labels."""

from __future__ import annotations

import logging
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_kd.cli.flags import FlagParser
from ssl_kd.core.errors import OK, InputError, UserError
from ssl_kd.core.settings.early import home_resolved

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as arrow
    from numpy.typing import NDArray

    from ssl_kd.core.runs.clock import Progress
    from ssl_kd.vision.cache import EmbeddingStore
    from ssl_kd_explore.run import Run

logger = logging.getLogger(__name__)

MAX_LISTED = 1000  # outliers and suspect labels in their tables


def curate(argv: Sequence[str]) -> int:
    """Write the tables, and print a summary of each."""
    flags = _parser().parse_args(argv)
    folder: Path = flags.folder
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; expected a run folder or an embeddings cache")
    out: Path = folder / "curated" if flags.out is None else flags.out
    if out.exists() and not out.is_dir():
        raise InputError(f"--out is {out}, a file; expected a folder for the tables")
    if out.exists() and any(out.iterdir()) and not flags.force:
        raise InputError(
            f"{out} is not empty: give another folder with --out, or replace it with --force"
        )
    from pyarrow import csv
    from rich.table import Table

    from ssl_kd.cli.screen import ProgressBars, open_screen, print_result
    from ssl_kd.core.files import atomic_write
    from ssl_kd.core.files.cells import one_line, to_cells
    from ssl_kd.core.runs.ranks import refuse_ranks

    screen = open_screen()
    refuse_ranks()
    with ProgressBars(screen) as progress:
        run, store, test = _open(folder, flags)
        tables, kept = _check(run, store, test, flags, progress)
    out.mkdir(parents=True, exist_ok=True)
    shown = Table("", "found", "file", title=f"{folder}, {flags.split}: {store.n:,} samples")
    for name, summary, table in tables:
        atomic_write(out / f"{name}.csv", partial(csv.write_csv, to_cells(table)))
        shown.add_row(name, summary, f"{name}.csv")
    names = (one_line(store.ids[row]) + "\n" for row in kept.nonzero()[0].tolist())
    atomic_write(out / "kept.txt", lambda file: file.writelines(name.encode() for name in names))
    shown.add_row("kept", f"{int(kept.sum()):,} samples", "kept.txt")
    if flags.exclude and run is not None:
        dropped = run.samples.splits[flags.split].start + (~kept).nonzero()[0]
        dropped = dropped[~run.curation.excluded[dropped]]
        if len(dropped):
            run.curation.exclude(dropped)
        shown.add_row("excluded", f"{len(dropped):,} more samples", "curation.jsonl of the run")
    print_result(shown, {"Tables": out})
    return OK


def _parser() -> FlagParser:
    about = "Writes tables of the samples to review, and kept.txt, the names of all others."
    parser = FlagParser(prog="ssl_kd curate", description=about)
    add = parser.add_argument
    where = "a finished run (runs/NAME) or a cache of embeddings (data/embeddings)"
    add("folder", metavar="FOLDER", type=home_resolved, help=where)
    split = "split to check; default: train. Leaks are samples also in test"
    add("--split", default="train", help=split)
    least = "least cosine of duplicates; default: auto, closer than chance"
    add("--duplicates", type=_cosine, help=least)
    rules = ("first", "largest")
    add("--rule", choices=rules, default="first", help="which duplicate to keep; default: first")
    add("--out", type=home_resolved, help="new folder for the tables; default: FOLDER/curated")
    undo = "ssl_kd explore RUN --undo includes them again"
    switches = {
        "--images": "find damaged, blank and tiny images; measure all for explore",
        "--exclude": f"exclude the samples that are not kept from the run; {undo}",
        "--force": "replace existing tables",
    }
    for name, about in switches.items():
        add(name, action="store_true", help=about)
    return parser


def _cosine(text: str) -> float | None:
    try:
        cosine = None if text == "auto" else float(text)
    except ValueError:
        cosine = 2.0
    if cosine is not None and not -1 <= cosine <= 1:
        raise ArgumentTypeError(f"expected auto or a cosine from -1 to 1, got {text}")
    return cosine


def _open(folder: Path, flags: Namespace) -> tuple[Run | None, EmbeddingStore, Any]:
    """Return the run if `folder` is one, its embeddings, and those of its test split or None."""
    from ssl_kd.vision.cache import EmbeddingStore
    from ssl_kd_explore.run import Run

    split = flags.split
    if (folder / "config.json").is_file():
        run = Run.open(folder)
        has_test = "test" in run.samples.splits and split != "test"
        return run, run.samples.store(split), run.samples.store("test") if has_test else None
    needs_run = {"--images": flags.images, "--rule largest": flags.rule == "largest"}
    for flag, is_set in (needs_run | {"--exclude": flags.exclude}).items():
        if is_set:
            raise InputError(f"{flag} needs a run folder, but {folder} has no config.json")
    if not _has_split(folder, split):
        raise InputError(
            f"{folder} is neither a run folder (no config.json) nor a cache of the split "
            f"{split} (no embeddings_{split}.json)"
        )
    has_test = split != "test" and _has_split(folder, "test")
    test = EmbeddingStore.open(folder, "test") if has_test else None
    return None, EmbeddingStore.open(folder, split), test


def _has_split(folder: Path, split: str) -> bool:
    return (folder / f"embeddings_{split}.json").is_file()


def _check(
    run: Run | None,
    store: EmbeddingStore,
    test: EmbeddingStore | None,
    flags: Namespace,
    progress: Progress,
) -> tuple[list[tuple[str, str, arrow.Table]], NDArray[np.bool_]]:
    """Return name, summary and table of each check, and a mask of the samples to keep `[n]`."""
    from ssl_kd.vision.data.usage import counted
    from ssl_kd_explore.curate import leaks, mislabeled, near_duplicates, outliers
    from ssl_kd_explore.metadata import write_measures

    def show(stage: str) -> Callable[[int, int], None]:
        return lambda done, total: progress(stage, done, total, {})

    floor = flags.duplicates
    split = flags.split
    pictures = None
    sizes = None
    is_needed = flags.images or flags.rule == "largest"
    if run is not None and (is_needed or run.samples.pictured):
        try:
            pictures = run.odd_images(split, progress=show("images"))
        except (UserError, OSError) as error:
            if is_needed:
                raise
            logger.warning("copies are found by their embeddings alone: %s", error)
    if run is not None and pictures is not None:
        write_measures(run.samples, split, pictures.measures)
        sizes = pictures.sizes if flags.rule == "largest" else None
    copies = near_duplicates(store, floor=floor, pictures=pictures, progress=show("copies"))
    kept = copies.kept(floor, sizes=sizes)
    summary = (
        f"{int((~kept).sum()):,} duplicates to drop, in {len(copies.groups(floor)):,} groups; "
        f"{len(copies.exact):,} groups are exactly equal"
    )
    if n_alike := int(copies.same_picture.sum()):
        summary += f"; {counted(n_alike, 'pair')} by the look of the images"
    tables = [("duplicates", summary, copies.frame(floor, kept))]
    ranked = outliers(store, progress=show("outliers"))
    n_listed = min(len(ranked), MAX_LISTED)
    summary = f"the {n_listed:,} most unusual of {len(ranked):,} samples, most unusual first"
    tables.append(("outliers", summary, ranked.top(MAX_LISTED).frame()))
    if pictures is not None and is_needed:
        kept[list(pictures.reasons)] = False
        summary = f"{len(pictures.reasons):,} damaged, blank or tiny images"
        if pictures.unchecked:
            n_unchecked = len(pictures.unchecked)
            summary += f"; {n_unchecked:,} that could not be read are listed, and kept"
        tables.append(("images", summary, pictures.frame()))
    if test is not None:
        leaked = leaks(store, test, floor, progress=show("leaks"))
        summary = f"{len(leaked):,} of {test.n:,} test samples are also in {split}"
        tables.append(("leaks", summary, leaked.frame()))
    if store.labels is not None and len(store.labels[store.labels >= 0].unique()) > 1:
        clusters = None if run is None else run.samples.column("cluster", split)
        suspect = mislabeled(store, clusters=clusters)
        n_suspect = int((suspect.columns["label"] != suspect.columns["suggested"]).sum())
        summary = f"{n_suspect:,} samples whose neighbors disagree with their label"
        tables.append(("labels", summary, suspect.top(MAX_LISTED).frame()))
    return tables, kept
