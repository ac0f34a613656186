import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_kd import losses
from ssl_kd.losses import DIVERGENCES, LegacyClamp, next_token_targets, token_kd
from tests.faults.matrix import row
from tests.oracles import token_objectives as oracle

NAMES = (*DIVERGENCES, *oracle.JS, "reverse_kl:2")

INF = float("inf")


def _case(batch=2, tokens=3, vocab=7, scale=2.0, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shape = (batch, tokens, vocab)
    student = torch.randn(shape, generator=g, dtype=torch.float64) * scale
    teacher = torch.randn(shape, generator=g, dtype=torch.float64) * scale
    return student.to(dtype), teacher.to(dtype)


def _ours(student, teacher, **options):
    student = student.detach().clone().requires_grad_()
    value = token_kd(student, teacher, **options)
    value.backward()
    return value, student.grad


def _ordinary():
    return _case(vocab=50, dtype=torch.float16), {}


def _huge(scale, temperature):
    student, teacher = _case(vocab=50, scale=1.0)
    student, teacher = (student * scale).clamp(-6e4, 6e4), (teacher * scale).clamp(-6e4, 6e4)
    return (student.half(), teacher.half()), {"temperature": temperature}


def _infinite():
    student, teacher = _case(vocab=50, dtype=torch.float16)
    student[0, 0, 3], student[1, 2, 8], teacher[0, 0, 3], teacher[0, 1, 6] = INF, -INF, INF, -INF
    return (student, teacher), {}


def _padded_teacher():
    student, teacher = _case(vocab=50, dtype=torch.float16)
    teacher[..., 44:] = -INF
    return (student, teacher), {}


def _padded_both():
    (student, teacher), options = _padded_teacher()
    student[..., 44:] = -INF
    return (student, teacher), options


def _student_only():
    student, teacher = _case(vocab=50, dtype=torch.float16)
    student[0, 1, teacher[0, 1].argmax()] = -INF
    return (student, teacher), {}


def _padding_nan():
    student, teacher = _case(tokens=5, vocab=50, dtype=torch.float16)
    mask = torch.ones(2, 5)
    mask[0, 3:] = mask[1, 1:] = 0
    student[mask == 0], teacher[mask == 0] = float("nan"), float("nan")
    return (student, teacher), {"mask": mask}


def _all_masked():
    student, teacher = _case(vocab=50, dtype=torch.float16)
    return (student, teacher), {"mask": torch.zeros(2, 3)}


ELEVEN = {
    "ordinary": _ordinary,
    "logits of 1e4 at T = 4": lambda: _huge(1e4, 4.0),
    "6e4 at T = 1": lambda: _huge(6e4, 1.0),
    "4e4 at T = 0.5": lambda: _huge(4e4, 0.5),
    "already inf": _infinite,
    "teacher -inf in padded vocabulary": _padded_teacher,
    "both -inf": _padded_both,
    "student -inf only": _student_only,
    "NaN in padding": _padding_nan,
    "every label masked": _all_masked,
    "long sequence": lambda: (_case(1, 120, 50, dtype=torch.float16), {}),
}


@row(25)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ELEVEN)
def test_the_eleven_fp16_cases(case, name):
    (student, teacher), options = ELEVEN[case]()
    value, gradient = _ours(student, teacher, divergence=name, **options)
    expected, slope = oracle.token_kd(student, teacher, divergence=name, **options)
    assert value.dtype == torch.float32 and gradient.dtype == torch.float16
    torch.testing.assert_close(value.double(), expected, rtol=2e-3, atol=2e-3)
    scale = slope.abs().max().clamp(min=1)
    torch.testing.assert_close(
        gradient / scale, slope / scale, rtol=2e-3, atol=1e-6, check_dtype=False
    )


@row(25)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("side", "outside"), [(0, [2, 5]), (1, [2, 5]), (0, [2, 3, 4, 5, 6])])
def test_entries_outside_the_vocabulary_are_dropped_on_both_sides(name, side, outside):
    student, teacher = _case()
    kept = [i for i in range(7) if i not in outside]
    with_hole = [student.clone(), teacher.clone()]
    with_hole[side][..., outside] = -INF
    value, gradient = _ours(*with_hole, divergence=name)
    expected, slope = _ours(student[..., kept], teacher[..., kept], divergence=name)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient[..., kept], slope)
    assert gradient[..., outside].abs().max() == 0


