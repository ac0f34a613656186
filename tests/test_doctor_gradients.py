"""`python -m ssl_kd.doctor gradients` on tiny models: healthy, and with faults that it names."""

import json
import runpy
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from ssl_kd import cli  # noqa: E402
from ssl_kd.doctor.gradients import gradients, open_model  # noqa: E402
from ssl_kd.language.models.student import build_student, save_student  # noqa: E402
from ssl_kd.language.settings import LanguageSettings  # noqa: E402
from ssl_kd.language.text.dataset import TextDataset  # noqa: E402
from ssl_kd.language.text.new_tokenizer import train_tokenizer  # noqa: E402
from ssl_kd.language.text.records import Example  # noqa: E402

TEXTS = [f"A cat sat on mat {i}, and dog {i} saw the cat." for i in range(30)]
DATASET = TextDataset("t", "train", tuple(Example(f"t:{t}", text=t) for t in TEXTS), "", ())
TOKENIZER = train_tokenizer(DATASET, 300)


@pytest.fixture
def settings(tmp_path):
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return LanguageSettings(
        student_model=str(tmp_path / "model"),
        data_path=str(data),
        block_size=32,
        device="cpu",
        model_dtype="float32",
        learning_rate=1e-2,
    )


def saved(settings, change=lambda model: None, dtype=torch.float32):
    model = build_student("fresh:2x32", None, TOKENIZER, seed=0).model
    with torch.no_grad():
        change(model)
    model.to(dtype).save_pretrained(settings.student_model)  # NaN or not
    TOKENIZER.save_pretrained(settings.student_model)


def findings(settings):
    found = list(gradients(settings, *open_model(settings.student_model, settings)))
    return {finding.check: finding for finding in found}


def test_a_healthy_model(settings):
    saved(settings)
    found = findings(settings)
    assert all(finding.status == "ok" for finding in found.values())
    assert "weights: promoted" not in found
    parts = ["embedding, also the head", "layer 0", "layer 1", "the rest", "all"]
    assert [name.removeprefix("gradient: ") for name in found if "gradient" in name] == parts
    before, after = found["10 steps on one batch"].result.split(",")[0].split()[1::2]
    assert float(after) < float(before)


def test_weights_stored_in_half_precision_are_promoted(settings):
    saved(settings, dtype=torch.float16)
    found = findings(settings)
    assert "stored in float16" in found["model"].result
    assert "fp32 masters" in found["weights: promoted"].result
    assert all(finding.status == "ok" for finding in found.values())


def test_a_nan_weight_is_named_and_nothing_is_trained(settings):
    def poison(model):
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")

    saved(settings, poison)
    found = findings(settings)
    assert "layers.1.mlp.up_proj" in found["weights: finite"].result
    assert found["forward: loss"].status == "FAULT" and "up_proj" in found["forward: loss"].change
    assert not any("steps" in name for name in found)


def test_a_weight_that_float16_cannot_hold_is_a_note(settings):
    def stretch(model):
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e5
        model.model.norm.weight.mul_(1e6)

    saved(settings, stretch)
    found = findings(settings)
    assert found["weights: range"].status == "note"
    assert "largest 1e+06 in model.norm.weight" in found["weights: range"].result
    assert found["forward: loss"].status == "note"  # worse than guessing


def test_a_part_that_no_gradient_reaches_is_a_fault(settings):
    def cut(model):
        for name, p in model.model.layers[1].named_parameters():
            if name.startswith(("self_attn", "mlp.down_proj", "mlp.up_proj")):
                p.zero_()

    saved(settings, cut)
    found = findings(settings)
    assert found["gradient: layer 1"].status == "FAULT"
    assert found["gradient: layer 0"].status == "ok"


def test_an_exploding_part_is_a_note(settings):
    def steepen(model):  # a tiny variance before the norm: its inverse is in the gradient
        model.model.embed_tokens.weight.mul_(1e-3)

    saved(settings, steepen)
    found = findings(settings)
    embedding = found["gradient: embedding, also the head"]
    assert embedding.status == "note" and "times the median" in embedding.change


def test_a_loss_that_does_not_fall_is_a_fault(settings):
    saved(settings)
    found = findings(settings.replace(learning_rate=50.0))
    assert found["10 steps on one batch"].status == "FAULT"
    assert "--learning_rate 5" in found["10 steps on one batch"].change


def test_adapters_and_separate_heads_have_their_parts(settings):
    saved(settings)
    found = findings(settings.replace(lora_rank=4))
    parts = [name.removeprefix("gradient: ") for name in found if "gradient" in name]
    assert parts == ["layer 0", "layer 1", "all"]

    config = transformers.GPT2Config(
        vocab_size=len(TOKENIZER), n_embd=32, n_layer=2, n_head=2, tie_word_embeddings=False
    )
    model = transformers.GPT2LMHeadModel(config)
    save_student(model, TOKENIZER, settings.student_model, "tiny")
    parts = [name.removeprefix("gradient: ") for name in findings(settings) if "gradient" in name]
    assert parts == ["embedding", "the rest", "layer 0", "layer 1", "head", "all"]


def test_the_module_is_a_command(settings, monkeypatch, capsys):
    saved(settings)
    words = ["--model", settings.student_model, "--data_path", settings.data_path]
    words += ["--block_size", "32", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["ssl_kd.doctor", "gradients", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("ssl_kd.doctor", run_name="__main__")
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "Gradients of" in out and "0 faults" in out
    assert "2e-05" in out  # the default learning rate of a trained model


def test_exit_codes(settings, capsys):
    def spoil(model):
        model.model.norm.weight[0] = float("inf")

    saved(settings, spoil)
    words = ["--data_path", settings.data_path, "--block_size", "32", "--device", "cpu"]
    for more, code, message in (
        ([f"--model={settings.student_model}"], 1, ""),
        (["--model", "./nowhere"], 2, "folder nowhere does not exist"),
        (["--model", "fresh:1x16"], 2, "--model FOLDER"),
        (["--modle", "x"], 2, "There is no flag --modle"),
    ):
        assert cli.main(["doctor", "gradients", *words, *more]) == code
        out, err = capsys.readouterr()
        assert message in err and "Traceback" not in out + err
