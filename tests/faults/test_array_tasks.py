"""Row 110: a task of a job array that embeds one data set."""

import os

import pytest

from tests.faults.matrix import row
from tests.vision import test_extract_many as many
from tests.vision.counting import SHARD
from tests.vision.test_extract_many import Job, content

alone = many.alone


@row(110)
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_killed_at_a_shard_a_process_of_many_goes_on_with_exactly_the_missing_ones(tmp_path, alone):
    job = Job(tmp_path, batch=SHARD // 2)
    (tmp_path / "deadly").write_text(job.sums[2 * 6 + 1])  # in the second half of shard 6
    code, _, _ = job.run("--rank", "0", "--world", "2")
    assert code == -9 and len(job.batches()) == 8
    (tmp_path / "deadly").unlink()
    before = job.stored()
    assert sorted(before) == [f"embeddings_train_{shard:05d}.pt" for shard in (0, 2, 4)]

    code, told, _ = job.run("--rank", "0", "--world", "2")
    assert code == 0 and "has stored its 8 of 15 shards" in told
    computed, missing = job.batches(), (6, 8, 10, 12, 14)
    assert set(computed.values()) == {1} and len(computed) == 9 + 4  # and those of the test split
    halves = {job.sums[at] for shard in missing for at in (2 * shard, 2 * shard + 1) if at < 29}
    assert set(computed) & set(job.sums) == halves
    assert before.items() <= job.stored().items()

    code, told, _ = job.run("--rank", "1", "--world", "2")
    assert code == 0 and len(job.batches()) == 14 + 4
    assert "1437 rows of 2, float32, in 15 shards" in told and "360 rows of 2" in told
    assert content(job.cache) == alone

    code, told, _ = job.run("--rank", "0", "--world", "2")  # started again, all is done
    assert code == 0 and not job.batches() and "1437 rows" in told
    assert content(job.cache) == alone