@row(25)
@pytest.mark.parametrize("name", NAMES)
def test_padding_of_the_vocabulary_gets_no_mass(name):
    student, teacher = _case()
    value, gradient = _ours(student, torch.cat([teacher, teacher + 9], -1), divergence=name)
    expected, slope = _ours(student, teacher, divergence=name)
    assert torch.equal(value, expected) and torch.equal(gradient, slope)
    value, gradient = _ours(torch.cat([student, student + 9], -1), teacher, divergence=name)
    assert torch.equal(value, expected) and torch.equal(gradient[..., :7], slope)
    assert gradient[..., 7:].abs().max() == 0


@row(25)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("junk", [float("nan"), INF, -INF, 1e4])
def test_masked_tokens_change_no_bit(name, junk):
    student, teacher = _case(dtype=torch.float16)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    value, gradient = _ours(student, teacher, mask=mask, divergence=name)
    student[mask == 0], teacher[mask == 0] = junk, junk
    again, slope = _ours(student, teacher, mask=mask, divergence=name)
    assert torch.equal(value, again) and torch.equal(gradient, slope)
    assert gradient[mask == 0].abs().max() == 0 < gradient[mask == 1].abs().max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", [0, 1])
def test_a_nan_in_a_real_token_stays_one(name, side):
    both = _case()
    both[side][1, 1, 4] = float("nan")
    value, gradient = _ours(*both, divergence=name)
    assert value.isnan() and gradient[1, 1].isnan().any() and gradient[0].isfinite().all()


@settings(max_examples=80, deadline=None)
@given(
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4, 6e4]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    temperature=st.sampled_from([1e-4, 0.5, 1.0, 2.0, 1e4]),
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 10),
)
def test_finite_and_not_negative_at_every_extreme(scale, dtype, temperature, name, seed):
    student, teacher = _case(vocab=11, scale=1.0, seed=seed)
    student, teacher = (x.mul(scale).clamp(-65504, 65504).to(dtype) for x in (student, teacher))
    options = {"temperature": temperature, "divergence": name}
    student.requires_grad_()
    value = token_kd(student.float(), teacher, **options)
    (slope,) = torch.autograd.grad(value, student)
    assert value.isfinite() and value >= 0
    assert slope.float().isfinite().all() or slope.dtype == torch.float16  # a cast may overflow
    same = token_kd(teacher.float(), teacher.float(), **options)
    assert same == 0


@pytest.mark.parametrize("name", NAMES[:-1])  # the tail's logarithm is rounded to 1e-6
def test_nearly_equal_pairs_are_never_below_0_and_near_float64(name):
    for seed in range(20):
        student, _ = _case(1, 3, 1000, scale=3.0, seed=seed)
        teacher = student + 1e-5 * _case(1, 3, 1000, scale=1.0, seed=seed + 99)[0]
        student, teacher = student.float(), teacher.float()
        options = {"temperature": 4.0, "divergence": name}
        value = token_kd(student, teacher, **options)
        exact = token_kd(student.double(), teacher.double(), **options)
        assert value >= 0
        torch.testing.assert_close(value.double(), exact, rtol=0.1, atol=0)


@pytest.mark.parametrize("vocab", [7, 3000])
@pytest.mark.parametrize("temperature", [100.0, 1e3, 1e4])
@pytest.mark.parametrize("name", NAMES)
def test_high_temperatures_are_near_float64(name, temperature, vocab):
    student, teacher = _case(1, 2, vocab, scale=3.0, dtype=torch.float32)
    options = {"temperature": temperature}
    value, gradient = _ours(student, teacher, divergence=name, **options)
    expected, slope = oracle.token_kd(student, teacher, divergence=name, **options)
    torch.testing.assert_close(value.double(), expected, rtol=1e-3, atol=0)
    if name != "tvd":  # whose slope is a sign, of differences that are rounding here
        torch.testing.assert_close(
            gradient.double(), slope, rtol=1e-3, atol=1e-3 * slope.abs().max()
        )


