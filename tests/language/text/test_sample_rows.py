"""The rows that a dry run shows mark exactly the tokens that have loss."""

import pytest

from ssl_kd.language.text.blocks import make_blocks
from ssl_kd.language.text.dataset import TextDataset
from ssl_kd.language.text.records import as_example
from ssl_kd.language.text.sample_rows import describe_row, sample_rows

pytest.importorskip("transformers")


def test_only_the_completion_of_a_prompt_is_marked(tiny):
    record = {"prompt": "the old fox sees", "completion": " Lily at night"}
    texts = TextDataset("one", "train", (as_example(record, "one:1"),), "digest", ())
    blocks = make_blocks(texts, tiny.tokenizer, 24, packing=False)
    (row,) = sample_rows(blocks, tiny.tokenizer)
    learned = "".join(piece["text"] for piece in row["pieces"] if piece["has_loss"])
    shown = "".join(piece["text"] for piece in row["pieces"] if not piece["has_loss"])
    assert "Lily at night" in learned and "the old fox sees" in shown
    assert row["learned"] == int(blocks.counts[0].sum()) < row["tokens"]
    assert row["tokens"] == int((blocks.documents[0] > 0).sum())
    assert f"{shown}[[{learned}]]" in describe_row(row)


def test_a_few_rows_are_shown_in_order(tiny):
    blocks = make_blocks(tiny.texts(), tiny.tokenizer, 24, packing=True)
    rows = sample_rows(blocks, tiny.tokenizer, 3)
    assert len(blocks) > 3 and len(rows) == 3
    first = tiny.texts().examples[0].text
    assert first[:30] in "".join(piece["text"] for piece in rows[0]["pieces"])
    assert sample_rows(blocks.part(slice(2)), tiny.tokenizer, 3) == rows[:2]
