"""Settings of the language mode: presets build, and conflicting settings are refused."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ssl_kd.cli.flags import read_settings
from ssl_kd.core.runs.folder import RunFolder
from ssl_kd.core.runs.schedule import learning_rate_at
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.losses.divergences import DIVERGENCES
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.settings.presets import NOTES, PRESETS
from tests.faults.matrix import row


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_and_survives_its_own_file(name, tmp_path):
    settings = LanguageSettings(**PRESETS[name])
    for field, value in PRESETS[name].items():
        assert getattr(settings, field) == value
    lines = [f"{key} = {value!r}" for key, value in settings.to_dict().items()]
    (tmp_path / "config.py").write_text("\n".join(lines))
    assert LanguageSettings.from_file(tmp_path / "config.py") == settings
    assert LanguageSettings.from_dict(settings.to_dict()) == settings


def test_presets_are_those_of_the_older_scripts():
    numbers = ("learning_rate", "temperature", "alpha_kd", "alpha_ce", "clip_grad")
    table = {
        "stable": (1e-5, 2.0, 0.1, 0.9, 0.5),
        "fp16_safe": (5e-6, 1.5, 0.05, 0.95, 0.5),
        "ultra_stable": (5e-6, 1.5, 0.05, 0.95, 0.5),
        "most_conservative": (2e-6, 1.2, 0.01, 0.99, 0.25),
        "balanced": (1e-5, 2.0, 0.1, 0.9, 0.5),
    }
    made = {name: LanguageSettings(**PRESETS[name]) for name in NOTES}
    assert made.keys() == table.keys() == PRESETS.keys() - {"t4", "p100", "smollm2", "small"}
    for name, settings in made.items():
        assert tuple(getattr(settings, number) for number in numbers) == table[name]
        assert (settings.batch_size, settings.block_size) == (1, 512)
        assert (settings.router_mode, settings.eval_every) == ("auto", 50)
        assert settings.grad_norm_threshold is None
        patient = name in ("ultra_stable", "most_conservative")  # begins again and saves memory
        assert settings.stop_after == (None if patient else 10)
        assert settings.gradient_checkpointing == patient
        half = name in ("fp16_safe", "balanced")
        assert settings.model_dtype == ("float16" if half else "auto")
    assert made["most_conservative"].max_steps == 1000


def test_the_preset_small_is_the_defaults():
    assert LanguageSettings(**PRESETS["small"]) == LanguageSettings()


def test_a_preset_logs_its_difference_from_the_older_script(tmp_path, capsys):
    def read(*words):
        config = tmp_path / "none.py"
        known = {"presets": PRESETS, "notes": NOTES}
        return read_settings(LanguageSettings, words, config, prog="x", **known)

    for name in NOTES:
        settings = read("--preset", name)
        line = capsys.readouterr().err
        assert line.startswith(f"ssl_kd: preset {name}: ") and line.count("\n") == 1
        assert "--legacy_clamp" in line and "--grad_norm_threshold" in line
        assert (settings.legacy_clamp, settings.grad_norm_threshold) == (None, None)
        assert re.findall(r"--(\w+)", line) == [
            name for name in re.findall(r"--(\w+)", line) if name in LanguageSettings.rules()
        ]
    read()
    assert capsys.readouterr().err == ""


def test_the_learning_rate_follows_lr_schedule():
    shapes = {
        schedule: [learning_rate_at(step, 10, 8.0, 0.2, schedule) for step in range(10)]
        for schedule in LanguageSettings.rules()["lr_schedule"][2].choices
    }
    assert shapes["linear"] == [4, 8, 8, 7, 6, 5, 4, 3, 2, 1]
    assert shapes["constant"] == [8] * 10
    assert shapes["constant_with_warmup"] == [4, *[8] * 9]
    assert shapes["cosine"] == [learning_rate_at(step, 10, 8.0, 0.2) for step in range(10)]
    assert shapes["linear"] == [
        learning_rate_at(step, 10, 8.0, 0.7, "linear", 2) for step in range(10)
    ]
    assert learning_rate_at(6, 10, 8.0, 0.2, "cosine_with_min_lr", 2, 0.5) == 6.0  # half way


# Of TRL's configurations, the fields that users of it are most likely to pass.
FOREIGN = """
    alpha beta bnb_4bit_quant_type dataset_name dataset_text_field deepspeed dtype fsdp kd_ratio
    lmbda load_in_4bit lora_alpha lora_dropout lora_r lora_target_modules max_completion_length
    max_length max_new_tokens max_seq_length model_name_or_path packing per_device_batch_size
    seq_kd student_lr target_modules teacher_model_name_or_path teacher_model_server_url
    temperature torch_dtype train_batch_size train_steps trust_remote_code uld_use_hybrid_loss
    use_peft use_uld_loss use_vllm vllm_mode
