"""A server that does not answer as the teacher it stands for is found."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from ssl_kd import cli  # noqa: E402
from ssl_kd.doctor.verify_served import SAME, compare_served  # noqa: E402
from ssl_kd.teachers import server as module  # noqa: E402
from tests.served import Server  # noqa: E402


@pytest.fixture
def server(tiny, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    monkeypatch.setitem(module.CompletionServer.__init__.__kwdefaults__, "patience", 0.2)
    with Server(tiny.model(spread=0.3), tokenizer=tiny.tokenizer) as running:
        yield running


@pytest.fixture
def settings(tiny, tmp_path, text_file, server):
    return tiny.settings(
        teacher_url=server.url,
        teacher_served_as="teacher",
        teacher_model=tiny.folder(tmp_path / "teacher"),
        student_model="llama:1x32",
        data_path=text_file,
        block_size=32,
        temperature=1.0,
        device="cpu",
    )


def found(settings):
    (finding,) = compare_served(settings)
    return finding


def off(finding):
    return float(finding.seen.partition("off by ")[2].partition(" nats")[0])


def in_bits(model, bits):
    """A copy with each row of its matrices rounded to so many bits."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for p in rounded.parameters():
            if p.ndim == 2:
                step = p.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
                p.copy_((p / step).round() * step)
    return rounded


def test_the_same_model_agrees(settings, server, tiny):
    finding = found(settings)
    assert finding.status == "ok" and off(finding) < 1e-5
    assert (
        "the likeliest token is the same at 100%" in finding.seen and "allowed 0.05" in finding.seen
    )


def test_a_server_in_bfloat16_is_within_what_is_allowed(settings, server):
    server.model = server.model.bfloat16()
    finding = found(settings)
    assert finding.status == "ok" and 1e-3 < off(finding) < SAME


CHANGES = {
    "8 bits": lambda server: setattr(server, "model", in_bits(server.model, 8)),
    "the position after": lambda server: setattr(server, "change", lambda x: x.roll(-1, 0)),
    "the position before": lambda server: setattr(server, "change", lambda x: x.roll(1, 0)),
    "another temperature": lambda server: setattr(server, "change", lambda x: x / 1.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_server_that_answers_otherwise_is_a_fault(settings, server, change):
    """With the prompt's own token in each answer: no look at a single one can find it."""
    change(server)
    finding = found(settings)
    assert finding.status == "FAULT" and off(finding) > SAME
    assert "--logprobs-mode raw_logprobs" in finding.change


def test_entries_at_another_position_are_found_by_their_own_tokens(settings, server):
    entries = server.entries
    server.entries = lambda prompt, k: [None, *entries(prompt, k)[2:], entries(prompt, k)[-1]]
    finding = found(settings)
    assert finding.status == "FAULT" and "misaligned by one position" in finding.seen


def test_another_model_is_a_fault(settings, server, tiny):
    server.model = tiny.model(seed=7, spread=0.3)
    assert found(settings).status == "FAULT"
    server.model = tiny.model(spread=0.3, vocab_size=400)
    assert "the tokenizer has 320: another tokenizer" in found(settings).seen


def test_a_server_that_is_not_there_is_a_fault(settings):
    gone = settings.replace(teacher_url="http://127.0.0.1:9/v1")
    assert "does not answer" in found(gone).seen and found(gone).status == "FAULT"


def test_the_command_prints_it_and_fails_where_they_differ(settings, server, capsys):
    words = [f"--{name}={getattr(settings, name)}" for name in (
        "teacher_url", "teacher_served_as", "teacher_model", "student_model", "data_path",
        "block_size", "temperature", "device",
    )]  # fmt: skip
    assert cli.main(["verify", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "cache, k = V" in said and "the served teacher" in said and "off by" in said
    server.change = lambda logits: logits / 2
    assert cli.main(["verify", *words]) == 1
    assert "FAULT the served teacher" in " ".join(capsys.readouterr().out.split())
