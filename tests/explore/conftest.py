"""A run of its own, and its page served, for every test that decides something."""

import shutil
import threading
from contextlib import contextmanager

import pytest

from ssl_kd.explore.server import ExploreServer
from ssl_kd.finished import Samples


@pytest.fixture
def run(photo_run, tmp_path):
    return shutil.copytree(photo_run, tmp_path / "copy")


@contextmanager
def answering(server):
    """A server's requests are answered meanwhile."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(20)


@pytest.fixture
def server(run):
    with ExploreServer(Samples(run)) as server, answering(server):
        yield server
