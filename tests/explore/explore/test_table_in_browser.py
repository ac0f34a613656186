"""Table, pictures and chart in a real Chromium: sort, filter, search, select, decide together."""

import csv

import numpy as np
import pytest

from ssl_kd_explore.columns import Columns
from ssl_kd_explore.decisions import Curation
from tests.explore.explore.chromium import until

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
ROWS = "#table tbody tr"


@pytest.fixture
def columns(server):
    return Columns(server.samples, server.curation)


@pytest.fixture
def page(server, opened):
    """A page with an open table."""
    page = opened(server.url)
    page.set_viewport_size({"width": 1600, "height": 800})  # most columns are in view
    page.keyboard.press("b")
    page.wait_for_selector(f"{ROWS} img")
    return page


def chosen(page):
    return page.evaluate("[...explore.chosen]")


def wait_for(page, rows):
    """Wait until these samples are selected, in any order."""
    until(page, "(rows) => `${[...explore.chosen].sort((a, b) => a - b)}` === `${rows}`",
          sorted(map(int, rows)))  # fmt: skip


def shown(page, name):
    """The cells in view of a column."""
    place = "(name) => explore.dock.views.table.columns.findIndex((column) => column.name === name)"
    at = page.evaluate(place, name)
    return page.locator(f"{ROWS} td:nth-of-type({at + 1})").all_inner_texts()


def filter_by(page, name, text):
    page.click(f'input[aria-label="Filter {name}"]')
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type(text)


def tiles(page):
    rows = "all => all.map((tile) => +tile.id.split('-')[1])"
    return page.locator("#gallery [role=option]").evaluate_all(rows)


@pytest.mark.slow
def test_a_header_sorts_up_down_and_not_at_all(page, columns):
    for descending in (False, True):
        page.click('#table button:text-is("confidence")')
        expected = columns.find({}, "confidence", descending=descending).tolist()
        until(page, "(rows) => `${explore.dock.rows}` === `${rows}`", expected)
        until(page, "() => document.querySelector('#table [aria-sort$=cending]')")
        files = columns.cells(expected[:4], ["file"])
        until(page, "(file) => document.querySelector('#table td').textContent === file",
              files[0][0])  # fmt: skip
        assert [[file] for file in shown(page, "file")[:4]] == files
    page.click('#table button:text-is("confidence")')
    until(page, "() => explore.dock.rows.every((row, at) => row === at)")


def test_filters_select_on_the_map(page, columns, server):
    low = f"<{np.median(server.samples.column('confidence')):.3f}"
    filter_by(page, "confidence", low)
    wait_for(page, columns.find({"confidence": low}))
    filter_by(page, "split", "=train")
    both = columns.find({"confidence": low, "split": "=train"})
    wait_for(page, both)
    assert page.locator("#shown").inner_text() == f"{len(both)} of {len(server.samples)} samples"
    page.locator(ROWS).nth(1).click()
    wait_for(page, both[1:2])
    page.click("#select-shown")
    wait_for(page, both)
    page.click("#clear-filters")
    wait_for(page, [])
    assert page.input_value('input[aria-label="Filter split"]') == ""


@pytest.mark.slow
def test_a_wrong_filter_is_marked_and_an_unfinished_one_waits(page, columns):
    page.evaluate("""() => { window.usual = window.fetch; window.fetch = async () =>
      new Response('{"error": "expected a number"}', { status: 400 }); }""")
    filter_by(page, "confidence", "much")
    page.wait_for_selector("#status.bad:has-text('expected a number')")
    assert page.locator('#table input[aria-invalid="true"]').count() == 1
    page.evaluate("() => { window.fetch = window.usual; }")
    page.keyboard.press("Control+a")
    page.keyboard.type("<")
    page.wait_for_timeout(200)
    page.keyboard.type("0.8")
    wait_for(page, columns.find({"confidence": "<0.8"}))


def test_arrow_keys_go_on_to_the_next_row_that_is_not_checked(page):
    page.evaluate("() => explore.dock.filter({ checked: '=' })")
    until(page, "() => explore.chosen.length > 2")
    page.locator(ROWS).nth(1).click()
    page.keyboard.press("c")
    until(page, "() => explore.dock.rows[1] === 2")
    page.keyboard.press("ArrowDown")
    wait_for(page, [2])


@pytest.mark.slow
def test_search_covers_all_text_even_if_the_table_is_closed(page, columns):
    page.keyboard.press("b")
    page.fill("#query", "digit 1")
    page.keyboard.press("Enter")
    rows = columns.find({"": "digit 1"})
    wait_for(page, rows)
    assert len(rows) > 0
    assert page.locator("#status").inner_text() == f"{len(rows)} found"
    page.fill("#query", "nowhere")
    page.keyboard.press("Enter")
    until(
        page, "() => document.getElementById('status').textContent === 'Nothing contains “nowhere”'"
    )


