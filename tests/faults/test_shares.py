"""Test rows 110 and 111: many writers of one cache."""

import os
from dataclasses import replace

import pytest
import torch

from ssl_kd.core.shards import FingerprintMismatch
from ssl_kd.vision.cache import EmbeddingStore
from tests.faults.matrix import row
from tests.faults.test_data_and_store import shards
from tests.kill_writers import kill_again_and_again
from tests.vision.cache import test_ledger as ledger
from tests.vision.cache.test_ledger import FINGERPRINT, content, fill, writer, x

alone = ledger.alone


def fill_shares(folder):
    """Fill two shares one after the other in one process."""
    for rank in (1, 0):
        with writer(folder, slice(rank, None, 2)) as one:
            fill(one)
            one.publish()


@row(110)
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_killed_at_twenty_random_positions_no_share_loses_a_shard(tmp_path, alone):
    found = kill_again_and_again(fill_shares, shards, tmp_path / "killed", kills=20)
    assert found.kills == 20 and found.resumed > 5
    for folder in [found.straight, *found.folders]:
        assert content(folder) == alone


@row(111)
def test_of_two_that_compute_the_same_shard_the_first_counts(tmp_path):
    first, second = writer(tmp_path, slice(2, 3)), writer(tmp_path, slice(2, 4))
    fill(second, 5.0, most=1)  # as rounded by another GPU
    fill(first)
    fill(second, 5.0)
    with writer(tmp_path, slice(0, None)) as rest:
        assert rest.absent == [0, 1, 4, 5, 6]
        fill(rest)
        assert first.publish() and second.publish() and rest.publish()
    store = EmbeddingStore.open(tmp_path, "train")
    at = store.indices.tolist()
    assert torch.equal(store.tensor()[at.index(16)], x(5.0)[16])
    assert torch.equal(store.tensor()[at.index(0)], x()[0])
    assert not (tmp_path / "embeddings_train.partial").exists()


@row(111)
def test_shares_of_different_caches_do_not_mix(tmp_path):
    other = replace(FINGERPRINT, teacher="other")
    old = writer(tmp_path, slice(0, 2))
    fill(old, most=1)
    with pytest.raises(FingerprintMismatch, match="teacher: cache has 'pixels'"):
        writer(tmp_path, slice(0, 1), fingerprint=other)
    new = writer(tmp_path, slice(0, None), fingerprint=other, force=True)
    fill(new, 2.0, most=3)
    with pytest.raises(FingerprintMismatch, match="teacher: cache has 'other'"):
        fill(old)
    fill(new, 2.0)
    assert new.publish()
    store = EmbeddingStore.open(tmp_path, "train", expect=other)
    assert torch.equal(store.tensor(), x(2.0)[store.indices])
