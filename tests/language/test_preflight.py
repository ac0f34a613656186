"""The files of a run are checked before a model is loaded, trained or cached."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from ssl_kd.core.errors import InputError, MissingPackage, SeveralFaults, UserError
from ssl_kd.core.settings import SettingsError
from ssl_kd.distillation import Distillation
from ssl_kd.language import prepare as loading
from ssl_kd.language.models.causal import CausalLMUnavailable, load_causal_lm, outline_causal_lm
from ssl_kd.language.run import run
from ssl_kd.language.teachers.caching import cache_teacher


@pytest.fixture(autouse=True)
def nothing_works(monkeypatch, tmp_path):
    """Fail a test in which a model is loaded, trained or built; work in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def work(*args, **options):
        raise AssertionError("a model was loaded before the checks")

    for name in ("load_teacher", "trained_teacher", "build_student"):
        monkeypatch.setattr(loading, name, work)


@pytest.mark.parametrize("work", [run, cache_teacher])
@pytest.mark.parametrize("teacher", ["train", "train:1x16:5", "folder"])
@pytest.mark.parametrize("cache", [None, "auto"])
def test_a_wrong_student_is_found_before_the_teacher_works(
    settings, tmp_path, work, teacher, cache
):
    wrong = {"teacher_model": teacher} if teacher != "folder" else {}
    wrong |= {"student_model": str(tmp_path / "absent"), "teacher_cache": cache}
    if work is cache_teacher:
        wrong["teacher_cache"] = str(tmp_path / "cache")
    with pytest.raises(
        FileNotFoundError, match="^STUDENT_MODEL: the folder .*absent does not exist"
    ):
        work(settings(**wrong))
    assert not (tmp_path / "runs").exists() and not (tmp_path / "cache").exists()
    assert not Path("data").exists()


def test_a_trained_teachers_tokenizer_is_compared_before_it_is_trained(settings, models):
    with pytest.raises(SettingsError, match="the teacher train and the student .* have different"):
        run(settings(teacher_model="train:1x16:5", student_model=models("student")))


def test_all_faults_are_in_one_message_each_with_its_setting(settings, models, tmp_path):
    wrong = settings(
        student_model=models("foreign"),
        block_size=200,
        lora_rank=64,
        lora_target_modules="q_proj,query",
        modules_to_save="head",
        teacher_cache=str(tmp_path / "absent"),
        router_weights=str(tmp_path / "router.safetensors"),
        chat_template_path=str(tmp_path / "chat.jinja"),
        optim="paged_adamw_8bit",
        data_path=str(tmp_path / "no.jsonl"),
    )
    with pytest.raises(SeveralFaults) as refused:
        run(wrong)
    first, *faults = str(refused.value).splitlines()
    assert first == "13 faults were found, and no model was loaded, trained or cached:"
    for text in (
        "- DATA_PATH: the text source is ",
        "- TEACHER_CACHE is ",
        "- ROUTER_WEIGHTS is ",
        "the device is cpu, which has no pages: set OPTIM",
        f"- BLOCK_SIZE is 200, but the model {models('teacher')} has 128 positions",
        f"- BLOCK_SIZE is 200, but the model {models('foreign')} has 128 positions",
        "have different tokenizers (320 and 290 tokens), and ALIGN is 'auto'",
        "- TEACHER_CACHE may hold 320 tokens, but the vocabulary of the student",
        "- LORA_RANK is 64; expected at most 32",
        "- LORA_TARGET_MODULES is 'q_proj,query', but the model has no linear layer 'query'",
        "- MODULES_TO_SAVE is 'head', but 'head' matches lm_head",
        "chat.jinja",
        "has no router, because it is a dense model: set ROUTER_MODE 'native'",
    ):
        assert sum(text in fault for fault in faults) == 1, text
    assert len(faults) == 13 and refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"student_model": "layers:9"}, "STUDENT_MODEL is 'layers:9'; .* from 1 to 2"),
        ({"student_model": "fresh:2x7"}, "STUDENT_MODEL asks for the width 7; expected an even"),
        ({"student_model": "fresh:2", "teacher_model": "train"}, "STUDENT_MODEL is 'fresh:2'"),
        ({"student_model": "fresh:1x16", "lora_rank": 17}, "LORA_RANK is 17; expected at most 16"),
        ({"router_mode": "all"}, "LlamaForCausalLM has no router, .* set ROUTER_MODE 'native'"),
        ({"runs_dir": "taken"}, "RUNS_DIR is 'taken', and taken is a file; .* set --runs_dir"),
        ({"teacher_cache": "auto", "divergence": "reverse_kl"}, "DIVERGENCE"),
    ],
)
def test_invalid_configurations_are_refused(settings, changes, message):
    Path("taken").write_text("")
    with pytest.raises(InputError, match=message):
        run(settings(**changes))


