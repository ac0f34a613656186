from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from heads.cosine_head import CosineHead
from ssl_kd.core.errors import InputError
from ssl_kd.core.precision import Precision
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train.heads import (
    DINOHead,
    HeadBank,
    TEMIHead,
    check_answer,
    import_head,
)
from ssl_kd.vision.train.step import HeadTrainer


class Plain(nn.Module):
    """A head without a batched form of its own: the bank uses vmap."""

    def __init__(self, in_dim=6, n_clusters=4):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(in_dim, 5), nn.LayerNorm(5), nn.Linear(5, n_clusters))

    def forward(self, x):
        return self.net(x)


MAKERS = [
    lambda: TEMIHead(6, 4, 10, 5),
    lambda: TEMIHead(6, 120, 10, 5),
    Plain,
    lambda: CosineHead(6, 4),
    lambda: DINOHead(6, 4, 10, 5),
]


@pytest.mark.parametrize("make", MAKERS)
def test_head_i_in_the_bank_equals_head_i_alone(make):
    bank = HeadBank(make, 5)
    weights = bank.initial_weights(seed=3)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    together = bank(bank.unflatten(weights), x)
    assert len(together) == 5
    for i in range(5):
        torch.testing.assert_close(together[i], bank.head(weights, i)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", MAKERS)
def test_gradients_in_the_bank_equal_those_alone(make):
    bank = HeadBank(make, 3)
    weights = bank.initial_weights(seed=1)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    p = {k: v.detach().requires_grad_() for k, v in bank.unflatten(weights).items()}
    bank(p, x).square().sum().backward()
    stacked = torch.cat([v.grad.flatten(1) for v in p.values()], 1)
    for i in range(3):
        head = bank.head(weights, i)
        head(x).square().sum().backward()
        alone = torch.cat([v.grad.flatten() for v in head.parameters()])
        atol = 1e-6 * float(alone.abs().max())
        torch.testing.assert_close(stacked[i], alone, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("make", MAKERS)
def test_a_nan_in_one_head_stays_there(make):
    bank = HeadBank(make, 4)
    weights = bank.initial_weights(seed=0)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    clean = bank(bank.unflatten(weights), x)
    weights[2, 0] = torch.nan
    sick = bank(bank.unflatten(weights), x)
    assert torch.equal(sick[[0, 1, 3]], clean[[0, 1, 3]]) and sick[2].isnan().any()


def test_heads_differ_and_depend_on_seed_and_index_alone():
    make = MAKERS[0]
    few, many = HeadBank(make, 2).initial_weights(7), HeadBank(make, 5).initial_weights(7)
    assert torch.equal(few, many[:2]) and not torch.equal(many[0], many[1])
    assert not torch.equal(few, HeadBank(make, 2).initial_weights(8))


def test_the_global_random_state_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    bank = HeadBank(MAKERS[0], 2)
    bank.head(bank.initial_weights(0), 0)
    assert torch.equal(torch.rand(3), expected)


def test_temi_head_is_zero_row_safe_and_small_at_the_start():
    head = TEMIHead(6, 4)
    assert head.hidden.weight.std() <= 0.02 and head.prototypes.std() <= 0.025
    x = torch.zeros(2, 6, requires_grad=True)
    logits = head(x)
    logits.sum().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(p.grad).all() for p in head.parameters())


def test_the_head_of_dino_equals_its_official_form():
    """Its last layer has weight normalization with a fixed norm of 1, and no bias."""
    head = DINOHead(6, 4, 10, 5)
    last = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4, bias=False))
    norm, direction = last.parameters()
    norm.data.fill_(1)
    direction.data.copy_(head.prototypes)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))

    expected = last(nn.functional.normalize(head.mlp(x), dim=-1, p=2))
    torch.testing.assert_close(head(x), expected, rtol=1e-6, atol=1e-6)

    head(x).square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(head.prototypes.grad, direction.grad, rtol=1e-4, atol=1e-4)


def test_dropout_is_used_in_training_only():
    bank = HeadBank(lambda: nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, 4)), 2)
    parameters, x = bank.unflatten(bank.initial_weights(0)), torch.ones(3, 6)
    assert torch.equal(bank(parameters, x), bank(parameters, x))
    assert not torch.equal(bank(parameters, x, training=True), bank(parameters, x, training=True))


def test_threads_build_the_same_heads():
    def build(_):
        return HeadBank(MAKERS[0], 4).initial_weights(5)

    with ThreadPoolExecutor(8) as pool:
        built = list(pool.map(build, range(8)))
    assert all(torch.equal(weights, built[0]) for weights in built)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda net: net.append(nn.BatchNorm1d(4)), "Plain has buffers"),
        (lambda net: net[0].requires_grad_(False), r"frozen parameters \(net.0.weight, net.0.bias"),
        (lambda net: nn.init.constant_(net[0].weight, torch.nan), "weights that are not finite"),
        (lambda net: net.__delitem__(slice(None)), "Plain has no parameters"),
    ],
)
def test_bad_heads_are_refused(change, words):
    def make():
        head = Plain()
        change(head.net)
        return head

    with pytest.raises(InputError, match=words):
        HeadBank(make, 2).initial_weights(0)


def test_import_path():
    assert import_head("ssl_kd.heads.TEMIHead") is TEMIHead
    for path in ("TEMIHead", "nowhere.Head", "ssl_kd.vision.train.heads.Nothing", "math.pi"):
        with pytest.raises(ValueError, match=path):
            import_head(path)


class Odd(nn.Module):
    """A head that answers in a way of its own."""

    def __init__(self, answer=lambda logits: logits):
        super().__init__()
        self.net, self.unused, self.answer = nn.Linear(6, 4), nn.Linear(6, 4), answer

    def forward(self, x):
        return self.answer(self.net(x))


def check(answer):
    bank = HeadBank(lambda: Odd(answer), 2)
    check_answer(bank, bank.initial_weights(seed=0), 6, 4)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda z: z.detach(), "into logits without a gradient"),
        (lambda z: z.argmax(-1), r"into \[2\], expected logits"),
        (lambda z: z.double(), r"into torch.float64, expected torch.float32: .* with .float\(\)"),
        (lambda z: (z, z), r"into a tuple, expected one tensor of logits .*, here \[2, 4\]"),
        (lambda z: [z], "Odd .* a list"),
    ],
)
def test_an_answer_that_no_head_can_be_trained_by_is_refused(answer, words):
    with pytest.raises(InputError, match=words) as caught:
        check(answer)
    assert "Odd" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", [lambda z: z, lambda z: z.half()])
def test_a_head_may_leave_a_parameter_unused_or_answer_in_half_precision(answer):
    check(answer)
    bank = HeadBank(lambda: Odd(answer), 2)
    precision = Precision.for_device("cpu")
    trainer = HeadTrainer(bank, VisionSettings(), precision, 4)
    before = trainer.state.student.clone()
    result = trainer.step(torch.randn(2, 8, 6), 0.01, 0)
    assert not result.stage.any() and not torch.equal(before, trainer.state.student)
