"""The estimate of a step's memory, against what torch's allocator saw in real steps."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from ssl_kd.guard.precision import DeviceInfo  # noqa: E402
from ssl_kd.language.features import HiddenStates, feature_terms  # noqa: E402
from ssl_kd.language.memory import LOWERED_BY, estimate_memory, refused  # noqa: E402
from ssl_kd.language.objective import _checkpoint_activations  # noqa: E402
from ssl_kd.language.routed import Routed  # noqa: E402
from ssl_kd.language.settings import LanguageSettings  # noqa: E402
from ssl_kd.losses.cross_tokenizer import (  # noqa: E402
    Positions,
    VocabularyMap,
    chunk_matching,
    uld,
)
from ssl_kd.losses.linear_distillation import (  # noqa: E402
    linear_distillation,
    logits_distillation,
)
from ssl_kd.teachers.frozen import FrozenTeacher, hidden_states, linear_head  # noqa: E402
from ssl_kd.teachers.student import add_lora  # noqa: E402

VOCAB = 2048
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": ("LlamaConfig", {**SMALL, "tie_word_embeddings": True}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 96, "n_layer": 4, "n_head": 4, "n_positions": 256},
    ),
    "gemma2": ("Gemma2Config", {**SMALL, "head_dim": 24}),
    "opt": ("OPTConfig", {**SMALL, "ffn_dim": 256, "word_embed_proj_dim": 96}),
}
ROWS, BLOCK = 4, 128
SIZE = {"batch_size": ROWS, "block_size": BLOCK}


def make(architecture="llama", **changes):
    kind, options = CONFIGS[architecture]
    config = getattr(transformers, kind)(**{**options, **changes})
    config.bos_token_id, config.eos_token_id = 1, 2
    return transformers.AutoModelForCausalLM.from_config(config)


@dataclass
class Batch:
    input_ids: torch.Tensor

    def model_inputs(self):
        return {"input_ids": self.input_ids}


@dataclass
class Read(Batch):
    counts: torch.Tensor
    documents: torch.Tensor


def weights_of(*models):
    return sum(p.numel() * p.element_size() for model in models for p in model.parameters())


def peak_of(step):
    """MiB that torch's allocator held at most, beyond what it held before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    events: Any = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak / 2**20


