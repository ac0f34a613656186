"""Test row 110: job arrays that embed one data set."""

import os

import pytest

from tests.faults.matrix import row
from tests.vision import test_extract_many as many
from tests.vision.test_extract_many import Job, content

alone = many.alone


@row(110)
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_killed_task_of_an_array_computes_exactly_its_missing_shards(tmp_path, alone):
    job = Job(tmp_path)
    (tmp_path / "deadly").write_text(job.sums[6])
    code, _, _ = job.run("--rank", "0", "--world", "2")
    assert code == -9 and len(job.batches()) == 4
    (tmp_path / "deadly").unlink()
    before = job.stored()
    # The last shard is written while the next one is computed.
    assert sorted(before) == [f"embeddings_train_{shard:05d}.pt" for shard in (0, 2)]

    code, output, _ = job.run("--rank", "0", "--world", "2")
    assert code == 0 and "has stored its 12 of 23 shards" in output
    computed, missing = job.batches(), range(4, 23, 2)
    assert set(computed.values()) == {1} and len(computed) == 10 + 3  # 3 in the test split
    assert set(computed) & set(job.sums) == {job.sums[shard] for shard in missing}
    assert before.items() <= job.stored().items()

    code, output, _ = job.run("--rank", "1", "--world", "2")
    assert code == 0 and len(job.batches()) == 11 + 3
    assert "1437 rows of 2, float32, in 23 shards" in output and "360 rows of 2" in output
    assert content(job.cache) == alone

    code, output, _ = job.run("--rank", "0", "--world", "2")  # nothing left to do
    assert code == 0 and not job.batches() and "1437 rows" in output
    assert content(job.cache) == alone
