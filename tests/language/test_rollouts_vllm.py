"""What a student writes with vLLM, of which there is a stand-in here: what is sent, and refused."""

import copy
import sys

import pytest
import torch

pytest.importorskip("transformers")

from ssl_kd.errors import InputError, MissingPackage  # noqa: E402
from ssl_kd.guard.precision import Precision  # noqa: E402
from ssl_kd.language import rollouts_vllm as module  # noqa: E402
from ssl_kd.language.rollouts import Generated  # noqa: E402
from ssl_kd.language.rollouts_vllm import VllmRollouts, named_weights  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.settings import SettingsError  # noqa: E402
from ssl_kd.teachers.student import add_lora  # noqa: E402
from tests import stand_in_vllm  # noqa: E402
from tests.bits import same  # noqa: E402
from tests.language.test_run import weights  # noqa: E402

END = 1
PROMPTS, ROOMS, SEEDS = [[5, 9, 14], [7], [3, 3]], [9, 8, 2], [1, 2, 3]
OWN = {"on_policy": 1.0, "rollout_engine": "vllm", "rollout_tokens": 6, "prompt_tokens": 4}


@pytest.fixture
def vllm(monkeypatch):
    """The class of engines."""
    for name in ("ENABLE_V1_MULTIPROCESSING", "CPU_OMP_THREADS_BIND", "LOGGING_LEVEL"):
        monkeypatch.setenv(f"VLLM_{name}", "1")
    monkeypatch.setitem(sys.modules, "vllm", stand_in_vllm.MODULE)
    monkeypatch.setattr(stand_in_vllm.LLM, "fault", None)
    return stand_in_vllm.LLM


@pytest.fixture
def rollouts(tiny, vllm):
    """Of a model; with changes of settings."""

    def make(model, width=64, **changes):
        own = tiny.settings(**{**OWN, "rollout_temperature": 0.0, **changes})
        cpu = Precision.for_device("cpu")
        return VllmRollouts(model, [END], tiny.tokenizer, width, own, cpu)

    return make


@pytest.mark.parametrize("changes", [
    {}, {"tie_word_embeddings": True}, {"vocab_size": 400}, {"kind": "GPT2"}
], ids=str)  # fmt: skip
def test_the_likeliest_tokens_are_those_of_the_student_after_each_change(tiny, rollouts, changes):
    model = tiny.model(**{"spread": 0.3, **changes})
    ours = Generated(model, [END], vocabulary=320, temperature=0)
    theirs = rollouts(model)
    before = theirs(PROMPTS, ROOMS, SEEDS)
    assert before == ours(PROMPTS, ROOMS, SEEDS)
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.3)
    after = theirs(PROMPTS, ROOMS, SEEDS)
    assert after == ours(PROMPTS, ROOMS, SEEDS) and after != before


def test_weights_have_the_names_and_values_of_the_models_own_files(tiny, tmp_path):
    from safetensors.torch import load_file

    model = tiny.model("Mixtral")  # transformers has its experts in one tensor, its files do not
    model.save_pretrained(tmp_path)
    assert same(named_weights(model), load_file(tmp_path / "model.safetensors"))


def test_adapters_are_added_and_the_student_keeps_them(tiny, rollouts):
    model = add_lora(tiny.model(spread=0.3), 2)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, 0, 0.5)
    state = copy.deepcopy(model.state_dict())
    sent = named_weights(model)
    assert same(model.state_dict(), state)
    merged = copy.deepcopy(model).merge_and_unload()
    assert sent.keys() == merged.state_dict().keys()
    assert all(torch.allclose(sent[k], v, atol=1e-6) for k, v in merged.state_dict().items())
    ours = Generated(model, [END], temperature=0)(PROMPTS, ROOMS, SEEDS)
    assert rollouts(model)(PROMPTS, ROOMS, SEEDS) == ours


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
def test_adapters_of_experts_are_refused(tiny):
    with pytest.raises(InputError, match="does not take the adapters of .*experts"):
        named_weights(add_lora(tiny.model("Mixtral"), 2))