def two_steps(student, teacher, dtype):
    head = linear_head(student)
    optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad])
    batch = Batch(torch.randint(3, VOCAB, (ROWS, BLOCK)))
    targets, rows = batch.input_ids.flatten(), torch.arange(ROWS * BLOCK)
    for _ in range(2):
        teachers = [teacher(batch, rows)]
        options = {"temperature": 2.0}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float32):
            if head is None:
                logits = student(**batch.model_inputs(), use_cache=False).logits.flatten(0, 1)
                terms = logits_distillation(logits, targets, teachers, **options)
            else:
                hidden = hidden_states(student, batch.model_inputs()).flatten(0, 1)[rows]
                terms = linear_distillation(
                    hidden, head.weight, head.bias, targets, teachers, **options
                )
        terms.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del terms


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ("plain", torch.float32),
        ("plain", torch.bfloat16),
        ("checkpointing", torch.float32),
        ("adapters", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_estimate_is_what_the_allocator_saw(architecture, how, dtype):
    student, teacher = make(architecture), make(architecture).to(dtype)
    if how == "adapters":
        student = add_lora(student, 4)
    elif how == "checkpointing":
        _checkpoint_activations(student)
    student.train()
    teacher = FrozenTeacher(teacher)
    estimate = estimate_memory(
        student, teacher, dtype=dtype, gradient_checkpointing=how == "checkpointing", **SIZE
    )
    measured = peak_of(lambda: two_steps(student, teacher, dtype))
    measured += weights_of(student, teacher.model) / 2**20
    without_guard = estimate.total - estimate.parts["guard"]  # there is none in these steps
    assert 0.7 < without_guard / measured < 1.6, (measured, estimate.parts)


def parts(student=None, teacher=None, **changes):
    student = make() if student is None else student
    return estimate_memory(student, teacher, **{**SIZE, **changes}).parts


def test_what_is_exact_is_exact():
    student, teacher = make(), FrozenTeacher(make())
    got = parts(student, teacher, accumulation_steps=2)
    weights = weights_of(student) / 2**20
    assert got["student"] == pytest.approx(weights)
    assert got["optimizer"] == got["guard"] == pytest.approx(3 * weights)
    answer = ROWS * BLOCK * 96 * 4 / 2**20
    assert got["teacher"] == pytest.approx(weights + answer)
    assert parts()["teacher"] == parts()["cache"] == 0
    assert parts(cached=3 << 20)["cache"] == 3


def test_settings_lower_the_parts_that_name_them():
    base = parts()
    assert parts(batch_size=ROWS // 2)["activations"] < base["activations"]
    assert parts(block_size=BLOCK // 2)["loss"] < base["loss"]
    assert parts(gradient_checkpointing=True)["activations"] < base["activations"] / 2
    assert parts(dtype=torch.bfloat16)["activations"] < base["activations"]
    adapted = parts(add_lora(make(), 4), accumulation_steps=2)
    assert adapted["optimizer"] < parts(accumulation_steps=2)["optimizer"] / 10
    assert adapted["loss"] < base["loss"]
    half = parts(teacher=FrozenTeacher(make(), dtype=torch.bfloat16))
    assert half["teacher"] == pytest.approx(parts(teacher=FrozenTeacher(make()))["teacher"] / 2)


def test_eager_attention_costs_its_matrices():
    eager = make()
    eager.set_attn_implementation("eager")
    more = parts(eager)["activations"] - parts()["activations"]
    assert more == pytest.approx(4 * ROWS * 4 * BLOCK**2 * 6 / 2**20)  # 4 layers, 4 heads


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "experts"), [("Mixtral", {"num_local_experts": 4}), ("Olmoe", {"num_experts": 8})]
)
def test_a_router_that_learns_keeps_activations_of_all_experts(kind, experts, dtype, checkpointing):
    config = getattr(transformers, f"{kind}Config")(**SMALL, **experts)
    frozen = FrozenTeacher(transformers.AutoModelForCausalLM.from_config(config), dtype=dtype)
    assert parts(teacher=frozen)["router"] == 0
    settings = LanguageSettings(router_mode="sar", gradient_checkpointing=checkpointing)
    source = Routed(frozen, settings)
    estimate = parts(teacher=frozen, gradient_checkpointing=checkpointing)["router"]
    assert source.router is not None
    ids = torch.randint(3, VOCAB, (ROWS, BLOCK))

    def step():
        source.router.step(lambda: hidden_states(frozen.model, {"input_ids": ids}).float().mean())

    step()  # gradients and moments are there from now on
    assert 0.7 < estimate / peak_of(step) < 1.6


@pytest.mark.parametrize("align", ["uld", "chunks"])
def test_whole_logits_of_two_vocabularies_are_counted(align):
    n, sizes = ROWS * BLOCK, (VOCAB, 1500)
    places = torch.arange(n)
    sides = [Positions(places, places % size, places, places) for size in sizes]
    maps = [VocabularyMap(torch.arange(size) % 1400, 1400) for size in sizes]

    def step():
        own, theirs = (torch.randn(n, size) for size in sizes)
        own.requires_grad_()
        if align == "uld":
            uld(own, theirs).backward()
        else:
            every = torch.ones(n, dtype=torch.bool)
            chunk_matching(own, theirs, sides[0], sides[1], every, maps[0], maps[1]).backward()

    step()
    teacher = FrozenTeacher(make(vocab_size=sizes[1]))
    more = parts(teacher=teacher, align=align)["loss"] - parts(teacher=teacher)["loss"]
    assert 0.7 < more / peak_of(step) < 1.6
    assert parts(align=align) == parts()
    assert parts(teacher=teacher, align="hidden") == parts(teacher=teacher)


def test_an_offloaded_teacher_costs_its_head_and_its_answer():
    teacher = FrozenTeacher(make())
    there = parts(teacher=teacher, device="cuda")
    teacher.offload = True  # as on a GPU
    gone = parts(teacher=teacher, device="cuda")
    assert gone["teacher"] < there["teacher"]
    assert gone["teacher"] >= VOCAB * 96 * 4 / 2**20
    assert there["guard"] == 0  # in the host's memory


def test_the_table_names_settings_that_exist_and_are_not_used_yet():
    known = {name.upper() for name in LanguageSettings.__dataclass_fields__}
    assert {name for names in LOWERED_BY.values() for name in names} <= known
    teacher = FrozenTeacher(make())
    table = str(estimate_memory(make(), teacher, device="cuda", **SIZE))
    assert all(name in table for name in ("TEACHER_OFFLOAD", "GRADIENT_CHECKPOINTING", "total"))
    used = str(estimate_memory(make(), teacher, gradient_checkpointing=True, **SIZE))
    assert "GRADIENT_CHECKPOINTING" not in used and "TEACHER_OFFLOAD" not in used


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, set()),
        ({"align": "uld"}, {"TEACHER_CACHE"}),
        ({"router_mode": "sar"}, {"TEACHER_CACHE"}),
        ({"legacy_clamp": "2.5"}, {"TEACHER_CACHE"}),
        ({"shard": True}, {"TEACHER_OFFLOAD"}),
        ({"batch_size": 1, "block_size": 12}, {"BATCH_SIZE", "BLOCK_SIZE"}),
    ],
)
def test_what_the_settings_refuse_is_not_recommended(monkeypatch, changes, names):
    device, names = torch.device("cpu"), names | {"TEACHER_QUANTIZATION", "LORA_QUANTIZATION"}
    kind = "ssl_kd.guard.precision.DeviceInfo.halves"
    monkeypatch.setattr(kind, lambda self: ((torch.bfloat16,), "a test"))
    assert refused(LanguageSettings(**changes), device) == names
    monkeypatch.setattr(kind, lambda self: ((), "a test"))
    assert refused(LanguageSettings(**changes), device) == names | {"MODEL_DTYPE"}


