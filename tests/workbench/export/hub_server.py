"""A stand-in for the Hugging Face hub: it takes commits of small files and gives them back."""

import base64
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
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub = self.server
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._answer({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(part for part in (asked.get("organization"), asked["name"]) if part)
            hub.private[name] = asked.get("private") or asked.get("visibility") == "private"
            return self._answer({"url": f"{hub.url}/{name}", "id": name, "name": name})
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if found := re.fullmatch(r"/api/models/(.+)/preupload/main", self.path):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        if found := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    hub.files[found[1], line["value"]["path"]] = content
            where = f"{hub.url}/{found[1]}/commit/{SHA}"
            return self._answer({"success": True, "commitOid": SHA, "commitUrl": where})
        return self._answer({"error": f"unknown {self.path}"}, 404)

    def do_GET(self):
        hub, path = self.server, self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            names = [name for repo, name in hub.files if repo == found[1]]
            if names:
                siblings = [{"rfilename": name} for name in names]
                known = {"id": found[1], "modelId": found[1], "sha": SHA, "siblings": siblings}
                return self._answer(known | {"tags": [], "private": False, "downloads": 0})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/.*", path):
            names = [(name, data) for (repo, name), data in hub.files.items() if repo == found[1]]
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in names
            ]
            return self._answer(tree)
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            data = hub.files.get((found[1], found[2]))
            if data is not None:
                length = str(len(data))
                return self._answer(
                    data, ETag=f'"{_etag(data)}"', X_Repo_Commit=SHA, Content_Length=length
                )
        return self._answer({"error": "Not found"}, 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


def _etag(data):
    return hashlib.sha1(data).hexdigest()


class Hub(LocalServer):
    """A context manager; `files` is what it holds, by repository and name."""

    def __init__(self, token="hf_stand_in"):
        super().__init__(Handler)
        self.token, self.files, self.private = token, {}, {}
