"""Describe the requests that the explorer's server answers, as an OpenAPI document."""

from __future__ import annotations

from typing import Any

from ssl_kd import __version__
from ssl_kd_explore.decisions import schema

_CLUSTER = {"cluster": int, "name": str, "size": int, "confidence": (float, None),
            "agreement": (float, None), "checked": int, "typical": [int]}  # fmt: skip
_NEAREST = {"cluster": int, "similarity": (float, None), "between": [int],
            "columns": [{"column": str, "here": str, "there": str}]}  # fmt: skip
_DECISIONS = {"lines": [{"id": str, "time": str, "do": str, "undone": bool}], "names": {},
              "words": {}}  # fmt: skip
# Path -> what it returns, its parameters in the query, and the answer: a media type, or the shape
# of a JSON value. A tuple lists alternatives, `[x]` is a list of x, and `object` is any value.
ROUTES: dict[str, tuple[str, str, Any]] = {
    "data/meta.json": ("Number of samples, and names and kinds of columns", "",
                       {"samples": int, "table": [{"name": str, "kind": str}]}),
    "data/decisions.json": ("All decisions, the names of clusters, and words that name others", "",
                            _DECISIONS),
    "api/rows": ("Rows that pass all filters, as little-endian uint32", "filter sort descending",
                 "application/octet-stream"),
    "api/cells": ("Values of columns", "rows columns", {"columns": [str], "rows": [[object]]}),
    "api/chart": ("Quantiles (5, 25, 50, 75, 95 %) or counts of a column in each cluster", "column",
                  {"kind": str, "clusters": [{"cluster": int, "n": int}]}),
    "api/clusters": ("All clusters, largest first", "", [_CLUSTER]),
    "api/cluster/{cluster}": ("A cluster, its nearest clusters, and the samples between them", "",
                              _CLUSTER | {"nearest": [_NEAREST]}),
    "api/image/{row}": ("The picture of a sample", "side", "image/jpeg"),
    "api/path/{row}": ("The path of the picture of a sample, or its name", "", {"path": str}),
    "api/media/{row}": ("The text, address or recording of a sample", "", "*/*"),
    "api/neighbors/{row}": ("The most similar samples, most similar first", "", [int]),
    "api/search": ("The samples most similar to a text, by the teacher, most similar first", "text",
                   {"rows": [int], "similarity": [float]}),
    "api/map.png": ("The map; clusters have their numbers", "color width", "image/png"),
    "api/version": ("Number of decisions, undone ones included", "", {"lines": int}),
    "api/schema": ("This document", "", {"openapi": str}),
}  # fmt: skip
_PARAMETERS = {
    "row": (int, "Number of a sample, from 0"),
    "cluster": (int, "Number of a cluster"),
    "filter": (str, 'JSON object of column -> text, such as {"label": "cat", "outlier": ">2"}'),
    "sort": (str, "Column to sort by"),
    "descending": (int, "1: largest value first"),
    "rows": (str, "Numbers of at most 1,000 samples, separated by commas"),
    "columns": (str, "Names of columns, separated by commas"),
    "column": (str, "Name of a column"),
    "color": (str, "Column that colors the map; default: cluster"),
    "text": (str, "What to search for, at most 2,000 characters"),
    "side": (int, "Width and height in pixels, at most; default: 320"),
    "width": (int, "Width and height in pixels; default: 800"),
}
JSON = "application/json"
_NEEDED = ("row", "cluster", "rows", "columns", "column", "text")
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", None: "null"}


def openapi() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the server's requests."""
    paths = {f"/{path}": {"get": _get(path, *route)} for path, route in ROUTES.items()}
    about = "Append a decision to curation.jsonl; the token must be in the header"
    body = {"required": True, "content": {JSON: {"schema": schema(is_request=True)}}}
    post = {"summary": about, "requestBody": body, "responses": _responses(_DECISIONS)}
    token = {"type": "apiKey", "in": "header", "name": "X-Token"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ssl_kd explore", "version": __version__},
        "security": [{"token": []}],
        "components": {"securitySchemes": {"token": token}, "schemas": {"line": schema()}},
        "paths": paths | {"/api/curation": {"post": post}},
    }


def _get(path: str, summary: str, query: str, answer: Any) -> dict[str, Any]:
    inside = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = []
    for name in (*inside, *query.split()):
        kind, description = _PARAMETERS[name]
        place = {"name": name, "in": "path" if name in inside else "query"}
        about = {"description": description, "required": name in _NEEDED}
        parameters.append(place | about | {"schema": _schema_of(kind)})
    return {"summary": summary, "parameters": parameters, "responses": _responses(answer)}


def _responses(answer: Any) -> dict[str, Any]:
    good = {answer: {}} if isinstance(answer, str) else {JSON: {"schema": _schema_of(answer)}}
    bad = {JSON: {"schema": _schema_of({"error": str})}}
    return {
        "200": {"description": "The answer", "content": good},
        "4XX": {"description": "What was wrong, in one line", "content": bad},
    }


def _schema_of(shape: Any) -> dict[str, Any]:
    """Return the JSON Schema of a shape in `ROUTES`."""
    if isinstance(shape, dict):
        properties = {name: _schema_of(value) for name, value in shape.items()}
        return {"type": "object", "properties": properties, "required": list(shape)}
    if isinstance(shape, list):
        return {"type": "array", "items": _schema_of(shape[0])}
    if isinstance(shape, tuple):
        return {"anyOf": list(map(_schema_of, shape))}
    return {"type": _TYPES[shape]} if shape in _TYPES else {}
