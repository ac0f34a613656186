"""Adapters and optimizers by the names of peft and transformers."""

import math

import pytest
import torch
from torch import nn

from firstnan import Guard
from firstnan.faults import Thresholds
from ssl_kd.core.errors import InputError
from ssl_kd.core.runs.stop import Interrupted
from ssl_kd.language.models.frozen import linear_head
from ssl_kd.language.models.student import add_lora
from ssl_kd.language.run import run
from tests.bits import same
from tests.faults.inject import stop_at
from tests.language.test_run import last_checkpoint, log_lines

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

ADAPTERS = {
    "lora_rank": 4,
    "lora_dropout": 0.3,
    "lora_target_modules": "q_proj, v_proj",
    "modules_to_save": "embed_tokens, lm_head",
    "use_rslora": True,
    "use_dora": True,
}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_plain_peft_loads_the_adapters_that_a_run_saved(settings, models):
    """The layers, dropout and scale are those of a LoraConfig that a user would write."""
    path = run(settings(student_model=models("student"), **ADAPTERS))
    base = transformers.AutoModelForCausalLM.from_pretrained(models("student"))
    loaded = peft.PeftModel.from_pretrained(base, path / "student")
    saved = loaded.peft_config["default"]
    assert (saved.r, saved.lora_dropout, saved.use_rslora, saved.use_dora) == (4, 0.3, True, True)
    assert saved.target_modules == {"q_proj", "v_proj"}
    layer = base.model.layers[1].self_attn.v_proj
    assert layer.scaling["default"] == 16 / math.sqrt(4)
    best = last_checkpoint(path)["best"]["weights"]
    trained = {n: p for n, p in loaded.named_parameters() if ".default" in n}
    assert len(trained) == 2 * 2 * 3 + 2 and same(trained, {n: best[n] for n in trained})


@pytest.mark.parametrize(
    "changes",
    [
        {**ADAPTERS, "student_model": "student", "gradient_checkpointing": True},
        {"optim": "adamw_8bit", "adam_beta2": 0.99},  # the embedding is large enough
    ],
    ids=["adapters", "8 bits"],
)
def test_a_resumed_run_ends_with_the_same_bits(settings, models, changes):
    pytest.importorskip("bitsandbytes")
    if "student_model" in changes:
        changes = {**changes, "student_model": models("student")}
    whole = run(settings(run_name="whole", **changes))
    with pytest.raises(Interrupted):
        run(settings(**changes), progress=stop_at(2))
    path = run(settings(**changes, resume=True))
    assert log_lines(path) == log_lines(whole)
    assert same(last_checkpoint(path), last_checkpoint(whole))
    optimizer = last_checkpoint(path)["distiller"]["optimizer"]
    assert optimizer["param_groups"][0]["betas"][1] == changes.get("adam_beta2", 0.95)
    assert ("uint8" in str(optimizer["state"])) == ("optim" in changes)


def test_the_guard_restores_the_state_of_an_8_bit_optimizer():
    """After a restore, the same batches give the bits of a run without the bad steps."""
    bits = pytest.importorskip("bitsandbytes")

    def trained(bad):
        torch.manual_seed(0)
        model = nn.Linear(96, 64)
        optimizer = bits.optim.AdamW8bit(model.parameters(), lr=1e-2)
        guard = Guard(
            model, optimizer, thresholds=Thresholds(restore_after=3), snapshot_every=1, group=False
        )
        batches = [*torch.randn(6, 8, 96), *[torch.full((8, 96), torch.nan)] * bad]
        good = [batches[5], *torch.randn(3, 8, 96)]  # the last snapshot is from before batch 5
        for x in [*batches, *good] if bad else [*batches[:5], *good]:
            guard.backward(model(x).square().mean())
            guard.step()
            optimizer.zero_grad()
        assert optimizer.state[model.weight]["state1"].dtype == torch.uint8
        return [p.detach() for p in model.parameters()], optimizer.state_dict()["state"]

    assert same(trained(bad=3), trained(bad=0))


def test_a_misspelt_layer_is_named(tiny):
    with pytest.raises(InputError, match="no linear layer 'q_prj'; expected .*q_proj"):
        add_lora(tiny.model(), 2, lora_target_modules="v_proj,q_prj")
    for name, message in (("lm_hed", "no layer; .* lm_head"), ("norm", ".*input_layernorm")):
        with pytest.raises(InputError, match=f"'{name}' matches {message}"):
            add_lora(tiny.model(), 2, modules_to_save=name)


@pytest.mark.parametrize("tied", [False, True])
def test_a_trained_copy_has_the_gradient_of_its_layer(tiny, tied):
    plain, ids = tiny.model(tie_word_embeddings=tied), torch.arange(2, 26).view(2, 12)
    adapted = add_lora(tiny.model(tie_word_embeddings=tied), 2, modules_to_save="lm_head")
    for model in (plain, adapted):
        model(input_ids=ids, labels=ids).loss.backward()
    head = adapted.get_base_model().lm_head
    assert torch.equal(head.weight.grad, plain.lm_head.weight.grad)
    assert linear_head(adapted).weight is head.weight
    with adapted.disable_adapter():
        assert linear_head(adapted).weight is head.original_module.weight
    assert (adapted.get_base_model().get_input_embeddings().weight is head.weight) == tied
