"""The main job of the language mode, end to end on tiny models: its files, and resuming."""

import gc
import json
import logging
import math
import signal
import weakref
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from huggingface_hub import ModelCard  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from firstnan import TooFewHealthyParts  # noqa: E402
from ssl_kd.core.files import load_tensors  # noqa: E402
from ssl_kd.core.runs.folder import RunFinished, RunFolderError  # noqa: E402
from ssl_kd.core.runs.stop import Interrupted  # noqa: E402
from ssl_kd.core.settings import SettingsError  # noqa: E402
from ssl_kd.core.shards import FingerprintMismatch  # noqa: E402
from ssl_kd.language.evaluate.judge import judge_tokens  # noqa: E402
from ssl_kd.language.evaluate.judge_in_run import judge_teachers  # noqa: E402
from ssl_kd.language.models.causal import load_causal_lm  # noqa: E402
from ssl_kd.language.models.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.language.models.mixture import Mixture  # noqa: E402
from ssl_kd.language.models.router import RouterStep  # noqa: E402
from ssl_kd.language.prepare import prepare  # noqa: E402
from ssl_kd.language.report.page import write_report  # noqa: E402
from ssl_kd.language.run import BestStudent, run  # noqa: E402
from ssl_kd.language.teachers.cache import TeacherCache  # noqa: E402
from ssl_kd.language.teachers.caching import cache_teacher  # noqa: E402
from ssl_kd.language.teachers.load import trained_teacher  # noqa: E402
from ssl_kd.language.text.rows import split_held_out, texts_of  # noqa: E402
from ssl_kd.language.train.step import Distiller, precision_of  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.core.runs.test_board import marks  # noqa: E402
from tests.faults.inject import events, metrics, stop_at  # noqa: E402
from tests.marks import slow  # noqa: E402
from tests.tiny import sentence  # noqa: E402

ROOT = Path(__file__).parents[2]
TIMES = ("tokens_per_second",)


def config(path):
    return json.loads((path / "config.json").read_text())


def log_lines(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: v for name, v in row.items() if name not in TIMES} for row in rows]


def table(path):
    return {row["name"]: row for row in metrics(path)["table"]}


def student_of(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path / "student").eval()


def weights(path):
    return (path / "student" / "model.safetensors").read_bytes()


def last_checkpoint(path):
    return load_tensors(max((path / "checkpoint").glob("step_*.pt")))["tensors"]


# --- what a run leaves ----------------------------------------------------------------------------


def test_a_run_leaves_every_file_with_sense_in_it(settings):
    stages = []
    path = run(
        settings(), progress=lambda stage, at, total, info: stages.append((stage, at, total))
    )
    files = {file.name for file in path.iterdir()}
    assert files >= {"config.json", "metrics.jsonl", "events.jsonl", "metrics.json", "student"}
    assert (path.parent / "latest").resolve() == path
    assert all(at <= total for _, at, total in stages)
    assert {"prepare", "judge", "train"} == {stage for stage, *_ in stages}

    recorded = config(path)
    assert recorded["mode"] == "language" and recorded["settings"]["BLOCK_SIZE"] == 24
    assert recorded["teacher"]["layers"] == 2 and recorded["student"]["layers"] == 1
    assert recorded["teacher"]["vocabulary"] == recorded["student"]["vocabulary"] == 320
    assert recorded["student"]["trained"] == recorded["student"]["parameters"] > 0
    assert recorded["data"]["documents"] == 48 and recorded["data"]["left_out"]
    assert 0 < recorded["data"]["eval_tokens"] < recorded["data"]["train_tokens"]
    assert "teacher fp32" in recorded["precision"] and "transformers" in recorded["versions"]

    lines = log_lines(path)
    looks = [line for line in lines if "eval" in line]
    assert [line["step"] for line in lines if "eval" not in line] == [2, 4, 6]
    assert [line["step"] for line in looks] == [3, 6]
    assert looks[1]["eval"]["nll"] < looks[0]["eval"]["nll"]

    found = metrics(path)
    assert [row["name"] for row in found["table"]] == ["teacher", "student before", "student"]
    assert (found["steps"], found["best_step"], found["success_rate"]) == (6, 6, 1.0)
    assert found["events"] == len(events(path)) == 0
    assert found["cache"] is found["alignment"] is None
    rows = table(path)
    assert rows["student"]["perplexity"] < rows["student before"]["perplexity"]
    assert rows["student"]["nll"] != looks[1]["eval"]["nll"]  # of other rows than the choice
    assert recorded["data"]["validated_apart"] and recorded["data"]["validation_tokens"] > 0
    assert found["learned_from"] == {"ce": 6, "kd": 6}
    assert rows["student"]["kl"] > 0 and 0 <= rows["student"]["agreement"] <= 1
    assert 0 < rows["student"]["acceptance"] < 1 and rows["teacher"]["acceptance"] is None
    assert rows["teacher"]["kl"] is None and rows["teacher"]["bits_per_byte"] > 0
    (shown,) = found["generations"]
    assert {"prompt", "reference", "teacher", "before", "after"} == set(shown)
    assert shown["prompt"] and {"prepare", "judge", "train", "save", "total"} <= set(
        found["seconds"]
    )

    report = write_report(path)
    assert report == path / "report.html" and "perplexity" in report.read_text().lower()


