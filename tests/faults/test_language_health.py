"""Test rows 74 to 79: a requested term that is missing is never healthy."""

import dataclasses
import json
import math
import shutil

import pytest
import torch

transformers = pytest.importorskip("transformers")

from ssl_kd.cli.failures import VISION_MEMORY  # noqa: E402
from ssl_kd.core.errors import InputError  # noqa: E402
from ssl_kd.core.runs.writer import Writer  # noqa: E402
from ssl_kd.language.models.causal import load_causal_lm  # noqa: E402
from ssl_kd.language.models.student import NotFinite, add_lora, save_student  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.teachers.caching import cache_teacher  # noqa: E402
from ssl_kd.language.train.step import precision_of  # noqa: E402
from tests.faults.inject import events, metrics, no_run, one_line  # noqa: E402
from tests.faults.inject_language import (  # noqa: E402
    EMBEDDING,
    NAN,
    UP,
    make_model,
    student_of,
)
from tests.faults.matrix import row  # noqa: E402
from tests.faults.test_language import HALF  # noqa: E402
from tests.marks import slow  # noqa: E402

# peft uses a deprecated name of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def poison(tensors):
    tensors[UP][3, 0] = NAN


def overflow(tensors):
    """Scale two factors so that only their intermediate result overflows float16."""
    tensors[UP] *= 3e4
    tensors[UP.replace("up", "down")] /= 3e4


# --- teachers -------------------------------------------------------------------------------------


@row(74)
@pytest.mark.parametrize(
    "changes",
    [
        {"alpha_ce": 0.0, "alpha_kd": 1.0},
        {"packing": False},
        {"align": "chunks", "student_model": "stranger"},
        {"max_steps": 5},
    ],
    ids=["divergence alone", "one document a row", "another tokenizer", "a few steps"],
)
def test_a_teacher_that_gives_nan_is_refused_with_its_weight(world, distill, changes):
    if "student_model" in changes:
        changes = changes | {"student_model": str(world.stranger)}
    folder = world.with_fault("teacher", poison)
    code, error = distill(world.settings(teacher_model=str(folder), **changes))
    line = one_line(error)
    assert code == 2 and f"the output of the teacher {folder} on held-out text" in line
    assert f"teacher weight {UP} came in not finite (1 of" in line and "[3, 0]" in line
    assert "use another copy" in line and "memory" not in line and "learning_rate" not in line
    assert "attend to each other" not in error
    assert no_run(world.settings())


@row(74)
def test_a_nan_that_few_tokens_meet_is_found_where_text_is_judged(world, distill):
    token = world.tokenizer(world.questions.read_text().splitlines()[0]).input_ids[5]
    folder = world.with_fault("teacher", lambda tensors: tensors[EMBEDDING][token].fill_(NAN))
    code, error = distill(world.settings(teacher_model=str(folder)))
    assert code == 2 and f"teacher weight {EMBEDDING} came in not finite" in one_line(error)


@row(74)
def test_the_cache_of_such_a_teacher_is_refused_with_its_weight(world, tmp_path):
    asked = world.settings(
        teacher_model=str(world.with_fault("teacher", poison)),
        teacher_cache=str(tmp_path / "cache"),
    )
    with pytest.raises(InputError, match=rf"is NaN .* teacher weight {UP} came in not finite"):
        cache_teacher(asked)


@row(74)
def test_a_teacher_that_is_not_learned_from_may_be_faulty(world):
    """Check that the teacher is still evaluated and its table row has no scores."""
    folder = world.with_fault("teacher", poison)
    path = run(world.settings(teacher_model=str(folder), alpha_kd=0.0, alpha_ce=1.0))
    table = {line["name"]: line for line in metrics(path)["table"]}
    assert table["teacher"]["perplexity"] is None
    assert table["student"]["nll"] < table["student before"]["nll"]


