"""Parts that are modules: their weights and buffers, and the state they are restored to."""

import pytest
import torch
from torch import nn

from firstnan._optimizers import Optimizers
from firstnan.parts import ModuleParts


def parts_of(model, optimizer, parts=None):
    return ModuleParts(model, Optimizers(optimizer), parts)


def trained(model, optimizer):
    """One step of a whole optimizer, so that it has moments."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("given", [None, {"first": 0, "second": 1}])
def test_float16_weights_are_refused_with_the_way_out(given):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).half())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = given and {name: model[i] for name, i in given.items()}
    with pytest.raises(ValueError, match="'1.weight' is float16, expected float32.*autocast") as no:
        parts_of(model, optimizer, parts)
    assert "\n" not in str(no.value)
    parts_of(model[0], torch.optim.SGD(model[0].parameters(), lr=0.1))
    model[1].requires_grad_(False)  # as the frozen weights below adapters
    parts_of(model, optimizer)


def test_a_part_is_restored_with_its_moments_and_buffers():
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parts = parts_of(model, optimizer)
    trained(model, optimizer)
    model(torch.randn(4, 3))
    tensors = [*model.parameters(), *model.buffers(), *optimizer.state[model.weight].values()]
    before = [t.detach().clone() for t in tensors]
    parts.snapshot([0], 1, every=1)
    trained(model, optimizer)
    model(torch.randn(4, 3))
    assert not any(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert parts.restore(0) == 1
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    kept = [b for b in parts[0].buffers.kept if b is not None]  # what a sick step would start from
    assert all(torch.equal(a, b) for a, b in zip(kept, model.buffers(), strict=True))


def test_optimizer_state_without_tensors_is_restored():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = parts_of(model, optimizer)
    optimizer.state[model.weight] = {"steps": 3, "history": [1, 2]}
    parts.snapshot([0], 1, every=1)
    for _ in range(2):  # what is put back is a copy: it can be put back again
        optimizer.state[model.weight]["steps"] += 1
        optimizer.state[model.weight]["history"].append(9)
        optimizer.state[model.weight]["late"] = 1
        parts.restore(0)
        assert optimizer.state[model.weight] == {"steps": 3, "history": [1, 2]}


def test_a_bad_step_after_loading_restores_the_loaded_buffers():
    model = nn.BatchNorm1d(3)
    parts = parts_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.running_mean.fill_(7.0)  # as the model's own checkpoint gave it
    parts.load_state_dict(parts.state_dict())
    model.running_mean.fill_(9.0)
    parts[0].buffers.put_back()
    assert (model.running_mean == 7).all()


def test_a_buffer_that_a_step_took_away_is_put_back():
    model = nn.BatchNorm1d(3)
    parts = parts_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.running_mean.fill_(4.0)
    parts[0].buffers.keep()
    model.register_buffer("running_mean", None)
    parts[0].buffers.put_back()
    assert (model.running_mean == 4).all()
    model.running_mean.fill_(9.0)  # what was remembered is not what the module goes on with
    assert (parts[0].buffers.kept[0] == 4).all()


def test_a_part_is_finite_only_with_its_moments_and_buffers():
    for what in ("weight", "moment", "buffer"):
        model = nn.BatchNorm1d(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        parts = parts_of(model, optimizer)
        trained(model, optimizer)
        assert parts.finite() == [True]
        moment = optimizer.state[model.bias]["exp_avg"]
        tensors = {"weight": model.weight, "moment": moment, "buffer": model.running_var}
        with torch.no_grad():
            tensors[what][1] = torch.inf
        assert parts.finite() == [False], what


def test_a_frozen_complex_parameter_is_accepted():
    model = nn.ParameterDict({"wave": nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    model["real"] = nn.Parameter(torch.ones(2))
    parts = parts_of(model, torch.optim.SGD([model["real"]], lr=0.1))
    assert len(parts.weights()) == 1
