"""Serve the explorer page to the browser of the user who started the server.

Other users of the machine, and pages of other sites in the browser, can reach the port as well.
Therefore the printed address contains a secret token. The browser stores the token in a cookie for
reading. A request that changes something must send the token in a header, which no other site can
do. Requests for another host name are refused, so that DNS rebinding does not work.
"""

from __future__ import annotations

import hmac
import io
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl

import torch
from torch import Tensor

from firstnan.finite import safe_normalize
from ssl_kd.core.errors import InputError, UserError, printable
from ssl_kd.core.runs.clock import Progress, no_progress
from ssl_kd.vision.cache.neighbors import nearest_among, search_on
from ssl_kd.vision.data import UnreadableImage
from ssl_kd.vision.data.media import is_link
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.cluster_pages import ClusterPages
from ssl_kd_explore.decisions import Curation
from ssl_kd_explore.explore.api import openapi
from ssl_kd_explore.explore.map_image import map_image
from ssl_kd_explore.explore.map_layout import map_of
from ssl_kd_explore.explore.page_data import (
    DATA,
    PAGE,
    PAGE_FILES,
    as_json,
    column_file,
    decision_files,
    fitted,
    page_file,
    write_page_data,
)
from ssl_kd_explore.explore.routes import answer, is_number, parse_json
from ssl_kd_explore.explore.text_search import TextSearch

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
SHOWN = 2000  # characters of a text that are sent to the page
ADDRESS = "127.0.0.1"
LARGEST = 32 << 20
IMAGE_SIDE = 320
LARGEST_SIDE = 4096  # pixels of a picture that the page shows large
NEIGHBORS, BLOCK = 12, 65_536  # neighbors of a sample that the page shows; rows compared at once
PATIENCE, LINGER = 60.0, 1.0  # seconds for a whole request; for the rest of a refused request
_TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8",
          "css": "text/css; charset=utf-8", "txt": "text/plain; charset=utf-8",
          "json": "application/json"}  # fmt: skip
# regl compiles its commands with `Function`, and regl-scatterplot sorts points in a worker.
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-eval'; worker-src blob:; connect-src 'self'; "
    "img-src 'self' data: blob:; media-src 'self'; style-src 'self' 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class _Refused(Exception):
    """A request is refused with this status and a message of one line."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class ExploreServer(ThreadingHTTPServer):
    """HTTP server of the explorer for one run, on 127.0.0.1."""

    daemon_threads = True
    request_queue_size = 64  # a browser opens several connections at once; others wait a second

    def __init__(
        self,
        samples: Samples,
        port: int = 0,
        *,
        by: str | None = None,
        progress: Progress = no_progress,
    ) -> None:
        if not 0 <= port < 65536:
            raise InputError(f"--port is {port}; expected 0 (any free port) to 65535")
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise InputError(
                f"port {port} is not available ({error.strerror}): use --port 0 for any free port"
            ) from error
        try:
            self.samples, self.curation = samples, Curation(samples, by)
            self.token = secrets.token_urlsafe(24)
            self.url = f"http://{ADDRESS}:{self.server_port}/?token={self.token}"
            # Browsers send the cookies of all ports of a host.
            self.cookie = f"ssl_kd_explore_{self.server_port}"
            self.data: dict[str, bytes] = {}
            self.pages = ClusterPages(samples, self.curation)
            self.text_search = TextSearch(samples)
            put = self.data.__setitem__
            self.own = write_page_data(
                samples,
                self.pages.columns,
                put,
                is_served=True,
                searches_texts=self.text_search.is_possible,
                progress=progress,
            )
        except BaseException:
            self.server_close()
            raise

    def has_token(self, *values: str) -> bool:
        """Return True if one of the values is the token."""
        return any(hmac.compare_digest(value.encode(), self.token.encode()) for value in values)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection error at debug level instead of printing it."""
        logger.debug("a connection to the explorer failed", exc_info=True)

    def page(self) -> bytes:
        """Return the content of `explore.html` with the token inserted."""
        empty = b'<meta name="token" content="">'
        return page_file(PAGE).replace(empty, empty.replace(b'""', f'"{self.token}"'.encode()))

    def neighbors(self, row: int) -> list[int]:
        """Return the rows of the 12 samples most similar to a sample, most similar first."""

        def candidates() -> Iterator[tuple[int, Tensor]]:
            for split, rows in self.samples.splits.items():
                for start, block in self.samples.store(split).blocks(BLOCK):
                    yield rows.start + start, safe_normalize(block)

        query, search = safe_normalize(self.samples.embeddings([row])), search_on(CPU)
        nearest = nearest_among(query, torch.tensor([row]), candidates(), NEIGHBORS, search)
        return [neighbor for neighbor in nearest[0].tolist() if neighbor != row]

    def path_of(self, row: int) -> str:
        """Return the absolute path of a sample's picture, or its name if it is no separate file."""
        try:
            path = self.samples.image_file(row)
        except (FileNotFoundError, UnreadableImage):
            path = None
        return str(self.samples.column("file")[row]) if path is None else str(path.absolute())

    def map_png(self, query: dict[str, str]) -> bytes:
        """Draw the map as a PNG; the query may have `color` and `width`."""
        width, target = _pixels(query, "width", 800), io.BytesIO()
        places, color = map_of(self.samples), query.get("color", "cluster")
        map_image(places, self.pages.columns, color, width).save(target, "PNG")
        return target.getvalue()


