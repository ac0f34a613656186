"""The model of a run: votes of heads, in blocks, saved and loaded."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssl_kd.core.errors import InputError
from ssl_kd.core.files import CorruptFileError
from ssl_kd.core.precision import Precision
from ssl_kd.vision import fit
from ssl_kd.vision.model import ROWS_PER_BLOCK, ClusterModel
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.novelty import Novelty
from ssl_kd.vision.settings import VisionSettings
from tests.faults.matrix import row
from tests.train_heads import train

DIM, K = 6, 4


def make_model(**changes):
    sizes = {"n_clusters": K, "n_heads": 3, "hidden_dim": 10, "bottleneck_dim": 5}
    return ClusterModel(**{"in_dim": DIM, "head_dim": DIM, **sizes, **changes})


@pytest.fixture(params=[DIM, 4], ids=["all directions", "rotated to fewer"])
def model(request):
    model = make_model(head_dim=request.param)
    sample = torch.randn(50, DIM) * torch.arange(1.0, DIM + 1)
    model.projection.load_state_dict(Projection.fit(sample, request.param).state_dict())
    model.weights.copy_(model.bank.initial_weights(0) * 20)
    model.votes.copy_(torch.rand(3, K, K).softmax(-1))
    return model


def test_forward_is_the_mean_vote_of_the_heads(model):
    x = torch.randn(7, DIM)
    expected = torch.zeros(7, K, dtype=torch.float64)
    for i in range(3):
        logits = model.bank.head(model.weights, i).double()(model.projection(x).double())
        expected += torch.softmax(logits / 0.1, -1) @ model.votes[i].double() / 3
    torch.testing.assert_close(model(x).double(), expected, rtol=1e-4, atol=1e-5)


def test_probabilities_are_distributions_in_any_dtype_number_of_rows_and_block(model):
    for n in (0, 1, 9):
        for dtype in (torch.float16, torch.float32, torch.float64):
            found = model.predict_proba(torch.randn(n, DIM).to(dtype))
            assert found.shape == (n, K) and found.dtype == torch.float32
            torch.testing.assert_close(found.sum(1), torch.ones(n))
            assert not found.requires_grad
    x = torch.randn(ROWS_PER_BLOCK + 3, DIM)
    torch.testing.assert_close(model.predict_proba(x)[-5:], model.predict_proba(x[-5:]))
    assert model.predict(x).dtype == torch.int64 and len(model.predict(x)) == len(x)


def test_a_saved_model_predicts_the_same_after_loading(model, tmp_path):
    model.save_pretrained(tmp_path)
    x = torch.randn(20, DIM)
    for more in ({}, {"settings": {"N_HEADS": 9}, "commit": None, "command": "train.py"}):
        _config(**more)(tmp_path)  # that of a run says more
        again = ClusterModel.from_pretrained(tmp_path)
        assert torch.equal(again.predict_proba(x), model.predict_proba(x))
        assert again.options == model.options


def test_outlier_scores_are_saved_with_it_and_refused_where_there_are_none(model, tmp_path):
    x = torch.randn(ROWS_PER_BLOCK + 3, DIM)
    with pytest.raises(InputError, match="has no outlier scores.*train it again"):
        model.outlier_scores(x)
    width = model.options["head_dim"]
    scored = make_model(head_dim=width, n_reference=50)
    projected = model.projection(x[:50])
    scored.projection, scored.novelty = model.projection, Novelty.fit(projected, torch.ones(width))
    scored.save_pretrained(tmp_path)
    again = ClusterModel.from_pretrained(tmp_path)
    saved, buffers = load_file(tmp_path / "model.safetensors"), dict(scored.novelty.named_buffers())
    assert all(torch.equal(saved[f"novelty.{name}"], of) for name, of in buffers.items())
    found = again.outlier_scores(x)
    assert torch.equal(found, scored.outlier_scores(x)) and not found.requires_grad
    assert found.shape == (len(x),) and 0 <= found.min() < found.max() <= 1
    assert again.outlier_scores(x[:0]).shape == (0,)
    # The sample is recognised in a block of any size, so that it is not its own neighbour.
    torch.testing.assert_close(again.outlier_scores(x[:9]), found[:9], rtol=0, atol=0.02)


def test_a_custom_head_loads_by_its_import_path(tmp_path):
    model = make_model(head="heads.cosine_head.CosineHead")
    model.weights.copy_(model.bank.initial_weights(1))
    model.votes.fill_(1 / K)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="head='heads.cosine_head.CosineHead'"):
        ClusterModel.from_pretrained(tmp_path)
    again = ClusterModel.from_pretrained(tmp_path, head="heads.cosine_head.CosineHead")
    x = torch.randn(3, DIM)
    assert torch.equal(again.predict_proba(x), model.predict_proba(x))


def blobs(n=80):
    blob = torch.arange(n) % K
    return blob, torch.eye(DIM)[blob] * 3 + 0.3 * torch.randn(n, DIM)


def trained(x, **changes):
    few = {"n_heads": 5, "hidden_dim": 10, "batch_size": 16, "max_steps": 100}
    settings = VisionSettings(**{**few, "learning_rate": 0.01, **changes})
    projection = Projection.fit(x, settings.pca_dim)
    neighbors = torch.cdist(x, x).fill_diagonal_(9e9).argsort(1)[:, :5]
    trainer = fit.make_trainer(settings, projection.dim, K, Precision.for_device("cpu"))
    gather = projection(x).__getitem__
    plan = fit.make_plan(settings, trainer, neighbors, gather)
    train(trainer, plan.sampler, gather, plan.max_steps)
    return trainer, lambda: fit.form_answer(settings, trainer, neighbors, gather, projection)


@pytest.mark.parametrize(("unit", "pca_dim"), [(1e-4, None), (1.0, 4), (1e4, None)])
def test_the_answer_finds_clusters_in_any_unit(unit, pca_dim):
    blob, x = blobs()
    _, form_answer = trained(x * unit, pca_dim=pca_dim)
    answer = form_answer()
    model, chosen = answer.model, answer.chosen
    found = model.predict(x * unit)
    assert {len(found[blob == k].unique()) for k in range(K)} == {1} and len(found.unique()) == K
    assert len(chosen) == model.options["n_heads"]
    # Held-out samples go through the same function.
    assert torch.equal(model.predict(x[:9] * unit), found[:9])


def test_a_faulty_or_collapsed_head_does_not_spoil_the_answer():
    blob, x = blobs()
    trainer, form_answer = trained(x)
    usual = form_answer().chosen
    state = trainer.state
    sick, collapsed = usual[1], usual[2]
    state.teacher[sick] = torch.nan
    state.health.streak[sick] = 3
    state.teacher[collapsed] = 0.0  # every sample in one cluster
    answer = form_answer()
    model, chosen, information = answer.model, answer.chosen, answer.information
    assert sick not in chosen and information[sick].isnan() and information[collapsed] == 0
    assert torch.isfinite(model.weights).all()
    found = model.predict(x)
    assert {len(found[blob == k].unique()) for k in range(K)} == {1} and len(found.unique()) == K


def _config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _tensor(name, change):
    def rewrite(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = change(tensors[name])
        save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")
        _config(model_sha256=None)(folder)

    return rewrite


HARM = {
    **{
        f"answer_temperature {value}": _config(answer_temperature=value)
        for value in (-1, 0, 1e300, [], True, "1", None, float("nan"), float("inf"))
    },
    "temperature": _config(temperature=-0.1),
    "n_heads a boolean": _config(n_heads=True),
    "n_heads too many": _config(n_heads=10**9),
    "n_clusters": _config(n_clusters=5),
    "in_dim": _config(in_dim=10**6),
    "hidden_dim": _config(hidden_dim=10**6),
    "head_dim negative": _config(head_dim=-6),
    "head_dim a fraction": _config(head_dim=6.0),
    "n_new": _config(n_new=2),
    "n_reference": _config(n_reference=10**8),
    "levels": _config(levels=[10**8]),
    "levels of text": _config(levels=["4"]),
    "levels a number": _config(levels=4),
    "int8 weights": _tensor("weights", lambda x: x.to(torch.int8)),
    "int8 votes": _tensor("votes", lambda x: x.to(torch.int8)),
    "half weights": _tensor("weights", torch.Tensor.half),
    "double scale": _tensor("projection.scale", torch.Tensor.double),
    "negative votes": _tensor("votes", lambda x: -x),
    "huge votes": _tensor("votes", lambda x: x * 1e30),
    "no scale": _tensor("projection.scale", torch.zeros_like),
    "no votes": _tensor("votes", lambda x: None),
    "other shape": _tensor("votes", lambda x: x[:, :3].contiguous()),
}


@row(169)
@pytest.mark.parametrize("harm", HARM)
def test_an_inconsistent_model_file_is_refused_in_one_line(tmp_path, harm):
    model = make_model()
    model.weights.copy_(model.bank.initial_weights(0))
    model.votes.fill_(1 / K)
    model.save_pretrained(tmp_path)
    HARM[harm](tmp_path)
    with pytest.raises(CorruptFileError) as refused:
        ClusterModel.from_pretrained(tmp_path)
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)
    assert len(str(refused.value)) < 700