def test_fewer_bits_are_recommended_where_a_gpu_has_them(monkeypatch):
    cpu = DeviceInfo.of(torch.device("cpu"))
    monkeypatch.setattr(DeviceInfo, "of", lambda device: cpu)
    cut = LanguageSettings(student_model="layers:2", lora_rank=4)
    adapted = LanguageSettings(student_model="a/b", lora_rank=4)
    bits = {"TEACHER_QUANTIZATION", "LORA_QUANTIZATION"}
    assert bits <= refused(cut, torch.device("cuda"))
    assert not bits & refused(adapted, torch.device("cuda"))


def test_a_run_with_another_tokenizer_is_not_sent_to_a_cache(tiny, tmp_path, text_file, caplog):
    from ssl_kd.language.run import run

    caplog.set_level("INFO")
    few = {"block_size": 24, "max_steps": 1, "eval_rows": 4, "generations": 0, "device": "cpu"}
    few |= {"data_path": text_file, "runs_dir": str(tmp_path), "align": "uld"}
    teacher = tiny.folder(tmp_path / "foreign", tokenizer=tiny.other_tokenizer)
    student = tiny.folder(tmp_path / "student")
    run(LanguageSettings(**few, teacher_model=teacher, student_model=student))
    (line,) = (r.getMessage() for r in caplog.records if r.getMessage().startswith("teacher  "))
    assert "TEACHER_CACHE" not in line


def test_what_is_said_of_terms_is_of_those_that_train(tiny, tmp_path, text_file, monkeypatch):
    from ssl_kd.language.run import run

    made, init = [], HiddenStates.__init__
    monkeypatch.setattr(HiddenStates, "__init__", lambda *a: made.append(a) or init(*a))
    few = {"block_size": 24, "max_steps": 1, "eval_rows": 4, "generations": 0, "device": "cpu"}
    few |= {"data_path": text_file, "runs_dir": str(tmp_path), "alpha_hidden": 1.0}
    path = run(LanguageSettings(**few, teacher_model=tiny.folder(tmp_path / "teacher")))
    assert len(made) == 1
    assert json.loads((path / "config.json").read_text())["memory"]["features"] > 0


@pytest.mark.parametrize("weights", [{"alpha_hidden": 1.0}, {"alpha_attention": 1.0}])
def test_what_terms_look_at_inside_is_counted(weights, tiny):
    settings = tiny.settings(layer_map="uniform", **weights)
    student, teacher = make(), make(hidden_size=192)
    (term,) = feature_terms(settings, student, teacher)
    ids = torch.randint(3, VOCAB, (ROWS, BLOCK))
    some = torch.ones(ROWS, BLOCK, dtype=torch.int64)
    batch, rows = Read(ids, some, some), torch.arange(ROWS * BLOCK).view(ROWS, -1)[:, :-1].flatten()
    with term.listening():
        for model in (student, teacher):
            model(input_ids=ids, use_cache=False)
        heard = {key: x.detach() for key, x in term._heard.items()}
        for (_, side), x in heard.items():
            x.requires_grad_(side == 0)
        own = [x for (_, side), x in heard.items() if side == 0]

        def step():
            term._heard = heard
            term(batch, rows).backward()
            for x in own:
                x.grad = None

        step()
        measured = peak_of(step) - sum(x.nbytes for x in own) / 2**20  # their gradients
    measured += sum(x.nbytes for (_, side), x in heard.items() if side) / 2**20
    assert 0.7 < term.held(ROWS, BLOCK, 4) / 2**20 / measured < 1.6
    more = parts(features=term.held(ROWS, BLOCK, 4))["features"] - parts()["features"]
    assert more == term.held(ROWS, BLOCK, 4) / 2**20
