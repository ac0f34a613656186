"""The key stays with its host; an answer has an end in time and in size; addresses are checked."""

import asyncio
import gzip
import json
import socket
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from ssl_kd.errors import InputError  # noqa: E402
from ssl_kd.teachers import http_client, server  # noqa: E402
from ssl_kd.teachers.http_client import check_url, exchange, short  # noqa: E402
from ssl_kd.teachers.server import CompletionServer, ServerFailed  # noqa: E402
from tests.faults.matrix import row as fault  # noqa: E402
from tests.local_server import LocalServer  # noqa: E402

KEY = "sk-secret/very.private=="


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, content=b"{}", status=200, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server: Any = self.server
        server.seen.append((self.command, self.path, dict(self.headers), body))
        server.act(self)

    do_POST = do_CONNECT = do_GET


class Local(LocalServer):
    """Does with a request what a test wants; keeps what it has seen."""

    def __init__(self, act):
        super().__init__(Handler)
        self.act, self.seen = act, []

    def keys(self):
        return [headers.get("Authorization") for _, _, headers, _ in self.seen]


@pytest.fixture
def local():
    with Local(lambda handler: handler.answer()) as running:
        yield running


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No proxy of this machine; a key; no pauses."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("TEACHER_API_KEY", KEY)
    monkeypatch.setattr(server, "FIRST_PAUSE", 0.01)


def client(local, **options):
    return CompletionServer(
        f"{local.url}/v1", "teacher", **{"timeout": 5, "patience": 0, **options}
    )


def ask(local, **options):
    return client(local, **options).top_k([1, 2, 3], 4, 320)


# --- the key ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [300, 301, 302, 303, 305, 307, 308])
@pytest.mark.parametrize("ask_it", [ask, lambda local: client(local).check(8)], ids=["POST", "GET"])
@fault(145)
def test_the_key_goes_to_no_other_host(local, status, ask_it):
    with Local(lambda handler: handler.answer()) as other:
        to = f"{other.url.replace('127.0.0.1', 'u:p@localhost')}/v1/models?key=abc#d"
        local.act = lambda handler: handler.answer(b"", status, Location=to)
        expected = rf"answers {status} .* sends on to http://localhost:\d+/v1/models, which is not"
        with pytest.raises(ServerFailed, match=f"{expected}.*set TEACHER_URL to") as caught:
            ask_it(local)
    assert other.seen == [] and local.keys() == [f"Bearer {KEY}"]
    assert "u:p" not in str(caught.value) and "abc" not in str(caught.value)


@pytest.mark.parametrize("to", [None, "", "http://[::1", "//", "ftp://x", "\\\\evil", "a" * 9000])
@fault(145)
def test_a_redirect_to_nowhere_is_one_line(local, to):
    given = {} if to is None else {"Location": to}
    local.act = lambda handler: handler.answer(b"", 302, **given)
    with pytest.raises(ServerFailed, match="302|not answer") as caught:
        ask(local)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


@fault(145)
def test_the_key_stands_in_no_message_though_the_server_repeats_it(local, caplog):
    """In its refusal, at any place, in its reason, in a warning; cut off in the middle."""
    text = json.dumps({"error": {"message": "x" * 230 + f" wrong key: {KEY}"}}).encode()
    for content in (text, f"bad: Bearer {KEY}".encode(), text.replace(b"/", b"\\u002f")):
        for status in (400, 401, 403, 404, 500, 302):
            local.act = lambda h, c=content, s=status: h.answer(c, s, Location=f"/{KEY}?{KEY}")
            with pytest.raises(ServerFailed) as caught:
                ask(local, patience=0.02)
            assert KEY[:12] not in str(caught.value) + caplog.text
    local.act = lambda h: h.answer(json.dumps({"model": KEY, "choices": [{}]}).encode())
    with pytest.raises(ServerFailed, match=r"answers as '\*\*\*'"):
        ask(local)


@pytest.mark.parametrize(
    "key",
    [
        "sk\nhush",
        "sk\r\nX: hush",
        "sk hush",
        "ключ",
        "hush\x7f",
        "hush\u00e9",
        "hush\n",
        " hush",
        "☃",
    ],
)
@fault(145)
def test_a_key_that_no_header_may_hold_is_refused_unseen_before_any_request(
    local, monkeypatch, key
):
    monkeypatch.setenv("TEACHER_API_KEY", key)
    with pytest.raises(InputError, match="TEACHER_API_KEY cannot be sent: its character") as caught:
        client(local)
    assert not {"hush", key} & {*str(caught.value).split()} and local.seen == []


@fault(145)
def test_neither_netrc_nor_a_proxy_has_a_part_in_an_http_exchange(local, monkeypatch, tmp_path):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    with Local(lambda handler: handler.answer()) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("ALL_PROXY", proxy.url)
        with pytest.raises(ServerFailed, match="no completion"):
            ask(local)
    assert local.keys() == [f"Bearer {KEY}"] and proxy.seen == []


