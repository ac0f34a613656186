"""Files are whole or absent, damage is named, and no code in a file runs."""

import errno
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ssl_kd.core import files
from ssl_kd.core.files import (
    CorruptFileError,
    atomic_write,
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    load_tensors,
    save_tensors,
    sha256_file,
)
from tests.damage import FullDisk, Payload


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_written_bytes_are_read_back(tmp_path):
    atomic_write_bytes(tmp_path / "new" / "b", b"\x00\xff")
    atomic_write_text(tmp_path / "t", "größer\n")
    atomic_write_json(tmp_path / "j", {"a": [1, None]})
    assert (tmp_path / "new" / "b").read_bytes() == b"\x00\xff"
    assert (tmp_path / "t").read_text(encoding="utf-8") == "größer\n"
    assert '"a"' in (tmp_path / "j").read_text()
    with pytest.raises(ValueError):
        atomic_write_json(tmp_path / "nan", {"loss": float("nan")})
    assert names(tmp_path) == ["j", "new", "t"]
    atomic_write_bytes(tmp_path / "file", b"abc")
    assert sha256_file(tmp_path / "file").startswith("ba7816bf8f01cfea")
    with pytest.raises(FileNotFoundError):
        load_tensors(tmp_path / "x.pt")


def test_permissions_are_the_users_own(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    atomic_write_bytes(tmp_path / "atomic", b"")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file):
        file.write(b"half")
        raise error

    with pytest.raises(type(error)):
        atomic_write(path, write)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_full_disk_is_named_with_the_file(tmp_path):
    path = tmp_path / "x.pt"
    save_tensors(path, {"x": torch.ones(3)})
    with pytest.raises(OSError, match=r"No space left.*unchanged.*x\.pt") as caught:
        # torch.save turns the OSError into an enforce error of its own
        atomic_write(path, lambda file: torch.save({"x": torch.ones(9999)}, FullDisk(file, 1000)))
    assert caught.value.errno == errno.ENOSPC
    assert load_tensors(path)["x"].tolist() == [1, 1, 1]
    assert names(tmp_path) == ["x.pt"]


def test_the_data_is_on_the_disk_before_the_name_changes(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(files.os, "replace", lambda a, b: (calls.append("name"), replace(a, b)))
    atomic_write_bytes(tmp_path / "file", b"x")
    assert calls[:2] == ["fsync", "name"]
    assert calls[2:] == ([] if os.name == "nt" else ["fsync"])  # the folder's entry


@pytest.mark.parametrize("mmap", [False, True])
def test_tensors_come_back(tmp_path, mmap):
    x = torch.randn(5, 3).half()
    save_tensors(tmp_path / "x.pt", {"x": x, "names": ["a"]})
    loaded = load_tensors(tmp_path / "x.pt", mmap=mmap)
    assert torch.equal(loaded["x"], x) and loaded["names"] == ["a"]
    assert torch.equal(torch.load(tmp_path / "x.pt", weights_only=True)["x"], x)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("damage", ["empty", "short", "random", "text"])
def test_damage_is_named(tmp_path, damage, mmap):
    path = tmp_path / "x.pt"
    save_tensors(path, {"x": torch.randn(500)})
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (3000,), dtype=torch.uint8, generator=generator)
    content = {"empty": b"", "short": whole[:1500], "random": bytes(noise), "text": b"hello"}
    path.write_bytes(content[damage])
    with pytest.raises(CorruptFileError, match=r"x\.pt cannot be read"):
        load_tensors(path, mmap=mmap)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_code_in_a_pickle_is_refused(tmp_path, form, mmap):
    path, trace = tmp_path / "x.pt", tmp_path / "executed"
    if form == "pickle":
        path.write_bytes(pickle.dumps({"x": Payload(trace)}))
    else:
        torch.save({"x": torch.ones(2), "y": Payload(trace)}, path)
    with pytest.raises(CorruptFileError, match="x.pt"):
        load_tensors(path, mmap=mmap)
    assert not trace.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_pages_of_a_mapped_file_are_released(tmp_path):
    def resident() -> int:
        text = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"RssFile:\s+(\d+)", text)[1])  # pyright: ignore

    x = np.arange(8 << 20, dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    before = resident()
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert float(mapped.sum(dtype=np.float64)) == float(x.sum(dtype=np.float64))
    assert resident() - before > x.nbytes * 0.9
    files.release_pages(mapped[5:9])  # a part of it will do
    assert resident() - before < x.nbytes * 0.1
    np.testing.assert_array_equal(mapped, x)
    files.release_pages(x)  # an array of one's own is none of its business
    changed = np.load(tmp_path / "x.npy", mmap_mode="c")
    changed[:] = 7
    files.release_pages(changed)
    assert (changed == 7).all()


KILLED = """
import os, sys
from ssl_kd.core.files import atomic_write
atomic_write(sys.argv[1], lambda file: (file.write(b"half"), file.flush(), print("now", flush=True),
                                        sys.stdin.read()))
"""


def test_temporary_files_of_killed_writers_are_removed(tmp_path):
    path = tmp_path / "[a]*.pt"  # as a pattern it would fit others, too
    words = [sys.executable, "-c", KILLED, str(path)]
    writer = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline() == b"now\n"
    (left,) = tmp_path.iterdir()
    strangers = [".aa.pt.01234567.tmp", ".[a]*.pt.0123456.tmp", ".[a]*.pt.01234567.tmp.txt"]
    for name in strangers:
        (tmp_path / name).write_text("x")
    (tmp_path / ".[a]*.pt.00000000.tmp").symlink_to(left)
    os.mkfifo(tmp_path / ".[a]*.pt.00000001.tmp")
    (tmp_path / ".[a]*.pt.00000002.tmp").mkdir()
    before = names(tmp_path)
    files.remove_orphans(path)
    assert names(tmp_path) == before
    writer.kill()
    writer.communicate()
    files.remove_orphans(path)
    assert names(tmp_path) == sorted({*before} - {left.name})
    files.remove_orphans(tmp_path / "nowhere" / "x")


def test_a_temporary_file_removed_as_an_orphan_is_recreated(tmp_path, monkeypatch):
    real, removed = files.fcntl.flock, []

    def late(file, how):  # another process cleans up between the file's creation and its lock
        if not removed:
            removed.append(file.name)
            os.unlink(file.name)
        real(file, how)

    monkeypatch.setattr(files.fcntl, "flock", late)
    atomic_write_bytes(tmp_path / "x", b"whole")
    assert removed and names(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == b"whole"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1, "a": 1}', "a key occurs twice"),
        (b'[{"a": {"b": 1, "b": 2}}]', "a key occurs twice"),
        (b"NaN", "NaN is not"),
        (b"[-Infinity]", "-Infinity is not"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "4300 digits"),
        (b"\xff", "utf-8"),
        ("{}".encode("utf-16"), "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"", "Expecting value"),
        (b"{} {}", "Extra data"),
    ],
)
def test_json_that_programs_read_differently_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        files.strict_json(data)
    assert files.strict_json(b' {"a": [1, 1.5, null]}\r\n') == {"a": [1, 1.5, None]}
