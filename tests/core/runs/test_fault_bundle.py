"""One small file per bad part: round trips and size limits."""

import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import firstnan.bundle
from firstnan.bundle_file import pack
from firstnan.events import Event
from ssl_kd import cli
from ssl_kd.core.errors import InputError
from ssl_kd.core.files import CorruptFileError
from ssl_kd.core.runs.fault_bundle import Bundle, FlightRecorder, load_bundle, save_bundle
from tests.bundles import rewrite

EVENT = Event(7, "head 3", "loss", "the loss is not finite", "skipped")


def bundle(part="head 3", step=7, **changes):
    given = Bundle(
        event=replace(EVENT, part=part, step=step),
        indices=torch.arange(8),
        tensors={"weights": torch.randn(4, 4), "views": torch.randn(2, 8, 4)},
        settings={"learning_rate": 0.1, "head": "a.B", "none": None, "inner": {"a": [1, True]}},
    )
    return replace(given, **changes)


def test_a_bundle_round_trips(tmp_path):
    given = bundle()
    given.tensors["weights"][1, 1] = float("nan")
    save_bundle(tmp_path / "b.safetensors", given)
    back = load_bundle(tmp_path / "b.safetensors")
    assert (back.event, back.left_out) == (EVENT, [])
    assert back.settings == given.settings
    assert torch.equal(back.indices, given.indices)
    for name, tensor in given.tensors.items():
        torch.testing.assert_close(back.tensors[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_settings_of_other_libraries_become_plain_values(tmp_path):
    settings = {"folder": Path("a"), "rate": np.float64(0.5), "n": np.int64(3), "pair": (1, None)}
    event = replace(EVENT, value=np.float64(math.inf))
    save_bundle(tmp_path / "b.safetensors", bundle(settings=settings, event=event))
    back = load_bundle(tmp_path / "b.safetensors")
    assert back.settings == {"folder": "a", "rate": 0.5, "n": 3, "pair": [1, None]}
    assert type(back.settings["rate"]) is float and back.event == event


def test_a_row_of_a_large_matrix_does_not_bring_the_matrix_along(tmp_path):
    row = torch.zeros(1000, 1000)[3:4]
    save_bundle(tmp_path / "b.safetensors", bundle(tensors={"row": row}))
    assert (tmp_path / "b.safetensors").stat().st_size < 50_000


def test_a_bundle_over_the_limit_drops_its_batch_first(tmp_path):
    mib = 2**18  # float32 numbers
    given = bundle(tensors={"weights": torch.zeros(2 * mib), "views": torch.zeros(mib)})
    save_bundle(tmp_path / "b.safetensors", given, limit_mib=2.5)
    assert load_bundle(tmp_path / "b.safetensors").left_out == ["views"]
    save_bundle(tmp_path / "b.safetensors", given, limit_mib=1)
    assert load_bundle(tmp_path / "b.safetensors").left_out == ["views", "weights"]


def test_only_the_first_fault_of_a_part_and_eight_in_all_are_saved_also_after_a_resume(tmp_path):
    recorder = FlightRecorder(tmp_path)
    first = recorder.record(bundle("head 3"))
    assert first == tmp_path / "head-3-step7.safetensors" and first.exists()
    assert not recorder.wants("head 3") and recorder.record(bundle("head 3", step=8)) is None
    resumed = FlightRecorder(tmp_path)
    assert not resumed.wants("head 3") and resumed.wants("head 33")
    files = [resumed.record(bundle(f"head {i}")) for i in range(10, 20)]
    assert [file is not None for file in files] == [True] * 7 + [False] * 3


def test_a_disk_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    recorder = FlightRecorder(tmp_path / "file" / "folder")
    assert recorder.record(bundle("head 3")) is None
    assert "step 7, head 3: the fault could not be recorded" in caplog.text


@pytest.mark.parametrize("content", [b"", b"junk", None], ids=["empty", "junk", "other tensors"])
def test_load_bundle_refuses_other_files(tmp_path, content):
    path = tmp_path / "b.safetensors"
    if content is None:
        safetensors.torch.save_file({"step": torch.zeros(1)}, path)
    else:
        path.write_bytes(content)
    error = InputError if content == b"junk" else CorruptFileError
    with pytest.raises(error, match=f"{path} is (not a fault bundle|damaged, or is no bundle)"):
        load_bundle(path)


def test_load_bundle_refuses_bundles_of_other_kinds_and_of_former_versions(tmp_path):
    path = tmp_path / "b.safetensors"
    path.write_bytes(pack({"kind": "a forward pass"}, {"x": torch.zeros(1)}))
    with pytest.raises(InputError, match="'a forward pass', expected 'a training step of ssl_kd'"):
        load_bundle(path)
    torch.save({"format": "ssl_kd flight recorder 3"}, path)
    with pytest.raises(InputError, match="Install the commit that wrote it"):
        load_bundle(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("indices", None),
        ("event", "head 3"),
        ("event", {"step": 1}),
        ("event", asdict(EVENT) | {"step": "seven"}),
        ("event", asdict(EVENT) | {"more": 1}),
        ("settings", [1]),
        ("left_out", [3]),
        ("more", 1),
    ],
)
def test_load_bundle_refuses_fields_of_other_names_or_types(tmp_path, field, value):
    path = tmp_path / "b.safetensors"
    save_bundle(path, bundle())
    rewrite(
        path,
        lambda content: content.pop(field) if value is None else content.update({field: value}),
    )
    with pytest.raises(CorruptFileError, match=f"{path} is damaged"):
        load_bundle(path)


def test_firstnan_shows_a_bundle_and_names_the_command_that_runs_it_again(tmp_path, capsys):
    path = tmp_path / "b.safetensors"
    save_bundle(path, bundle())
    assert firstnan.bundle.main([str(path)]) == 0
    shown = capsys.readouterr().out
    assert "head 3, step 7: the loss is not finite" in shown and f"ssl_kd replay {path}" in shown
    assert firstnan.bundle.main([str(path), "--model", "torch.nn:Identity"]) == 2
    assert "expected 'a forward pass'" in capsys.readouterr().err


def test_ssl_kd_shows_a_bundle_of_a_forward_pass(tmp_path, capfd):
    path, texts = tmp_path / "b.safetensors", {"contains": "one input", "report": "aten.div, row 3"}
    path.write_bytes(pack(texts | {"kind": firstnan.bundle.KIND}, {"x": torch.zeros(1)}))
    assert cli.main(["replay", str(path)]) == 0
    assert "contains   one input\naten.div, row 3" in capfd.readouterr().out
    path.write_bytes(pack(texts | {"kind": "a poem"}, {"x": torch.zeros(1)}))
    assert cli.main(["replay", str(path)]) == 2
    assert "holds 'a poem', expected 'a training step of ssl_kd'" in capfd.readouterr().err
