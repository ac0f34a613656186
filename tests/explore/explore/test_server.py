"""The server: which requests it serves, and which it refuses."""

import http.client
import io
import json
import re
import socket
import sys
import threading
import time
from urllib.parse import urlencode

import numpy as np
import pytest
from PIL import Image

from ssl_kd.core.errors import InputError
from ssl_kd.core.files import CorruptFileError
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.decisions import Curation
from ssl_kd_explore.explore import server as module
from ssl_kd_explore.explore.routes import split_names
from ssl_kd_explore.explore.server import ExploreServer, serve
from tests.explore.explore.conftest import answering
from tests.faults.matrix import row as fault


def ask(server, method, path, body=None, **headers):
    """Return an answer to the page, which has the cookie; `Cookie=""`: to another user."""
    headers = {"Cookie": f"{server.cookie}={server.token}"} | headers
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, answer.headers


def test_the_page_and_its_data(server):
    status, page, headers = ask(server, "GET", "/")
    assert status == 200 and f'name="token" content="{server.token}"'.encode() in page
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert ask(server, "GET", "/plot.js")[2]["Content-Type"].startswith("text/j")
    meta = json.loads(ask(server, "GET", "/data/meta.json")[1])
    clusters = np.frombuffer(ask(server, "GET", "/data/clusters.i32")[1], np.int32)
    assert np.array_equal(clusters, server.samples.column("cluster"))
    assert meta["sheets"] is None and meta["images"]
    assert server.server_address[0] == "127.0.0.1"


def test_a_picture_is_sent_large_and_named_by_its_path(server):
    status, data, _ = ask(server, "GET", "/api/image/3?side=2048")
    assert status == 200 and Image.open(io.BytesIO(data)).size == (2048, 2048)
    path = json.loads(ask(server, "GET", "/api/path/3")[1])["path"]
    file = server.samples.image_file(3)
    assert path == str(file.absolute()) and file.is_file()
    for side in ("0", "9999", "-1", "x"):
        status, content, _ = ask(server, "GET", f"/api/image/3?side={side}")
        assert status == 400 and "`side` is" in json.loads(content)["error"]
    assert ask(server, "GET", "/api/path/3", Cookie="")[0] == 403


def test_images_and_neighbors_on_demand(server):
    samples = server.samples
    status, data, headers = ask(server, "GET", "/api/image/3")
    image = Image.open(io.BytesIO(data))
    assert status == 200 and headers["Content-Type"] == "image/jpeg" and image.size == (320, 320)
    near = json.loads(ask(server, "GET", "/api/neighbors/3")[1])
    x = samples.embeddings(range(len(samples))).double()
    x = x / x.norm(dim=1, keepdim=True)
    closeness = x @ x[3]
    closeness[3] = -1
    assert len(near) == 12 and 3 not in near
    assert closeness[near].tolist() == sorted(closeness.tolist(), reverse=True)[:12]


def get(server, path, **query):
    status, content, headers = ask(server, "GET", f"{path}?{urlencode(query)}")
    is_json = headers["Content-Type"] == "application/json"
    return status, json.loads(content) if is_json else np.frombuffer(content, "<u4")


def test_rows_cells_charts_and_clusters(server):
    names = [column["name"] for column in get(server, "/data/meta.json")[1]["table"]]
    assert names[0] == "file" and {"checked", "excluded"} < {*names}
    filter = json.dumps({"cluster": "=1", "file": ".png"})
    status, rows = get(server, "/api/rows", filter=filter, sort="confidence", descending=1)
    status, cells = get(server, "/api/cells", rows="3,0", columns="cluster,file")
    assert status == 200 and cells["columns"] == ["cluster", "file"] and len(cells["rows"]) == 2
    assert get(server, "/api/chart", column="confidence")[1]["kind"] == "number"
    clusters = get(server, "/api/clusters")[1]
    entry = next(entry for entry in clusters if entry["cluster"] == 1)
    assert entry["typical"] == rows[:8].tolist() and entry["size"] == len(rows)
    status, page = get(server, "/api/cluster/1")
    assert status == 200 and {near["cluster"] for near in page["nearest"]} == {0, 2}


