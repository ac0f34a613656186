"""Each number of a served teacher is checked; transient errors are retried."""

import itertools
import json
import math
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("msgspec")

from ssl_kd.language.teachers import server as module  # noqa: E402
from ssl_kd.language.teachers.prompt_logprobs import parse  # noqa: E402
from ssl_kd.language.teachers.server import (  # noqa: E402
    CompletionServer,
    ServerFailed,
    _checked_columns,
)
from tests.faults.matrix import row as fault  # noqa: E402
from tests.served import Handler, Server  # noqa: E402

PROMPT = [0, 17, 5, 8, 40, 3, 99]
K = 4


@pytest.fixture
def server(tiny, monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    with Server(tiny.model(spread=0.3)) as running:
        yield running


def client(server, **options):
    return CompletionServer(server.url, server.name, **{"timeout": 60, "patience": 0.2, **options})


def ask(server, k=K, vocabulary=320, **options):
    return client(server, **options).top_k(PROMPT, k, vocabulary, "row 3 of the text", first=10)


def test_the_most_likely_tokens_are_those_of_the_model(server):
    top_k = ask(server)
    logits = server.model(input_ids=torch.tensor([PROMPT])).logits[0, :-1]
    log_p = logits.log_softmax(-1).double()
    values, tokens = log_p.topk(K)
    assert torch.equal(top_k.tokens, tokens) and top_k.tokens.shape == (len(PROMPT) - 1, K)
    torch.testing.assert_close(top_k.log_probs, values)
    own = log_p.gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(top_k.own, own)
    # Some own tokens come in addition to the most likely ones.
    assert K + 1 in {len(entry) for entry in server.entries(PROMPT, K)[1:]}
    (request,) = server.asked
    assert request["prompt"] == PROMPT and request["max_tokens"] == 1


def test_the_actual_token_is_listed_once(server):
    server.change = lambda logits: logits.index_fill(1, torch.tensor(PROMPT), 9.0)
    assert {len(entry) for entry in server.entries(PROMPT, 7)[1:]} == {7}
    assert ask(server, 7).log_probs.shape == (6, 7)


def test_a_probability_of_0_is_accepted(server):
    server.change = lambda logits: logits.where(logits == logits.amax(-1, True), -math.inf)
    values = [field["logprob"] for e in server.entries(PROMPT, K)[1:] for field in e.values()]
    assert {*values} == {0.0, -9999.0}  # how vLLM writes -inf
    assert (ask(server).log_probs.exp() == torch.tensor([1.0, 0, 0, 0])).all()


def with_entries(server, change):
    """The server with changed entries in its completions."""

    def answer(handler, asked, number):
        completion = server.completion(asked)
        choice = completion["choices"][0]
        choice["prompt_logprobs"] = change(choice["prompt_logprobs"], asked)
        handler.answer(completion)
        return True

    server.fault = answer


def at(token, **changed):
    """Change the most likely entry of a token."""

    def change(entries, asked):
        entry = entries[token]
        entry[max(entry, key=lambda i: entry[i]["logprob"])] |= changed
        return entries

    return change


def louder(entries, asked):
    for field in entries[3].values():
        field["logprob"] = min(field["logprob"] + 2, 0)
    return entries


def without_rest(entries, asked):
    for field in entries[3].values():
        field["logprob"] -= 12
    return entries


def renamed(entries, asked):
    entry = entries[2]
    last = max(entry, key=lambda i: entry[i]["logprob"])
    entries[2] = {"320" if i == last else i: field for i, field in entry.items()}
    return entries


def spelled(name):
    """Repeat the prompt's own token under another spelling of its id."""

    def change(entries, asked):
        entries[2][name.format(asked["prompt"][2])] = {"logprob": -9.0, "rank": 300}
        return entries

    return change


def unsorted(entries, asked):
    entry = entries[2]
    a, b = sorted(entry, key=lambda i: -entry[i]["logprob"])[:2]
    entry[a]["rank"], entry[b]["rank"] = entry[b]["rank"], entry[a]["rank"]
    return entries


FAULTS = [
    (at(2, logprob=math.nan), r"log-probability nan .*\(row 3 of the text, token 12\)"),
    (at(2, logprob=math.inf), r"log-probability inf .*\(row 3 of the text, token 12\)"),
    (at(5, logprob=0.5), r"log-probability 0.5 .*\(row 3 of the text, token 15\)"),
    (lambda e, a: e[:-1], r"of 6 tokens; expected 7 \(row 3 of the text\)"),
    (lambda e, a: [*e, e[-1]], "of 8 tokens; expected 7"),
    (lambda e, a: json.loads("[" * 900 + "]" * 900), "of 1 tokens; expected 7"),
    (lambda e, a: [*e[:3], None, *e[4:]], r"no log-probabilities: None; .*token 13\)"),
    (lambda e, a: [*e[:2], [[]], *e[3:]], r"no log-probabilities: \[\[\]\]; .*token 12\)"),
    (lambda e, a: None, "returns no prompt_logprobs: use vLLM"),
    (lambda e, a: [None] + [dict([*x.items()][:2]) for x in e[1:]], "most likely tokens; expected"),
    (renamed, r"the token 320, but the tokenizer has 320.*token 12\)"),
    (louder, r"probabilities that sum to [1-9]\..* \(row 3 of the text, token 13\)"),
    (without_rest, r"they cannot sum to 1 \(row 3 of the text, token 13\)"),
    (unsorted, r"contradict their ranks \(row 3 of the text, token 12\)"),
    # The log-probability of token t where that of t + 1 is expected.
    (
        lambda e, a: [None, *map(dict, e[2:]), e[-1]],
        r"own token 17, .*off by one position \(.*token 11\)",
    ),
    *(
        (spelled(name), r"returns the id '.*'; expected one such as '10' \(.*token 12\)")
        for name in ("0{}", " {}", "-{}", "{}.0", "1_0", "\u0661\u0660", "", "{}\n", str(2**64 + 5))
    ),
    *(
        (at(1, logprob=value), r"returns \{.*expected \{id: .* token 11\)")
        for value in (True, None, [], "-1.5", "nan", -(10**4000), -(2**60))
    ),
    *(
        (at(1, rank=value), r"returns \{.*expected \{id: .* token 11\)")
        for value in (True, 0, 1.0, "1", 2**31)
    ),
]


@pytest.mark.parametrize(("change", "message"), FAULTS, ids=range(len(FAULTS)))
@fault(114)
def test_an_invalid_answer_is_refused_at_once(server, change, message):
    with_entries(server, change)
    with pytest.raises(ServerFailed, match=rf"^the teacher's server {server.url} .*{message}"):
        ask(server)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html><body>Welcome</body></html>", r"response that is not JSON \(.*\): <html>"),
        (b"\x00\xff\x1b[2J", "response that is not JSON"),
        (b'{"object": "error"}', "other than a completion"),
        (b"[" * 10**6, r"not JSON \(it is nested too deeply\): \[\["),
        (b"[" * 600 + b"]" * 600, r"other than a completion: \[\["),
        (b'{"model": ' + b"9" * 5000 + b"}", r"not JSON .*\{\"model\": 9+"),
        (b'{"model": 1, "model": 2}', "not JSON .a key occurs twice"),
        (b'{"model": "teacher", "choices": [{}, {}]}', "other than a completion"),
        (b'{"model": "teacher", "choices": [{"prompt_logprobs": "x"}]}', "of x tokens"),
        (b'{"model": "' + b"x" * 10**6 + b'", "choices": [{}]}', "responds as the model 'x+"),
        (b'{"model": "\\ud800", "choices": [{}]}', r"responds as the model '\\ud800'"),
        (b'{"model": "other", "choices": [{}]}', "as the model 'other'; expected 'teacher'"),
        (b"", "response that is not JSON"),
    ],
)
@fault(114)
def test_garbage_is_refused_in_one_line(server, content, message):
    server.fault = lambda handler, asked, number: handler.answer(content) or True
    with pytest.raises(ServerFailed, match=message) as caught:
        ask(server)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (b"[" * 10**6, "nested too deeply"),
        (b'{"data": [1]}', "lists no models, but "),
        (b'{"data": [{"id": "' + b"a" * 10**6 + b'"}]}', "model 'teacher'; it has .'a+"),
        (
            b'{"data": [{"id": "teacher", "max_model_len": 10}]}',
            "accepts prompts of at most 9 tokens",
        ),
        (b'{"data": [{"id": "teacher", "max_model_len": 1e999}]}', None),
    ],
)
@fault(114)
def test_an_invalid_list_of_models_is_one_line(server, monkeypatch, models, message):
    monkeypatch.setattr(Handler, "do_GET", lambda handler: handler.answer(models))
    if message is None:
        return client(server).check(24)
    with pytest.raises(ServerFailed, match=message) as caught:
        client(server).check(24)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_both_parsers_of_a_response_agree_and_the_fast_one_rejects_what_is_ambiguous(server):
    answer = server.completion({"prompt": PROMPT, "prompt_logprobs": K, "max_tokens": 1})
    content = json.dumps(answer).encode()
    slow = _checked_columns(json.loads(content), "teacher", PROMPT)
    assert parse(content, "teacher", PROMPT) == slow
    own = json.dumps({str(PROMPT[1]): {"logprob": -1.0}})[1:-1].encode()
    twice = content.replace(
        b'"prompt_logprobs": [null, {', b'"prompt_logprobs": [null, {' + own + b", "
    )
    assert json.loads(twice) and parse(twice, "teacher", PROMPT) is None
    assert parse(content, "other", PROMPT) is None
    assert parse(content, "teacher", [*PROMPT[:-1], 7]) is None