def test_each_prompt_has_its_room_and_its_seed(tiny, rollouts):
    write = rollouts(tiny.model(spread=0.1), rollout_temperature=0.7, rollout_top_p=0.9)
    found = write(PROMPTS, ROOMS, SEEDS)
    (_, asked) = write._engine.asked[-1]
    assert [(one.max_tokens, one.seed) for one in asked] == [*zip(ROOMS, SEEDS, strict=True)]
    assert {(one.temperature, one.top_p) for one in asked} == {(0.7, 0.9)}
    assert all(one.stop_token_ids == [END] and one.ignore_eos for one in asked)
    assert found == write(PROMPTS, ROOMS, SEEDS) != write(PROMPTS, ROOMS, [4, 5, 6])
    n = len(write._engine.asked)
    assert write([], [], []) == [] and len(write._engine.asked) == n


def test_it_starts_as_the_settings_say_and_leaves_the_random_numbers_alone(tiny, rollouts):
    model = tiny.model(spread=0.3).train()
    dice = torch.get_rng_state()
    options = rollouts(model, width=32, batch_size=3, rollout_memory=0.2)._engine.options
    assert torch.equal(dice, torch.get_rng_state()) and model.training
    said = [options[name] for name in ("max_model_len", "max_num_seqs", "gpu_memory_utilization")]
    assert said == [32, 3, 0.2] and options["dtype"] == "float32"
    assert options["distributed_executor_backend"] is None


def test_with_several_ranks_each_has_an_engine_that_leaves_their_group_alone(
    tiny, rollouts, monkeypatch
):
    monkeypatch.setattr(module, "several_ranks", lambda: True)
    engine = rollouts(tiny.model())._engine
    assert engine.options["distributed_executor_backend"] == "external_launcher"
    assert not engine.llm_engine.engine_core._finalizer.alive


def test_a_head_that_vllm_has_not_is_not_sent(tiny, rollouts, vllm, monkeypatch):
    sent = []
    monkeypatch.setattr(vllm, "apply_model", lambda self, function: [["model"]])
    monkeypatch.setattr(vllm, "fault", lambda weights: sent.append({*weights}) or weights)
    rollouts(tiny.model(tie_word_embeddings=True))
    assert "lm_head.weight" not in sent[0] and "model.embed_tokens.weight" in sent[0]


def test_weights_that_do_not_arrive_are_found_before_the_first_step(
    tiny, rollouts, vllm, monkeypatch
):
    without = lambda weights: {k: w for k, w in weights.items() if "mlp" not in k}  # noqa: E731
    monkeypatch.setattr(vllm, "fault", without)
    with pytest.raises(
        InputError, match=r"weights \(LlamaForCausalLM\): it is off by [0-9.]+ nats"
    ):
        rollouts(tiny.model(spread=0.3))


def test_a_model_that_vllm_does_not_take_is_said_so(tiny, rollouts):
    said = r"vLLM stand-in does not start .*too large\).*: set ROLLOUT_ENGINE to 'transformers'"
    with pytest.raises(InputError, match=said):
        rollouts(tiny.model(), width=20_000)


def test_a_run_by_the_likeliest_tokens_is_that_of_transformers_to_the_bit(settings, vllm):
    own = settings(**OWN, rollout_temperature=0.0, packing=False)
    one = run(own)
    two = run(own.replace(rollout_engine="transformers", run_name="b"))
    assert weights(one) == weights(two)


def test_without_vllm_a_run_says_how_to_install_it(settings, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="not installed: pip install vllm"):
        run(settings(**OWN))


@pytest.mark.parametrize(("changes", "message"), [
    ({"on_policy": 0.0}, "ROLLOUT_ENGINE 'vllm' runs a student that writes itself: set ON_POLICY"),
    ({"shard": True}, "SHARD to False"),
    ({"rollout_engine": "vlm"}, "ROLLOUT_ENGINE is 'vlm'"),
    ({"rollout_memory": 0.0}, "ROLLOUT_MEMORY is 0.0"),
], ids=str)  # fmt: skip
def test_what_does_not_fit_together_is_refused(settings, changes, message):
    with pytest.raises(SettingsError) as refused:
        settings(**{**OWN, **changes})
    assert message in str(refused.value)
