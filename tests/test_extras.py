"""A missing package is reported with the extra that installs it."""

import importlib
import importlib.util
import re
import sys

import pytest

from ssl_kd.core.errors import MissingPackage
from ssl_kd.core.runs.board import check_boards
from ssl_kd.doctor import machine
from ssl_kd.vision.data import open_dataset
from ssl_kd.vision.model import folder_of
from ssl_kd.vision.teachers import load_teacher
from ssl_kd.vision.teachers.network import Transform
from tests.documents import ROOT

CARDS = "ssl_kd_explore.export.cards"
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def requirements(extra):
    """Return the names of the packages of an extra."""
    lines = re.search(rf"^{extra} = \[(.*?)\]$", PROJECT, re.M | re.S)
    assert lines is not None, f"pyproject.toml has no extra {extra}"
    return set(re.findall(r'"([\w-]+)', lines[1]))


@pytest.fixture
def lacking(monkeypatch):
    """Return a function that hides a package from those who look whether it is installed."""
    real = importlib.util.find_spec

    def hide(package):
        hidden = lambda name, *args: None if name == package else real(name, *args)  # noqa: E731
        monkeypatch.setattr(importlib.util, "find_spec", hidden)
        monkeypatch.delitem(sys.modules, CARDS, raising=False)  # checks when it is imported

    return hide


@pytest.mark.parametrize(
    ("package", "extra", "needs_it", "what"),
    [
        ("timm", "vision", lambda: load_teacher("dinov2"), "TEACHER 'dinov2' needs"),
        ("torchvision", "vision", lambda: load_teacher("timm:resnet18"), "TEACHER 'timm:resnet18'"),
        ("torchvision", "vision", lambda: Transform(224, 256), "preprocessing of a network"),
        ("torchvision", "vision", lambda: open_dataset("cifar10", "train"), "DATASET 'cifar10'"),
        ("huggingface_hub", "hub", lambda: folder_of("user/name"), "no folder user/name"),
        (
            "huggingface_hub",
            "hub",
            lambda: importlib.import_module(CARDS),
            "formats of the Hugging Face Hub",
        ),
        ("tensorboard", "tensorboard", lambda: check_boards({"tensorboard"}), "REPORT_TO is"),
    ],
)
def test_the_message_names_the_extra(package, extra, needs_it, what, lacking):
    lacking(package)
    with pytest.raises(MissingPackage, match=re.escape(f"pip install 'ssl_kd[{extra}]'")) as caught:
        needs_it()
    assert what in str(caught.value) and package in str(caught.value)
    assert package in requirements(extra)


@pytest.mark.parametrize("package", machine._OF_EXTRAS)
def test_the_doctor_names_the_extra_and_finds_no_fault(package, lacking):
    lacking(package)
    (finding,) = (found for found in machine.packages() if found.check == package)
    extra = machine._OF_EXTRAS[package][0]
    assert finding.status == "note" and f"pip install 'ssl_kd[{extra}]'" in finding.change
    assert package in requirements(extra)
