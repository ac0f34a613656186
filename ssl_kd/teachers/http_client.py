"""One HTTP exchange with a teacher's server: with its host alone, bounded in time and in size."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import reprlib
import ssl
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ssl_kd.errors import InputError, UserError

KEY = "TEACHER_API_KEY"  # of the environment: a setting would stand in the run's files
MESSAGE = 2**16  # bytes that are read of a refusal
FOREVER = 1e9  # seconds: a clock takes no infinite ones
LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"  # of a host's name
ADDRESS = re.compile(
    rf"https?://(?P<host>{LABEL}(\.{LABEL})*\.?|\[(?P<ipv6>[0-9A-Fa-f:.]+)\])"
    r"(:(?P<port>\d{1,5}))?(/[!$&-;=A-Z_a-z~%]*)?",
    re.ASCII,
)


class Answer(NamedTuple):
    """What came back: of a status other than 2xx the first bytes of its content alone."""

    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes


class NoAnswer(UserError):
    """No whole answer came: if `again`, one may come to another attempt."""

    def __init__(self, message: str, again: bool = True) -> None:
        super().__init__(message)
        self.again = again


def exchange(url: str, body: bytes | None, *, timeout: float, largest: int) -> Answer:
    """Send a request and return the whole answer; a redirect is an answer, and is not followed.

    The key of the environment goes to the host of the address alone: neither another host nor
    .netrc nor a proxy has a part in it. An https address is reached through the environment's proxy
    (HTTPS_PROXY, NO_PROXY), as a tunnel that sees the host only; an http address is connected to
    directly.

    Args:
        url: checked by `check_url`.
        body: JSON to POST; None for a GET.
        timeout: seconds for everything, from looking up the name to the last byte.
        largest: bytes that an answer may have.

    Raises:
        NoAnswer: none came; or it is larger than that, or compressed.
        InputError: the key, or the environment's proxy, cannot be used.
    """
    answer: Future[Answer] = Future()

    def work() -> None:
        try:
            # Closing does not wait for a name that is still being looked up.
            with closing(asyncio.new_event_loop()) as loop:
                answer.set_result(loop.run_until_complete(_exchange(url, body, timeout, largest)))
        except BaseException as error:
            answer.set_exception(error)

    # A thread for its loop: that of a notebook's cell has a running one.
    threading.Thread(target=work, name="teacher's answer", daemon=True).start()
    return answer.result()


async def _exchange(url: str, body: bytes | None, timeout: float, largest: int) -> Answer:
    import aiohttp  # which only a served teacher needs

    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    headers["Accept-Encoding"] = "identity"  # a megabyte of gzip is a gigabyte of JSON
    if key := api_key():
        headers["Authorization"] = f"Bearer {key}"
    how = {"headers": headers, "allow_redirects": False, "proxy": _proxy(url)}
    limit = aiohttp.ClientTimeout(total=min(timeout, FOREVER))
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, auto_decompress=False) as session,
            session.request("GET" if body is None else "POST", url, data=body, **how) as response,
        ):
            succeeded = 200 <= response.status < 300
            try:
                content = await _content(response, largest if succeeded else MESSAGE, succeeded)
            except (asyncio.TimeoutError, aiohttp.ClientError, OSError):
                if succeeded:
                    raise
                content = b""  # the status says enough
            return Answer(response.status, response.reason or "", response.headers, content)
    except asyncio.TimeoutError:
        raise NoAnswer(f"no whole answer came in {timeout:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise NoAnswer(_reason(error)) from None


async def _content(response: Any, most: int, whole: bool) -> bytes:
    """Return the content, of up to so many bytes; where it must be whole, more are refused."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        if whole:
            raise NoAnswer(f"answers in the encoding {short(encoding)}, unasked for", again=False)
        return b""
    content = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        content += chunk
        if len(content) > most and whole:
            raise NoAnswer(f"answers with more than {most:,} bytes", again=False)
        if len(content) > most:
            break
    return bytes(content[:most])


def api_key() -> str | None:
    """Return the key of the environment, where there is one.

    Raises:
        InputError: it cannot stand in a header; does not show it.
    """
    key = os.environ.get(KEY, "")
    for place, character in enumerate(key, 1):
        if not "!" <= character <= "~":
            kind = "a blank or line break" if character.isspace() else "no printable ASCII"
            raise InputError(
                f"the key in the environment variable {KEY} cannot be sent: its character {place} "
                f"of {len(key)} is {kind}. Set it to the key alone, or unset it"
            )
    return key or None


def hidden(text: str) -> str:
    """Return the text without the key, which a server may repeat."""
    return text.replace(os.environ.get(KEY) or "\0", "***")


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = 8
        self.maxstring = self.maxother = self.maxlong = 120

    def repr_str(self, x: str, level: int) -> str:
        """Hide the key while it is whole: a cut one would not be recognized."""
        return super().repr_str(hidden(x), level)


def short(value: Any, width: int = 120) -> str:
    """Return what a message shows of a foreign value, however large and deep it is."""
    text = hidden(value) if isinstance(value, str) else _Shown().repr(value)
    text = " ".join(text[: 10 * width].split())
    return text if len(text) <= width else f"{text[: width - 2]} …"


def _proxy(url: str) -> str | None:
    """Return the proxy through which an https address is reached; None: directly."""
    host = urlsplit(url).hostname or ""
    proxy = getproxies().get("https") or getproxies().get("all")
    if not url.startswith("https://") or not proxy or proxy_bypass(host):
        return None
    scheme, _, rest = proxy.rpartition("://")
    if scheme not in ("", "http", "https"):
        raise InputError(
            f"the environment has a proxy of the kind {scheme!r} (HTTPS_PROXY), expected http: set "
            f"NO_PROXY={host} to reach the teacher's server without it"
        )
    return f"{scheme or 'http'}://{rest}"


def _reason(error: Exception) -> str:
    """Return why a connection failed, as the system calls it."""
    cause: Any = getattr(error, "os_error", error)
    if not isinstance(cause, ssl.SSLError) and (getattr(cause, "errno", 0) or 0) > 0:
        return os.strerror(cause.errno)
    return short(getattr(error, "message", "") or str(cause) or type(error).__name__)


def check_url(url: str) -> None:
    """Raise InputError where this is not an API's address, or holds a secret."""
    if "@" in url:
        raise InputError(
            f"TEACHER_URL holds a name or password, which would stand in the run's files: put the "
            f"key into the environment variable {KEY}"
        )
    if "?" in url or "#" in url:
        raise InputError(
            "TEACHER_URL holds a query or a fragment ('?', '#'), expected the address alone, as "
            f"http://host:8000/v1; a key belongs into the environment variable {KEY}"
        )
    try:
        parts = ADDRESS.fullmatch(url)
        if parts is None or len(parts["host"]) > 253 or not 0 < int(parts["port"] or 80) < 2**16:
            raise ValueError
        ipaddress.IPv6Address(parts["ipv6"] or "::1")
    except ValueError:
        raise InputError(
            f"TEACHER_URL is {short([url])[1:-1]}, expected an address as "
            "http://host:8000/v1 in ASCII, with a port up to 65535"
        ) from None
