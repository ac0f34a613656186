"""The server: what it gives, to whom, and what it refuses."""

import http.client
import io
import json
import socket

import numpy as np
import pytest
from PIL import Image

from ssl_kd.errors import InputError
from ssl_kd.explore.server import ExploreServer, decide, serve
from ssl_kd.finished import Curation, Samples
from tests.faults.matrix import row as fault


def ask(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, answer.headers


def test_the_page_its_data_and_a_secret_word_of_its_own(server):
    status, page, headers = ask(server, "GET", "/")
    assert status == 200 and f'name="token" content="{server.token}"'.encode() in page
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert ask(server, "GET", "/plot.js")[2]["Content-Type"].startswith("text/j")
    meta = json.loads(ask(server, "GET", "/data/meta.json")[1])
    clusters = np.frombuffer(ask(server, "GET", "/data/cluster.i32")[1], np.int32)
    assert np.array_equal(clusters, server.samples.column("cluster"))
    assert meta["sheets"] is None and "neighbours" not in meta["columns"]
    assert server.server_address[0] == "127.0.0.1"


def test_images_and_neighbours_on_demand(server):
    samples = server.samples
    status, data, headers = ask(server, "GET", "/api/image/3")
    image = Image.open(io.BytesIO(data))
    assert status == 200 and headers["Content-Type"] == "image/jpeg" and image.size == (320, 320)
    near = json.loads(ask(server, "GET", "/api/neighbours/3")[1])
    x = samples.embeddings(range(len(samples))).double()
    x = x / x.norm(dim=1, keepdim=True)
    closeness = x @ x[3]
    closeness[3] = -1
    assert len(near) == 12 and 3 not in near
    assert closeness[near].tolist() == sorted(closeness.tolist(), reverse=True)[:12]


@pytest.mark.parametrize(
    "path",
    [
        "/../config.json",
        "/data/../../config.json",
        "/data/%2e%2e/config.json",
        "/data//etc/passwd",
        "//etc/passwd",
        "/data/",
        "/page/explore.js",
        "/api/image/-1",
        "/api/image/99999",
        "/api/image/1/../../config.json",
        "/api/image/%D9%A3",
        "/api/neighbours/x",
        "/api/search",
    ],
)
@fault(131)
def test_nothing_else_is_there(server, path):
    status, content, _ = ask(server, "GET", path)
    assert status == 404 and set(json.loads(content)) == {"error"}


def test_search_by_an_image_of_ones_own(server):
    target = io.BytesIO()
    server.samples.image(7).save(target, "PNG")
    status, data, _ = ask(server, "POST", "/api/search", target.getvalue(), X_Token=server.token)
    rows = json.loads(data)["rows"]
    same = server.samples.column("cluster")[rows[:5]] == server.samples.column("cluster")[7]
    assert status == 200 and rows[0] == 7 and len(rows) == 24 and same.all()
    status, data, _ = ask(server, "POST", "/api/search", b"no image", X_Token=server.token)
    assert status == 400 and b"the image: " in data


def post(server, said, **headers):
    given = {"X_Token": server.token} | headers
    status, data, _ = ask(server, "POST", "/api/curation", json.dumps(said), **given)
    return status, json.loads(data)


def test_decisions_are_lines_in_the_run(server, run):
    rows = np.flatnonzero(server.samples.column("cluster") == 0)[:5].tolist()
    for said in (
        {"do": "rename", "cluster": 0, "name": "zeros"},
        {"do": "merge", "clusters": [1, 2]},
        {"do": "split", "cluster": 0, "rows": rows, "new": None, "name": "some"},
        {"do": "split", "cluster": 1},
        {"do": "move", "rows": rows[:1], "into": 0},
        {"do": "move", "rows": rows[1:2], "new": None},
        {"do": "exclude", "rows": rows[2:3]},
    ):
        status, answer = post(server, said)
        assert status == 200 and answer["lines"][-1]["do"] == said["do"]
    status, answer = post(server, {"do": "undo", "of": answer["lines"][0]["id"]})
    curation = Curation.open(run)
    assert status == 200 and answer["lines"] == curation.lines and len(curation.lines) == 8
    assert curation.names == {1000: "some"} and curation.excluded.sum() == 1
    assert json.loads(ask(server, "GET", "/api/curation")[1])["lines"] == curation.lines


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"do": "rename", "cluster": 77, "name": "x"}, "no cluster 77"),
        ({"do": "rename", "cluster": 0}, "does not say what it should"),
        ({"do": "merge", "clusters": 4}, "does not say what it should"),
        ({"do": "split", "cluster": 0, "rows": ["x"]}, "expected numbers of samples"),
        ({"do": "move", "rows": [[1], [2, 3]]}, "does not say what it should"),
        ({"do": "apply", "path": "/etc/passwd"}, "'apply' is no decision"),
        ([1], "None is no decision"),
        ({"do": "undo", "of": {}}, "no decision before it"),
    ],
)
def test_a_decision_that_cannot_be_is_refused_in_a_line(server, run, said, why):
    with pytest.raises(InputError, match=why):
        decide(server.curation, said)
    assert not (run / "curation.jsonl").exists()


@fault(131)
def test_another_site_decides_nothing(server, run):
    said = {"do": "rename", "cluster": 0, "name": "x"}
    port = server.server_port
    assert post(server, said, X_Token="guess")[0] == 403
    assert post(server, said, X_Token="")[0] == 403
    assert post(server, said, Origin="http://evil.example")[0] == 403
    assert post(server, said, Origin="null")[0] == 403
    assert post(server, said, Host="evil.example")[0] == 403
    assert ask(server, "GET", "/", Host=f"evil.example:{port}")[0] == 403
    assert ask(server, "POST", "/api/search", b"", X_Token="é")[0] == 403
    assert not (run / "curation.jsonl").exists()
    assert post(server, said, Origin=f"http://127.0.0.1:{port}")[0] == 200


def test_bad_requests(server):
    token = {"X_Token": server.token}
    assert ask(server, "POST", "/api/curation", "{", **token)[0] == 400
    assert ask(server, "POST", "/api/other", "{}", **token)[0] == 404
    assert ask(server, "POST", "/api/curation", Content_Length="99999999999", **token)[0] == 413
    assert ask(server, "PUT", "/", "x")[0] == 501
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as raw:
        raw.sendall(b"nonsense\r\n\r\n")
        assert b"400" in raw.recv(1000)
    assert ask(server, "GET", "/")[0] == 200


def test_a_port_that_is_taken(server, run):
    with pytest.raises(InputError, match=r"port \d+ cannot be had .*--port 0 takes any"):
        ExploreServer(Samples(run), server.server_port)


def test_a_curation_that_is_damaged_is_said_before_anything_is_served(run):
    (run / "curation.jsonl").write_text("half a li")
    with pytest.raises(Exception, match=r"curation\.jsonl, line 1: it is cut off"):
        serve(Samples(run), 0, opened=lambda url: pytest.fail("served"))


def test_an_image_that_is_gone_is_a_line(server, monkeypatch):
    def gone(row):
        raise FileNotFoundError("x.png is no longer in photos")

    monkeypatch.setattr(server.samples, "image", gone)
    status, data, _ = ask(server, "GET", "/api/image/1")
    assert status == 400 and json.loads(data) == {"error": "x.png is no longer in photos"}
