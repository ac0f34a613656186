import json
import platform

import pytest

from ssl_kd.core.errors import first_few
from ssl_kd.language.text.dataset import LONGEST, open_text
from ssl_kd.language.text.records import Example
from ssl_kd.vision.data import DatasetUnavailable, DatasetUnreachable


def write_jsonl(path, records):
    lines = (r if isinstance(r, str) else json.dumps(r) for r in records)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def test_the_forms_of_a_line(tmp_path):
    path = write_jsonl(
        tmp_path / "f.jsonl",
        [
            {"text": "once"},
            {"prompt": "2+2=", "completion": "4", "text": "not this"},
            {"question": "How many?", "answer": "One and one.\n#### 2"},
            {"messages": CHAT, "id": 7},
        ],
    )
    assert open_text(path, "all").examples == (
        Example("f.jsonl:1", text="once"),
        Example("f.jsonl:2", prompt="2+2=", completion="4"),
        Example("f.jsonl:3", prompt="How many?\n", completion="One and one.\n#### 2"),
        Example("f.jsonl:4", messages=tuple(CHAT)),
    )


def test_the_answers_to_a_prompt_are_in_one_split(tmp_path):
    records = [{"prompt": f"{i}?", "responses": [f"{i}{x}" for x in "abc"]} for i in range(60)]
    path = write_jsonl(tmp_path / "f.jsonl", records)
    train, test = (open_text(path, s, held_out=0.3).examples for s in ("train", "test"))
    assert {e.prompt for e in train}.isdisjoint(e.prompt for e in test)
    assert len(train) + len(test) == 180 and len(test) % 3 == 0 < len(test)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "empty"),
        ("{'text': 'a'}", "not valid JSON"),
        ("[" * 200_000, "not valid JSON"),
        ('["a"]', "the record is list; expected an object"),
        ({"txt": "a"}, r"the fields are \['txt'\]; expected one of the fields messages"),
        ({"text": None}, r"the fields are \['text'\]"),
        ({"text": " \n"}, "text is empty"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"messages": ["hello"]}, "a message is str; expected an object"),
        (
            {"messages": [{"role": "assistant", "content": None}]},
            "lacks the strings role and content",
        ),
        ({"messages": CHAT[:1]}, "no assistant message"),
        ({"text": "a" * LONGEST}, "1,000,002 bytes; expected at most 1,000,000"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_lines_that_cannot_be_used_are_named(tmp_path, line, message):
    good = {"text": "once"}
    path = write_jsonl(tmp_path / "f.jsonl", [good, line, good])
    data = open_text(path, "all")
    assert [e.where for e in data.examples] == ["f.jsonl:1", "f.jsonl:3"]
    (left_out,) = data.left_out
    assert left_out.startswith("f.jsonl:2: ")
    with pytest.raises(ValueError, match=message):
        open_text(write_jsonl(tmp_path / "bad.jsonl", [line]), "all")


def test_undecodable_bytes_and_a_byte_order_mark(tmp_path):
    good = '{"text": "é"}'.encode()
    (tmp_path / "f.jsonl").write_bytes(b"\xef\xbb\xbf" + good + b"\r\n\xff\xfe\n" + good)
    data = open_text(tmp_path / "f.jsonl", "all")
    assert [e.text for e in data.examples] == ["é", "é"]
    assert data.left_out[0].startswith("f.jsonl:2: not UTF-8")
    (tmp_path / "f.txt").write_bytes(b"\xef\xbb\xbfone\r\n\xff\nthree\n")
    data = open_text(tmp_path / "f.txt", "all")
    assert data.examples == (Example("f.txt:1", text="one\nthree"),)
    assert data.left_out == ("f.txt:2: not UTF-8 (invalid start byte)",)


def test_text_that_is_not_utf_8_is_named_and_never_learned(tmp_path):
    (tmp_path / "a.txt").write_bytes("één\r\ntwo\n".encode("utf-16"))
    (tmp_path / "b.md").write_text("good\n" * 2000 + "a\0b\n" + "end\n")
    data = open_text(tmp_path, "all")
    assert {e.where.partition(":")[0] for e in data.examples} == {"b.md"}
    assert not any("\0" in (e.text or "") for e in data.examples)
    assert any(line.startswith("b.md:2001: contains NUL bytes") for line in data.left_out)
    (tmp_path / "b.md").unlink()
    with pytest.raises(ValueError, match="a.txt:1: contains NUL bytes; expected UTF-8 text"):
        open_text(tmp_path, "all")


def test_the_first_messages_are_listed(tmp_path):
    data = open_text(write_jsonl(tmp_path / "f.jsonl", ["{"] * 50 + [{"text": "a"}]), "all")
    assert len(data.left_out) == 50
    assert first_few(data.left_out)[-1] == "and 30 more"
    assert first_few(["a", "b"], 2) == ("a", "b")
    (share,) = data.shares
    assert share.is_large
    assert str(share).startswith("50 of 51 records (98.0%) left out, for example f.jsonl:1: ")


def test_a_jsonl_file_without_a_usable_line_is_an_error_in_a_folder_too(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    write_jsonl(tmp_path / "b.jsonl", [{"txt": "b"}, "{"])
    with pytest.raises(ValueError, match=r"b\.jsonl has no usable record: b\.jsonl:1: the fields"):
        open_text(tmp_path, "all")
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"b\.jsonl has no usable record: the file is empty"):
        open_text(tmp_path, "all")


def test_plain_text_is_cut_between_paragraphs(tmp_path):
    paragraph = "word " * 500 + "\n"
    (tmp_path / "f.md").write_text("# Title\n\n" + f"{paragraph}\n" * 5)
    (tmp_path / "g.txt").write_text("word " * 100 + "\n" + "line without a blank one\n" * 3000)
    (tmp_path / "h.txt").write_text("\n \n")
    (tmp_path / "i.png").write_bytes(b"\x89PNG")
    data = open_text(tmp_path, "all")
    places = [e.where for e in data.examples]
    assert places[:4] == ["f.md:1", "f.md:7", "f.md:11", "g.txt:1"]
    assert data.left_out == ("h.txt:1: empty",)
    texts = [str(e.text) for e in data.examples]
    assert "\n\n".join(texts[:3]) == (tmp_path / "f.md").read_text().strip("\n")
    assert "\n".join(texts[3:]) == (tmp_path / "g.txt").read_text().strip("\n")
    assert max(map(len, texts[3:])) < 17_000


def test_held_out_documents_stay_the_same_and_duplicates_stay_together(tmp_path):
    records = [{"text": f"story {i % 200}"} for i in range(400)]
    path = write_jsonl(tmp_path / "f.jsonl", records)
    train, test = open_text(path, "train"), open_text(path, "test")
    texts = [{e.text for e in part.examples} for part in (train, test)]
    assert not texts[0] & texts[1]
    assert texts[0] | texts[1] == {r["text"] for r in records}
    assert len(train) + len(test) == 400
    assert 20 <= len(test) <= 70  # 10 % of 200 stories, each twice
    # A story keeps its side whatever else is added, and wherever it is.
    more = write_jsonl(tmp_path / "more.jsonl", [{"text": "new"}, *records[::-1]])
    assert {e.text for e in open_text(more, "test").examples} - {"new"} == texts[1]
    half = open_text(path, "test", held_out=0.5)
    assert texts[1] < {e.text for e in half.examples}


def test_held_out_data_can_be_omitted(tmp_path):
    lines = [{"text": f"text {i}"} for i in range(5)]
    write_jsonl(tmp_path / "a.jsonl", lines)
    write_jsonl(tmp_path / "b.jsonl", [*lines[1:3], {"text": "another"}])
    every, held_out = (open_text(tmp_path / name, "all") for name in ("a.jsonl", "b.jsonl"))
    kept = every.without(held_out)
    assert [e.text for e in kept.examples] == ["text 0", "text 3", "text 4"]
    assert kept.digest != every.digest and kept.left_out[0].startswith("2 documents")
    assert kept.without(held_out) is kept
    with pytest.raises(ValueError, match="every document of .*a.jsonl is also in"):
        every.without(every)


@pytest.mark.parametrize("name", ["test", "validation"])
def test_a_separate_validation_split(tmp_path, name):
    train = write_jsonl(tmp_path / "my_train.jsonl", [{"text": "a"}])
    write_jsonl(tmp_path / f"my_{name}.jsonl", [{"text": "b"}])
    assert [e.text for e in open_text(train, "train").examples] == ["a"]
    assert [e.text for e in open_text(train, "test").examples] == ["b"]
    assert [e.text for e in open_text(train, "all").examples] == ["a"]
    folder = tmp_path / "folder"
    (folder / "train").mkdir(parents=True)
    (folder / name).mkdir()
    write_jsonl(folder / "train" / "x.jsonl", [{"text": "a"}])
    write_jsonl(folder / name / "x.jsonl", [{"text": "b"}])
    assert [e.text for e in open_text(folder, "train").examples] == ["a"]
    assert [e.text for e in open_text(folder, "test").examples] == ["b"]
    assert len(open_text(folder, "all")) == 2


def test_the_digest_covers_the_bytes_that_were_read(tmp_path):
    first = open_text(write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}]), "all")
    same = open_text(write_jsonl(tmp_path / "b.jsonl", ["", {"text": "a"}, {"text": "b"}]), "all")
    other = open_text(write_jsonl(tmp_path / "c.jsonl", [{"text": "b"}, {"text": "a"}]), "all")
    form = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "completion": "b"}])
    longer = write_jsonl(tmp_path / "e.jsonl", [{"text": "a"}, {"text": "b and more"}])
    another = write_jsonl(tmp_path / "f.jsonl", [{"text": "a"}, {"text": "b and less"}])
    others = [other, *(open_text(path, "all") for path in (form, longer, another))]
    assert first.digest == same.digest
    assert len({d.digest for d in (first, *others)}) == 5


