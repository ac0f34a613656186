"""Text and tokens beyond the memory limit are kept in files, with the same content."""

import errno
import io
import json
import tempfile
import tracemalloc

import numpy as np
import pytest
import torch

from ssl_kd.core.errors import InputError
from ssl_kd.core.files import spill as module
from ssl_kd.core.files.spill import SpilledSequence, filled_array
from ssl_kd.language.text.aligned import aligned_blocks
from ssl_kd.language.text.blocks import make_blocks
from ssl_kd.language.text.dataset import open_text

pytest.importorskip("transformers")


@pytest.fixture
def little(monkeypatch, tmp_path):
    """So little memory that everything of more than a few rows lies in files."""
    monkeypatch.setattr(module, "IN_MEMORY", 2000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def is_in_file(items):
    return items._file._rolled


def test_items_are_the_same_from_a_file(little):
    items = [{"n": n, "text": "é" * n} for n in range(100)]
    found = SpilledSequence(iter(items))
    assert is_in_file(found) and not is_in_file(SpilledSequence(items[:3]))
    assert SpilledSequence(items[:3]) == tuple(items[:3]) != found
    assert len(found) == 100 and list(found) == items and found[-1] == items[-1]
    assert found[90:2:-7] == tuple(items[90:2:-7]) and items[50] in found
    with pytest.raises(IndexError):
        found[100]


@pytest.mark.parametrize("rows", [3, 1000])
def test_tables_are_the_same_from_a_file(little, rows):
    found = filled_array(rows, 7, np.int32, 5)
    assert isinstance(found, np.memmap) == (rows == 1000)
    assert found.shape == (rows, 7) and (found == 5).all()
    torch.from_numpy(found)[1] = 6
    assert found[1].tolist() == [6] * 7 and found.sum() == 7 * (5 * rows + 1)


def test_blocks_are_the_same_from_files(tiny, tmp_path, request):
    path = tmp_path / "text.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"{n} " * (n % 40 + 1)}) + "\n" for n in range(200))
    )
    tokenizer = tiny.tokenizer

    def made():
        texts, held_out = open_text(path, "train"), open_text(path, "test")
        texts = texts.without(held_out)
        return texts, make_blocks(texts, tokenizer, 24), aligned(texts)

    def aligned(texts):
        return aligned_blocks(texts, tokenizer, tokenizer, 24)

    texts, blocks, both = made()
    request.getfixturevalue("little")
    again, found, others = made()
    assert not is_in_file(texts.examples) and is_in_file(again.examples)
    assert list(again.examples) == list(texts.examples) and again.digest == texts.digest
    assert (found.digest, found.left_out) == (blocks.digest, blocks.left_out)
    assert others.digest == both.digest and others.statistics() == both.statistics()
    for one, other in zip(
        found.batch([3, 0, 5]).model_inputs().values(),
        blocks.batch([3, 0, 5]).model_inputs().values(),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.slow  # needs many documents
def test_memory_does_not_grow_with_the_text(tiny, tmp_path, monkeypatch):
    path, line = tmp_path / "text.jsonl", json.dumps({"text": "one, two and 345. " * 12}) + "\n"
    monkeypatch.setattr(module, "IN_MEMORY", 20_000)

    def peak(documents):
        path.write_text(line * documents)
        tracemalloc.start()
        blocks = make_blocks(open_text(path, "all"), tiny.tokenizer, 64)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most, int(blocks.counts.sum())

    tiny.tokenizer.encode("once")
    (small, few), (large, many) = peak(1500), peak(3000)  # many times what is tokenized at once
    assert many > 1.9 * few
    assert large - small < 4 * (many - few)  # bytes a token, where memory would hold 20 and more


def test_a_full_disk_names_the_way_out(little, monkeypatch):
    class Full(io.BytesIO):
        def __init__(self, **_):
            super().__init__()

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    for attempt in (
        lambda: SpilledSequence(["x" * 100] * 100),
        lambda: filled_array(1000, 10, np.int64),
    ):
        with pytest.raises(InputError, match="set TMPDIR to a folder of a larger disk"):
            attempt()
