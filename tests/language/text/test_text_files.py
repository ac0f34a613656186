"""Files of every format hold the same documents; a damaged one is named."""

import csv
import gzip
import json
import re

import pyarrow
import pytest
from pyarrow import parquet

from ssl_kd.language.text.dataset import open_text
from tests.faults.matrix import row as fault  # noqa: E402

TEXTS = ["once", 'he said "no",\nand left', "drei Bären 🐻"]
CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def write(path):
    rows = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2))
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["text", "id"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.parquet"])
def test_every_kind_of_file_holds_the_same(tmp_path, name):
    data = open_text(write(tmp_path / name), "all")
    assert [e.text for e in data.examples] == TEXTS
    assert not data.left_out and all(e.where.startswith(f"{name}:") for e in data.examples)
    ids = open_text(tmp_path / name, "all", field="text")
    assert ids.digest == data.digest


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "A.JSONL"])
def test_a_packed_file_holds_the_same_as_its_content(tmp_path, name):
    plain = tmp_path / name
    if plain.suffix.lower() in (".jsonl", ".txt"):
        rows = [json.dumps({"text": text}) for text in TEXTS]
        plain.write_text("\n".join(rows if plain.suffix != ".txt" else TEXTS))
    else:
        write(plain)
    expected = open_text(plain, "all")
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    for source in (packed, tmp_path):
        data = open_text(source, "all")
        assert data.digest == expected.digest
        assert all(example.where.startswith(f"{name}.gz:") for example in data.examples)


def test_packed_files_of_both_splits_are_found_and_a_damaged_one_is_named(tmp_path):
    for name, text in (("x_train", "learn"), ("x_test", "judge")):
        lines = "".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i in range(2000))
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    train, test = (open_text(tmp_path / "x_train.jsonl.gz", split) for split in ("train", "test"))
    assert (train.examples[0].text, test.examples[0].text) == ("learn 0", "judge 0")
    damaged = tmp_path / "half.jsonl.gz"
    damaged.write_bytes((tmp_path / "x_train.jsonl.gz").read_bytes()[:-200])
    assert "half.jsonl.gz: the file is damaged" in open_text(damaged, "all").left_out[-1]
    damaged.write_text('{"text": "not packed"}')
    with pytest.raises(ValueError, match="the file is damaged .Not a gzipped file"):
        open_text(damaged, "all")


def test_one_record_per_file(tmp_path):
    (tmp_path / "b.json").write_text(json.dumps({"text": "three"}, indent=1))
    (tmp_path / "stats.json").write_text('{"rows": 2}')  # no data, and no reason to stop
    data = open_text(tmp_path, "all")
    assert [e.text for e in data.examples] == ["three"]
    assert data.left_out[0].startswith("stats.json: the fields are ['rows']; expected")
    with pytest.raises(ValueError, match="stats.json has no usable record: stats.json: the fields"):
        open_text(tmp_path / "stats.json", "all")


def test_a_table_of_chats_has_no_fields_that_only_others_have(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    other = {"type": "function", "function": {"name": "sing", "arguments": {"what": "la"}}}
    rows = [
        {"messages": [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [c]}]}
        for c in (call, other)
    ]
    parquet.write_table(
        pyarrow.Table.from_pylist([*rows, {"messages": CHAT}]), tmp_path / "a.parquet"
    )
    first, second, third = open_text(tmp_path / "a.parquet", "all").examples
    assert first.messages[1]["tool_calls"] == [call]
    assert second.messages[1]["tool_calls"] == [other]
    assert third.messages == tuple(CHAT)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("a.parquet", lambda raw: raw[:-1], r"the file is damaged \(Parquet magic bytes"),
        ("a.parquet", lambda raw: b"", r"the file is damaged \(Parquet file size is 0"),
        ("a.json", lambda raw: raw[:-5], r"not valid JSON \("),
        ("a.json", lambda raw: b"\xff" + raw, "a.json:1: not UTF-8"),
        ("a.csv", lambda raw: b"txt\nonce\n", r"a.csv:2: the fields are \['txt'\]"),
        ("a.csv", lambda raw: b"text\nonce,more\n", "a.csv:2: more fields than the first line"),
        ("a.csv", lambda raw: b"text\n\xff\n", "a.csv:2: not UTF-8"),
    ],
)
@fault(124)
def test_a_damaged_file_is_named(tmp_path, name, damage, message):
    path = write(tmp_path / name)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError) as refused:
        open_text(path, "all")
    assert re.search(message, str(refused.value))


def test_reading_folders_of_save_to_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    train = datasets.Dataset.from_list([{"text": f"story {i}"} for i in range(50)])
    test = datasets.Dataset.from_list([{"text": "the end"}])
    train.save_to_disk(tmp_path / "one", num_shards=3)
    parts = [open_text(tmp_path / "one", split) for split in ("train", "test")]
    assert sum(map(len, parts)) == 50 and len(parts[1])
    assert [e.text for e in open_text(tmp_path / "one", "all").examples] == train["text"]
    datasets.DatasetDict(train=train, validation=test).save_to_disk(tmp_path / "two")
    assert [e.text for e in open_text(tmp_path / "two", "test").examples] == ["the end"]
    assert len(open_text(tmp_path / "two", "train")) == 50
    assert len(open_text(tmp_path / "two", "all")) == 51


def test_splits_as_the_hub_has_them(tmp_path):
    for split, n in (("train", 2), ("test", 1)):
        for i in range(n):
            write(tmp_path / f"{split}-{i:05d}-of-{n:05d}.parquet")
    assert len(open_text(tmp_path, "train")) == 2 * len(TEXTS)
    assert len(open_text(tmp_path, "test")) == len(TEXTS)


def test_a_folder_without_text_lists_the_known_formats(tmp_path):
    (tmp_path / "table.xlsx").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"contains no usable document: the folder has no \.jsonl"):
        open_text(tmp_path, "all")
