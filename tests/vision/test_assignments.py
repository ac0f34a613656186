"""Assignments of few rows and of very many, the same in both formats."""

import csv

import numpy as np
import pytest
import torch
from pyarrow import parquet

import ssl_kd.vision.assignments as written
from ssl_kd.vision.extend import extend, inherited
from ssl_kd.vision.model import ClusterModel
from ssl_kd.vision.report import write_report
from ssl_kd.vision.report.results import read_assignments
from ssl_kd.vision.run import run
from ssl_kd.vision.settings import VisionSettings
from tests.vision.test_run import FAST, assignments


@pytest.fixture(scope="module")
def blobs():
    g = np.random.default_rng(0)
    labels = g.integers(4, size=260)
    x = 3 * g.normal(size=(4, 8))[labels] + g.normal(size=(260, 8))
    return x.astype(np.float32), labels


@pytest.fixture(scope="module")
def both(tmp_path_factory, blobs):
    """The same run twice: one leaves a CSV, the other Parquet in groups of 50 rows."""
    x, labels = blobs
    folder = tmp_path_factory.mktemp("both")
    labels = np.where(np.arange(260) % 5 == 0, -1, labels)  # some are not known
    np.savez(folder / "a_train.npz", features=x[:200], labels=labels[:200])
    np.savez(folder / "a_test.npz", features=x[200:], labels=labels[200:])
    settings = VisionSettings(
        **FAST,
        dataset=str(folder / "a_train.npz"),
        dataset_test=str(folder / "a_test.npz"),
        embeddings_dir=str(folder / "embeddings"),
        runs_dir=str(folder / "runs"),
        run_name="csv",
    )
    small = run(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written, "CSV_ROWS", 259)
        patch.setattr(written, "ROWS_PER_GROUP", 50)
        large = run(settings.replace(run_name="parquet"))
    return small, large


def read(path):
    """The rows of a Parquet file, as text of a CSV would be."""
    return [
        {
            name: "" if v is None else f"{v:.4f}" if isinstance(v, float) else str(v)
            for name, v in row.items()
        }
        for row in parquet.read_table(path).to_pylist()
    ]


def test_from_a_million_rows_on_it_is_parquet_with_the_same_content(both):
    small, large = both
    assert not (small / "assignments.parquet").exists()
    assert not (large / "assignments.csv").exists()
    assert written.assignments_of(small).name == "assignments.csv"
    path = written.assignments_of(large)
    assert read(path) == assignments(small)
    file = parquet.ParquetFile(path)
    assert file.num_row_groups == 4 + 2  # of 200 and of 60
    kinds = {field.name: str(field.type) for field in file.schema_arrow}
    assert kinds["file"] == "string" and kinds["cluster"] == kinds["second"] == "int32"
    assert kinds["confidence"] == kinds["second_confidence"] == kinds["outlier"] == "float"


@pytest.mark.parametrize("split", ["train", "test", "nobody"])
def test_a_report_reads_the_same_from_both(both, split):
    small, large = (read_assignments(folder, split) for folder in both)
    n = {"train": 200, "test": 60, "nobody": 0}[split]
    assert small.num_rows == large.num_rows == n
    for name in ("file", "cluster"):
        assert small[name].to_pylist() == large[name].to_pylist()
    labels = [[label or "" for label in table["label"].to_pylist()] for table in (small, large)]
    assert labels[0] == labels[1] and set(labels[0]) == ({"", "0", "1", "2", "3"} if n else set())
    np.testing.assert_allclose(small["confidence"], large["confidence"], atol=5.1e-5)
    written = [row["file"] for row in assignments(both[0]) if row["split"] == split]
    assert small["file"].to_pylist() == written


def test_an_extension_keeps_the_format_and_every_row(both, blobs, tmp_path):
    for parent in both:
        np.savez(tmp_path / "new.npz", features=blobs[0][:70] + 0.1)
        given = {
            "dataset": str(tmp_path / "new.npz"),
            "extend": str(parent),
            "runs_dir": str(tmp_path / f"runs-{parent.name}"),
            "embeddings_dir": str(tmp_path / "embeddings"),
        }
        done = extend(inherited(VisionSettings(**given), given))
        before, after = written.assignments_of(parent), written.assignments_of(done)
        assert before.name == after.name
        if after.suffix == ".csv":
            assert after.read_bytes().startswith(before.read_bytes())
            with open(after, newline="") as file:
                lines = list(csv.DictReader(file))
        else:
            assert read(after)[:260] == read(before)
            assert read(after) == lines  # those of the CSV, which came first
        assert len(lines) == 330 and lines[-1]["split"] == "extend1" and lines[-1]["label"] == ""
        assert read_assignments(done, "extend1").num_rows == 70
        write_report(done)


def test_the_likeliest_are_the_first_of_all_and_hold_nothing_else(both, blobs):
    model, x = ClusterModel.from_pretrained(both[0]), torch.from_numpy(blobs[0])
    clusters, probabilities = model.likeliest(x, 3)
    whole = model.predict_proba(x).sort(stable=True, dim=-1, descending=True)
    assert torch.equal(clusters, whole.indices[:, :3].int())
    assert torch.equal(probabilities, whole.values[:, :3])
    for found in (clusters, probabilities):
        assert found.untyped_storage().nbytes() == 260 * 3 * 4
