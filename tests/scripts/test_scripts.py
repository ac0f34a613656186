"""Every script: its --help, a tiny real run, and one line for each user error."""

import json
import re
import subprocess
import sys

import pytest

from ssl_kd.language.settings.presets import PRESETS
from tests.documents import ROOT

TINY = ["--block_size", 32, "--max_steps", 4, "--eval_every", 2, "--eval_rows", 2]
TINY += ["--generations", 1, "--max_new_tokens", 4, "--device", "cpu"]
SAR = {
    "train_sar_kd_stable": "stable",
    "train_sar_kd_fp16_safe": "fp16_safe",
    "train_sar_kd_ultra_stable": "ultra_stable",
}


def finished(tmp_path):
    folder = (tmp_path / "runs" / "latest").resolve()
    config, metrics = (
        json.loads((folder / name).read_text()) for name in ("config.json", "metrics.json")
    )
    assert (folder / "report.html").exists() and (folder / "student" / "README.md").exists()
    return config["settings"], metrics, folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, ["--teacher_model", "--preset"]) for name in ("distill", "cache_teacher", *SAR)),
        ("distill_quantumbench", ["--student_model_name", "--fp16", "--dry_run", "--alpha"]),
        ("sft_lora", ["train", "test"]),
    ],
)
def test_help_lists_the_flags(script, name, words):
    code, out, _ = script(name, "--help")
    assert code == 0 and all(word in out for word in words)


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "mixture") for name in SAR), ("train_sar_kd_stable", "dense")]
)
def test_sar_scripts_accept_older_flags(script, house, tmp_path, caplog, name, kind):
    words = "--model_dtype float32 --per_device_batch_size 1 --student_lr 1e-5 --router_lr 1e-3"
    words += " --temperature 2.0 --alpha_kd 0.1 --alpha_ce 0.9 --max_grad_norm 0.5 --save_steps 2"
    words += " --gradient_accumulation_steps 2 --seed 3"
    models = ["--teacher_model", house / kind, "--student_model", "llama:1x32"]
    text = ["--data_path", house / "stories.jsonl"]
    code, out, err = script(name, *models, *text, *TINY, *words.split())
    assert code == 0 and "student before" in out, err
    assert f"ROUTER_MODE auto is {'sar' if kind == 'mixture' else 'native'}" in caplog.text
    settings, metrics, folder = finished(tmp_path)
    assert settings["STOP_AFTER"] == PRESETS[SAR[name]].get("stop_after", 10)
    assert metrics["steps"] == 4 and metrics["success_rate"] == 1
    assert (folder / "router.safetensors").exists() is (kind == "mixture")


@pytest.mark.parametrize("name", ["distill", *SAR])
def test_user_errors_are_one_line(script, house, name):
    text = ["--data_path", str(house / "stories.jsonl"), "--device", "cpu", "--block_size", "32"]
    for words, code, message in (
        (["--techer_model", "x"], 2, "Did you mean --teacher_model?"),
        (["--teacher_model", "./nowhere", *text], 2, "folder nowhere does not exist"),
        (
            ["--teacher_model", str(house / "foreign"), "--student_model", str(house / "dense")]
            + text,
            2,
            "--align chunks or uld",
        ),
    ):
        status, _, err = script(name, *words)
        last = err.strip().splitlines()[-1]
        assert status == code and last.startswith("ssl_kd: ") and message in last, err
        assert "Traceback" not in err


QUANTUM = ["--batch-size", 2, "--learning-rate", "2e-5", "--block-size", 32, "--device", "cpu"]


def quantum(house, teacher="dense", student="dense"):
    return [
        *("--teacher-model", house / teacher, "--student-model-name", house / student),
        *("--data-path", house / "sums.jsonl", *QUANTUM, "--max-new-tokens", 4),
    ]


