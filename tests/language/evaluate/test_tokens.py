"""Scores of tokens against direct computations in float64."""

import math

import pytest
import torch

from ssl_kd.language.evaluate.tokens import TokenScores, token_values

INF = math.inf


def scored(logits, targets, teacher=None, *, n_bytes=None, cuts=()):
    """The scores of one batch, its tokens cut into chunks at `cuts`."""
    scores = TokenScores()
    edges = [0, *cuts, len(targets)]
    chunks = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    scores.add(
        [
            token_values(logits[c], targets[c], None if teacher is None else teacher[c])
            for c in chunks
        ],
        range(len(targets)),
        n_bytes,
    )
    return scores


def case(n=40, vocabulary=11, scale=3.0):
    return (
        torch.randn(n, vocabulary) * scale,
        torch.randint(vocabulary, (n,)),
        torch.randn(n, vocabulary) * scale,
    )


def test_scores_equal_a_direct_computation_in_float64():
    logits, targets, teacher = case()
    q, p = logits.double().softmax(-1), teacher.double().softmax(-1)
    nll = -q[torch.arange(40), targets].log().mean().item()
    scores = scored(logits, targets, teacher, n_bytes=100)
    assert scores.tokens == 40 and scores.left_out == []
    assert scores.nll == pytest.approx(nll, rel=1e-6)
    assert scores.perplexity == pytest.approx(math.exp(nll), rel=1e-6)
    assert scores.bits_per_byte == pytest.approx(40 * nll / math.log(2) / 100, rel=1e-6)
    agreement = (q.argmax(-1) == p.argmax(-1)).double().mean().item()
    assert scores.agreement == pytest.approx(agreement) and 0 < agreement < 1
    forward, reverse = (p * (p / q).log()).sum(-1).mean(), (q * (q / p).log()).sum(-1).mean()
    assert abs(forward - reverse) > 0.1  # so that the direction is seen
    assert scores.kl == pytest.approx(forward.item(), rel=1e-5)
    tvd = (p - q).abs().sum(-1).mean().item() / 2
    assert scores.acceptance == pytest.approx(1 - tvd, rel=1e-6) and 0.1 < tvd < 0.9
    row = scores.table_row("student")
    assert row.pop("name") == "student" and row.pop("left_out") == 0
    alone = ("perplexity", "nll", "bits_per_byte", "ece")
    assert row == {
        name: getattr(scores, name) for name in (*alone, "agreement", "kl", "acceptance")
    }


def test_calibration_error_of_an_example_by_hand():
    # Two classes. Confidences .55 .58 | .9 .92 | 1, right in 1 of 2 | 0 of 2 | 1 of 1.
    top = torch.tensor([0.55, 0.58, 0.9, 0.92, 1.0], dtype=torch.float64)
    logits = torch.stack([top, 1 - top], 1).log()
    scores = scored(logits, torch.tensor([0, 1, 1, 1, 0]))
    # Fifteenths: .55 and .58 fall into (8/15, 9/15], .9 and .92 into (13/15, 14/15].
    expected = (abs(1 - 1.13) + abs(0 - 1.82) + abs(1 - 1)) / 5
    assert scores.ece == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("cuts", [[1], [7, 20, 39], list(range(1, 40))])
def test_chunks_change_nothing(cuts):
    logits, targets, teacher = case()
    whole = scored(logits, targets, teacher, n_bytes=7).table_row("a")
    assert scored(logits, targets, teacher, n_bytes=7, cuts=cuts).table_row("a") == whole


def test_vocabularies_of_different_padding_are_compared_in_their_common_part():
    logits, targets, teacher = case()
    for teacher_pad, student_pad in ((5, 0), (0, 5)):
        padded = torch.cat([logits, torch.randn(40, student_pad)], 1)
        wide = torch.cat([teacher, torch.randn(40, teacher_pad) + 9], 1)
        scores, plain = scored(padded, targets, wide), scored(logits, targets, teacher)
        assert scores.kl == pytest.approx(plain.kl, rel=1e-5)
        assert scores.agreement == plain.agreement
        assert scores.acceptance == pytest.approx(plain.acceptance, rel=1e-5)
        assert (scores.nll == pytest.approx(plain.nll)) is (student_pad == 0)


