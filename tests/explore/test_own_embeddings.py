"""Embeddings of a user: clustered and opened in one step, with media and more columns."""

import io
import json
import shutil
import wave
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pytest
from PIL import Image, ImageFilter
from pyarrow import csv, parquet
from sklearn.datasets import load_digits, load_sample_image

from ssl_kd import Run, cli
from ssl_kd.core.errors import InputError
from ssl_kd.core.precision import Precision
from ssl_kd.vision.data import open_features
from ssl_kd.vision.data.tables import open_table
from ssl_kd.vision.extract import Extraction
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.teachers import load_teacher
from ssl_kd_explore.clustered import settings_of
from ssl_kd_explore.columns import Columns
from ssl_kd_explore.explore.server import ExploreServer
from ssl_kd_explore.metadata import join_table, metadata
from tests.explore.explore.conftest import answering
from tests.explore.explore.test_server import ask
from tests.photos import QUICK

N = 90
HTML = "<img src=x onerror=alert(1)>"


def frame(root):
    with wave.open(str(root / "a.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(b"\0\0" * 800)
    (root / "link.wav").symlink_to("/etc/passwd")
    Image.new("L", (8, 8), 200).save(root / "a.png")
    sounds = ["a.wav", str(root / "a.wav"), "link.wav", "../a.wav", "/dev/zero.wav", None] * 15
    links = ["https://example.org/x", "javascript:alert(1)"] * 45
    x = load_digits().data[:N].astype(np.float32)  # pyright: ignore[reportAttributeAccessIssue]
    return arrow.table(
        {"clip": list(x), "id": [f"d{i}" for i in range(N)], "text": [HTML, "b" * 9000] * 45,
         "sound": sounds, "url": links, "photo": ["a.png"] * N, "size": np.arange(N) / 2,
         "cluster": ["mine"] * N}
    )  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a table of embeddings, and its run in `runs`."""
    root = tmp_path_factory.mktemp("own")
    parquet.write_table(frame(root), root / "own.parquet")
    Run.of(root / "own.parquet", **settings(root))
    return root


def settings(root):
    places = {"runs_dir": str(root / "runs"), "embeddings_dir": str(root / "cache")}
    return {**QUICK, **places, "n_clusters": 3}


@pytest.fixture
def run(root, tmp_path):
    return shutil.copytree(next((root / "runs").glob("explore-own-*")), tmp_path / "run")


def test_data_is_clustered_once(root, capfd, monkeypatch):
    run = Run.of(str(root / "own.parquet"), media="text", **settings(root))
    assert len(run) == N and run.samples.media == {"kind": "text", "column": "text"}
    assert len([*(root / "runs").glob("explore-*")]) == 1
    assert Samples(run.path).media == run.samples.media  # remembered
    (run.path / "media.json").unlink()
    monkeypatch.chdir(root)
    flags = [f"--{name}={value}" for name, value in settings(root).items()]
    assert cli.main(["explore", "own.parquet", *flags, "--static", "page"]) == 0
    out = capfd.readouterr().out
    assert "own.parquet was clustered before" in out and (root / "page/explore.html").is_file()
    assert cli.main(["explore", str(run.path), "--n_clusters", "4"]) == 2
    assert "There is no flag --n_clusters" in capfd.readouterr().err
    assert cli.main(["explore", "own.parquet", "--run_name", "mine"]) == 2
    assert "--run_name is set by ssl_kd explore" in capfd.readouterr().err
    assert cli.main(["explore", "runs"]) == 2
    assert "runs is a folder of runs: give one, such as runs/latest" in capfd.readouterr().err
    assert cli.main(["explore", "a.wav"]) == 2
    assert "a.wav is not a run folder (no config.json), and 'a.wav'" in capfd.readouterr().err


def test_runs_and_hidden_files_in_the_folder_of_the_data_do_not_change_the_run(tmp_path):
    def folder():
        options = {"runs_dir": str(tmp_path / "runs"), "embeddings_dir": str(tmp_path / "cache")}
        return settings_of(str(tmp_path), VisionSettings(**options))[1]

    (tmp_path / "a.png").touch()
    before = folder()
    for name in ("runs/report.html", "cache/x.pt", ".DS_Store", ".thumbs/a.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert folder() == before
    (tmp_path / "b.png").touch()
    assert folder() != before


def test_a_data_frame(tmp_path):
    table = frame(tmp_path).select(["clip", "text"])
    run = Run.of(table.to_pandas(), **settings(tmp_path))
    assert run.frame().text.tolist() == [HTML, "b" * 9000] * 45
    with pytest.raises(InputError, match="has no column 'txt'.*did you mean 'text'"):
        Run.of(table, media="txt", **settings(tmp_path) | {"n_clusters": 4})
    with pytest.raises(InputError, match="the data is list; expected a path or a data frame"):
        Run.of([1, 2])


def test_relative_paths_of_a_data_frame_are_those_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = frame(tmp_path).select(["clip", "photo"])
    run = Run.of(table, **settings(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    assert run.samples.media == {"kind": "image", "column": "photo"}
    picture = Run.open(run.path).samples.image(0)
    assert picture is not None and picture.size == (8, 8)


def test_values_keep_their_type_in_every_export(tmp_path):
    days = [date(2020, 1, 1 + i % 28) for i in range(N)]
    values = {
        "number": arrow.array([None if i % 3 else 2**60 + i for i in range(N)], arrow.int64()),
        "flag": arrow.array([i % 2 == 0 if i else None for i in range(N)]),
        "day": arrow.array(days, arrow.date32()),
        "price": arrow.array([Decimal(i) / 4 for i in range(N)], arrow.decimal128(6, 2)),
        "zip": arrow.array([f"{i:05}" for i in range(N)]).dictionary_encode(),
        "text": arrow.array(["b" * 5000] * N, arrow.large_string()),
        "photo": arrow.array(["a.png"] * N),
        "tags": arrow.array([["a", "b"][: i % 3] for i in range(N)]),
        "made": arrow.array([{"by": "me", "when": day} for day in days]),
    }
    table = frame(tmp_path).select(["clip", "id"])
    for name, value in values.items():
        table = table.append_column(name, value)
    parquet.write_table(table, tmp_path / "typed.parquet")
    run = Run.of(tmp_path / "typed.parquet", column="clip", **settings(tmp_path))

    exported = parquet.read_table(run.export("parquet", tmp_path / "out.parquet"))
    for name, value in values.items():
        assert exported.column(name).to_pylist() == value.to_pylist(), name
    kinds = {n: exported.schema.field(n).type for n in ("number", "flag", "day", "price", "zip")}
    assert list(kinds.values()) == [values[n].type for n in list(kinds)[:4]] + [arrow.string()]
    # The paths are read relative to the first table, wherever the export is.
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(tmp_path / "out.parquet", tmp_path / "elsewhere/out.parquet")
    opened = open_table(Path(moved))
    assert opened is not None and opened.root == tmp_path

    pandas = run.frame()
    assert pandas.number[0] == 2**60 and pandas.number.dtype == "Int64"
    assert pandas.flag.dtype == "boolean" and pandas.flag[2] and pandas.day[0] == days[0]

    out = run.export("fiftyone", tmp_path / "fiftyone")
    sample = json.loads((out / "samples.json").read_text())["samples"][3]
    assert sample["number"] == 2**60 + 3 and sample["flag"] is False and sample["zip"] == "00003"
    assert sample["day"] == "2020-01-04" and sample["price"] == 0.75 and len(sample["text"]) == 5000

    columns = Columns(run.samples, run.curation)
    assert columns.find({"flag": "=true"})[:2].tolist() == [2, 4]
    assert columns.find({"day": "=2020-01-04", "price": "<1"}).tolist() == [3]
    assert not {"tags", "made"} & columns.kinds.keys()  # exported, but without a filter
    ((shown,),) = columns.cells([0], ["text"])
    assert shown == "b" * 1000 + "… (5,000 characters)"


def test_missing_embeddings_are_neither_a_cluster_nor_duplicates(tmp_path):
    x = load_digits().data[:N] / 16 + 0.01  # pyright: ignore[reportAttributeAccessIssue]
    x[::10] = 0
    notes = [f"note {row}" for row in range(N)]
    parquet.write_table(arrow.table({"clip": list(x), "note": notes}), tmp_path / "f.parquet")
    run = Run.of(tmp_path / "f.parquet", **settings(tmp_path))
    assert len(run) == 81 and len(run.duplicates().groups()) == 0
    data = run.samples.metrics["dataset"]
    assert data["unreadable"] == 9
    assert data["usage"]["train"]["left_out"][0]["names"][:2] == ["row 0", "row 10"]
    assert metadata(run.samples)["note"][0].as_py() == "note 1"  # the others keep their columns


def test_shards_that_changed_are_clustered_again(tmp_path):
    paths = [tmp_path / f"x-0000{k}-of-00002.parquet" for k in range(2)]
    for path in paths:
        parquet.write_table(arrow.table({"clip": [[1.0, 2.0]] * 40}), path)
    chosen = VisionSettings.from_dict({})
    before = settings_of(str(paths[0]), chosen)[1]
    assert settings_of(str(paths[0]), chosen)[1] == before
    parquet.write_table(arrow.table({"clip": [[1.0, 2.0]] * 41}), paths[1])
    assert settings_of(str(paths[0]), chosen)[1] != before


def test_pictures_of_a_table_are_embedded_and_shown(tmp_path):
    pictures = []
    for image in load_digits().images[:N]:  # pyright: ignore[reportAttributeAccessIssue]
        file = io.BytesIO()
        Image.fromarray((image * 15).astype(np.uint8)).save(file, "PNG")
        pictures.append({"bytes": file.getvalue(), "path": None})
    pictures[4] = {"bytes": b"broken", "path": None}
    table = arrow.table({"image": pictures, "site": ["a", "b"] * 45})
    parquet.write_table(table, tmp_path / "f.parquet")
    run = Run.of(tmp_path / "f.parquet", teacher="pixels", image_size=8, label_column="site",
                 **settings(tmp_path))  # fmt: skip
    assert len(run) == 89 and run.samples.metrics["dataset"]["class_names"] == ["a", "b"]
    assert run.samples.image(4).size == (8, 8)
    assert run.samples.metrics["dataset"]["unreadable"] == 1
    assert run.samples.media == {"kind": "image", "column": "image"}


def test_a_teacher_for_a_table_with_features_names_its_pictures(tmp_path):
    parquet.write_table(frame(tmp_path), tmp_path / "own.parquet")
    data, cpu = open_features(tmp_path / "own.parquet"), Precision.for_device("cpu")
    teacher = load_teacher("pixels", image_size=8)
    with pytest.raises(InputError, match="do not go together: .*; --column photo embeds the pict"):
        Extraction(data, teacher, tmp_path, split="train", precision=cpu)


def test_texts_links_and_sounds_are_served_as_such(run):
    def serve(media):
        with ExploreServer(Samples(run, media)) as server, answering(server):
            assert json.loads(server.data["meta.json"])["media"]["column"] == media
            return [ask(server, "GET", f"/api/media/{row}") for row in range(6)]

    texts = serve("text")
    whole = {"kind": "text", "text": HTML, "characters": len(HTML)}
    assert json.loads(texts[0][1]) == whole
    assert texts[0][2]["Content-Type"] == "application/json"
    cut = json.loads(texts[1][1])  # the page gets the beginning, and says how much there is
    assert cut["text"] == "b" * 2000 and cut["characters"] == 9000
    links = [json.loads(content) for _, content, _ in serve("url")]
    assert links[0]["kind"] == "url" and links[0]["url"] == "https://example.org/x"
    assert links[1]["kind"] == "text" and links[1]["text"] == "javascript:alert(1)"
    sounds = serve("sound")
    assert [status for status, _, _ in sounds] == [200, 200, 404, 404, 404, 404]
    assert sounds[0][1][:4] == b"RIFF" and sounds[0][2]["Content-Type"] == "audio/wav"
    assert "media-src 'self'" in sounds[0][2]["Content-Security-Policy"]
    assert b"root:" not in b"".join(content for _, content, _ in sounds)


def test_columns_of_the_data_can_be_filtered_and_exported(run):
    samples = Samples(run)
    assert samples.media == {"kind": "image", "column": "photo"}
    assert samples.image(4).size == (8, 8)
    opened = Run(samples)
    columns = Columns(samples, opened.curation)
    assert columns.find({"size": ">=44"}).tolist() == [88, 89]
    assert columns.kinds["size"] == "number" and columns.kinds["data_cluster"] == "category"
    assert opened.frame()["size"].tolist() == [i / 2 for i in range(N)]
    moved = Samples(run)
    moved.settings["DATASET"] = str(run / "gone.parquet")
    assert metadata(moved) == {} and moved.media is None


def test_a_table_is_joined_by_the_names_of_samples(run, tmp_path):
    samples, table = Samples(run), tmp_path / "more.csv"
    more = {"path": ["d5", "d1", "d5", "other"], "price": [5, 1, 6, 7], "photo2": ["x.png"] * 4}
    more |= {"confidence": [1] * 4, "data_confidence": [2] * 4}
    csv.write_csv(arrow.table(more), table)
    assert join_table(samples, table) == 1  # d5 is in two rows
    assert metadata(samples)["price"].to_pylist() == [None, 1, *[None] * (N - 2)]
    assert Run(samples).frame().price[1] == 1
    assert [metadata(samples)[f"data_{n}confidence"][1].as_py() for n in ("data_", "")] == [1, 2]
    table.write_text(
        "id,zip,phone,n,big,price\n"
        "d0,01234,4912345678901234567890,1,,0.5\nd1,,1,,123456789012345678,7.25\n"
    )
    assert join_table(samples, table) == 2
    joined = metadata(samples)
    first = {name: joined[name][:2].to_pylist() for name in ("zip", "phone", "n", "big", "price")}
    assert first == {
        "zip": ["01234", None],
        "phone": ["4912345678901234567890", "1"],
        "n": [1, None],
        "big": [None, 123456789012345678],
        "price": [0.5, 7.25],
    }
    csv.write_csv(arrow.table(more), table)
    join_table(samples, table)
    Image.new("L", (3, 3)).save(tmp_path / "x.png")
    shown = Samples(run, "photo2")  # the paths are relative to the table
    assert shown.media["kind"] == "image" and shown.image(1).size == (3, 3)
    assert metadata(shown).keys() >= {"text", "price", "photo2"}
    for damaged in (b"PAR1", (samples.path / "metadata.parquet").read_bytes()[:-9]):
        (samples.path / "metadata.parquet").write_bytes(damaged)
        with pytest.raises(InputError, match="metadata.parquet cannot be read as a .parquet"):
            metadata(samples)
    wrong = {
        b"name\ne1\n": "has the columns name; expected one called file, id",
        b"file\ne1\n": "names such as",
        b"file,a,a\nd1,1,2\n": "several columns 'a': rename",
        b"file,a\nd1,caf\xe9\n": "column 'a' of .* is not UTF-8",
    }
    for content, words in wrong.items():
        table.write_bytes(content)
        with pytest.raises(InputError, match=words):
            join_table(samples, table)


def test_names_with_leading_zeros_are_joined(tmp_path):
    ids = [f"{i:03}" for i in range(N)]
    table = frame(tmp_path).select(["clip"]).append_column("id", [ids])
    parquet.write_table(table, tmp_path / "zeros.parquet")
    run = Run.of(tmp_path / "zeros.parquet", **settings(tmp_path))
    (tmp_path / "more.csv").write_text("id,price\n007,1.5\n010,2.5\n")
    assert join_table(run.samples, tmp_path / "more.csv") == 2
    assert run.frame().set_index("file").price["007"] == 1.5


def test_blurred_images_are_found_by_sharpness(tmp_path):
    photo = Image.fromarray(load_sample_image("china.jpg"))
    (tmp_path / "photos").mkdir()
    for i in range(40):
        part = photo.crop((10 * i, 5 * i, 10 * i + 200, 5 * i + 150))
        blurred = part.filter(ImageFilter.GaussianBlur(4)) if i % 10 == 3 else part
        blurred.save(tmp_path / f"photos/{i:02}.png")
    run = Run.of(tmp_path / "photos", teacher="pixels", image_size=16, **settings(tmp_path))
    assert cli.main(["curate", str(run.path), "--images"]) == 0
    columns = Columns(run.samples, run.curation)
    assert sorted(columns.find({}, "sharpness")[:4].tolist()) == [3, 13, 23, 33]
    first = metadata(run.samples)
    assert first["width"][0].as_py() == 200 and first["height"][0].as_py() == 150
    assert first["bytes"][0].as_py() == (tmp_path / "photos/00.png").stat().st_size
