"""`ssl_kd.guard`, the former name of `firstnan`, leads to the same objects."""

import importlib
import re
import runpy
import sys

import pytest

import firstnan
import ssl_kd.guard
from tests.documents import ROOT


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


def test_each_public_module_is_in_the_table_of_the_api():
    page = (ROOT / "docs" / "api" / "guard.md").read_text(encoding="utf-8")
    files = (ROOT / "firstnan").glob("[!_]*.py")
    assert {file.stem for file in files} == set(re.findall(r"`firstnan\.([a-z_]+)`", page))


def test_private_modules_are_imported_by_the_guard_alone():
    for package in ("ssl_kd", "explore", "scripts", "heads", "docs"):
        for file in (ROOT / package).rglob("*.py"):
            assert "firstnan._" not in file.read_text(encoding="utf-8"), file