@pytest.mark.parametrize("name", NAMES)
def test_an_unlikely_outcome_far_apart_in_close_rows_keeps_its_share(name):
    """Where p underflows and q does not, q / p has no logarithm that an exponential can hold."""
    teacher = torch.tensor([[[0.0, 0.0, -300.0, -300.0]]])
    student = torch.tensor([[[0.0, 0.0, -7.5, -300.0]]])
    for both in ((student, teacher), (teacher, student)):
        value, _ = _ours(*both, divergence=name, temperature=1.0)
        expected, _ = oracle.token_kd(*both, divergence=name, temperature=1.0)
        torch.testing.assert_close(value.double(), expected, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", [0, 1])
def test_where_every_entry_is_outside_the_vocabulary_nothing_is_distilled(name, side):
    both = _case()
    both[side].fill_(-INF)
    value, gradient = _ours(*both, divergence=name)
    assert not value.any() and not gradient.any()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tvd"])  # it has no logarithm
def test_a_rare_entry_counts_fully_between_nearly_equal_distributions(name):
    p = torch.tensor([[[0.6, 0.4 - 1e-9, 1e-9]]], dtype=torch.float64)
    q = torch.tensor([[[0.6, 0.4 - 1e-6, 1e-6]]], dtype=torch.float64)
    options = {"temperature": 1.0, "divergence": name}
    expected, _ = oracle.token_kd(q.log(), p.log(), temperature=1.0, divergence=name)
    value = token_kd(q.log().float(), p.log().float(), **options)
    torch.testing.assert_close(value.double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("items", [float, torch.tensor])
def test_accumulated_batches_of_any_length_are_one_large_batch(items):
    student, teacher = _case(4, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    whole, slope = _ours(student, teacher, mask=mask)
    real = items(int(mask.sum()))
    parts = [
        _ours(student[i], teacher[i], mask=mask[i], num_items_in_batch=real)
        for i in (slice(0, 1), slice(1, 3), slice(3, 4))
    ]
    torch.testing.assert_close(sum(value for value, _ in parts), whole)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in parts]), slope)


def test_targets_are_the_next_tokens_that_count():
    ids = torch.tensor([[5, 6, 7, 8], [9, 1, 2, 0]])
    counts = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]).bool()
    rows, targets = next_token_targets(ids, counts)
    assert rows.tolist() == [1, 2, 4] and targets.tolist() == [7, 8, 1]
    with pytest.raises(ValueError, match=r"counts \(2, 3\)"):
        next_token_targets(ids, counts[:, 1:])


def test_a_weighted_js_is_js_at_a_half_and_tends_to_the_two_kls():
    """JSD(b) / b tends to KL(p, q) as b goes to 0, JSD(b) / (1 - b) to KL(q, p) as b goes to 1."""
    student, teacher = _case()
    for half in ("js:0.5", "js:.5"):
        assert torch.equal(
            token_kd(student, teacher, divergence=half), token_kd(student, teacher, divergence="js")
        )
    for name, near, share in (
        ("forward_kl", "js:0.000001", 1e-6),
        ("reverse_kl", "js:0.999999", 1e-6),
    ):
        value, slope = _ours(student, teacher, divergence=near)
        expected, wanted = _ours(student, teacher, divergence=name)
        torch.testing.assert_close(value.div(share), expected, rtol=1e-4, atol=0)
        torch.testing.assert_close(slope.div(share), wanted, rtol=1e-3, atol=1e-6)


def _filtered(logits, k):
    """The k largest of each token; the others are -inf."""
    return logits.masked_fill(logits < logits.topk(k).values[..., -1:], -INF)


