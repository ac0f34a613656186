"""Count how often a language step waits for the device, on a simulated one."""

import sys

import pytest
import torch

from ssl_kd.core.precision import DeviceInfo, Precision
from ssl_kd.language.models.causal import CausalLM
from ssl_kd.language.models.frozen import FrozenTeacher
from ssl_kd.language.teachers.cache import TeacherFingerprint, cache_identity, write
from ssl_kd.language.teachers.cached import Cached
from ssl_kd.language.teachers.live import Live
from ssl_kd.language.train.loop import _StudentLearner
from ssl_kd.language.train.step import Distiller
from ssl_kd.losses import linear_distillation
from tests.fake_cuda import fake_cuda
from tests.marks import slow

pytest.importorskip("transformers")

GPU = DeviceInfo("cuda", "H200", (9, 0))


def _step(tiny, batches, with_teacher=True, cache=None, **changes):
    """What the second step did: the first takes a snapshot."""
    settings = tiny.settings(gradient_accumulation_steps=batches, **changes)
    blocks = tiny.blocks()
    with fake_cuda() as device:
        with torch.device("cuda"):
            teacher, student = tiny.model(), tiny.model(seed=1)
        precision = Precision.for_device(GPU, True)
        frozen = FrozenTeacher(teacher, device="cuda", dtype=precision.teacher)
        source = (Cached(cache) if cache else Live(frozen)) if with_teacher else None
        distiller = Distiller(student, settings, precision, source)
        loop = _StudentLearner(distiller, blocks, 100, lambda step, result: None, None)
        for step in range(2):
            device.clear()
            loop.learn(step)
        assert distiller.recent[-1].updated
        return device


@pytest.fixture(scope="module")
def one_batch(tiny):
    return _step(tiny, 1)


@pytest.mark.parametrize("with_teacher", [True, False])
def test_a_batch_waits_once_and_so_does_a_step(tiny, with_teacher):
    device = _step(tiny, 2, with_teacher)
    assert len(device.waits) == 2 + 1, device.waits
    assert device.pageable == []


@pytest.mark.parametrize("method", ["topk", slow("sample"), slow("hidden")])
def test_a_cached_teacher_adds_no_wait(tiny, method, tmp_path):
    blocks, lm = tiny.blocks(), CausalLM(tiny.model(), tiny.tokenizer, "a", "b")
    fields = cache_identity(tiny.settings(), lm, tiny.texts(), blocks)
    fingerprint = TeacherFingerprint(**fields, dtype="float32", method=method, k=8)
    cache = write(FrozenTeacher(lm.model), blocks, tmp_path, fingerprint)
    cache(blocks.batch(range(len(blocks))), torch.arange(1))  # files that are opened later are fake
    device = _step(tiny, 1, cache=cache)
    assert len(device.waits) == 1 + 1, device.waits
    assert device.pageable == []


def test_a_loss_of_many_chunks_adds_no_wait(tiny, one_batch, monkeypatch):
    module = sys.modules[linear_distillation.__module__]  # its name is the function's, too
    monkeypatch.setattr(module, "chunk_rows", lambda vocabulary, device: 20)
    device = _step(tiny, 1)
    assert len(device.waits) == len(one_batch.waits) == 2
    assert device.launches["aten.mm.default"] > one_batch.launches["aten.mm.default"]


def test_a_step_keeps_to_its_launches_and_bytes(one_batch):
    # two layers of width 32 on each side, 4 rows of 24 tokens, V 320
    assert 600 < one_batch.launches.total() <= 710
    assert 15 < one_batch.bytes.total() / 1e6 <= 17
    assert one_batch.launches["aten._fused_adamw_.default"] == 2  # with weight decay, and without
