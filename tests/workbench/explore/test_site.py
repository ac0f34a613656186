"""The static page: a folder of plain files, whole or not there."""

import json
import multiprocessing
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from ssl_kd.cli import main
from ssl_kd.errors import InputError
from ssl_kd.files import CorruptFileError
from ssl_kd.files.lock import Lock, LockHeld
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.explore import site, write_site
from ssl_kd.workbench.finished import Curation, name_samples
from tests.faults.matrix import row as fault


def base(folder):
    """The folder that `explore.html` names: all other files of the page are there."""
    found = re.findall(r'<base href="([^"]+)/">', (folder / "explore.html").read_text())
    assert len(found) == 1
    return folder / found[0]


def binary(page, meta, name):
    kind = np.float32 if meta["columns"][name]["kind"] == "number" else np.int32
    return np.fromfile(page / "data" / meta["columns"][name]["file"], kind)


def test_the_columns_are_those_of_the_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr(site, "PER_FILE", 64)
    samples = Samples(run)
    Curation(samples).rename(0, "zeros")
    html = write_site(samples, tmp_path / "out")
    page = base(tmp_path / "out")
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
        assert (page / name).is_file() or name == "explore.html"
    assert 'name="token" content=""' in html.read_text()


def test_the_pictures_are_bounded_in_number_and_where_the_page_looks_for_them(run, tmp_path):
    samples = Samples(run)
    write_site(samples, tmp_path / "out", pictures=40)
    data = base(tmp_path / "out") / "data"
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


def test_a_folder_of_something_else_is_left_alone(run, tmp_path, monkeypatch):
    samples = Samples(run)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match=r"mine holds something else: give .* \(thesis.tex is"):
        write_site(samples, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    page = write_site(samples, tmp_path / "out", pictures=5)
    before = base(tmp_path / "out")
    write_site(samples, tmp_path / "out", pictures=5)
    assert base(tmp_path / "out") != before and not before.exists()
    monkeypatch.setattr(Samples, "nearest", lambda samples, k: 1 / 0)
    before = page.read_bytes()
    with pytest.raises(ZeroDivisionError):
        write_site(samples, tmp_path / "out")
    assert page.read_bytes() == before and base(tmp_path / "out").is_dir()
    assert len(list((tmp_path / "out").glob("explore-*"))) == 1
    with pytest.raises(ZeroDivisionError):
        write_site(samples, tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir() if path.name[0] != "."] == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "mine", "new", "out"]


@pytest.fixture
def run(mapped_run, tmp_path):
    return shutil.copytree(mapped_run, tmp_path / "copy")


@pytest.fixture
def small(monkeypatch):
    """A page of a few files: what is tested is when and where they are written."""
    monkeypatch.setattr(site, "page_files", lambda: ["explore.html", "explore.js"])

    def data(samples, put, **_):
        put("places.f32", b"1234")
        put("meta.json", b"{}")

    monkeypatch.setattr(site, "page_data", data)
    return lambda folder: write_site(SimpleNamespace(), folder)


BLOG = {".git/HEAD": "ref", "CNAME": "example.org", "blog/index.html": "<p>", "data/x": "y",
        "explore.js": "mine", "explore-mine/a": "b", "explore-0123456789ab/a": "b"}  # fmt: skip


def blog(folder):
    for name, text in BLOG.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def assert_blog(folder):
    assert {name: (folder / name).read_text() for name in BLOG} == BLOG


def assert_whole(folder):
    here = base(folder)
    files = {str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()}
    assert files == {"explore.js", "data/places.f32", "data/meta.json"}


@fault(156)
def test_a_second_page_replaces_its_own_files_alone(small, tmp_path):
    folder = tmp_path / "out"
    small(folder)
    blog(folder)
    for _ in range(2):
        small(folder)
        assert_blog(folder)
        assert_whole(folder)
    ours = {".ssl_kd-explore.json", ".ssl_kd-explore.lock", "explore.html", "index.html"}
    theirs = {name.partition("/")[0] for name in BLOG}
    assert {path.name for path in folder.iterdir()} == ours | theirs | {base(folder).name}


def _killed(small, folder, moment, after):
    """Write a page; end at once before or after so many renames, removals or new folders."""
    count = 0

    def dying(act):
        def acts(*args, **options):
            nonlocal count
            count += 1
            if count == moment and not after:
                os._exit(9)
            mine = count == moment
            try:
                return act(*args, **options)
            finally:
                if mine:
                    os._exit(9)

        return acts

    os.replace, os.mkdir, shutil.rmtree = map(dying, (os.replace, os.mkdir, shutil.rmtree))
    small(folder)
    os._exit(0)


