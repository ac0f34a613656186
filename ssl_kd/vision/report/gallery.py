"""The most typical samples of each cluster: small pictures, beginnings of texts and of sounds."""

import base64
import io
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ssl_kd.core.colors import tint
from ssl_kd.core.errors import UnreadableSample, printable
from ssl_kd.core.images.decode import decoded
from ssl_kd.vision.cluster_words import MOST_TEXTS, ClusterWords
from ssl_kd.vision.data.samples import NOUNS
from ssl_kd.vision.data.sounds import Sound, resampled
from ssl_kd.vision.data.usage import counted
from ssl_kd.vision.evaluate.sample import random_rows
from ssl_kd.vision.model import has_pictures
from ssl_kd.vision.report.decided import Decided
from ssl_kd.vision.report.results import RunResults
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.sources import SourceChanged

logger = logging.getLogger(__name__)

MAX_CLUSTERS, MAX_PICTURES = 100, 600
TEXTS = 3, 2  # typical and doubtful texts of a cluster
MAX_CHARACTERS = 280
SOUND_RATE, SOUND_SECONDS = 16_000, 3  # of the beginning of a sound that the page plays
MAX_SOUND_BYTES = 4 << 20


@dataclass(frozen=True)
class ShownSamples:
    """What shows the samples of a run.

    Attributes:
        kind: `image`, `text` or `audio`.
        load: function from rows of the shown split to their pictures, texts or `Sound`s; None for
            a sample that cannot be read. It opens the data set, and raises if that fails.
    """

    kind: str
    load: Callable[[list[int]], list[Any]]


def run_samples(run_dir: Path) -> ShownSamples | None:
    """Return what shows the samples of a finished run; None if they are features."""
    run = RunResults.read(Path(run_dir))
    kind = run.metrics.get("dataset", {}).get("kind", "features")
    kind = "image" if has_pictures(run.metrics) else kind
    if run.is_language or kind == "features":
        return None

    def load(rows: list[int]) -> list[Any]:
        samples = Samples(run_dir)
        first = samples.splits[run.split].start

        def sample(row: int) -> Any:
            try:
                return shown_sample(samples, kind, row)
            except SourceChanged as error:  # the others are shown
                logger.warning("a sample is left out: %s", error)
            except FileNotFoundError:  # of a table that has changed, as a warning says
                if kind != "text":
                    raise
            return None

        return [sample(first + row) for row in rows]

    return ShownSamples(kind, load)


def shown_sample(samples: Samples, kind: str, row: int) -> Any:
    """Return the picture, text or `Sound` of a sample; None if it cannot be read."""
    if kind == "image":
        return decoded(samples.image, row)
    if kind == "text":
        return samples.text(row)
    data, place = samples.row_of_data(row) or (None, 0)
    try:
        return None if data is None else data.sample(place)
    except UnreadableSample as error:
        logger.warning("a sound is left out: %s", error)
        return None


