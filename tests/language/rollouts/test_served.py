"""The student's continuations by a server that gets its weights, with the protocol of vLLM 0.32."""

import math

import pytest
import torch

transformers = pytest.importorskip("transformers")

from ssl_kd.language.rollouts import Sampler  # noqa: E402
from ssl_kd.language.rollouts.served import ServedSampler  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.teachers.load import ONE_RANK  # noqa: E402
from ssl_kd.language.teachers.server import ServerFailed  # noqa: E402
from tests.language.test_ranks import assert_near, by  # noqa: E402
from tests.language.test_run import log_lines  # noqa: E402
from tests.marks import slow  # noqa: E402

LOCAL = {"rollout_url": None, "run_name": "local"}
SHORT = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, in the server's thread


@pytest.fixture
def served(settings, models, server, monkeypatch):
    """Settings of a run that samples on the server; with changes."""
    monkeypatch.setenv("ROLLOUT_API_KEY", "secret")
    name = models("student")
    server.model = server.base = transformers.AutoModelForCausalLM.from_pretrained(name)
    own = {"student_model": name, "on_policy": 0.7, "max_new_tokens": 6, "temperature": 1.0}
    own |= {"rollout_url": server.url.removesuffix("/v1")}
    return lambda **changes: settings(**{**own, **changes})


@pytest.mark.parametrize("rank", [0, slow(2)], ids=["all weights", "adapters"])
def test_a_server_samples_the_same_tokens_as_the_student(served, server, rank):
    path, local = (run(served(lora_rank=rank, **own)) for own in ({}, LOCAL))
    for row, expected in zip(log_lines(path), log_lines(local), strict=True):
        assert row.pop("rollout_mismatch", 0) < 1e-5 and row == expected
    assert {asked["authorization"] for asked in server.asked} == {"Bearer secret"}
    prompts = [asked for asked in server.asked if "prompt" in asked]
    assert len({asked["cache_salt"] for asked in prompts}) == 6 < len({a["seed"] for a in prompts})
    assert not [*(path / "rollout_weights").iterdir()]


@pytest.mark.parametrize(("key", "answer", "message"), [
    ("method", [{}], r"is -\d.* there and -\d.* in the student \(.* 0\.01\)"),  # old weights
    ("method", [b"", 404], "404 Not Found; to load .*start vllm serve with VLLM_SERVER_DEV_MODE=1"),
    ("prompt", [{"model": "a", "choices": [{"token_ids": [5], "logprobs": {}}]}], "up to an end"),
    ("prompt", [{"model": "a", "choices": [SHORT]}], "logprobs of 6 tokens, or up to"),
], ids=["old", "off", "none", "short"])  # fmt: skip
def test_server_errors_are_named(served, server, key, answer, message):
    server.fault = lambda handler, asked, _: key in asked and (handler.answer(*answer) or True)
    with pytest.raises(ServerFailed, match=message):
        run(served(learning_rate=0.1))


def test_a_run_resumes_when_the_server_is_back(served, server):
    whole, n = run(served(run_name="whole")), len(server.asked)
    server.fault = lambda handler, _, i: i > 1.6 * n and (handler.answer(b"", 503) or True)
    with pytest.raises(ServerFailed, match="the rollout server .* responds with 503.*--resume"):
        run(served())
    server.fault = None
    assert log_lines(run(served(resume=True))) == log_lines(whole)


@pytest.mark.slow
def test_two_processes_are_as_one(served):
    assert_near(*(by(world, served(run_name=f"of_{world}", eval_every=6)) for world in (1, 2)))


def test_padding_is_never_drawn_and_nan_is_an_end_that_counts_as_faulty(tiny, server, tmp_path):
    server.model = model = tiny.model(vocab_size=400, spread=0.3)
    local = Sampler(model, [1], vocabulary=320)
    sample = ServedSampler(server.url, local, torch.float32, tmp_path, ONE_RANK)
    sample([[5, 9]], [4], [1])
    assert server.asked[-1]["logit_bias"] == {str(token): -100 for token in range(320, 400)}
    server.change = lambda logits: logits * math.nan
    with pytest.raises(ServerFailed, match=r"log-probability of 1 tokens .* is nan there"):
        sample([[5, 9]], [4], [1])
    model.lm_head.weight.data.fill_(math.nan)
    assert sample([[5, 9]], [4], [1]) == [[1]] and sample.sick == 2  # the guard finds the NaN
