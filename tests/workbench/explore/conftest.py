"""A run with its map, and a copy whose page is served to the tests of a module."""

import shutil
import threading
from contextlib import contextmanager

import pytest

from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.explore import map_of
from ssl_kd.workbench.explore.server import ExploreServer


@pytest.fixture(scope="session")
def mapped_run(photo_run, tmp_path_factory):
    run = shutil.copytree(photo_run, tmp_path_factory.mktemp("mapped") / "copy")
    map_of(Samples(run))
    return run


@pytest.fixture(scope="module")
def serving(mapped_run, tmp_path_factory):
    run = shutil.copytree(mapped_run, tmp_path_factory.mktemp("served") / "copy")
    with ExploreServer(Samples(run)) as server, answering(server):
        yield server


@pytest.fixture
def run(serving):
    """A run that the tests of a module share; what a test decides is gone after it."""
    path = serving.curation.path
    yield path.parent
    path.unlink(missing_ok=True)


@pytest.fixture
def server(serving, run):
    """The page of `run`."""
    return serving


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