"""


@row(154)
@pytest.mark.parametrize("name", FOREIGN.split())
def test_well_known_names_of_trl_are_accepted_or_explained(name, tmp_path):
    """Where it means the same, in the same unit, it is taken; else its substitute is named."""
    if name in LanguageSettings.rules() or name in LanguageSettings.aliases:
        assert LanguageSettings.named(name) in LanguageSettings.rules()
        return
    with pytest.raises(SettingsError) as refused:
        read_settings(LanguageSettings, [f"--{name}", "1"], tmp_path / "none.py", prog="x")
    message = str(refused.value)
    assert message.startswith(f"There is no flag --{name}. ") and "\n" not in message
    assert "Did you mean" not in message and "--help lists" not in message
    answer = message.removeprefix(f"There is no flag --{name}. ")
    named = set(re.findall(r"--(\w+)", answer))
    assert named <= LanguageSettings.rules().keys()
    assert named or answer.startswith(("There is none", "Not supported", "A run uploads nothing"))


@row(154)
def test_every_name_of_transformers_is_accepted_or_explained(cls=LanguageSettings):
    transformers = pytest.importorskip("transformers")
    for field in dataclasses.fields(transformers.TrainingArguments):
        name = field.name
        if field.init and name not in cls.rules() and name not in cls.aliases:
            assert cls.hint(name) and "Did you mean" not in cls.hint(name), name


@row(151)
@pytest.mark.parametrize("ranks", [None, "", "1", "8", "x"])
@pytest.mark.parametrize("name", sorted(LanguageSettings.per_process))
def test_rows_per_device_are_rows_of_each_process(name, ranks, tmp_path, monkeypatch):
    """As torchrun starts them: WORLD_SIZE is there before the settings are read."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    world = 8 if ranks == "8" else 1
    config = tmp_path / "config.py"

    def read(*words, file=""):
        config.write_text(file)
        return read_settings(LanguageSettings, words, config, prog="x").batch_size

    assert read(f"--{name}", "2") == read(f"--{name.replace('_', '-')}=2") == 2 * world
    assert read(file=f"{name.upper()} = 2\n") == 2 * world
    assert read(f"--{name}", "3", file="BATCH_SIZE = 5\n") == 3 * world
    assert LanguageSettings.from_dict({name: 2}).batch_size == 2 * world
    # The total stays the total, wherever it is read again.
    assert read("--batch_size", "16") == read(file="BATCH_SIZE = 16\n") == 16
    recorded = LanguageSettings.from_dict({name: 2}).to_dict()
    assert LanguageSettings.from_dict(recorded).batch_size == recorded["BATCH_SIZE"] == 2 * world
    for wrong in ("0", "-1", "1.5", "x"):
        with pytest.raises(SettingsError, match="BATCH_SIZE is"):
            read(f"--{name}", wrong)
        with pytest.raises(SettingsError, match="BATCH_SIZE is"):
            read(file=f"{name.upper()} = {wrong if wrong != 'x' else repr(wrong)}\n")


