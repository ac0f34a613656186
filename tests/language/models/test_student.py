"""Students of several real architectures: built, adapted, saved and loaded again."""

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from packaging.version import Version

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from ssl_kd.core.errors import InputError, UserError  # noqa: E402
from ssl_kd.language.models import student as module  # noqa: E402
from ssl_kd.language.models.card import model_card  # noqa: E402
from ssl_kd.language.models.causal import CausalLM, load_causal_lm, tokenizer_id  # noqa: E402
from ssl_kd.language.models.frozen import hidden_states  # noqa: E402
from ssl_kd.language.models.student import add_lora, build_student, save_student  # noqa: E402
from ssl_kd.language.train.objective import checkpoint_activations  # noqa: E402
from tests.faults.matrix import row as fault  # noqa: E402
from tests.language.models import small_models  # noqa: E402
from tests.language.models.small_models import SMALL, VOCAB, make_model, make_tokenizer  # noqa: E402

# peft asks transformers by a name that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

DEPTH = SMALL["num_hidden_layers"]
each = pytest.mark.parametrize(
    "architecture", ["llama", "gpt2", "qwen2", "gemma2", "opt", "gpt_neox"]
)


def make(architecture, **changes):
    if architecture == "opt":  # without a projection between embeddings and layers
        changes = {"word_embed_proj_dim": 32, **changes}
    model = make_model(architecture, seed=1, **changes).eval()
    return CausalLM.of(model, make_tokenizer(), architecture)


def logits_of(model):
    return small_models.logits_of(model, torch.arange(14).view(2, 7) + 3)


# --- building -------------------------------------------------------------------------------------


@each
def test_a_cut_keeps_layers_embeddings_and_head(architecture):
    teacher = make(architecture)
    before = copy.deepcopy(teacher.model.state_dict())
    student = build_student("layers:3", teacher, seed=0).model
    # The oracle: the teacher itself without the layers between.
    cut = copy.deepcopy(teacher.model)
    stack = next(m for m in cut.modules() if isinstance(m, torch.nn.ModuleList))
    layers = [stack[i] for i in (0, 2, 4)]
    del stack[:]
    stack.extend(layers)
    for holder in cut.modules():
        if hasattr(holder, "config"):
            holder.config = student.config
    torch.testing.assert_close(logits_of(student), logits_of(cut))
    assert student.config.num_hidden_layers == 3
    whole = build_student(f"layers:{DEPTH}", teacher, seed=0).model
    assert torch.equal(logits_of(whole), logits_of(teacher.model))

    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(1)
    assert all(torch.equal(v, before[k]) for k, v in teacher.model.state_dict().items())


def test_lists_with_an_entry_per_layer_are_cut_too():
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    teacher = make("gemma2", layer_types=kinds)
    config = build_student("layers:2", teacher, seed=0).model.config
    assert config.layer_types == ["sliding_attention", "full_attention"]
    # Two ids that end a text are not an entry per layer.
    teacher = make("llama", num_hidden_layers=2, eos_token_id=[1, 2])
    assert build_student("layers:1", teacher, seed=0).model.config.eos_token_id == [1, 2]


@pytest.mark.parametrize("spec", ["layers:2", "fresh:2x16"])
def test_tied_weights_stay_tied(spec, tmp_path):
    student = build_student(spec, make("gpt2"), seed=0)
    model = student.model
    assert model.lm_head.weight is model.transformer.wte.weight
    save_student(model, student.tokenizer, tmp_path / "student", "")
    again = load_causal_lm(tmp_path / "student").model
    assert again.lm_head.weight is again.transformer.wte.weight


@each
def test_fresh_students_have_the_teachers_architecture(architecture):
    teacher = make(architecture)
    student = build_student("fresh:2x24", teacher, seed=0)
    model = student.model
    assert type(model) is type(teacher.model)
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (2, 24)
    assert model.get_input_embeddings().weight.shape == (VOCAB, 24)
    assert logits_of(model).isfinite().all()
    assert model.num_parameters() < teacher.model.num_parameters()


@pytest.mark.parametrize(("spec", "teacher"), [("fresh:2x48", None), ("llama:2x48", "gpt2")])
def test_new_llamas_have_the_vocabulary_of_their_tokenizer(spec, teacher):
    tokenizer = make_tokenizer(30)
    student = build_student(spec, teacher and make(teacher), tokenizer, seed=0)
    config = student.model.config
    assert config.model_type == "llama"
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id) == (40, 0, 2)
    assert config.hidden_size % config.num_attention_heads == 0
    assert student.tokenizer is tokenizer


def test_new_weights_depend_on_the_seed_only():
    teacher = make("llama")
    before = torch.random.get_rng_state()
    first, again, other = (
        build_student("fresh:2x16", teacher, seed=seed).weights_id for seed in (3, 3, 4)
    )
    assert first == again != other
    assert torch.equal(torch.random.get_rng_state(), before)


