"""The page, served to the browsers of this machine alone.

Another site's page that a browser has open may send requests here, too. What changes something
needs a secret word that only our page knows, and a request has to name this server by its own
name: so nobody's domain can stand for it (DNS rebinding).
"""

from __future__ import annotations

import hmac
import io
import json
import logging
import secrets
import tempfile
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ssl_kd.errors import InputError, UserError
from ssl_kd.explore.search import Search
from ssl_kd.explore.site import (
    DATA,
    NEIGHBOURS,
    PAGE,
    as_json,
    fitted,
    page_file,
    page_files,
    write_data,
)
from ssl_kd.finished import Curation, Samples
from ssl_kd.training.clock import Progress

logger = logging.getLogger(__name__)

ADDRESS, LARGEST, IMAGE_SIDE, FOUND = "127.0.0.1", 32 << 20, 320, 24
_TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8",
          "css": "text/css; charset=utf-8", "txt": "text/plain; charset=utf-8",
          "json": "application/json"}  # fmt: skip
# The library that draws compiles its commands by Function, and sorts points in a worker.
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-eval'; worker-src blob:; connect-src 'self'; "
    "img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


class _Refused(Exception):
    """A request that is answered by a status and one line."""

    def __init__(self, status: HTTPStatus, said: str) -> None:
        super().__init__(said)
        self.status = status


class ExploreServer(ThreadingHTTPServer):
    """Answers for one run; use it as a context manager, and `serve_forever`.

    Args:
        samples: the run.
        port: where it listens on 127.0.0.1; 0: wherever is free.
        progress: told of what is computed before.

    Attributes:
        url: of the page.
        token: the secret word of this server.

    Raises:
        InputError: the port is taken, or none.
    """

    daemon_threads = True

    def __init__(
        self, samples: Samples, port: int = 0, *, progress: Progress | None = None
    ) -> None:
        if not 0 <= port < 65536:
            raise InputError(f"the port is {port}; expected 0 (any that is free) to 65535")
        self._folder = tempfile.TemporaryDirectory(prefix="ssl_kd_explore_")
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise InputError(
                f"port {port} cannot be had ({error.strerror}): --port 0 takes any that is free"
            ) from error
        try:
            self.samples, self.curation = samples, Curation(samples)
            self.search, self.token = Search(samples), secrets.token_urlsafe(24)
            data = Path(self._folder.name)
            write_data(samples, data, progress=progress)
            self.data = {file.name: file for file in data.iterdir()}
        except BaseException:
            self.server_close()
            raise

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def server_close(self) -> None:
        """Stop listening, and remove what was prepared."""
        super().server_close()
        self._folder.cleanup()

    def page(self) -> bytes:
        """`explore.html` with the secret word."""
        empty = b'<meta name="token" content="">'
        return page_file(PAGE).replace(empty, empty.replace(b'""', f'"{self.token}"'.encode()))


