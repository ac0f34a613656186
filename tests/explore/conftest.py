"""A run with its map, copied for every test that decides something, and its page served."""

import shutil
import threading
from contextlib import contextmanager

import pytest

from ssl_kd.explore import map_of
from ssl_kd.finished import Samples


@pytest.fixture(scope="session")
def mapped_run(photo_run, tmp_path_factory):
    run = shutil.copytree(photo_run, tmp_path_factory.mktemp("mapped") / "copy")
    map_of(Samples(run))
    return run


@pytest.fixture
def run(mapped_run, tmp_path):
    return shutil.copytree(mapped_run, tmp_path / "copy")


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
