"""The data of a run are found again by content; changed data is refused."""

import json
import os
import shutil

import numpy as np
import pyarrow as arrow
import pytest
from PIL import Image
from pyarrow import parquet

from ssl_kd import Run
from ssl_kd.core.errors import InputError
from ssl_kd.core.runs.folder import RunFolderError
from ssl_kd.vision.data.identity import row_digests
from ssl_kd.vision.data.tables import open_table
from ssl_kd.vision.extend import extend, inherited
from ssl_kd.vision.report import run_samples
from ssl_kd.vision.run import run
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.sources import SOURCES, SourceChanged
from tests.photos import QUICK

N = 60
GROUPS = np.repeat([0, 1, 2], N // 3)


def table_of(order=range(N), **changes):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(N, 8)) + 8 * np.eye(8)[GROUPS]).astype(np.float32)
    columns = {
        "embedding": arrow.array(list(x)),
        "text": arrow.array([f"group {group}, row {i}" for i, group in enumerate(GROUPS)]),
        "photo": arrow.array([f"{i}.bmp" for i in range(N)]),
    }
    table = arrow.table(columns | changes)
    return table.take(arrow.array(list(order)))


def save_photos(folder, names, seed=0):
    """Save uncompressed pictures, which all have the same size in bytes."""
    rng = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    for i, name in enumerate(names):
        shade = 80 * GROUPS[i] + rng.integers(0, 60, (8, 8, 3))
        Image.fromarray(shade.astype(np.uint8)).save(folder / name)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder in which two runs were started with relative paths: of a table, and of photos."""
    root = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        save_photos(root / "photos", [f"{i}.bmp" for i in range(N)])
        parquet.write_table(
            table_of().append_column("path", [[f"photos/{i}.bmp" for i in range(N)]]), "t.parquet"
        )
        quick = {**QUICK, "n_clusters": 3, "max_steps": 20}
        run(VisionSettings(**quick, dataset="t.parquet", embeddings_dir="e", run_name="table"))
        options = {"dataset": "photos", "teacher": "pixels", "embeddings_dir": "p"}
        run(VisionSettings(**quick, **options, run_name="photos"))
    return root


@pytest.fixture
def place(done, tmp_path, monkeypatch):
    """A copy of that folder, which is the current folder; the original is not there."""
    shutil.copytree(done, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    for path in (tmp_path / "copy/runs").glob("*/config.json"):
        config = json.loads(path.read_text()) | {"started_in": str(tmp_path / "copy")}
        path.write_text(json.dumps(config))
    return tmp_path / "copy"


def rewrite(table):
    """Write the table again, with the same modification time."""
    before = os.stat("t.parquet")
    parquet.write_table(table, "t.parquet")
    os.utime("t.parquet", ns=(before.st_atime_ns, before.st_mtime_ns))


def with_paths(table, folder="photos"):
    return table.append_column("path", [[f"{folder}/{name.as_py()}" for name in table["photo"]]])


def texts(name="table"):
    """The number in the text of each sample, as exported; None where it is missing."""
    frame = Run.open(f"runs/{name}").frame()
    if "text" not in frame:
        return None
    return [int(text.split()[-1]) if isinstance(text, str) else None for text in frame.text]


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_of_a_reordered_table_are_found_by_their_content(place, caplog, seed):
    caplog.set_level("INFO", "ssl_kd")
    order = np.random.default_rng(seed).permutation(N)
    rewrite(with_paths(table_of(order)))
    assert texts() == list(range(N))
    assert "was written again since the run: all 60 samples are found by their co" in caplog.text
    samples = Samples("runs/table", "text")
    data = samples.row_of_data(7)
    assert data is not None and data[1] == list(order).index(7)
    # Other types of the same values, other columns, and more rows.
    table = with_paths(table_of(order))
    wide = arrow.array([[float(x) for x in row.as_py()] for row in table["embedding"]])
    table = table.set_column(0, "embedding", wide).append_column("new", [list(range(N))])
    rewrite(arrow.concat_tables([table.slice(5), table.slice(0, 5), table.slice(9, 3)]))
    frame = Run.open("runs/table").frame()
    assert texts() == list(range(N))
    assert frame.new.tolist() == [list(order).index(i) for i in range(N)]


def test_rows_that_changed_are_named_and_not_used(place, caplog):
    changed = [f"group {g}, row {i}" if i != 7 else "other 99" for i, g in enumerate(GROUPS)]
    order = np.random.default_rng(0).permutation(N)
    rewrite(with_paths(table_of(order, text=arrow.array(changed))))
    assert texts() == [None if i == 7 else i for i in range(N)]
    assert "1 of 60 samples are not in it as they were" in caplog.text
    with pytest.raises(FileNotFoundError, match="photos/7.bmp is no longer in .* as it was"):
        Samples("runs/table", "text").row_of_data(7)


@pytest.mark.parametrize("change", ["values", "column", "embedding"])
def test_nothing_of_another_table_is_used(place, caplog, change):
    table = with_paths(table_of())
    if change == "values":
        table = table.set_column(1, "text", [[f"other {i}" for i in range(N)]])
    elif change == "column":
        table = table.rename_columns(["embedding", "text", "picture", "path"])
    else:
        table = table.set_column(0, "embedding", [list(np.random.rand(N, 8).astype(np.float32))])
    rewrite(table)
    assert texts() is None
    assert "columns of the data set are left out" in caplog.text and "t.parquet" in caplog.text
    with pytest.raises(SourceChanged, match="t.parquet.*Restore"):
        Samples("runs/table", "text").row_of_data(0)


def test_a_file_that_is_the_same_is_not_read(place, monkeypatch):
    Samples("runs/table").places("train")  # the copy has other times
    config = json.loads((place / "runs/table/config.json").read_text())
    shutil.rmtree(place / "runs/table")
    settings = VisionSettings.from_dict(config["settings"] | {"RUN_NAME": "table"})
    run(settings)
    for name in ("row_digests", "file_digest"):
        monkeypatch.setattr(f"ssl_kd.vision.sources.{name}", None)
    samples = Samples("runs/table")
    assert samples.places("train").tolist() == list(range(N)) and samples.image(3) is not None


@pytest.mark.parametrize("name", ["photos", "table"])
def test_a_replaced_picture_is_refused(place, tmp_path, caplog, name):
    first, second = place / "photos/3.bmp", place / "photos/50.bmp"
    old, times = first.read_bytes(), os.stat(first)
    assert len(old) == len(second.read_bytes())
    first.write_bytes(second.read_bytes())
    os.utime(first, ns=(times.st_atime_ns, times.st_mtime_ns))
    samples = Samples(f"runs/{name}")
    row = samples.column("file").tolist().index("3.bmp" if name == "photos" else "photos/3.bmp")
    with pytest.raises(SourceChanged, match="3.bmp has changed since the run, so it is not used"):
        samples.image(row)
    assert samples.image(row + 1) is not None
    with pytest.raises(InputError, match="1 of 60 pictures have changed since the run: .*3.bmp"):
        Run(samples).export("folders", tmp_path / "out")
    out = Run(samples).export("folders", tmp_path / "out", skip_missing=True)
    names = [path.name for path in out.rglob("*.bmp")]
    assert len(names) == N - 1 and "3.bmp" not in names
    images = run_samples(place / f"runs/{name}")
    assert images is not None and [image is None for image in images.load([row, row + 1])] == [
        True,
        False,
    ]
    first.unlink()
    with pytest.raises(InputError, match="1 of 60 pictures are missing: .*3.bmp"):
        Run(samples).export("folders", tmp_path / "more")
    first.write_bytes(old)  # restored
    assert Samples(f"runs/{name}").image(row) is not None


@pytest.mark.parametrize("name", ["photos", "table"])
def test_pictures_of_the_same_names_elsewhere_are_not_taken(place, tmp_path, monkeypatch, name):
    other = tmp_path / "other"
    other.mkdir()
    save_photos(other / "photos", [f"{i}.bmp" for i in range(N)], seed=1)
    shutil.copy("t.parquet", other)
    shutil.move(f"runs/{name}", other / "run")
    monkeypatch.chdir(other)
    # Relative paths are relative to the folder that the run was started in.
    out = Run.open("run").export("folders", "out")
    links = {path.name: os.readlink(path) for path in out.rglob("*.bmp")}
    assert links == {f"{i}.bmp": str(place / f"photos/{i}.bmp") for i in range(N)}
    # Without them, others of the same names in the current folder are refused ...
    shutil.move(place / "photos", tmp_path / "moved")
    shutil.move(place / "t.parquet", tmp_path / "moved.parquet")
    with pytest.raises(InputError, match="60 of 60 pictures have changed since the run"):
        Run.open("run").export("folders", "out2", skip_missing=True)
    # ... but the same pictures are found there.
    shutil.rmtree("photos")
    shutil.move(tmp_path / "moved", "photos")
    assert len([*Run.open("run").export("folders", "out3").rglob("*.bmp")]) == N


def test_pictures_that_were_renamed_are_found_by_their_content(place):
    (place / "photos/sorted").mkdir()
    for i in range(5):
        shutil.move(place / f"photos/{i}.bmp", place / f"photos/sorted/new {i}.bmp")
    samples = Samples("runs/photos")
    files = {name: samples.image_file(row) for row, name in enumerate(samples.column("file"))}
    assert files["3.bmp"] == place / "photos/sorted/new 3.bmp"
    assert files["9.bmp"] == place / "photos/9.bmp"


@pytest.mark.parametrize("name", ["photos", "table"])
def test_the_data_of_an_older_run_must_have_their_fingerprint(place, name):
    (place / f"runs/{name}" / SOURCES).unlink()
    samples = Samples(f"runs/{name}")
    assert samples.places("train").tolist() == list(range(N)) and samples.image(0) is not None
    if name == "table":
        rewrite(with_paths(table_of(range(N)[::-1])))
    else:
        os.replace(place / "photos/3.bmp", place / "photos/4.bmp")
    with pytest.raises(SourceChanged, match="has changed since the run, so nothing of it is used"):
        Samples(f"runs/{name}").image(0)


def test_an_extension_knows_the_data_of_every_split(place, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    table = table_of(text=arrow.array([f"new {i}" for i in range(N)]))
    x = np.random.default_rng(3).normal(size=(N, 8)) + 8 * np.eye(8)[GROUPS]
    table = table.set_column(0, "embedding", [list(x.astype(np.float32))])
    parquet.write_table(table, other / "more.parquet")
    monkeypatch.chdir(other)
    given = {"extend": str(place / "runs/table"), "dataset": "more.parquet"}
    given |= {"embeddings_dir": str(tmp_path / "new"), "runs_dir": str(tmp_path / "runs")}
    path = extend(inherited(VisionSettings(**given), given))
    order = np.random.default_rng(0).permutation(N)
    parquet.write_table(table.take(arrow.array(order)), other / "more.parquet")
    monkeypatch.chdir(tmp_path)
    expected = [f"group {g}, row {i}" for i, g in enumerate(GROUPS)] + [
        f"new {i}" for i in range(N)
    ]
    assert Run.open(path).frame().text.tolist() == expected


def test_samples_that_are_in_the_run_are_not_added_again(place, tmp_path, caplog):
    def extend_with(table):
        parquet.write_table(table, "more.parquet")
        given = {"extend": "table", "dataset": "more.parquet", "runs_dir": "runs"}
        given["embeddings_dir"] = str(tmp_path / "new")
        return extend(inherited(VisionSettings(**given), given))

    order = np.random.default_rng(0).permutation(N)
    with pytest.raises(RunFolderError, match="all 60 samples of more.parquet are in .*table alre"):
        extend_with(with_paths(table_of()).take(arrow.array(order)))
    new = with_paths(table_of()).slice(20)
    texts = arrow.array(
        [text.as_py() if i > 4 else f"new {i}" for i, text in enumerate(new["text"])]
    )
    assert extend_with(new.set_column(1, "text", texts)).is_dir()
    assert "35 of 40 samples of more.parquet are in" in caplog.text


def test_runs_are_compared_on_the_pictures_that_are_the_same(place, tmp_path, caplog):
    save_photos(tmp_path / "photos", [f"{i}.bmp" for i in range(N)], seed=1)
    for i in range(N - 10):
        shutil.copy(place / f"photos/{i}.bmp", tmp_path / "photos")
    options = {"dataset": str(tmp_path / "photos"), "teacher": "pixels", "embeddings_dir": "q"}
    run(VisionSettings(**{**QUICK, "n_clusters": 3, "max_steps": 20}, **options, run_name="other"))
    compared = Run.open("runs/photos").compare(Run.open("runs/other"))
    assert compared["samples"] == N - 10
    assert "10 samples have the same name in photos and other, but other pictures" in caplog.text


def test_the_digest_of_a_row_depends_on_its_content_alone(tmp_path):
    values = {
        "x": [[1.0, 2.0], [1.0, 2.5], [], None, [1.0, 2.0]],
        "text": ["a", "a", "a", "a", None],
        "n": [1, 1, None, 1, 1],
        "picture": [{"bytes": b"1", "path": None}] * 4 + [{"bytes": b"2", "path": None}],
        "raw": [b"x", b"x", b"x", b"x", None],
    }

    def digests(table, names=tuple(values)):
        parquet.write_table(table, tmp_path / "t.parquet")
        opened = open_table(tmp_path / "t.parquet")
        assert opened is not None
        return row_digests(opened, names)

    table = arrow.table(values)
    first = digests(table)
    assert len({*first}) == 5 and {len(digest) for digest in first} == {16}
    order = [3, 1, 0, 4, 2]
    assert digests(table.take(order)) == [first[i] for i in order]
    narrow = arrow.array(values["x"], arrow.large_list(arrow.float32()))
    other = table.set_column(0, "x", narrow).select(list(values)[::-1])
    other = other.set_column(3, "text", other["text"].dictionary_encode())
    assert digests(other) == first
    assert digests(table.set_column(2, "n", [[1, 1, None, 1, 2]]))[:4] == first[:4]
    for name, value in {"text": "b", "raw": b"y", "n": 2, "x": [0.0, 2.0]}.items():
        changed = [value, *values[name][1:]]
        assert digests(arrow.table(values | {name: changed}))[0] != first[0], name
    with pytest.raises(InputError, match="no column 'z' any more"):
        digests(table, ["x", "z"])