@pytest.mark.slow
def test_rows_are_selected_by_clicks_and_keys(page):
    page.locator(ROWS).nth(1).click()
    wait_for(page, [1])
    page.locator(ROWS).nth(3).click(modifiers=["Shift"])
    wait_for(page, [1, 2, 3])
    page.locator(ROWS).nth(2).click(modifiers=["Control"])
    wait_for(page, [1, 3])
    page.keyboard.press("ArrowDown")
    wait_for(page, [3])
    page.keyboard.press("Shift+ArrowDown")
    wait_for(page, [3, 4])
    assert page.locator(f"{ROWS}[aria-selected=true]").count() == 2


@pytest.mark.slow
def test_map_table_pictures_and_chart_share_one_selection(page, columns, server):
    cluster = max(server.curation.sizes, key=server.curation.sizes.get)
    typical = columns.find({"cluster": f"={cluster}"}, "confidence", descending=True).tolist()
    page.click(f'#clusters [data-of="{cluster}"]')
    until(page, "(n) => explore.dock.shown().length === n", len(typical))
    page.click("#show-gallery")
    page.wait_for_selector("#gallery img")
    assert tiles(page) == typical[: len(tiles(page))] and len(tiles(page)) < len(typical)
    page.locator("#gallery [role=option]").nth(2).click()
    wait_for(page, [typical[2]])
    page.keyboard.press("Shift+ArrowRight")
    wait_for(page, typical[2:4])
    page.evaluate("document.getElementById('gallery').scrollTop = 1e9")
    until(page, "(last) => document.getElementById(`tile-${last}`)?.title", typical[-1])
    assert page.evaluate("explore.dock.app.meta.columns.constructor === undefined")  # may be a name
    page.click("#show-chart")
    page.select_option("#chart-column", "confidence")
    page.click(f'#chart [data-cluster="{cluster}"]')
    wait_for(page, typical)
    assert page.get_attribute(f'#chart [data-cluster="{cluster}"]', "aria-pressed") == "true"
    clusters = [str(one["cluster"]) for one in columns.chart("label")["clusters"]]
    page.select_option("#chart-column", "label")
    page.wait_for_selector(".track.stack")
    drawn = page.locator("#chart button").evaluate_all("all => all.map((b) => b.dataset.cluster)")
    assert sorted(drawn) == sorted(clusters)


@pytest.mark.slow
def test_the_shown_rows_are_saved_as_a_table(page, server, columns, tmp_path):
    server.curation.rename(0, "=zeros, all")
    filter_by(page, "confidence", "<0.9")
    until(page, "() => explore.dock.rows.length < explore.meta.samples")
    until(page, "() => explore.decisions.names[0]")
    with page.expect_download() as saving:
        page.click("#download")
    saving.value.save_as(tmp_path / "samples.csv")
    with (tmp_path / "samples.csv").open(newline="", encoding="utf-8") as file:
        head, *lines = csv.reader(file)
    rows = columns.find({"confidence": "<0.9"})
    assert head == [*columns.kinds] and [line[0] for line in lines] == [
        file for (file,) in columns.cells(rows.tolist(), ["file"])
    ]
    assert "'=zeros, all" in {line[head.index("cluster")] for line in lines}


def test_two_pages_see_each_others_decisions(page, server, opened):
    other = opened(server.url)
    page.locator(ROWS).nth(1).click()
    page.keyboard.press("c")
    until(other, "() => document.getElementById('status').textContent.includes('1 sample checked')")
    assert server.curation.lines[0]["do"] == "check"
    page.evaluate("document.getElementById('table').scrollLeft = 1e4")
    until(page, "() => document.querySelector('#table tbody').textContent.includes('yes')")
    filter_by(page, "checked", "=yes")
    until(page, "() => explore.dock.rows.length === 1")
    Curation.open(server.samples.path, by="anna").rename(0, "zeros")  # of another process
    until(other, "() => document.getElementById('status').textContent.endsWith('“zeros” by anna')")
    until(page, "() => explore.nameOf(0) === 'zeros'")
    other.keyboard.press("u")
    until(page, "() => explore.nameOf(0) !== 'zeros'")
    until(other, "() => explore.decisions.lines.length === 3")  # it may learn of it after the page
    other.keyboard.press("u")
    until(page, "() => explore.decisions.lines.length === 4")
    until(page, "() => explore.dock.rows.length === 0")
