"""What a teacher's server says is checked, number by number; what may pass is asked for again."""

import json
import math
import socket
import time

import pytest
import torch

pytest.importorskip("transformers")

from ssl_kd.errors import InputError  # noqa: E402
from ssl_kd.teachers import server as module  # noqa: E402
from ssl_kd.teachers.server import CompletionServer, ServerFailed  # noqa: E402
from tests.faults.matrix import row as fault  # noqa: E402
from tests.served import Handler, Server  # noqa: E402

PROMPT = [0, 17, 5, 8, 40, 3, 99]
K = 4


@pytest.fixture
def server(tiny, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    with Server(tiny.model(spread=0.3)) as running:
        yield running


def client(server, **options):
    return CompletionServer(server.url, server.name, **{"timeout": 5, "patience": 0.2, **options})


def ask(server, k=K, vocabulary=320, **options):
    return client(server, **options).top_k(PROMPT, k, vocabulary, "row 3 of the text", first=10)


def test_the_likeliest_tokens_are_the_models_own(server):
    found = ask(server)
    logits = server.model(input_ids=torch.tensor([PROMPT])).logits[0, :-1]
    log_p = logits.log_softmax(-1).double()
    values, tokens = log_p.topk(K)
    assert torch.equal(found.tokens, tokens) and found.tokens.shape == (len(PROMPT) - 1, K)
    torch.testing.assert_close(found.log_probs, values)
    own = log_p.gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(found.own, own)
    # Some own tokens are among the k likeliest and some come in addition: both forms were met.
    sizes = {len(entry) for entry in server.entries(PROMPT, K)[1:]}
    assert K + 1 in sizes
    (asked,) = server.asked
    assert asked["prompt"] == PROMPT and asked["max_tokens"] == 1


def test_an_own_token_among_the_likeliest_comes_once(server):
    server.change = lambda logits: logits.index_fill(1, torch.tensor(PROMPT), 9.0)
    assert {len(entry) for entry in server.entries(PROMPT, 7)[1:]} == {7}
    assert ask(server, 7).log_probs.shape == (6, 7)


def test_a_probability_of_0_is_one(server):
    server.change = lambda logits: logits.where(logits == logits.amax(-1, True), -math.inf)
    values = [said["logprob"] for entry in server.entries(PROMPT, K)[1:] for said in entry.values()]
    assert {*values} == {0.0, -9999.0}  # as vLLM writes -inf
    assert (ask(server).log_probs.exp() == torch.tensor([1.0, 0, 0, 0])).all()


def spoilt(change):
    """A fault that changes the entries of a completion."""

    def fault(server):
        def answer(handler, asked, number):
            found = server.completion(asked)
            choice = found["choices"][0]
            choice["prompt_logprobs"] = change(choice["prompt_logprobs"], asked)
            handler.answer(found)
            return True

        return answer

    return fault


def at(token, **changed):
    """The likeliest of a token's entries is changed."""

    def change(entries, asked):
        entry = entries[token]
        first = max(entry, key=lambda i: entry[i]["logprob"])
        entry[first] |= changed
        return entries

    return change


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


def renamed(entries, asked):
    entry = entries[2]
    last = max(entry, key=lambda i: entry[i]["logprob"])
    entries[2] = {"320" if i == last else i: said for i, said in entry.items()}
    return entries


def louder(entries, asked):
    for said in entries[3].values():
        said["logprob"] = min(said["logprob"] + 2, 0)
    return entries


def without_rest(entries, asked):
    for said in entries[3].values():
        said["logprob"] -= 12
    return entries


def spelt(name):
    """The prompt's own token comes a second time under another name of the same number."""

    def change(entries, asked):
        entries[2][name.format(asked["prompt"][2])] = {
            "logprob": -9.0,
            "rank": 300,
            "decoded_token": "a",
        }
        return entries

    return change


def unsorted(entries, asked):
    entry = entries[2]
    a, b = sorted(entry, key=lambda i: -entry[i]["logprob"])[:2]
    entry[a]["rank"], entry[b]["rank"] = entry[b]["rank"], entry[a]["rank"]
    return entries


def shifted_back(entries, asked):  # of token t where t + 1 is meant
    return [None, *[dict(e) for e in entries[2:]], entries[-1]]


def shifted_on(entries, asked):
    return [None, entries[1], *entries[1:-1]]


FAULTS = [
    (at(2, logprob=math.nan), r"the log-probability nan \(row 3 of the text, token 12\)"),
    (at(2, logprob=math.inf), r"the log-probability inf \(row 3 of the text, token 12\)"),
    (at(5, logprob=0.5), r"the log-probability 0.5 \(row 3 of the text, token 15\)"),
    (at(1, logprob="much"), r"gives \{.*expected \{id: .* token 11\)"),
    (lambda e, a: e[:-1], r"of 6 tokens for a prompt of 7 \(row 3 of the text\)"),
    (lambda e, a: [*e, e[-1]], "of 8 tokens for a prompt of 7"),
    (lambda e, a: [*e[:3], None, *e[4:]], r"no log-probabilities: None \(.*token 13\)"),
    (lambda e, a: None, "gives no prompt_logprobs: expected vLLM"),
    (
        lambda e, a: [None] + [dict(list(x.items())[:2]) for x in e[1:]],
        "likeliest tokens, expected",
    ),
    (renamed, r"the token 320 among the likeliest, and the tokenizer has 320.*token 12\)"),
    (louder, r"probabilities that sum to [1-9]\..* \(row 3 of the text, token 13\)"),
    (without_rest, r"this is no distribution over them \(row 3 of the text, token 13\)"),
    (unsorted, r"not in the order of their ranks \(row 3 of the text, token 12\)"),
    (shifted_back, r"own token 17, but of the next one: .* misaligned by one position"),
    *(
        (spelt(name), r"gives the id '.*', expected a number as '10' \(.*token 12\)")
        for name in (
            "0{}",
            " {}",
            "{} ",
            "+{}",
            "-0",
            "-{}",
            "{}.0",
            "1_0",
            "\u0661\u0660",
            "",
            "{}\n",
        )
    ),
    (spelt("9" * 5000), r"gives the id '9+.*, expected a number as '10'"),
    (spelt(str(2**70)), r"gives the id '1180591620717411303424', expected a number"),
    (spelt(str(2**64 + 5)), "gives the id '18446744073709551621', expected a number"),
    *(
        (at(1, logprob=value), r"gives \{.*expected \{id: .* token 11\)")
        for value in (True, False, None, [], {}, "-1.5", "nan", -(10**4000), 10**400, -(2**60))
    ),
    *(
        (at(1, rank=value), r"gives \{.*expected \{id: .* token 11\)")
        for value in (True, 0, -1, 1.0, "1", [], 2**31, 10**400)
    ),
    (lambda e, a: [*e[:2], [[]], *e[3:]], r"no log-probabilities: \[\[\]\] \(.*token 12\)"),
    (lambda e, a: [*e[:2], {"5": nested(900)}, *e[3:]], r"gives \{'5': \[+\.\.\..*token 12\)"),
    (lambda e, a: nested(900), r"of 1 tokens for a prompt of 7"),
    (shifted_on, r"own token 5, but of the previous one: .* misaligned by one position"),
]


@pytest.mark.parametrize(("change", "said"), FAULTS, ids=range(len(FAULTS)))
@fault(114)
def test_an_answer_that_cannot_be_is_refused_at_once(server, change, said):
    server.fault = spoilt(change)(server)
    with pytest.raises(ServerFailed, match=rf"^the teacher's server {server.url} .*{said}"):
        ask(server)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<html><body>Welcome</body></html>", "what is not JSON: <html>"),
        (b"\x00\xff\x1b[2J", "what is not JSON"),
        (b"[]", "no completion: "),
        (b'{"object": "error"}', "no completion"),
        (b"[" * 10**6, r"not JSON that can be read \(its brackets are too deep\): \[\["),
        (b'{"a":' * 10**6, "brackets are too deep"),
        (b"[" * 600 + b"]" * 600, r"no completion: \[\["),
        (b'{"model": ' + b"9" * 5000 + b"}", r"not JSON: \{\"model\": 9+"),
        (
            b'{"model": 1, "model": 2}',
            r"not JSON with one meaning \(.* name 'model' twice in an obj",
        ),
        (b'{"model": "teacher", "choices": {"a": 1}}', "no completion"),
        (b'{"model": "teacher", "choices": [{}, {}]}', "no completion"),
        (b'{"model": "teacher", "choices": [{"prompt_logprobs": "x"}]}', "of 'x' for a|tokens"),
        (b'{"model": "' + b"x" * 10**6 + b'", "choices": [{}]}', "answers as 'x+"),
        ('{"model": "\u202e"}'.encode("utf-16"), "no completion"),
        (b'{"model": "\\ud800", "choices": [{}]}', r"answers as '\\ud800'"),
        (b'{"model": NaN, "choices": [{}]}', "answers as nan"),
        (b"", "what is not JSON"),
    ],
)
@fault(114)
def test_garbage_is_refused_in_one_line(server, content, said):
    server.fault = lambda handler, asked, number: handler.answer(content) or True
    with pytest.raises(ServerFailed, match=said) as caught:
        ask(server)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (b"[" * 10**6, "brackets are too deep"),
        (b'{"data": [1]}', "lists no models: "),
        (b'{"data": ' + b"[" * 800 + b"]" * 800 + b"}", "lists no models: "),
        (
            b'{"data": [{"id": "' + b"a" * 10**6 + b'"}]}',
            "does not have the model 'teacher', but 'a+",
        ),
        (b'{"data": [{"id": "teacher", "id": "b"}]}', "the name 'id' twice"),
        (b'{"data": [{"id": "teacher", "max_model_len": 10}]}', "takes prompts of 9 tokens"),
        (b'{"data": [{"id": "teacher", "max_model_len": true}]}', None),
        (b'{"data": [{"id": "teacher", "max_model_len": 1e999}]}', None),
    ],
)
@fault(114)
def test_a_list_of_models_that_cannot_be_is_one_line(server, monkeypatch, models, said):
    monkeypatch.setattr(Handler, "do_GET", lambda handler: handler.answer(models))
    if said is None:
        return client(server).check(24)
    with pytest.raises(ServerFailed, match=said) as caught:
        client(server).check(24)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


