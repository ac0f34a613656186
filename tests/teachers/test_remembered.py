"""A teacher's remembered outputs equal the outputs of the teacher itself."""

import pytest
import torch

from ssl_kd.evaluate.language import judge_tokens
from ssl_kd.losses.teacher_output import logits_of
from ssl_kd.losses.token_distillation import next_token_targets
from ssl_kd.teachers.frozen import FrozenTeacher, RememberedTeacher


# The logits of Granite are not linear.
@pytest.mark.parametrize(
    ("kind", "packing"), [("Llama", True), ("GPT2", False), ("Granite", False)]
)
def test_what_is_remembered_is_what_was_said_to_the_bit(tiny, kind, packing):
    changes = {"logits_scaling": 3.0} if kind == "Granite" else {}
    teacher = FrozenTeacher(tiny.model(kind, seed=2, spread=0.3, **changes))
    assert teacher.linear is (kind != "Granite")
    blocks = tiny.blocks(24, packing=packing)
    kept = RememberedTeacher(teacher, blocks, rows=len(blocks), batch_size=3)
    for rows in ([4, 0, 3], [1], range(len(blocks))):  # other batches, of other widths
        batch = blocks.batch(rows)
        positions, _ = next_token_targets(batch.input_ids, batch.counts)
        said = kept(batch, positions)
        expected = logits_of(teacher(batch, positions))
        torch.testing.assert_close(logits_of(said), expected, rtol=1e-5, atol=1e-5)
    student = tiny.model(seed=1)
    found, live = (judge_tokens(student, blocks, teacher=t, batch_size=3) for t in (kept, teacher))
    near = live.table_row("")
    for name, value in found.table_row("").items():
        assert value == (pytest.approx(near[name], rel=1e-5) if name != "name" else ""), name


def test_of_other_rows_nothing_is_known_and_the_others_count(tiny):
    teacher, student = FrozenTeacher(tiny.model(seed=2, spread=0.3)), tiny.model(seed=1)
    blocks = tiny.blocks(24)
    kept = RememberedTeacher(teacher, blocks, rows=8)
    batch = blocks.batch(range(6, 10))
    positions, _ = next_token_targets(batch.input_ids, batch.counts)
    assert kept(batch, positions) is None
    found = judge_tokens(student, blocks, teacher=kept, batch_size=4)
    known = judge_tokens(student, blocks.part(slice(8)), teacher=teacher, batch_size=4)
    assert found.nll != known.nll and found.tokens > known.tokens
    assert found.kl == pytest.approx(known.kl, rel=1e-5)
    assert found.agreement == known.agreement
    dims, vocabulary = 32, len(tiny.tokenizer)
    real = int((blocks.documents[:8] > 0).sum())
    assert kept.bytes == 4 * dims * (real + vocabulary)
