"""The static page: a folder of plain files, whole or not there."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ssl_kd.cli import main
from ssl_kd.errors import InputError
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.explore import site, write_site
from ssl_kd.workbench.finished import Curation, name_samples
from tests.faults.matrix import row as fault


def binary(page, meta, name):
    kind = np.float32 if meta["columns"][name]["kind"] == "number" else np.int32
    return np.fromfile(page / "data" / meta["columns"][name]["file"], kind)


def test_the_columns_are_those_of_the_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr(site, "PER_FILE", 64)
    samples = Samples(run)
    Curation(samples).rename(0, "zeros")
    html = write_site(samples, tmp_path / "out")
    page = tmp_path / "out"
    meta = json.loads((page / "data/meta.json").read_text())
    assert html == tmp_path / "out" / "explore.html" and meta["samples"] == len(samples)
    assert "url=explore.html" in (tmp_path / "out" / "index.html").read_text()
    for name in ("cluster", *samples.levels):
        assert np.array_equal(binary(page, meta, name), samples.column(name))
    assert np.allclose(binary(page, meta, "confidence"), samples.column("confidence"))
    label = meta["columns"]["label"]["values"]
    shown = [label[k] for k in binary(page, meta, "label")]
    assert shown == list(samples.column("label"))
    files = (page / "data/files.txt").read_text().split("\n")
    assert files == list(samples.column("file"))
    parts = range(-(-len(samples) // meta["per_file"]))
    assert len(parts) == len(list((page / "data").glob("neighbours_*.i32"))) > 1
    files = [page / f"data/neighbours_{part}.i32" for part in parts]
    near = np.concatenate([np.fromfile(file, np.int32) for file in files])
    near = near.reshape(len(samples), meta["neighbours"])
    train = samples.splits["train"]
    assert np.array_equal(near[train.start : train.stop], samples.neighbours(12))
    places = np.fromfile(page / "data/places.f32", np.float32)
    assert places.shape == (2 * len(samples),) and np.abs(places).max() <= 1
    assert [line["name"] for line in meta["lines"]] == ["zeros"]
    assert meta["lines"] == Curation(samples).lines and meta["digest"] == Curation(samples).digest
    for name in site.page_files():
        assert (page / name).is_file()
    assert 'name="token" content=""' in html.read_text()


def test_the_pictures_are_bounded_in_number_and_where_the_page_looks_for_them(run, tmp_path):
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
    wanted = site.fitted(samples.image(sheets["rows"][at]), tile)
    assert np.array_equal(np.asarray(shown.convert("RGB")), np.asarray(wanted))


def test_examples_are_sure_samples_of_dense_places(run):
    samples = Samples(run)
    random = np.random.default_rng(0)
    places = np.concatenate([c + 0.02 * random.standard_normal((100, 2)) for c in (-0.5, 0.5)])
    rest = random.uniform(-1, 1, (len(samples) - 200, 2))
    found = site.examples_of(np.concatenate([places, rest]).astype(np.float32), samples)
    assert (found[0] < 100) != (found[1] < 100) and max(found[:2]) < 200
    assert len(set(found)) == len(found) <= site.EXAMPLES


def test_a_picture_that_is_gone_leaves_its_place_empty(run, tmp_path, monkeypatch, caplog):
    samples = Samples(run)
    image = samples.image

    def without(row):
        if row == 3:
            raise FileNotFoundError("3 is gone")
        return image(row)

    monkeypatch.setattr(samples, "image", without)
    write_site(samples, tmp_path / "out")
    assert "1 pictures are not there; the last: 3 is gone" in caplog.text


@fault(156)
def test_a_folder_that_exists_is_left_alone_and_nothing_is_left_of_a_failure(
    run, tmp_path, monkeypatch
):
    samples = Samples(run)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    write_site(samples, tmp_path / "out", pictures=5)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    for name in ("mine", "out"):
        with pytest.raises(InputError, match=f"{name} exists: name another place"):
            write_site(samples, tmp_path / name)
    monkeypatch.setattr(Samples, "nearest", lambda samples, k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_site(samples, tmp_path / "new")
    assert before == {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}


@pytest.fixture
def run(mapped_run, tmp_path):
    return shutil.copytree(mapped_run, tmp_path / "copy")


def test_the_page_has_the_names_that_export_gave(run, tmp_path):
    samples = Samples(run)
    words = ["apple", "brick", "cloud"]
    names = name_samples(samples, [f"a {words[k]} seen" for k in samples.column("cluster")])
    names.save(run)
    write_site(samples, tmp_path / "out", pictures=0)
    meta = json.loads((tmp_path / "out" / "data/meta.json").read_text())
    assert meta["names"]["cluster"] == dict(zip("012", words, strict=True))
    assert meta["names"].keys() == set(samples.levels)


def test_the_command_writes_it_applies_decisions_and_undoes_them(run, tmp_path, capsys):
    assert main(["explore", str(run), "--static", str(tmp_path / "out")]) == 0
    assert f"Page: {tmp_path / 'out' / 'explore.html'}" in capsys.readouterr().out
    Curation.open(run).rename(0, "zeros")
    (run / "curation.jsonl").rename(tmp_path / "kept.jsonl")
    for said in ("1 new decisions in", "0 new decisions in"):
        assert main(["explore", str(run), "--apply", str(tmp_path / "kept.jsonl")]) == 0
        assert said in capsys.readouterr().out
    assert main(["explore", str(run), "--undo"]) == 0
    assert Curation.open(run).names == {}
    assert main(["explore", str(run), "--undo"]) == 2
    assert "no decision that could be undone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "1"], "arguments are required: RUN"),
        (["RUN", "--colour", "1"], "no flag --colour"),
        (["RUN", "--port", "1", "--static", "x"], "argument --static: not allowed with argument --port"),
        (["RUN", "--apply", "a", "--undo"], "argument --undo: not allowed with argument --apply"),
        (["RUN", "--port", "70000"], "port is 70000"),
        (["RUN", "--apply", "nothing.jsonl"], "nothing.jsonl"),
        (["elsewhere"], "elsewhere is not a run's folder"),
    ],
)
def test_what_cannot_be_is_one_line(run, words, said, capsys):
    words = [str(run) if word == "RUN" else word for word in words]
    assert main(["explore", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.strip().count("\n") == 0


def test_the_page_follows_decisions_as_the_library_does(run, tmp_path):
    """`decisions.js`, by node, beside `Curation`: the same lines, the same end."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    samples = Samples(run)
    curation = Curation(samples)
    curation.rename(0, "zeros")
    curation.rename(2, "fours")
    curation.split(1)
    curation.merge([2, 1000])
    rows = np.flatnonzero(curation.clusters == 0)[:20]
    curation.split(0, rows, name="some")
    curation.move(rows[:4], 1)
    curation.exclude(rows[4:6])
    curation.undo()
    curation.merge([0, 2])
    curation.undo(curation.undo().id)
    write_site(samples, tmp_path / "out", pictures=0)
    page = tmp_path / "out"
    script = tmp_path / "follow.mjs"
    script.write_text(f"""
import {{ readFileSync }} from "node:fs";
import {{ Decisions }} from {json.dumps((page / "decisions.js").as_uri())};
const data = {json.dumps(str(page / "data"))};
const meta = JSON.parse(readFileSync(data + "/meta.json"));
const read = (name) => Uint8Array.from(readFileSync(`${{data}}/${{meta.columns[name].file}}`));
const column = (name) => new Int32Array(read(name).buffer);
const found = new Decisions(column("cluster"), meta, column);
found.replay(meta.lines);
const told = {{ clusters: [...found.clusters], names: [...found.names] }};
told.excluded = [...found.excluded];
found.add({{ do: "split", cluster: 1 }});
found.add({{ do: "move", rows: [0, 1], new: null, name: "two" }});
const refused = [];
for (const name of ["two", "TWO ", "x".repeat(201), "a\\u200bb", "a\\nb"]) {{
  try {{ found.add({{ do: "rename", cluster: 1, name }}); }} catch (error) {{ refused.push(name); }}
}}
console.log(JSON.stringify({{ ...told, refused, more: found.lines.slice(-2) }}));
""")
    done = subprocess.run(["node", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["clusters"] == curation.clusters.tolist()
    assert dict(told["names"]) == curation.names
    assert sorted(told["excluded"]) == np.flatnonzero(curation.excluded).tolist()
    assert len(told["refused"]) == 5  # what `apply` would refuse, and with it all the others
    more = tmp_path / "more.jsonl"
    more.write_text("".join(json.dumps(line) + "\n" for line in told["more"]))
    assert [line.do for line in curation.apply(more)] == ["split", "move"]
    assert "two" in curation.names.values()


def test_the_page_is_part_of_the_wheel():
    root = Path(site.__file__).parents[3]
    if not (root / "pyproject.toml").is_file():
        pytest.skip("installed without the repository")
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brought it")
    said = tomllib.loads((root / "pyproject.toml").read_text())
    globs = said["tool"]["setuptools"]["package-data"]["ssl_kd"]
    packed = {path for glob in globs for path in (root / "ssl_kd").glob(glob)}
    assert all(
        root / "ssl_kd/workbench/explore/page" / name in packed for name in site.page_files()
    )