@fault(114)
def test_a_served_model_with_a_nan_is_named(server):
    """vLLM refuses to write a NaN, which JSON does not have."""
    server.change = lambda logits: logits.index_fill(0, torch.tensor(4), math.nan)
    message = r"log-probabilities that are not finite, .* served weights .*\(row 3 of the text\)"
    with pytest.raises(ServerFailed, match=message):
        ask(server)
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
@fault(113)
def test_transient_errors_are_retried(server, status, caplog):
    expected = ask(server)

    def busy(handler, asked, number):
        if number < 3:
            handler.answer({"error": {"message": "busy"}}, status)
        return number < 3

    server.fault = busy
    assert all(torch.equal(a, b) for a, b in zip(ask(server, patience=60), expected, strict=True))
    (warning,) = caplog.records
    assert f"responds with {status}" in warning.message and "busy" in warning.message


@fault(113)
def test_retry_after_is_followed(server, monkeypatch):
    pauses = []
    monkeypatch.setattr(module.time, "sleep", pauses.append)

    def busy(handler, asked, number):
        if number == 0:
            handler.answer(b"slow down", 429, [("Retry-After", "7")])
        return number == 0

    server.fault = busy
    ask(server, patience=60)
    assert pauses == [7.0]
    server.asked.clear()
    with pytest.raises(ServerFailed, match="429 .*: slow down; retried for 5 s"):
        ask(server, patience=5)  # shorter than the pause


