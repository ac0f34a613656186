import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ssl_kd.language.losses import token_terms
from ssl_kd.language.losses.token_distillation import distillation_terms
from ssl_kd.losses import (
    DIVERGENCES,
    LegacyClamp,
    LinearTeacher,
    LogitsTeacher,
    SampledTeacher,
    TopKTeacher,
    linear_distillation,
    logits_distillation,
)
from tests.language.losses.test_token_distillation import ELEVEN
from tests.oracles import token_objectives as oracle

NAMES = (*DIVERGENCES, *oracle.JS)

N, DIM, TEACHER_DIM, VOCAB = 11, 6, 5, 23
INF = float("inf")


def _student(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, DIM, generator=g, dtype=torch.float64)
    weight = torch.randn(VOCAB, DIM, generator=g, dtype=torch.float64)
    bias = torch.randn(VOCAB, generator=g, dtype=torch.float64)
    targets = torch.randint(VOCAB, (N,), generator=g)
    hidden, weight, bias = (x.to(dtype).requires_grad_() for x in (hidden, weight, bias))
    return (hidden, weight, bias), targets


def _linear(dtype=torch.float64, seed=1, vocab=VOCAB):
    g = torch.Generator().manual_seed(seed)
    shapes = (N, TEACHER_DIM), (vocab, TEACHER_DIM), (vocab,)
    return LinearTeacher(
        *(torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)
    )


def _logits(teacher):
    return torch.nn.functional.linear(teacher.hidden, teacher.weight, teacher.bias)


def _teacher(kind, temperature, dtype=torch.float64):
    z = _logits(_linear(dtype)).double()
    log_p = torch.log_softmax(z / temperature, -1)
    if kind == "linear":
        return _linear(dtype)
    if kind == "logits":
        return LogitsTeacher(z.to(dtype))
    if kind == "top_k":
        values, indices = log_p.topk(4)
        return TopKTeacher(indices, values, torch.log1p(-values.exp().sum(-1)))
    indices = torch.multinomial(log_p.exp(), 50, replacement=True)
    weights = torch.full((N, 50), 1 / 50, dtype=torch.float64)
    return SampledTeacher(indices, weights, -(log_p.exp() * log_p).sum(-1))


def _expected(student, targets, teachers, temperature, name):
    """Both sums, token by token, from the oracle; differentiable."""
    z = torch.nn.functional.linear(*student)
    ce = torch.nn.functional.cross_entropy(z, targets, reduction="sum")
    kd = 0.0
    for teacher in teachers:
        for i in range(N):
            if isinstance(teacher, TopKTeacher):
                row = teacher.indices[i], teacher.log_probs[i], teacher.log_tail[i]
                kd += oracle.top_k(z[i], *row, temperature=temperature, name=name)
            elif isinstance(teacher, SampledTeacher):
                row = teacher.indices[i], teacher.weights[i], teacher.entropy[i]
                kd += oracle.sampled(z[i], *row, temperature=temperature)
            else:
                t = _logits(teacher) if isinstance(teacher, LinearTeacher) else teacher.logits
                log_p = torch.log_softmax(t[i] / temperature, -1)
                log_q = torch.log_softmax(z[i] / temperature, -1)
                kd += temperature**2 * oracle.divergence_of(name, log_p, log_q)
    return torch.stack([ce, kd / len(teachers)])


def _gradients(terms, student, weights):
    loss = terms @ torch.tensor(weights, dtype=terms.dtype)
    return torch.autograd.grad(loss, student, retain_graph=True)


KINDS = [(kind, name) for kind in ("linear", "logits", "top_k") for name in NAMES]
KINDS += [("sampled", "forward_kl"), ("linear", "reverse_kl:4"), ("logits", f"reverse_kl:{VOCAB}")]