def test_entries_that_either_side_excludes_everywhere_are_outside_the_vocabulary():
    logits, targets, teacher = case(vocabulary=9)
    plain = scored(logits, targets, teacher)
    shut = torch.full((40, 2), -INF)
    open_ = torch.randn(40, 2)
    for student, other in ((shut, shut), (shut, open_), (open_, shut)):
        scores = scored(torch.cat([logits, student], 1), targets, torch.cat([teacher, other], 1))
        assert scores.left_out == []
        assert scores.kl == pytest.approx(plain.kl, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_batch_that_is_not_finite_is_named_and_left_out(bad, side, caplog):
    logits, targets, teacher = case()
    scores, healthy = TokenScores(), TokenScores()
    sick_logits, sick_teacher = logits.clone(), teacher.clone()
    (sick_logits if side == "student" else sick_teacher)[3, 2] = bad
    for rows in (range(0, 8), range(16, 24)):
        for gathered in (scores, healthy):
            gathered.add([token_values(logits, targets, teacher)], rows, 100)
        if rows[0] == 0:
            scores.add([token_values(sick_logits, targets, sick_teacher)], range(8, 16), 100)
    assert scores.left_out[0].startswith("blocks 8 to 15: not finite: ")
    assert "kl in 1" in scores.left_out[0] and scores.left_out[0].endswith(" of 40 tokens")
    assert ("nll in 1" in scores.left_out[0]) is (side == "student")
    assert "excluded from evaluation means: blocks 8 to 15" in caplog.text
    row, expected = scores.table_row("student"), healthy.table_row("student")
    assert row.pop("left_out") == 1 and expected.pop("left_out") == 0
    assert row == expected and row["bits_per_byte"]  # its bytes do not count either


def test_excluding_a_teachers_token_is_an_infinite_divergence():
    logits, targets, teacher = case()
    targets[0], logits[0, 4] = 3, -INF
    assert scored(logits, targets, teacher).left_out == [
        "blocks 0 to 39: not finite: kl in 1 of 40 tokens"
    ]
    assert scored(logits, targets).left_out == []


def test_unknown_values_are_none_not_zero():
    logits = torch.zeros(3, 4)
    logits[:, 0] = 1e4
    scores = scored(logits, torch.ones(3, dtype=torch.long))
    assert scores.perplexity is None and scores.nll == pytest.approx(1e4)
    empty = TokenScores()
    empty.add([token_values(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))], [0], 9)
    empty.add([], [1])
    sick = TokenScores()
    sick.add([token_values(torch.full((2, 5), math.nan), torch.zeros(2, dtype=torch.long))], [4])
    for scores, left_out in ((empty, 0), (sick, 1)):
        row = scores.table_row("student")
        assert row.pop("name") == "student" and row.pop("left_out") == left_out
        assert set(row.values()) == {None}
    assert sick.left_out[0].startswith("blocks 4: ")


def test_bits_per_byte_do_not_depend_on_the_tokenizer():
    # 12 bytes at one bit each, as 12 tokens of 2 symbols or as 4 tokens of 8 symbols.
    letters = scored(torch.zeros(12, 2), torch.zeros(12, dtype=torch.long), n_bytes=12)
    triples = scored(torch.zeros(4, 8), torch.zeros(4, dtype=torch.long), n_bytes=12)
    assert letters.bits_per_byte == pytest.approx(1)
    assert triples.bits_per_byte == pytest.approx(1)
    assert letters.perplexity == pytest.approx(2) and triples.perplexity == pytest.approx(8)
    assert scored(torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)).bits_per_byte is None
