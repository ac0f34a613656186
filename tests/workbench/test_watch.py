"""`ssl_kd watch`: rounds on a folder of digits, what stays, what drifts, what is refused, kills."""

import json
import os
import re
import shutil

import numpy as np
import pytest

from ssl_kd.cli import main
from ssl_kd.cli import watch as command
from ssl_kd.errors import InputError
from ssl_kd.files.lock import Lock, LockHeld
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.workbench.decisions import Curation
from ssl_kd.workbench.drift import ALARM, compare_outliers, compare_shares
from ssl_kd.workbench.export.content import Content
from ssl_kd.workbench.watch import Watch
from tests.kills import kill_again_and_again
from tests.photos import QUICK, save_digits


def settings(root):
    folders = {"runs_dir": str(root / "runs"), "embeddings_dir": str(root / "embeddings")}
    return VisionSettings(**QUICK, **folders, n_clusters=3)


def add(folder, rows, classes):
    """Save digits as files that have not changed lately."""
    save_digits(folder, "", rows, classes)
    for path in folder.rglob("*.png"):
        os.utime(path, (1e9, 1e9))


def advance(root, at_least=1, photos=None):
    photos = photos or root / "photos"
    return Watch(photos, root / "runs" / "w", settings(root), {}).advance(at_least)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A watch after its first round, on digits 0, 1 and 4; the digit 6 came since. Not changed."""
    root = tmp_path_factory.mktemp("watch")
    add(root / "photos", slice(0, 600), (0, 1, 4))
    advance(root)
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


def test_new_pictures_join_ids_and_decisions_stay_and_the_page_tells(root):
    old = root / "runs" / "w" / "round-0001"
    Curation.open(old).rename(0, "mine")
    odd = root / "photos" / "a\nb.png"
    shutil.copy2(root / "photos" / "digit 1" / "0001.png", odd)
    summary, is_new = advance(root)
    run = root / "runs" / "w" / "round-0002"
    written = json.loads((run / "watch.json").read_text())
    assert is_new and written == json.loads(json.dumps(summary))
    assert table(run)[: len(table(old))] == table(old) and Curation.open(run).names == {0: "mine"}
    about, n_old = summary["rounds"][1], len(table(old))
    in_new = sum(cluster["size"] for cluster in about["new_clusters"])
    assert about["n"] == about["joined"] + in_new == len(table(run)) - n_old
    (offered,) = about["new_clusters"]
    assert offered["cluster"] == 3 and all("digit 6" in file for file in offered["files"])
    page = (run / "watch.html").read_text()
    assert "Cluster 3 (new)" in page and "data:image/png" in page
    assert not re.search("https?:", page)

    samples = Samples(run)
    for row in (0, n_old, n_old + 9):
        assert samples.image_file(row) == root / "photos" / samples.column("file")[row]
        assert samples.image(row).size == (8, 8)
    exported = set(map(samples.image_file, Content.of(samples).rows))
    assert exported == {odd, *(root / "photos").rglob("*.png")}

    Curation.open(old).rename(1, "late")  # by a person who still looks at the first round
    summary, is_new = advance(root)
    assert not is_new and len(summary["rounds"]) == 2
    assert Curation.open(run).names == {0: "mine", 1: "late"}


def test_files_that_changed_vanished_or_are_not_complete_are_reported(root):
    photos = root / "photos"
    advance(root)
    names = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))
    whole = (photos / names[0]).read_bytes()
    (photos / names[0]).write_bytes((photos / names[1]).read_bytes())
    (photos / names[2]).unlink()
    (photos / "half.png").write_bytes(whole[: len(whole) // 2])
    os.utime(photos / "half.png", (1e9, 1e9))
    (photos / "fresh.png").write_bytes(whole)
    (photos / "link.png").symlink_to(root / "elsewhere.png")
    before = table(root / "runs" / "w" / "latest")
    summary, is_new = advance(root)
    assert is_new and len(summary["rounds"]) == 2 and not summary["new"]
    assert (summary["replaced"], summary["deleted"]) == ([names[0]], [names[2]])
    assert list(summary["waiting"]) == ["fresh.png", "link.png", "half.png"]
    page = (root / "runs" / "w" / "latest" / "watch.html").read_text()
    assert all(f"{what}: 1<" in page for what in ("to add it)", "numbers stay)"))

    (photos / "half.png").write_bytes(whole)
    for name in ("half.png", "fresh.png"):
        os.utime(photos / name, (1e9, 1e9))
    summary, _ = advance(root, at_least=3)
    assert len(summary["rounds"]) == 2 and summary["new"] == ["fresh.png", "half.png"]
    summary, _ = advance(root, at_least=2)
    after = table(root / "runs" / "w" / "latest")
    assert after[:-2] == before and [file for file, _ in after[-2:]] == ["fresh.png", "half.png"]


# --- Kills and locks ----------------------------------------------------------------------------


def watch_in(folder, first):
    if not (folder / "w").exists():
        shutil.copytree(first / "runs" / "w", folder / "copy", symlinks=True)
        os.rename(folder / "copy", folder / "w")
    Watch(first / "photos", folder / "w", settings(folder), {}).advance()


def finished(folder):
    return {path.parent.name for path in folder.glob("w/round-*/metrics.json")}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_a_killed_round_leaves_the_last_one_and_is_repeated(first, tmp_path):
    result = kill_again_and_again(watch_in, finished, tmp_path / "k", first, kills=4)
    assert result.kills == 4
    for path in result.folders:
        assert finished(path) == {"round-0001", "round-0002"}
        assert (path / "w" / "round-0002" / "watch.html").exists()
        assert table(path / "w" / "round-0002") == table(result.straight / "w" / "round-0002")


def test_a_second_watch_of_the_folder_is_refused(root, capsys):
    with Lock(root / "runs" / "w" / ".lock"):
        with pytest.raises(LockHeld):
            advance(root)
        words = [str(root / "photos"), "--run", "w", "--runs_dir", str(root / "runs"), "--every=1s"]
        assert command(words) == 1
    assert "only one writer is allowed" in capsys.readouterr().err


# --- The command --------------------------------------------------------------------------------


def test_the_command_does_one_round_or_goes_on_until_it_is_stopped(root, capsys, monkeypatch):
    words = [str(root / "photos"), "--run", "w", "--runs_dir", str(root / "runs")]
    assert main(["watch", *words, "--once"]) == 0
    said = capsys.readouterr().out
    assert "offered as new: cluster 3" in said and "round-0002/watch.html" in said
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 1:
            os.rename(root / "photos", root / "away")  # an error in a later round does not end it
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", pause)
    assert main(["watch", *words, "--every", "2h"]) == 130 and pauses == [7200] * 3
    out, err = capsys.readouterr()
    assert "Nothing has changed since round 2" in out
    assert "cannot be listed" in err and "finished rounds are kept; continue with: ssl_kd" in err
    assert main(["watch", *words, "--once"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing"], "not a folder of pictures"),
        (["empty"], "holds no images"),
        (["texts"], "holds no images"),
        (["photos", "--runs_dir", "photos/runs"], "lie in each other"),
        (["runs/w/photos", "--run", "w"], "lie in each other"),
        (["photos", "--every", "soon"], "expected a time such as 30s"),
        (["photos", "--dataset", "digits"], "--dataset is set by ssl_kd watch"),
        (["photos", "--n_clusterz", "3"], "n_clusters"),
        (["broken"], "--at_least is 1"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "texts", "photos", "broken", "runs/w/photos"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("no picture")
    (tmp_path / "broken" / "a.png").write_bytes(b"no picture")
    code = command([*words, "--once"])
    out, err = capsys.readouterr()
    assert said in out + err and code == (0 if "broken" in words else 2)
    assert not list(tmp_path.glob("runs/*/round-*"))


def test_a_name_that_another_folder_has_is_refused(root):
    shutil.copytree(root / "photos", root / "others")
    with pytest.raises(InputError, match="belongs to the watch of .*photos: choose another name"):
        advance(root, photos=root / "others")


# --- Drift --------------------------------------------------------------------------------------


def test_chance_raises_few_alarms_and_a_change_is_named():
    rng, shares = np.random.default_rng(0), np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    alarms = np.zeros(3)
    for _ in range(500):
        before, now = rng.choice(6, 1000, p=shares), rng.choice(6, 300, p=shares)
        reference = np.sort(rng.random(400))
        scores = np.searchsorted(reference, rng.random(300)) / 400
        outliers = compare_outliers(scores, 400)
        values = compare_shares(before, now)["p"], outliers["p"], outliers["p_unusual"]
        alarms += [p < ALARM for p in values]
    assert (alarms <= 6).all()  # 500 / 300 expected; more than 6 have a probability below 0.001
    now = np.r_[np.zeros(150), rng.choice(6, 150, p=shares)].astype(int)
    changed = compare_shares(rng.choice(6, 1000, p=shares), now)["changed"]
    assert changed[0]["cluster"] == 0 and changed[0]["now"] > 0.6
    assert compare_outliers(np.r_[rng.random(280), np.ones(20)], 400)["p_unusual"] < 1e-4
    assert compare_shares(np.zeros(0, int), np.zeros(3, int))["p"] is None
    assert compare_outliers(np.zeros(0), 400)["p"] is None
