"""Check the user's data: the cache, its embeddings, and the first training steps on them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from firstnan.events import Event
from firstnan.parts import TooFewHealthyParts
from ssl_kd.core.errors import first_few
from ssl_kd.core.faults import CHANGES
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.loop import run_loop
from ssl_kd.core.settings import SettingsError
from ssl_kd.core.shards import NonFiniteRow
from ssl_kd.doctor.finding import FOLLOW_MESSAGE, Finding, count
from ssl_kd.vision.cache import EmbeddingStore, nearest_neighbors
from ssl_kd.vision.cache.embeddings import odd_rows
from ssl_kd.vision.fit import make_plan, make_trainer
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.run import cache_folder, n_clusters_of, open_data
from ssl_kd.vision.settings import AUTO, HeadSettings, VisionSettings
from ssl_kd.vision.train.learner import HeadsLearner, LogRecord
from ssl_kd.vision.train.pairs import sample_rows

_BLOCK_ROWS = 8192
_PAIRED_ROWS = 4096  # a sample of the rows, since the neighbors of all may take minutes
_STEPS = 3
_UNKNOWN_CLUSTERS = 10  # if the run would estimate their number
_FIRST_BATCHES = "run: first batches"


def own_data(settings: VisionSettings) -> Iterator[Finding]:
    """Check the cache and the values in its rows, and train a few steps on them."""
    try:
        precision = Precision.for_device(settings.device, settings.use_fp16)
        folder = Path(settings.embeddings_dir)
        if settings.embeddings_dir == AUTO:
            folder = cache_folder(settings, *open_data(settings, precision), precision)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        yield Finding("cache", f"{type(error).__name__}: {error}", FOLLOW_MESSAGE)
        return
    stores: dict[str, EmbeddingStore] = {}
    for split in ("train", "test"):
        yield from _cache(folder, split, stores)
    if (store := stores.get("train")) is None:
        result = "not checked: there is no usable cache (see above)"
        yield Finding(_FIRST_BATCHES, result, note=True)
        return
    try:
        estimated = n_clusters_of(
            settings.n_clusters, store.class_names, store.n, len(store.manifest["unreadable"])
        )
    except SettingsError as error:
        yield Finding(_FIRST_BATCHES, str(error), FOLLOW_MESSAGE)
        return
    n_clusters = estimated or _UNKNOWN_CLUSTERS
    widths = settings.n_neighbors, settings.pca_dim
    yield from _first_batches(settings, *widths, store, n_clusters, precision)


def _cache(folder: Path, split: str, stores: dict[str, EmbeddingStore]) -> Iterator[Finding]:
    """Check a split of the cache and its rows, and add it to `stores` if it opens."""
    name = f"cache: {split}"
    try:
        try:
            store = EmbeddingStore.open(folder, split)
        except NonFiniteRow as error:
            change = "run python train.py --rebuild_damaged; if it happens again, remove the sample"
            yield Finding(f"embeddings: {split}, bad row", str(error), change)
            store = EmbeddingStore.open(folder, split, exclude_bad=True)
    except FileNotFoundError:
        change = "" if split == "test" else "run python train.py, which writes it, then this again"
        yield Finding(name, f"none in {folder} yet: not checked", change, note=True)
        return
    except (ValueError, RuntimeError, OSError) as error:
        change = "repair it with python train.py --rebuild_damaged"
        yield Finding(name, f"{type(error).__name__}: {error}", change)
        return
    stores[split] = store
    n = sum(entry["rows"] for entry in store.manifest["shards"])
    bad = f", {n - store.n} of them bad" if store.n < n else ""
    result = f"{count(n, 'row')} of {store.dim}{bad}, checksums fit"
    yield Finding(name, f"{result}; teacher {store.fingerprint.teacher}")
    values = store.manifest["statistics"]
    yield Finding(
        f"embeddings: {split}",
        f"from {values['min']:.3g} to {values['max']:.3g}, mean norm "
        f"{values['mean_norm']:.3g}, {count(values['zero_rows'], 'zero row')}",
    )
    if odd := odd_rows((block for _, block in store.blocks(_BLOCK_ROWS)), n_clusters=2):
        useless = "all rows are the same" in odd
        change = "check TEACHER, TEACHER_WEIGHTS and some samples" if useless else ""
        yield Finding(f"embeddings: {split}, odd rows", odd, change, note=not useless)


def _first_batches(
    heads: HeadSettings,
    n_neighbors: int,
    pca_dim: int | None,
    store: EmbeddingStore,
    n_clusters: int,
    precision: Precision,
) -> Iterator[Finding]:
    """Train a few steps on a random sample of the rows, and report loss, gradients and faults."""
    rows = sample_rows(store.n, heads.seed, _PAIRED_ROWS)
    embeddings = store.gather(rows)
    neighbors = nearest_neighbors(embeddings, min(n_neighbors, len(rows) - 1))
    projection = Projection.fit(embeddings, pca_dim)

    def gather(wanted: Tensor) -> Tensor:
        return projection(store.gather(rows[wanted]))

    trainer = make_trainer(heads, projection.dim, n_clusters, precision)
    plan = make_plan(heads, trainer, neighbors, gather)
    records: list[LogRecord] = []
    events: list[Event] = []
    stopped = ""
    try:
        run_loop(
            HeadsLearner(trainer, plan, gather, on_events=events.extend),
            log_every=1,
            on_log=records.append,
            should_stop=lambda: len(records) == _STEPS,
        )
    except TooFewHealthyParts as error:
        stopped = str(error)
    loss = _range([record.loss for record in records])
    norm = _range([record.grad_norm for record in records])
    paired = "" if len(rows) == store.n else f", on {len(rows):,} of {store.n:,} rows"
    yield Finding(
        _FIRST_BATCHES,
        f"{count(len(records), 'step')} of {count(heads.n_heads, 'head')}, {n_clusters} "
        f"clusters{paired}: loss {loss}, gradient norm {norm}",
    )
    if stopped:
        yield Finding("run: stopped", stopped, f"{FOLLOW_MESSAGE}, once the faults below are fixed")
    yield from faults_of(events, [store.ids[i] for i in rows.tolist()], precision)
    norms = zip(*(record.grad_norm for record in records), strict=True)
    if dead := [str(head) for head, of_steps in enumerate(norms) if not any(of_steps)]:
        yield Finding(
            "run: dead heads",
            f"head {', '.join(first_few(dead, 5))}: the gradient is exactly zero at every step",
            "raise STUDENT_TEMP and TEACHER_TEMP to 0.1; look for a clamp or a detach in your HEAD",
        )


def faults_of(events: list[Event], samples: list[str], precision: Precision) -> Iterator[Finding]:
    """Report the guard's events of the first steps, one finding for each stage and reason."""
    scaled = f"set USE_FP16 = False; {CHANGES['gradient']}"
    changes = CHANGES | ({"gradient": scaled} if precision.scale else {})
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        if event.stage in changes:
            groups.setdefault((event.stage, event.reason), []).append(event)
    for (stage, reason), group in groups.items():
        parts = first_few(list(dict.fromkeys(event.part for event in group)), 5)
        steps = {event.step: None for event in group}
        result = f"{', '.join(parts)}: {reason}, at step {', '.join(map(str, steps))}"
        if stage == "input" and group[0].value is not None:
            result += f"; sample {samples[int(group[0].value)]!r}"
        # In the first steps the loss scale is still being adjusted.
        adjusting = stage == "gradient" and precision.scale and len(steps) < _STEPS
        yield Finding(f"run: {stage}", result, changes[stage], note=adjusting)


def _range(values: list[list[float]]) -> str:
    low, high = torch.tensor(values or [[math.nan]]).aminmax()
    return f"{low:.3g} to {high:.3g}"
