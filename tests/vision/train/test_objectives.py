"""Custom losses: a class in a user's file, with its import path as LOSS."""

import re

import pytest
import torch

from ssl_kd import MultiHeadClusterer
from ssl_kd.core.settings import SettingsError
from ssl_kd.vision.fit import make_trainer
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train.objectives import OBJECTIVES, make_objective, objective_class
from tests.faults.inject import CPU
from tests.vision.own_loss import SINKHORN

MODULE = '''
"""Losses that a user wrote."""

import torch

from ssl_kd.core.settings import SettingsError
from ssl_kd.vision.train.objectives import Objective


class Squares(Objective):
    """Between views, distributions are to be near, and over a batch even."""

    def __init__(self, student_temp, strength=2.0):
        if student_temp > 1:
            raise SettingsError("STUDENT_TEMP is above 1")
        self.temperature, self.strength = student_temp, strength

    def initial_marginal(self, n_clusters):
        return 1 / n_clusters

    def targets(self, logits, marginal):
        probabilities = (logits.float() / self.temperature).softmax(-1)
        return probabilities, probabilities.mean((1, 2))

    def log_probabilities(self, targets):
        return targets.log()

    def loss(self, logits, targets, marginal, weights):
        p = (logits.float() / self.temperature).softmax(-1)
        near = (p - targets.flip(1)).square().sum(-1).mean(1)
        if weights is not None:
            near = near * weights * near.shape[1]
        return near.mean(1) + self.strength * p.mean((1, 2)).square().sum(-1)


class Asking(Squares):
    def __init__(self, colour, size, student_temp):
        super().__init__(student_temp)


class Half:
    pass
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The import path of each class of a module that a user wrote."""
    name = f"losses_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda attribute: f"{name}.{attribute}"


def _blobs():
    blob = torch.arange(96) % 3
    x = torch.eye(6)[blob] + 0.05 * torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    return x, blob


@pytest.mark.parametrize(
    ("loss", "how"),
    [
        *(("Squares", how) for how in ("none", "own", "mean")),
        *(("temi", "none"), ("sharpened", "none"), (SINKHORN, "none")),
    ],
)
def test_every_loss_and_a_custom_one_find_clusters(own, loss, how):
    x, blob = _blobs()
    loss = own(loss) if loss == "Squares" else loss
    few = {"n_heads": 4, "max_steps": 150, "batch_size": 32, "method": "heads"}
    clusterer = MultiHeadClusterer(3, loss=loss, teacher_temp=0.05, instance_weight=how, **few)
    found = torch.from_numpy(clusterer.fit(x).labels_)
    assert sum(torch.bincount(blob[found == k]).max() for k in found.unique()) == 96
    assert clusterer.settings_.loss == loss


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.Loss", "loss 'nowhere.Loss' cannot be imported: No module named"),
        (
            "Lost",
            "expected package.module.Class, in an installed package or below the current folder",
        ),
        ("Half", "expected a subclass of ssl_kd.vision.train.objectives.base.Objective"),
        ("Asking", "needs colour, size, but there is no such setting: give the argument a default"),
    ],
)
def test_a_loss_that_cannot_be_is_named_with_the_way_out(own, path, message):
    settings = VisionSettings(loss=path if "." in path else own(path))  # nothing is imported yet
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        make_trainer(settings, 6, 4, CPU)
    assert repr(settings.loss) in str(refused.value)


def test_a_loss_refuses_settings_that_do_not_fit_it(own):
    with pytest.raises(SettingsError, match="STUDENT_TEMP is above 1"):
        make_objective(own("Squares"), {"student_temp": 2.0})
    make_objective(own("Squares"), {"student_temp": 1.0})


def test_every_loss_of_the_table_is_a_choice_that_the_settings_describe():
    _, _, rule = VisionSettings.rules()["loss"]
    assert rule.choices == tuple(OBJECTIVES)
    for name, kind in OBJECTIVES.items():
        assert f"{name} ({kind.summary})" in rule.help and kind.summary
        assert objective_class(name) is kind
        assert VisionSettings(loss=name, teacher_temp=0.05).loss == name
