"""`ssl_kd curate CACHE | RUN`: what to throw out, what to look at and what to label, as tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssl_kd.cli.flags import check_first, flags_after, listed
from ssl_kd.errors import OK, InputError
from ssl_kd.settings.early import home_resolved

if TYPE_CHECKING:
    import pyarrow as arrow

    from ssl_kd.store import EmbeddingStore
    from ssl_kd.workbench.curate import Duplicates

PROG = "ssl_kd curate"
WRITTEN = "written.json"  # SHA-256 of each table, by its name
LISTED = 1000  # outliers and doubtful labels in their tables
_HELP = {
    "split": "which split of a cache (default: train; leaks are looked for in test)",
    "duplicates": "cosine from which on two samples are copies, or auto (default): what is closer"
    " than chance makes it",
    "rule": "which copy stays: first | typical | largest (default: first)",
    "label": "so many samples to label next (default: none)",
    "format": "csv | parquet (default: csv)",
    "out": "folder for the tables (default: curated in the run's folder, or beside the cache)",
}
_FLAGS = {
    "images": "decode every image of a run once: which are broken, blank or tiny, which are equal;"
    " --rule largest does it, too",
    "exclude": "exclude from a run what does not stay: a decision in its curation.jsonl, which"
    " ssl_kd explore RUN --undo takes back",
    "force": "replace tables that were edited, too",
}


def curate(argv: Sequence[str]) -> int:
    """Run the command; return the exit code.

    Args:
        argv: The folder first, then flags.

    Raises:
        InputError: invalid flags or paths.
    """
    if not argv or {"-h", "--help"} & set(argv):
        print(
            f"usage: {PROG} FOLDER [flags]\n\nFOLDER is a finished run's (runs/NAME) or a cache of "
            "embeddings (data/embeddings).\n\nWrites duplicates, outliers, leaks, labels, images "
            "and label_next, each a table with a\nline for each sample to look at, and "
            "kept.txt, the files that stay.\n\n" + listed(_HELP, _FLAGS)
        )
        return OK
    check_first(argv, PROG, "the folder")
    folder = home_resolved(argv[0])
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; expected a run's or a cache of embeddings")
    given = _given(argv)
    out = Path(given.out).expanduser() if given.out is not None else folder / "curated"
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; expected a folder for the tables (--out)")
    if not given.force:
        _refuse_what_is_not_ours(out)
    return _curate(folder, given, out)


def _refuse_what_is_not_ours(out: Path) -> None:
    """Raise InputError where tables would take the place of what someone else wrote."""
    from ssl_kd.files import sha256_file

    sums = _written(out)
    for path in sorted(out.iterdir()) if out.is_dir() else ():
        ours = path.is_file() and sums.get(path.name) == sha256_file(path)
        if ours or path.name == WRITTEN:
            continue
        raise InputError(
            f"{path} exists, and was not written by curate, or edited since: name another folder "
            "with --out, or replace it by --force"
        )


def _given(argv: Sequence[str]) -> Any:
    """The flags, each checked."""
    given, rest = flags_after(argv, PROG, "the folder", _HELP, _FLAGS, numbers=("label",))
    if rest:
        known = ", ".join(f"--{name}" for name in [*_HELP, *_FLAGS])
        raise InputError(f"curate has no {rest[0]}; expected {known}")
    from ssl_kd.workbench.curate.duplicates import RULES

    for name, default, allowed in (("rule", "first", RULES), ("format", "csv", ("csv", "parquet"))):
        value = getattr(given, name) or default
        if value not in allowed:
            raise InputError(f"--{name} is {value!r}; expected one of {', '.join(allowed)}")
        setattr(given, name, value)
    given.threshold = None
    if given.duplicates not in (None, "auto"):
        try:
            given.threshold = float(given.duplicates)
        except ValueError:
            given.threshold = -2.0
        if not -1 <= given.threshold <= 1:
            raise InputError(
                f"--duplicates is {given.duplicates!r}; expected auto or a cosine, -1 to 1"
            )
    if given.label is not None and given.label < 1:
        raise InputError(f"--label is {given.label}; expected at least 1")
    return given


def _curate(folder: Path, given: Any, out: Path) -> int:
    from rich.console import Console
    from rich.table import Table

    from ssl_kd.cli.screen import ProgressBars, open_screen
    from ssl_kd.training.ranks import refuse_ranks

    screen = open_screen()
    refuse_ranks()
    with ProgressBars(screen) as progress:
        work = _Work(folder, given, progress)
        tables = work.tables()
    out.mkdir(parents=True, exist_ok=True)
    shown = Table("", "found", "file", title=f"{folder}, {work.split}: {work.store.n:,} samples")
    for name, (summary, table) in tables.items():
        path = out / f"{name}.{given.format}"
        _write(path, table)
        _remember(path)
        shown.add_row(name, summary, path.name)
    _write_kept(out / "kept.txt", work)
    _remember(out / "kept.txt")
    shown.add_row("kept", f"{int(work.kept.sum()):,} samples stay", "kept.txt")
    if given.exclude:
        shown.add_row("excluded", f"{work.exclude():,} more", "curation.jsonl of the run")
    console = Console()
    console.print(shown)
    console.print(f"Tables: {out}", soft_wrap=True, markup=False)
    return OK


class _Work:
    """What is asked of one folder: the stores, and what a run knows beside them."""

    def __init__(self, folder: Path, given: Any, progress: Callable[..., None]) -> None:
        from ssl_kd.store import EmbeddingStore
        from ssl_kd.workbench.run import Run

        self.given, self.progress, self.split = given, progress, given.split or "train"
        self.run: Run | None = None
        self.test: EmbeddingStore | None = None
        if (folder / "config.json").is_file():
            self.run = Run.open(folder)
            samples = self.run.samples
            self.store = samples.store(self.split)
            if "test" in samples.splits and self.split != "test":
                self.test = samples.store("test")
        else:
            wants = {"--images": given.images, "--rule largest": given.rule == "largest"}
            wants["--exclude"] = given.exclude
            for flag in (flag for flag, wanted in wants.items() if wanted):
                raise InputError(
                    f"{flag} needs a run, and {folder} holds embeddings alone: give a run's folder"
                )
            if not _has(folder, self.split):
                raise InputError(
                    f"{folder} is neither a run's folder (no config.json) nor a cache of the split "
                    f"{self.split} (no embeddings_{self.split}.json)"
                )
            self.store = EmbeddingStore.open(folder, self.split)
            if self.split != "test" and _has(folder, "test"):
                self.test = EmbeddingStore.open(folder, "test")

    def tables(self) -> dict[str, tuple[str, arrow.Table]]:
        """Name -> its summary, and the table."""
        from ssl_kd.workbench.curate import (
            label_next,
            leaks,
            mislabelled,
            near_duplicates,
            outliers,
        )
        from ssl_kd.workbench.curate.herding import without_label

        found: dict[str, tuple[str, arrow.Table]] = {}
        pictures = None
        if self.run is not None and (self.given.images or self.given.rule == "largest"):
            pictures = self.run.odd_images(self.split, progress=self._of("images"))
        same = None if pictures is None else pictures.same
        floor = self.given.threshold
        clusters = None if self.run is None else self.run.samples.column("cluster", self.split)
        copies = near_duplicates(self.store, floor=floor, same=same, progress=self._of("copies"))
        sizes = None if pictures is None else pictures.sizes
        self.kept = copies.kept(floor, self.given.rule, sizes=sizes)
        found["duplicates"] = self._copies(copies, floor)
        far = outliers(self.store, progress=self._of("outliers"))
        whole = f"all {len(far):,}, the furthest out first"
        summary = whole if len(far) <= LISTED else f"the {LISTED:,} furthest out"
        found["outliers"] = summary, far.top(LISTED).frame()
        if pictures is not None:
            odd = f"{len(pictures):,} broken, blank or tiny"
            found["images"] = odd, pictures.frame()
            self.kept[list(pictures.reasons)] = False
        if self.test is not None:
            leaked = leaks(self.store, self.test, progress=self._of("leaks")).above(floor)
            summary = f"{len(leaked):,} of {self.test.n:,} test samples are in {self.split}"
            found["leaks"] = summary, leaked.frame()
        labels = None if self.store.labels is None else self.store.labels.numpy()
        if labels is not None and len(set(labels[labels >= 0].tolist())) > 1:
            doubtful = mislabelled(self.store, clusters=clusters)
            doubted = int((doubtful.columns["label"] != doubtful.columns["suggested"]).sum())
            summary = f"{doubted:,} whose label others do not share"
            found["labels"] = summary, doubtful.top(LISTED).frame()
        if self.given.label is not None:
            n = self.given.label
            n = n if n > self.store.n else min(n, len(without_label(self.store)))
            if self.run is not None:
                asked = self.run.label_next(n, self.split)
            else:
                asked = label_next(self.store, n)
            summary = f"{n:,} to label next" + (", all without a label" * (n < self.given.label))
            found["label_next"] = summary, asked.frame()
        return found

    def exclude(self) -> int:
        """Decide that what does not stay is excluded; how many were not before."""
        assert self.run is not None
        gone = self.run.samples.splits[self.split].start + (~self.kept).nonzero()[0]
        gone = gone[~self.run.curation.excluded[gone]]
        if len(gone):
            self.run.curation.exclude(gone)
        return len(gone)

    def _copies(self, copies: Duplicates, threshold: float | None) -> tuple[str, arrow.Table]:
        groups = copies.groups(threshold)
        gone = int((~self.kept).sum())
        summary = (
            f"{gone:,} copies in {len(groups):,} groups, {len(copies.exact):,} of them of equals"
        )
        return summary, copies.frame(threshold, self.kept)

    def _of(self, stage: str) -> Callable[[int, int], None]:
        return lambda done, total: self.progress(stage, done, total, {})


def _has(folder: Path, split: str) -> bool:
    return (folder / f"embeddings_{split}.json").is_file()


def _write(path: Path, table: arrow.Table) -> None:
    from pyarrow import csv, parquet

    from ssl_kd.files import atomic_write
    from ssl_kd.files.cells import to_cells

    if path.suffix == ".csv":
        atomic_write(path, lambda file: csv.write_csv(to_cells(table), file))
    else:
        atomic_write(path, lambda file: parquet.write_table(table, file, compression="zstd"))


def _written(out: Path) -> dict[str, str]:
    """SHA-256 of each file of a folder that the next call may replace."""
    try:
        known = json.loads((out / WRITTEN).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    pairs = known.items() if isinstance(known, dict) else ()
    return {name: digest for name, digest in pairs if isinstance(digest, str)}


def _remember(path: Path) -> None:
    from ssl_kd.files import atomic_write_json, sha256_file

    known = _written(path.parent) | {path.name: sha256_file(path)}
    atomic_write_json(path.parent / WRITTEN, known)


def _write_kept(path: Path, work: _Work) -> None:
    """The names of the samples that stay, a line each (`ssl_kd.files.cells.one_line`)."""
    from ssl_kd.files import atomic_write
    from ssl_kd.files.cells import one_line

    lines = (one_line(work.store.ids[row]) + "\n" for row in work.kept.nonzero()[0].tolist())
    atomic_write(path, lambda file: file.writelines(line.encode() for line in lines))
