"""Texts and sounds in the explorer: words as names, whole samples, and search by meaning."""

import json
import shutil
import urllib.parse

import numpy as np
import pytest
from pyarrow import parquet

from ssl_kd.core.errors import InputError
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.teachers.text_side import load_text_side
from ssl_kd_explore.decisions import Curation
from ssl_kd_explore.explore import text_search
from ssl_kd_explore.explore.server import ExploreServer
from ssl_kd_explore.explore.text_search import TextSearch
from ssl_kd_explore.run import Run
from tests.explore.explore.chromium import until
from tests.explore.explore.conftest import answering, serving_copy
from tests.explore.explore.test_server import ask
from tests.media_runs import HOSTILE, RATE, TOPICS


@pytest.fixture
def texts(text_run, tmp_path):
    return shutil.copytree(text_run, tmp_path / "texts")


@pytest.fixture(scope="module")
def text_server(text_run, tmp_path_factory):
    with serving_copy(text_run, tmp_path_factory.mktemp("texts")) as server:
        yield server


@pytest.fixture(scope="module")
def sound_server(sound_run, tmp_path_factory):
    with serving_copy(sound_run, tmp_path_factory.mktemp("sounds")) as server:
        yield server


def search(server, text):
    status, content, _ = ask(server, "GET", f"/api/search?text={urllib.parse.quote(text)}")
    return status, json.loads(content)


def labels_of(samples, rows):
    return samples.column("label")[rows].tolist()


# --- words as names -------------------------------------------------------------------------------


def test_clusters_without_a_name_have_words_of_their_texts(texts):
    samples = Samples(texts)
    curation = Curation(samples)
    label_of = dict(zip(samples.column("cluster"), samples.column("label"), strict=True))
    assert set(curation.words) == {0, 1, 2}
    for cluster, words in curation.words.items():
        assert {*words.split(", ")} < {*TOPICS[label_of[cluster]].split()}
    words = curation.words[1]
    curation.rename(0, "Mine")
    assert 0 not in curation.words and curation.words[1] == words
    curation.rename(0, words.upper())
    assert curation.words[1] == f"{words} (1)"  # no two clusters look alike
    curation.merge([1, 2], name="")
    assert set(curation.words) == {1} and len({*curation.words[1].split(", ")}) == 3
    curation.merge([0, 1], name="")
    assert curation.words == {}  # words tell a cluster apart from another one


def test_words_follow_the_samples_that_move(texts):
    curation = Curation(Samples(texts))
    before = curation.words[0]
    rows = np.flatnonzero(curation.clusters == 0)
    number = curation.decide({"do": "move", "rows": rows.tolist(), "new": None})["new"]
    assert curation.words[number] == before and 0 not in curation.words


def test_other_samples_have_no_words(sound_run):
    assert Curation(Samples(sound_run)).words == {}


def test_the_export_names_clusters_by_words_but_keeps_names_of_the_user(texts, tmp_path):
    run = Run.open(texts)
    run.curation.rename(2, "Mine")
    out = run.export("parquet", tmp_path / "out.parquet")
    table = parquet.read_table(out)
    names = dict(zip(table["cluster"].to_pylist(), table["cluster_name"].to_pylist(), strict=True))
    assert names == run.curation.words | {2: "Mine"} and len(names) == 3
    assert ", " in names[0]
    first, _, last = run.clusters
    assert (first.name, first.words, last.name, last.words) == ("", names[0], "Mine", "")
    assert names[0] in repr(first) and names[0] in run._repr_html_()


# --- the server -----------------------------------------------------------------------------------


def test_texts_are_sent_as_they_are(text_server):
    status, content, _ = ask(text_server, "GET", "/api/media/0")
    shown = json.loads(content)
    assert status == 200 and shown["kind"] == "text" and shown["text"].endswith(HOSTILE)
    meta = json.loads(text_server.data["meta.json"])
    assert meta["media"] == {"kind": "text", "column": "body"} and meta["searches_texts"]
    decisions = json.loads(ask(text_server, "GET", "/data/decisions.json")[1])
    assert set(decisions["words"]) == {"0", "1", "2"} and decisions["names"] == {}


def test_sounds_of_a_folder_are_sent_as_they_are(sound_server, tmp_path):
    samples = sound_server.samples
    status, content, headers = ask(sound_server, "GET", "/api/media/5")
    assert status == 200 and headers["Content-Type"] == "audio/wav"
    data, place = samples.row_of_data(5)
    assert content == data.file(place).read_bytes() and len(content) > 4 * RATE
    assert not json.loads(sound_server.data["meta.json"])["searches_texts"]
    file = data.file(place)
    kept = file.read_bytes()
    file.write_bytes(kept[:-2])  # another recording now
    try:
        status, content, _ = ask(sound_server, "GET", "/api/media/5")
        assert status == 400 and b"has changed since the run" in content
    finally:
        file.write_bytes(kept)


# --- search ---------------------------------------------------------------------------------------


def test_a_query_finds_texts_of_its_topic(text_server):
    status, found = search(text_server, "orbit comet rocket")
    assert status == 200 and len(found["rows"]) == 48
    assert set(labels_of(text_server.samples, found["rows"][:20])) == {"space"}
    assert found["similarity"] == sorted(found["similarity"], reverse=True)