@pytest.mark.parametrize("chunk", [4, None])
@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_values_and_gradients_equal_the_oracle(kind, name, chunk, monkeypatch):
    # Three rows at once, so that blocks of rows within a chunk are met too.
    monkeypatch.setattr(token_terms, "ROW_BYTES", 3 * VOCAB * 8)
    student, targets = _student()
    teachers = [_teacher(kind, 1.5)]
    weights = (0.9, 0.1)
    options = {"temperature": 1.5, "divergence": name, "chunk_tokens": chunk}
    ours = linear_distillation(*student, targets, teachers, weights=weights, **options)
    reference = _expected(student, targets, teachers, 1.5, name)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
    slopes = _gradients(ours, student, weights), _gradients(reference, student, weights)
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-12)
    z = torch.nn.functional.linear(*student)
    given = logits_distillation(z, targets, teachers, weights=weights, **options)
    torch.testing.assert_close(given, reference, rtol=1e-12, atol=1e-12)
    slopes = _gradients(given, student, weights), _gradients(reference, student, weights)
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-12)


def _check_top_k(student, teacher_logits, name, **tolerance):
    """Compare value and gradient with the oracle: all but 5 tokens are one outcome."""
    log_p = teacher_logits.log_softmax(-1)
    kept, tokens = log_p.topk(5)
    tail = log_p.scatter(-1, tokens, -INF).logsumexp(-1)
    z, x = student.double().clamp(-65504, 65504).requires_grad_(), student.requires_grad_()
    teacher = TopKTeacher(tokens, kept, tail)
    value = logits_distillation(x, None, [teacher], temperature=1.0, divergence=name)[1]
    rows = zip(z, tokens, kept, tail, strict=True)
    values = [oracle.top_k(*row, temperature=1.0, name=name) for row in rows]
    expected = torch.stack([*values, z.sum() * 0]).sum()
    torch.testing.assert_close(value.double(), expected, **tolerance)
    (gradient,), (slope,) = torch.autograd.grad(value, x), torch.autograd.grad(expected, z)
    scale = slope.abs().max().clamp(min=1) if slope.numel() else 1
    assert value.dtype == torch.float32 and gradient.dtype == student.dtype
    tolerance |= {"atol": 1e-6}
    torch.testing.assert_close(gradient / scale, slope / scale, check_dtype=False, **tolerance)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("case", ELEVEN)
def test_the_eleven_fp16_cases_of_a_top_k_teacher(case, name):
    (student, teacher), options = ELEVEN[case]()
    real = options.get("mask", torch.ones(student.shape[:2])).bool()
    student, teacher = student[real], teacher[real].double().clamp(-65504, 65504)
    _check_top_k(student, teacher, name, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_tail_that_a_student_has_emptied_is_filled_again(name):
    """With less than float32's least number left for all other tokens, too."""
    student = torch.full((1, 40), -300.0)
    student[0, :5] = 0.0
    teacher = torch.zeros(1, 40, dtype=torch.float64).index_fill_(1, torch.arange(5), 1e-9)
    _check_top_k(student, teacher, name, rtol=1e-4, atol=1e-6)


def test_a_bfloat16_teacher_keeps_its_range_under_a_students_float16():
    hidden, weight, _ = (x.detach().bfloat16() for x in _student()[0])
    teacher = LinearTeacher(hidden * 1e6, weight * 1e-6)
    x, targets = torch.randn(N, 8), None
    head = torch.randn(len(weight), 8)
    expected = linear_distillation(x, head, None, targets, [teacher], temperature=1.0)
    with torch.autocast("cpu", torch.float16):
        ours = linear_distillation(x, head, None, targets, [teacher], temperature=1.0)
    torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weights", [None, (0.7, 0.3, 1.0), (5.0, 0.0, 2.5)])
def test_several_teachers_count_as_the_weighted_mean_of_their_divergences(name, weights):
    student, targets = _student()
    teachers = [_linear(), _linear(seed=2), _teacher("top_k", 2.0)]
    options = {"temperature": 2.0, "divergence": name}
    ours = linear_distillation(*student, targets, teachers, teacher_weights=weights, **options)
    alone = [_expected(student, targets, [teacher], 2.0, name) for teacher in teachers]
    weights = weights or (1, 1, 1)
    kd = sum(w * terms[1] for w, terms in zip(weights, alone, strict=True)) / sum(weights)
    reference = torch.stack([alone[0][0], kd])
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
    slopes = [_gradients(terms, student, (0.4, 0.6)) for terms in (ours, reference)]
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-12)


