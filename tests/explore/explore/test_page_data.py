"""The data of the page, and the static page: a folder of plain files that is complete or absent."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from ssl_kd.cli import main
from ssl_kd.core.colors import CLUSTERS, MISSING, RAMP
from ssl_kd.core.errors import InputError
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.decisions import Curation
from ssl_kd_explore.explore import map_of, page_data, write_site
from ssl_kd_explore.explore.spatial_index import spatial_index
from ssl_kd_explore.metadata import join_table
from tests.documents import ROOT
from tests.faults.matrix import row as fault


@pytest.fixture
def run(mapped_run, tmp_path):
    return shutil.copytree(mapped_run, tmp_path / "copy")


def test_the_data_are_those_of_the_run_after_decisions(run, tmp_path):
    samples = Samples(run)
    curation = Curation(samples)
    curation.rename(0, "zeros")
    curation.exclude([3, 4])
    html = write_site(samples, tmp_path / "out")
    page, data = tmp_path / "out", tmp_path / "out" / "data"
    meta = json.loads((data / "meta.json").read_text())
    assert html == page / "explore.html" and meta["samples"] == len(samples)
    assert "url=explore.html" in (page / "index.html").read_text()
    assert 'name="token" content=""' in html.read_text()
    assert all((page / name).is_file() for name in page_data.PAGE_FILES)

    def column(name):
        kind = np.float32 if meta["columns"][name]["kind"] == "number" else np.int32
        return np.fromfile(data / meta["columns"][name]["file"], kind)

    for name in set(samples.levels) - {"cluster"}:
        assert np.array_equal(column(name), samples.column(name))
    assert np.allclose(column("confidence"), samples.column("confidence"))
    assert meta["colors"] == {"clusters": list(CLUSTERS), "missing": MISSING, "ramp": list(RAMP)}
    labels = meta["columns"]["label"]["values"]
    assert [labels[k] for k in column("label")] == list(samples.column("label"))
    files = (data / "files.txt").read_text().split("\n")
    assert files == list(samples.column("file"))
    assert (data / "places.kd").read_bytes() == spatial_index(map_of(samples))
    clusters = np.fromfile(data / "clusters.i32", np.int32)
    assert np.array_equal(clusters, curation.clusters) and (clusters[[3, 4]] == -1).all()
    decisions = json.loads((data / "decisions.json").read_text())
    assert decisions["names"] == {"0": "zeros"}
    assert [line["do"] for line in decisions["lines"]] == ["rename", "exclude"]
    assert decisions["lines"][1]["rows"] == 2 and not decisions["lines"][1]["undone"]


def test_pictures_are_limited_and_where_the_page_looks_for_them(run, tmp_path):
    samples = Samples(run)
    write_site(samples, tmp_path / "out", pictures=40)
    data = tmp_path / "out" / "data"
    meta = json.loads((data / "meta.json").read_text())
    sheets = meta["sheets"]
    assert len(sheets["rows"]) == 40 and set(meta["examples"][:40]) <= set(sheets["rows"])
    sheet = Image.open(data / "sheet_0.webp")
    assert sheet.width == sheets["columns"] * sheets["tile"]
    at, tile = 35, sheets["tile"]
    row, column = divmod(at, sheets["columns"])
    shown = sheet.crop((column * tile, row * tile, (column + 1) * tile, (row + 1) * tile))
    wanted = page_data.square(samples.image(sheets["rows"][at]), tile)
    assert np.array_equal(np.asarray(shown.convert("RGB")), np.asarray(wanted))


def test_own_columns_color_the_static_page_too(run, tmp_path):
    samples = Samples(run)
    files = samples.column("file").tolist()
    lines = [f"{name},{row}.5,{'ab'[row % 2]}" for row, name in enumerate(files)]
    table = tmp_path / "own.csv"
    table.write_text("\n".join(["file,../price,camera", *lines]))  # a name that is no path
    join_table(samples, table)
    data = write_site(Samples(run), tmp_path / "out").parent / "data"
    meta = json.loads((data / "meta.json").read_text())
    assert meta["own"] == ["../price", "camera"] and meta["title"] == "photos"
    price, camera = (meta["columns"][name] for name in meta["own"])
    assert (price["kind"], price["low"]) == ("number", 0.5) and camera["values"] == ["a", "b"]
    assert np.fromfile(data / price["file"], "f4").tolist() == [r + 0.5 for r in range(len(files))]
    assert np.fromfile(data / camera["file"], "i4").tolist() == [r % 2 for r in range(len(files))]


@pytest.mark.parametrize("size", [(900, 300), (300, 900), (20, 10), (1, 1000)])
def test_a_small_picture_is_the_middle_of_the_picture(size):
    picture = Image.new("RGB", size, "red")
    small = page_data.square(picture, 64)
    assert small.size == (64, 64) and small.getpixel((32, 32)) == (255, 0, 0)
    assert page_data.fitted(Image.new("RGB", (900, 300)), 320).size == (320, 107)
    assert page_data.fitted(Image.new("RGB", (100, 50)), 320).size == (100, 50)  # not enlarged


def test_examples_are_sure_samples_in_dense_places(run):
    samples = Samples(run)
    random = np.random.default_rng(0)
    places = np.concatenate([c + 0.02 * random.standard_normal((100, 2)) for c in (-0.5, 0.5)])
    rest = random.uniform(-1, 1, (len(samples) - 200, 2))
    rows = page_data.examples_of(np.concatenate([places, rest]).astype(np.float32), samples)
    assert (rows[0] < 100) != (rows[1] < 100) and max(rows[:2]) < 200
    assert len(set(rows)) == len(rows) <= page_data.EXAMPLES


def test_the_place_of_a_missing_picture_stays_empty(run, tmp_path, monkeypatch, caplog):
    samples = Samples(run)
    image = samples.image

    def without(row):
        if row == 3:
            raise FileNotFoundError("3 is missing")
        return image(row)

    monkeypatch.setattr(samples, "image", without)
    write_site(samples, tmp_path / "out")
    assert "1 pictures cannot be read and stay white; the last: 3 is missing" in caplog.text


@fault(156)
def test_an_existing_folder_is_left_alone_and_a_failure_leaves_nothing(run, tmp_path, monkeypatch):
    samples = Samples(run)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    write_site(samples, tmp_path / "out", pictures=5)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    for name in ("mine", "out"):
        with pytest.raises(InputError, match=f"{name} exists: choose another path"):
            write_site(samples, tmp_path / name)
    monkeypatch.setattr(page_data, "examples_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_site(samples, tmp_path / "new")
    assert before == {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_the_command_writes_it_applies_decisions_and_undoes_them(run, tmp_path, capsys):
    assert main(["explore", str(run), "--static", str(tmp_path / "out")]) == 0
    assert f"Page: {tmp_path / 'out' / 'explore.html'}" in capsys.readouterr().out
    Curation.open(run).rename(0, "zeros")
    (run / "curation.jsonl").rename(tmp_path / "copy.jsonl")
    for message in ("1 new decisions in", "0 new decisions in"):
        assert main(["explore", str(run), "--apply", str(tmp_path / "copy.jsonl")]) == 0
        assert message in capsys.readouterr().out
    assert main(["explore", str(run), "--undo"]) == 0
    assert Curation.open(run).names == {}
    assert main(["explore", str(run), "--undo"]) == 2
    assert "no decision that could be undone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "1"], "arguments are required: RUN"),
        (["RUN", "--colour", "1"], "no flag --colour"),
        (["RUN", "--port", "1", "--static", "x"], "--static: not allowed with argument --port"),
        (["RUN", "--apply", "a", "--undo"], "--undo: not allowed with argument --apply"),
        (["RUN", "--port", "70000"], "port is 70000"),
        (["RUN", "--apply", "nothing.jsonl"], "nothing.jsonl"),
        (["elsewhere"], "elsewhere is not a run folder"),
    ],
)
def test_invalid_arguments_are_one_line(run, words, message, capsys):
    words = [str(run) if word == "RUN" else word for word in words]
    assert main(["explore", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.strip().count("\n") == 0


def test_the_page_is_part_of_the_wheel():
    root = ROOT / "explore"
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brought it")
    project = tomllib.loads((root / "pyproject.toml").read_text())
    globs = project["tool"]["setuptools"]["package-data"]["ssl_kd_explore"]
    packed = {path for glob in globs for path in (root / "ssl_kd_explore").glob(glob)}
    page = root / "ssl_kd_explore/explore/page"
    assert packed >= {page / name for name in page_data.PAGE_FILES}