@fault(145)
def test_an_https_address_is_reached_through_the_proxys_tunnel_which_sees_no_key(
    local, monkeypatch
):
    local.act = lambda handler: handler.answer(b"", 407)
    monkeypatch.setenv("HTTPS_PROXY", local.url)
    asked = CompletionServer("https://teacher.invalid/v1", "teacher", timeout=5, patience=0)
    with pytest.raises(ServerFailed, match="does not answer"):
        asked.check(8)
    assert [command for command, *_ in local.seen] == ["CONNECT"] and local.keys() == [None]
    monkeypatch.setenv("HTTPS_PROXY", "socks5://me:word@host:1")
    with pytest.raises(InputError, match="of the kind 'socks5' .*NO_PROXY=teacher.invalid") as odd:
        asked.check(8)
    assert "word" not in str(odd.value)
    monkeypatch.setenv("NO_PROXY", "teacher.invalid")
    with pytest.raises(ServerFailed, match="does not answer"):
        asked.check(8)
    assert len(local.seen) == 1


# --- its end, in time and in size -----------------------------------------------------------------


def drip(head, then):
    """A byte every 50 ms, from some place of an answer on."""

    def act(handler):
        handler.wfile.write(head)
        for byte in then * 200:
            handler.wfile.write(bytes([byte]))
            time.sleep(0.05)

    return act


