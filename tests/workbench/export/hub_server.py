"""A stand-in for the Hugging Face hub, from which small files are downloaded."""

import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler

from tests.local_server import LocalServer

SHA = "0" * 39 + "1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Hub"

    def log_message(self, *_):
        pass

    def _answer(self, body, code=200, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in (headers | {"Content_Length": str(len(data))}).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self):
        files, path = self.server.files, self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/[^/]+", path):
            siblings = [{"rfilename": name} for repo, name in files if repo == found[1]]
            if siblings:
                return self._answer({"id": found[1], "sha": SHA, "siblings": siblings})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/.*", path):
            names = [(name, data) for (repo, name), data in files.items() if repo == found[1]]
            return self._answer(
                [{"type": "file", "path": n, "size": len(d), "oid": _etag(d)} for n, d in names]
            )
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            data = files.get((found[1], found[2]))
            if data is not None:
                return self._answer(data, ETag=f'"{_etag(data)}"', X_Repo_Commit=SHA)
        return self._answer({"error": "Not found"}, 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


def _etag(data):
    return hashlib.sha1(data).hexdigest()


class Hub(LocalServer):
    """A context manager; `files` is what it holds, by repository and name."""

    def __init__(self):
        super().__init__(Handler)
        self.files: dict[tuple[str, str], bytes] = {}