def test_quantumbench_dry_run_describes_its_steps(script, house, tmp_path, caplog):
    code, out, err = script(
        "distill_quantumbench", *quantum(house), "--dry-run", "--fp16", "--alpha", 0.25
    )
    assert code == 0, err
    assert "ssl_kd: --fp16 has no effect on cpu, which computes in float32" in err
    log = caplog.text
    assert "loss: 0.75 ce + 0.25 kd (forward_kl)" in log and "students fp32" in log
    assert "learning rate 2e-05, warm-up of 1 steps, then cosine" in log
    assert "row 1, " in log and "with loss: " in log and "[[" in log
    assert "Success rate 100.0 % of 5 steps (ce 100.0 %, kd 100.0 %)." in out
    assert "student [2, 32," in log and "temperature 3" in log
    assert "the divergence is multiplied by its square, 9" in log
    steps = re.findall(r"step \d: ce ([\d.]+), kd ([\d.]+), combined loss ([\d.]+),", log)
    assert len(steps) == 5
    for ce, kd, loss in steps:
        assert float(loss) == pytest.approx(0.75 * float(ce) + 0.25 * float(kd), abs=2e-4)
    settings, metrics, _ = finished(tmp_path)
    assert settings["PACKING"] is False and settings["BATCH_SIZE"] == 2
    assert settings["MODEL_DTYPE"] == "float32" and settings["CLIP_GRAD"] == 1.0
    assert metrics["steps"] == 5


def test_quantumbench_stops_at_a_nan_and_names_its_cause(script, house):
    code, _, err = script("distill_quantumbench", *quantum(house, student="sick"))
    message = err.strip().splitlines()[-1]
    assert code == 2 and message.startswith("ssl_kd: the student ")
    assert "has NaN or infinity before training" in message
    assert "up_proj" in message and "nan" in message.lower()
    assert "use another copy of the file" in message and "Settings to try" not in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--techer-model", "x"], "required: --teacher_model"),
        (["--alpha", "1.5"], "--alpha is 1.5"),
        (["--lern-rate", "1"], "There is no flag --lern-rate."),
        (["--temperature", "warm"], "TEMPERATURE is 'warm', but must be"),
        (["--alpha", "half"], "invalid float value"),
    ],
)
def test_quantumbench_one_line_and_code_2(script, house, words, message):
    words = words if "--techer-model" in words else [*quantum(house), *words]
    code, _, err = script("distill_quantumbench", *words)
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1


def test_adapters_are_trained_and_tested(script, house, tmp_path):
    data = ["--data-path", house / "sums.jsonl"]
    tiny = ["--block_size", 32, "--eval_rows", 2, "--generations", 1, "--max_new_tokens", 8]
    words = ["--model", house / "dense", *data, *tiny, "--epochs", 1]
    code, out, err = script("sft_lora", "train", *words, "--device", "cpu")
    assert code == 0, err
    settings, metrics, folder = finished(tmp_path)
    assert (folder / "student" / "adapter_config.json").exists()
    assert settings["LEARNING_RATE"] == 2e-4 and settings["GRADIENT_CHECKPOINTING"]
    assert (settings["BATCH_SIZE"], settings["GRADIENT_ACCUMULATION_STEPS"]) == (32, 1)
    assert settings["LR_SCHEDULE"] == "linear" and settings["WEIGHT_DECAY"] == 0
    assert (settings["MODEL_DTYPE"], settings["REPORT_TO"]) == ("float32", "tensorboard")
    assert list((folder / "tensorboard").iterdir())
    rows = {row["name"]: row for row in metrics["table"]}
    assert rows["student"]["answer_rate"] is not None

    asked = ["--max-new-tokens", 8, "--limit", 5, "--device", "cpu"]
    code, out, err = script("sft_lora", "test", "--model", folder / "student", *data, *asked)
    assert code == 0, err
    assert "of 5 questions; 95 % interval" not in out and "answer rate" in out
    assert "the part of the data that this model's run held out" in out
    code, out, err = script(
        "sft_lora", "test", "--model", folder / "student", *data, *asked, "--split", "all"
    )
    assert (
        code == 0 and "of 5 questions; 95 % interval" in out and "questions: all of the data" in out
    )
    assert "numbers equal within 0.0001 of their size" in out and "float32 on cpu" in out


PLACES = {
    "distill": [],
    "cache_teacher": [],
    **{name: [] for name in SAR},
    "distill_quantumbench": ["--teacher-model=t", "--student_model_name=s", "--data_path=d"],
    "sft_lora": ["train", "--model", "m", "--data_path", "d"],
}