def serve(
    samples: Samples,
    port: int = 8090,
    *,
    by: str | None = None,
    progress: Progress = no_progress,
    opened: Callable[[str], object] = print,
) -> None:
    """Serve the explorer page until Ctrl-C; call `opened` with its address once the server runs."""
    with ExploreServer(samples, port, by=by, progress=progress) as server:
        opened(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            logger.info("the explorer is stopped; its decisions are in %s", server.curation.path)


def _pixels(query: dict[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not is_number(text):
        raise InputError(f"`{name}` is {printable(text)[:20]!r}; expected a number of pixels")
    return int(text)


class _Reader(socket.SocketIO):
    """A socket with a deadline for a whole request, even if bytes keep arriving slowly."""

    deadline = 0.0  # by time.monotonic

    def readinto(self, buffer: Any) -> int | None:
        """Read from the socket; raise TimeoutError after the deadline."""
        remaining = max(self.deadline - time.monotonic(), 0.001)
        self._sock.settimeout(remaining)  # type: ignore[attr-defined]
        return super().readinto(buffer)


class _Handler(BaseHTTPRequestHandler):
    """Answer the requests of one connection to an `ExploreServer`."""

    server: ExploreServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self._reader = _Reader(self.connection, "r")
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        self._reader.deadline = time.monotonic() + PATIENCE
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
        """Call `answer` with path and query; send an error of one line if it raises."""
        try:
            if self.headers.get_all("Host", []) not in ([host] for host in self._hosts()):
                reason = "the request is for another host; expected 127.0.0.1 or localhost"
                raise _Refused(HTTPStatus.FORBIDDEN, reason)
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

    def _hosts(self) -> list[str]:
        return [f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")]

    def _get(self, path: str, query: str) -> None:
        server = self.server
        is_address = server.has_token(*parse_qs(query).get("token", []))
        sent = self.headers.get("X-Token", ""), *self._cookies()
        if not is_address and not server.has_token(*sent):
            reason = "no token: open the address that ssl_kd explore printed, with its token"
            raise _Refused(HTTPStatus.FORBIDDEN, reason)
        name = path.removeprefix("/")
        if name in ("", PAGE):
            return self._send(server.page(), _TYPES["html"], cookie=is_address)
        if name in PAGE_FILES:
            return self._send(page_file(name), _TYPES[name.rpartition(".")[2]])
        folder, _, rest = name.partition("/")
        if folder == DATA:
            if rest in server.own:
                content = column_file(server.pages.columns, server.own[rest])
                return self._send(content, "application/octet-stream")
            contents = server.data if rest in server.data else decision_files(server.curation)
            if rest in contents:
                kind = _TYPES.get(rest.rpartition(".")[2], "application/octet-stream")
                return self._send(contents[rest], kind)
        if name.startswith("api/image/"):
            return self._image(self._row(name), dict(parse_qsl(query)))
        if name.startswith("api/path/"):
            path = server.path_of(self._row(name))
            return self._send(as_json({"path": path}), _TYPES["json"])
        if name.startswith("api/media/"):
            return self._media(self._row(name))
        if name.startswith("api/neighbors/"):
            return self._send(as_json(server.neighbors(self._row(name))), _TYPES["json"])
        if name == "api/search":
            if reason := server.text_search.obstacle:
                raise _Refused(HTTPStatus.NOT_FOUND, reason)
            found = server.text_search.find(dict(parse_qsl(query)).get("text", ""))
            rows, similarities = [row for row, _ in found], [round(s, 4) for _, s in found]
            return self._send(as_json({"rows": rows, "similarity": similarities}), _TYPES["json"])
        if name == "api/schema":
            return self._send(as_json(openapi()), _TYPES["json"])
        if name == "api/version":
            return self._send(as_json({"lines": len(server.curation.lines)}), _TYPES["json"])
        server.curation.refresh()  # another server may have written a decision
        if name == "api/map.png":
            return self._send(server.map_png(dict(parse_qsl(query))), "image/png")
        value = answer(server.pages, name, dict(parse_qsl(query)))
        if isinstance(value, bytes):
            return self._send(value, "application/octet-stream")
        if value is not None:
            return self._send(as_json(value), _TYPES["json"])
        raise _Refused(HTTPStatus.NOT_FOUND, "there is no page or data at this path")

    def _cookies(self) -> list[str]:
        pairs = (part.strip().partition("=") for part in self.headers.get("Cookie", "").split(";"))
        return [value for name, _, value in pairs if name == self.server.cookie]

    def _post(self, path: str, _: str) -> None:
        origin = self.headers.get("Origin")
        is_ours = origin is None or origin in [f"http://{host}" for host in self._hosts()]
        if not is_ours or not self.server.has_token(self.headers.get("X-Token", "")):
            raise _Refused(HTTPStatus.FORBIDDEN, "only the page of this server may send decisions")
        if path != "/api/curation":
            raise _Refused(HTTPStatus.NOT_FOUND, "this path does not accept POST requests")
        self.server.curation.decide(parse_json(self._body(), "the decision"))
        self._send(decision_files(self.server.curation)["decisions.json"], _TYPES["json"])

    def _body(self) -> bytes:
        lengths = self.headers.get_all("Content-Length", [])
        if not lengths or self.headers.get_all("Transfer-Encoding"):
            reason = "expected a body with Content-Length, not in chunks"
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, reason)
        if len(lengths) > 1 or not (lengths[0].isascii() and lengths[0].isdecimal()):
            raise _Refused(HTTPStatus.BAD_REQUEST, "expected one Content-Length header, a number")
        if len(lengths[0]) > 12 or (length := int(lengths[0])) > LARGEST:
            reason = f"expected a body of at most {LARGEST >> 20} MiB"
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
        if len(body := self.rfile.read(length)) < length:
            raise ConnectionResetError("the connection ended within the body of a request")
        return body

    def _row(self, name: str) -> int:
        text, n = name.rpartition("/")[2], len(self.server.samples)
        if not is_number(text) or int(text) >= n:
            reason = f"there is no sample {text[:20]!r}; expected 0 to {n - 1}"
            raise _Refused(HTTPStatus.NOT_FOUND, reason)
        return int(text)

    def _image(self, row: int, query: dict[str, str]) -> None:
        side = _pixels(query, "side", IMAGE_SIDE)
        if not 1 <= side <= LARGEST_SIDE:
            raise InputError(f"`side` is {side}; expected 1 to {LARGEST_SIDE} pixels")
        if (image := self.server.samples.image(row)) is None:
            reason = "the run was trained on features and has no images"
            raise _Refused(HTTPStatus.NOT_FOUND, reason)
        target = io.BytesIO()
        fitted(image, side).save(target, "JPEG", quality=85)
        self._send(target.getvalue(), "image/jpeg", keep=True)

    def _media(self, row: int) -> None:
        """Send a text or link of a sample as JSON, or its sound as it is."""
        samples = self.server.samples
        if (text := samples.text(row)) is not None:
            kind = "url" if is_link(text) else "text"
            shown = {"kind": kind, kind: text[:SHOWN], "characters": len(text)}
            return self._send(as_json(shown), _TYPES["json"])
        if (sound := samples.sound(row)) is None:
            raise _Refused(HTTPStatus.NOT_FOUND, f"sample {row} has no text, link or sound to send")
        self._send(sound[1], sound[0])

    def _send(
        self,
        body: bytes,
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
        """Send an error, and read the rest of the request, so that the client gets the error."""
        self.close_connection = True
        with suppress(OSError):
            self._send(as_json({"error": reason}), _TYPES["json"], status)
            self.connection.shutdown(socket.SHUT_WR)
            self._reader.deadline = time.monotonic() + LINGER
            while self.rfile.read1(1 << 16):
                pass
