"""Names that any system takes, whatever a file is called."""

import os
from pathlib import Path

import pytest

from ssl_kd.errors import InputError
from ssl_kd.workbench.place import Distinct, new_folder, safe_name

HOSTILE = [
    "..",
    ".",
    "",
    "a/../../b.png",
    "line\nbreak\r.png",
    "tab\t\x1b[2J\x00.png",
    "con",
    "LPT1.txt",
    "trailing. . ",
    "ü" * 300 + ".jpeg",
    "x" * 400,
    "日本語" * 100 + "." + "e" * 50,
    "\u2028\u2029",
    "\udcff.png",
    'a\\b:c*d?e"f<g>h|i.png',
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_become_one_harmless_name(name, tmp_path):
    found = safe_name(name)
    assert 0 < len(found.encode()) <= 150
    assert found not in (".", "..") and not set(found) & set('/\\:*?"<>|\n\r\0\x1b')
    assert found == found.rstrip(" ") and safe_name(found) == found
    (tmp_path / found).write_text("x")
    assert os.listdir(tmp_path) == [found]


def test_the_ending_of_a_long_name_stays():
    assert safe_name("ü" * 300 + ".jpeg").endswith(".jpeg")


def test_names_are_told_apart_in_upper_and_lower_case():
    name = Distinct()
    given = ["a.png", "A.PNG", "a (2).png", "a.png", "b", "b"]
    assert [name(n) for n in given] == [
        "a.png", "A (2).PNG", "a (2) (2).png", "a (3).png", "b", "b (2)"
    ]  # fmt: skip


def test_a_folder_is_whole_or_not_there(tmp_path):
    with pytest.raises(RuntimeError), new_folder(tmp_path / "out") as folder:
        (folder / "x").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "deep" / "out") as folder:
        (folder / "x").write_text("whole")
    assert (tmp_path / "deep" / "out" / "x").read_text() == "whole"
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(InputError, match="link exists"), new_folder(Path(tmp_path / "link")):
        pass
