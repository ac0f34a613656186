"""A finished run's clusters are named from captions of any kind of table, never from labels."""

import json
import shutil

import pyarrow as arrow
import pytest
from pyarrow import parquet

from ssl_kd.errors import InputError
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.naming import Names, name_samples
from ssl_kd.workbench.naming.name_run import file_words, read_captions

CAPTIONS = {"digit 0": "a ring", "digit 1": "one stroke", "digit 4": "an open fork"}
FILES, SPLITS = ["a/1.png", "a/2, three.png", "b/1.png"], ["train"] * 3


def captions(samples: Samples) -> list[str]:
    return [f"a drawing of {CAPTIONS[label]}" for label in samples.column("label")]


def test_from_captions_at_every_level(photo_run, tmp_path):
    samples = Samples(photo_run)
    names = name_samples(samples, captions(samples))
    assert set(names.levels) == set(samples.levels)
    own = {names.of("cluster", c) for c in range(3)}
    assert {"ring", "stroke", "fork"} & set(" ".join(own).replace(",", "").split())
    for of in names.levels.values():
        texts = [name.text for name in of.values()]
        assert len(set(texts)) == len(texts)
    table = tmp_path / "captions.csv"
    rows = zip(samples.column("file"), samples.column("split"), captions(samples), strict=True)
    table.write_text("\n".join(["file,split,caption", *map(",".join, rows)]) + "\n")
    assert name_samples(samples, table) == names


def test_labels_give_no_names(photo_run):
    samples = Samples(photo_run)
    assert str(samples.column("file")[0]).startswith("digit ")  # the folders are the labels
    assert not any(name_samples(samples).levels.values()), "the rest of the file is a number"


def test_a_name_that_a_person_gave_is_kept(photo_run, tmp_path):
    copy = shutil.copytree(photo_run, tmp_path / "copy")
    samples = Samples(copy)
    names = name_samples(samples, captions(samples))
    twin = names.of("cluster", 1)
    names.edited({"cluster": {0: twin, 1: "mine"}}).save(copy)
    again = name_samples(samples, captions(samples))
    assert [again.of("cluster", c) for c in (0, 1)] == [twin, "mine"]
    assert again.edits == Names.load(copy).edits


def test_every_kind_of_table_gives_the_same_captions(tmp_path):
    rows = [
        {"file_name": "a/1.png", "caption": "a cat"},
        {"file_name": "a/2, three.png", "caption": "two\ncats"},
        {"file_name": "a/1.png", "caption": "asleep"},
    ]
    (tmp_path / "c.csv").write_text(
        'file_name,caption\na/1.png,a cat\n"a/2, three.png","two\ncats"\na/1.png,asleep\n'
    )
    (tmp_path / "c.tsv").write_text(
        'file_name\tcaption\na/1.png\ta cat\na/2, three.png\t"two\ncats"\na/1.png\tasleep\n'
    )
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    lists = [("a/1.png", ["a cat", "asleep"]), ("a/2, three.png", ["two\ncats"])]
    lines = [json.dumps({"path": file, "text": texts}) for file, texts in lists]
    (tmp_path / "lists.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("c.csv", "c.tsv", "c.jsonl", "c.parquet", "lists.jsonl"):
        assert read_captions(tmp_path / name, FILES, SPLITS) == ["a cat asleep", "two\ncats", ""]


def test_a_column_of_splits_distinguishes_equal_names(tmp_path):
    (tmp_path / "c.csv").write_text("file,split,text\n01,train,cat\n01,test,dog\n")
    assert read_captions(tmp_path / "c.csv", ["01", "01"], ["test", "train"]) == ["dog", "cat"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.csv", b"file,words\na/1.png,x\n", "no column of captions.*columns file, words"),
        ("c.csv", b"file,text\nz.png,x\n", "names like 'z.png', the samples have names like 'a/1"),
        ("c.csv", b"", "cannot be read"),
        ("c.csv", b"file,text\na,b,c\n", "cannot be read"),
        ("c.jsonl", b"{", "cannot be read"),
        ("c.jsonl", b"[1]", "cannot be read"),
        ("c.parquet", b"PAR1", "cannot be read"),
        ("c.txt", b"", "not a table of captions"),
    ],
)
def test_an_invalid_table_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_captions(tmp_path / name, FILES, SPLITS)


def test_words_of_file_names():
    files = ["digit 0/0001.png", "a\\b_c-d.e.jpg", "trip/beach/bigRedBoat12.jpg", "../x\ny", ""]
    words = ["", "a b c d e", "trip big Red Boat", "x y", ""]
    assert file_words(files, leave_out={"digit 0", "beach"}) == words