def test_half_precision_teachers_give_float32_students():
    teacher = make("llama")
    half = CausalLM.of(teacher.model.half(), teacher.tokenizer, "half")
    student = build_student("layers:2", half, seed=0).model
    assert {p.dtype for p in student.parameters()} == {torch.float32}
    assert student.config.dtype in (torch.float32, None)  # None in transformers 5.0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("layers:6", "from 1 to 5, the number of layers"),
        ("layers:0", "expected layers:3"),
        ("layers:x", "expected layers:3"),
        ("fresh:2", "expected fresh:2x128"),
        ("fresh:2x0", "expected fresh:2x128"),
        ("fresh:2x15", "expected an even width"),
    ],
)
def test_an_invalid_specification_is_named(spec, words):
    with pytest.raises(ValueError, match=words):
        build_student(spec, make("llama"), seed=0)


def test_an_incomplete_specification_is_refused():
    with pytest.raises(ValueError, match="name one in TEACHER_MODEL"):
        build_student("layers:2", None, make_tokenizer(), seed=0)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        build_student("fresh:2x16", None, seed=0)


def test_layers_that_do_not_fit_their_new_position_are_refused():
    # Layer 1 is dense, the others have experts: kept are 0, 2 and 4, and the second has experts.
    experts = {"num_experts": 2, "mlp_only_layers": [1], "moe_intermediate_size": 8}
    config = transformers.Qwen2MoeConfig(**SMALL, **experts, shared_expert_intermediate_size=8)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="'layers:3', which cannot be built.*a folder") as error:
        build_student("layers:3", CausalLM.of(model, make_tokenizer(), "moe"), seed=0)
    assert "\n" not in str(error.value)


# --- adapters -------------------------------------------------------------------------------------


@each
def test_only_adapters_are_trained_and_they_start_at_zero(architecture):
    teacher = make(architecture)
    expected = logits_of(teacher.model)
    model = add_lora(teacher.model, 4, lora_alpha=8.0)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert torch.equal(logits_of(model), expected)
    model.train()
    hidden_states(model, {"input_ids": torch.arange(6)[None]}).square().sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_recomputed_activations_give_the_same_gradients(architecture):
    def gradients(recompute):
        model = add_lora(make(architecture, **no_dropout).model, 2)
        model.train()
        if recompute:
            checkpoint_activations(model)
        saved = 0

        def pack(tensor):
            nonlocal saved
            saved += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = hidden_states(model, {"input_ids": torch.arange(6)[None]}).square().sum()
        loss.backward()
        return saved, [p.grad for p in model.parameters() if p.requires_grad]

    no_dropout = {n: 0.0 for n in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout")}
    kept, expected = gradients(recompute=False)
    less, got = gradients(recompute=True)
    assert less < kept / 2
    torch.testing.assert_close(got, expected)
    assert any(g.abs().sum() > 0 for g in got)


def test_adapters_are_float32_and_depend_on_their_seed_only():
    def first(seed):
        base = make("llama").model.bfloat16()
        before = torch.random.get_rng_state()
        model = add_lora(base, 2, seed=seed)
        assert torch.equal(torch.random.get_rng_state(), before)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        return next(p for n, p in model.named_parameters() if "lora_A" in n)

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))


# --- saving ---------------------------------------------------------------------------------------


@each
def test_a_saved_student_loads_with_identical_logits(architecture, tmp_path, capfd):
    student = build_student("layers:2", make(architecture), seed=0)
    rows = [{"name": "teacher", "perplexity": 3.14159, "ece": None}, {"name": "a|b", "left_out": 0}]
    student.tokenizer.vocab_file = str(tmp_path / "tokenizer.model")  # as of SentencePiece
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    save_student(student.model, student.tokenizer, tmp_path / "student", rows)
    assert capfd.readouterr() == ("", "")
    names = {path.name for path in (tmp_path / "student").iterdir()}
    assert names >= {"model.safetensors", "config.json", "generation_config.json", "README.md"}
    assert names >= {"tokenizer.json", "tokenizer_config.json", "tokenizer.model"}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "student").eval()
    assert torch.equal(logits_of(again), logits_of(student.model))
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "student")
    assert tokenizer_id(fast) == tokenizer_id(student.tokenizer)
    card = ModelCard.load(tmp_path / "student" / "README.md")
    assert "| teacher | 3.142 | - | - |\n| a\\|b | - | - | 0 |" in card.text
    assert card.data.to_dict()["library_name"] == "transformers"
    assert card.data.to_dict()["pipeline_tag"] == "text-generation"
    assert sorted(os.listdir(tmp_path)) == ["student", "tokenizer.model"]