# Python 3.14 reads as many brackets as a query can hold, and finds that nothing closes them.
TOO_DEEP = "nested too deeply" if sys.version_info < (3, 14) else "not valid JSON: Expecting value"
INVALID_QUERIES = [
    ("rows", {"filter": "{"}, "the filter is not valid JSON"),
    ("rows", {"filter": "[1]"}, "not a JSON object"),
    ("rows", {"filter": '{"file": 3}'}, "is 3; expected a text"),
    ("rows", {"filter": '{"confidence": "<"}'}, "expected a number, such as"),
    ("rows", {"filter": '{"file": "\\ud800"}'}, "expected a text"),
    ("rows", {"filter": "[" * 20_000}, TOO_DEEP),
    ("rows", {"sort": "fil"}, "no column 'fil'; expected file, cluster"),
    ("cells", {}, "`rows` has 1 entries; expected 1 to 1,000 numbers"),
    ("cells", {"rows": "1,-1", "columns": "file"}, "expected 1 to 1,000 numbers"),
    ("cells", {"rows": "1,99999", "columns": "file"}, "no sample 99999; expected 0 to"),
    ("cells", {"rows": ",".join("1" * 1001), "columns": "file"}, "`rows` has 1001 entries"),
    ("cells", {"rows": "1"}, "no column ''"),
    ("cells", {"rows": "1", "columns": "file" + "," * 9000}, "no column ''"),
    ("chart", {"column": "file"}, "texts, which have no chart"),
    ("chart", {}, "no column ''"),
    ("cluster/77", {}, "no cluster 77; the largest clusters are"),
]


@pytest.mark.parametrize(("path", "query", "why"), INVALID_QUERIES)
def test_an_invalid_query_is_refused_in_a_line(server, path, query, why):
    status, answer = get(server, f"/api/{path}", **query)
    assert status == 400 and why in answer["error"]
    assert len(answer["error"]) < 400 and "\n" not in answer["error"]


def test_names_of_columns_may_have_commas():
    known = ["file", "size, in cm", "in cm"]
    assert split_names("size, in cm,file,in cm", known) == ["size, in cm", "file", "in cm"]
    assert split_names("size,file", known) == ["size", "file"]


OTHER_PATHS = (
    "/../config.json /data/../../config.json /data/%2e%2e/config.json //etc/passwd /data/ "
    "/api/image/-1 /api/image/99999 /api/image/%D9%A3 /api/neighbors/x /api/search "
    "/api/path/99999 /data/own_0"
)


@pytest.mark.parametrize("path", OTHER_PATHS.split())
@fault(131)
def test_nothing_else_is_there(server, path):
    status, content, _ = ask(server, "GET", path)
    assert status == 404 and set(json.loads(content)) == {"error"}


def post(server, decision, **headers):
    given = {"X_Token": server.token} | headers
    status, data, _ = ask(server, "POST", "/api/curation", json.dumps(decision), **given)
    return status, json.loads(data)


