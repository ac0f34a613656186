"""`ssl_kd.guard`, the former name of `firstnan`, leads to the same objects."""

import importlib
import runpy
import sys

import pytest

import firstnan
import ssl_kd.guard


def test_the_former_names_and_command_of_the_guard_lead_to_firstnan(monkeypatch, capsys):
    for name in firstnan.__all__:
        assert getattr(ssl_kd.guard, name) is getattr(firstnan, name)
    assert ssl_kd.guard.Precision is importlib.import_module("ssl_kd.guard.precision").Precision
    for name in ("diagnosis", "faults", "finite", "loop", "microscope", "watch"):
        module = importlib.import_module(f"ssl_kd.guard.{name}")
        assert module is getattr(ssl_kd.guard, name) is importlib.import_module(f"firstnan.{name}")
    monkeypatch.setattr(sys, "argv", ["guard", "none.py"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("ssl_kd.guard", run_name="__main__")
    assert "none.py, which is not a file" in capsys.readouterr().err