def test_the_student_that_is_saved_is_the_best_checkpoint(settings, monkeypatch, caplog):
    """Even where the last steps made it worse."""
    caplog.set_level(logging.INFO, "ssl_kd")
    rates = iter([1e-2] * 3 + [1.0] * 3)
    monkeypatch.setattr("ssl_kd.language.train.loop.learning_rate_at", lambda *args: next(rates))
    path = run(settings())
    looks = [line["eval"]["nll"] for line in log_lines(path) if "eval" in line]
    assert looks[1] > looks[0]
    assert metrics(path)["best_step"] == 3
    seen = [line for line in caplog.messages if line.startswith("student: held-out perplexity ")]
    ends = ["at step 0", "at step 3; the best so far", "at step 6"]
    assert [line.endswith(end) for line, end in zip(seen, ends, strict=True)] == [True] * 3
    student = student_of(path)
    best = last_checkpoint(path)["best"]
    assert (best["step"], best["nll"]) == (3, looks[0])
    for name, p in student.named_parameters():
        assert torch.equal(p, best["weights"][name])
    tokenizer = transformers.AutoTokenizer.from_pretrained(path / "student")
    assert tokenizer("Lily sees").input_ids[1:]
    card = (path / "student" / "README.md").read_text()
    assert "student before" in card and (path / "student" / "generation_config.json").exists()


class Scored:
    """A student's scores on the rows that it is chosen by."""

    def __init__(self, nll):
        self.nll, self.perplexity = nll, None if nll is None else math.exp(nll)


def test_best_keeps_the_lowest_finite_value(tiny):
    distiller = tiny.distiller()
    head = distiller.student.lm_head.weight.detach()
    best = BestStudent(distiller)
    for step, nll in enumerate([None, 3.0, 2.0, None, 2.5]):
        head.fill_(step)
        best.offer(step, Scored(nll))
    head[0, 0] = math.nan  # of a token that no held-out text holds
    best.offer(5, Scored(1.0))
    again = BestStudent(distiller)
    again.load(best.state())
    again.put_back()
    assert (again.step, again.nll) == (2, 2.0) and (head == 2).all()


def test_a_student_that_got_worse_is_saved_untrained(settings, models, caplog):
    """Step 0 is evaluated too."""
    worse = settings(student_model=models("student"), learning_rate=10.0, clip_grad=None)
    path = run(worse)
    looks = [line["eval"]["nll"] for line in log_lines(path) if "eval" in line]
    rows = table(path)
    before = {name: value for name, value in rows["student before"].items() if name != "name"}
    assert {key: value for key, value in rows["student"].items() if key != "name"} == before
    assert metrics(path)["best_step"] == 0 and min(looks) > 2 * before["nll"]
    first = transformers.AutoModelForCausalLM.from_pretrained(models("student"))
    assert same(dict(first.named_parameters()), dict(student_of(path).named_parameters()))
    assert "training did not improve the score on held-out text" in caplog.text
    assert (
        "better than the student before training, which was kept" in write_report(path).read_text()
    )