@pytest.mark.parametrize("name", PLACES)
def test_foreign_flags_are_refused_with_ours(script, name):
    for words, message in (
        (["--logging_steps", 0], "LOG_EVERY is 0"),
        (["--num-train-epochs", 0], "EPOCHS is 0.0"),
        (["--lr", "x"], "LEARNING_RATE is 'x'"),
        (["--output_dir="], "RUNS_DIR is ''"),
        (["--warmup_steps", -1], "WARMUP_STEPS is -1"),
        (["--bf16"], "no flag --bf16. Use --model_dtype bfloat16."),
        (["--optim", "sgd"], "OPTIM is 'sgd'"),
        (["--hub_token", "x"], "no flag --hub_token. Use --push_to_hub, --hub_model_id"),
    ):
        code, _, err = script(name, *PLACES[name], *words)
        assert code == 2 and message in err and len(err.splitlines()) == 1, err


@pytest.mark.parametrize(
    "words",
    [
        ["distill_quantumbench", *PLACES["distill_quantumbench"]],
        ["sft_lora", *PLACES["sft_lora"]],
        ["sft_lora", "test", *PLACES["sft_lora"][1:]],
    ],
)
def test_a_missing_package_is_refused_without_torch(words):
    code = (
        f"import runpy, sys; sys.argv = {[f'scripts/{words[0]}.py', *words[1:]]!r}\n"
        "sys.modules['transformers'] = None\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 1 and 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stderr
    assert "needs the package" in done.stderr and "transformers" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_sft_refuses_in_one_line(script, house):
    stories = ["--data-path", house / "stories.jsonl", "--device", "cpu"]
    for words, code, message in (
        (["test", "--model", house / "dense", *stories], 2, "<answer>...</answer>"),
        (["test", "--model", "./nowhere", *stories], 2, "folder nowhere does not exist"),
        (["test", "--model", house / "dense", *stories, "--limits", 3], 2, "no flag --limits of"),
        (["test", "--model", house / "dense", *stories, "--limit", -1], 2, "at least 1, got '-1'"),
        (
            ["test", "--model", house / "dense", *stories, "--batch_size", 0],
            2,
            "at least 1, got '0'",
        ),
        (["test", "--model", house / "dense", *stories, "--tolerance", "nan"], 2, "at least 0"),
        (["train", "--model", house / "dense", *stories, "--epoch", 1], 2, "Did you mean --epochs"),
        (["test", "--model", "m", *stories, "--lr", 1], 2, "no flag --lr of test, which takes"),
        (["train", *stories], 2, "required: --model"),
        ([], 2, "required: job"),
    ):
        status, _, err = script("sft_lora", *words)
        assert status == code and message in err and len(err.strip().splitlines()) == 1, err


def test_sft_names_all_faults_before_the_model_is_loaded(script, house, monkeypatch):
    def load(*_, **__):
        raise AssertionError("a model was loaded before the checks")

    monkeypatch.setattr("ssl_kd.language.models.causal.load_causal_lm", load)
    data = ["--data-path", "no.jsonl", "--device", "abacus"]
    code, _, err = script("sft_lora", "test", "--model", "./nowhere", *data)
    assert code == 2 and "3 faults were found, and no model was loaded:" in err
    for flag in ("--device", "--data-path", "--model"):
        assert f"- {flag}: " in err
    text = ["--data-path", house / "stories.jsonl", "--device", "cpu"]
    code, _, err = script("sft_lora", "test", "--model", house / "dense", *text)
    assert code == 2 and "has no question whose answer is known" in err


def test_the_check_of_a_whole_tiny_run(script, monkeypatch):
    code, out, err = script("test_ultra_stable")
    assert code == 0, out + err
    assert "installation: sound" in out and "2 of 2 router tensors learned" in out
    monkeypatch.setattr("ssl_kd.language.run.run", lambda settings: 1 / 0)
    code, out, _ = script("test_ultra_stable")
    assert code == 1 and "ZeroDivisionError" in out and "FAULT" in out
