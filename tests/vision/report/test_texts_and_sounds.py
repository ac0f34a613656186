"""Texts and sounds in the report, and the words that name clusters of texts."""

import base64
import html
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.io import wavfile

from ssl_kd.vision.data.sounds import Sound
from ssl_kd.vision.report import Decided, run_samples, write_report
from ssl_kd.vision.report import gallery as module
from ssl_kd.vision.report.gallery import audio_uri, excerpt
from ssl_kd.vision.samples import Samples
from tests.media_runs import HOSTILE, N_TEXTS, TOPICS
from tests.vision.report.reading import write_and_read


@pytest.fixture
def texts(text_run, tmp_path):
    return shutil.copytree(text_run, tmp_path / "texts")


@pytest.fixture
def sounds(sound_run, tmp_path):
    return shutil.copytree(sound_run, tmp_path / "sounds")


def titles(page):
    return re.findall(r"<h3><i [^>]*></i><span>(.*?)</span>", page)


def test_the_report_shows_typical_and_doubtful_texts(text_run):
    page = (text_run / "report.html").read_text(encoding="utf-8")
    metrics = json.loads((text_run / "metrics.json").read_text())
    assert metrics["table"][0]["acc"] == 1
    items = re.findall(r"<li title=\"(\d+)\">(.*?)</li>", page)
    assert len(items) == 3 * 5 and page.count("Least certain") == 3
    samples = Samples(text_run)
    confidence = samples.column("confidence")
    for start in range(0, 15, 5):
        rows = [int(row) for row, _ in items[start : start + 5]]
        assert len({*samples.column("cluster")[rows].tolist()}) == 1
        assert min(confidence[rows[:3]]) >= max(confidence[rows[3:]])
        shown = [html.unescape(text) for _, text in items[start : start + 5]]
        assert shown == [samples.text(row) for row in rows]
    assert f"{N_TEXTS} texts in the right cluster" in page


def test_clusters_are_named_by_words_of_their_topic(text_run):
    page = (text_run / "report.html").read_text(encoding="utf-8")
    named = [re.fullmatch(r"(.*) \(cluster \d\) · (\w+)", title) for title in titles(page)]
    assert len(named) == 3
    for match in named:
        assert match is not None
        assert {*match[1].split(", ")} < {*TOPICS[match[2]].split()}


def test_a_name_of_the_user_comes_before_words(texts):
    clusters = Samples(texts).column("cluster")
    write_report(texts, samples=run_samples(texts), decided=Decided(clusters, {1: "Mine"}, []))
    page = (texts / "report.html").read_text(encoding="utf-8")
    assert [("Mine" in title) for title in titles(page)] == [False, True, False]


def test_a_text_is_escaped(texts):
    with np.load(texts / "arrays.npz") as file:
        arrays = dict(file)
    arrays["typical"][0, 0] = 0  # the row of the hostile text
    np.savez(texts / "arrays.npz", **arrays)
    source, page = write_and_read(texts, samples=run_samples(texts))
    assert HOSTILE in page.text and "<script>" not in source


def test_a_long_text_is_cut_between_words_and_control_characters_are_shown():
    assert excerpt(" one\n two\x1b[2J ") == "one two\\x1b[2J"
    text = excerpt("word " * 100)
    assert 270 < len(text) < 282 and text.endswith("word …")
    assert len(excerpt("w" * 1000)) == 282


def test_changed_texts_are_left_out_of_the_report(texts, tmp_path, caplog):
    config = json.loads((texts / "config.json").read_text())
    content = Path(config["settings"]["DATASET"]).read_text(encoding="utf-8")
    first, last = Samples(texts).text(3), Samples(texts).text(4)
    other = tmp_path / "texts.csv"
    other.write_text(content.replace(str(first), "changed"), encoding="utf-8")
    config["settings"]["DATASET"] = str(other)
    (texts / "config.json").write_text(json.dumps(config))
    shown = run_samples(texts)
    assert shown is not None and shown.load([3, 4]) == [None, last]
    other.unlink()
    _, page = write_and_read(texts, samples=shown)
    assert "There are no texts: none of them can be read." in page.text


def test_the_report_plays_the_beginning_of_sounds(sound_run):
    page = (sound_run / "report.html").read_text(encoding="utf-8")
    sources = re.findall(r'<audio controls preload="none" src="data:audio/wav;base64,(.*?)">', page)
    assert len(sources) == 3 * 3 and "media-src data:" in page
    assert len(page) < 9 * 130_000 + 200_000
    rate, samples = wavfile.read(io.BytesIO(base64.b64decode(sources[0])))
    assert rate == 16_000 and len(samples) == 3 * 16_000 and samples.dtype == np.int16
    name = re.findall(r"<li title=\"(.*?)\"><small>(.*?)</small>", page)[0]
    assert name[0] == name[1] and name[0].endswith(".wav")
    assert "48 sounds in the right cluster" in page
    spectrum = np.abs(np.fft.rfft(samples))
    assert abs(spectrum.argmax() / 3 - int(name[0].partition(" ")[0])) < 0.1 * spectrum.argmax() / 3


def test_many_sounds_are_named_only(sounds, monkeypatch):
    monkeypatch.setattr(module, "MAX_SOUND_BYTES", 2 * 16_000 * 3 * 3 * 2)  # two of each cluster
    _, page = write_and_read(sounds, samples=run_samples(sounds))
    assert page.tags.count("audio") == 3
    monkeypatch.setattr(module, "MAX_SOUND_BYTES", 1000)
    source, page = write_and_read(sounds, samples=run_samples(sounds))
    assert "audio" not in page.tags and source.count(".wav</small>") == 3
    assert "listen to them with ssl_kd explore" in page.text


def test_a_sound_of_low_rate_keeps_it():
    sound = Sound(np.array([0, 0.5, -1.5], np.float32), 8000)
    content = base64.b64decode(audio_uri(sound).partition(",")[2])
    rate, samples = wavfile.read(io.BytesIO(content))
    assert rate == 8000 and samples.tolist() == [0, 16384, -32767]