@pytest.mark.parametrize(
    ("n", "most", "parts"),
    [
        (500, 200, (slice(0, 200), slice(200, 400))),
        (301, 200, (slice(0, 150), slice(150, 300))),
        (16, 200, (slice(0, 8), slice(8, 16))),
        (15, 8, (slice(0, 8), slice(0, 8))),
    ],
)
def test_no_choice_is_made_on_the_rows_that_are_reported(n, most, parts):
    """Unless there is too little text for two parts."""
    found = split_held_out(n, most)
    assert [list(range(n))[part] for part in found] == [list(range(n))[part] for part in parts]


@pytest.mark.parametrize(
    ("epochs", "rows", "accumulate", "steps"), [(1, 8, 1, 2), (3, 9, 1, 7), (0.1, 4, 2, 1)]
)
def test_epochs_stand_for_steps(epochs, rows, accumulate, steps, tiny):
    chosen = tiny.settings(epochs=epochs, gradient_accumulation_steps=accumulate)
    assert chosen.n_steps(rows) == steps
    assert tiny.settings(max_steps=7).n_steps(rows) == 7


# --- text ---


def test_held_out_data_is_not_learned_from(settings, text_file, tmp_path, caplog):
    lines = Path(text_file).read_text().splitlines(keepends=True)
    (tmp_path / "both.jsonl").write_text("".join(lines[:10]))
    chosen = settings(eval_path=str(tmp_path / "both.jsonl"))
    path = run(chosen)
    assert config(path)["data"]["documents"] == 38
    assert "10 documents are also in the evaluation data" in config(path)["data"]["left_out"]
    assert "10 of 48 training documents are also in the held-out text" in caplog.text
    train_set, held_out = texts_of(chosen)
    assert not {e.content() for e in train_set.examples} & {e.content() for e in held_out.examples}
    with pytest.raises(ValueError, match="every document of .* is also in"):
        run(settings(eval_path=text_file, run_name="b"))


# --- students and teachers ------------------------------------------------------------------------


# peft asks transformers by a name that is deprecated.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_of_a_student_with_a_name_are_saved_alone(settings, models):
    peft = pytest.importorskip("peft")
    path = run(settings(student_model=models("student"), lora_rank=2))
    recorded = config(path)["student"]
    assert 0 < recorded["trained"] < recorded["parameters"] / 4
    assert table(path)["student"]["nll"] < table(path)["student before"]["nll"]
    card = ModelCard.load(path / "student" / "README.md")
    assert "base_model" not in card.data.to_dict()  # a local folder
    for words in ("- base model: student", "- documents: 48 (", "--lora_rank=2", "torch "):
        assert words in card.text
    base = transformers.AutoModelForCausalLM.from_pretrained(models("student"))
    adapted = peft.PeftModel.from_pretrained(base, path / "student")
    best = last_checkpoint(path)["best"]["weights"]
    for name, p in adapted.named_parameters():
        if "lora_" in name:
            assert torch.equal(p, best[name]), name


# peft asks transformers by a name that is deprecated.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_of_a_new_student_are_merged(settings):
    path = run(settings(lora_rank=2, student_model="layers:1"))
    assert (path / "student" / "model.safetensors").exists()
    assert not (path / "student" / "adapter_config.json").exists()
    assert student_of(path).config.num_hidden_layers == 1


def test_a_student_cut_from_the_teacher_starts_with_its_layers(settings):
    path = run(settings(student_model="layers:2", max_steps=1, learning_rate=0.0))
    rows = table(path)
    assert rows["student"]["nll"] == pytest.approx(rows["teacher"]["nll"], rel=1e-6)
    assert rows["student"]["kl"] == pytest.approx(0, abs=1e-6) and rows["student"]["agreement"] == 1


