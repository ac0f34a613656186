"""An objective of a user is checked before the first step."""

import pytest
import torch

from firstnan import safe_normalize
from ssl_kd.core.errors import InputError
from ssl_kd.core.precision import Precision
from ssl_kd.core.settings import SettingsError
from ssl_kd.vision.fit import make_trainer
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train import losses
from ssl_kd.vision.train.objectives import OBJECTIVES, OfProbabilities, make_objective
from ssl_kd.vision.train.objectives.check import check_objective


class Own(OfProbabilities):
    """PICA's partition uncertainty, without its balance of clusters."""

    def __init__(self, student_temp=0.1, teacher_temp=0.1):
        super().__init__(teacher_temp)
        self.temperature = student_temp

    def loss(self, logits, targets, marginal, weights):
        p = losses.log_probabilities(logits, self.temperature).exp()
        first, second = safe_normalize(p, dim=2).unbind(1)
        return -(first.mT @ second).log_softmax(2).diagonal(dim1=1, dim2=2).mean(1)


class Lacking(OfProbabilities):
    """An objective without a loss."""


def changed(method, function):
    return type("Changed", (Own,), {method: function})()


def test_own_and_built_in_objectives_pass():
    check_objective("own.Own", Own(), 5)
    for name in OBJECTIVES:
        if name != "fixed":
            check_objective(name, make_objective(name, VisionSettings().__dict__), 5)


@pytest.mark.parametrize(
    ("method", "function", "words"),
    [
        ("loss", lambda *a: Own.loss(*a).mean(), r"loss returned a float32 tensor \[\], expected"),
        (
            "loss",
            lambda s, x, *a: x.square().mean((1, 3)),
            r"a float32 tensor \[2, 8\], expected a float32 tensor \[2\], one loss for each head",
        ),
        ("loss", lambda *a: Own.loss(*a).double(), r"loss returned a float64 tensor \[2\]"),
        ("loss", lambda *a: Own.loss(*a).detach(), "without a gradient: remove detach"),
        ("loss", lambda *a: None, "loss returned a NoneType"),
        ("loss", lambda s, *a: Own.loss(s, *a) / 0 * 0, "not finite .* compute in log space"),
        (
            "loss",
            lambda s, *a: Own.loss(s, *a) + Own.loss(s, *a).mean(),
            "a NaN in one head changes the loss or the gradient of another",
        ),
        (
            "loss",
            lambda s, x, *a: x @ x,
            "loss fails: RuntimeError: .*own_objective.py, line",
        ),
        ("targets", lambda s, x, m: x, "targets returned a float32 tensor .*a tuple of two"),
        ("targets", lambda s, x, m: (x[:, 0], m), "the targets, of the shape of logits"),
        ("targets", lambda s, x, m: (x, m.mean(1)), r"the marginal, \[head, cluster\]"),
        ("log_probabilities", lambda s, t: t[0], "log_probabilities returned a float32 tensor"),
        ("initial_marginal", lambda s, k: None, "initial_marginal fails: TypeError"),
    ],
)
def test_what_is_wrong_is_named_before_training(method, function, words):
    with pytest.raises(InputError, match=rf"LOSS own.Own: .*{words}"):
        check_objective("own.Own", changed(method, function), 5)


def test_the_check_leaves_the_random_state_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    check_objective("own.Own", Own(), 5)
    assert torch.equal(torch.rand(3), expected)


def trainer_of(**options):
    settings = VisionSettings(n_heads=2, **options)
    return make_trainer(settings, 6, 5, Precision.for_device("cpu", False))


def test_a_run_checks_it_and_refuses_a_beta_that_it_does_not_read():
    path = f"{__name__}.Own"
    assert isinstance(trainer_of(loss=path).objective, OfProbabilities)
    with pytest.raises(SettingsError, match="BETA is 0.8, but has no effect with LOSS"):
        trainer_of(loss=path, beta=0.8)
    with pytest.raises(InputError, match="Lacking' does not define loss, which every objective"):
        trainer_of(loss=f"{__name__}.Lacking")
