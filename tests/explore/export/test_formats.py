"""The files that other programs read."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes
from xml.etree import ElementTree

import numpy as np
import pytest
from huggingface_hub import DatasetCard, ModelCard
from PIL import Image
from pyarrow import parquet

from ssl_kd.core.errors import InputError
from ssl_kd.vision.data import FolderDataset, open_dataset
from ssl_kd.vision.evaluate import METRICS
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.decisions import Curation
from ssl_kd_explore.export import export
from ssl_kd_explore.export.content import Content
from tests.faults.matrix import row as fault

RING = 'ring "o" <&>'


@pytest.fixture
def content(photo_run):
    return replace(Content.of(Samples(photo_run)), names={1: RING})


def test_folders_of_links_are_data_for_another_run(content, tmp_path):
    out = export(content, "folders", tmp_path / "by cluster")
    data = open_dataset(str(out), "train", labels="folders")
    assert isinstance(data, FolderDataset) and data.class_names is not None
    assert len(data) == len(content) and data.labels is not None
    assert np.bincount(data.labels).tolist() == np.bincount(content.clusters).tolist()
    assert np.array_equal(np.asarray(data.image(0)).shape, (8, 8))
    assert f"{len(data)} of them links to files in" in data.usage.used


def test_fiftyone_samples(photo_run, content, tmp_path):
    out = export(content, "fiftyone", tmp_path / "out")
    written = json.loads((out / "samples.json").read_text())["samples"]
    for sample, row in zip(written, content.table.to_pylist(), strict=True):
        assert sample["filepath"].endswith(row["file"]) and sample["tags"] == [row["split"]]
        confident = {"label": row["cluster_name"], "confidence": row["confidence"]}
        assert sample["cluster"] == {"_cls": "Classification"} | confident
        assert sample["label"]["label"] == row["label"] and sample["outlier"] == row["outlier"]
        assert sample["second"] == row["second"]
        assert sample["level_4"]["label"] == str(row["level_4"])


def tasks_of(out):
    return json.loads((out / "tasks.json").read_text())


def test_label_studio_tasks(content, tmp_path):
    out = export(content, "label-studio", tmp_path / "out")
    interface = ElementTree.parse(out / "label_config.xml").getroot()
    choices = [choice.get("value") for choice in interface.iter("Choice")]
    assert choices == ["0", RING, "2"]
    for task, row in zip(tasks_of(out), content.table.to_pylist(), strict=True):
        url = task["data"]["image"].removeprefix("/data/local-files/?d=")
        assert " " not in url and ("/" + unquote(url)).endswith(row["file"])
        (prediction,) = task["predictions"]
        (result,) = prediction["result"]
        assert result["value"]["choices"] == [row["cluster_name"]]
        assert prediction["score"] == row["confidence"]
    served = export(content, "label-studio", tmp_path / "served", url="https://a.org/p/")
    first = tasks_of(served)[0]["data"]
    assert first["image"] == "https://a.org/p/train/" + first["file"].replace(" ", "%20")


@fault(175)
@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux only")
@pytest.mark.parametrize("url", [None, "https://a.org/p"])
def test_a_file_name_that_is_not_utf8_is_a_url_of_its_bytes(content, tmp_path, monkeypatch, url):
    odd = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9 \xf0.png"))
    Image.new("L", (8, 8)).save(odd)
    monkeypatch.setattr(Samples, "image_file", lambda self, row: odd)
    out = export(content, "label-studio", tmp_path / "out", url=url)
    image = tasks_of(out)[0]["data"]["image"]
    assert image.endswith("caf%E9%20%F0.png") and unquote_to_bytes(image).endswith(
        odd.name.encode("utf-8", "surrogateescape")
    )


def test_cards_have_the_scores_of_the_run(content, tmp_path, caplog):
    out = export(content, "hf-model", tmp_path / "model")
    card = ModelCard.load(out / "README.md")
    assert card.data.to_dict()["library_name"] == "ssl_kd"
    table = [row for row in content.samples.metrics["table"] if row["name"] == "consensus"]
    assert " | ".join(metric.description for metric in METRICS.values()) in card.text
    for row in table:
        scores = " | ".join(f"{row[metric]:.4f}" for metric in METRICS)
        assert f"| {row['split']} | {scores} |" in card.text
    out = export(content, "hf-dataset", tmp_path / "data")
    card = DatasetCard.load(out / "README.md")
    data: Any = card.data
    assert data.configs[0]["data_files"][0]["path"] == "clusters.parquet"
    assert f"{len(content)} samples" in card.text and "`cluster_name`" in card.text
    assert parquet.read_table(out / "clusters.parquet").num_rows == len(content)
    assert "absolute paths" not in caplog.text
    export(replace(content, names={1: "/home/anna"}), "hf-dataset", tmp_path / "paths")
    assert "the columns cluster_name have absolute paths" in caplog.text
    content.samples.metrics = {**content.samples.metrics, "table": []}
    text = (export(content, "hf-model", tmp_path / "unlabeled") / "README.md").read_text()
    assert "no scores" in text


@pytest.mark.parametrize("to", ["folders", "fiftyone", "label-studio"])
def test_features_have_no_pictures(content, tmp_path, monkeypatch, to):
    monkeypatch.setattr(Samples, "image_file", lambda self, row: None)
    with pytest.raises(InputError, match="not picture files"):
        export(content, to, tmp_path / to)


def test_decisions_that_are_too_long_for_a_file_are_left_out(
    content, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("ssl_kd_explore.export.parquet_table.LARGEST", 3)
    out = export(replace(content, decisions="long"), "parquet", tmp_path / "a.parquet")
    assert b"ssl_kd.decisions" not in (parquet.read_metadata(out).metadata or {})
    assert "no copy of the decisions" in caplog.text


@pytest.mark.parametrize("to", ["parquet", "folders", "fiftyone", "label-studio", "hf-dataset"])
def test_every_format_carries_the_decisions(photo_run, tmp_path, to):
    run = shutil.copytree(photo_run, tmp_path / "run")
    curation = Curation.open(run, by="änna")
    curation.rename(0, "zeros")
    curation.check([2, 5])
    curation.exclude([3])
    curation.undo()
    checked = []
    out = export(Content.of(Samples(run)), to, tmp_path / ("a.parquet" if to == "parquet" else "a"))
    if to == "parquet":
        text = parquet.read_metadata(out).metadata[b"ssl_kd.decisions"].decode()
    else:
        text = (out / "curation.jsonl").read_text()
    if to == "hf-dataset":  # which is published
        assert "by" not in text and not curation.apply(out / "curation.jsonl")
        metadata = parquet.read_metadata(out / "clusters.parquet").metadata
        assert metadata[b"ssl_kd.decisions"].decode() == text
    else:
        assert text == curation.path.read_text()
    if to == "fiftyone":
        samples = json.loads((out / "samples.json").read_text())["samples"]
        checked = ["checked" in sample.pop("tags") for sample in samples]
        assert not any("checked" in sample for sample in samples)
    elif to == "label-studio":
        checked = [task["meta"]["checked"] for task in tasks_of(out)]
    elif to != "folders":
        file = out if to == "parquet" else out / "clusters.parquet"
        checked = parquet.read_table(file).column("checked").to_pylist()
    assert to == "folders" or np.flatnonzero(checked).tolist() == [2, 5]
    fresh = shutil.copytree(photo_run, tmp_path / "fresh")
    (tmp_path / "lines.jsonl").write_text(text)
    assert len(Curation.open(fresh).apply(tmp_path / "lines.jsonl")) == 4