@row(151)
def test_a_run_of_rows_per_device_resumes_with_other_ranks_by_its_total(tmp_path, monkeypatch):
    place = {"runs_dir": str(tmp_path), "run_name": "a"}
    monkeypatch.setenv("WORLD_SIZE", "8")
    began = LanguageSettings.from_dict({**place, "per_device_train_batch_size": 2})
    with RunFolder.open(began) as folder:
        folder.write_config(began)
        folder.writer.save_checkpoint(1, {})
    recorded = json.loads((tmp_path / "a" / "config.json").read_text())["settings"]
    assert recorded["BATCH_SIZE"] == 16 and "PER_DEVICE_TRAIN_BATCH_SIZE" not in recorded
    monkeypatch.setenv("WORLD_SIZE", "4")
    other = LanguageSettings.from_dict({**place, "resume": True, "per_device_train_batch_size": 2})
    with pytest.raises(
        SettingsError, match=r"BATCH_SIZE \(the rows of all processes\) was 16 and is now 8\."
    ):
        RunFolder.open(other)
    for same in ({"per_device_train_batch_size": 4}, {"batch_size": 16}):
        settings = LanguageSettings.from_dict({**place, "resume": True, **same})
        with RunFolder.open(settings) as folder:
            assert folder.path == tmp_path / "a"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha_kd": 0, "alpha_ce": 0}, "ALPHA_KD and ALPHA_CE are both 0"),
        ({"teacher_model": "none", "alpha_ce": 0}, "set ALPHA_CE above 0, or name"),
        ({"teacher_model": "none", "teacher_cache": "c"}, "set TEACHER_MODEL to the teacher whose"),
        (
            {"teacher_cache": "c", "router_mode": "sar"},
            "needs a live teacher: set TEACHER_CACHE",
        ),
        ({"teacher_cache": "c", "align": "uld"}, "needs a live teacher: set TEACHER_CACHE"),
        ({"router_mode": "sar", "align": "chunks"}, "or ALIGN to 'auto'"),
        ({"legacy_clamp": "banana"}, "LEGACY_CLAMP: legacy_clamp is 'banana'"),
        ({"legacy_clamp": "-1"}, "LEGACY_CLAMP: the clamp of logits is -1.0"),
        ({"legacy_clamp": "5", "align": "chunks"}, "set ALIGN to 'auto', because"),
        (
            {"legacy_clamp": "5", "teacher_cache": "c"},
            "LEGACY_CLAMP is '5', which needs a live teacher: set TEACHER_CACHE to None.",
        ),
        ({"run_name": "a/b"}, "RUN_NAME is 'a/b'"),
        ({"quantization": "nf4", "teacher_model": "none"}, "name a TEACHER_MODEL, or a STUDENT"),
        ({"quantization": "nf4", "student_model": "layers:2"}, "needs unquantized weights"),
        ({"teacher_model": "train:2x64"}, "expected train:LAYERSxDIM:STEPS, as in"),
        ({"cache_method": "topk:65536"}, "CACHE_METHOD is 'topk:65536': expected at most 65535"),
        ({"divergence": "forward_k"}, "DIVERGENCE is 'forward_k', but must be one of 'auto'"),
        ({"divergence": "forward_k"}, "Did you mean forward_kl?"),
        ({"align": "chunk"}, "Did you mean chunks?"),
        ({"router_mode": "saar"}, "Did you mean sar?"),
        ({"temperature": 0.0}, "TEMPERATURE is 0.0, but must be a finite number, at least 0.05"),
        ({"temperature": float("nan")}, "TEMPERATURE is nan"),
        ({"clip_grad": 0}, "CLIP_GRAD is 0, but must be a finite number, above 0 (or None)"),
        ({"max_steps": 0}, "MAX_STEPS is 0"),
        ({"epochs": 1e308}, "EPOCHS is 1e+308, but must be a finite number, above 0, at most"),
        ({"max_steps": 2.5}, "a whole number"),
        ({"model_dtype": "fp16"}, "MODEL_DTYPE is 'fp16', but must be one of"),
        ({"device": "gpu"}, "'cuda:N'"),
        ({"warmup_fraction": 1.0}, "below 1"),
        ({"lora_rank": 2, "modules_to_save": "all-linear"}, "MODULES_TO_SAVE both name all-linear"),
        ({"use_dora": True}, "USE_DORA is True, but there are no adapters"),
        ({"optim": "adamw_8bits"}, "Did you mean adamw_8bit?"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)
