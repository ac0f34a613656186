"""Captions as people have them."""

import json

import pyarrow as arrow
import pytest
from pyarrow import parquet

from ssl_kd.errors import InputError
from ssl_kd.workbench.naming import read_captions

FILES = ["a/1.png", "a/2, three.png", "b/1.png"]


def test_tables_of_every_kind_say_the_same(tmp_path):
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
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "list.json").write_text(json.dumps(rows))
    mapping = {"a/1.png": ["a cat", "asleep"], "a/2, three.png": "two\ncats"}
    (tmp_path / "map.json").write_text(json.dumps(mapping))
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    for name in ("c.csv", "c.tsv", "c.jsonl", "list.json", "map.json", "c.parquet"):
        assert read_captions(tmp_path / name, FILES) == ["a cat asleep", "two\ncats", ""], name


def test_another_column_and_two_splits(tmp_path):
    (tmp_path / "c.csv").write_text("file,split,what\n1,train,cat\n1,test,dog\n")
    found = read_captions(tmp_path / "c.csv", ["1", "1"], ["test", "train"], column="what")
    assert found == ["dog", "cat"]


def test_what_is_no_table_of_captions(tmp_path):
    def refused(name, content, match, **options):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=match):
            read_captions(tmp_path / name, FILES, **options)

    refused("c.csv", b"file,words\na/1.png,x\n", "no column of captions.*it has file, words")
    refused("c.csv", b"file,text\na/1.png,x\n", "no column 'txt'.*text", column="txt")
    refused("c.csv", b"file,text\nz.png,x\n", "names 'z.png', and the samples are called as 'a/1")
    refused("c.csv", b"", "cannot be read")
    refused("c.csv", b"file,text\na,b,c\n", "cannot be read")
    refused("c.json", b"{", "cannot be read")
    refused("c.json", b"[1]", "expected objects")
    refused("c.jsonl", b"", "no column of files.*no rows")
    refused("c.parquet", b"PAR1", "cannot be read")
    refused("c.txt", b"", "no file of captions")
    with pytest.raises(FileNotFoundError, match="no file"):
        read_captions(tmp_path / "gone.csv", FILES)
