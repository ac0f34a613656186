"""What a teacher can lose: nothing changes where nothing was, and the least is found."""

import pytest
import torch

pytest.importorskip("transformers")

from ssl_kd.errors import InputError
from ssl_kd.language.run import run
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.teachers.causal import CausalLM, load_causal_lm
from ssl_kd.teachers.pruning import importance_of, prune
from ssl_kd.teachers.student import build_student, save_student

each = pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
SIZE = {"num_hidden_layers": 3, "head_dim": 8}


@pytest.fixture
def make(tiny):
    """A teacher with weights that matter, biases too."""

    def build(kind="Llama", **changes):
        model = tiny.model(kind, spread=0.3, **{**SIZE, **changes})
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(p, 0, 0.3)
        return CausalLM.of(model, tiny.tokenizer, "teacher")

    return build


@torch.no_grad()
def logits(model, batch):
    return model(**batch.model_inputs(), use_cache=False).logits


def cut(spec, teacher, blocks):
    return build_student(spec, teacher, seed=0, sample=blocks).model


@torch.no_grad()
def empty(model, *, mlp=(), groups=(), channels=()):
    """Let some channels and heads hold nothing."""
    mlp, groups, channels = (list(which) for which in (mlp, groups, channels))
    rows = [8 * g + j for g in groups for j in range(8)]
    model.model.embed_tokens.weight[:, channels] = 0
    for layer in model.model.layers:
        attention = layer.self_attn
        layer.mlp.up_proj.weight[mlp] = 0
        attention.v_proj.weight[rows] = 0
        if attention.v_proj.bias is not None:
            attention.v_proj.bias[rows] = 0
        for out in (attention.o_proj, layer.mlp.down_proj):
            out.weight[channels] = 0
            if out.bias is not None:
                out.bias[channels] = 0


@each
@pytest.mark.parametrize("tied", [True, False])
def test_what_holds_nothing_is_pruned_without_any_change(tiny, make, kind, tied):
    teacher, blocks = make(kind, tie_word_embeddings=tied), tiny.blocks(12)
    empty(teacher.model, mlp=range(5, 21), groups=[0], channels=[1, 4, 9, 30])
    before = {name: x.clone() for name, x in teacher.model.state_dict().items()}
    student, batch = cut("prune:3x32x28x1", teacher, blocks), blocks.batch(range(4))
    config = student.config
    sizes = config.intermediate_size, config.hidden_size, config.num_key_value_heads
    assert sizes == (32, 28, 1) and config.num_attention_heads == 2 and config.head_dim == 8
    assert type(student) is type(teacher.model)
    found, expected = logits(student, batch), logits(teacher.model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    after = teacher.model.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items())


@each
def test_a_layer_that_does_nothing_is_the_one_that_goes(tiny, make, kind):
    teacher, blocks = make(kind), tiny.blocks(12)
    idle = teacher.model.model.layers[1]
    for out in (idle.self_attn.o_proj, idle.mlp.down_proj):
        torch.nn.init.zeros_(out.weight)
    found = importance_of(teacher.model, blocks)
    assert found.layers.argmin() == 1 and found.layers[1].abs() < 1e-12
    student, batch = cut("prune:2", teacher, blocks), blocks.batch(range(4))
    assert prune("prune:2", teacher.model, blocks).layers == [0, 2]
    assert torch.equal(logits(student, batch), logits(teacher.model, batch))


