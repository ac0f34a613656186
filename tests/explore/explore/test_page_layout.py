"""The page's layout in a real Chromium: sizes, positions, large pictures, custom columns."""

import csv
import shutil

import pytest

from ssl_kd.vision.samples import Samples
from ssl_kd_explore.explore.server import ExploreServer
from ssl_kd_explore.metadata import join_table
from tests.explore.explore.chromium import settle, until
from tests.explore.explore.conftest import answering

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CAMERAS = ("X100V", "Pixel", "old phone")
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def serving(mapped_run, tmp_path_factory):
    """A run with the own columns `price` and `camera`."""
    run = shutil.copytree(mapped_run, tmp_path_factory.mktemp("own") / "copy")
    files = Samples(run).column("file").tolist()
    table = run.parent / "prices.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["file", "price", "camera"])
        for row, name in enumerate(files[:-1]):  # the last one has no price
            lines.writerow([name, 10 * row, CAMERAS[row % 3]])
    join_table(Samples(run), table)
    with ExploreServer(Samples(run)) as server, answering(server):
        yield server


def box(page, selector):
    return page.locator(selector).first.bounding_box()


def is_on_top(element):
    """Whether a click in the middle of an element reaches it."""
    return element.evaluate("""(e) => { const { x, y, width, height } = e.getBoundingClientRect();
      const top = document.elementFromPoint(x + width / 2, y + height / 2);
      return e.contains(top); }""")


@pytest.mark.slow
def test_a_picture_opens_large_with_its_path_and_the_next_ones(server, opened):
    page = opened(server.url)
    page.evaluate("explore.select([3, 5, 8])")
    page.locator("#view").focus()
    page.keyboard.press("v")
    image = page.locator("#lightbox img")
    path = page.locator("#lightbox-path")
    until(page, "() => document.querySelector('#lightbox-path').textContent")
    assert path.inner_text() == str(server.samples.image_file(3).absolute())
    assert image.get_attribute("src").startswith("api/image/3?side=")
    assert page.locator("#lightbox-place").inner_text() == "1 of 3"
    until(page, "() => document.querySelector('#lightbox img').complete")
    assert min(image.bounding_box()[side] for side in ("width", "height")) > 600
    assert page.locator("#lightbox-previous").is_disabled()
    page.keyboard.press("ArrowRight")
    until(page, "() => document.querySelector('#lightbox-place').textContent === '2 of 3'")
    page.click("#lightbox-next")
    until(page, "(name) => document.querySelector('#lightbox-path').textContent.endsWith(name)",
          server.samples.column("file")[8])  # fmt: skip
    assert page.locator("#lightbox-next").is_disabled()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#lightbox-copy")
    until(page, "() => document.querySelector('#lightbox-copy').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == path.inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#lightbox").is_visible()
    assert page.evaluate("document.activeElement.id") == "view"
    assert page.evaluate("[...explore.chosen]") == [3, 5, 8]  # Escape closed the picture alone


@pytest.mark.slow
def test_the_pictures_that_follow_are_those_of_the_open_table(server, opened):
    page = opened(server.url)
    page.evaluate("explore.dock.filter({ price: '0..50' })")
    page.keyboard.press("b")
    page.locator("#table tbody tr").nth(2).dblclick()
    page.wait_for_selector("#lightbox[open]")
    assert page.locator("#lightbox-place").inner_text() == "3 of 6"
    page.keyboard.press("Escape")
    page.locator("#sample .zoom").click()
    page.wait_for_selector("#lightbox[open]")
    assert page.locator("#lightbox-place").inner_text() == "3 of 6"


@pytest.mark.slow
def test_excluded_samples_are_hidden_until_they_are_wanted(server, opened, run):
    page = opened(server.url)
    n = len(server.samples)
    drawn = """() => { const { plot, meta } = explore;
      const kept = plot.map.get("isPointsFiltered") ? plot.map.get("filteredPoints") : null;
      return kept?.length ?? meta.samples; }"""
    assert not page.locator("#excluded").is_visible()
    page.evaluate("explore.select([2, 4, 6])")
    page.keyboard.press("x")
    page.wait_for_selector("#excluded:text-is('3 excluded')")
    until(page, f"(n) => ({drawn})() === n", n - 3)
    assert page.evaluate("explore.chosen.length") == 0
    page.keyboard.press("b")
    until(page, "(n) => explore.dock.rows.length === n", n - 3)
    assert page.locator("#shown").inner_text() == f"{n - 3} of {n - 3} samples"
    page.evaluate("explore.dock.filter({ excluded: '=yes' })")  # someone asks for them
    until(page, "() => explore.dock.rows.length === 3")
    page.evaluate("explore.dock.filter({})")
    page.click("#excluded")
    until(page, f"(n) => ({drawn})() === n && explore.dock.rows.length === n", n)
    assert page.get_attribute("#excluded", "aria-pressed") == "true"
    again = opened(server.url)
    until(again, f"(n) => ({drawn})() === n", n - 3)


@pytest.mark.parametrize("size", [{"width": 1200, "height": 800}, PHONE])
@pytest.mark.slow
def test_selecting_a_cluster_does_not_move_the_list(server, opened, size):
    page = opened(server.url)
    page.set_viewport_size(size)
    page.wait_for_selector("#clusters img")
    last = page.locator("#clusters li > button:not(.open)").last
    last.scroll_into_view_if_needed()
    before = last.bounding_box()
    last.click()
    until(page, "() => document.querySelectorAll('#pictures button').length > 1")
    assert last.bounding_box() == pytest.approx(before, abs=1)
    assert page.evaluate("explore.chosen.length") > 1