@row(75)
@pytest.mark.parametrize("bf16", [True, slow(False)])
def test_a_teacher_that_overflows_in_float16_runs_wider(world, monkeypatch, caplog, bf16):
    halves, half = ((torch.bfloat16,) if bf16 else (), ""), torch.float16

    def emulated(settings):
        precision = precision_of(settings)
        if settings.model_dtype != "float16":
            return precision
        return dataclasses.replace(precision, teacher=half, student=half, scale=True)

    monkeypatch.setattr("ssl_kd.core.precision.DeviceInfo.halves", lambda self: halves)
    monkeypatch.setattr("ssl_kd.language.run.precision_of", emulated)
    folder = world.with_fault("teacher", overflow)
    path = run(world.settings(teacher_model=str(folder), **HALF))
    used = "bfloat16" if bf16 else "float32"
    words = f"the teacher is not finite in float16, so it runs in {used}"
    assert words in caplog.text and "overflow in fp16" in caplog.text
    recorded = json.loads((path / "config.json").read_text())["precision"]
    assert words in recorded and f"teacher {'bf16' if bf16 else 'fp32'}, students fp16" in recorded
    assert metrics(path)["learned_from"] == {"ce": 8, "kd": 8} and not events(path)
    table = {line["name"]: line for line in metrics(path)["table"]}
    plain = run(world.settings(run_name="plain"))
    alike = {line["name"]: line for line in metrics(plain)["table"]}["teacher"]
    assert table["teacher"]["nll"] == pytest.approx(alike["nll"], rel=1e-3)


@row(75)
def test_a_teacher_that_is_nan_in_float16_and_beyond_is_refused(world, distill, float16_here):
    folder = world.with_fault("teacher", poison)
    code, error = distill(world.settings(teacher_model=str(folder), **HALF))
    assert code == 2 and f"teacher weight {UP} came in not finite" in one_line(error)
    assert no_run(world.settings())


# --- students -------------------------------------------------------------------------------------


@row(76)
@pytest.mark.parametrize("changes", [{"max_steps": 2}, {"max_steps": 50}])
def test_a_student_that_is_not_finite_is_refused(world, distill, changes):
    folder = world.with_fault("student", poison)
    code, error = distill(world.settings(student_model=str(folder), **changes))
    line = one_line(error)
    assert code == 2 and f"the student {folder} has NaN or infinity before training" in line
    assert f"student weight {UP} came in not finite" in line and "use another copy" in line
    assert "attend to each other" not in error
    assert no_run(world.settings())


@row(76)
def test_weights_that_are_not_finite_are_not_saved(world):
    model = make_model(vocab_size=len(world.tokenizer))
    model.model.norm.weight.data[3] = math.inf
    with pytest.raises(NotFinite, match=r"the weight model\.norm\.weight of the model holds NaN"):
        save_student(model, world.tokenizer, world.own / "sick", "A tiny model.")
    assert not list(world.own.iterdir())


# --- terms ----------------------------------------------------------------------------------------


@row(77)
def test_a_divergence_that_stays_out_ends_the_run_with_its_cause(world, distill):
    """Poison a token of every training row that no held-out row contains."""
    known = [{"text": line} for line in ("~ the fox", "~ a dog", "~ the dog jumps")]
    text = world.own / "text.jsonl"
    text.write_text("".join(json.dumps(line) + "\n" for line in known * 8))
    token = world.tokenizer("~").input_ids[-1]
    folder = world.with_fault("teacher", lambda tensors: tensors[EMBEDDING][token].fill_(NAN))
    asked = world.settings(teacher_model=str(folder), data_path=str(text), max_steps=30)
    code, error = distill(asked)
    assert code == 3
    lines = error[error.index("ssl_kd: ") :].splitlines()
    assert lines[0].startswith("ssl_kd: step 10: kd was cut out of each of the last 10 steps")
    assert lines[0].endswith("learned from ce alone")
    assert lines[1].startswith("  kd, step 1: rows ") and "use another copy of the file" in lines[1]
    assert lines[2].startswith("  ssl_kd replay ") and len(lines) == 3  # no setting fixes a teacher


