"""Rows 98 to 105: commands, settings, folders."""

import numpy as np
import pytest

from ssl_kd import MultiHeadClusterer, cli
from ssl_kd.errors import InputError
from tests.faults.inject import no_run, one_line
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