def test_two_people_at_once_lose_no_decision_and_a_conflict_is_explained(server, run):
    """Two servers on one folder, each with two tabs that decide at the same time."""
    with ExploreServer(Samples(run), by="ben") as other, answering(other):
        answers = []

        def decide(at, tab):
            for number in range(6):
                answers.append(post(at, {"do": "rename", "cluster": tab, "name": f"{number}"}))
                answers.append(post(at, {"do": "check", "rows": [number], "by": f"tab {tab}"}))

        tabs = [(server, 0), (server, 1), (other, 1), (other, 2)]
        threads = [threading.Thread(target=decide, args=tab) for tab in tabs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = [answer["error"] for status, answer in answers if status != 200]
        assert all(re.search(r"cluster \d is called '\d' already: merge", one) for one in refused)
        kept = len(answers) - len(refused)
        assert kept >= 24 and len(Curation.open(run).lines) == kept
        for at in (server, other):
            assert json.loads(ask(at, "GET", "/api/version")[1]) == {"lines": kept}
        assert post(other, {"do": "rename", "cluster": 2, "name": "ben's"})[0] == 200
        by = [line.get("by") for line in Curation.open(run).lines if line["do"] == "rename"]
        assert set(by) <= {None, "ben"} and "ben" in by
        post(server, {"do": "merge", "clusters": [0, 1, 2]})
        status, answer = post(other, {"do": "move", "rows": [3], "into": 2})
        assert status == 400
        assert re.match("there is no cluster 2 since the merge of 2.*Z; exp", answer["error"])


def test_decisions_are_lines_in_the_run(server, run):
    rows = np.flatnonzero(server.samples.column("cluster") == 0)[:5].tolist()
    for decision in (
        {"do": "rename", "cluster": 0, "name": "zeros"},
        {"do": "merge", "clusters": [1, 2]},
        {"do": "split", "cluster": 0, "rows": rows, "new": None, "name": "some"},
        {"do": "split", "cluster": 1},
        {"do": "move", "rows": rows[:1], "into": 0},
        {"do": "move", "rows": rows[1:2], "new": None},
        {"do": "exclude", "rows": rows[2:3]},
    ):
        status, answer = post(server, decision)
        assert status == 200 and answer["lines"][-1]["do"] == decision["do"]
    status, answer = post(server, {"do": "undo", "of": answer["lines"][0]["id"]})
    curation = Curation.open(run)
    assert status == 200 and len(answer["lines"]) == len(curation.lines) == 8
    assert [line["undone"] for line in answer["lines"]] == [True] + [False] * 7
    assert curation.names == {1000: "some"} and curation.excluded.sum() == 1
    assert json.loads(ask(server, "GET", "/data/decisions.json")[1]) == answer
    clusters = np.frombuffer(ask(server, "GET", "/data/clusters.i32")[1], np.int32)
    assert np.array_equal(clusters, curation.clusters)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"do": "rename", "cluster": 77, "name": "x"}, "no cluster 77"),
        ({"do": "rename", "cluster": 0, "name": "x", "parts": 5}, "rename has the fields"),
        ({"do": "rename", "cluster": True, "name": "x"}, "`cluster` is True; expected a number"),
        ({"do": "split", "cluster": 0, "rows": [1], "new": 1000}, "`new` is 1000; expected null"),
        ({"do": "split", "cluster": 0, "level": "level_2", "parts": []}, "split has the fields"),
        ({"do": "move", "rows": [[1], [2, 3]], "new": None}, "`rows` is .*; expected numbers"),
        ({"do": "exclude", "rows": [10**6]}, "there is no sample 1000000"),
        ({"do": "apply", "path": "/etc/passwd"}, "`do` is 'apply'; expected one of"),
        ([1], r"a decision is \[1\]; expected a JSON"),
        ({"do": "undo", "of": "x"}, "which no earlier line has"),
    ],
)
@fault(155)
def test_an_invalid_decision_is_refused_in_a_line(server, run, asked, why):
    status, answer = post(server, asked)
    assert status == 400 and re.search(why, answer["error"]) and "\n" not in answer["error"]
    with pytest.raises(InputError, match=why):
        server.curation.decide(asked)
    assert not (run / "curation.jsonl").exists()