def test_a_teacher_of_weight_0_is_not_evaluated():
    student, targets = _student()
    sick = LogitsTeacher(torch.full((N, VOCAB), float("nan"), dtype=torch.float64))
    teachers, weights = [sick, _linear()], (0.0, 3.0)
    ours = linear_distillation(
        *student, targets, teachers, temperature=1.0, teacher_weights=weights
    )
    assert torch.equal(ours, linear_distillation(*student, targets, [_linear()], temperature=1.0))


def test_equal_weights_are_the_mean_to_the_bit():
    student, targets = _student(torch.float32)
    teachers = [_linear(torch.float32), _linear(torch.float32, seed=2)]
    options = {"temperature": 1.5, "divergence": "js"}
    for clamp in (None, LegacyClamp(2.5)):
        both = [
            linear_distillation(*student, targets, teachers, legacy_clamp=clamp, **options, **more)
            for more in ({}, {"teacher_weights": (4.0, 4.0)})
        ]
        assert torch.equal(*both)


def test_small_gradients_survive_fp16():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 8, generator=g).half()
    weight = (torch.randn(20_000, 8, generator=g) * 2).half().requires_grad_()
    targets = torch.tensor([3, 4])
    linear_distillation(hidden, weight, None, targets, temperature=1.0)[0].backward()
    logits = torch.nn.functional.linear(hidden, weight.detach()).double()
    slope = torch.softmax(logits, -1)
    slope[[0, 1], targets] -= 1
    expected = slope.T @ hidden.double()
    assert (weight.grad.double() - expected).norm() <= 1e-3 * expected.norm()
    rare = expected.abs() < 1e-5  # what a float16 d loss / d logits would round away
    assert (weight.grad.double() - expected)[rare].abs().max() < 6e-8


def _poisoned():
    student, targets = _student(torch.float32)
    teacher = _linear(torch.float32)
    teacher.hidden[4] = float("nan")
    return student, targets, teacher


@pytest.mark.parametrize("incoming", [(0.9, 0.1), (1.8, 0.2), (0.5, 0.5), (0.0, 2.0), (-1.0, 3.0)])
def test_any_incoming_gradient_is_right_and_repeatable(incoming):
    student, targets = _student()
    terms = linear_distillation(
        *student, targets, [_linear()], temperature=2.0, weights=(0.9, 0.1), chunk_tokens=4
    )
    reference = _expected(student, targets, [_linear()], 2.0, "forward_kl")
    grad = torch.tensor(incoming, dtype=torch.float64)
    first = torch.autograd.grad(terms, student, grad, retain_graph=True)
    again = torch.autograd.grad(terms, student, grad)
    torch.testing.assert_close(first, torch.autograd.grad(reference, student, grad))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


class _Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.addmm_,
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("frozen", "products"), [((), 4), ((1, 2), 3), ((0, 1), 2), ((0, 1, 2), 2)]
)
def test_unneeded_gradients_are_not_computed(frozen, products):
    student, targets = _student()
    for i in frozen:
        student[i].requires_grad_(False)
    with _Products() as mode:
        terms = linear_distillation(*student, targets, [_linear()], temperature=2.0)
    assert mode.count == products
    if len(frozen) < 3:
        terms.sum().backward()
    for i, x in enumerate(student):
        assert (x.grad is None) == (i in frozen)


