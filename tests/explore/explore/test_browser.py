"""The page in a real Chromium: look, select, decide, undo, by mouse and keys.

One browser and one served run are shared; the decisions of a test are removed after it.
"""

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ssl_kd.vision.samples import Samples
from ssl_kd_explore.decisions import Curation
from ssl_kd_explore.explore import write_site
from tests.explore.explore.chromium import until
from tests.explore.explore.conftest import answering, opening

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture(scope="module")
def page(browser, serving):
    """A page that several tests look at; none of them decides anything."""
    with opening(browser) as open_page:
        yield open_page(serving.url)


@pytest.fixture
def static(run, tmp_path):
    """The static page of the run, behind a plain web server."""
    samples = Samples(run)
    Curation(samples).rename(0, "zeros")
    folder = write_site(samples, tmp_path / "out").parent

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


def answer(page, name):
    page.fill("#answer", name)
    page.keyboard.press("Enter")


def lines(page, count):
    """Wait until there are so many decisions, and return them."""
    until(page, "(n) => explore.decisions.lines.length === n", count)
    return page.evaluate("explore.decisions.lines")


def test_lasso_rename_merge_split_and_undo(server, opened, run):
    page = opened(server.url)
    assert page.locator("#overlay img").count() > 0
    page.click("#lasso")
    rows = lasso(page)
    assert len(rows) > 20 and page.locator("#pictures img").count() == min(60, len(rows))
    clusters = server.curation.clusters[rows]
    page.click("#new")
    answer(page, "by hand")
    lines(page, 1)
    curation = Curation.open(run)
    made = next(k for k, name in curation.names.items() if name == "by hand")
    assert sorted(rows) == [i for i, k in enumerate(curation.clusters) if k == made]
    page.keyboard.press("Escape")
    other = next(k for k in curation.sizes if k != made)
    tick(page, other)
    page.click("#rename")
    answer(page, "<b>x</b>")
    lines(page, 2)
    page.wait_for_selector("#clusters b:has-text('<b>x</b>')")
    tick(page, made)
    page.click("#merge")
    merged = lines(page, 3)[-1]
    assert merged["clusters"] == sorted([other, made])
    assert Curation.open(run).names == {other: "<b>x</b>"}
    page.click("#undo")
    lines(page, 4)
    page.locator("#history button").last.click()  # the oldest
    lines(page, 5)
    again = Curation.open(run)
    assert (again.clusters[rows] == clusters).all() and len(again.lines) == 5
    assert page.evaluate("[...explore.decisions.clusters]") == again.clusters.tolist()


def test_hover_click_neighbors_search_and_colors(server, opened):
    page = opened(server.url)
    box = page.locator("#canvas").bounding_box()
    x, y = page.evaluate("explore.plot.screen(5)")
    page.mouse.move(box["x"] + x, box["y"] + y)
    page.wait_for_selector("#tip:not([hidden]) img")
    page.mouse.click(box["x"] + x, box["y"] + y)
    until(page, "() => document.querySelectorAll('#pictures button').length === 12")
    row = page.evaluate("explore.chosen[0]")
    shown = page.locator("#pictures button").evaluate_all("all => all.map((b) => +b.dataset.row)")
    assert shown == server.neighbors(row)
    nearest = str(server.samples.column("file")[shown[0]])
    until(page, "(name) => document.querySelector('#pictures button').title === name", nearest)
    name = str(server.samples.column("file")[row])
    assert name in page.locator("#sample").inner_text()
    page.fill("#query", name)
    page.keyboard.press("Enter")
    until(page, "() => document.getElementById('status').textContent === '1 found'")
    assert page.evaluate("[...explore.chosen]") == [row]
    page.evaluate("""() => { const menu = document.getElementById("color");
      return Promise.all([...menu.options].map(({ value }) => {
        menu.value = value; return menu.onchange(); })); }""")
    assert page.evaluate("explore.plot.codes === explore.plot.newest")


@pytest.mark.slow
def test_by_keys(server, opened, run):
    page = opened(server.url)
    page.keyboard.press("?")
    assert page.locator("#shortcuts").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#shortcuts").is_visible()
    page.keyboard.press("/")
    page.keyboard.type("png")
    page.keyboard.press("Enter")
    until(page, "() => explore.chosen.length === explore.meta.samples")
    page.locator("#query").blur()
    page.keyboard.press("Escape")
    until(page, "() => explore.chosen.length === 0")
    page.wait_for_selector("#clusters .open")  # the list knows its clusters, so that they open
    page.keyboard.press("g")
    page.keyboard.press("Enter")
    page.wait_for_selector("#cluster h2")  # the page of the cluster has been read
    assert page.evaluate("explore.chosen.length > 0")
    page.keyboard.press("x")
    lines(page, 1)
    page.keyboard.press("u")
    lines(page, 2)
    page.keyboard.press("g")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    page.keyboard.press("r")
    answer(page, "typed")
    lines(page, 3)
    assert list(Curation.open(run).names.values()) == ["typed"]
    page.keyboard.press("t")
    assert lines(page, 4)[-1]["do"] == "split"


def test_the_cookie_opens_the_page_again_and_no_other_browser(server, opened):
    page = opened(server.url)
    page.goto(f"http://127.0.0.1:{server.server_port}/")
    page.wait_for_selector("body[data-ready]")
    other = page.context.browser.new_context().new_page()
    response = other.goto(f"http://127.0.0.1:{server.server_port}/")
    assert response.status == 403 and "printed, with its token" in other.inner_text("body")
    other.context.close()