@row(25)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 100.0])
@pytest.mark.parametrize("k", [12, 3], ids=["whole", "filtered"])
def test_float64_is_exact_and_a_filter_gives_other_entries_probability_0(k, name, temperature):
    student, teacher = _case(vocab=12)
    teacher = _filtered(teacher, k)
    options = {"temperature": temperature}
    value, gradient = _ours(student, teacher, divergence=name, **options)
    expected, slope = oracle.token_kd(student, teacher, divergence=name, **options)
    torch.testing.assert_close(value, expected, rtol=2e-12, atol=1e-14)
    torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-14)
    if name == "forward_kl":
        p, log_q = (teacher / temperature).softmax(-1), (student / temperature).log_softmax(-1)
        exact = torch.where(p == 0, 0, p * (p.log() - log_q)).sum(-1).mean() * temperature**2
        torch.testing.assert_close(value, exact, rtol=1e-12, atol=0)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 2**31),
    k=st.sampled_from([1, 2, 5, 9]),
    padding=st.integers(0, 4),
    tokens=st.integers(1, 4),
    beside=st.sampled_from(["filtered", "otherwise filtered", "whole"]),
)
def test_the_loss_of_a_row_is_the_same_alone_and_in_any_batch(
    name, seed, k, padding, tokens, beside
):
    student, teacher = _case(batch=5, tokens=tokens, vocab=24, seed=seed)
    batch = torch.full_like(teacher, -INF)
    real = teacher[..., : 24 - padding]  # a vocabulary that is padded, for all
    others = {"filtered": _filtered(real, k), "otherwise filtered": _filtered(real, 11 - k)}
    batch[..., : 24 - padding] = others.get(beside, real)
    batch[:2, :, : 24 - padding] = _filtered(real, k)[:2]

    def total(student, teacher):
        return _ours(student, teacher, divergence=name, num_items_in_batch=1)

    together = total(student, batch)
    alone = [total(student[i : i + 1], batch[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(sum(value for value, _ in alone), together[0], rtol=1e-9, atol=0)
    gradient = torch.cat([gradient for _, gradient in alone])
    torch.testing.assert_close(gradient, together[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_stored_nuclei_and_stray_infinities_are_recognized(name):
    student, teacher = _case(tokens=8, vocab=12)
    wide = _filtered(teacher, 8)  # less than half is -inf, but not the same at each token
    wide[..., 11] = -INF
    exact = wide.clone().clamp_(min=-65504)
    torch.testing.assert_close(
        token_kd(student, wide, divergence=name), token_kd(student, exact, divergence=name)
    )
    padded = teacher.clone()
    padded[..., 10:] = -INF
    padded[0, 1, 3] = padded[1, 5, 2] = -INF
    torch.testing.assert_close(
        token_kd(student, padded, divergence=name),
        token_kd(student[..., :10], padded[..., :10], divergence=name),
    )


@row(25)
def test_every_token_masked_is_a_zero_on_the_graph():
    student, teacher = _case()
    student.requires_grad_(), teacher.requires_grad_()
    for items in (None, torch.tensor(0)):
        value = token_kd(student, teacher, mask=torch.zeros(2, 3), num_items_in_batch=items)
        value.backward()
        assert value == 0 and not student.grad.any() and teacher.grad is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            ({"num_items_in_batch": items}, "num_items_in_batch is .* expected the number")
            for items in (0, INF, "6", torch.tensor([6]))
        ],
        ({"divergence": "kl"}, "forward_kl, reverse_kl, js"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"mask": torch.ones(3, 2)}, r"mask \(3, 2\)"),
        ({"student_logits": torch.zeros(2, 3, 0)}, "student_logits"),
        ({"student_logits": torch.zeros(2, 3, 7, dtype=torch.cfloat)}, "student_logits"),
        *[
            ({"divergence": f"js:{beta}"}, "js:BETA with BETA between 0 and 1")
            for beta in ("0", "1", "0.0", "1.0", "-0.1", "", "nan")
        ],
    ],
)
def test_bad_arguments_are_named(options, message):
    student, teacher = _case()
    with pytest.raises(ValueError, match=message):
        token_kd(**{"student_logits": student, "teacher_logits": teacher} | options)


def test_the_clamp_that_cannot_learn_is_refused_with_the_lowest_perplexity():
    clamp = LegacyClamp.parse("2.5:0.1:5.0")
    assert clamp == LegacyClamp(2.5, 0.1, 5.0)
    assert LegacyClamp(5.0).lowest_perplexity(50257) == pytest.approx(3.28, abs=0.01)
    logits = torch.full((1, 50257), -2.5)
    logits[0, 7] = 2.5
    best = torch.nn.functional.cross_entropy(logits.double(), torch.tensor([7]))
    assert math.exp(best) == pytest.approx(clamp.lowest_perplexity(50257))
    with pytest.raises(ValueError, match="no perplexity below 340 .* nothing is learned"):
        losses.logits_distillation(logits, torch.tensor([7]), temperature=1.0, legacy_clamp=clamp)
    clamp.check(100)
    with pytest.raises(ValueError, match=r"from 3.62 to 5.6\). .* the constant 6"):
        LegacyClamp(0.5, 6.0, 7.0).check(100)


@pytest.mark.parametrize("text", ["", "2.5:1", "a", "0", "-1", "nan", "2.5:5:1", "1:2:3:4"])
def test_a_clamp_that_makes_no_sense_is_refused(text):
    with pytest.raises(ValueError, match="clamp|window"):
        LegacyClamp.parse(text)