@row(77)
def test_steps_of_each_term_are_counted_when_training_continues(world, capsys):
    path = run(world.settings(teacher_model=str(world.sick)))
    learned = metrics(path)["learned_from"]
    actions = [event["action"] for event in events(path)]
    assert learned == {"ce": 8, "kd": 8 - actions.count("cut out")}
    assert 0 < actions.count("rows left out") < 8
    assert 0.5 < metrics(path)["success_rate"] < 1  # of the tokens, without those rows

    alone = run(world.settings(teacher_model=str(world.sick), alpha_ce=0.0, run_name="alone"))
    learned = metrics(alone)["learned_from"]
    assert learned == {"kd": 8} and 0.5 < metrics(alone)["success_rate"] < 1


# --- the end of a run -----------------------------------------------------------------------------


@row(78)
def test_a_disk_that_is_full_at_the_last_checkpoint_loses_no_student(world, monkeypatch, caplog):
    whole = run(world.settings(run_name="whole"))
    monkeypatch.setattr(Writer, "save_checkpoint", full_at(8))
    path = run(world.settings(run_name="full"))
    assert "the last checkpoint, of step 8, could not be written: " in caplog.text
    assert student_of(path) == student_of(whole)
    assert metrics(path)["table"] == metrics(whole)["table"]


@row(78)
def test_a_disk_that_is_full_at_the_last_checkpoint_loses_no_heads(settings, monkeypatch, caplog):
    from ssl_kd.vision.run import run

    whole = run(settings(run_name="whole"))
    steps = metrics(whole)["steps"]
    monkeypatch.setattr(Writer, "save_checkpoint", full_at(steps))
    path = run(settings(run_name="full"))
    assert f"the last checkpoint, of step {steps}, could not be written: " in caplog.text
    assert (path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def full_at(last, save=Writer.save_checkpoint):
    """Return a checkpoint writer that finds the disk full at the last step."""

    def write(folder, step, tensors):
        if step == last:
            raise OSError(28, "No space left on device", "checkpoint")
        save(folder, step, tensors)

    return write


# --- adapters -------------------------------------------------------------------------------------


@row(79)
@pytest.mark.parametrize("who", ["student", "teacher"])
@pytest.mark.parametrize("through", [1, 2])
def test_adapters_of_themselves_are_refused(world, distill, who, through):
    folders = [world.own / f"adapters {i}" for i in range(through)]
    base = world.own / "base"
    shutil.copytree(world.student, base)
    save_student(add_lora(load_causal_lm(base).model, 4), world.tokenizer, folders[0], "Adapters.")
    for folder in folders[1:]:
        shutil.copytree(folders[0], folder)
    for folder, other in zip(folders, folders[1:] + folders[:1], strict=True):
        file = folder / "adapter_config.json"
        described = json.loads(file.read_text()) | {"base_model_name_or_path": str(other)}
        file.write_text(json.dumps(described))
    code, error = distill(world.settings(**{f"{who}_model": str(folders[0])}))
    line = one_line(error)
    assert code == 2 and str(folders[0] / "adapter_config.json") in line
    assert "these adapters are their own base" in line
    assert "base_model_name_or_path" in line and no_run(world.settings())


@row(79)
@pytest.mark.parametrize(
    "content", ["[" * 10**5, "{", "[]", '{"base_model_name_or_path": 5}', "\ufeff\xff", "9" * 5000]
)
def test_an_invalid_adapter_configuration_is_one_line(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match="adapter_config.json cannot be used .*: set base_model_"):
        load_causal_lm(tmp_path)


@row(44)
def test_out_of_memory_names_the_settings_of_this_mode(world, distill, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("ssl_kd.language.run.prepare", full)
    code, error = distill(world.settings())
    line = one_line(error)
    assert code == 1 and "BLOCK_SIZE" in line and "GRADIENT_CHECKPOINTING" in line
    assert "N_HEADS" not in line and "EXTRACT_BATCH_SIZE" not in line
    assert VISION_MEMORY not in line