DRIPS = {
    "status": drip(b"", b"HTTP/1.1 200 OK\r\n"),
    "headers": drip(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
    "interim": drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": drip(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n", b" "),
    "chunks": drip(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "until closed": drip(b"HTTP/1.1 200 OK\r\n\r\n", b" "),
}


@pytest.mark.parametrize("act", DRIPS.values(), ids=DRIPS)
@fault(146)
def test_a_server_that_drips_is_given_up_after_the_timeout(local, act):
    local.act, start = act, time.monotonic()
    with pytest.raises(ServerFailed, match=r"no whole answer came in 0\.3 s"):
        ask(local, timeout=0.3)
    assert time.monotonic() - start < 3


@fault(146)
def test_a_refusal_that_drips_is_told_by_its_status(local):
    local.act = drip(b"HTTP/1.1 401 No\r\nContent-Length: 900\r\n\r\n", b"x")
    start = time.monotonic()
    with pytest.raises(ServerFailed, match="answers 401 No; it takes the key"):
        ask(local, timeout=0.3)
    assert time.monotonic() - start < 3


def flood(head, part=b" " * 2**16):
    def act(handler):
        handler.wfile.write(head)
        for _ in range(2**14):
            handler.wfile.write(part)

    return act


CHUNK = b"10000\r\n" + b" " * 2**16 + b"\r\n"
FLOODS = {
    "length": flood(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n"),
    "chunks": flood(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", CHUNK),
    "until closed": flood(b"HTTP/1.1 200 OK\r\n\r\n"),
}


@pytest.mark.parametrize("act", FLOODS.values(), ids=FLOODS)
@fault(146)
def test_an_answer_is_no_larger_than_what_was_asked_for(local, monkeypatch, act):
    monkeypatch.setattr(server, "LISTED", 2**20)
    local.act = act
    # 1 MiB, and 3 tokens with 5 ids each of 512 bytes.
    with pytest.raises(ServerFailed, match="more than 1,056,256 bytes to a prompt of 3 tokens"):
        ask(local)
    with pytest.raises(ServerFailed, match="more than 1,048,576 bytes: see that"):
        client(local).check(8)


@fault(146)
def test_of_a_refusal_the_beginning_is_read(local):
    local.act = flood(b"HTTP/1.1 400 No\r\n\r\n", b"y" * 2**16)
    with pytest.raises(ServerFailed, match="answers 400 No: (…|y+)") as caught:
        ask(local)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "x\x1b[2J"])
@fault(146)
def test_nothing_compressed_is_asked_for_or_inflated(local, encoding):
    bomb = gzip.compress(b" " * 2**24)
    local.act = lambda handler: handler.answer(bomb, Content_Encoding=encoding)
    with pytest.raises(ServerFailed, match="unasked for|does not answer") as caught:
        ask(local)
    assert local.seen[0][2]["Accept-Encoding"] == "identity" and str(caught.value).isprintable()
    local.act = lambda handler: handler.answer(bomb, 403, Content_Encoding="gzip")
    with pytest.raises(ServerFailed, match="answers 403 Forbidden; it takes the key"):
        ask(local)


HEADS = [
    b"",
    b"\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"HTTP/1.1 999999 OK\r\n\r\n",
    b"HTTP/1.1 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    b"HTTP/1.1 200 OK\r\nX: " + b"a" * 2**20 + b"\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 50_000 + b"\r\n{}",
    b"HTTP/1.1 200 OK\r\n no: thing\r\n\r\n{}",
    b"HTTP/1.1 200 \xff\xfe\x1b[2J\r\n\r\n{}",
    b"HTTP/1.1 400 \xff\xfe\x1b[2J\r\n\r\n{}",
    b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 304 Not Modified\r\n\r\n",
    b"HTTP/1.1 429 Slow\r\nRetry-After: " + b"9" * 400 + b"\r\n\r\n",
    b"HTTP/1.1 429 Slow\r\nRetry-After: \xd9\xa3\r\nContent-Length: 0\r\n\r\n",
]


@pytest.mark.parametrize("head", HEADS, ids=range(len(HEADS)))
@fault(114)
def test_what_is_no_http_is_one_line(local, head):
    def act(handler):
        handler.wfile.write(head)
        handler.close_connection = True

    local.act = act
    with pytest.raises(ServerFailed) as caught:
        ask(local, timeout=2)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700


@fault(113)
def test_times_of_any_size_are_kept_to(local):
    for timeout in (1e300, float("inf"), 1e-9):
        with pytest.raises(ServerFailed, match="no completion|does not answer"):
            ask(local, timeout=timeout)


def test_it_answers_within_a_running_loop(local):
    """As in a notebook."""

    async def cell():
        return exchange(f"{local.url}/v1", None, timeout=5, largest=9)

    assert asyncio.run(cell()).content == b"{}"


@fault(112)
def test_what_is_wrong_with_tls_is_said(local):
    asked = CompletionServer(f"https{local.url[4:]}/v1", "teacher", timeout=5, patience=0)
    with pytest.raises(ServerFailed, match=r"does not answer \(\[SSL"):
        asked.check(8)


@fault(112)
def test_a_name_that_is_not_known_is_one_line(local, monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    asked = CompletionServer("http://teacher.invalid/v1", "teacher", timeout=5, patience=0)
    with pytest.raises(ServerFailed, match="does not answer .*not known"):
        asked.check(8)


@fault(146)
def test_a_name_that_is_looked_up_for_ever_ends_in_time(local, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(2))
    start = time.monotonic()
    with pytest.raises(http_client.NoAnswer, match="no whole answer came in"):
        exchange("http://teacher.invalid/v1", None, timeout=0.2, largest=9)
    assert time.monotonic() - start < 1.5


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        *("http://[::1", "http://::1]/v1", "http://[::1]x/v1", "http://[1::2::3]/v1", "http://[]/"),
        *("http://☃", "http://h☃st/v1", "http://host/☃", "http://ｈost/v1", "http://host:８０"),
        *("http://host:99999", "http://host:65536", "http://host:0", "http://host:-1"),
        *("http://host:80:80/v1", "http://host:1e3", "http://host:", "http://host:" + "9" * 5000),
        *("http://ho st/v1", " http://host", "http://host/v1 ", "http://host/v1\n", "http://h\tt"),
        *(
            "http://host\r\nX: y",
            "http://host/\x00",
            "http:///v1",
            "http://",
            "https://",
            "http:/a",
        ),
        *("http://a..b/v1", "http://.a/v1", "http://-a/v1", "http://" + "a" * 64 + "/v1"),
        *("http://" + "a." * 200 + "b", "http://a\\b/v1", "http://a/<b>", "ftp://host/v1", "", "x"),
        *("HTTP//host", "http://host:80 /v1", "http://[fe80::1%25eth0\n]/", "unix:///x"),
    ],
)
@fault(147)
def test_an_address_that_cannot_be_is_one_line(url):
    with pytest.raises(InputError, match=r"^TEACHER_URL .*expected an address") as caught:
        check_url(url)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "url",
    [
        "http://h/v1?key=hush",
        "http://h/v1#hush",
        "http://h?hush",
        "http://me:hu/sh@h",
        "http://hush@h",
    ],
)
@fault(147)
def test_a_secret_in_an_address_is_refused_unseen(url):
    with pytest.raises(InputError, match="TEACHER_API_KEY") as caught:
        check_url(url)
    assert "hush" not in str(caught.value) and "hu/sh" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("http://localhost:8000/v1", "https://api.example.com/v1/", "http://[::1]:8000/v1"),
        *("http://127.0.0.1", "http://node_12:65535/a/b~c%20d", "https://x.y.:1/v1"),
        *("http://xn--n3h.example/v1", "http://[::ffff:1.2.3.4]/v1", "http://my_vllm-0.ns.svc/v1"),
    ],
)
def test_an_address_that_can_be_is_taken(url):
    check_url(url)


@pytest.mark.parametrize(
    "value",
    [json.loads("[" * 900 + "]" * 900), "a\n" * 10**6, {"a": [10**4000] * 10**5}, KEY, [KEY] * 9],
    ids=["deep", "long", "many", "key", "keys"],
)
def test_what_a_message_shows_of_a_value_is_short_and_has_no_key(value):
    start = time.monotonic()
    assert len(short(value)) <= 120 and KEY not in short(value)
    assert time.monotonic() - start < 1


@fault(145)
def test_a_key_is_hidden_before_what_it_stands_in_is_cut():
    for before in range(150):
        text = "x" * before + KEY + "y" * 100
        for value in (text, [text], {text: text}, {"a": {"b": text}}):
            assert not any(KEY[at : at + 4] in short(value) for at in range(len(KEY) - 4))
