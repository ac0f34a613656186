"""The example for scripts: a vision model, here a fake one, names 20 clusters."""

import base64
import io
import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ssl_kd_explore.decisions import Curation
from tests.documents import ROOT
from tests.local_server import LocalServer

SCRIPT = ROOT / "scripts" / "name_clusters.py"


class Model(BaseHTTPRequestHandler):
    """Answers each question with the next of `replies`; a number is the status of a refusal."""

    server: Any

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers["Authorization"], question))
        reply = self.server.replies.pop(0)
        status = reply if isinstance(reply, int) else 200
        self.send_response(status)
        self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.end_headers()
        message = {"role": "assistant", "content": reply}
        self.wfile.write(json.dumps({"choices": [{"message": message}]}).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def model():
    server: Any
    with LocalServer(Model) as server:
        server.asked, server.replies = [], []
        yield server


def name(url, model, key="secret"):
    command = [sys.executable, SCRIPT, "--model_url", f"{model.url}/v1/", "--model", "llava"]
    environment = {"MODEL_API_KEY": key, "EXPLORE_URL": url}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert key not in result.stdout + result.stderr and "Traceback" not in result.stderr
    return result


def test_a_model_names_20_clusters_and_keeps_names_by_people(server, run, model):
    curation = Curation.open(run)
    rows = np.random.default_rng(0).permutation(len(curation.clusters))
    for part in np.split(rows[:190], 19):
        curation.move(part)
    first, *_, last = curation.sizes
    curation.rename(first, "Cat")
    curation.check(cluster=last)
    unnamed = set(curation.sizes) - {first, last}
    assert len(unnamed) == 20
    model.replies += ['"Cat".', "cat", "a\x1b[2J b\nBecause ...", "x" * 500, ""]
    model.replies += [f"thing {k}" for k in range(15)]
    result = name(server.url, model)
    assert result.returncode == 0 and len(result.stdout.splitlines()) == 20, result.stderr
    names = Curation.open(run).names
    assert set(names) == unnamed | {first} and last not in names
    assert {"Cat", "Cat 2", "cat 3", "a[2J b", "x" * 60, "unnamed", "thing 3"} <= {*names.values()}
    assert {line["by"] for line in Curation.open(run).lines[-20:]} == {"llava"}
    path, key, question = model.asked[0]
    assert (path, key, question["model"]) == ("/v1/chat/completions", "Bearer secret", "llava")
    _, *pictures = question["messages"][0]["content"]
    data = base64.b64decode(pictures[0]["image_url"]["url"].partition(",")[2])
    assert len(pictures) == 8 and Image.open(io.BytesIO(data)).format == "JPEG"
    assert name(server.url, model).stdout == "" and len(model.asked) == 20  # nothing is left to do
    assert ": 403 " in name(server.url.partition("?")[0], model).stderr


@pytest.mark.parametrize(
    ("reply", "message"),
    [(500, ": 500 "), (302, ": 302 "), (None, "expected a chat completion")],
)
def test_a_model_that_fails_is_reported_in_a_line_and_gets_no_second_question(
    server, run, model, reply, message
):
    model.replies.append(reply)
    result = name(server.url, model)
    assert result.returncode == 1 and result.stderr.startswith("error: ")
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert len(model.asked) == 1 and Curation.open(run).names == {}