def test_without_a_teacher_it_is_cross_entropy_alone(settings):
    path = run(settings(teacher_model="none"))
    assert list(table(path)) == ["student before", "student"]
    assert config(path)["teacher"] is None and config(path)["student"]["vocabulary"] % 8 == 0
    assert all(line["kd"] is None for line in log_lines(path) if "kd" in line)
    assert table(path)["student"]["kl"] is None
    assert "report" in write_report(path).name


def test_a_teacher_is_trained_once_where_there_is_none(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"teacher_model": "train:1x32:12"}
    stages = []
    tell = lambda stage, *rest: stages.append(stage)  # noqa: E731
    one = run(settings(**small), progress=tell)
    assert stages.count("teacher") == 12
    (folder,) = (tmp_path / "data" / "teachers").iterdir()
    assert table(one)["teacher"]["perplexity"] < 300
    # The teacher's own training asks for nothing of the run's: no router, no cache, no clamp.
    cache = {"teacher_cache": str(tmp_path / "cache"), "cache_method": "topk"}
    cache_teacher(settings(**small, **cache))
    two = run(settings(**small, **cache, run_name="b"), progress=tell)
    assert stages.count("teacher") == 12 and metrics(two)["cache"]["method"] == "topk"
    assert [folder] == list((tmp_path / "data" / "teachers").iterdir())
    for changes in ({"seed": 1}, {"weight_decay": 0.1}, {"warmup_fraction": 0.5}):
        stages.clear()
        chosen = settings(**small, **changes)
        texts, _ = texts_of(chosen)
        trained_teacher(chosen, texts, precision_of(chosen), tell)
        assert stages.count("teacher") == 12, changes


@pytest.mark.parametrize("alpha_kd", [0.0, 0.5])
def test_a_cached_teacher_is_released_once_it_is_scored(settings, tmp_path, alpha_kd):
    chosen = settings(
        teacher_cache=str(tmp_path / "cache"), cache_method="topk", alpha_kd=alpha_kd, alpha_ce=0.5
    )
    cache_teacher(chosen)
    prepared = prepare(chosen, precision_of(chosen), lambda *args: None)
    model = weakref.ref(prepared.teacher.lms[0].model)
    assert model() is not None
    prepared, (row,), _ = judge_teachers(prepared)
    gc.collect()
    assert model() is None and row["perplexity"] > 0


@pytest.mark.parametrize("mode", [slow("all"), "auto"])
def test_a_cache_stands_in_for_the_teacher(settings, tmp_path, models, mode):
    """All of the vocabulary in it, the same training; the teacher itself is judged, no more."""
    cached = {"cache_method": "topk:320", "router_mode": mode}
    if mode == "all":
        cached["teacher_model"] = models("mixture")
    live = run(settings(**cached, run_name="live"))
    cached["teacher_cache"] = str(tmp_path / "cache")
    cache_teacher(settings(**cached))
    path = run(settings(**cached))
    assert table(path)["student"]["nll"] == pytest.approx(table(live)["student"]["nll"], abs=1e-3)
    assert table(path)["teacher"] == table(live)["teacher"]
    assert config(path)["teacher"] == config(live)["teacher"]
    assert metrics(path)["generations"][0]["teacher"]
    assert table(path)["student"]["kl"] is None
    assert metrics(path)["cache"]["k"] == 320
    rows = zip(log_lines(live), log_lines(path), strict=True)
    assert all(a["kd"] == pytest.approx(b["kd"], abs=1e-2) for a, b in rows if "kd" in a)
    others = [{"block_size": 16}, {"temperature": 3.0}]
    if mode != "all":
        others.append({"teacher_model": models("student")})
    for changes in others:
        with pytest.raises(FingerprintMismatch):
            run(settings(**{**cached, **changes}, run_name="other"))