class _Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.itemsize)
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_logits_of_all_tokens_are_never_there(dtype):
    hidden = torch.randn(40, 4).to(dtype).requires_grad_()
    weight = torch.randn(300, 4).to(dtype).requires_grad_()
    teacher = LinearTeacher(torch.randn(40, 3).to(dtype), torch.randn(300, 3).to(dtype))
    targets = torch.zeros(40, dtype=torch.int64)
    with _Largest() as mode:
        terms = linear_distillation(
            hidden, weight, None, targets, [teacher], temperature=2.0, chunk_tokens=5
        )
        (terms[0] + terms[1]).backward()  # in proportion to the weights
    assert mode.elements == 5 * 300


def test_evaluation_computes_values_alone():
    student, targets = _student()
    with torch.no_grad(), _Products() as mode:
        terms = linear_distillation(*student, targets, [_linear()], temperature=2.0)
    assert mode.count == 2 and not terms.requires_grad
    expected = _expected(student, targets, [_linear()], 2.0, "forward_kl")
    torch.testing.assert_close(terms, expected.detach())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_bias_of_minus_infinity_is_outside_the_vocabulary(name, side):
    student, _ = _student()
    teacher = _linear(vocab=VOCAB + 3)
    with torch.no_grad():
        (student[2] if side == "student" else teacher.bias)[[3, 9]] = -INF
    options = {"temperature": 2.0, "divergence": name, "chunk_tokens": 4}
    terms = linear_distillation(*student, None, [teacher], **options)
    kept = [i for i in range(VOCAB) if i not in (3, 9)]
    weight, bias = (x.detach()[kept].requires_grad_() for x in student[1:])
    fewer = student[0], weight, bias
    expected = linear_distillation(
        *fewer,
        None,
        [LinearTeacher(teacher.hidden, teacher.weight[kept], teacher.bias[kept])],
        **options,
    )
    torch.testing.assert_close(terms, expected)
    mine, theirs = _gradients(terms, student, (0.0, 1.0)), _gradients(expected, fewer, (0.0, 1.0))
    torch.testing.assert_close(mine[0], theirs[0])
    torch.testing.assert_close(mine[1][kept], theirs[1])
    assert mine[1][[3, 9]].abs().max() == 0


def test_an_overflowed_logit_is_corrected_and_a_nan_stays():
    logits = torch.randn(3, VOCAB, requires_grad=True)
    teacher = torch.randn(3, VOCAB)
    with torch.no_grad():
        logits[1, teacher[1].argmax()] = -INF
    terms = logits_distillation(
        logits, teacher.argmax(-1), [LogitsTeacher(teacher)], temperature=2.0
    )
    assert terms.isfinite().all()
    terms.sum().backward()
    assert logits.grad[1, teacher[1].argmax()] < -1
    with torch.no_grad():
        logits[2, 0] = float("nan")
    assert logits_distillation(logits, teacher.argmax(-1), temperature=2.0)[0].isnan()


