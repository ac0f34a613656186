"""The key stays with its host; answers are limited in time and size; addresses are checked."""

import asyncio
import gzip
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from ssl_kd.core.errors import InputError  # noqa: E402
from ssl_kd.language.teachers import server  # noqa: E402
from ssl_kd.language.teachers.http_client import NoAnswer, check_url, exchange, short  # noqa: E402
from ssl_kd.language.teachers.server import CompletionServer, ServerFailed  # noqa: E402
from tests.faults.matrix import row as fault  # noqa: E402
from tests.local_server import LocalServer  # noqa: E402
from tests.processes import free_port  # noqa: E402

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
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server: Any = self.server
        server.requests.append(dict(self.headers))
        server.act(self)

    do_POST = do_CONNECT = do_GET


class Local(LocalServer):
    """Answers a request as a test wants, and records its headers."""

    def __init__(self, act):
        super().__init__(Handler)
        self.act, self.requests = act, []


@pytest.fixture
def local():
    with Local(lambda handler: handler.answer()) as running:
        yield running


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("TEACHER_API_KEY", KEY)
    monkeypatch.setattr(server, "FIRST_PAUSE", 0.01)


def client(local, **options):
    return CompletionServer(
        f"{local.url}/v1", "teacher", **{"timeout": 60, "patience": 0, **options}
    )


def ask(local, **options):
    return client(local, **options).top_k([1, 2, 3], 4, 320)


def refused(local, match, **options):
    """The message of the failure: one printable line of limited length."""
    with pytest.raises(ServerFailed, match=match) as caught:
        ask(local, **options)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700
    return str(caught.value)


# --- the key ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [300, 301, 302, 307, 308])
@fault(145)
def test_the_key_goes_to_no_other_host(local, status):
    with Local(lambda handler: handler.answer()) as other:
        target = f"{other.url.replace('127.0.0.1', 'u:p@localhost')}/v1/models?key=abc#d"
        for location in ({"Location": target}, {}, {"Location": "http://[::1"}):
            local.act = lambda h, to=location: h.answer(b"", status, **to)
            message = refused(local, rf"responds with {status} .*not followed.*set TEACHER_URL to")
            assert "u:p" not in message and "abc" not in message
        with pytest.raises(ServerFailed, match=f"responds with {status} "):
            client(local).check(8)
    assert other.requests == []
    assert {headers["Authorization"] for headers in local.requests} == {f"Bearer {KEY}"}


@fault(145)
def test_no_message_contains_the_key_even_if_the_server_repeats_it(local, caplog):
    text = json.dumps({"error": {"message": "x" * 230 + f" wrong key: {KEY}"}}).encode()
    for content in (text, f"bad: Bearer {KEY}".encode(), text.replace(b"/", b"\\u002f")):
        for status in (400, 401, 500, 302):
            local.act = lambda h, c=content, s=status: h.answer(c, s, Location=f"/{KEY}?{KEY}")
            message = refused(local, f"responds with {status}", patience=0.02)
            assert KEY[:12] not in message + caplog.text
    local.act = lambda h: h.answer(json.dumps({"model": KEY, "choices": [{}]}).encode())
    refused(local, r"responds as the model '\*\*\*'")


@pytest.mark.parametrize(
    "key", ["sk\nhush", "sk\r\nX: hush", "sk hush", "ключ", "hush\x7f", "hush\n", " hush"]
)
@fault(145)
def test_a_key_that_no_header_can_hold_is_refused_before_any_request(local, monkeypatch, key):
    monkeypatch.setenv("TEACHER_API_KEY", key)
    with pytest.raises(InputError, match="TEACHER_API_KEY cannot be sent") as caught:
        client(local)
    assert not {"hush", key} & {*str(caught.value).split()} and local.requests == []


