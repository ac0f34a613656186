"""Reach the Hugging Face Hub, and explain why a model cannot be downloaded from it."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlparse

from ssl_kd.core.quiet import quiet_transformers
from ssl_kd.vision.teachers.base import TeacherUnavailable

WAY = "check the name and the network, or give a folder with the model, hf:FOLDER"
"""What to do if an encoder of texts or sounds cannot be loaded from the Hub."""


def unavailable(name: str, error: BaseException, way: str | None = None) -> TeacherUnavailable:
    """Return the error that the weights of a teacher cannot be had, with the way to gated ones.

    `way` says what to do instead; by default it names other teachers of images.
    """
    page = _refusing_page(error)
    if page is None:
        return TeacherUnavailable(name, error, way)
    reason = f"access to {page} is refused: check its name, accept its license there, and log in"
    return TeacherUnavailable(name, f"{reason} with `hf auth login`", way)


def _refusing_page(error: BaseException) -> str | None:
    """Return the address of the repository that refused access; None if none did."""
    from huggingface_hub.errors import GatedRepoError

    cause: BaseException | None = error
    while cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(cause, GatedRepoError) or status in (401, 403):
            match = re.search(r"(https?://[^/\s]+)/(?:api/models/)?([\w.-]+/[\w.-]+)", str(cause))
            if match is not None:
                return f"{match[1]}/{match[2]}"
        cause = cause.__cause__ or cause.__context__
    return None


@contextmanager
def offline_without_network() -> Iterator[None]:
    """Use only the local Hugging Face cache if the Hub's host name cannot be resolved.

    Without a network the Hub's client would retry for 47 seconds.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    if not urllib.request.getproxies():
        try:
            socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
        except OSError:
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def loading_from_transformers() -> Iterator[None]:
    """Load models of transformers without progress bars, and from the cache without a network."""
    with offline_without_network(), quiet_transformers():
        yield
