"""Weights are stored in the dtype of their use, which changes no result."""

import copy
import json
import subprocess
import sys

import pytest
import torch

from ssl_kd.language.models.causal import load_causal_lm
from ssl_kd.language.models.dtypes import cast_weights, halve_products
from ssl_kd.language.models.student import add_lora, save_student
from tests.faults.matrix import row as fault


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_a_base_in_half_precision_changes_no_bit_of_a_step(tiny, dtype, kind):
    """Autocast rounds the weights of each product anyway."""
    base = tiny.model(kind, seed=3, spread=0.1)
    found = []
    for half in (False, True):
        model = add_lora(copy.deepcopy(base), 2, seed=0)
        if half:
            halve_products(model, dtype)
        adapters = [p for p in model.parameters() if p.requires_grad]
        assert all(p.dtype == torch.float32 for p in adapters)
        ids = torch.arange(2, 26).view(2, 12)
        with torch.autocast("cpu", dtype=dtype):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append((loss.detach(), *(p.grad for p in adapters)))
    for single, halved in zip(*found, strict=True):
        assert torch.equal(single, halved)
    with torch.no_grad():  # and it works outside autocast, as probes use it
        assert model(input_ids=ids, use_cache=False).logits.dtype == torch.float32


def test_only_weights_of_products_are_halved(tiny):
    model = tiny.model(tie_word_embeddings=True).requires_grad_(False)
    rotary = model.model.rotary_emb.inv_freq.clone()
    halve_products(model, torch.bfloat16)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    float32 = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert float32 == {n for n in dtypes if "norm" in n or "embed" in n}
    cast_weights(model, torch.float16)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert torch.equal(model.model.rotary_emb.inv_freq, rotary)


def test_merged_adapters_are_not_rounded_to_their_base(tiny, tmp_path):
    base = tiny.model(seed=3, spread=0.1)
    cast_weights(base, torch.bfloat16)
    cast_weights(base, torch.float32)  # a file in bfloat16, say
    saved = []
    for half in (False, True):
        model = add_lora(copy.deepcopy(base), 2, seed=0)
        if half:
            halve_products(model, torch.bfloat16)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.fill_(1e-3)
        save_student(model, tiny.tokenizer, tmp_path / f"{half}", "")
        saved.append(load_causal_lm(tmp_path / f"{half}").model.state_dict())
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert any(not torch.equal(t, t.bfloat16().float()) for t in saved[1].values())


PEAK = """
import resource, sys
from pathlib import Path
import torch, transformers
from ssl_kd.language.models.causal import load_causal_lm
from ssl_kd.language.models.frozen import FrozenTeacher
load_causal_lm(sys.argv[1])  # all that is imported late
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
lm = load_causal_lm(sys.argv[2], dtype=torch.bfloat16)
FrozenTeacher(lm.model, dtype=torch.bfloat16)
print(peak() - before)
"""


@pytest.mark.slow  # a process of its own, for its peak of memory
def test_a_teacher_in_half_precision_is_never_in_memory_in_full(tiny, tmp_path):
    small = tiny.folder(tmp_path / "small")
    large = tiny.model(hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    size = sum(p.numel() for p in large.parameters()) * 2 / 2**20  # MiB
    cast_weights(large, torch.bfloat16)
    large.save_pretrained(tmp_path / "large")
    tiny.tokenizer.save_pretrained(tmp_path / "large")
    command = [sys.executable, "-c", PEAK, small, str(tmp_path / "large")]
    peak = float(subprocess.run(command, capture_output=True, text=True, timeout=120).stdout)
    assert peak < 1.6 * size + 8, f"{peak:.0f} MiB for {size:.0f} MiB of weights"


@fault(126)
def test_code_of_a_model_runs_only_if_allowed(tiny, tmp_path, caplog):
    folder = tmp_path / "own"
    tiny.folder(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {}}
    config["auto_map"] = {
        "AutoConfig": "own_code.OwnConfig",
        "AutoModelForCausalLM": "own_code.OwnForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own_code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(
        ValueError, match="could do anything: read the code, then allow it with TRUST_REMOTE_CODE"
    ):
        load_causal_lm(folder)
    lm = load_causal_lm(folder, remote_code=True)
    assert type(lm.model).__name__ == "OwnForCausalLM"
    assert "TRUST_REMOTE_CODE is set, so" in caplog.text