@fault(131)
def test_another_site_decides_nothing(server, run):
    decision = {"do": "rename", "cluster": 0, "name": "x"}
    port = server.server_port
    assert post(server, decision, X_Token="guess")[0] == 403
    assert post(server, decision, X_Token="")[0] == 403
    assert post(server, decision, Origin="http://evil.example")[0] == 403
    assert post(server, decision, Origin="null")[0] == 403
    assert post(server, decision, Host="evil.example")[0] == 403
    assert ask(server, "GET", "/", Host=f"evil.example:{port}")[0] == 403
    assert ask(server, "POST", "/api/search", b"", X_Token="é")[0] == 403
    assert not (run / "curation.jsonl").exists()
    assert post(server, decision, Origin=f"http://127.0.0.1:{port}")[0] == 200


@pytest.mark.parametrize("path", ["/", "/explore.js", "/data/decisions.json", "/api/image/1", "/x"])
@fault(157)
def test_nothing_is_shown_without_the_printed_address(server, path):
    others = [
        *({"Cookie": ""}, {"Cookie": f"{server.cookie}=x"}, {"Cookie": f"other={server.token}"}),
        *({"Cookie": server.cookie}, {"Cookie": "", "X_Token": "é"}),
    ]
    for headers in others:
        status, content, answer = ask(server, "GET", path, **headers)
        assert status == 403 and len(content) < 200 and "Set-Cookie" not in answer
        assert "printed, with its token" in json.loads(content)["error"]
    for query in ("?token=", "?token=%FF", f"?Token={server.token}", f"?{server.token}"):
        assert ask(server, "GET", path + query, Cookie="")[0] == 403


@fault(157)
def test_the_printed_address_opens_the_page_and_all_that_it_loads(server):
    path = server.url.removeprefix(f"http://127.0.0.1:{server.server_port}")
    status, page, headers = ask(server, "GET", path, Cookie="")
    kept, *about = headers["Set-Cookie"].split("; ")
    assert status == 200 and {"HttpOnly", "SameSite=Strict"} <= set(about)
    assert kept == f"{server.cookie}={server.token}" and str(server.server_port) in server.cookie
    for name in ("/", "/explore.js", "/data/meta.json", "/api/image/0"):
        status, _, headers = ask(server, "GET", name, Cookie=f"a=b; ;{kept};c")
        assert status == 200 and "Set-Cookie" not in headers
    assert ask(server, "GET", path, Cookie="", Host=f"evil.example:{server.server_port}")[0] == 403


