"""A run with its map, and a copy whose page is served to the tests of a module."""

import shutil
import threading
from contextlib import contextmanager

import pytest

from ssl_kd.vision.samples import Samples
from ssl_kd_explore.explore import map_of
from ssl_kd_explore.explore.server import ExploreServer
from tests.explore.explore.chromium import chromium, launch

LIMIT = 60_000  # milliseconds, of any one wait, on a machine that does much else


@pytest.fixture(scope="session")
def mapped_run(photo_run, tmp_path_factory):
    run = shutil.copytree(photo_run, tmp_path_factory.mktemp("mapped") / "copy")
    map_of(Samples(run))
    return run


@pytest.fixture(scope="module")
def serving(mapped_run, tmp_path_factory):
    with serving_copy(mapped_run, tmp_path_factory.mktemp("served")) as server:
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
def serving_copy(run, folder):
    """Yield a server of the page of a copy of a run, which is made in `folder`."""
    copy = shutil.copytree(run, folder / "copy")
    with ExploreServer(Samples(copy)) as server, answering(server):
        yield server


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


@pytest.fixture(scope="module")
def browser():
    """Yield one Chromium for the tests of a module."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        if chromium(playwright) is None:
            pytest.skip("there is no Chromium: playwright install chromium")
        browser = launch(playwright)
        yield browser
        browser.close()


@contextmanager
def opening(browser):
    """Yield a function that opens pages; fail at the end if anything went wrong in one."""
    faults, contexts = [], []

    def open_page(url):
        contexts.append(browser.new_context(viewport={"width": 1200, "height": 800}))
        page = contexts[-1].new_page()
        page.set_default_timeout(LIMIT)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
        page.goto(url)
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def opened(browser):
    with opening(browser) as open_page:
        yield open_page