def test_train_rows_limit_a_run_and_its_cache(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for rows in (5, 6):
        run(settings(train_rows=rows, teacher_cache="auto", run_name=str(rows)))
    caches = (tmp_path / "data" / "teacher_caches").iterdir()
    assert {TeacherCache.open(folder).n for folder in caches} == {5, 6}


def test_hidden_states_stand_in_for_the_teacher_at_any_temperature(settings, tmp_path):
    cached = {"cache_method": "hidden", "teacher_cache": str(tmp_path / "cache")}
    cache_teacher(settings(**cached))
    for temperature, divergence in ((2.0, "forward_kl"), (3.0, "reverse_kl")):
        own = {"temperature": temperature, "divergence": divergence}
        live = run(settings(**own, run_name=f"live {temperature}"))
        path = run(settings(**own, **cached, run_name=f"cached {temperature}"))
        rows = zip(log_lines(live), log_lines(path), strict=True)
        assert all(a["kd"] == pytest.approx(b["kd"], rel=1e-4) for a, b in rows if "kd" in a)
        assert table(path)["student"]["nll"] == pytest.approx(
            table(live)["student"]["nll"], rel=1e-5
        )
    assert metrics(path)["cache"]["stored"] == "float32"
    with pytest.raises(FingerprintMismatch):
        run(settings(**cached, block_size=16, run_name="other"))


# --- teachers that do not match -------------------------------------------------------------------


def test_a_mixture_with_a_router_that_learns(settings, models, tmp_path):
    sar = {"teacher_model": models("mixture"), "router_mode": "sar", "router_lr": 1e-2}
    path = run(settings(**sar))
    names = {"router", "router_drift", "router_entropy", "teacher_ce"}
    assert all(names <= set(line) for line in log_lines(path) if "eval" not in line)
    router = last_checkpoint(path)["distiller"]["router"]
    assert router["routers"].keys() and router["optimizer"]["state"]
    file = path / "router.safetensors"
    again = run(settings(**{**sar, "router_weights": str(file), "run_name": "again"}))
    first = next(line for line in log_lines(again) if "eval" not in line)
    assert first["router_drift"] > next(iter(log_lines(path)))["router_drift"]
    assert "report" in write_report(path).name


def test_the_preset_lets_the_teacher_decide_about_routing(settings, models):
    dense = run(settings(router_mode="auto", run_name="dense"))
    assert not (dense / "router.safetensors").exists()
    resolved = {"LEARNING_RATE": 1e-2, "DIVERGENCE": "forward_kl", "ROUTER_MODE": "native"}
    assert config(dense)["resolved"] == resolved
    mixture = run(settings(router_mode="auto", teacher_model=models("mixture"), learning_rate=None))
    assert (mixture / "router.safetensors").exists()
    assert config(mixture)["settings"]["ROUTER_MODE"] == "auto"
    resolved = {"LEARNING_RATE": 3e-3, "DIVERGENCE": "reverse_kl", "ROUTER_MODE": "sar"}
    assert config(mixture)["resolved"] == resolved


def test_all_rows_are_compared_with_the_original_teacher(settings, models, monkeypatch):
    monkeypatch.setitem(RouterStep.__init__.__kwdefaults__, "drift_limit", 1e9)
    sar = {"teacher_model": models("mixture"), "router_mode": "sar", "router_lr": 0.1}
    path = run(settings(**sar))
    routers, before = load_file(path / "router.safetensors"), load_causal_lm(models("mixture"))
    state = before.model.state_dict()
    assert all((router - state[name]).abs().max() > 0.1 for name, router in routers.items())
    chosen = settings(**sar)
    task = prepare(chosen, precision_of(chosen), lambda *args: None)
    teacher = FrozenTeacher(before.model)
    found = judge_tokens(student_of(path), task.eval_blocks, teachers=[teacher], batch_size=4)
    assert table(path)["student"]["kl"] == pytest.approx(found.table_row("")["kl"], rel=1e-5)
    assert table(path)["student"]["agreement"] == found.table_row("")["agreement"]


def test_a_teacher_with_another_tokenizer(settings, models, caplog):
    caplog.set_level(logging.INFO)
    foreign = {"teacher_model": models("foreign"), "student_model": models("student")}
    with pytest.raises(SettingsError) as refused:
        run(settings(**foreign))
    assert "different tokenizers (290 and 320 tokens)" in str(refused.value)
    assert "--align chunks or uld" in str(refused.value)
    path = run(settings(**foreign, align="uld", alpha_kd=0.05))
    assert table(path)["student"]["nll"] < table(path)["student before"]["nll"]
    found = metrics(path)["alignment"]
    assert 0 < found["coverage"] <= 1
    share, size = f"{100 * found['coverage']:.1f} %", f"{found['bytes_per_group']:.1f}"
    assert f"common boundaries in {share} of the text, every {size} bytes" in caplog.text
    assert table(path)["teacher"]["bits_per_byte"] > 0
    assert table(path)["student"]["kl"] is None
    assert "report" in write_report(path).name


# --- resume ---------------------------------------------------------------------------------------


def test_interrupted_and_resumed_it_ends_with_the_same_bits(settings, monkeypatch):
    """The best weights are those from before the interruption. More kinds: `tests/faults`."""
    more = {"log_every": 3}
    rate = "ssl_kd.language.train.loop.learning_rate_at"
    monkeypatch.setattr(rate, lambda step, *args: 1e-2 if step < 3 else 1.0)
    whole = run(settings(**more, run_name="whole"))
    assert metrics(whole)["best_step"] == 3
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as stopped:
        run(settings(**more), progress=stop_at(3))
    assert signal.getsignal(signal.SIGTERM) is before
    path = whole.parent / "a"
    assert (stopped.value.signal, stopped.value.run_dir) == (signal.SIGTERM, path)
    assert not (path / "metrics.json").exists()
    assert run(settings(**more, resume=True)) == path
    assert log_lines(path) == log_lines(whole)
    assert same(last_checkpoint(path), last_checkpoint(whole))
    assert weights(path) == weights(whole)
    ours, theirs = metrics(path), metrics(whole)
    for name in ("table", "best_step", "tokens", "success_rate", "events", "generations"):
        assert ours[name] == theirs[name]


@pytest.fixture
def router_file(models, tmp_path):
    """Routers of `mixture` that are not as it came."""

    def make(seed):
        mixture = Mixture(load_causal_lm(models("mixture")).model)
        torch.manual_seed(seed)
        for router in mixture.router_parameters().values():
            router.data += torch.randn_like(router)
        mixture.save_router(tmp_path / "router.safetensors")
        return str(tmp_path / "router.safetensors")

    return make


def test_a_cache_knows_its_routers(settings, models, tmp_path, router_file):
    own = {"teacher_model": models("mixture"), "cache_method": "topk"}
    own["teacher_cache"] = str(tmp_path / "cache")
    routed = own | {"router_weights": router_file(1)}
    plain = cache_teacher(settings(**own))
    with pytest.raises(FingerprintMismatch, match="weights"):
        run(settings(**routed))
    adapted = cache_teacher(settings(**routed, force_recompute=True))
    assert adapted.digest != plain.digest
    with pytest.raises(FingerprintMismatch, match="weights"):
        run(settings(**own))
    assert run(settings(**routed))
    router_file(2)
    with pytest.raises(FingerprintMismatch, match="weights"):
        run(settings(**routed, run_name="b"))


def interrupted(settings, **changes):
    with pytest.raises(Interrupted):
        run(settings(**changes), progress=stop_at(2))


def test_other_settings_and_other_data_are_refused_on_a_resume(settings, text_file, models, tiny):
    student = tiny.folder(Path(text_file).with_name("own"), seed=5)
    interrupted(settings, student_model=student)
    with pytest.raises(SettingsError, match="TEMPERATURE was 2.0 and is now 3.0"):
        run(settings(student_model=student, resume=True, temperature=3.0))
    lines = Path(text_file).read_text()
    Path(text_file).write_text(lines + json.dumps({"text": "One more line."}) + "\n")
    with pytest.raises(RunFolderError, match="the data or the teacher has changed"):
        run(settings(student_model=student, resume=True))
    Path(text_file).write_text(lines)
    tiny.folder(student, seed=6)
    with pytest.raises(RunFolderError, match="has changed since the run began"):
        run(settings(student_model=student, resume=True))
    tiny.folder(student, seed=5)
    # What changes no number may change.
    path = run(settings(student_model=student, resume=True, checkpoint_every=1))
    assert metrics(path)["steps"] == 6


def test_another_cache_or_router_is_refused_on_a_resume(settings, models, tmp_path, router_file):
    own = {"cache_method": "topk", "teacher_cache": str(tmp_path / "cache")}
    cache_teacher(settings(**own))
    interrupted(settings, **own)
    cache_teacher(settings(**own, force_recompute=True).replace(cache_method="topk:20"))
    with pytest.raises(RunFolderError, match="has changed since the run began"):
        run(settings(**own, resume=True))
    routed = {"teacher_model": models("mixture"), "router_weights": router_file(1), "run_name": "b"}
    interrupted(settings, **routed)
    router_file(2)
    with pytest.raises(RunFolderError, match="has changed since the run began"):
        run(settings(**routed, resume=True))


def test_a_finished_run_is_neither_overwritten_nor_trained_on(settings):
    path = run(settings())
    before = weights(path)
    with pytest.raises(RunFolderError, match="already holds a finished run"):
        run(settings())
    with pytest.raises(RunFinished):
        run(settings(resume=True))
    assert weights(path) == before


def test_a_run_that_fails_before_training_leaves_no_folder(settings, tmp_path, models):
    for changes, message in (
        ({"block_size": 512}, "BLOCK_SIZE is 512, but .* has 128 positions"),
        ({"student_model": "layers:9"}, "the number of layers of the teacher"),
        ({"router_mode": "ka"}, "dense model"),
        ({"legacy_clamp": "2.5:0.1:1.0"}, "nothing is learned"),
        ({"data_path": str(tmp_path / "absent.jsonl")}, "absent.jsonl"),
        ({"teacher_model": str(tmp_path / "nobody")}, "nobody"),
    ):
        with pytest.raises((ValueError, RuntimeError, OSError), match=message):
            run(settings(**changes))
        assert not (tmp_path / "runs").exists()


def test_shortened_prompts_and_broken_lines_are_counted_and_named(settings, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    file = tmp_path / "asked.jsonl"
    records = [{"prompt": sentence(i) * 2, "completion": sentence(i + 1)} for i in range(80)]
    file.write_text("{broken\n" + "".join(json.dumps(record) + "\n" for record in records))
    path = run(settings(data_path=str(file), max_steps=1))
    levels = {record.message: record.levelname for record in caplog.records}
    (broken,) = [message for message in levels if "records (1.2%) left out" in message]
    assert "1 of 81 records (1.2%) left out, for example asked.jsonl:1: not valid JSON" in broken
    (shortened,) = [m for m in levels if m.startswith(str(file)) and " prompts (" in m]
    assert "70 of 70 prompts (100.0%) shortened, 88% of their tokens lost, for ex" in shortened
    assert shortened.endswith("; raise BLOCK_SIZE to keep them whole")
    assert (levels[broken], levels[shortened]) == ("INFO", "WARNING")
    lines = (path / "left_out.txt").read_text().splitlines()
    assert lines[0].startswith("asked.jsonl:1: not valid") and len(lines) > 60
    assert config(path)["data"]["shares"][0] in broken


# --- faults ---------------------------------------------------------------------------------------


def with_fault(monkeypatch, steps, spoil):
    """Before each of these steps of a run `spoil(distiller)` is called."""
    step = Distiller.step

    def struck(self, batches, rate):
        if self.guard.steps in steps:
            spoil(self)
        return step(self, batches, rate)

    monkeypatch.setattr(Distiller, "step", struck)


def spoil_norm(distiller):
    distiller.student.model.norm.weight.data[3] = math.nan


def test_a_stopped_run_names_the_cause_and_the_settings_to_try(settings, tmp_path, monkeypatch):
    with_fault(monkeypatch, range(1, 99), spoil_norm)
    with pytest.raises(TooFewHealthyParts) as stopped:
        run(settings(stop_after=2))
    message = str(stopped.value)
    assert "step 3: no part had a healthy step in the last 2" in message
    assert "student weight model.norm.weight came in not finite" in message
    assert "Settings to try" not in message  # none takes a NaN back that came from outside
    path = tmp_path / "runs" / "a"
    found = [(row["step"], row["part"], row["action"]) for row in events(path)]
    assert (2, "ce", "cut out") in found and (3, "model", "skipped") in found
    shown = marks(path)
    assert "step 2, ce: the loss is not finite (nan); cut out" in shown[2] and "stopped" in shown[3]
    assert shown.keys() == {step for step, _, _ in found}
    assert max((path / "checkpoint").glob("*.pt")).name == "step_000000003.pt"
    with pytest.raises(TooFewHealthyParts):  # a resume finds the same
        run(settings(stop_after=2, resume=True))


# --- loss terms -----------------------------------------------------------------------------------


def spoil_teacher(distiller):
    distiller.teacher.models["teacher"].model.norm.weight.data[3] = math.nan


@pytest.mark.parametrize(("patience", "last"), [({"stop_after": 3}, 3), ({"stop_after": None}, 4)])
def test_a_required_term_that_stays_out_ends_the_run(
    settings, tmp_path, monkeypatch, patience, last
):
    """With exit code 3, as a sick student; in ultra_stable with the patience of that preset."""
    monkeypatch.setattr("ssl_kd.language.train.step.RESTORE_AFTER", 2)
    asked = settings(**patience, max_steps=8)
    with_fault(monkeypatch, {1}, spoil_teacher)
    with pytest.raises(
        TooFewHealthyParts, match=f"step {last + 1}: kd was cut out of each of"
    ) as end:
        run(asked)
    message = str(end.value)
    assert "learned from ce alone" in message and end.value.exit_code == 3
    assert "teacher weight model.norm.weight came in not finite" in message
    assert (
        "use another copy" in message
        and "Settings to try" not in message
        and "memory" not in message
    )
    path = tmp_path / "runs" / "a"
    assert events(path)[-1]["action"] == "stopped" and not (path / "metrics.json").exists()
    monkeypatch.undo()
    path = run(asked.replace(resume=True))  # with the teacher as it is on the disk
    learned = metrics(path)["learned_from"]
    assert learned == {"ce": 8, "kd": 8 - last}
    assert metrics(path)["success_rates"] == {"ce": 1, "kd": 1 - last / 8}
    assert metrics(path)["success_rate"] == 1 - last / 16
    assert f"kd learned from {8 - last} of 8 steps" in write_report(path).read_text()


@pytest.mark.parametrize("cause", [{"grad_norm_threshold": 1e-9}, {"alpha_kd": 1e30}])
def test_a_run_without_a_healthy_step_fails(settings, tmp_path, cause):
    asked = settings(max_steps=2, checkpoint_every=5, generations=0, **cause)
    for again in (asked, asked.replace(resume=True)):  # there is no step left to do
        with pytest.raises(TooFewHealthyParts, match="none of the 2 steps changed") as end:
            run(again)
        message = str(end.value)
        assert end.value.exit_code == 3
        if "grad_norm_threshold" not in cause:
            assert "--learning_rate" in message
        else:
            assert (
                "above the fixed threshold, or too large for the optimizer to square (2 times)"
                in message
            )
            assert "in a run GRAD_NORM_THRESHOLD" in message
            assert "--grad_norm_threshold None" in message
    path = tmp_path / "runs" / "a"
    assert [file.name for file in (path / "checkpoint").glob("*.pt")] == ["step_000000002.pt"]
    assert not (path / "student").exists() and not (path / "metrics.json").exists()


def test_a_teacher_without_information_is_named(settings, tmp_path, tiny, caplog):
    blank = tiny.model()
    for p in blank.parameters():
        torch.nn.init.zeros_(p)
    blank.save_pretrained(tmp_path / "blank")
    tiny.tokenizer.save_pretrained(tmp_path / "blank")
    run(settings(teacher_model=str(tmp_path / "blank"), max_steps=1, generations=0))
    assert f"the teacher {tmp_path / 'blank'} does not predict the held-out text" in caplog.text
    assert "a uniform guess among its 320 tokens has 5.768" in caplog.text
    assert "attend to each other" not in caplog.text
