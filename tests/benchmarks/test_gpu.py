"""Test `benchmarks.gpu` on a machine without a GPU."""

import json
import sys

import pytest
import torch

from benchmarks import gpu


def test_without_a_gpu_one_line_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit, match="needs a CUDA device, and torch sees none"):
        gpu.main()


def test_a_part_that_fails_is_a_row_and_the_others_are_measured():
    def fails():
        yield gpu.Row("first", "1 ms", "2 ms", True)
        raise RuntimeError("no\nmemory")

    rows = gpu.collected({"a": fails, "b": lambda: iter([gpu.Row("last", "3 ms", "2 ms", False)])})
    assert [(row.what, row.met) for row in rows] == [("first", True), ("a", False), ("last", False)]
    written = gpu.table(rows, "A device")
    assert "| a | failed: RuntimeError: no memory |  | **no** |" in written
    assert "| first | 1 ms | 2 ms | yes |" in written


@pytest.mark.slow
def test_its_code_runs_on_a_cpu_and_claims_nothing(monkeypatch, tmp_path, capsys):
    pytest.importorskip("transformers")
    words = ["--device", "cpu", "--out", str(tmp_path), "--only", "extraction", "language"]
    monkeypatch.setattr(sys, "argv", ["gpu", *words])
    gpu.main()
    rows = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["met"] for row in rows] == [None] * 4
    assert (
        (tmp_path / "gpu.md").read_text().startswith("CPU, tiny shapes: these figures mean nothing")
    )
    ours = next(row["value"] for row in rows if row["what"].endswith("fp32, ours"))
    assert "tokens/s" in ours and "% of the pace of forward passes" in capsys.readouterr().out
    assert not any("failed" in row["value"] for row in rows)
