"""How often a language step waits for the device, on one that is not there."""

import sys

import pytest
import torch

from ssl_kd.guard.precision import DeviceInfo, Precision
from ssl_kd.language.sources import Plain
from ssl_kd.language.step import Distiller
from ssl_kd.language.teacher_cache import TeacherFingerprint, identity, write
from ssl_kd.language.train import _StudentLearner
from ssl_kd.losses import linear_distillation
from ssl_kd.teachers.frozen import FrozenTeacher
from tests.pretended import pretended_cuda

pytest.importorskip("transformers")

GPU = DeviceInfo("cuda", "H200", (9, 0))


def _step(tiny, batches, with_teacher=True, cache=None, **changes):
    """What the second step did: the first takes a snapshot."""
    settings = tiny.settings(gradient_accumulation_steps=batches, **changes)
    blocks = tiny.blocks()
    with pretended_cuda() as device:
        with torch.device("cuda"):
            teacher, student = tiny.model(), tiny.model(seed=1)
        precision = Precision.for_device(GPU, True)
        frozen = FrozenTeacher(teacher, device="cuda", dtype=precision.teacher)
        source = Plain(cache or frozen) if with_teacher else None
        distiller = Distiller(student, settings, precision, source)
        loop = _StudentLearner(distiller, blocks, 100, lambda step, result: None, None)
        for step in range(2):
            device.clear()
            loop.learn(step)
        assert distiller.recent[-1].updated
        return device


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("with_teacher", [True, False])
def test_a_batch_waits_once_and_so_does_a_step(tiny, batches, with_teacher):
    device = _step(tiny, batches, with_teacher)
    assert len(device.waits) == batches + 1, device.waits
    assert device.pageable == []


@pytest.mark.parametrize("method", ["topk", "sample", "hidden"])
def test_so_does_a_batch_of_a_cached_teacher(tiny, method, tmp_path):
    k, t = (None, None) if method == "hidden" else (4, tiny.settings().temperature)
    blocks = tiny.blocks()
    whose = identity("a", "b", tiny.tokenizer, tiny.texts(), blocks)
    of = TeacherFingerprint(**whose, dtype="float32", method=method, k=k, temperature=t)
    cache = write(FrozenTeacher(tiny.model()), blocks, tmp_path, of)
    cache(blocks.batch(range(len(blocks))), torch.arange(1))  # files that are opened later are fake
    device = _step(tiny, 3, cache=cache)
    assert len(device.waits) == 3 + 1, device.waits
    assert device.pageable == []


def test_it_waits_no_oftener_for_a_loss_of_many_chunks(tiny, monkeypatch):
    before = _step(tiny, 1)
    module = sys.modules[linear_distillation.__module__]  # its name is the function's, too
    monkeypatch.setattr(module, "chunk_rows", lambda vocabulary, device: 5)
    after = _step(tiny, 1)
    assert len(after.waits) == len(before.waits)
    assert after.launches["aten.mm.default"] > before.launches["aten.mm.default"]


def test_weights_are_updated_by_one_operation(tiny):
    launches = _step(tiny, 1).launches
    assert launches["aten._fused_adamw_.default"] == 2  # with weight decay, and without


def test_a_step_keeps_to_its_launches_and_bytes(tiny):
    device = _step(tiny, 1)  # two layers of width 32 on each side, 4 rows of 24 tokens, V 320
    assert 600 < device.launches.total() <= 710
    assert 15 < device.bytes.total() / 1e6 <= 17
