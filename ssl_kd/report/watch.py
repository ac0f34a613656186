"""Write `watch.html`, a self-contained page on what is new and what drifted in a watched folder."""

from pathlib import Path
from typing import Any

from ssl_kd.datasets.decode import decoded
from ssl_kd.report.figures import tint
from ssl_kd.report.gallery import thumbnail
from ssl_kd.report.results import RunResults
from ssl_kd.report.wording import DASH, base_name
from ssl_kd.report.write import write_page
from ssl_kd.vision.samples import Samples

SHOWN = 10  # rounds with pictures and shares, the newest first
LISTED = 20  # names of files in a list


def write_watch_page(samples: Samples, summary: dict[str, Any]) -> Path:
    """Write `watch.html` into the folder of the last run, and return its path."""
    newest_first = summary["rounds"][::-1]
    newest, shown, first = newest_first[0], newest_first[:SHOWN], newest_first[SHOWN:][-1:]
    columns = [*first, *shown[::-1]]
    problems = {
        "Replaced since their round (give a changed picture a new name to add it)": "replaced",
        "Deleted since their round (their rows and numbers stay)": "deleted",
        "Waiting for a later round": "waiting",
    }
    waiting = [f"{file}: {reason}" for file, reason in summary["waiting"].items()]
    files = summary | {"waiting": waiting}
    lists = [(title, files[key]) for title, key in problems.items() if files[key]]
    content = {
        "title": f"{base_name(summary['folder'])} · ssl_kd watch",
        "eyebrow": f"{summary['folder']} · round {newest['round']} · {newest['time'] or DASH}",
        "headline": newest["sentences"][0],
        "lead": " ".join(f"{text}." for text in newest["sentences"][1:]),
        "rounds": [_shown(samples, about) for about in shown],
        "all_rounds": newest_first,
        "columns": columns,
        "clusters": sorted({k for about in columns for k in about["shares"]}),
        "lists": [(title, files[:LISTED], len(files)) for title, files in lists],
    }
    return write_page(RunResults.read(samples.path), "watch.html", content, "watch.html")


def _shown(samples: Samples, about: dict[str, Any]) -> dict[str, Any]:
    """Add the pictures of new clusters and of unusual samples to the description of a round."""
    clusters = [
        cluster | {"color": tint(cluster["cluster"]), "pictures": _pictures(samples, cluster)}
        for cluster in about["new_clusters"]
    ]
    unusual = _pictures(samples, about.get("outliers", {"rows": [], "files": []}))
    return about | {"new_clusters": clusters, "unusual": unusual}


def _pictures(samples: Samples, listed: dict[str, Any]) -> list[dict[str, str]]:
    images = [decoded(samples.image, row) for row in listed["rows"]]
    pairs = zip(listed["files"], images, strict=True)
    return [thumbnail(image) | {"name": name} for name, image in pairs if image is not None]
