"""Rows 98 to 105: commands, settings, folders."""

import numpy as np
import pytest

from ssl_kd import MultiHeadClusterer, cli
from ssl_kd.errors import InputError
from ssl_kd.vision.run import run
from tests.faults.inject import no_run, one_line, stopped, weights
from tests.faults.matrix import row


@pytest.fixture
def rank_1(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")


@row(98)
def test_one_of_two_ranks_is_refused_by_its_number(rank_1, settings, train_py):
    code, error = train_py(settings())
    assert code == 2 and "rank 1 of 2" in one_line(error)
    assert no_run(settings())


@row(98)
@pytest.mark.parametrize("command", [cli.distill, cli.cache_teacher])
def test_one_of_two_language_ranks_is_refused(rank_1, tmp_path, monkeypatch, capfd, command):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    assert command(["--teacher_cache", "kept", "--data_path", "none.txt"]) == 2
    assert "rank 1 of 2" in one_line(capfd.readouterr().err)
    assert not list(tmp_path.iterdir())


@row(98)
def test_one_of_two_ranks_fits_no_estimator(rank_1):
    with pytest.raises(InputError, match="rank 1 of 2"):
        MultiHeadClusterer().fit(np.eye(20))


@row(98)
@pytest.mark.parametrize("size", ["1", ""])
def test_one_rank_alone_trains(monkeypatch, settings, train_py, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    code, error = train_py(settings(max_steps=1))
    assert code == 0, error


@row(99)
@pytest.mark.parametrize("name", [None, "a"])
def test_a_file_in_the_place_of_the_run_folders_stays(settings, train_py, tmp_path, name):
    (tmp_path / "runs").write_text("mine")
    code, error = train_py(settings(run_name=name))
    assert code == 2 and f"RUNS_DIR is '{tmp_path / 'runs'}'" in one_line(error)
    assert "Errno" not in error and (tmp_path / "runs").read_text() == "mine"


@row(99)
@pytest.mark.parametrize(
    ("name", "said"), [("a\0b", "RUN_NAME is 'a\\x00b'"), ("a" * 300, "File name too long")]
)
def test_a_name_that_no_folder_can_have_is_refused(settings, train_py, name, said):
    code, error = train_py(settings(), f"--run_name={name}")
    assert code == 2 and said in one_line(error)
    assert no_run(settings())


@row(99)
def test_a_working_folder_that_is_gone_is_named(settings, train_py, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, error = train_py(settings())
    monkeypatch.chdir(tmp_path)
    assert code == 2 and "folder that you stand in is gone" in one_line(error)
    assert no_run(settings())


@row(100)
@pytest.mark.parametrize("tail", [b"\xff\xfe\xc3(\n", b'{"step": 12, "lo\xe4'])
def test_a_damaged_tail_of_the_log_does_not_keep_a_run_from_being_resumed(
    settings, train_py, tail, caplog
):
    whole = run(settings(run_name="whole")).path
    path = stopped(settings, "a")
    with open(path / "metrics.jsonl", "ab") as file:
        file.write(tail)
    code, error = train_py(settings(run_name="a", resume=True))
    assert code == 0 and "1 line(s) that cannot be read were removed" in caplog.text, error
    assert weights(path) == weights(whole)
    steps = [(p / "metrics.jsonl").read_bytes().count(b'"step"') for p in (path, whole)]
    assert steps[0] == steps[1]