def test_reading_stops_at_max_bytes(tmp_path):
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "12345678"}] * 5)
    data = open_text(path, "all", max_bytes=25)  # ten bytes each, with the quotes
    assert len(data) == 2
    assert data.left_out == ("f.jsonl:3 and the rest are left out: max_bytes is 25",)


def test_the_standard_library():
    train = open_text("stdlib", "train", max_bytes=1_000_000)
    test = open_text("stdlib", "test", max_bytes=1_000_000)
    assert {e.where for e in train.examples}.isdisjoint(e.where for e in test.examples)
    assert len(train) > 10 and len(test) > 0
    both = [*train.examples, *test.examples]
    assert 500_000 < sum(len(e.content()) for e in both) <= 1_000_000
    assert all(e.where.endswith(".py") and e.text.strip() for e in both)
    assert not any("test" in e.where.split("/")[:-1] for e in both)
    assert not any("site-packages" in e.where for e in both)
    (stopped,) = train.left_out  # modules that are empty on purpose are not listed
    assert stopped.endswith("and the rest are left out: max_bytes is 1,000,000")
    assert open_text("stdlib", "train", max_bytes=1_000_000) == train
    assert train.name == f"stdlib of Python {platform.python_version()}"  # each one's is another


@pytest.mark.parametrize("name", ["nothing.jsonl", "table.xlsx"])
def test_no_such_source(tmp_path, name):
    with pytest.raises(ValueError, match="split is 'dev'; expected"):
        open_text("stdlib", "dev")
    (tmp_path / "table.xlsx").write_text("a,b")
    with pytest.raises(DatasetUnavailable, match="expected an existing folder or text file"):
        open_text(tmp_path / name)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A data set as `datasets` opens it, from a folder instead of the network."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "stories"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"text": f"story {i}"} for i in range(50)])
    return folder


