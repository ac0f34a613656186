"""The requests for programs: every one is in the schema, and the map is a picture."""

import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from ssl_kd.core.colors import MISSING, RAMP, tint
from ssl_kd.core.errors import InputError
from ssl_kd_explore.explore.api import ROUTES
from ssl_kd_explore.run import Run
from tests.documents import ROOT
from tests.explore.explore.test_server import ask, post

SOURCES = ROOT / "explore" / "ssl_kd_explore" / "explore"
QUERY = {"rows": "1,5", "columns": "file,confidence", "column": "confidence", "width": "80"}


def test_every_path_of_the_schema_and_no_other_is_served(server, run):
    jsonschema = pytest.importorskip("jsonschema")
    post(server, {"do": "rename", "cluster": 0, "name": "zeros"})
    document = json.loads(ask(server, "GET", "/api/schema")[1])
    assert document["openapi"] == "3.1.0"
    get = {path: methods["get"] for path, methods in document["paths"].items() if "get" in methods}
    assert [*get] == [f"/{path}" for path in ROUTES]
    for path, about in get.items():
        named = [p["name"] for p in about["parameters"] if p["in"] == "query"]
        query = "&".join(f"{name}={QUERY[name]}" for name in named if name in QUERY)
        status, body, headers = ask(server, "GET", f"{path}?{query}".format(row=3, cluster=1))
        ((kind, content),) = about["responses"]["200"]["content"].items()
        if kind == "*/*" or path == "/api/search":  # these images have neither
            continue
        assert (status, headers["Content-Type"]) == (200, kind), (path, body)
        if kind == "application/json":
            jsonschema.Draft202012Validator(content["schema"]).validate(json.loads(body))
        if any(p["required"] and p["in"] == "query" for p in about["parameters"]):
            status, body, _ = ask(server, "GET", path)
            assert status == 400 and json.loads(body)["error"]
    body = document["paths"]["/api/curation"]["post"]["requestBody"]["content"]["application/json"]
    jsonschema.Draft202012Validator(body["schema"]).validate({"do": "check", "cluster": 1})


def test_every_request_of_the_page_and_path_of_the_server_is_in_the_schema():
    files = [*SOURCES.glob("*.py"), *SOURCES.glob("page/*.js")]
    code = "".join(path.read_text() for path in files if path.name != "api.py")
    used = set(re.findall(r"""["'`/](api/[a-z.]+)""", code))
    described = {path.partition("/{")[0] for path in ROUTES if path.startswith("api/")}
    assert used >= {"api/rows", "api/image", "api/curation"}
    assert used - {"api/curation"} <= described


@pytest.mark.parametrize("color", ["cluster", "label", "confidence", "checked", "split"])
def test_the_map_is_a_picture_in_the_colors_of_the_page(server, run, color):
    Run.open(run).curation.exclude([0, 1])
    picture = Run.open(run).map_image(color, 300)
    status, body, headers = ask(server, "GET", f"/api/map.png?color={color}&width=300")
    assert status == 200 and headers["Content-Type"] == "image/png"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(body))), np.asarray(picture))
    assert picture.size == (300, 300) and picture.mode == "RGB"
    pixels = np.unique(np.asarray(picture).reshape(-1, 3), axis=0)
    shown = {"#{:02x}{:02x}{:02x}".format(*rgb) for rgb in pixels.tolist()}
    colors = {"confidence": [RAMP[-1]], "checked": [tint(0)], "split": [tint(0), tint(1)]}
    assert shown >= {"#ffffff", *colors.get(color, [tint(k) for k in range(3)])}
    assert (MISSING in shown) == (color == "cluster")


@pytest.mark.parametrize(
    ("color", "width", "message"),
    [
        ("file", 80, "`color` is file, a column of texts"),
        ("nothing", 80, "there is no column 'nothing'; expected file, cluster"),
        ("cluster", 8000, "`width` is 8000; expected 64 to 4096 pixels"),
    ],
)
def test_a_map_that_cannot_be_drawn(server, run, color, width, message):
    with pytest.raises(InputError, match=message):
        Run.open(run).map_image(color, width)
    status, body, _ = ask(server, "GET", f"/api/map.png?color={color}&width={width}")
    assert status == 400 and re.match(message, json.loads(body)["error"])
    assert ask(server, "GET", "/api/map.png?width=-3")[0] == 400
