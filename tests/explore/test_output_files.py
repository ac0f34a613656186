"""File names that any system takes, and folders that are complete or absent."""

import os
from pathlib import Path

import pytest

from ssl_kd.core.errors import InputError
from ssl_kd_explore.output_files import new_folder, safe_name, unique_name

HOSTILE = [
    "..",
    "",
    "a/../../b.png",
    "line\nbreak\r.png",
    "tab\t\x1b[2J\x00.png",
    "LPT1.txt",
    "trailing. . ",
    "ü" * 300 + ".jpeg",
    "日本語" * 100 + "." + "e" * 50,
    "\u2028\u2029",
    "\udcff.png",
    'a\\b:c*d?e"f<g>h|i.png',
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_become_one_harmless_name(name, tmp_path):
    safe = safe_name(name)
    assert 0 < len(safe.encode()) <= 150 and safe not in (".", "..")
    assert not set(safe) & set('/\\:*?"<>|\n\r\0\x1b')
    assert safe.endswith(".jpeg") == name.endswith(".jpeg")
    assert safe == safe.rstrip(" ") and safe_name(safe) == safe
    (tmp_path / safe).write_text("x")
    assert os.listdir(tmp_path) == [safe]


def test_names_differ_in_more_than_case():
    taken: set[str] = set()
    names = ["a.png", "A.PNG", "a (2).png", "a.png", "b", "b"]
    assert " | ".join(unique_name(name, taken) for name in names) == (
        "a.png | A (2).PNG | a (2) (2).png | a (3).png | b | b (2)"
    )


def test_a_folder_is_complete_or_absent(tmp_path):
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
