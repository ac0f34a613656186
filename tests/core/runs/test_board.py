"""The numbers of a run reach TensorBoard and the trackers."""

import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ssl_kd.core.errors import UserError
from ssl_kd.core.runs.board import Board, check_boards
from ssl_kd.vision.settings import VisionSettings


class Tracker(types.ModuleType):
    """A module with the functions of wandb and trackio that are used."""

    def __init__(self, name, fault=None):
        super().__init__(name)
        self.started, self.rows, self.finished, self.fault = {}, [], 0, fault

    def init(self, **arguments):
        if self.fault:
            raise self.fault
        self.started = arguments

    def log(self, metrics, step=None):
        self.rows.append((step, metrics))

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_settings_and_numbers(tmp_path, monkeypatch, name):
    tracker = Tracker(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    path = tmp_path / "my-run"
    with Board(path, {name}, {"SEED": 1}) as board:
        board.log(3, {"ce": 1.5, "kd": float("nan"), "per_head": [1.0, 3.0, float("inf")]})
        board.log(4, {"kd": float("inf")})
    own = {"id": "my-run", "dir": str(path)} if name == "wandb" else {}
    assert tracker.started == {
        "project": "ssl_kd",
        "name": "my-run",
        "config": {"SEED": 1},
        "resume": "allow",
        **own,
    }
    per_head = {"per_head_mean": 2.0, "per_head_lowest": 1.0, "per_head_highest": 3.0}
    assert tracker.rows == [(3, {"ce": 1.5, **per_head}), (4, {})]
    assert tracker.finished == 1


class MLflow(types.ModuleType):
    """A module with the functions of MLflow that are used."""

    def __init__(self):
        super().__init__("mlflow")
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments, **options):
            self.calls.append((name, *arguments, options))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc123"))

        return call


def test_mlflow_gets_settings_and_numbers_and_continues_a_resumed_run(tmp_path, monkeypatch):
    mlflow = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    for step in (3, 4):
        with Board(tmp_path / "my-run", {"mlflow"}, {"SEED": 1, "TEXT": None}) as board:
            board.log(step, {"ce": 1.5, "kd": float("nan")})
    assert mlflow.calls == [
        ("set_experiment", "ssl_kd", {}),
        ("start_run", {"run_name": "my-run"}),
        ("log_params", {"SEED": "1", "TEXT": "None"}, {}),
        ("log_metrics", {"ce": 1.5}, {"step": 3}),
        ("end_run", "FINISHED", {}),
        ("set_experiment", "ssl_kd", {}),
        ("start_run", {"run_id": "abc123"}),
        ("log_metrics", {"ce": 1.5}, {"step": 4}),
        ("end_run", "FINISHED", {}),
    ]


def test_mlflow_knows_a_run_that_failed(tmp_path, monkeypatch):
    mlflow = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    with pytest.raises(RuntimeError), Board(tmp_path / "my-run", {"mlflow"}):
        raise RuntimeError
    assert mlflow.calls[-1] == ("end_run", "FAILED", {})


def test_a_missing_or_failing_tracker_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="REPORT_TO is 'trackio', .* pip install trackio, or set"):
        check_boards({"trackio"})
    with pytest.raises(ImportError, match="REPORT_TO is 'tensorboard', .* set REPORT_TO to 'auto'"):
        check_boards({"tensorboard"})
    assert VisionSettings(report_to="auto").boards == set()
    monkeypatch.setitem(sys.modules, "wandb", Tracker("wandb", RuntimeError("no\nAPI key")))
    with pytest.raises(UserError, match=r"wandb does not accept the run \(no API key\): log in"):
        Board(tmp_path, {"wandb"})


def test_tensorboard_writes_files_and_none_writes_nothing(tmp_path):
    with Board(tmp_path / "a", {"tensorboard"}) as board:
        board.log(1, {"ce": 1.0, "per_head": [1.0, 2.0]})
    assert list((tmp_path / "a" / "tensorboard").iterdir())
    with Board(tmp_path / "b", ()) as board:
        board.log(1, {"ce": 1.0})
    assert not (tmp_path / "b").exists()


def curves(path):
    """The steps of each curve in TensorBoard's files of a run."""
    events = EventAccumulator(str(path / "tensorboard")).Reload()
    return {tag: [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_resumed_run_hides_records_after_its_checkpoint(tmp_path):
    with Board(tmp_path, {"tensorboard"}) as board:
        for step in (10, 20, 30, 40):
            board.log(step, {"ce": step})
    with Board(tmp_path, {"tensorboard"}) as board:
        board.resume(20)
        board.log(25, {"ce": 25})
    assert curves(tmp_path) == {"ce": [10, 20, 25]}