@fault(114)
def test_a_served_teacher_that_is_sick_is_said_to_be(server):
    """vLLM does not write a NaN, but refuses: JSON has none."""
    server.change = lambda logits: logits.index_fill(0, torch.tensor(4), math.nan)
    said = r"log-probabilities that are not finite: .* weights it serves .*\(row 3 of the text\)"
    with pytest.raises(ServerFailed, match=said):
        ask(server)
    assert len(server.asked) == 1


@fault(115)
def test_an_answer_for_another_model_is_refused(server):
    def fault(handler, asked, number):
        handler.answer(server.completion(asked) | {"model": "other"})
        return True

    server.fault = fault
    with pytest.raises(ServerFailed, match="asked for the model 'teacher' and answers as 'other'"):
        ask(server)


@pytest.mark.parametrize("status", [429, 500, 502, 503])
@fault(113)
def test_what_may_pass_is_asked_again(server, status, caplog):
    expected = ask(server)

    def fault(handler, asked, number):
        if number < 3:
            handler.answer({"error": {"message": "busy"}}, status)
        return number < 3

    server.fault = fault
    found = ask(server)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    (warning,) = caplog.records
    assert f"answers {status}" in warning.message and "busy" in warning.message


@fault(113)
def test_retry_after_is_kept_to(server, monkeypatch):
    slept = []
    monkeypatch.setattr(module.time, "sleep", slept.append)

    def fault(handler, asked, number):
        if number == 0:
            handler.answer(b"slow down", 429, [("Retry-After", "7")])
        return number == 0

    server.fault = fault
    ask(server, patience=60)
    assert slept == [7.0]
    server.asked.clear()
    with pytest.raises(ServerFailed, match="429 .*: slow down; it was asked again for 5 s"):
        ask(server, patience=5)  # would not wait for so long


