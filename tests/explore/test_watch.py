"""`ssl_kd watch`: rounds on a folder of digits, stable ids, drift, refused input, kills."""

import json
import os
import shutil

import numpy as np
import pytest

from ssl_kd.cli import main
from ssl_kd.core.errors import InputError, RunFolderError
from ssl_kd.core.files.lock import Lock
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.settings import VisionSettings
from ssl_kd_explore.decisions import Curation
from ssl_kd_explore.drift import ALARM, compare_shares, count_unusual
from ssl_kd_explore.export.content import Content
from ssl_kd_explore.watch import Watch
from tests.kill_writers import kill_again_and_again
from tests.photos import QUICK, save_digits


def add(folder, rows, classes):
    """Save digits as files that have not changed lately."""
    save_digits(folder, "", rows, classes)
    for path in folder.rglob("*.png"):
        os.utime(path, (1e9, 1e9))


def watch_of(root, photos=None):
    folders = {"runs_dir": str(root / "runs"), "embeddings_dir": str(root / "embeddings")}
    settings = VisionSettings(**QUICK, **folders, n_clusters=3)
    return Watch(photos or root / "photos", root / "runs" / "w", settings, {})


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A watch after its first round, on digits 0, 1 and 4; the digit 6 came since."""
    root = tmp_path_factory.mktemp("watch")
    add(root / "photos", slice(0, 600), (0, 1, 4))
    watch_of(root).advance()
    add(root / "photos", slice(600, 900), (0, 1, 4, 6))
    return root


@pytest.fixture
def root(first, tmp_path):
    """A copy of the watch for one test."""
    shutil.copytree(first, tmp_path, symlinks=True, dirs_exist_ok=True)
    for name in ("round-0001.files", "round-0001/config.json"):
        path = tmp_path / "runs" / "w" / name
        path.write_text(path.read_text().replace(str(first), str(tmp_path)))
    return tmp_path


def table(run):
    samples = Samples(run)
    return list(zip(samples.column("file"), samples.column("cluster"), strict=True))


def test_new_pictures_join_while_ids_and_decisions_stay(root, monkeypatch):
    old, run = (root / "runs" / "w" / f"round-{n:04}" for n in (1, 2))
    Curation.open(old).rename(0, "mine")
    odd = root / "photos" / "a\nb.png"
    shutil.copy2(root / "photos" / "digit 1" / "0001.png", odd)

    def die(*words):
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr("ssl_kd_explore.watch.reported", die)
        watch_of(root).advance()
    shutil.copy2(odd, root / "photos" / "later.png")  # waits: the killed round is repeated first
    watch_of(root).advance()
    Curation.open(old).rename(1, "late")  # by a person who still looks at the first round
    summary, _ = watch_of(root).advance(at_least=2)
    assert json.loads((run / "watch.json").read_text()) == json.loads(json.dumps(summary))
    assert summary["new"] == ["later.png"] and Curation.open(run).names == {0: "mine", 1: "late"}
    described, n_old = summary["rounds"][1], len(table(old))
    assert table(run)[:n_old] == table(old) and described["n"] == len(table(run)) - n_old
    (offered,) = described["new_clusters"]
    assert described["joined"] + offered["size"] == described["n"]
    assert offered["cluster"] == 3 and all("digit 6" in file for file in offered["files"])
    page = (run / "watch.html").read_text()
    assert "Cluster 3 (new)" in page and "data:image/png" in page and "://" not in page
    samples = Samples(run)
    exported = set(map(samples.image_file, Content.of(samples).rows))
    assert exported == {odd, *(root / "photos").glob("*/*.png")}


def test_files_that_changed_vanished_or_are_not_complete_are_reported(root):
    watch, photos = watch_of(root), root / "photos"
    watch.advance()
    assert not watch.advance()[1]
    names = sorted(path.relative_to(photos).as_posix() for path in photos.glob("*/*.png"))
    whole = (photos / names[0]).read_bytes()
    (photos / names[0]).write_bytes((photos / names[1]).read_bytes())
    (photos / names[2]).unlink()
    (photos / "half.png").write_bytes(whole[: len(whole) // 2])
    os.utime(photos / "half.png", (1e9, 1e9))
    (photos / "fresh.png").write_bytes(whole)
    (photos / "link.png").symlink_to(root / "elsewhere.png")
    summary, is_new = watch.advance()
    assert is_new and len(summary["rounds"]) == 2 and not summary["new"]
    assert (summary["replaced"], summary["deleted"]) == ([names[0]], [names[2]])
    assert sorted(summary["waiting"]) == ["fresh.png", "half.png", "link.png"]
    page = (root / "runs" / "w" / "latest" / "watch.html").read_text()
    assert all(f"{what}: 1<" in page for what in ("to add it)", "numbers stay)"))
    os.utime(photos / "fresh.png", (1e9, 1e9))
    summary, _ = watch.advance(at_least=2)
    assert len(summary["rounds"]) == 2 and summary["new"] == ["fresh.png"]


def test_folders_of_others_in_a_watch_are_left_alone(root):
    place = root / "runs" / "w"
    shutil.copytree(place / "round-0001", place / "round-0001-old")
    shutil.copy2(place / "round-0001.files", place / "round-best.files")
    assert len(watch_of(root).advance()[0]["rounds"]) == 2
    shutil.rmtree(place)
    (place / "round-0001").mkdir(parents=True)
    (place / "round-0001" / "thesis.txt").write_text("mine")
    for _ in range(2):
        with pytest.raises(RunFolderError, match="something else: choose another"):
            watch_of(root).advance()
    assert (place / "round-0001" / "thesis.txt").exists()


def watch_in(folder, first):
    if not (folder / "runs").exists():
        shutil.rmtree(folder / "copy", ignore_errors=True)  # from a killed start
        shutil.copytree(first / "runs", folder / "copy", symlinks=True)
        os.rename(folder / "copy", folder / "runs")
    watch_of(folder, first / "photos").advance()


def finished(folder):
    return {path.parent.name for path in folder.glob("runs/w/round-*/metrics.json")}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_a_killed_round_leaves_the_last_one_and_is_repeated(first, tmp_path):
    result = kill_again_and_again(watch_in, finished, tmp_path / "k", first, kills=4)
    for path in result.folders:
        assert finished(path) == {"round-0001", "round-0002"}
        run = path / "runs" / "w" / "round-0002"
        assert (run / "watch.html").exists()
        assert table(run) == table(result.straight / "runs" / "w" / "round-0002")


def test_the_command_runs_once_or_until_it_is_stopped(root, capsys, monkeypatch):
    words = ["watch", str(root / "photos"), "--run", "w", "--runs_dir", str(root / "runs")]
    with Lock(root / "runs" / "w" / ".lock"):
        assert main([*words, "--every=1s"]) == 1
    assert "only one writer is allowed" in capsys.readouterr().err
    assert main([*words, "--once"]) == 0
    output = capsys.readouterr().out
    assert "offered as new: cluster 3" in output and "round-0002/watch.html" in output
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 1:
            os.rename(root / "photos", root / "away")  # an error in a later round does not end it
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", pause)
    assert main([*words, "--every", "2h"]) == 130 and pauses == [7200] * 3
    out, err = capsys.readouterr()
    assert "Nothing has changed since round 2" in out
    assert "cannot be listed" in err and "finished rounds are kept; continue with: ssl_kd" in err
    with pytest.raises(InputError, match="belongs to the watch of .*photos: choose another name"):
        watch_of(root, root / "away").advance()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("missing", "not a folder of pictures"),
        ("empty", "holds no images"),
        ("photos --runs_dir photos/runs", "lie in each other"),
        ("runs/w/photos --run w", "lie in each other"),
        ("photos --every soon", "expected a time such as 30s"),
        ("photos --dataset digits", "--dataset is set by ssl_kd watch"),
        ("photos", "--at_least is 1"),  # its only picture cannot be read
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "photos", "runs/w/photos"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "photos" / "a.png").write_bytes(b"no picture")
    assert main(["watch", *words.split(), "--once"]) == (0 if words == "photos" else 2)
    assert message in "".join(capsys.readouterr()) and not list(tmp_path.glob("runs/*/round-*"))


def test_chance_raises_few_alarms_and_a_change_is_named():
    rng, shares = np.random.default_rng(0), np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    before = rng.choice(6, 1000, p=shares)
    alarms = np.zeros(2)
    for _ in range(200):
        other, now = rng.choice(6, 1000, p=shares), rng.choice(6, 300, p=shares)
        scores = np.searchsorted(np.sort(rng.random(400)), rng.random(300)) / 400
        alarms += [compare_shares(other, now)["p"] < ALARM, count_unusual(scores, 400)["p"] < ALARM]
    assert (alarms <= 5).all()  # 1 is expected; more than 5 have a probability below 0.001
    changed = compare_shares(before, np.r_[np.zeros(150, int), before[:150]])["changed"]
    assert changed[0]["cluster"] == 0 and changed[0]["now"] > 0.6
    assert count_unusual(np.r_[rng.random(280), np.ones(20)], 400)["p"] < 1e-4
    assert compare_shares(np.zeros(0, int), before)["p"] == 1 == count_unusual(np.zeros(0), 9)["p"]