def test_the_similarity_is_the_cosine_of_the_embeddings(texts):
    samples = Samples(texts)
    texts_of = [samples.text(row) for row in range(len(samples))]
    found = TextSearch(samples).find(str(texts_of[7]))
    assert found[0][1] == pytest.approx(1, abs=1e-4)
    assert sorted(str(texts_of[found[0][0]])) == sorted(str(texts_of[7]))
    embeddings = samples.embeddings(range(len(samples))).double()
    units = embeddings / embeddings.norm(dim=1, keepdim=True)
    expected = units @ units[7]
    assert [s for _, s in found] == pytest.approx(
        expected[[r for r, _ in found]].tolist(), abs=2e-3
    )
    assert sorted(expected.tolist())[-48] == pytest.approx(found[-1][1], abs=2e-3)


def test_blocks_do_not_change_what_is_found(texts, monkeypatch):
    whole = TextSearch(Samples(texts)).find("sail and wind")
    monkeypatch.setattr(text_search, "BLOCK", 7)
    parts = TextSearch(Samples(texts)).find("sail and wind")
    assert len({row for row, _ in parts}) == 48  # equal similarities may come in another order
    assert [s for _, s in parts] == pytest.approx([s for _, s in whole], abs=1e-6)


def test_the_teacher_is_loaded_once_and_with_the_first_query(texts, monkeypatch):
    loads = []
    real = load_text_side
    monkeypatch.setattr(text_search, "load_text_side", lambda *a: loads.append(a) or real(*a))
    with ExploreServer(Samples(texts)) as server, answering(server):
        assert ask(server, "GET", "/api/media/1")[0] == 200 and not loads
        assert search(server, "soup")[0] == search(server, "anchor")[0] == 200
    assert len(loads) == 1


@pytest.mark.parametrize("text", ["", "  ", "x" * 2001])
def test_queries_of_no_or_too_many_characters_are_refused(text_server, text):
    status, answer = search(text_server, text)
    assert status == 400 and "expected 1 to 2,000" in answer["error"]


def test_a_teacher_without_texts_is_named(sound_server):
    status, answer = search(sound_server, "a high tone")
    assert status == 404 and "tests.media_runs.Spectrum' knows no texts" in answer["error"]


def test_another_teacher_than_that_of_the_run_is_refused(texts, monkeypatch):
    monkeypatch.setattr("tests.media_runs.WordCounts.transform_id", "other words")
    with pytest.raises(InputError, match="has changed since it embedded the samples"):
        TextSearch(Samples(texts)).find("soup")


# --- the page -------------------------------------------------------------------------------------


def test_the_page_shows_texts_and_searches_by_meaning(text_server, opened):
    page = opened(text_server.url)
    page.wait_for_selector("#clusters q")
    names = page.locator("#clusters b").all_inner_texts()
    assert len(names) == 3 and all(", " in name for name in names)
    page.select_option("#search-by", "meaning")
    page.fill("#query", "telescope galaxy")
    page.press("#query", "Enter")
    title = "48 samples nearest to “telescope galaxy”"
    until(page, "t => document.getElementById('selected-title').textContent === t", title)
    rows = search(text_server, "telescope galaxy")[1]["rows"]
    assert page.evaluate("[...explore.chosen]") == rows
    page.click("#show-gallery")
    page.wait_for_selector("#gallery [role=option]:has-text('and')")
    tiles = page.locator("#gallery [role=option]")
    assert tiles.first.get_attribute("id") == f"tile-{rows[0]}"
    assert tiles.first.inner_text().strip() == text_server.samples.text(rows[0]).strip()
    page.evaluate("explore.view(0)")
    page.wait_for_selector("#lightbox .media")
    assert page.locator("#lightbox .media").inner_text().endswith(HOSTILE)
    page.keyboard.press("Escape")


def test_a_failed_search_is_explained_on_the_page(texts, browser, monkeypatch):
    def fail(*args):
        raise InputError("the weights of the teacher are not there")

    monkeypatch.setattr(text_search, "load_text_side", fail)
    with ExploreServer(Samples(texts)) as server, answering(server):
        page = browser.new_page()
        page.goto(server.url)
        page.wait_for_selector("body[data-ready]")
        page.select_option("#search-by", "meaning")
        page.fill("#query", "soup")
        with page.expect_response("**/api/search**") as answer:
            page.press("#query", "Enter")
        assert answer.value.status == 400
        until(page, "() => document.getElementById('status').textContent.startsWith('the weights')")
        page.close()


def test_the_suggested_words_can_be_taken_as_the_name(texts, opened):
    with ExploreServer(Samples(texts)) as server, answering(server):
        page = opened(server.url)
        words = server.curation.words[0]
        page.evaluate("explore.clusters.select(0)")
        page.click("#rename")
        assert page.input_value("#answer") == words
        page.keyboard.press("Enter")
        until(page, "w => explore.decisions.names[0] === w", words)
    assert Curation(Samples(texts)).names == {0: words}


def test_the_page_plays_sounds(sound_server, opened):
    page = opened(sound_server.url)
    assert page.locator("#search-by").is_hidden()
    page.click("#show-gallery")
    page.wait_for_selector("#gallery .play")
    button = page.locator("#gallery .play").first
    button.click()
    until(page, "() => document.querySelector('#gallery .play').textContent === '◼'")
    button.click()
    until(page, "() => document.querySelector('#gallery .play').textContent === '▶'")
    page.locator("#gallery [role=option]").nth(1).click(position={"x": 120, "y": 20})
    page.wait_for_selector("#sample audio")
    page.keyboard.press("p")
    until(page, "() => !document.querySelector('#sample audio').paused")
    page.keyboard.press("p")
    until(page, "() => document.querySelector('#sample audio').paused")
    page.keyboard.press("v")
    page.wait_for_selector("#lightbox audio")
    page.keyboard.press("Escape")