def test_importances_are_the_formulas_of_the_real_tokens(tiny, make):
    model, blocks = make().model, tiny.blocks(12)
    assert not blocks.documents.all()  # some is padding
    found = importance_of(model, blocks)
    batch = blocks.batch(range(len(blocks)))
    real = batch.documents > 0
    with torch.no_grad():
        out = model.model(input_ids=batch.input_ids, output_hidden_states=True, use_cache=False)
        states = [h[real].double() for h in out.hidden_states]
        layer = model.model.layers[0]
        normed = layer.input_layernorm(out.hidden_states[0])
        cosines = torch.cosine_similarity(states[0], states[1], dim=-1)
        middle = out.hidden_states[0] + layer.self_attn(
            normed, position_embeddings=model.model.rotary_emb(normed, real.cumsum(1) - 1),
            attention_mask=None,
        )[0]  # fmt: skip
        second = layer.post_attention_layernorm(middle)
        gated = layer.mlp.act_fn(layer.mlp.gate_proj(second)) * layer.mlp.up_proj(second)
    assert float(found.layers[0]) == pytest.approx(float((1 - cosines).mean()), rel=1e-4)
    expected = gated[real].double().square().mean(0).sqrt()
    torch.testing.assert_close(found.mlp[0], expected, rtol=1e-4, atol=1e-6)
    squares = normed[real].double().square().mean(0) + second[real].double().square().mean(0)
    torch.testing.assert_close(found.channels[0], squares.sqrt(), rtol=1e-4, atol=1e-6)
    assert [tuple(x.shape) for x in (found.layers, found.mlp, found.groups, found.channels)] == [
        (3,), (3, 48), (3, 2), (4, 32),
    ]  # fmt: skip


def test_the_largest_stay_layer_by_layer(tiny, make):
    teacher, blocks = make(), tiny.blocks(12)
    for i, layer in enumerate(teacher.model.model.layers):
        layer.mlp.up_proj.weight.data[10 * i : 10 * i + 3] *= 50
    student = cut("prune:3x3", teacher, blocks)
    for i in range(3):
        kept = student.model.layers[i].mlp.up_proj.weight
        expected = teacher.model.model.layers[i].mlp.up_proj.weight[10 * i : 10 * i + 3]
        assert torch.equal(kept, expected)


def test_what_is_pruned_is_saved_and_loaded(tiny, make, tmp_path):
    blocks = tiny.blocks(12)
    student = build_student("prune:2x20x24x1", make("Qwen2"), seed=0, sample=blocks)
    save_student(student.model, student.tokenizer, tmp_path / "student", "Pruned.")
    again, batch = load_causal_lm(tmp_path / "student").model, blocks.batch(range(4))
    assert torch.equal(logits(again, batch), logits(student.model, batch))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("prune:4", "the teacher has 3 of LAYERS; expected prune:LAYERS.* with 1 to 3 there"),
        ("prune:2x49", "the teacher has 48 of MLP"),
        ("prune:2x40x0", "the teacher has 32 of DIM"),
        ("prune:2x40x24x3", "the teacher has 2 of KV"),
        ("prune:half", "expected prune:LAYERS.*, as in prune:4 or prune:4x512x256"),
        ("prune:2x", "expected prune:LAYERS"),
    ],
)
def test_a_size_that_cannot_be_is_named(tiny, make, spec, words):
    with pytest.raises(InputError, match=words):
        cut(spec, make(), tiny.blocks(4))


def test_other_architectures_are_refused_by_name(tiny):
    teacher = CausalLM.of(tiny.model("GPT2"), tiny.tokenizer, "gpt2")
    words = "GPT2LMHeadModel is not pruned here, only llama, .*: take layers:N"
    with pytest.raises(InputError, match=words):
        cut("prune:1", teacher, tiny.blocks(4))
    with pytest.raises(InputError, match="cut out of a teacher: name one"):
        build_student("prune:1", None, tiny.tokenizer, seed=0)


def test_a_run_distils_a_pruned_student(tiny, text_file, tmp_path):
    teacher = tiny.folder(tmp_path / "teacher")
    small = {"block_size": 24, "batch_size": 4, "max_steps": 2, "eval_rows": 8, "device": "cpu"}
    small |= {"generations": 0, "answer_prompts": 0, "run_name": "a", "data_path": text_file}
    folders = {"teacher_model": teacher, "runs_dir": str(tmp_path / "runs")}
    settings = LanguageSettings(student_model="prune:1x24x32", **small, **folders)
    assert settings.peak_lr == 5e-4
    path = run(settings)
    assert load_causal_lm(path / "student").model.config.intermediate_size == 24
