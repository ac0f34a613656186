"""The memory plan counts what a step allocates, and the preset of an old card trains."""

import pytest
import torch

from ssl_kd.language.memory_plan import AllocatedBytes, memory_plan
from ssl_kd.language.models.dtypes import halve_products
from ssl_kd.language.models.frozen import FrozenTeacher
from ssl_kd.language.models.student import add_lora
from ssl_kd.language.run import run
from ssl_kd.language.settings.presets import PRESETS
from ssl_kd.language.text.blocks import Batch
from tests.faults.inject import metrics
from tests.language.test_run import log_lines
from tests.marks import slow

SHAPE = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "vocab_size": 512}
QWEN3_0_6B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
}


def test_the_count_is_of_live_storages():
    known = torch.zeros(100)
    with AllocatedBytes([known]) as memory:
        kept = known + 1  # 400 bytes
        view = kept[:10].view(2, 5)
        del kept
        assert (memory.now, memory.peak) == (400, 400)  # the view holds the storage
        other = torch.zeros(50, dtype=torch.float64)
        known.mul_(2)
        del view
        assert (memory.now, memory.peak) == (400, 800)
        del other
    assert (memory.now, memory.peak) == (0, 800)


def step_beside_plan(tiny, student, precision, batch, teacher=None, **options):
    """Return the planned bytes of a step without weights, divided by those that it allocates."""
    config = None if teacher is None else teacher.config
    plan = memory_plan(tiny.settings(**options), student.config, config, precision)["training"]
    if options["lora_rank"]:
        student = add_lora(student, options["lora_rank"])
        if precision.student != torch.float32:
            halve_products(student, precision.student)
    distiller = tiny.distiller(teacher and live(teacher), student, precision, **options)
    distiller.step([batch], 1e-3)
    states = [v for row in distiller.optimizer.state.values() for v in row.values()]
    distiller.guard.snapshot_every = 0
    models = [student] if teacher is None else [student, teacher]
    known = [x for model in models for x in (*model.parameters(), *model.buffers())]
    with AllocatedBytes([*known, *states]) as memory:
        distiller.step([batch, batch], 1e-3)
    weights = plan["frozen weights"] + plan["trained weights"]
    assert weights == sum(p.nbytes for p in student.parameters())
    assert 0 <= sum(v.nbytes for v in states) - plan["optimizer"] < 1000  # numbers of steps
    parts = plan["gradients"] + plan["activations"] + plan["loss or recomputed layer"]
    return parts / memory.peak


def live(teacher):
    frozen = FrozenTeacher(teacher)
    return lambda batch, rows: frozen.answer(batch.model_inputs(), rows)


@pytest.fixture
def whole_chunks(monkeypatch):
    monkeypatch.setattr("ssl_kd.language.losses.token_terms.ROW_BYTES", 2**40)  # as on a GPU


@pytest.mark.parametrize("checkpointing", [True, slow(False)])
@pytest.mark.parametrize("kind", ["adapters in float16", "all weights and a live teacher"])
def test_the_plan_equals_the_memory_of_a_step(tiny, whole_chunks, kind, checkpointing):
    half, batch = tiny.half(), tiny.blocks(packing=True).batch(range(4), torch.device("cpu"))
    options = {"gradient_checkpointing": checkpointing, "block_size": 24}
    student = tiny.model("Qwen3", **SHAPE)
    if kind == "adapters in float16":
        ratio = step_beside_plan(tiny, student, half, batch, lora_rank=16, **options)
    else:
        teacher, precision = tiny.model("Qwen3", 1, **SHAPE), tiny.precision
        ratio = step_beside_plan(tiny, student, precision, batch, teacher, lora_rank=0, **options)
    assert abs(ratio - 1) < 0.05


@pytest.mark.slow  # minutes, because a CPU multiplies in float16 slowly
def test_the_plan_equals_the_memory_of_a_step_at_real_widths(tiny, whole_chunks, capsys):
    student, n = tiny.model("Qwen3", **QWEN3_0_6B), 64
    ids, ones = torch.randint(0, 151_936, (1, n)), torch.ones(1, n)
    batch = Batch(ids, torch.arange(n)[None], ones.bool(), ones.int(), torch.tensor([0]), n, True)
    options = {"gradient_checkpointing": True, "block_size": n, "batch_size": 1, "lora_rank": 16}
    ratio = step_beside_plan(tiny, student, tiny.half(), batch, **options)
    with capsys.disabled():
        print(f" plan / allocated: {ratio:.3f}")
    assert abs(ratio - 1) < 0.05


def test_the_preset_trains_in_float16(settings, tiny, tmp_path, monkeypatch, float16_here):
    monkeypatch.chdir(tmp_path)
    small = {"block_size": 24, "batch_size": 4, "gradient_accumulation_steps": 1}
    small |= {"student_model": tiny.folder(tmp_path / "student", "Qwen3"), "quantization": None}
    path = run(settings(**{**PRESETS["t4"], **small}))
    losses = [row["train_loss"] for row in log_lines(path) if "train_loss" in row]
    assert metrics(path)["success_rate"] == 1 and losses[-1] < losses[0]
    assert len([*(tmp_path / "data" / "teacher_caches").glob("*/teacher.json")]) == 1
