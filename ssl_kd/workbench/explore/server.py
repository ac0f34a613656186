"""The page, served to the browser of the user who started it.

Other users of the machine reach the port, and so does another site's page that a browser has open.
So the address that is printed has a secret token; the page sets it as a cookie for what it loads,
and what changes something needs it in a header that no other site can send. A request also has to
name this server by its own name, so that no other domain can stand for it (DNS rebinding).
"""

from __future__ import annotations

import hmac
import io
import logging
import mmap
import secrets
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

from ssl_kd.errors import InputError, UserError, printable
from ssl_kd.files import strict_json
from ssl_kd.training.clock import Progress
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.explore.search import Search
from ssl_kd.workbench.explore.site import (
    DATA,
    NEIGHBOURS,
    PAGE,
    as_json,
    fitted,
    page_data,
    page_file,
    page_files,
)
from ssl_kd.workbench.finished import Curation

logger = logging.getLogger(__name__)

ADDRESS, LARGEST, IMAGE_SIDE, FOUND = "127.0.0.1", 32 << 20, 320, 24
PATIENCE, LINGER = 60.0, 1.0  # seconds for a whole request; for what comes after a refusal
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

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class ExploreServer(ThreadingHTTPServer):
    """Answers for one run; use it as a context manager, and `serve_forever`.

    Args:
        samples: the run.
        port: where it listens on 127.0.0.1; 0: wherever is free.
        progress: called while what is needed is computed.

    Attributes:
        url: of the page, with the token.
        token: the secret of this server.

    Raises:
        InputError: the port is taken, or none.
    """

    daemon_threads = True

    def __init__(
        self, samples: Samples, port: int = 0, *, progress: Progress | None = None
    ) -> None:
        if not 0 <= port < 65536:
            raise InputError(f"the port is {port}; expected 0 (any that is free) to 65535")
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise InputError(
                f"port {port} is not available ({error.strerror}): --port 0 takes any that is free"
            ) from error
        try:
            self.samples, self.curation = samples, Curation(samples)
            self.search, self.token = Search(samples), secrets.token_urlsafe(24)
            self.data: dict[str, mmap.mmap | bytes] = {}
            page_data(samples, self._put, progress=progress)
        except BaseException:
            self.server_close()
            raise

    @property
    def url(self) -> str:
        """Of the page, with the token: who has it may look and decide."""
        return f"http://{ADDRESS}:{self.server_port}/?token={self.token}"

    @property
    def cookie(self) -> str:
        """The name of the cookie; those of other ports are sent along."""
        return f"ssl_kd_explore_{self.server_port}"

    def _put(self, name: str, data: bytes) -> None:
        """Keep a file's content in one without a name: nothing of it outlives a killed process."""
        if data:
            with tempfile.TemporaryFile() as file:
                file.write(data)
                file.flush()
                self.data[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        else:
            self.data[name] = b""

    def knows(self, *words: str) -> bool:
        """Whether one of these is the token."""
        return any(hmac.compare_digest(word.encode(), self.token.encode()) for word in words)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a broken connection instead of printing it."""
        logger.debug("a connection broke", exc_info=True)

    def page(self) -> bytes:
        """`explore.html` with the token."""
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
        progress: called while what is needed is computed.
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


class _Reader(socket.SocketIO):
    """What a client sends, until its time is over: no byte that still drips in adds to it."""

    until = 0.0  # by time.monotonic

    def readinto(self, buffer: Any) -> int | None:
        """As of a socket; TimeoutError: the time is over."""
        self._sock.settimeout(max(self.until - time.monotonic(), 0.001))  # type: ignore[attr-defined]
        return super().readinto(buffer)


class _Handler(BaseHTTPRequestHandler):
    """One request; `server` is the `ExploreServer`."""

    server: ExploreServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self._reader = _Reader(self.connection, "r")
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        self._reader.until = time.monotonic() + PATIENCE
        super().handle_one_request()

    def do_GET(self) -> None:
        self._guarded(self._get)

    def do_POST(self) -> None:
        self._guarded(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def version_string(self) -> str:
        return "ssl_kd"

    def _guarded(self, answer: Callable[[str, str], None]) -> None:
        """Answer, or say in a line why not."""
        try:
            names = [f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")]
            if self.headers.get_all("Host", []) not in ([name] for name in names):
                raise _Refused(HTTPStatus.FORBIDDEN, "this server has another name")
            path, _, query = self.path.partition("?")
            answer(path, query)
        except _Refused as error:
            self._fail(error.status, str(error))
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True  # the browser went away
        except (UserError, OSError) as error:  # also: the run's folder may not be written
            self._fail(HTTPStatus.BAD_REQUEST, str(error))
        except Exception:
            logger.exception("a request failed: %s", printable(self.path))
            self._fail(HTTPStatus.INTERNAL_SERVER_ERROR, "an internal error: see the terminal")

    def _get(self, path: str, query: str) -> None:
        opened = self.server.knows(*parse_qs(query).get("token", []))
        if not opened and not self.server.knows(self.headers.get("X-Token", ""), *self._cookies()):
            raise _Refused(
                HTTPStatus.FORBIDDEN, "open the address that ssl_kd explore printed, with its token"
            )
        name = path.removeprefix("/")
        if name in ("", PAGE):
            return self._send(self.server.page(), _TYPES["html"], cookie=opened)
        if name in page_files():
            return self._send(page_file(name), _TYPES[name.rpartition(".")[2]])
        folder, _, rest = name.partition("/")
        if folder == DATA and rest in self.server.data:
            kind = _TYPES.get(rest.rpartition(".")[2], "application/octet-stream")
            return self._send(self.server.data[rest], kind)
        if name == "api/curation":
            return self._send(as_json({"lines": self.server.curation.lines}), _TYPES["json"])
        if name.startswith("api/image/"):
            return self._image(self._row(name))
        if name.startswith("api/neighbours/"):
            found = self.server.search.like_sample(self._row(name), NEIGHBOURS)
            return self._send(as_json(found), _TYPES["json"])
        raise _Refused(HTTPStatus.NOT_FOUND, "there is nothing of that name")

    def _cookies(self) -> list[str]:
        pairs = (part.strip().partition("=") for part in self.headers.get("Cookie", "").split(";"))
        return [value for name, _, value in pairs if name == self.server.cookie]

    def _post(self, path: str, _: str) -> None:
        origin = self.headers.get("Origin")
        ours = {f"http://{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")}
        if origin not in {None, *ours} or not self.server.knows(self.headers.get("X-Token", "")):
            raise _Refused(HTTPStatus.FORBIDDEN, "only the page of this server may ask for that")
        if path not in ("/api/search", "/api/curation"):
            raise _Refused(HTTPStatus.NOT_FOUND, "there is nothing of that name")
        body = self._body()
        if path == "/api/search":
            name = printable(unquote(self.headers.get("X-File-Name", "")))[:200] or "the image"
            found = self.server.search.like_image(body, FOUND, name)
            return self._send(as_json({"rows": found}), _TYPES["json"])
        try:
            asked = strict_json(body)
        except ValueError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"the decision is no JSON: {error}") from error
        self.server.curation.decide(asked)
        self._send(as_json({"lines": self.server.curation.lines}), _TYPES["json"])

    def _body(self) -> bytes:
        lengths = self.headers.get_all("Content-Length", [])
        if not lengths or self.headers.get_all("Transfer-Encoding"):
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length, and no chunks")
        if len(lengths) > 1 or not (lengths[0].isascii() and lengths[0].isdecimal()):
            raise _Refused(HTTPStatus.BAD_REQUEST, "expected one Content-Length, a number")
        if len(lengths[0]) > 12 or (length := int(lengths[0])) > LARGEST:
            raise _Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected at most {LARGEST >> 20} MiB"
            )
        if len(body := self.rfile.read(length)) < length:
            raise ConnectionResetError("the body is cut off")
        return body

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
        body: bytes | mmap.mmap,
        kind: str,
        status: HTTPStatus = HTTPStatus.OK,
        *,
        keep: bool = False,
        cookie: bool = False,
    ) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "private, max-age=3600" if keep else "no-store",
            "Content-Security-Policy": _POLICY,
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        if cookie:
            value = f"{self.server.cookie}={self.server.token}"
            headers["Set-Cookie"] = f"{value}; Path=/; HttpOnly; SameSite=Strict"
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        for start in range(0, len(body), 1 << 20):
            self.connection.settimeout(PATIENCE)
            self.wfile.write(body[start : start + (1 << 20)])

    def _fail(self, status: HTTPStatus, reason: str) -> None:
        """Refuse, and let the client read it: what it still sends is taken, and thrown away."""
        self.close_connection = True
        with suppress(OSError):
            self._send(as_json({"error": reason}), _TYPES["json"], status)
            self.connection.shutdown(socket.SHUT_WR)
            self._reader.until = time.monotonic() + LINGER
            while self.rfile.read1(1 << 16):
                pass