def test_the_legacy_clamp_equals_clamped_logits():
    student, targets = _student()
    clamp = LegacyClamp(1.0, 2.0, 4.0)
    terms = linear_distillation(
        *student, targets, [_linear()], temperature=2.0, legacy_clamp=clamp, chunk_tokens=4
    )
    z = torch.nn.functional.linear(*student).clamp(-1, 1)
    log_p = torch.log_softmax(_logits(_linear()).clamp(-1, 1) / 2, -1)
    log_q = torch.log_softmax(z / 2, -1)
    ce = torch.nn.functional.cross_entropy(z, targets, reduction="none").clamp(2, 4)
    kd = (4 * (log_p.exp() * (log_p - log_q)).sum(-1)).clamp(2, 4)
    held = [(x > 2) & (x < 4) for x in (ce, kd)]
    assert held[0].any() and not held[0].all()
    reference = torch.stack([ce.sum(), kd.sum()])
    torch.testing.assert_close(terms, reference)
    pairs = _gradients(terms, student, (1.0, 1.0)), _gradients(reference, student, (1.0, 1.0))
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["linear", "logits", "top_k"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_without_a_wait_only_values_near_0_are_rounded(free, dtype, kind, name):
    student, targets = _student()
    teacher = _teacher(kind, 2.0)
    if kind == "linear":  # as the student has it, but for the last digits
        teacher = LinearTeacher(student[0].detach() * (1 + 1e-4), *student[1:])
    options = {"temperature": 2.0, "divergence": name, "chunk_tokens": 3}
    free(False)
    sides = []
    for wait in (True, False):
        x, weight, bias = (x.detach().to(dtype).requires_grad_() for x in student)
        ce, kd = distillation_terms(x, weight, bias, targets, [teacher], wait=wait, **options)
        (ce + kd).backward()
        sides.append((kd.detach(), x.grad))
    (exact, slope), (rounded, slope_without_wait) = sides
    assert torch.equal(slope, slope_without_wait)
    assert torch.allclose(rounded, exact, rtol=0, atol=len(targets) * 4 * 2e-6)


def test_a_term_of_weight_0_has_a_gradient_of_0_without_a_wait(free):
    """As in the last step of a schedule to 0 beside a term that is computed elsewhere."""
    free(False)
    student, targets = _student()
    options = {"temperature": 2.0, "weights": (0.0, 0.5), "wait": False}
    ce, _ = distillation_terms(*student, targets, [], **options)
    assert all(not x.any() for x in torch.autograd.grad(0.0 * ce, student))


@pytest.mark.parametrize("cut", [None, "ce", "kd"])
def test_without_a_wait_gradients_are_the_same_and_a_cut_out_term_is_not_touched(free, cut):
    free(False)
    student, targets, teacher = _poisoned() if cut == "kd" else (*_student(), _linear())
    options, sides = {"temperature": 2.0, "weights": (0.9, 0.1)}, []
    for wait in (True, False):
        ce, kd = distillation_terms(*student, targets, [teacher], wait=wait, **options)
        terms = {"ce": 0.9 / 7 * ce, "kd": 0.1 / 7 * kd}
        total = torch.stack([term for name, term in terms.items() if name != cut]).sum()
        sides.append(torch.autograd.grad(total, student))
    for waited, not_waited in zip(*sides, strict=True):
        assert not_waited.isfinite().all() and torch.equal(waited, not_waited)


def test_without_a_wait_gradients_in_another_proportion_are_nan(free):
    free(False)
    student, targets = _student()
    options = {"temperature": 2.0, "weights": (0.9, 0.1), "wait": False}
    ce, kd = distillation_terms(*student, targets, [_linear()], **options)
    assert all(x.isnan().all() for x in torch.autograd.grad(0.1 * ce + 0.9 * kd, student))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_low_precision_inputs_are_near_float64(dtype, name):
    student, targets = _student(dtype)
    hidden, weight, bias = (x.detach().double().requires_grad_() for x in student)
    exact = hidden, weight, bias
    teacher = _linear(dtype)
    wide = LinearTeacher(*(x.double() for x in vars(teacher).values()))
    options = {"temperature": 2.0, "divergence": name, "chunk_tokens": 4}
    ours = linear_distillation(*student, targets, [teacher], **options)
    reference = linear_distillation(*exact, targets, [wide], **options)
    assert ours.dtype == torch.float32
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-6}[dtype]
    torch.testing.assert_close(ours.double(), reference, rtol=tolerance, atol=tolerance)
    _near(ours, student, reference, exact, tolerance)
    assert all(slope.dtype == dtype for slope in _gradients(ours, student, (1.0, 1.0)))


def _near(ours, student, reference, exact, tolerance):
    pairs = _gradients(ours, student, (1.0, 1.0)), _gradients(reference, exact, (1.0, 1.0))
    for mine, theirs in zip(*pairs, strict=True):
        assert (mine.double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_multiplies_as_the_layer_would(dtype):
    student, targets = _student(torch.float32)
    teacher = _linear(torch.float32)
    with torch.autocast("cpu", dtype):
        z, t = torch.nn.functional.linear(*student), _logits(teacher)
        ours = linear_distillation(*student, targets, [teacher], temperature=2.0)
    assert z.dtype == dtype
    reference = logits_distillation(z, targets, [LogitsTeacher(t)], temperature=2.0)
    torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-6)
    _near(ours, student, reference, student, 8e-3)