@fault(112)
def test_an_answer_that_breaks_off_is_asked_for_again(server):
    def fault(handler, asked, number):
        if number == 0:
            data = json.dumps(server.completion(asked)).encode()
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data[: len(data) // 2])
            handler.close_connection = True
        return number == 0

    server.fault = fault
    assert len(ask(server).own) == 6 and len(server.asked) == 2


@fault(113)
def test_a_slow_server_is_asked_again_and_given_up(server):
    server.fault = lambda handler, asked, number: time.sleep(0.5)
    with pytest.raises(ServerFailed, match=r"no whole answer came in 0\.1 s"):
        ask(server, timeout=0.1, patience=0.3)
    assert len(server.asked) > 1


@fault(112)
def test_a_server_that_is_gone_is_given_up_in_one_line(server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(ServerFailed, match=f"{url} does not answer .*refused.* --resume") as caught:
        CompletionServer(url, "teacher", patience=0.1).top_k(PROMPT, K, 320)
    assert "\n" not in str(caught.value)


def test_a_refusal_says_what_to_change(server, monkeypatch):
    most = r"400 .*of 1001, which is greater than max allowed: 1000 .*CACHE_METHOD is topk:1001"
    with pytest.raises(ServerFailed, match=most):
        ask(server, 1001)
    with pytest.raises(ServerFailed, match="400 .*Token id 320 is out of vocabulary"):
        client(server).top_k([1, 320], K, 400)
    with pytest.raises(ServerFailed, match="404 .*`b` does not exist"):
        CompletionServer(server.url, "b").top_k(PROMPT, K, 320)
    server.fault = lambda handler, asked, number: handler.answer(b"", 401) or True
    monkeypatch.setenv("TEACHER_API_KEY", "secret")
    with pytest.raises(ServerFailed, match="environment variable TEACHER_API_KEY") as caught:
        ask(server)
    assert server.asked[-1]["authorization"] == "Bearer secret"
    assert "secret" not in str(caught.value)


def test_the_server_is_looked_at_first(server):
    client(server).check(24)
    with pytest.raises(ServerFailed, match="does not have the model 'b', but 'teacher': set"):
        CompletionServer(server.url, "b").check(24)
    with pytest.raises(ServerFailed, match="prompts of 4095 tokens, and rows have 4096: set BLOCK"):
        client(server).check(4096)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("localhost:8000", "expected an address as http://host:8000/v1"),
        ("file:///etc/passwd", "expected an address"),
        ("https:///v1", "expected an address"),
        ("http://me:secret@host/v1", "name or password"),
    ],
)
def test_an_address_that_is_none_is_refused(url, said):
    with pytest.raises(InputError, match=said) as caught:
        CompletionServer(url, "a")
    assert "secret" not in str(caught.value)