@pytest.fixture
def on_disk(tmp_path):
    """A base in a folder, and adapters that change its output."""
    base = make("gpt2")
    save_student(base.model, base.tokenizer, tmp_path / "base", "")
    base = load_causal_lm(tmp_path / "base")
    model = add_lora(base.model, 4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model, base.tokenizer


def test_adapters_load_with_peft(on_disk, tmp_path):
    model, tokenizer = on_disk
    made = {"teacher": "a\nb", "data": "c"}
    save_student(model, tokenizer, tmp_path / "adapters", "", made=made)
    files = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    assert torch.equal(logits_of(again), logits_of(model))
    card = ModelCard.load(tmp_path / "adapters" / "README.md")
    data = card.data.to_dict()
    assert data["library_name"] == "peft" and "base_model" not in data  # a folder here
    assert "- base model: base\n- teacher: a b\n- data: c" in card.text


@pytest.mark.parametrize(
    ("saved_name", "named"),
    [("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("/home/me/a", None), (5, None)],
)
def test_a_card_names_a_local_base_like_its_config(tmp_path, monkeypatch, saved_name, named):
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    for content in (json.dumps({"_name_or_path": saved_name}), "[]", "{"):
        Path("base/config.json").write_text(content, encoding="utf-8")
        for folder in ("base", str(tmp_path / "base")):
            card = ModelCard(model_card("a", [], folder, True, False, {})).data.to_dict()
            names = card.get("base_model"), card.get("base_model_relation")
            assert names == (named, named and "adapter")
        named = None
    card = ModelCard(model_card("a", [], "gpt2", False, False, {})).data.to_dict()
    assert card["base_model"] == "gpt2"


def test_adapters_name_their_base_from_everywhere(on_disk, tmp_path, monkeypatch):
    _, tokenizer = on_disk
    monkeypatch.chdir(tmp_path)
    model = add_lora(load_causal_lm("base").model, 2)
    save_student(model, tokenizer, "adapters", "")
    saved = json.loads(Path("adapters/adapter_config.json").read_text(encoding="utf-8"))
    assert saved["base_model_name_or_path"] == str(tmp_path / "base")
    monkeypatch.chdir("/")
    assert load_causal_lm(tmp_path / "adapters").model is not None


@pytest.mark.parametrize("rank", [33, 10**6])
@fault(149)
def test_a_rank_above_the_width_is_refused_with_the_largest(rank):
    model = make("llama").model
    width = model.config.hidden_size
    with pytest.raises(InputError, match=f"LORA_RANK is {rank:,}; expected at most {width:,}"):
        add_lora(model, rank)
    assert not hasattr(model, "peft_config")


def test_adapters_of_a_base_built_in_memory_are_merged(tmp_path, caplog):
    student = build_student("layers:2", make("llama"), seed=0)
    model = add_lora(student.model, 2)
    with caplog.at_level("INFO", "ssl_kd"):
        save_student(model, student.tokenizer, tmp_path / "student", "")
    assert "merged" in caplog.text
    assert torch.equal(logits_of(load_causal_lm(tmp_path / "student").model), logits_of(model))
    assert any("lora_A" in name for name, _ in model.named_parameters())  # the model keeps them


def test_a_failed_save_leaves_the_old_folder(tmp_path, monkeypatch):
    student = build_student("layers:2", make("llama"), seed=0)
    folder = tmp_path / "student"
    save_student(student.model, student.tokenizer, folder, "first")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(module, "model_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_student(student.model, student.tokenizer, folder, "second")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(tmp_path) == ["student"]
    monkeypatch.undo()
    save_student(student.model, student.tokenizer, folder, "third")
    assert "third" in (folder / "README.md").read_text(encoding="utf-8")
    assert os.listdir(tmp_path) == ["student"]


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    student = build_student("layers:1", make("llama"), seed=0)
    with pytest.raises(FileExistsError, match="other than a saved model"):
        save_student(student.model, student.tokenizer, tmp_path, "")
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_tokenizer_that_would_load_as_another_class_causes_a_warning(tmp_path, caplog):
    # transformers takes Qwen's own class for a model of its architecture, whatever was saved.
    for architecture in ("llama", "qwen2"):
        student = build_student("layers:1", make(architecture), seed=0)
        save_student(student.model, student.tokenizer, tmp_path / architecture, "")
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / architecture)
        warned = "as another class, which splits text differently" in caplog.text
        assert warned == (type(again) is not type(student.tokenizer))
    assert warned or Version(transformers.__version__) < Version("5.1")


def test_a_generation_configuration_that_transformers_refuses_is_saved(tmp_path):
    student = build_student("layers:1", make("llama"), seed=0)
    student.model.generation_config.temperature = 0.6  # without do_sample, as some on the Hub
    save_student(student.model, student.tokenizer, tmp_path / "student", "")
    again = transformers.GenerationConfig.from_pretrained(tmp_path / "student")
    assert (again.temperature, again.do_sample) == (0.6, True)


def test_a_student_that_does_not_fit_into_memory_names_its_width(tiny, monkeypatch):
    def full(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", full)
    with pytest.raises(UserError, match="'fresh:1x64', .* choose a smaller width") as error:
        build_student("fresh:1x64", None, tiny.tokenizer, seed=0)
    assert error.value.exit_code == 1
