"""The user's own numbers: cache, embeddings, and the first real steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ssl_kd.doctor import machine
from ssl_kd.doctor.finding import AS_SAID, Finding, count
from ssl_kd.settings import SettingsError
from ssl_kd.vision.settings import AUTO, VisionSettings

if TYPE_CHECKING:
    from torch import Tensor

    from ssl_kd.guard.events import Event
    from ssl_kd.guard.precision import Precision
    from ssl_kd.store import EmbeddingStore
    from ssl_kd.vision.train import LogRecord

_BLOCK_ROWS = 8192
_MANY_ROWS = 200_000  # beyond them, neighbours are those of a sample
_PAIRED_ROWS = 4096  # that sample of neighbours
_STEPS, _SECONDS = 3, 10.0
_SOME_CLUSTERS = 10  # where their number is to be found
_SHOWN = 5  # faults of the first batches, before the rest is only counted


def cache(settings: VisionSettings, stores: dict[str, EmbeddingStore]) -> Iterator[Finding]:
    """Check that the cache opens; fill `stores` with the splits that do."""
    from ssl_kd.guard.precision import Precision
    from ssl_kd.store import EmbeddingStore, NonFiniteRow
    from ssl_kd.vision.run import cache_folder, open_data

    try:
        folder = Path(settings.embeddings_dir)
        if settings.embeddings_dir == AUTO:
            precision = Precision.for_device(settings.device, settings.use_fp16)
            folder = cache_folder(settings, *open_data(settings, precision), precision)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        yield Finding("cache", f"{type(error).__name__}: {error}", AS_SAID)
        return
    for split in ("train", "test"):
        name = f"cache: {split}"
        try:
            try:
                store = EmbeddingStore.open(folder, split)
                seen = "checksums fit"
            except NonFiniteRow:
                store = EmbeddingStore.open(folder, split, exclude_bad=True)
                seen = "checksums fit, some rows are bad: see below"
        except FileNotFoundError:
            way = "" if split == "test" else "python train.py makes it; then run this again"
            yield Finding(name, f"none in {folder} yet: not checked", way, note=True)
        except (ValueError, RuntimeError, OSError) as error:
            change = "mend it: python train.py --rebuild_damaged"
            yield Finding(name, f"{type(error).__name__}: {error}", change)
        else:
            stores[split] = store
            rows = sum(entry["rows"] for entry in store.manifest["shards"])
            seen = f"{count(rows, 'row')} of {store.dim}, {seen}"
            yield Finding(name, f"{seen}; teacher {store.fingerprint.teacher}")


def embeddings(stores: dict[str, EmbeddingStore]) -> Iterator[Finding]:
    """Report bad rows of the embeddings by file, row and sample, and what is odd about the others.

    What is odd is what a run warns of before it trains.
    """
    import torch

    from ssl_kd.store import EmbeddingStore
    from ssl_kd.store.embeddings import is_bad, odd_rows, row_peaks

    for split, opened in stores.items():
        name = f"embeddings: {split}"
        store = EmbeddingStore.open(opened.folder, split, verify=False)
        peaks = torch.cat([row_peaks(block) for _, block in store.blocks(_BLOCK_ROWS)])
        shards = peaks.split([entry["rows"] for entry in store.manifest["shards"]])
        bad = torch.cat([is_bad(shard) for shard in shards])  # shard by shard, as opening judges
        kinds = {"NaN": peaks.isnan(), "inf": peaks.isinf(), "out of range": bad & peaks.isfinite()}
        for kind, of_kind in kinds.items():
            if len(rows := of_kind.nonzero().flatten().tolist()):
                yield Finding(
                    f"{name}, {kind}",
                    f"{count(len(rows), 'row')}, the first: {_where(store, rows[0])}",
                    "python train.py --rebuild_damaged; if it happens again, look at that sample"
                    " and take it out of the data",
                )
        values = store.manifest["statistics"]
        yield Finding(
            name,
            f"from {values['min']:.3g} to {values['max']:.3g}, mean norm "
            f"{values['mean_norm']:.3g}, {count(values['zero_rows'], 'zero row')}",
        )
        if odd := odd_rows((block for _, block in opened.blocks(_BLOCK_ROWS)), n_clusters=2):
            way = "look at TEACHER, TEACHER_WEIGHTS and a few of the samples"
            hopeless = "all rows are the same" in odd
            yield Finding(f"{name}, odd rows", odd, way if hopeless else "", note=not hopeless)


def _where(store: EmbeddingStore, row: int) -> str:
    """Return file, row in it and sample of a row of a store opened without verification."""
    sample = store.ids[row]
    for entry in store.manifest["shards"]:
        if row < entry["rows"]:
            return f"{entry['file']}, row {row}, sample {sample!r}"
        row -= entry["rows"]
    raise IndexError(row)


def first_batches(settings: VisionSettings, stores: dict[str, EmbeddingStore]) -> Iterator[Finding]:
    """Run the first real steps of the configured run, by a trainer that is thrown away."""
    name = "run: first batches"
    precision = yield from machine.policy(settings)
    store = stores.get("train")
    if precision is None or store is None:
        what = "device" if precision is None else "cache"
        yield Finding(name, f"not checked: there is no usable {what}, see above", note=True)
        return

    from ssl_kd.vision.run import n_clusters_of

    try:
        known = n_clusters_of(settings, store.class_names, store.n)
    except SettingsError as error:
        yield Finding(name, str(error), AS_SAID)
        return
    n_clusters = known or _SOME_CLUSTERS
    found = _train_a_little(settings, store, n_clusters, precision)
    loss = _range([value for record in found.records for value in record.loss])
    norm = _range([value for record in found.records for value in record.grad_norm])
    paired = len(found.rows)
    pairs = "" if paired == store.n else f", paired among {paired:,} of {store.n:,} rows"
    yield Finding(
        name,
        f"{count(len(found.records), 'step')} of {count(settings.n_heads, 'head')}, {n_clusters} "
        f"clusters{pairs}: loss {loss}, gradient norm {norm}, {found.step_seconds:.2g} s a step",
    )
    if found.stopped:
        yield Finding("run: stopped", found.stopped, f"{AS_SAID}, once the faults below are fixed")
    yield from faults_of(found.events, store, found.rows, precision)
    norms = zip(*(record.grad_norm for record in found.records), strict=True)
    if dead := [str(head) for head, of_steps in enumerate(norms) if not any(of_steps)]:
        shown = ", ".join(dead[:_SHOWN]) + (", ..." if len(dead) > _SHOWN else "")
        yield Finding(
            "run: dead heads",
            f"head {shown}: the gradient is exactly zero at every step",
            "raise STUDENT_TEMP and TEACHER_TEMP to 0.1; with a HEAD of your own, look for a clamp"
            " or a detach in it",
        )


@dataclass(frozen=True)
class _FirstSteps:
    """The log records and events of a few steps, and the rows of the store that they drew on.

    `stopped` is why they ended early, empty where they did not.
    """

    records: list[LogRecord]
    events: list[Event]
    rows: Tensor
    step_seconds: float
    stopped: str


def _train_a_little(
    settings: VisionSettings, store: EmbeddingStore, n_clusters: int, precision: Precision
) -> _FirstSteps:
    """Train a few steps; of many rows without known neighbours, on a sample."""
    import torch

    from ssl_kd.guard.parts import TooFewHealthyParts
    from ssl_kd.store import kept_neighbours, nearest_neighbours
    from ssl_kd.vision.consensus import sample_rows
    from ssl_kd.vision.fit import make_plan, make_trainer
    from ssl_kd.vision.projection import Projection
    from ssl_kd.vision.train import train
    from ssl_kd.vision.training_rows import PROJECTION_ROWS

    k = min(settings.neighbours, store.n - 1)
    rows, neighbours = torch.arange(store.n), None
    if store.n <= _MANY_ROWS:  # the mutual ones of more take minutes
        neighbours = kept_neighbours(store, k)
    if neighbours is None:
        rows = sample_rows(store.n, settings.seed, _PAIRED_ROWS)
        neighbours = nearest_neighbours(store.gather(rows), min(k, len(rows) - 1))
    sample = store.gather(sample_rows(store.n, settings.seed, PROJECTION_ROWS))
    projection = Projection.fit(sample, settings.pca_dim)
    trainer = make_trainer(settings, projection.dim, n_clusters, precision)

    def gather(wanted: Tensor) -> Tensor:
        return projection(store.gather(rows[wanted]))

    plan = make_plan(settings, trainer, neighbours, gather)

    records: list[LogRecord] = []
    events: list[Event] = []
    began = time.perf_counter()

    def enough() -> bool:
        return len(records) == _STEPS or time.perf_counter() - began > _SECONDS

    stopped = ""
    try:
        train(
            trainer,
            plan.sampler,
            gather,
            plan.steps,
            until=plan.until,
            log_every=1,
            on_log=records.append,
            on_events=events.extend,
            should_stop=enough,
        )
    except TooFewHealthyParts as error:
        stopped = str(error)
    seconds = (time.perf_counter() - began) / max(len(records), 1)
    return _FirstSteps(records, events, rows, seconds, stopped)


def faults_of(
    events: Iterable[Event], store: EmbeddingStore, rows: Tensor, precision: Precision
) -> Iterator[Finding]:
    """Report the guard's events, one finding for each part, stage and reason."""
    from ssl_kd.guard.faults import Stage

    changes = {stage.name.lower(): stage.kind.remedy for stage in Stage if stage.kind.remedy}
    if precision.scale:
        changes["gradient"] = f"set USE_FP16 = False; {changes['gradient']}"
    seen: dict[tuple[str, str, str], list[Event]] = {}
    for event in events:
        if event.stage in changes:
            seen.setdefault((event.part, event.stage, event.reason), []).append(event)
    for (part, stage, reason), same in list(seen.items())[:_SHOWN]:
        text = f"{reason}, at step {', '.join(str(event.step) for event in same)}"
        if stage == "input" and same[0].value is not None:
            text += f"; sample {store.ids[int(rows[int(same[0].value)])]!r}"
        # The loss scale is still settling: that is what the first steps are for.
        settling = stage == "gradient" and precision.scale and len(same) < _STEPS
        yield Finding(f"run: {part}, {stage}", text, changes[stage], note=settling)
    if len(seen) > _SHOWN:
        more = f"{count(len(seen) - _SHOWN, 'further part')} with the same kinds of fault"
        yield Finding("run: and", more, "as above")


def _range(values: list[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "never finite"
    text = f"{min(finite):.3g} to {max(finite):.3g}"
    lost = len(values) - len(finite)
    return f"{text} ({lost} of {len(values)} not finite)" if lost else text