def raw(server, text):
    """Return what comes back for these bytes, until the server closes."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=120) as one:
        one.sendall(text)
        answer = b""
        while part := one.recv(1 << 16):
            answer += part
    return answer


REFUSED = {
    "13 digits": (b"Content-Length: 1000000000000", 413),
    "33 MiB": (b"Content-Length: 34603008", 413),
    "a sign": (b"Content-Length: +2", 400),
    "other digits": ("Content-Length: \u00b2".encode("latin-1"), 400),
    "a list": (b"Content-Length: 2, 2", 400),
    "two lengths": (b"Content-Length: 2\r\nContent-Length: 3", 400),
    "none": (b"X: y", 411),
    "chunks and a length": (b"Transfer-Encoding: chunked\r\nContent-Length: 2", 411),
    "a line too long": (b"X: " + b"y" * 70_000, 431),
    "too many lines": (b"\r\n".join(b"X%d: y" % k for k in range(200)), 431),
    "two names of the server": (b"Host: evil.example\r\nContent-Length: 2", 403),
}


@pytest.mark.parametrize(("header", "status"), REFUSED.values(), ids=REFUSED.keys())
@fault(158)
def test_an_invalid_length_is_refused_before_the_body_is_read(server, run, header, status):
    head = f"POST /api/curation HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n".encode()
    token = b"X-Token: " + server.token.encode() + b"\r\n"
    answer = raw(server, head + token + header + b"\r\n\r\n{}")
    assert answer.split()[1] == str(status).encode() and answer.count(b"HTTP/1.1") == 1
    assert not (run / "curation.jsonl").exists() and ask(server, "GET", "/")[0] == 200


@pytest.mark.parametrize(
    "body",
    [b"{", b"[" * 1_000_000, b'{"do":' * 200_000, b"[" + b"9" * 5000 + b"]", b"\xff", b"NaN",
     b"\xef\xbb\xbf{}", b'{"do": "undo", "do": "undo", "of": "x"}', b"", b"null\0"],
)  # fmt: skip
@fault(158)
def test_a_body_that_is_not_json_is_one_line(server, body):
    status, answer, _ = ask(server, "POST", "/api/curation", body, X_Token=server.token)
    message = json.loads(answer)["error"]
    assert status == 400 and message.startswith("the decision is not valid JSON: ")
    assert len(message) < 250


@pytest.mark.parametrize(
    ("line", "status"),
    [
        *((b"nonsense", b"400"), (b"\x16\x03\x01", b"400"), (b"GET / HTTP/9.9", b"505")),
        *((b"GET //[::1 HTTP/1.1", b"403"), (b"GET http://[ HTTP/1.1", b"403")),
        *((b"GET /?token=%ff&token=&&& HTTP/1.1", b"403"), (b"GET " + b"/" * 70_000, b"414")),
    ],
)
def test_an_invalid_request_does_not_stop_the_server(server, line, status, capsys):
    host = f"Host: 127.0.0.1:{server.server_port}".encode()
    assert status in raw(server, line + b"\r\n" + host + b"\r\nConnection: close\r\n\r\n")
    assert ask(server, "PUT", "/", "x")[0] == 501 and ask(server, "GET", "//[::1")[0] == 404
    assert ask(server, "GET", "/")[0] == 200 and "Traceback" not in capsys.readouterr().err


@fault(158)
def test_slow_clients_are_disconnected_and_others_answered_meanwhile(server, monkeypatch, capsys):
    monkeypatch.setattr(module, "PATIENCE", 2.0)
    slow = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(20)]
    host = f"Host: 127.0.0.1:{server.server_port}\r\nX-Token: {server.token}\r\n".encode()
    for k, one in enumerate(slow):
        head = b"POST /api/curation HTTP/1.1\r\n" + host + b"Content-Length: 99\r\n\r\n"
        one.sendall(head if k % 2 else b"GET / HTTP/1.1\r\n")
    assert ask(server, "GET", "/")[0] == 200
    end, gone = time.monotonic() + 50, 0  # less than the usual patience
    while gone < len(slow) and time.monotonic() < end:
        time.sleep(0.15)
        gone = 0
        for one in slow:
            try:
                one.sendall(b"x")
                one.settimeout(0.001)
                gone += one.recv(1000) == b""
            except TimeoutError:
                pass
            except OSError:
                gone += 1
    assert gone == len(slow) and "Traceback" not in capsys.readouterr().err
    for one in slow:
        one.close()


@fault(159)
def test_the_temporary_map_of_a_killed_writer_is_removed(run):
    (run / ".map.pt.0123abcd.tmp").write_bytes(b"half")
    with ExploreServer(Samples(run)):
        assert [path.name for path in run.glob(".*.tmp")] == []


@fault(160)
def test_decisions_stay_with_the_run_that_was_opened(run, tmp_path):
    latest = tmp_path / "latest"
    latest.symlink_to(run)
    (tmp_path / "next").mkdir()
    curation = Curation.open(latest)
    latest.unlink()
    latest.symlink_to(tmp_path / "next")
    curation.rename(0, "zeros")
    assert list((tmp_path / "next").iterdir()) == []
    assert Curation.open(run).names == {0: "zeros"}


def test_a_port_in_use_and_a_damaged_file_are_reported_before_serving(server, run):
    with pytest.raises(InputError, match=r"port \d+ is not available .*--port 0 for any free"):
        ExploreServer(Samples(run), server.server_port)
    (run / "curation.jsonl").write_text("half a li")
    with pytest.raises(CorruptFileError, match=r"curation\.jsonl, line 1: the line is cut off"):
        serve(Samples(run), 0, opened=lambda url: pytest.fail("served"))