@fault(112)
def test_an_incomplete_answer_is_retried(server):
    def break_off(handler, asked, number):
        if number == 0:
            data = json.dumps(server.completion(asked)).encode()
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data[: len(data) // 2])
            handler.close_connection = True
        return number == 0

    server.fault = break_off
    assert len(ask(server, patience=60).own) == 6 and len(server.asked) == 2


@fault(113)
def test_requests_to_a_slow_server_are_retried_then_fail(server, monkeypatch):
    over, ticks = threading.Event(), itertools.count()  # a tenth of a second for each attempt
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / 10, sleep=lambda seconds: None)
    monkeypatch.setattr(module, "time", clock)
    server.fault = lambda handler, asked, number: over.wait(60)
    with pytest.raises(ServerFailed, match=r"no complete answer within 0\.1 s"):
        ask(server, timeout=0.1, patience=0.3)
    over.set()
    assert next(ticks) == 1 + 3  # the start, and the ends of three attempts


def test_a_refusal_names_the_setting_to_change(server, monkeypatch):
    most = r"400 .*of 1001, which is greater than max allowed: 1000 .*CACHE_METHOD is topk:1001"
    with pytest.raises(ServerFailed, match=most):
        ask(server, 1001)
    with pytest.raises(ServerFailed, match="404 .*`b` does not exist"):
        CompletionServer(server.url, "b").top_k(PROMPT, K, 320)
    server.fault = lambda handler, asked, number: handler.answer(b"", 401) or True
    monkeypatch.setenv("TEACHER_API_KEY", "secret")
    with pytest.raises(ServerFailed, match="environment variable TEACHER_API_KEY") as caught:
        ask(server)
    assert server.asked[-1]["authorization"] == "Bearer secret"
    assert "secret" not in str(caught.value)