@pytest.mark.slow
def test_a_long_path_is_cut_in_the_middle(page_of_long_paths):
    page, path = page_of_long_paths
    shown = page.locator("#table .path").first
    assert shown.get_attribute("title") == path and shown.inner_text() == path
    cell, name = shown.bounding_box(), shown.locator("span").last
    assert name.inner_text() == path.rpartition("/")[2]
    end = name.bounding_box()
    assert end["x"] + end["width"] <= cell["x"] + cell["width"] + 1
    assert name.evaluate("(e) => e.scrollWidth <= e.clientWidth")
    assert shown.locator("span").first.evaluate("(e) => e.scrollWidth > e.clientWidth")


@pytest.fixture
def page_of_long_paths(server, opened):
    page = opened(server.url)
    path = f"{'holiday in the north/' * 4}IMG_2024_00044.jpg"
    page.evaluate(
        """(path) => { const usual = window.fetch; window.fetch = async (at, ...more) => {
      const answer = await usual(at, ...more);
      if (!`${at}`.startsWith("api/cells")) return answer;
      const { columns, rows } = await answer.json();
      for (const cells of rows) if (columns[0] === "file") cells[0] = path;
      return new Response(JSON.stringify({ columns, rows })); }; }""",
        path,
    )
    page.keyboard.press("b")
    page.wait_for_selector("#table .path")
    return page, path


@pytest.mark.slow
def test_the_map_keeps_its_size_beside_the_table(server, opened):
    page = opened(server.url)
    page.set_viewport_size({"width": 1400, "height": 900})
    settle(page)
    before, place = box(page, "#canvas"), "() => explore.plot.screen(9)"
    x, y = page.evaluate(place)
    page.keyboard.press("b")
    page.wait_for_selector("#table tbody td")
    settle(page)
    after = box(page, "#canvas")
    assert after["height"] == before["height"]
    assert after["width"] >= after["height"] - 1  # the whole map, which is a square
    at = page.evaluate(place)
    shift = (after["width"] - before["width"]) / 2
    assert at == pytest.approx([x + shift, y], abs=1)  # drawn as large as before


@pytest.mark.slow
def test_own_columns_color_the_map(server, opened):
    page = opened(server.url)
    own = page.locator("#color optgroup option").all_inner_texts()
    assert own == ["price", "camera"]
    page.select_option("#color", "price")
    until(page, "() => document.body.dataset.color === 'price'")
    codes = page.evaluate("[...explore.plot.codes]")
    assert codes[0] == 1 and codes[-1] == 0  # the lowest price; no price
    assert codes[:-1] == sorted(codes[:-1]) and max(codes) == 63
    legend = page.locator("#legend").inner_text()
    assert "price" in legend and "no value" in legend and page.locator("#legend .ramp").count() == 1
    page.select_option("#color", "camera")
    until(page, "() => document.body.dataset.color === 'camera'")
    assert all(camera in page.locator("#legend").inner_text() for camera in CAMERAS)


@pytest.mark.slow
def test_small_pictures_fill_squares(server, opened):
    page = opened(server.url)
    page.locator("#clusters li > button:not(.open)").first.click()
    page.wait_for_selector("#pictures img")
    for image in page.locator("#overlay img, #pictures img, #clusters img").all():
        assert image.evaluate("(e) => getComputedStyle(e).objectFit") == "cover"
        sides = image.bounding_box()
        assert sides["width"] == pytest.approx(sides["height"], abs=1)


@pytest.mark.slow
def test_the_page_bears_the_name_of_the_data_and_explains_its_numbers(server, opened):
    page = opened(server.url)
    assert page.title() == "photos" and page.inner_text("#title").startswith("photos")
    captions = page.locator("#panel .caption").all_inner_texts()
    assert [text.split(":")[0].split()[-1] for text in captions] == ["confidence", "agreement"]


@pytest.mark.slow
def test_on_a_phone_nothing_covers_the_map(server, opened):
    page = opened(server.url)
    page.set_viewport_size(PHONE)
    settle(page)
    canvas, bar, panel = (box(page, name) for name in ("#canvas", "#dock", "#panel"))
    assert bar["y"] >= canvas["y"] + canvas["height"] - 1
    assert panel["y"] >= bar["y"] + bar["height"] - 1
    places = page.evaluate("explore.meta.examples.map((row) => explore.plot.screen(row))")
    assert all(0 < x < canvas["width"] for x, _ in places)  # the map fits
    page.click("#show-table")
    page.wait_for_selector("#table tbody td")
    assert box(page, "#canvas") == canvas


@pytest.mark.slow
def test_the_undo_button_names_its_decision(server, opened, run):
    page = opened(server.url)
    assert page.locator("#undo").is_disabled()
    for name in ("one", "two"):
        page.evaluate("(name) => explore.decide({ do: 'rename', cluster: 0, name })", name)
    until(page, "() => explore.decisions.lines.length === 2")
    assert page.get_by_role("button", name="Undo").count() == 1
    assert "“two”" in page.get_attribute("#undo", "title")
    assert page.locator("#history button").count() == 1  # of the earlier one
    page.click("#undo")
    until(page, "() => explore.nameOf(0) === 'one'")


def test_the_actions_cover_no_button_of_a_cluster_page(server, opened):
    page = opened(server.url)
    page.wait_for_selector("#clusters .open")
    page.locator("#clusters .open").first.click()
    page.wait_for_selector("#cluster article")
    until(page, "() => explore.chosen.length > 1")
    for button in page.locator("#cluster button, #selected button:visible").all():
        button.scroll_into_view_if_needed()
        assert is_on_top(button), button.get_attribute("title")