@pytest.mark.parametrize("clamp", [None, LegacyClamp(1.0, 2.0, 4.0)])
def test_a_term_that_was_cut_out_is_not_touched(clamp):
    student, targets, teacher = _poisoned()
    options = {"temperature": 2.0, "weights": (0.9, 0.1), "legacy_clamp": clamp}
    terms = linear_distillation(*student, targets, [teacher], **options)
    assert terms[0].isfinite() and terms[1].isnan()
    cut = torch.autograd.grad(0.9 * terms[0], student, retain_graph=True)
    alone = linear_distillation(*student, targets, **options)
    kept = torch.autograd.grad(0.9 * alone[0], student)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(cut, kept, strict=True))
    if clamp is None:
        slopes = torch.autograd.grad(terms, student, torch.zeros(2))
        assert not any(slope.any() for slope in slopes)


def test_no_tokens_are_two_zeros_on_the_graph():
    student, _ = _student(torch.float32)
    hidden, logits = (torch.zeros(0, width, requires_grad=True) for width in (DIM, VOCAB))
    targets = torch.zeros(0, dtype=torch.int64)
    teacher = LinearTeacher(torch.zeros(0, TEACHER_DIM), _linear(torch.float32).weight)
    for x, terms in (
        (hidden, linear_distillation(hidden, *student[1:], targets, [teacher], temperature=2.0)),
        (logits, logits_distillation(logits, targets, [LogitsTeacher(logits)], temperature=2.0)),
    ):
        assert terms.tolist() == [0.0, 0.0]
        terms.sum().backward()
        assert x.grad.shape == x.shape
    assert not student[1].grad.any()


STUDENT, TARGETS = _student()
SEVERAL = (*STUDENT, TARGETS, [_linear(), _linear()])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((STUDENT[0], STUDENT[1].T, STUDENT[2], TARGETS), {}, "do not fit"),
        ((STUDENT[0], STUDENT[1].float(), STUDENT[2], TARGETS), {}, "float32"),
        ((*STUDENT, TARGETS[:-1]), {}, "targets"),
        ((*STUDENT, TARGETS - 100), {}, "next_token_targets"),
        ((*STUDENT, TARGETS.float()), {}, "targets have dtype torch.float32; expected token ids"),
        ((*STUDENT, TARGETS, [LogitsTeacher(torch.zeros(3, VOCAB))]), {}, "3 rows"),
        (
            (*STUDENT, TARGETS, [torch.zeros(N, VOCAB)]),
            {},
            "type Tensor; expected a type such as LogitsTeacher",
        ),
        ((*STUDENT, TARGETS), {"temperature": 0.0}, "temperature is 0.0"),
        ((*STUDENT, TARGETS), {"chunk_tokens": 0}, "chunk_tokens is 0"),
        ((*STUDENT, TARGETS), {"divergence": "mse"}, "divergence is 'mse'"),
        ((*STUDENT, TARGETS, [_teacher("sampled", 2.0)]), {"divergence": "js"}, "forward_kl only"),
        (
            (*STUDENT, TARGETS, [_teacher("top_k", 2.0)]),
            {"legacy_clamp": LegacyClamp(5.0)},
            "needs all logits of the teacher",
        ),
        (
            (STUDENT[0], STUDENT[1][:4], STUDENT[2][:4], TARGETS % 4, [_teacher("top_k", 2.0)]),
            {},
            "tokenizer",
        ),
        *[
            (SEVERAL, {"teacher_weights": weights}, "teacher_weights")
            for weights in [(1.0,), (1.0, -1.0), (0.0, 0.0), (1.0, INF), (1.0, INF - INF)]
        ],
    ],
)
def test_bad_arguments_are_named(arguments, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        linear_distillation(*arguments, **{"temperature": 2.0} | options)
