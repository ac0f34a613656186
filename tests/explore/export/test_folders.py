"""Folders of links: with any file names, and without overwriting anything."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from ssl_kd.core.errors import InputError
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.export import export, folders
from ssl_kd_explore.export.content import Content
from tests.faults.matrix import row as fault


@pytest.fixture
def content(photo_run):
    names = {0: "a/b\n..", 1: "ring", 2: "ü" * 200}
    return replace(Content.of(Samples(photo_run)), names=names)


@pytest.mark.parametrize("link", ["symlink", "copy"])
def test_each_picture_is_in_the_folder_of_its_cluster(content, tmp_path, link):
    out = export(content, "folders", tmp_path / "out", link=link)
    assert sorted(p.name for p in out.iterdir() if p.is_dir())[:2] == ["0 a_b_", "1 ring"]
    for cluster in range(3):
        (folder,) = out.glob(f"{cluster} *")
        rows = np.flatnonzero(content.clusters == cluster)
        expected = sorted(content.samples.image_file(row).read_bytes() for row in rows)
        assert sorted(p.read_bytes() for p in folder.iterdir()) == expected
        files = [content.samples.image_file(rows[0])]
        place = folder / files[0].name
        assert place.is_symlink() == (link == "symlink")
        assert place.samefile(files[0]) == (link == "symlink")


@fault(135)
def test_files_of_one_name_and_hostile_ones(photo_run, tmp_path, monkeypatch):
    names = ["one/same.png", "two/same.png", "three/SAME.png", "n\new.png", "a..png"]
    files = [tmp_path / "photos" / name for name in names]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.setattr(Samples, "image_file", lambda self, row: files[row])
    samples = Samples(photo_run)
    content = Content(samples, np.arange(5), np.zeros(len(samples), np.int64))
    out = export(content, "folders", tmp_path / "out")
    expected = ["same.png", "same (2).png", "SAME (3).png", "n_ew.png", "a..png"]
    links = {path.name: os.readlink(path) for path in (out / "0").iterdir()}
    assert links == dict(zip(expected, map(str, files), strict=True))


@fault(133)
def test_a_failed_export_leaves_nothing(content, tmp_path, monkeypatch):
    paths = []

    def failing(file, path):
        if len(paths) == 20:
            raise OSError(28, "No space left on device")
        paths.append(shutil.copy(file, path))

    monkeypatch.setitem(folders.LINKS, "copy", failing)
    with pytest.raises(OSError, match="No space"):
        export(content, "folders", tmp_path / "out", link="copy")
    assert not list(tmp_path.iterdir())


@fault(135, 174)
def test_nothing_is_overwritten(content, tmp_path):
    out = export(content, "folders", tmp_path / "out", link="copy")
    place = next((out / "1 ring").iterdir())
    place.write_bytes(bytes(len(place.read_bytes())))
    before = {path: path.lstat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(InputError, match="out exists: choose another path, or move it"):
        export(content, "folders", out, link="copy")
    assert before == {path: path.lstat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(InputError, match="--link is 'sym'; expected .*symlink"):
        export(content, "folders", tmp_path / "new", link="sym")