def test_hugging_face(hub):
    train, test = open_text(f"hf:{hub}", "train"), open_text(f"hf:{hub}", "test")
    assert len(train) + len(test) == 50 and len(test)
    assert train.examples[0].where.endswith("stories[train]:1")
    write_jsonl(hub / "test.jsonl", [{"text": "the end"}, {"text": ""}])
    test = open_text(f"hf:{hub}", "test")
    assert [e.text for e in test.examples] == ["the end"]
    assert test.left_out[0].endswith("stories[test]:2: text is empty")
    assert len(open_text(f"hf:{hub}", "train")) == 50
    assert len(open_text(f"hf:{hub}", "all")) == 51


def test_hugging_face_that_cannot_be_opened(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def no_network(*arguments):
        raise ConnectionError(f"no route to the hub for {arguments}")

    monkeypatch.setattr(datasets, "get_dataset_split_names", no_network)
    with pytest.raises(DatasetUnreachable, match=r"\('wikitext', 'raw-v1'\).*use a local file"):
        open_text("hf:wikitext:raw-v1")


def test_real_text(shared_data):
    text = shared_data / "text"
    stories = open_text(text / "tinystories_train.jsonl", "train")
    held_out = open_text(text / "tinystories_train.jsonl", "test")
    assert (len(stories), len(held_out)) == (854, 95)
    assert not stories.left_out
    plays = open_text(text / "tinyshakespeare.txt", "all")
    assert plays.left_out == () and len(plays) > 100
    whole = (text / "tinyshakespeare.txt").read_text()
    assert [w for e in plays.examples for w in e.text.split()] == whole.split()
    sums = open_text(shared_data / "gsm8k", "test")
    assert len(sums) == 100 and all("#### " in str(e.completion) for e in sums.examples)


def test_one_document_cannot_be_divided(tmp_path):
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "the only one"}])
    with pytest.raises(ValueError, match="the test split is empty, .* of 1 documents"):
        open_text(path, "test", held_out=1e-9)
