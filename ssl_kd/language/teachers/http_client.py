"""Send an HTTP request to a model's server, to no other host and with limits of time and size."""

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

from ssl_kd.core.errors import InputError, UserError

KEY = "TEACHER_API_KEY"  # an environment variable, because settings are written to files
KEYS = (KEY, "ROLLOUT_API_KEY")
MESSAGE_BYTES = 2**16  # largest part of an error response that is read
LONGEST = 1e9  # seconds, because asyncio accepts no infinite timeout
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"  # of a host name
_ADDRESS = re.compile(
    rf"https?://(?P<host>{_LABEL}(\.{_LABEL})*\.?|\[(?P<ipv6>[0-9A-Fa-f:.]+)\])"
    r"(:(?P<port>\d{1,5}))?(/[!$&-;=A-Z_a-z~%]*)?",
    re.ASCII,
)


class Answer(NamedTuple):
    """A response; if its status is not 2xx, `content` holds only the beginning of the body."""

    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes


class NoAnswer(UserError):
    """Raised if no complete response arrives.

    Attributes:
        again: whether another attempt may succeed.
        connected: whether there was a connection; if not, nothing may listen at the address.
    """

    def __init__(self, message: str, again: bool = True, connected: bool = True) -> None:
        super().__init__(message)
        self.again, self.connected = again, connected


def exchange(
    url: str, body: bytes | None, *, timeout: float, largest: int, key: str = KEY
) -> Answer:
    """Send one request, a POST if there is a JSON body, and return the complete response.

    Redirects are not followed, and proxies and .netrc are ignored, so that the API key in the
    variable `key` is sent to the host of the URL and to no other. The timeout in seconds covers the
    whole exchange, from the DNS lookup to the last byte of at most `largest`.
    """
    answer: Future[Answer] = Future()

    def work() -> None:
        try:
            # Unlike asyncio.run, closing does not wait for a DNS lookup that is still running.
            with closing(asyncio.new_event_loop()) as loop:
                sent = _exchange(url, body, timeout, largest, key)
                answer.set_result(loop.run_until_complete(sent))
        except BaseException as error:
            answer.set_exception(error)

    # In a separate thread, because in a notebook the current one already runs an event loop.
    threading.Thread(target=work, name="server's answer", daemon=True).start()
    return answer.result()


async def _exchange(url: str, body: bytes | None, timeout: float, largest: int, key: str) -> Answer:
    import aiohttp  # needed only for a server

    # Uncompressed, because a megabyte of gzip can become a gigabyte of JSON.
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if secret := api_key(key):
        headers["Authorization"] = f"Bearer {secret}"
    method = "GET" if body is None else "POST"
    limit = aiohttp.ClientTimeout(total=min(timeout, LONGEST))
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, auto_decompress=False) as session,
            session.request(
                method, url, data=body, headers=headers, allow_redirects=False
            ) as response,
        ):
            if 200 <= response.status < 300:
                content = await _whole(response.content, largest)
            else:
                content = await response.content.read(MESSAGE_BYTES)
            return Answer(response.status, response.reason or "", response.headers, content)
    except asyncio.TimeoutError:
        raise NoAnswer(f"no complete answer within {timeout:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        connected = not isinstance(error, aiohttp.ClientConnectorError)
        raise NoAnswer(_reason(error), connected=connected) from None


async def _whole(stream: Any, largest: int) -> bytes:
    """Read a stream to its end, or raise NoAnswer if it has more than `largest` bytes."""
    try:
        await stream.readexactly(largest + 1)
    except asyncio.IncompleteReadError as error:
        return error.partial
    raise NoAnswer(f"sends more than {largest:,} bytes", again=False)


def api_key(name: str = KEY) -> str | None:
    """Return the key from the environment, or None; raise InputError if a header cannot hold it."""
    key = os.environ.get(name, "")
    if not re.fullmatch("[!-~]*", key):
        raise InputError(
            f"the key in the environment variable {name} cannot be sent, because it contains a "
            "space, a line break or a character outside ASCII: set the variable to the key alone, "
            "or unset it"
        )
    return key or None


def hide_key(text: str) -> str:
    """Replace the keys, which a server may repeat in its answer, by asterisks."""
    secrets = sorted(filter(None, map(os.environ.get, KEYS)), key=len, reverse=True)
    return re.sub("|".join(map(re.escape, secrets)) or r"\0", "***", text)


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = 8
        self.maxstring = self.maxother = self.maxlong = 120

    def repr_str(self, x: str, level: int) -> str:
        """Hide the key before the string is shortened, which could leave a part of the key."""
        return super().repr_str(hide_key(x), level)


def short(value: Any, width: int = 120) -> str:
    """Format a value from a server as one short line without the key, for a message."""
    text = hide_key(value) if isinstance(value, str) else _Repr().repr(value)
    text = " ".join(text[: 10 * width].split())
    return text if len(text) <= width else f"{text[: width - 2]} …"


def _reason(error: Exception) -> str:
    """Return why a connection failed, with the operating system's description if there is one."""
    cause: Any = getattr(error, "os_error", error)
    if not isinstance(cause, ssl.SSLError) and (getattr(cause, "errno", 0) or 0) > 0:
        return os.strerror(cause.errno)
    return short(getattr(error, "message", "") or str(cause) or type(error).__name__)


def check_url(url: str, role: str = "TEACHER") -> None:
    """Raise InputError unless a URL is the valid address of an API and contains no secret."""
    if "@" in url or "?" in url or "#" in url:
        raise InputError(
            f"{role}_URL contains a user name, a query or a fragment ('@', '?', '#'), which would "
            "be written to the run's files: set it to the address alone, such as "
            f"http://host:8000/v1, and put a key into the environment variable {role}_API_KEY"
        )
    try:
        parts = _ADDRESS.fullmatch(url)
        if parts is None or len(parts["host"]) > 253 or not 0 < int(parts["port"] or 80) < 2**16:
            raise ValueError
        ipaddress.IPv6Address(parts["ipv6"] or "::1")
    except ValueError:
        raise InputError(
            f"{role}_URL is {short([url])[1:-1]}; expected an address such as "
            "http://host:8000/v1 in ASCII, with a port up to 65535"
        ) from None