def gallery(
    run: RunResults, shown: ShownSamples | None, sizes: Mapping[int, int], decided: Decided | None
) -> dict[str, Any]:
    """Return caption, color and typical samples of each cluster, as the page shows them.

    Texts and sounds have doubtful samples as well: those with the lowest confidence. `hidden`
    counts the clusters that are left out; `missing` says why there are no samples.
    """
    if shown is None:
        return _nothing("pictures", "this data has features, not images")
    noun = "picture" if shown.kind == "image" else NOUNS[shown.kind]
    typical = _typical(run, decided)
    if not typical:
        return _nothing(f"{noun}s", "arrays.npz does not name typical samples")
    filled = [k for k in typical if sizes.get(k) != 0]
    largest = sorted(sorted(filled, key=lambda k: -sizes.get(k, -1))[:MAX_CLUSTERS])
    n_typical, n_doubtful = _numbers(shown.kind, min(len(typical), MAX_CLUSTERS), len(largest))
    rows_of = {k: typical[k][: n_typical or 1] for k in largest}
    doubtful = _doubtful(run, rows_of, n_doubtful)
    rows = [row for of in (rows_of, doubtful) for k in largest for row in of[k]]
    try:
        loaded = zip(rows, shown.load(rows), strict=True) if n_typical else []
        samples = {row: card(shown.kind, value) for row, value in loaded if value is not None}
    except Exception as error:  # the samples may no longer exist; the rest of the page remains
        logger.warning("the report has no %ss: %s", noun, error)
        return _nothing(f"{noun}s", f"{type(error).__name__}: {error}")
    if not n_typical:
        samples = {row: {} for row in rows}
    if lost := len({*rows} - {*samples}):
        n = len({*rows})
        logger.warning("the report lacks %d of %d %ss: unreadable or changed", lost, n, noun)
    if not samples:
        return _nothing(f"{noun}s", "none of them can be read")
    table = run.assignments
    for row, sample in samples.items():
        is_listed = row < table.num_rows
        sample["name"] = printable(str(table.column("file")[row])) if is_listed else f"row {row}"
    labels = _label_counts(run)
    new = {c["cluster"] for c in run.metrics.get("extended", {}).get("new_clusters", [])}
    names = _names(run, shown, decided)
    columns = max(len(rows_of[k]) for k in largest)
    clusters = [
        {
            **_caption(_title(k, k in new, names), sizes.get(k), labels.get(k), shown.kind),
            "color": tint(k),
            "samples": [samples[row] for row in rows_of[k] if row in samples],
            "doubtful": [samples[row] for row in doubtful[k] if row in samples],
        }
        for k in largest
    ]
    return {
        "kind": shown.kind,
        "clusters": [cluster for cluster in clusters if cluster["samples"]],
        "hidden": len(filled) - len(largest),
        "columns": columns if columns <= 8 else -(-columns // 2),
        "seconds": SOUND_SECONDS if n_typical else 0,
    }


def _numbers(kind: str, n_clusters: int, n_shown: int) -> tuple[int, int]:
    """Return how many typical and doubtful samples of a cluster fit on the page."""
    if kind == "image":
        return max(1, min(12, MAX_PICTURES // n_clusters)), 0
    if kind == "text":
        return TEXTS
    fitting = MAX_SOUND_BYTES // (2 * SOUND_RATE * SOUND_SECONDS * max(1, n_shown))
    return (2, 1) if fitting >= 3 else (int(fitting > 0), 0)


def _doubtful(
    run: RunResults, typical: Mapping[int, Sequence[int]], number: int
) -> dict[int, list[int]]:
    """Return the rows of the least confident samples of each cluster that are not typical."""
    doubtful: dict[int, list[int]] = {k: [] for k in typical}
    if not number or not run.assignments.num_rows:
        return doubtful
    clusters = np.asarray(run.assignments["cluster"])
    order = np.argsort(np.asarray(run.assignments["confidence"]), kind="stable")
    for k, shown in typical.items():
        rows = order[clusters[order] == k].tolist()[: number + len(shown)]
        doubtful[k] = [row for row in rows if row not in shown][:number]
    return doubtful


def _names(run: RunResults, shown: ShownSamples, decided: Decided | None) -> dict[int, str]:
    """Return the names of the clusters that have one: of the user, else of words of the texts."""
    given = {} if decided is None else dict(decided.names)
    if shown.kind != "text" or not run.assignments.num_rows:
        return given
    rows = random_rows(run.assignments.num_rows, MOST_TEXTS, 0)
    texts = [text or "" for text in shown.load(rows.tolist())]
    clusters = np.asarray(run.assignments["cluster"])[rows]
    return ClusterWords(texts).names(clusters) | given


def _typical(run: RunResults, decided: Decided | None) -> dict[int, list[int]]:
    """Return the rows of typical samples of each cluster, best first."""
    if decided is not None:
        return decided.typical(np.asarray(run.assignments["confidence"]))
    rows = run.arrays.get("typical", np.empty((0, 0), np.int64))
    return {k: [int(row) for row in of_cluster if row >= 0] for k, of_cluster in enumerate(rows)}


def _title(cluster: int, is_new: bool, names: Mapping[int, str]) -> str:
    name = names.get(cluster)
    title = f"{name} (cluster {cluster})" if name else f"Cluster {cluster}"
    return title + (" (new)" if is_new else "")


def _nothing(what: str, reason: str) -> dict[str, Any]:
    return {"clusters": [], "missing": f"There are no {what}: {reason}."}


def _label_counts(run: RunResults) -> dict[int, Counter[str]]:
    """Count the samples of each class in each cluster; unknown labels are left out."""
    counts: dict[int, Counter[str]] = {}
    if "label" not in run.assignments.column_names:
        return counts
    class_names = run.metrics.get("dataset", {}).get("class_names") or []
    names = {str(number): str(name) for number, name in enumerate(class_names)}
    pairs = run.assignments.group_by(["cluster", "label"]).aggregate([([], "count_all")])
    for pair in pairs.to_pylist():
        label = str(pair["label"] or "-1")
        if label != "-1":
            name = names.get(label, label)
            counts.setdefault(pair["cluster"], Counter())[name] += pair["count_all"]
    return counts


def _caption(
    title: str, size: int | None, labels: Counter[str] | None, kind: str
) -> dict[str, Any]:
    """Return the title of a cluster, and a line with its size and most frequent labels."""
    about = "" if size is None else counted(size, NOUNS[kind])
    if labels:
        (name, count), total = labels.most_common(1)[0], labels.total()
        title += f" · {name}" if count >= 0.5 * total else " · mixed"
        about += f", {100 * count / total:.0f} % of them {name}"
        others = [n for n, c in labels.most_common(3)[1:] if c >= 0.1 * total]
        about += f"; also {', '.join(others)}" if others else ""
    return {"title": title, "about": about}


def strip(samples: Samples, rows: list[int]) -> list[dict[str, str]]:
    """Return small pictures or texts of samples, named by their files, without unreadable ones."""
    kind = "text" if samples.kind == "text" else "image"
    shown = [shown_sample(samples, kind, row) for row in rows]
    names = [samples.table.column("file")[row].as_py() for row in rows]
    named = zip(names, shown, strict=True)
    return [card(kind, value) | {"name": name} for name, value in named if value is not None]


def card(kind: str, value: Any) -> dict[str, str]:
    """Return what a page shows of a picture, a text or a sound."""
    if kind == "image":
        return thumbnail(value)
    return {"text": excerpt(value)} if kind == "text" else {"sound": audio_uri(value)}


def excerpt(text: str) -> str:
    """Return the beginning of a text in one line, cut between words if that is possible."""
    text = printable(" ".join(text.split()))
    if len(text) <= MAX_CHARACTERS:
        return text
    cut = text[:MAX_CHARACTERS]
    return f"{cut.rpartition(' ')[0] or cut} …"


def audio_uri(sound: Sound) -> str:
    """Return the first seconds of a sound as the data URI of a WAV file of at most 96 KB."""
    from scipy.io import wavfile

    start = sound._replace(samples=sound.samples[: SOUND_SECONDS * sound.rate])
    samples = resampled(start, SOUND_RATE) if sound.rate > SOUND_RATE else start.samples
    target = io.BytesIO()
    values = np.round(32767 * samples.clip(-1, 1)).astype(np.int16)
    wavfile.write(target, min(sound.rate, SOUND_RATE), values)
    return f"data:audio/wav;base64,{base64.b64encode(target.getvalue()).decode()}"


def thumbnail(image: Image.Image) -> dict[str, str]:
    """Return a picture as a data URI of a few kilobytes, with its kind: `tiny` or `photo`."""
    tiny = max(image.size) <= 32
    small = image.convert("L" if image.mode in ("L", "1") else "RGB")
    target = io.BytesIO()
    if tiny:
        small.save(target, "PNG", optimize=True)
    else:
        small.thumbnail((96, 96))
        small.save(target, "JPEG", quality=78)
    kind = "png" if tiny else "jpeg"
    data = base64.b64encode(target.getvalue()).decode()
    return {"source": f"data:image/{kind};base64,{data}", "kind": "tiny" if tiny else "photo"}
