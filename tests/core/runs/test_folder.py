"""The run folder is never overwritten, is locked, and is resumed with the same settings."""

import errno
import json
import logging
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

import ssl_kd
from firstnan.events import Event
from ssl_kd.core.files import CorruptFileError, save_tensors
from ssl_kd.core.runs.folder import RunFinished, RunFolder, RunFolderError
from ssl_kd.core.runs.writer import NoWriter
from ssl_kd.vision.settings import VisionSettings


@pytest.fixture
def settings(tmp_path):
    return lambda **changes: VisionSettings(runs_dir=str(tmp_path / "runs"), **changes)


def record(step):
    return {"step": step, "loss": [1.0, float("nan")], "grad_norm": [float("inf"), 2.0]}


def started(settings, step=4):
    """The folder of an interrupted run."""
    with RunFolder.open(settings) as folder:
        folder.write_config(settings, precision="cpu")
        folder.writer.save_checkpoint(step, {"x": torch.arange(3.0)})
    return folder.path


def test_without_a_name_each_run_gets_a_folder_of_its_own(settings):
    folders = [RunFolder.open(settings()) for _ in range(4)]
    assert len({folder.path for folder in folders}) == 4
    with folders[0], folders[3]:
        folders[0].writer.become_latest()
        folders[3].writer.become_latest()
    latest = folders[0].path.parent / "latest"
    assert os.readlink(latest) == folders[3].path.name and latest.resolve() == folders[3].path


@pytest.mark.parametrize("kind", ["no links", "a folder"])
def test_without_a_link_latest_there_is_a_warning(settings, tmp_path, monkeypatch, caplog, kind):
    def refuse(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    if kind == "no links":
        monkeypatch.setattr(Path, "symlink_to", refuse)
    else:
        (tmp_path / "runs" / "latest" / "mine").mkdir(parents=True)
    with RunFolder.open(settings()) as folder:
        folder.writer.become_latest()
    words = {"no links": "does not point to this run", "a folder": "is not a link, so it does"}
    assert words[kind] in caplog.text
    assert kind == "no links" or (tmp_path / "runs" / "latest" / "mine").exists()


@pytest.mark.parametrize("kept", ["nothing", "a checkpoint", "a line of metrics", "resumed"])
def test_a_run_that_fails_keeps_its_folder_only_if_there_is_something_in_it(settings, kept):
    if kept == "resumed":
        with RunFolder.open(settings(run_name="a")) as folder:
            folder.write_config(settings(), precision="cpu")
    resume = kept == "resumed"
    with (
        pytest.raises(ZeroDivisionError),
        RunFolder.open(settings(run_name="a", resume=resume)) as folder,
    ):
        folder.write_config(settings(), precision="cpu")
        folder.writer.rewind(0)
        if kept == "a checkpoint":
            folder.writer.save_checkpoint(1, {})
        elif kept == "a line of metrics":
            folder.writer.log(record(1))
        raise ZeroDivisionError
    assert folder.path.exists() == (kept != "nothing")


def test_a_full_disk_is_not_blamed_on_the_setting(settings, monkeypatch):
    def full(path, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="No space left"):
        RunFolder.open(settings())


def test_resume_takes_the_last_unfinished_run(settings):
    paths = [started(settings(run_name=name)) for name in ("c", "a", "b")]
    for age, path in enumerate(paths):
        os.utime(path / "config.json", (1e9 + age, 1e9 + age))
    for file in ("metrics.json", "report.html"):
        (paths[2] / file).write_text("{}")
    assert RunFolder.open(settings(resume=True)).path == paths[1]
    assert RunFolder.open(settings(resume=True, run_name="c")).path == paths[0]
    with pytest.raises(RunFolderError, match="b is finished; its report is .*report.html"):
        RunFolder.open(settings(resume=True, run_name="b"))


def test_a_run_that_only_lacks_its_report_is_chosen_last(settings):
    ended, begun_before = started(settings(run_name="a")), started(settings(run_name="b"))
    (ended / "metrics.json").write_text("{}")
    os.utime(begun_before / "config.json", (1e9, 1e9))
    assert RunFolder.open(settings(resume=True)).path == begun_before
    (begun_before / "metrics.json").write_text("{}")
    (begun_before / "report.html").write_text("")
    for name in (None, "a"):
        with pytest.raises(RunFinished, match="a is finished; its report is missing") as error:
            RunFolder.open(settings(resume=True, run_name=name))
        assert error.value.path == ended
    (ended / "report.html").write_text("")
    with pytest.raises(RunFolderError, match="no unfinished run"):
        RunFolder.open(settings(resume=True))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"settings": 3}'])
def test_a_config_that_cannot_be_read_is_named(settings, tmp_path, text):
    path = started(settings(run_name="a"))
    (path / "config.json").write_text(text)
    with pytest.raises(CorruptFileError, match="config.json cannot be read"):
        RunFolder.open(settings(resume=True))


