"""A finished run's clusters are named from captions of any kind of table, never from labels."""

import shutil

import pyarrow as arrow
import pytest
from pyarrow import parquet

from ssl_kd.errors import InputError
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.naming import Names, name_samples
from ssl_kd.workbench.naming.name_run import read_captions

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


def test_a_name_that_a_person_gave_is_kept(photo_run, tmp_path):
    copy = shutil.copytree(photo_run, tmp_path / "copy")
    samples = Samples(copy)
    names = name_samples(samples, captions(samples))
    twin = names.of("cluster", 1)
    names.edited({"cluster": {0: twin, 1: "mine"}}).save(copy)
    again = name_samples(samples, captions(samples))
    assert [again.of("cluster", c) for c in (0, 1)] == [twin, "mine"]
    assert again.edits == Names.load(copy).edits


def test_both_kinds_of_table_give_the_same_captions(tmp_path):
    (tmp_path / "c.csv").write_text(
        'file_name,caption\na/1.png,a cat\n"a/2, three.png","two\ncats"\na/1.png,asleep\n'
    )
    rows = [
        {"path": "a/1.png", "text": ["a cat", "asleep"]},
        {"path": "a/2, three.png", "text": ["two\ncats"]},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    for name in ("c.csv", "c.parquet"):
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
        ("c.parquet", b"PAR1", "cannot be read"),
        ("c.txt", b"", "not a table of captions"),
    ],
)
def test_an_invalid_table_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_captions(tmp_path / name, FILES, SPLITS)
