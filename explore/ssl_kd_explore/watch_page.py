"""Write `watch.html`, a self-contained page on what is new and what drifted in a watched folder."""

from functools import partial
from pathlib import Path
from typing import Any

from ssl_kd.core.colors import tint
from ssl_kd.core.pages.wording import base_name
from ssl_kd.core.pages.write import write_page
from ssl_kd.vision.report.gallery import strip
from ssl_kd.vision.report.results import RunResults
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.settings import VisionSettings


def write_watch_page(samples: Samples, summary: dict[str, Any]) -> Path:
    """Write `watch.html` into the folder of the last run, and return its path."""
    newest = summary["rounds"][-1]
    content = {
        "title": f"{base_name(summary['folder'])} · ssl_kd watch",
        "eyebrow": f"{summary['folder']} · round {newest['round']} · {newest['time']}",
        "headline": newest["sentences"][0],
        "lead": " ".join(f"{text}." for text in newest["sentences"][1:]),
        "summary": summary,
        "clusters": sorted({number for each in summary["rounds"] for number in each["shares"]}),
        "waiting": [f"{file}: {reason}" for file, reason in summary["waiting"].items()],
        "pictures_of": partial(strip, samples),
        "tint": tint,
    }
    run, defaults = RunResults.read(samples.path), VisionSettings().to_dict()
    return write_page(run, ("ssl_kd_explore", "watch.html"), content, "watch.html", defaults)