@pytest.mark.slow
def test_frames_and_dots_follow_color_and_selection(page):
    frames = """() => [...document.querySelectorAll("#overlay .thumb")].map((t) =>
      t.style.borderColor)"""
    before = page.evaluate(frames)
    page.select_option("#color", "confidence")
    until(page, f"(before) => JSON.stringify(({frames})()) !== JSON.stringify(before)", before)
    visibility = "getComputedStyle(document.querySelector('#clusters i')).visibility"
    assert page.evaluate(visibility) == "hidden"
    page.select_option("#color", "cluster")
    until(page, f"(before) => JSON.stringify(({frames})()) === JSON.stringify(before)", before)
    page.locator("#clusters button").first.click()
    dim = "() => document.querySelectorAll('#overlay .dim').length"
    until(page, dim)
    page.keyboard.press("Escape")
    until(page, f"() => !({dim})()")


def test_a_refusal_is_shown_and_nothing_changes(server, page):
    tick(page, *sorted(server.curation.sizes)[:2])
    page.evaluate("""() => { window.usual = window.fetch;  // the page asks for news meanwhile
      window.fetch = (at, ...more) => `${at}`.startsWith("api/curation")
        ? Promise.reject(new Error("no network")) : window.usual(at, ...more); }""")
    page.click("#merge")
    page.wait_for_selector("#status.bad")
    assert page.locator("#status").inner_text() == "no network"
    assert page.evaluate("explore.decisions.sizes.size") == len(server.curation.sizes)
    page.evaluate("() => { window.fetch = window.usual; }")


def test_the_static_page_shows_and_changes_nothing(run, static, opened):
    page = opened(static.replace("explore.html", ""))
    assert page.url.endswith("/explore.html")
    assert page.locator("#overlay .thumb").count() > 0
    page.wait_for_selector("#clusters b:has-text('zeros')")
    page.keyboard.press("l")
    lasso(page)
    until(page, "() => document.querySelectorAll('#pictures .thumb').length > 1")
    assert page.locator(".edit:visible").count() == 0
    page.keyboard.press("x")
    page.locator("#pictures button").first.click()
    until(page, "() => explore.chosen.length === 1")
    assert len(page.evaluate("explore.decisions.lines")) == 1


def test_many_samples_are_thinned_out_while_the_map_moves(page):
    n, moving = page.evaluate("""async () => {
      const { plot } = explore, { map } = plot, n = plot.x.length, filter = map.filter;
      plot.some = [...Array(n).keys()].filter((row) => row % 4 === 0);
      const shown = new Promise((done) => { // the page may show all again before this one looks
        setTimeout(done, 60_000, n);
        map.filter = (rows, ...more) => { done(rows.length); return filter(rows, ...more); }; });
      plot.home();
      const moving = await shown;
      map.filter = filter;
      return [n, moving]; }""")
    assert moving == -(-n // 4)
    until(page, "() => !explore.plot.map.get('isPointsFiltered')")


def test_failed_requests(page):
    page.route("**/data/label.i32", lambda route: route.fulfill(body=b"1234"))
    message = page.evaluate("""() => import("./data.js").then((data) =>
      data.readBytes("data/label.i32", 8).catch((error) => error.message))""")
    assert message == "data/label.i32 has 4 bytes; expected 8: reload the page"
    refusal = page.evaluate("""async () => {
      const usual = window.fetch, { post } = await import("./data.js");
      window.fetch = async () =>
        new Response(JSON.stringify({ error: "refused" }), { status: 400 });
      const message = await post("api/curation", {}).catch((error) => error.message);
      window.fetch = usual;
      return message; }""")
    assert refusal == "refused"


@pytest.mark.slow
def test_the_list_shows_faces_and_sorts(server, opened):
    page = opened(server.url)
    page.wait_for_selector("#clusters button img")
    known = page.evaluate("[...explore.clusters.about.values()]")
    first = page.locator("#clusters li").first
    assert first.locator("img").get_attribute("src") == f"api/image/{known[0]['typical'][0]}"
    assert first.locator(".numbers small").first.inner_text() == f"{known[0]['confidence']:.2f}"
    page.select_option("#sort-clusters", "confidence")
    shown = page.locator("#clusters li > button:not(.open)").evaluate_all(
        "all => all.map((b) => +b.dataset.of)"
    )
    assert shown == [one["cluster"] for one in sorted(known, key=lambda one: one["confidence"])]


def test_the_page_of_a_cluster_compares_moves_and_merges(server, opened, run):
    page = opened(server.url)
    page.wait_for_selector("#clusters .open")
    page.keyboard.press("g")
    page.keyboard.press("Enter")
    page.wait_for_selector("#cluster article")
    k = page.evaluate("explore.clusters.page.cluster")
    nearest = f"fetch('api/cluster/{k}').then((answer) => answer.json()).then((k) => k.nearest[0])"
    near = page.evaluate(nearest)
    assert not page.locator("#clusters").is_visible()
    article = page.locator("#cluster article").first
    shown = article.locator(".pictures button").evaluate_all(
        "all => all.map((b) => +b.dataset.row)"
    )
    assert shown == near["between"]
    article.get_by_text("Select the ones between").click()
    until(page, "(n) => explore.chosen.length === n", len(shown))
    article.get_by_text("selected there").click()
    assert lines(page, 1)[0]["into"] == near["cluster"]
    assert (Curation.open(run).clusters[shown] == near["cluster"]).all()
    other = page.evaluate(f"fetch('api/cluster/{k}').then((a) => a.json())")["nearest"][0][
        "cluster"
    ]
    page.wait_for_selector(f"#cluster [data-of='near {other}']:nth-of-type(1)")
    article.get_by_text("Merge with it").click()
    assert sorted([k, other]) == lines(page, 2)[-1]["clusters"]
    until(page, "(n) => explore.clusters.page.cluster === n", min(k, other))
    page.keyboard.press("Escape")
    page.wait_for_selector("#clusters", state="visible")
