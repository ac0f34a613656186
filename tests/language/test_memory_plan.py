"""The memory plan counts what a step allocates, and the preset of an old card trains."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssl_kd.language.memory_plan import memory_plan
from ssl_kd.language.presets import PRESETS
from ssl_kd.language.run import run
from ssl_kd.teachers.dtypes import halve_products
from ssl_kd.teachers.student import add_lora
from tests.faults.inject import metrics
from tests.language.test_run import log_lines

SHAPE = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "vocab_size": 512}


class Peak(TorchDispatchMode):
    now = peak = 0  # bytes of the tensors that were made inside
    known: dict[int, int]  # storage -> bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in [x.untyped_storage() for x in tree_leaves(out) if torch.is_tensor(x)]:
            if (key := storage._cdata) not in self.known:
                self.known[key] = storage.nbytes()
                self.now += self.known[key]
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, lambda k=key: self.forget(k))
        return out

    def forget(self, key):
        self.now -= self.known.pop(key)


def test_the_plan_is_what_a_step_allocates(tiny, monkeypatch):
    monkeypatch.setattr("ssl_kd.losses.token_terms.ROW_BYTES", 2**40)  # whole chunks, as on a GPU
    for checkpointing in (True, False):
        options = {"lora_rank": 16, "gradient_checkpointing": checkpointing, "block_size": 24}
        student, half = tiny.model("Qwen3", **SHAPE), tiny.half()
        plan = memory_plan(tiny.settings(**options), student.config, None, half)["training"]
        halve_products(student := add_lora(student, 16), torch.float16)
        distiller = tiny.distiller(student=student, precision=half, **options)
        batch = tiny.blocks(packing=True).batch(range(4), torch.device("cpu"))
        distiller.step([batch], 1e-3)
        states = [v for row in distiller.optimizer.state.values() for v in row.values()]
        distiller.guard.snapshot_every, before = 0, [*student.parameters(), *states]
        with Peak() as peak:
            peak.known = {x.untyped_storage()._cdata: 0 for x in (*before, *student.buffers())}
            distiller.step([batch, batch], 1e-3)
        weights = plan["frozen weights"] + plan["trained weights"]
        assert weights == sum(p.nbytes for p in student.parameters())
        assert 0 <= sum(v.nbytes for v in states) - plan["optimizer"] < 1000  # numbers of steps
        parts = plan["gradients"] + plan["activations"] + plan["loss, or a layer again"]
        assert abs(parts / peak.peak - 1) < 0.07


def test_the_preset_trains_in_float16(settings, tiny, tmp_path, monkeypatch, float16_here):
    monkeypatch.chdir(tmp_path)
    small = {"block_size": 24, "batch_size": 4, "gradient_accumulation_steps": 1}
    small |= {"student_model": tiny.folder(tmp_path / "student", "Qwen3"), "quantization": None}
    path = run(settings(**{**PRESETS["t4"], **small}))
    losses = [row["train_loss"] for row in log_lines(path) if "train_loss" in row]
    assert metrics(path)["success_rate"] == 1 and losses[-1] < losses[0]
    assert len([*(tmp_path / "data" / "teacher_caches").glob("*/teacher.json")]) == 1