def test_out_of_range_or_conflicting_settings_are_refused(changes, message):
    with pytest.raises(SettingsError) as refused:
        LanguageSettings(**changes)
    assert message in str(refused.value)


def test_a_misspelt_name_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "config.py").write_text("TEMPERATUR = 2.0\n")
    with pytest.raises(SettingsError, match="no setting TEMPERATUR. Did you mean TEMPERATURE?"):
        LanguageSettings.from_file(tmp_path / "config.py")
    with pytest.raises(SettingsError, match="Did you mean LEARNING_RATE?"):
        LanguageSettings.named("student-lrr")


@pytest.mark.parametrize("name", ["ALPHA_HIDDEN", "BASELINE", "SCHEDULE", "TEACHER_OFFLOAD"])
def test_a_removed_setting_is_refused_with_its_replacement(tmp_path, name):
    (tmp_path / "config.py").write_text(f"{name} = 1\n")
    with pytest.raises(SettingsError, match=rf"line 1: There is no setting {name}\. \S+ .*\."):
        LanguageSettings.from_file(tmp_path / "config.py")


@pytest.mark.parametrize(
    ("flag", "name", "value"),
    [
        ("max_consecutive_nans", "stop_after", 5),
        ("logit_clamp", "legacy_clamp", "2.5"),
        ("kd_alpha", "alpha_kd", 0.25),
        ("kd_ce_alpha", "alpha_ce", 0.25),
        ("kd_temperature", "temperature", 3.0),
        ("sequence_len", "block_size", 64),
        ("sample_packing", "packing", False),
        ("num_epochs", "epochs", 2.0),
    ],
)
def test_a_name_of_another_trainer_with_the_same_meaning_is_accepted(flag, name, value):
    settings = read_settings(LanguageSettings, [f"--{flag}", str(value)], Path("none"), prog="test")
    assert getattr(settings, name) == value


@pytest.mark.parametrize("line", ["LOGIT_CLAMP = 2.5", 'LOGIT_CLAMP = "2.5"', "LEGACY_CLAMP = 2.5"])
def test_a_clamp_in_a_file_is_a_number_or_a_text(tmp_path, line):
    (tmp_path / "config.py").write_text(line)
    assert LanguageSettings.from_file(tmp_path / "config.py").legacy_clamp == "2.5"


@pytest.mark.parametrize("value", ["True", "[2.5]", "0", "-2.5", "1e999"])
def test_another_clamp_in_a_file_is_refused(tmp_path, value):
    (tmp_path / "config.py").write_text(f"LEGACY_CLAMP = {value}")
    with pytest.raises(SettingsError, match="LEGACY_CLAMP.*(text or|finite) a? ?number"):
        LanguageSettings.from_file(tmp_path / "config.py")


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        ("teacher_offload", "--teacher_cache"),
        ("assistant_only_loss", "--dry_run"),
        ("completion_only_loss", "--dry_run"),
        ("padding_free", "--packing"),
        ("group_by_length", "--packing"),
        ("use_fp32_for_training", "--model_dtype"),
    ],
)
def test_a_name_of_another_trainer_without_a_setting_is_refused_with_advice(flag, advice):
    with pytest.raises(SettingsError, match=f"There is no flag --{flag}.*{advice}"):
        read_settings(LanguageSettings, [f"--{flag}", "True"], Path("none"), prog="test")


def test_a_dry_run_takes_five_steps_whatever_the_epochs():
    assert LanguageSettings(dry_run=True, epochs=3.0, max_steps=200).n_steps(10_000) == 5


def test_the_divergence_follows_the_router_where_it_is_left_open():
    assert LanguageSettings().kind_of_divergence == "forward_kl"
    for mode in ("all", "ka", "sar"):
        assert LanguageSettings(router_mode=mode).kind_of_divergence == "reverse_kl"
    for name in DIVERGENCES:
        settings = LanguageSettings(divergence=name, router_mode="ka")
        assert settings.kind_of_divergence == name


def test_the_divergences_to_choose_from_are_known_without_torch():
    code = "import sys, ssl_kd.language.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert set(DIVERGENCES) < set(LanguageSettings.rules()["divergence"][2].choices)
