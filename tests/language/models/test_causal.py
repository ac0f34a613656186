"""Causal language models as teachers, on tiny models of several real architectures."""

import json
import sys
from dataclasses import dataclass

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from ssl_kd.core.errors import InputError  # noqa: E402
from ssl_kd.language.losses.teacher_output import LinearTeacher, LogitsTeacher  # noqa: E402
from ssl_kd.language.models.causal import (  # noqa: E402
    CausalLM,
    CausalLMUnavailable,
    files_id,
    load_causal_lm,
    n_ids,
    tokenizer_id,
)
from ssl_kd.language.models.frozen import FrozenTeacher, hidden_states, linear_head  # noqa: E402
from tests.language.models.small_models import (  # noqa: E402
    LINEAR,
    NOT_LINEAR,
    SMALL,
    VOCAB,
    logits_of,
    make_model,
    make_tokenizer,
)

# peft asks transformers by a name that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@dataclass
class Batch:
    input_ids: torch.Tensor

    def model_inputs(self):
        return {
            "input_ids": self.input_ids,
            "attention_mask": torch.ones_like(self.input_ids),
        }


@pytest.fixture
def batch():
    return Batch(torch.randint(3, VOCAB, (2, 7)))


@pytest.fixture
def folder(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def ask(teacher, batch, rows):
    answer = teacher(batch, rows)
    assert isinstance(answer, LinearTeacher)
    return answer


# --- hidden states and heads ----------------------------------------------------------------------


@pytest.mark.parametrize("architecture", LINEAR)
def test_hidden_states_and_head_are_the_logits(architecture, batch):
    model = make_model(architecture)
    head = linear_head(model)
    assert head is not None
    expected = logits_of(model, batch.input_ids)
    with torch.no_grad():
        hidden = hidden_states(model, batch.model_inputs())
        logits = torch.nn.functional.linear(hidden, head.weight, head.bias)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    assert head.weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("architecture", NOT_LINEAR)
def test_scaled_or_capped_logits_are_not_linear(architecture, batch):
    # At these weights a soft cap of 30 moves no logit by more than fp32 rounds.
    assert linear_head(make_model(architecture)) is None


def test_the_probe_leaves_the_model_as_it_was():
    model = make_model("gpt2")
    model.train()
    model.transformer.h[0].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.random.get_rng_state()
    assert linear_head(model) is not None
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.training and not model.transformer.h[0].training
    assert model.transformer.h[1].attn.attn_dropout.training
    assert not model.lm_head._forward_hooks
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_adapters_count_in_hidden_states(batch):
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(make_model("llama"), config)
    head = linear_head(model)
    expected = logits_of(model, batch.input_ids)
    hidden = hidden_states(model, batch.model_inputs())
    torch.testing.assert_close(hidden @ head.weight.T, expected, rtol=1e-5, atol=1e-6)


def test_a_head_with_adapters_or_another_input_is_not_linear():
    config = peft.LoraConfig(target_modules=["lm_head"])
    assert linear_head(peft.get_peft_model(make_model("llama"), config)) is None
    model = make_model("llama")
    model.lm_head.register_forward_pre_hook(lambda _, arguments: (2 * arguments[0],))
    assert linear_head(model) is None


def test_a_head_with_nan_is_still_linear():
    # The guard finds a NaN in the losses.
    model = make_model("llama")
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    torch.nn.init.constant_(model.model.norm.weight, torch.nan)
    assert linear_head(model) is not None


# --- frozen teachers ------------------------------------------------------------------------------


def test_a_frozen_teacher_returns_the_requested_rows(batch):
    model = make_model("llama")
    expected = logits_of(model, batch.input_ids).flatten(0, 1)
    teacher = FrozenTeacher(model)
    rows = torch.tensor([0, 3, 13])
    answer = ask(teacher, batch, rows)
    assert answer.bias is None
    assert answer.hidden.shape == (3, 32)
    torch.testing.assert_close(answer.hidden @ answer.weight.T, expected[rows])


def test_a_capped_teacher_answers_with_logits(batch):
    model = make_model("gemma2", final_logit_softcapping=0.01)
    expected = logits_of(model, batch.input_ids).flatten(0, 1)
    answer = FrozenTeacher(model)(batch, torch.tensor([2, 5]))
    assert isinstance(answer, LogitsTeacher)
    torch.testing.assert_close(answer.logits, expected[[2, 5]])
    assert answer.logits.abs().max() <= 0.01


def test_a_frozen_teacher_stays_frozen_and_without_dropout(batch):
    model = make_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    teacher = FrozenTeacher(model)
    model.train()
    before = torch.random.get_rng_state()
    first, second = (ask(teacher, batch, torch.arange(4)) for _ in range(2))
    assert torch.equal(first.hidden, second.hidden)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert not first.hidden.requires_grad and not first.weight.requires_grad
    student = torch.ones(4, 32, requires_grad=True)
    (student * first.hidden).sum().backward()  # an inference tensor could not be saved for it
    assert torch.equal(student.grad, first.hidden)


def test_the_dtype_is_the_teachers_own(batch):
    model = make_model("llama")
    frequencies = model.model.rotary_emb.inv_freq.clone()
    teacher = FrozenTeacher(model, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.float16):
        answer = ask(teacher, batch, torch.arange(3))
    assert answer.hidden.dtype == answer.weight.dtype == torch.bfloat16
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


# --- loading and identity -------------------------------------------------------------------------


def test_a_saved_student_loads(folder, batch, capfd):
    lm = load_causal_lm(folder)
    assert torch.equal(
        logits_of(lm.model, batch.input_ids), logits_of(make_model("llama"), batch.input_ids)
    )
    assert tokenizer_id(lm.tokenizer) == tokenizer_id(make_tokenizer())
    assert (lm.name, lm.weights_id) == (str(folder), files_id(folder))
    assert not lm.model.training
    assert load_causal_lm(folder, dtype=torch.bfloat16).model.dtype == torch.bfloat16
    assert capfd.readouterr() == ("", "")


def test_adapters_are_merged_into_their_base(folder, tmp_path, batch):
    base = load_causal_lm(folder)
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(base.model, config)
    expected = logits_of(adapted, batch.input_ids)
    adapted.save_pretrained(tmp_path / "adapters")
    lm = load_causal_lm(tmp_path / "adapters")
    torch.testing.assert_close(logits_of(lm.model, batch.input_ids), expected, rtol=1e-4, atol=1e-5)
    assert not any("lora" in name for name, _ in lm.model.named_parameters())
    assert lm.weights_id == files_id(tmp_path / "adapters") != base.weights_id


def test_identity_follows_weights_and_configuration(folder):
    first = files_id(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    second = files_id(folder)
    make_model("llama", initializer_range=0.03).save_pretrained(folder)
    assert len({first, second, files_id(folder)}) == 3

    tokenizer = make_tokenizer()
    in_memory = [make_model("llama"), make_model("llama", rms_norm_eps=1e-3), make_model("llama")]
    with torch.no_grad():
        in_memory[2].lm_head.weight[0, 0] += 1
    assert len({CausalLM.of(model, tokenizer, "made").weights_id for model in in_memory}) == 3
    again = CausalLM.of(make_model("llama"), tokenizer, "another name")
    assert again.weights_id == CausalLM.of(make_model("llama"), tokenizer, "made").weights_id


def test_a_tokenizer_is_identified_by_its_behavior():
    used = make_tokenizer()
    used(["a b c", "a"], padding=True, truncation=True, max_length=2)
    assert tokenizer_id(used) == tokenizer_id(make_tokenizer())
    assert n_ids(used) == len(used)
    used.get_vocab = lambda: {"a": 0, "b": 7}
    assert n_ids(used) == 8
    used.add_tokens(["zz"])
    assert tokenizer_id(used) != tokenizer_id(make_tokenizer())


def check_refused(name, kind, *words):
    with pytest.raises(kind) as error:
        load_causal_lm(name)
    message = str(error.value)
    assert "\n" not in message
    for word in (str(name), *words):
        assert word in message, message


def test_unloadable_models_are_named_in_one_line(folder, tmp_path, monkeypatch):
    check_refused(tmp_path / "none", FileNotFoundError, "save_pretrained")
    (tmp_path / "empty").mkdir()
    check_refused(tmp_path / "empty", FileNotFoundError, "no config.json")

    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    check_refused(folder, ValueError, "cannot be loaded", "ncomplete")
    file.unlink()
    check_refused(folder, CausalLMUnavailable, "model.safetensors")
    file.write_bytes(whole)
    (folder / "tokenizer.json").unlink()
    check_refused(folder, ValueError, "no readable tokenizer", "tokenizer.save_pretrained")
    make_model("gpt2").save_pretrained(tmp_path / "no tokenizer")
    check_refused(tmp_path / "no tokenizer", ValueError, "no readable tokenizer", "special tokens")


def test_a_name_that_the_hub_cannot_give(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    check_refused("nobody/no-such-model", CausalLMUnavailable, "hf download nobody/no-such-model")
    with pytest.raises(CausalLMUnavailable):
        files_id("nobody/no-such-model")
    with pytest.raises(InputError, match="'gpt2 medium' is neither a folder nor a valid name"):
        load_causal_lm("gpt2 medium")


def test_other_kinds_of_models_are_refused(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    small = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1}
    transformers.T5Config(vocab_size=VOCAB, **small).save_pretrained(tmp_path)
    check_refused(tmp_path, ValueError, "'t5'", "not a causal language model")

    # transformers loads it as a causal language model, and says so in a warning alone.
    options = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
    transformers.BertForMaskedLM(transformers.BertConfig(**options)).save_pretrained(tmp_path)
    check_refused(tmp_path, ValueError, "BertLMHeadModel", "tokens that follow")


def test_without_the_extra_the_way_to_it_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'ssl_kd\[llm\]'"):
        load_causal_lm(folder)


def test_real_models(shared_data):
    lm = load_causal_lm(shared_data / "lm" / "stories3M")
    assert linear_head(lm.model) is not None
    student = load_causal_lm(shared_data / "lm" / "stories260K")
    assert tokenizer_id(lm.tokenizer) != tokenizer_id(student.tokenizer)
    ids = lm.tokenizer("Once upon a time, there was a little", return_tensors="pt").input_ids
    answer = ask(FrozenTeacher(lm.model), Batch(ids), torch.tensor([ids.numel() - 1]))
    best = (answer.hidden @ answer.weight.T).argmax(-1)
    assert lm.tokenizer.decode(best).strip() == "girl"


class RunsCode:
    def __reduce__(self):
        return (print, ("ran",))


def test_a_pickle_with_code_is_refused_in_one_line(tiny, tmp_path, capfd):
    tiny.folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": RunsCode()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="might run code; it was refused") as refused:
        load_causal_lm(tmp_path)
    assert "weights_only" not in str(refused.value) and "ran" not in capfd.readouterr().out


def test_a_tensor_that_does_not_fit_the_configuration_is_named(tiny, tmp_path):
    tiny.folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 400}))
    with pytest.raises(InputError, match=r"shape of lm_head.weight is \(320, 32\), .*\(400, 32\)"):
        load_causal_lm(tmp_path)