@fault(145)
def test_neither_netrc_nor_a_proxy_is_used(local, monkeypatch, tmp_path):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.delenv("no_proxy", raising=False)
    with Local(lambda handler: handler.answer()) as proxy:
        for name in ("http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        refused(local, "other than a completion")
        with pytest.raises(ServerFailed, match="does not respond"):
            CompletionServer("https://teacher.invalid/v1", "t", timeout=60, patience=0).check(8)
    assert local.requests[0]["Authorization"] == f"Bearer {KEY}" and proxy.requests == []


@fault(145)
def test_the_key_is_hidden_before_a_value_is_cut():
    for before in range(150):
        text = "x" * before + KEY + "y" * 100
        for value in (text, [text], {text: text}, {"a": {"b": text}}):
            assert not any(KEY[at : at + 4] in short(value) for at in range(len(KEY) - 4))


# --- limits in time and size ----------------------------------------------------------------------


def drip(head, then):
    """Send a byte every 50 ms after the head, until the client leaves (at most for minutes)."""

    def act(handler):
        handler.wfile.write(head)
        for byte in then * 5000:
            handler.wfile.write(bytes([byte]))
            time.sleep(0.05)

    return act


SOON = 30.0
"""Seconds on a machine that does much else; far less than the servers here would take."""

DRIPS = {
    "headers": drip(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
    "interim": drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": drip(b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n", b" "),
    "chunks": drip(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
}


@pytest.mark.parametrize("act", DRIPS.values(), ids=DRIPS)
@fault(146)
def test_a_slowly_dripping_server_times_out(local, act):
    local.act, start = act, time.monotonic()
    refused(local, r"no complete answer within 0\.3 s", timeout=0.3)
    assert time.monotonic() - start < SOON


@fault(146)
def test_only_the_start_of_an_error_response_is_read(local):
    local.act = drip(b"HTTP/1.1 401 No\r\nContent-Length: 9000\r\n\r\n", b"x")
    start = time.monotonic()
    refused(local, "responds with 401 No.*put the server's key")
    assert time.monotonic() - start < SOON
    local.act = flood(b"HTTP/1.1 400 No\r\n\r\n", b"y" * 2**16)
    refused(local, "responds with 400 No: (…|y+)")


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
def test_no_more_is_read_than_the_request_can_need(local, monkeypatch, act):
    monkeypatch.setattr(server, "OVERHEAD", 2**20)
    local.act = act
    # 1 MiB, and 3 tokens with 5 ids each of 512 bytes.
    refused(local, "more than 1,056,256 bytes to a prompt of 3 tokens")
    with pytest.raises(ServerFailed, match="more than 1,048,576 bytes: is TEACHER_URL"):
        client(local).check(8)


@pytest.mark.parametrize("encoding", ["gzip", "br", "x\x1b[2J"])
@fault(146)
def test_nothing_compressed_is_requested_or_inflated(local, encoding):
    bomb = gzip.compress(b" " * 2**24)
    local.act = lambda handler: handler.answer(bomb, Content_Encoding=encoding)
    refused(local, "not JSON|does not respond")
    assert local.requests[0]["Accept-Encoding"] == "identity"


HEADS = [
    b"",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"HTTP/1.1 999999 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    b"HTTP/1.1 200 OK\r\nX: " + b"a" * 2**20 + b"\r\n\r\n{}",
    b"HTTP/1.1 400 \xff\xfe\x1b[2J\r\n\r\n{}",
    b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 429 Slow\r\nRetry-After: " + b"9" * 400 + b"\r\n\r\n",
    b"HTTP/1.1 429 Slow\r\nRetry-After: \xd9\xa3\r\nContent-Length: 0\r\n\r\n",
]


@pytest.mark.parametrize("head", HEADS, ids=range(len(HEADS)))
@fault(114)
def test_responses_that_are_not_http_are_one_line(local, head):
    def act(handler):
        handler.wfile.write(head)
        handler.close_connection = True

    local.act = act
    refused(local, "the teacher's server", timeout=2)


@fault(113)
def test_timeouts_of_any_size_work(local):
    for timeout in (1e300, float("inf"), 1e-9):
        refused(local, "other than a completion|does not respond", timeout=timeout)


def test_it_works_within_a_running_loop(local):
    """As in a notebook."""

    async def cell():
        return exchange(f"{local.url}/v1", None, timeout=60, largest=9)

    assert asyncio.run(cell()).content == b"{}"


@fault(112)
def test_a_failed_connection_is_one_line(local, monkeypatch):
    with pytest.raises(ServerFailed, match=r"does not respond \(\[SSL"):
        CompletionServer(f"https{local.url[4:]}/v1", "teacher", timeout=60, patience=0).check(8)

    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    url = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(ServerFailed, match=f"{url} does not respond .*refused.* --resume$"):
        CompletionServer(url, "teacher", patience=0.1).top_k([1, 2, 3], 4, 320)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ServerFailed, match="does not respond .*not known"):
        CompletionServer("http://teacher.invalid/v1", "teacher", timeout=60, patience=0).check(8)


@fault(112)
def test_a_closed_port_fails_soon_and_a_busy_server_is_retried(local, monkeypatch, caplog):
    monkeypatch.setattr(server, "UNCONNECTED_PATIENCE", 0.05)
    monkeypatch.setattr(server, "FIRST_PAUSE", 0.01)
    url = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(
        ServerFailed, match=f"{url} does not respond .*; retried for 0.05 s"
    ) as gone:
        CompletionServer(url, "teacher").check(8)  # with its patience of minutes
    assert "Start the server, or correct TEACHER_URL" in str(gone.value)

    answers = iter([503] * 6)  # for longer than a server without a connection is waited for
    models = json.dumps({"data": [{"id": "teacher"}]}).encode()
    local.act = lambda h: h.answer(models, next(answers, 200))
    starting = client(local, patience=60)
    starting.check(8)
    assert "responds with 503" in caplog.text and "retrying for 60 s" in caplog.text

    starting.url, starting._patience = url, 0.2  # it has gone since
    with pytest.raises(
        ServerFailed, match="retried for 0.2 s. Start again when the server is back"
    ):
        starting.check(8)


@fault(146)
def test_an_endless_dns_lookup_ends_after_the_timeout(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(2 * SOON) or [])
    start = time.monotonic()
    with pytest.raises(NoAnswer, match="no complete answer within"):
        exchange("http://teacher.invalid/v1", None, timeout=0.2, largest=9)
    assert time.monotonic() - start < SOON
    over.set()


# --- addresses ------------------------------------------------------------------------------------

BAD_URLS = """
http://[::1 http://[::1]x/v1 http://[1::2::3]/v1 http://[]/ http://☃ http://host/☃ http://host:８０
http://host:65536 http://host:0 http://host:80:80/v1 http://host:1e3 http://host: http:///v1 http://
http://a..b/v1 http://-a/v1 http://a\\b/v1 http://a/<b> ftp://host/v1 x HTTP//host localhost:8000
file:///etc/passwd
""".split()
BAD_URLS += ["", "http://ho st/v1", " http://host", "http://host/v1\n", "http://host\r\nX: y"]
BAD_URLS += ["http://" + "a" * 64 + "/v1", "http://" + "a." * 200 + "b", "http://h:" + "9" * 5000]


@pytest.mark.parametrize("url", BAD_URLS)
@fault(147)
def test_an_invalid_address_is_one_line(url):
    with pytest.raises(InputError, match=r"^TEACHER_URL .*expected an address") as caught:
        check_url(url)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


@pytest.mark.parametrize("url", ["http://h/v1?key=hush", "http://h/v1#hush", "http://me:hu/sh@h"])
@fault(147)
def test_a_secret_in_an_address_is_refused_without_showing_it(url):
    with pytest.raises(InputError, match="TEACHER_API_KEY") as caught:
        check_url(url)
    assert "hush" not in str(caught.value) and "hu/sh" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("http://localhost:8000/v1", "https://api.example.com/v1/", "http://[::1]:8000/v1"),
        *("http://127.0.0.1", "http://node_12:65535/a/b~c%20d", "https://x.y.:1/v1"),
        *("http://[::ffff:1.2.3.4]/v1", "http://my_vllm-0.ns.svc/v1"),
    ],
)
def test_a_valid_address_is_accepted(url):
    check_url(url)


@pytest.mark.parametrize(
    "value",
    [json.loads("[" * 900 + "]" * 900), "a\n" * 10**6, {"a": [10**4000] * 10**5}, [KEY] * 9],
    ids=["deep", "long", "many", "keys"],
)
def test_a_value_in_a_message_is_short_and_without_the_key(value):
    start = time.thread_time()
    assert len(short(value)) <= 120 and KEY not in short(value)
    assert time.thread_time() - start < 1