def test_a_used_name_is_refused_before_the_cache_is_written(settings, tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "metrics.json").write_text("{}")
    with pytest.raises(InputError, match="already holds a finished run: choose another --run_name"):
        run(settings(teacher_cache="auto"))


@pytest.mark.skipif(os.getuid() == 0, reason="root writes anywhere")
def test_a_folder_without_permission_is_refused(settings, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(SettingsError, match="is not writable: set --runs_dir"):
        run(settings(runs_dir=str(tmp_path / "locked" / "runs")))


def test_chats_need_a_template(settings, models, tmp_path):
    answer = {"role": "assistant", "content": "b"}
    chats = [{"messages": [{"role": "user", "content": f"a {i}"}, answer]} for i in range(60)]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    message = (
        r"chats.jsonl:\d+: messages need a chat template, .* STUDENT_MODEL .* CHAT_TEMPLATE_PATH"
    )
    with pytest.raises(SettingsError, match=message):
        run(settings(student_model=models("student"), data_path=str(file)))


def test_a_package_that_a_setting_needs_is_named(settings, monkeypatch, models):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *p: None if n == "bitsandbytes" else found(n, *p)
    )
    for changes, setting in (
        ({"quantization": "nf4"}, "QUANTIZATION"),
        ({"optim": "adamw_8bit"}, "OPTIM"),
    ):
        with pytest.raises(MissingPackage, match=f"{setting} .* needs bitsandbytes: pip install"):
            run(settings(**changes))


def test_a_tokenizer_of_another_model_is_refused(settings, tiny, tmp_path):
    small = tiny.folder(tmp_path / "small", vocab_size=300)
    with pytest.raises(
        SettingsError, match="has 320 tokens, but the vocabulary of .* has 300 rows"
    ):
        run(settings(teacher_model=small, student_model="layers:1"))


def test_from_python_the_arguments_are_named(models, tmp_path, text_file):
    own = Distillation("train:1x16:5", str(tmp_path / "absent"), text_file, lora_rank=2)
    own.settings = own.settings.replace(runs_dir=str(tmp_path / "runs"), router_weights="no.pt")
    with pytest.raises(SeveralFaults, match="\n- student: the folder") as refused:
        own.run()
    assert "\n- router_weights is 'no.pt'" in str(refused.value)


def test_a_name_that_the_hub_does_not_have(settings, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        CausalLMUnavailable, match="^STUDENT_MODEL: language model 'nobody/nothing'"
    ):
        run(settings(student_model="nobody/nothing", teacher_model="train"))


@pytest.mark.parametrize("kind", ["teacher", "gpt2", "mixture"])
def test_an_outline_has_the_shapes_and_no_weights(models, kind):
    outline, lm = outline_causal_lm(models(kind)), load_causal_lm(models(kind))
    shapes = [
        {name: p.shape for name, p in model.named_parameters()}
        for model in (outline.model, lm.model)
    ]
    assert shapes[0] == shapes[1] and outline.name == lm.name
    assert {p.device for p in outline.model.parameters()} == {torch.device("meta")}
    assert outline.tokenizer.get_vocab() == lm.tokenizer.get_vocab()


def test_a_folder_without_weights_has_no_outline(models, tmp_path):
    folder = tmp_path / "empty"
    outline_causal_lm(models("teacher")).model.config.save_pretrained(folder)
    with pytest.raises(UserError, match="has no weights, such as model.safetensors"):
        outline_causal_lm(folder)
