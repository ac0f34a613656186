"""The page in a real Chromium: look, select, decide, undo, take away, by mouse, key and finger.

One browser and one served run are shared; what a test decides is gone after it.
"""

import json
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.explore import write_site
from ssl_kd.workbench.finished import Curation
from tests.workbench.explore.chromium import chromium, launch, until
from tests.workbench.explore.conftest import answering

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
LIMIT = 60_000  # milliseconds, of any one wait, on a machine that does much else


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        if chromium(playwright) is None:
            pytest.skip("there is no Chromium: playwright install chromium")
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Opens a page, and fails where anything went wrong in it."""
    faults, contexts = [], []

    def open_page(url, **context):
        contexts.append(
            browser.new_context(**({"viewport": {"width": 1200, "height": 800}} | context))
        )
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
def static(run, tmp_path):
    """The static page of the run, behind a plain web server."""
    folder = write_site(Samples(run), tmp_path / "out").parent

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    with server, answering(server):
        yield f"http://127.0.0.1:{server.server_port}/explore.html"


def lasso(page):
    """Draw around the left half of the map."""
    box = page.locator("#canvas").bounding_box()
    left, top = box["x"] + 4, box["y"] + 4
    right, bottom = left + box["width"] * 0.55, top + box["height"] - 8
    corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top + 5)]
    page.mouse.move(*corners[0])
    page.mouse.down()
    for corner in corners[1:]:
        page.mouse.move(*corner, steps=8)
    page.mouse.up()
    until(page, "() => explore.chosen.length > 1")
    return page.evaluate("[...explore.chosen]")


def tick(page, *clusters):
    for k in clusters:
        page.check(f'[data-of="tick {k}"]')


def named(page, name):
    page.fill("#answer", name)
    page.keyboard.press("Enter")


def lines(page, count):
    """The decisions, as soon as there are so many."""
    until(page, "(n) => explore.decisions.lines.length === n", count)
    return page.evaluate("explore.decisions.lines")


def test_load_lasso_rename_merge_split_undo(server, opened, run):
    page = opened(server.url)
    assert page.locator("#overlay img").count() > 0
    page.click("#lasso")
    rows = lasso(page)
    assert len(rows) > 20 and page.locator("#pictures img").count() == min(60, len(rows))
    home = server.curation.clusters[rows]
    page.click("#new")
    named(page, "by hand")
    lines(page, 1)
    curation = Curation.open(run)
    made = next(k for k, name in curation.names.items() if name == "by hand")
    assert sorted(rows) == [i for i, k in enumerate(curation.clusters) if k == made]
    page.keyboard.press("Escape")
    rest = [k for k in curation.sizes if k != made][:2]
    tick(page, rest[0])
    page.click("#rename")
    named(page, "<b>x</b>")
    lines(page, 2)
    page.wait_for_selector("#clusters b:has-text('<b>x</b>')")
    assert page.locator("#clusters b", has_text="<b>x</b>").count() == 1
    tick(page, made)
    page.click("#merge")
    found = lines(page, 3)
    assert found[-1]["clusters"] == sorted([rest[0], made])
    assert Curation.open(run).names == {rest[0]: "<b>x</b>"}
    page.click("#undo")
    lines(page, 4)
    page.locator("#history button").last.click()  # the oldest
    lines(page, 5)
    again = Curation.open(run)
    assert (again.clusters[rows] == home).all() and len(again.history) == 5


def test_hover_click_neighbours_search_and_colours(server, opened):
    page = opened(server.url)
    box = page.locator("#canvas").bounding_box()
    x, y = page.evaluate("explore.plot.screen(5)")
    page.mouse.move(box["x"] + x, box["y"] + y)
    page.wait_for_selector("#tip:not([hidden]) img")
    page.mouse.click(box["x"] + x, box["y"] + y)
    until(page, "() => document.querySelectorAll('#pictures button').length === 12")
    row = page.evaluate("explore.chosen[0]")
    shown = page.locator("#pictures button").evaluate_all("all => all.map((b) => +b.dataset.row)")
    assert shown == server.search.like_sample(row, 12)
    name = str(server.samples.column("file")[row])
    assert name in page.locator("#sample").inner_text()
    page.fill("#query", name)
    page.keyboard.press("Enter")
    until(page, "() => document.getElementById('status').textContent === '1 found'")
    for colour in page.locator("#colour option").evaluate_all("all => all.map((o) => o.value)"):
        page.select_option("#colour", colour)
        page.wait_for_timeout(50)
    file = server.samples.image_file(row)
    page.set_input_files("#image-file", str(file))
    until(page, "() => document.querySelectorAll('#pictures button').length === 24")
    assert page.evaluate("explore.chosen[0]") == row


def test_by_the_keyboard_alone(server, opened, run):
    page = opened(server.url)
    page.keyboard.press("?")
    assert page.locator("#shortcuts").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#shortcuts").is_visible()
    page.focus("#canvas")
    before = page.evaluate("explore.plot.screen(0)")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("+")
    until(page, "(x) => explore.plot.screen(0)[0] !== x", before[0])
    page.keyboard.press("Enter")
    until(page, "() => explore.chosen.length === 1")
    page.keyboard.press("x")
    lines(page, 1)
    page.keyboard.press("u")
    lines(page, 2)
    page.keyboard.press("Escape")
    until(page, "() => explore.chosen.length === 0")
    page.keyboard.press("g")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    page.keyboard.press("r")
    named(page, "typed")
    lines(page, 3)
    assert list(Curation.open(run).names.values()) == ["typed"]
    page.keyboard.press("t")
    lines(page, 4)
    page.keyboard.press("/")
    page.keyboard.type("png")
    page.keyboard.press("Enter")
    until(page, "() => explore.chosen.length === explore.meta.samples")


def test_the_address_opens_the_page_again_and_no_other_does(server, opened):
    page = opened(server.url)
    page.goto(f"http://127.0.0.1:{server.server_port}/")  # the cookie is there
    page.wait_for_selector("body[data-ready]")
    page.reload()
    page.wait_for_selector("body[data-ready]")
    other = page.context.browser.new_context().new_page()
    answer = other.goto(f"http://127.0.0.1:{server.server_port}/")
    assert answer.status == 403 and "printed, with its token" in other.inner_text("body")
    other.context.close()


def test_names_that_export_gave_are_shown_until_a_person_gives_another(server, opened):
    page = opened(server.url)
    page.evaluate("() => { explore.meta.names.cluster = { 0: 'given', 1: 'Taken' }; }")
    page.keyboard.press("Escape")
    page.wait_for_selector("#clusters b:has-text('given')")
    assert page.locator("#clusters b", has_text="Taken").count() == 1
    tick(page, 2)
    page.click("#rename")
    named(page, "taken")
    lines(page, 1)
    page.wait_for_selector("#clusters b:has-text('Cluster 1')")


def test_frames_and_dots_follow_the_colour_and_what_is_selected(server, opened):
    page = opened(server.url)
    frames = """() => [...document.querySelectorAll("#overlay .thumb")].map((t) =>
      t.style.borderColor)"""
    before = page.evaluate(frames)
    page.select_option("#colour", "confidence")
    until(page, f"(before) => JSON.stringify(({frames})()) !== JSON.stringify(before)", before)
    assert page.evaluate("getComputedStyle(document.querySelector('#clusters i')).visibility") == (
        "hidden"
    )
    page.select_option("#colour", "cluster")
    until(page, f"(before) => JSON.stringify(({frames})()) === JSON.stringify(before)", before)
    page.locator("#clusters button").first.click()
    dim = "() => document.querySelectorAll('#overlay .dim').length"
    until(page, dim)
    page.keyboard.press("Escape")
    until(page, f"() => !({dim})()")


def test_a_picture_is_sent_with_its_name(server, opened):
    page = opened(server.url)
    shown = page.evaluate("""async () => {
      const real = window.fetch, seen = [];
      window.fetch = async (...all) => { seen.push(all[1].headers["X-File-Name"]);
        return new Response(JSON.stringify({ error: "refused" }), { status: 400 }); };
      const { post } = await import("./data.js");
      const sent = post("api/search", new Blob(["x"]), "a/b", "Äpfel.png");
      const said = await sent.catch((e) => e.message);
      window.fetch = real;
      return [seen[0], said]; }""")
    assert shown == ["%C3%84pfel.png", "refused"]


def test_a_refusal_is_said_and_nothing_changes(server, opened):
    page = opened(server.url)
    clusters = sorted(server.curation.sizes)[:2]
    tick(page, *clusters)
    page.evaluate("() => { window.fetch = () => Promise.reject(new Error('no network')); }")
    page.click("#merge")
    page.wait_for_selector("#status.bad")
    assert page.locator("#status").inner_text() == "no network"
    assert page.evaluate("explore.decisions.sizes.size") == len(server.curation.sizes)


def test_the_static_page_keeps_decisions_and_gives_them_away(static, opened, run, tmp_path):
    page = opened(static)
    assert page.locator("#overlay .thumb").count() > 0 and not page.is_visible("#by-image")
    page.keyboard.press("l")
    rows = lasso(page)
    page.keyboard.press("s")
    named(page, "kept")
    lines(page, 1)
    left = (
        "[...explore.decisions.sizes].filter(([k]) => k < 1000).sort((a, b) => b[1] - a[1])[0][0]"
    )
    tick(page, page.evaluate(left))  # the largest: more than one part of the tree is in it
    page.click("#split")
    lines(page, 2)
    page.reload()
    page.wait_for_selector("body[data-ready]")
    found = lines(page, 2)
    with page.expect_download() as download:
        page.click("#download")
    download.value.save_as(tmp_path / "curation.jsonl")
    kept = (tmp_path / "curation.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == found
    curation = Curation.open(run)
    assert len(curation.apply(tmp_path / "curation.jsonl")) == 2
    assert page.evaluate("[...explore.decisions.clusters]") == curation.clusters.tolist()
    assert curation.names == {found[0]["new"]: "kept"} and found[0]["rows"] == sorted(rows)
    page.click(f'[data-of="{found[0]["new"]}"]')
    page.locator("#pictures button").first.click()
    until(page, "() => document.querySelectorAll('#pictures .thumb').length === 12")


def test_kept_decisions_that_do_not_fit_block_no_page(static, opened):
    page = opened(static)
    key = "`ssl_kd curation ${explore.meta.digest} ${explore.meta.samples}`"
    for kept in ('[{"id": "x", "do": "rename", "cluster": 77, "name": "y"}]', "{half", '"text"'):
        page.evaluate(f"(kept) => localStorage.setItem({key}, kept)", kept)
        page.reload()
        page.wait_for_selector("body[data-ready]")
        assert "were set aside" in page.locator("#status").inner_text()
        assert page.evaluate(f"localStorage.getItem({key})") is None
        assert page.evaluate("Object.values(localStorage)").count(kept) == 1


def test_the_start_page_leads_to_the_page(static, opened):
    page = opened(static.replace("explore.html", ""))
    assert page.url.endswith("/explore.html")


def test_on_a_phone(server, opened):
    page = opened(
        server.url,
        viewport={"width": 390, "height": 800},
        has_touch=True,
        is_mobile=True,
        device_scale_factor=2,
    )
    wide = "document.documentElement.scrollWidth <= innerWidth"
    assert page.evaluate(wide) and page.locator("#canvas").bounding_box()["height"] > 250
    box = page.locator("#canvas").bounding_box()
    before = page.evaluate("explore.plot.screen(0)")
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    fingers = page.context.new_cdp_session(page)

    def touch(kind, *points):
        points = [{"x": x, "y": y, "id": k} for k, (x, y) in enumerate(points)]
        fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", (x, y))
    for k in range(1, 11):
        touch("touchMove", (x + 6 * k, y))
    touch("touchEnd")
    after = page.evaluate("explore.plot.screen(0)")
    moved = [a - b for a, b in zip(after, before, strict=True)]
    assert moved == pytest.approx([60, 0], abs=12)
    apart = "(({ plot: p }) => Math.hypot(...[0, 1].map((k) => p.screen(0)[k] - p.screen(9)[k])))"
    before = page.evaluate(f"{apart}(explore)")
    touch("touchStart", (x - 40, y), (x + 40, y))
    touch("touchMove", (x - 80, y), (x + 80, y))
    touch("touchEnd")
    assert page.evaluate(f"{apart}(explore)") == pytest.approx(2 * before, rel=0.1)
    row = page.evaluate("(({ plot }) => plot.nearest(plot.width / 2, plot.height / 2))(explore)")
    x, y = page.evaluate(f"explore.plot.screen({row})")
    page.touchscreen.tap(box["x"] + x, box["y"] + y)
    until(page, "() => explore.chosen.length === 1")
    assert page.evaluate(wide)


def test_many_samples_are_thinned_while_the_map_moves_alone(server, opened):
    page = opened(server.url)
    thin = """async () => { const { plot } = explore, { map } = plot, n = plot.x.length;
      const drawn = () => (map.get("isPointsFiltered") ? map.get("filteredPoints").length : n);
      plot.some = [...Array(n).keys()].filter((row) => row % 4 === 0);
      plot.zoom(1.5);
      await new Promise(requestAnimationFrame);
      await new Promise(requestAnimationFrame);
      return [n, drawn()]; }"""
    n, moving = page.evaluate(thin)
    assert moving == -(-n // 4)
    until(page, "() => !explore.plot.map.get('isPointsFiltered')")


def test_colours_that_follow_each_other_fast(server, opened):
    page = opened(server.url)
    page.evaluate("""() => { const menu = document.getElementById("colour");
      return Promise.all([...menu.options].map(({ value }) => {
        menu.value = value; return menu.onchange(); })); }""")
    assert page.evaluate("explore.plot.codes === explore.plot.newest")


def test_names_are_read_out_of_one_block_of_bytes(server, opened):
    page = opened(server.url)
    script = """async (words) => {
      const { Names } = await import("./data.js");
      const lines = ["Ärger.PNG", "b.png", "", "日本 b.PNG", "last"].join("\\n");
      const names = new Names(new TextEncoder().encode(lines));
      return [[0, 1, 2, 3, 4].map((k) => names.of(k)), words.map((w) => names.search(w))]; }"""
    names, found = page.evaluate(script, ["png", "ä", "B", "last", "nothing"])
    assert names == ["Ärger.PNG", "b.png", "", "日本 b.PNG", "last"]
    assert found == [[0, 1, 3], [0], [1, 3], [4], []]


def test_a_file_that_is_cut_off_is_said(server, opened):
    page = opened(server.url)
    page.route("**/data/cluster.i32", lambda route: route.fulfill(body=b"1234"))
    found = page.evaluate("""() => import("./data.js").then((data) =>
      data.bytes("data/cluster.i32", 8).catch((error) => error.message))""")
    assert found == "data/cluster.i32 has 4 bytes; expected 8: it is of another page"
