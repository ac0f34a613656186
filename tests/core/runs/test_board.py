"""The numbers of a run reach TensorBoard and the trackers."""

import sys
import types
from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from firstnan.events import Event, EventLog
from ssl_kd.core.errors import Interrupted, UserError
from ssl_kd.core.runs.board import EVENTS, Board, check_boards
from ssl_kd.vision.settings import VisionSettings


class Tracker(types.ModuleType):
    """A module with the functions of wandb and trackio that are used."""

    Table = staticmethod(lambda **content: content)

    def __init__(self, name, fault=None):
        super().__init__(name)
        self.started, self.rows, self.finished, self.fault = {}, [], 0, fault
        self.alerts, self.exit_code = [], None

    def init(self, **arguments):
        if self.fault:
            raise self.fault
        self.started = arguments

    def log(self, metrics, step=None):
        self.rows.append((step, metrics))

    def alert(self, title, text):
        self.alerts.append((title, text))

    def finish(self, exit_code=None):
        self.finished += 1
        self.exit_code = exit_code


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
    per_head = {"per_head_median": 2.0, "per_head_lowest": 1.0, "per_head_highest": 3.0}
    assert tracker.rows == [(3, {"ce": 1.5, **per_head, EVENTS: 0}), (4, {EVENTS: 0})]
    assert tracker.finished == 1 and tracker.alerts == []


DROPPED = Event(2, "head 1", "loss", "its loss is not finite", "skipped")
RESTORED = Event(4, "head 1", "escalation", "10 faults in a row", "restored")


def with_events(path, names):
    """Log a run in which the guard acts at steps 2, 3 and 4, at last after the last record."""
    events = EventLog(path / "events.jsonl")
    path.mkdir()
    with Board(path, names, {"SEED": 1}, events) as board:
        board.log(1, {"ce": 1.0})
        events.extend([DROPPED, replace(DROPPED, step=3)])
        board.log(3, {"ce": 2.0})
        board.log(3, {"final/acc": 1.0})  # does not hide the events of the step
        events.extend([RESTORED])


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_shows_the_events_of_the_guard(tmp_path, monkeypatch, name):
    tracker = Tracker(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    with_events(tmp_path / "a", {name})
    *rows, (step, table) = tracker.rows
    assert [(at, row.get(EVENTS)) for at, row in rows] == [(1, 0), (3, 2), (3, None), (4, 1)]
    assert tracker.alerts == [  # the first of each kind
        ("guard: loss, skipped", "step 2, head 1: its loss is not finite; skipped"),
        ("guard: escalation, restored", "step 4, head 1: 10 faults in a row; restored"),
    ]
    assert step == 4 and [row[0] for row in table["guard/table"]["data"]] == [2, 3, 4]
    assert table["guard/table"]["columns"] == "step part stage reason action value".split()


def test_tensorboard_shows_the_events_of_the_guard_and_bands(tmp_path):
    with_events(tmp_path / "a", {"tensorboard"})
    shown = EventAccumulator(str(tmp_path / "a" / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in shown.Scalars(EVENTS)] == [(1, 0), (3, 2), (4, 1)]
    texts = shown.Tensors(f"{EVENTS}/text_summary")
    assert [e.step for e in texts] == [2, 3, 4]
    assert texts[0].tensor_proto.string_val == [str(DROPPED).encode()]

    with Board(tmp_path / "b", {"tensorboard"}) as board:
        board.log(1, {"ce": 1.0})
        board.log(2, {"loss": [1.0, 2.0, 9.0], "grad_norm": [1.0, 1.0, 1.0]})
    shown = EventAccumulator(str(tmp_path / "b" / "tensorboard")).Reload()
    assert shown.Scalars("loss_median")[0].value == 2
    (layout,) = shown.Tensors("custom_scalars__config__")
    assert b"loss_median" in layout.tensor_proto.string_val[0]
    assert b"grad_norm_highest" in layout.tensor_proto.string_val[0]


@pytest.mark.parametrize(
    ("error", "of_wandb", "of_mlflow"),
    [(RuntimeError("no memory"), 1, "FAILED"), (Interrupted(2, None), 1, "KILLED")],
)
def test_trackers_know_a_run_that_failed_or_was_stopped(
    tmp_path, monkeypatch, error, of_wandb, of_mlflow
):
    wandb, trackio, mlflow = Tracker("wandb"), Tracker("trackio"), MLflow()
    for module in (wandb, trackio, mlflow):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(type(error)), Board(tmp_path / "a", {"wandb", "trackio", "mlflow"}):
        raise error
    assert wandb.exit_code == of_wandb and mlflow.calls[-1] == ("end_run", of_mlflow, {})
    assert trackio.alerts == [("the run ended early", str(error))]
    assert (wandb.alerts, wandb.finished, trackio.finished) == ([], 1, 1)
    with Board(tmp_path / "b", {"wandb"}):
        pass
    assert wandb.exit_code == 0


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
        ("log_metrics", {"ce": 1.5, EVENTS: 0}, {"step": 3}),
        ("end_run", "FINISHED", {}),
        ("set_experiment", "ssl_kd", {}),
        ("start_run", {"run_id": "abc123"}),
        ("log_metrics", {"ce": 1.5, EVENTS: 0}, {"step": 4}),
        ("end_run", "FINISHED", {}),
    ]


def test_mlflow_shows_the_events_of_the_guard(tmp_path, monkeypatch):
    mlflow = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    with_events(tmp_path / "a", {"mlflow"})
    assert [call[2] for call in mlflow.calls if call[0] == "set_tag"] == [
        "2 skipped",
        "2 skipped, 1 restored",
    ]
    file = str(tmp_path / "a" / "events.jsonl")
    assert mlflow.calls[-2:] == [("log_artifact", file, {}), ("end_run", "FINISHED", {})]


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


def marks(path):
    """The events of the guard in TensorBoard's files of a run: the text at each step."""
    everything = {"tensors": 0}  # by default ten
    shown = EventAccumulator(str(path / "tensorboard"), everything).Reload()
    texts: dict[int, list[str]] = {}
    for text in shown.Tensors(f"{EVENTS}/text_summary"):
        texts.setdefault(text.step, []).append(text.tensor_proto.string_val[0].decode())
    return {step: "\n\n".join(of_step) for step, of_step in texts.items()}


def test_a_resumed_run_hides_records_after_its_checkpoint(tmp_path, monkeypatch):
    # Files of one second are read in the order of their numbers as texts, 10 before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    with Board(tmp_path, {"tensorboard"}) as board:
        for step in (10, 20, 30, 40):
            board.log(step, {"ce": step})
    with Board(tmp_path, {"tensorboard"}) as board:
        board.resume(20)
        board.log(25, {"ce": 25})
    assert curves(tmp_path) == {"ce": [10, 20, 25], EVENTS: [10, 20, 25]}