def serve(
    samples: Samples,
    port: int = 8090,
    *,
    progress: Progress | None = None,
    opened: Callable[[str], object] = print,
) -> None:
    """Serve the page until Ctrl-C.

    Args:
        samples: the run.
        port: on 127.0.0.1; 0: any that is free.
        progress: told of what is computed before.
        opened: is called with the page's address once it is there.

    Raises:
        InputError: the port is taken.
        FileNotFoundError: the embeddings of the run are gone.
    """
    with ExploreServer(samples, port, progress=progress) as server:
        opened(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            logger.info("stopped; decisions are in %s", server.curation.path)


class _Handler(BaseHTTPRequestHandler):
    """One request; `server` is the `ExploreServer`."""

    server: ExploreServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        self._guarded(self._get)

    def do_POST(self) -> None:
        self._guarded(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def version_string(self) -> str:
        return "ssl_kd"

    def _guarded(self, answer: Callable[[str], None]) -> None:
        """Answer, or say in a line why not."""
        try:
            port = self.server.server_port
            if self.headers.get("Host") not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
                raise _Refused(HTTPStatus.FORBIDDEN, "this server has another name")
            answer(urlsplit(self.path).path)
        except _Refused as error:
            self._fail(error.status, str(error))
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True  # the browser went away
        except (UserError, OSError) as error:  # also: the run's folder may not be written
            self._fail(HTTPStatus.BAD_REQUEST, str(error))
        except Exception:
            logger.exception("a request failed: %s", self.path)
            self._fail(HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of ours: see the terminal")

    def _get(self, path: str) -> None:
        name = path.removeprefix("/")
        if name in ("", PAGE):
            return self._send(self.server.page(), _TYPES["html"])
        if name in page_files():
            return self._send(page_file(name), _TYPES[name.rpartition(".")[2]])
        folder, _, rest = name.partition("/")
        if folder == DATA and rest in self.server.data:
            kind = _TYPES.get(rest.rpartition(".")[2], "application/octet-stream")
            return self._send_file(self.server.data[rest], kind)
        if name == "api/curation":
            return self._send(as_json({"lines": self.server.curation.lines}), _TYPES["json"])
        if name.startswith("api/image/"):
            return self._image(self._row(name))
        if name.startswith("api/neighbours/"):
            found = self.server.search.like_sample(self._row(name), NEIGHBOURS)
            return self._send(as_json(found), _TYPES["json"])
        raise _Refused(HTTPStatus.NOT_FOUND, "there is nothing of that name")

    def _post(self, path: str) -> None:
        body = self._body()
        origin = self.headers.get("Origin")
        own = {f"http://{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")}
        token = self.headers.get("X-Token", "").encode()
        if origin not in {None, *own} or not hmac.compare_digest(token, self.server.token.encode()):
            raise _Refused(HTTPStatus.FORBIDDEN, "only the page of this server may ask for that")
        if path == "/api/search":
            found = self.server.search.like_image(body, FOUND)
            return self._send(as_json({"rows": found}), _TYPES["json"])
        if path != "/api/curation":
            raise _Refused(HTTPStatus.NOT_FOUND, "there is nothing of that name")
        try:
            said = json.loads(body)
        except ValueError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, "the decision is no JSON") from error
        decide(self.server.curation, said)
        self._send(as_json({"lines": self.server.curation.lines}), _TYPES["json"])

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST:
            self.close_connection = True  # what it sends is not read
            raise _Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected at most {LARGEST >> 20} MiB"
            )
        return self.rfile.read(int(length))

    def _row(self, name: str) -> int:
        text, n = name.rpartition("/")[2], len(self.server.samples)
        if not (text.isascii() and text.isdecimal() and len(text) < 12 and int(text) < n):
            raise _Refused(HTTPStatus.NOT_FOUND, f"there is no sample {text[:20]!r} of {n}")
        return int(text)

    def _image(self, row: int) -> None:
        image = self.server.samples.image(row)
        if image is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "the run learned from features, not from images")
        target = io.BytesIO()
        fitted(image, IMAGE_SIDE).save(target, "JPEG", quality=85)
        self._send(target.getvalue(), "image/jpeg", keep=True)

    def _send(
        self,
        body: bytes,
        kind: str,
        status: HTTPStatus = HTTPStatus.OK,
        *,
        keep: bool = False,
    ) -> None:
        self._head(len(body), kind, status, keep)
        self.wfile.write(body)

    def _send_file(self, file: Path, kind: str) -> None:
        with open(file, "rb") as source:
            self._head(file.stat().st_size, kind)
            while block := source.read(1 << 20):
                self.wfile.write(block)

    def _head(
        self, length: int, kind: str, status: HTTPStatus = HTTPStatus.OK, keep: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(length)),
            ("Cache-Control", "private, max-age=3600" if keep else "no-store"),
            ("Content-Security-Policy", _POLICY),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
        ):
            self.send_header(name, value)
        self.end_headers()

    def _fail(self, status: HTTPStatus, said: str) -> None:
        try:
            self._send(as_json({"error": said}), _TYPES["json"], status)
        except OSError:
            self.close_connection = True


def decide(curation: Curation, said: Any) -> None:
    """Add the decision that a page asks for.

    Args:
        curation: where to.
        said: `do` and what belongs to it, as a line of `curation.jsonl` has it.

    Raises:
        InputError: it is none, or cannot be.
    """
    do = said.get("do") if isinstance(said, dict) else None
    try:
        if do == "rename":
            curation.rename(said["cluster"], said["name"])
        elif do == "merge":
            curation.merge(said["clusters"], said.get("name"))
        elif do == "split":
            curation.split(said["cluster"], said.get("rows"), said.get("name", ""))
        elif do == "move":
            curation.move(said["rows"], said.get("into"), said.get("name", ""))
        elif do == "exclude":
            curation.exclude(said["rows"])
        elif do == "undo":
            curation.undo(said["of"])
        else:
            raise InputError(f"{do!r} is no decision")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{do} does not say what it should ({error!r})") from error