@fault(156)
@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_moment_a_whole_page_is_there_and_nothing_else_is_lost(
    small, tmp_path, after
):
    folder, moment, code = tmp_path / "out", 0, 9
    small(folder)
    blog(folder)
    fork = multiprocessing.get_context("fork")
    while code:
        moment += 1
        worker = fork.Process(target=_killed, args=(small, folder, moment, after))
        worker.start()
        worker.join(60)
        code = worker.exitcode
        assert code in (0, 9) and moment < 40
        assert_whole(folder)
        assert_blog(folder)
        assert "url=explore.html" in (folder / "index.html").read_text()
    assert moment > 8
    small(folder)
    ours = [path.name for path in folder.glob("explore-*")]
    assert sorted(ours) == sorted([base(folder).name, "explore-mine", "explore-0123456789ab"])
    assert list(folder.glob(".*.tmp")) == []


def _edited(name, text="mine"):
    return lambda folder: (folder / name).write_text(text)


def _linked(name, target):
    def link(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return link


def _folder_there(folder):
    (folder / "index.html").unlink()
    (folder / "index.html").mkdir()


FOREIGN = {
    "a start page of one's own": (_edited("index.html"), "index.html was not written by explore"),
    "an edited page": (_edited("explore.html"), "explore.html was not written by explore, or was"),
    "a link": (_linked("index.html", "/etc/passwd"), "index.html was not written"),
    "a link to nothing": (_linked("explore.html", "gone"), "explore.html was not written"),
    "a folder": (_folder_there, "index.html was not written"),
    "a manifest that leads away": (
        _edited(".ssl_kd-explore.json", '{"folders": ["../mine"], "files": []}'),
        "json is damaged .a folder is called as none of ours",
    ),
    "a manifest that is none": (_edited(".ssl_kd-explore.json", "[" * 99_999), "json is damaged"),
    "a manifest without": (_edited(".ssl_kd-explore.json", "[]"), "json is damaged"),
    "a manifest of numbers": (
        _edited(".ssl_kd-explore.json", '{"folders": [1], "files": [2]}'),
        "json is damaged",
    ),
}


@fault(156)
@pytest.mark.parametrize(("change", "said"), FOREIGN.values(), ids=FOREIGN.keys())
def test_what_is_not_ours_is_named_in_a_line_and_nothing_written(small, tmp_path, change, said):
    folder = tmp_path / "out"
    (tmp_path / "mine").mkdir()
    small(folder)
    change(folder)
    before = {path: path.lstat().st_mtime_ns for path in sorted(folder.rglob("*"))}
    with pytest.raises((InputError, CorruptFileError), match=said) as error:
        small(folder)
    assert "\n" not in str(error.value)
    assert before == {path: path.lstat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@fault(156)
def test_a_page_is_written_by_one_program_at_a_time_and_through_no_link(small, tmp_path):
    folder = tmp_path / "out"
    small(folder)
    with Lock(folder / site.LOCK), pytest.raises(LockHeld):
        small(folder)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "x").write_text("y")
    manifest = json.loads((folder / site.MANIFEST).read_text())
    manifest["folders"].append("explore-000000000000")
    (folder / site.MANIFEST).write_text(json.dumps(manifest))
    (folder / "explore-000000000000").symlink_to(tmp_path / "precious")
    small(folder)
    assert (tmp_path / "precious" / "x").read_text() == "y"
    (tmp_path / "link").symlink_to(folder)
    assert small(tmp_path / "link") == folder / "explore.html"
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="file is no folder"):
        small(tmp_path / "file")


def test_the_page_has_the_names_that_export_gave(run, tmp_path):
    samples = Samples(run)
    words = ["apple", "brick", "cloud"]
    names = name_samples(samples, [f"a {words[k]} seen" for k in samples.column("cluster")])
    names.save(run)
    write_site(samples, tmp_path / "out", pictures=0)
    meta = json.loads((base(tmp_path / "out") / "data/meta.json").read_text())
    assert meta["names"]["cluster"] == dict(zip("012", words, strict=True))
    assert meta["names"].keys() == set(samples.levels)


def test_the_command_writes_it_applies_decisions_and_undoes_them(run, tmp_path, capsys):
    assert main(["explore", str(run), "--static", str(tmp_path / "out"), "--pictures", "9"]) == 0
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
        (["--port", "1"], "explore takes the run first"),
        (["RUN", "--colour", "1"], "no flag --colour"),
        (["RUN", "--port", "1", "--static", "x"], "--static and --port came"),
        (["RUN", "--apply", "a", "--undo"], "--apply and --undo came"),
        (["RUN", "--pictures", "5"], "--static DIR beside it"),
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
    curation.rename_all({0: "zeros", 2: "fours"})
    curation.split(1)
    curation.merge([2, 1000])
    rows = np.flatnonzero(curation.clusters == 0)[:20]
    curation.split(0, rows, name="some")
    curation.move(rows[:4], 1)
    curation.exclude(rows[4:6])
    curation.undo()
    curation.merge([0, 2])
    curation.undo()
    curation.redo()
    write_site(samples, tmp_path / "out", pictures=0)
    page = base(tmp_path / "out")
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
