"""`ssl_kd.guard`, the former name of `firstnan`, leads to the same objects."""

import importlib
import runpy
import sys

import pytest

import firstnan
import ssl_kd.guard
from ssl_kd import errors


@pytest.mark.parametrize("name", ["diagnosis", "faults", "finite", "loop", "microscope", "watch"])
def test_a_documented_module_is_the_module_of_firstnan(name):
    module = importlib.import_module(f"firstnan.{name}")
    assert importlib.import_module(f"ssl_kd.guard.{name}") is module
    assert getattr(ssl_kd.guard, name) is module


def test_all_public_names_and_errors_are_those_of_firstnan():
    assert set(ssl_kd.guard.__all__) == set(firstnan.__all__)
    for name in firstnan.__all__:
        assert getattr(ssl_kd.guard, name) is getattr(firstnan, name)
    assert issubclass(firstnan.TooFewHealthyParts, errors.UserError)


def test_the_former_command_still_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["guard", str(tmp_path / "none.py")])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("ssl_kd.guard", run_name="__main__")
    assert end.value.code == 2 and "none.py, which is not a file" in capsys.readouterr().err
