"""Frozen weights in 4 bits: the arithmetic equals that of the dequantized weights."""

import importlib.util

import pytest
import torch
from torch import nn

from ssl_kd.core.errors import MissingPackage, UserError
from ssl_kd.language.models.causal import load_causal_lm
from ssl_kd.language.models.dtypes import nf4
from ssl_kd.language.models.frozen import FrozenTeacher
from ssl_kd.language.models.student import add_lora
from ssl_kd.language.run import run
from ssl_kd.language.teachers.caching import cache_teacher
from tests.language.test_run import log_lines

CPU = torch.device("cpu")
# bitsandbytes 0.46, of layers as small as these.
pytestmark = pytest.mark.filterwarnings("ignore:Some matrices hidden dimension")


@pytest.fixture
def bits():
    return pytest.importorskip("bitsandbytes")


def both(path, bits):
    """A model in few bits, and one of plain weights that have the same values."""
    found = load_causal_lm(path, quantization=nf4(CPU, torch.float32)).model
    plain = load_causal_lm(path).model
    for name, module in found.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and not weight.is_floating_point():
            value = bits.functional.dequantize_4bit(weight.data, weight.quant_state)
            assert not torch.equal(value, plain.get_submodule(name).weight)
            plain.get_submodule(name).weight.data = value
    return found, plain


def test_a_teacher_answers_as_its_weights_say(tiny, models, bits):
    batch = tiny.blocks().batch([0, 1], CPU)
    rows = torch.arange(20)
    found, plain = (
        FrozenTeacher(model)(batch, rows).hidden  # type: ignore[union-attr]
        for model in both(models("teacher"), bits)
    )
    assert (found - plain).norm() <= 1e-5 * plain.norm()


def test_adapters_have_the_gradient_of_the_plain_weights(models, bits):
    """In evaluation before, too: there bitsandbytes may take products that have no gradient."""
    grads = []
    for base in both(models("teacher"), bits):
        model = add_lora(base, 2, seed=0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.fill_(1e-2)
            model.eval()(torch.arange(8)[None])
        ids = torch.arange(2, 26).view(2, 12)
        model.train()(input_ids=ids, labels=ids).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    for name, grad in grads[1].items():
        assert (grads[0][name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_a_run_learns_by_adapters_from_such_a_teacher(settings, models, bits, tmp_path):
    own = settings(
        learning_rate=3e-2,
        quantization="nf4",
        lora_rank=2,
        modules_to_save="lm_head",
        student_model=models("student"),
    )
    cache = cache_teacher(settings(quantization="nf4", teacher_cache=str(tmp_path / "c")))
    assert cache.fingerprint.dtype == "nf4 float32"
    student = run(own) / "student"
    assert (student / "adapter_model.safetensors").is_file()
    assert load_causal_lm(student).model.dtype == torch.float32  # merged into the base as it was
    losses = [line["kd"] for line in log_lines(student.parent) if "kd" in line]
    assert losses[-1] < losses[0]
    not_here = ("modules_to_save", "up_proj", "'up_proj' matches model.layers.0.mlp.up_proj")
    on_cpu = ("optim", "paged_adamw_8bit", "the device is cpu, .* set OPTIM to 'adamw_8bit'")
    for name, value, message in (not_here, on_cpu):
        with pytest.raises(UserError, match=message):
            run(own.replace(run_name=name, **{name: value}))


def test_experts_that_are_not_quantized_are_logged(models, bits, caplog):
    load_causal_lm(models("mixture"), quantization=nf4(CPU, torch.float32))
    assert "are not linear layers" in caplog.text


def test_without_bitsandbytes_the_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"pip install 'ssl_kd\[quantized\]'"):
        nf4(CPU, torch.float32)
