"""The colors of clusters: far apart, visible on both pages, and the same ones everywhere."""

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from ssl_kd.core.colors import CLUSTERS, MISSING, RAMP, tint
from ssl_kd.core.pages import figures
from ssl_kd_explore import explore

PAGE = Path(explore.__file__).parent / "page"
# Linear sRGB to the XYZ of its white, IEC 61966-2-1.
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
# What eyes without red or green cones see, in linear sRGB (Machado et al., 2009, severity 1).
COLOR_BLIND = {
    "red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998]],
    "green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
              [-0.011820, 0.042940, 0.968881]],
}  # fmt: skip


def linear(colors):
    values = np.array([to_rgb(color) for color in colors])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIE Lab of linear sRGB `[n, 3]`, D65."""
    ratio = rgb @ XYZ.T / XYZ.sum(1)
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], 1)


def least_distance(points):
    return min(np.linalg.norm(a - b) for a, b in itertools.combinations(points, 2))


def test_the_colors_differ_by_more_than_people_overlook():
    assert len(CLUSTERS) >= 100 and CLUSTERS[:1] == ("#3f90da",)
    assert least_distance(lab(linear((*CLUSTERS, MISSING)))) > 16
    assert least_distance(lab(linear((*CLUSTERS[:24], MISSING)))) > 25


@pytest.mark.parametrize("cones", COLOR_BLIND)
def test_color_blind_readers_tell_the_first_twelve_apart(cones):
    seen = np.clip(linear(CLUSTERS[:12]) @ np.transpose(COLOR_BLIND[cones]), 0, 1)
    assert least_distance(lab(seen)) > 14


def test_every_color_shows_on_a_light_and_on_a_dark_page():
    style = (PAGE / "explore.css").read_text()
    grounds = re.findall(r"--(?:page|card): (#\w{6})", style)
    assert len(grounds) == 4  # light and dark
    for ground in grounds:
        lights = linear([ground, *CLUSTERS]) @ XYZ[1] + 0.05
        ratio = np.maximum(lights[1:], lights[0]) / np.minimum(lights[1:], lights[0])
        assert ratio.min() > 1.8, (ground, CLUSTERS[int(ratio.argmin())])  # WCAG contrast


def test_a_cluster_has_one_color_in_the_report_and_on_the_page():
    shown = figures.cluster_map(np.eye(24)[:, :2], np.arange(24))
    assert all(tint(k) == CLUSTERS[k] for k in range(24)) and shown
    code = {file.name: file.read_text() for file in PAGE.glob("*.js")}
    assert not [name for name, text in code.items() if any(c in text for c in CLUSTERS)]
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    table = json.dumps({"clusters": CLUSTERS, "missing": MISSING, "ramp": RAMP})
    script = f"""{code["colors.js"]}\nsetColors({table});
    console.log(JSON.stringify([...Array(300).keys()].map(clusterColor).concat(
      clusterColor(-1), rampColor(0), rampColor(1))))"""
    words = ["node", "--input-type=module", "-e", script]
    tints = json.loads(subprocess.run(words, capture_output=True, check=True, timeout=60).stdout)
    assert tints[:-3] == [tint(k) for k in range(300)]
    assert tints[-3:] == [MISSING, RAMP[0], RAMP[-1]]