@pytest.mark.parametrize("change", [lambda s: s.pop("SEED"), lambda s: s.update(SEED_OF_OLD=1)])
def test_a_run_of_a_version_with_other_settings_is_not_resumed(settings, change):
    file = started(settings(run_name="a")) / "config.json"
    config = json.loads(file.read_text()) | {"commit": "abc1234"}
    change(config["settings"])
    file.write_text(json.dumps(config))
    with pytest.raises(RunFolderError, match=r"commit abc1234, which had other settings \(SEED"):
        RunFolder.open(settings(resume=True))


def test_config_records_versions_and_settings(settings, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py", "--seed", "3"])
    with RunFolder.open(settings(seed=3)) as folder:
        folder.write_config(settings(seed=3), precision="cpu: float32")
        folder.writer.update_json("config.json", n_heads=5)
    config = json.loads((folder.path / "config.json").read_text())
    assert config["settings"] == settings(seed=3).to_dict()
    assert config["command"] == "python /somewhere/train.py --seed 3"
    assert config["precision"] == "cpu: float32"
    assert config["versions"]["ssl_kd"] == ssl_kd.__version__ and config["n_heads"] == 5
    assert config["commit"] is None or isinstance(config["commit"], str)


def test_logs_are_strict_json_and_can_be_rewound(settings):
    with RunFolder.open(settings()) as folder:
        folder.writer.rewind(0)
        for step in (5, 10, 15):
            events = [Event(step, "head 1", "loss", "not finite", "skipped", float("nan"))]
            folder.writer.log(record(step))
            folder.events.extend(events)
        assert folder.count_events() == 3
        with open(folder.path / "metrics.jsonl", "a") as file:
            file.write('{"step": 16, "lo')  # the half line of a run that was killed
        folder.writer.rewind(10)
        lines = (folder.path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [5, 10]
        assert json.loads(lines[0])["loss"] == [1.0, None]
        assert json.loads(lines[0])["grad_norm"] == [None, 2.0]
        assert folder.count_events() == 2
        folder.writer.rewind(0)
        assert folder.count_events() == 0


def test_the_events_of_an_older_run_get_the_numbers_of_its_log(settings):
    with RunFolder.open(settings()) as folder:
        folder.write_config(settings(), mode="vision")
        for step in (0, 9, 10):
            folder.events.extend([Event(step, "head 1", "loss", "not finite", "skipped")])
        for _ in range(2):  # resumed twice
            folder.writer.rewind(10)
            lines = (folder.path / "events.jsonl").read_text().splitlines()
            assert [json.loads(line)["step"] for line in lines] == [1, 10]


def test_a_damaged_checkpoint_is_removed_and_the_one_before_is_used(settings, caplog):
    with RunFolder.open(settings()) as folder:
        for step in (5, 10):
            folder.writer.save_checkpoint(step, {"x": torch.arange(step)})()
        newest = folder.path / "checkpoint" / "step_000000010.pt"
        newest.write_bytes(newest.read_bytes()[:-100])
        with caplog.at_level(logging.WARNING):
            step, tensors = folder.load_checkpoint()
        assert step == 5 and len(tensors["x"]) == 5
        assert "falling back to the checkpoint before step_000000010" in caplog.text
        folder.writer.save_checkpoint(7, {})
        assert folder.load_checkpoint()[0] == 7
        for path in (folder.path / "checkpoint").glob("*.pt"):
            path.write_bytes(b"")
        assert folder.load_checkpoint() == (0, {})


class Slow:
    """`save_tensors` that waits for `may`, and fails at the steps in `fails`."""

    def __init__(self, monkeypatch):
        self.may, self.fails, self.started = threading.Event(), set(), []
        self.inside, self.most = 0, 0
        monkeypatch.setattr("ssl_kd.core.runs.writer.save_tensors", self)

    def __call__(self, path, tensors):
        self.started.append(tensors["step"])
        self.inside += 1
        self.most = max(self.most, self.inside)
        assert self.may.wait(60)
        self.inside -= 1
        if tensors["step"] in self.fails:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save_tensors(path, tensors)


def test_a_checkpoint_is_not_changed_by_later_steps(settings, monkeypatch):
    slow = Slow(monkeypatch)
    x, y = torch.arange(6.0).view(2, 3).T, torch.ones(4, requires_grad=True)
    state = {"x": x, "deep": [{"y": y, "n": 3}, (y, "word")], "learned": {"ce": 1}}
    with RunFolder.open(settings()) as folder:
        wait = folder.writer.save_checkpoint(5, state)
        with torch.no_grad():
            x.zero_()
            y.mul_(7)
        state["learned"]["ce"] = 2
        state["deep"][0]["n"] = 4
        assert not list((folder.path / "checkpoint").glob("*.pt"))
        slow.may.set()
        wait()
        step, found = folder.load_checkpoint()
    assert step == 5 and found["x"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert found["deep"][0]["y"].tolist() == [1] * 4 and found["deep"][1][1] == "word"
    assert found["learned"] == {"ce": 1} and found["deep"][0]["n"] == 3
    whole = {"format": 1, "version": ssl_kd.__version__, "step": 5, "tensors": found}
    save_tensors(folder.path / "again.pt", whole)
    written = folder.path / "checkpoint" / "step_000000005.pt"
    assert (folder.path / "again.pt").read_bytes() == written.read_bytes()


def test_one_checkpoint_is_written_at_a_time_and_the_last_is_waited_for(settings, monkeypatch):
    slow = Slow(monkeypatch)
    with RunFolder.open(settings()) as folder:
        folder.writer.save_checkpoint(1, {})
        assert folder.trained  # a second Ctrl-C says where it will be
        threading.Timer(0.2, slow.may.set).start()
        for n, step in enumerate((2, 3, 1000), start=1):
            folder.writer.save_checkpoint(step, {})
            assert slow.started[:n] == list(range(1, n + 1))
        slow.may.clear()
        threading.Timer(0.2, slow.may.set).start()
    assert slow.started == [1, 2, 3, 1000] and slow.most == 1
    names = {path.name for path in (folder.path / "checkpoint").iterdir()}
    assert names == {f"step_{s:09d}.{e}" for s in (3, 1000) for e in ("pt", "sha256")}
    assert folder.load_checkpoint()[0] == 1000


def test_an_error_of_writing_is_raised_once_at_the_next_checkpoint_or_the_end(
    settings, monkeypatch, caplog
):
    slow = Slow(monkeypatch)
    slow.may.set()
    slow.fails = {2, 5}
    with RunFolder.open(settings()) as folder:
        folder.writer.save_checkpoint(1, {})
        folder.writer.save_checkpoint(2, {})
        with pytest.raises(OSError, match=r"No space left.*step_000000002\.pt"):
            folder.writer.save_checkpoint(3, {})
        folder.writer.save_checkpoint(4, {})()
        with pytest.raises(OSError, match=r"No space left.*step_000000005\.pt"):
            folder.writer.save_checkpoint(5, {})()
    assert slow.started == [1, 2, 4, 5] and folder.load_checkpoint()[0] == 4
    with pytest.raises(OSError, match="No space left"), RunFolder.open(settings()) as folder:
        folder.writer.save_checkpoint(2, {})
    with pytest.raises(ZeroDivisionError), RunFolder.open(settings()) as folder:
        folder.writer.save_checkpoint(2, {})
        raise ZeroDivisionError
    assert "the last checkpoint could not be written: " in caplog.text


def test_without_memory_for_a_copy_a_checkpoint_is_written_at_once(settings, monkeypatch):
    slow = Slow(monkeypatch)
    slow.may.set()
    slow.fails = {2}
    x = torch.arange(6.0)
    monkeypatch.setattr("ssl_kd.core.runs.writer.free_memory", lambda device: 2 * x.nbytes)
    with RunFolder.open(settings()) as folder:
        folder.writer.save_checkpoint(1, {"x": [x]})
        assert (folder.path / "checkpoint" / "step_000000001.sha256").exists()
        with pytest.raises(OSError, match="No space left"):
            folder.writer.save_checkpoint(2, {"x": [x]})


def test_a_process_that_does_not_write_changes_no_file(settings):
    with RunFolder.open(settings()) as writing:
        writing.write_config(settings())
        writing.writer.log(record(5))
        writing.writer.save_checkpoint(5, {"x": torch.arange(3)})()
        files = {path: path.read_bytes() for path in writing.path.rglob("*") if path.is_file()}
        reading = RunFolder(writing.path, NoWriter())
        assert writing.writes and not reading.writes and reading.trained
        reading.write_config(settings(), precision="other")
        reading.check_data("digest")
        reading.events.extend([Event(5, "head 1", "loss", "not finite", "skipped")])
        reading.writer.log(record(10))
        reading.writer.save_checkpoint(10, {})()
        reading.writer.rewind(0)
        reading.writer.become_latest()
        now = {path: path.read_bytes() for path in writing.path.rglob("*") if path.is_file()}
        assert now == files and not (writing.path.parent / "latest").exists()
        assert reading.load_checkpoint()[0] == 5


def test_resume_does_not_choose_a_run_in_use(settings):
    with RunFolder.open(settings(run_name="stopped")) as stopped:
        stopped.write_config(settings(run_name="stopped"))
        stopped.writer.save_checkpoint(1, {})
    with RunFolder.open(settings(run_name="busy")) as busy:
        busy.write_config(settings(run_name="busy"))  # the newer one
        with RunFolder.open(settings(resume=True)) as found:
            assert found.path.name == "stopped"
