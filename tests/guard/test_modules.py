"""Parts that are modules: float16 masters, buffers, and what a part goes back to."""

import torch
from torch import nn

from ssl_kd.guard.modules import Masters, ModuleParts


def half_linear():
    model = nn.Linear(3, 2).half()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def trained(model, optimizer, masters=None):
    """One step of a whole optimizer, so that it has moments."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if masters is not None:
        masters.take_gradients()
    optimizer.step()
    optimizer.zero_grad()


def test_gradients_of_several_batches_add_up_in_the_masters_in_float32():
    model, optimizer = half_linear()
    masters = Masters(optimizer)
    for value in (2048.0, 1.0):  # in float16 their sum is 2048
        model.weight.grad = torch.full_like(model.weight, value)
        masters.take_gradients()
        assert model.weight.grad is None
    assert (masters.of(model.weight).grad == 2049).all()


def test_masters_of_a_checkpoint_give_the_model_their_values_too():
    (first, one), (second, two) = half_linear(), half_linear()
    saved, masters = Masters(one), Masters(two)
    trained(first, one, saved)
    masters.load(saved.tensors())
    assert all(torch.equal(a, b) for a, b in zip(masters.tensors(), saved.tensors(), strict=True))
    assert torch.equal(second.weight, saved.of(first.weight).half())


def test_float16_weights_begun_anew_are_those_of_their_masters():
    model, optimizer = half_linear()
    parts = ModuleParts(model, optimizer, None)
    before = model.weight.detach().clone()
    trained(model, optimizer, parts.masters)
    parts.masters.write()
    parts.reinitialise(0, 5, 8)
    assert not torch.equal(model.weight, before) and not optimizer.state
    assert torch.equal(parts.masters.of(model.weight), model.weight.float())


def test_a_part_begun_anew_knows_no_good_state_and_takes_the_next_one():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = ModuleParts(model, optimizer, None)
    parts.snapshot([0], 4, every=100)
    parts.reinitialise(0, 5, 6)
    assert parts.restore(0) is None
    parts.snapshot([0], 6, every=100)
    assert parts.restore(0) == 6


def test_a_part_is_begun_anew_the_same_way_by_the_same_seed():
    ends = []
    for seed in (5, 5, 6):
        model = nn.Linear(3, 2)
        parts = ModuleParts(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
        parts.reinitialise(0, seed, 8)
        ends.append(model.weight.detach().clone())
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])


def test_a_snapshot_is_taken_when_it_is_due_and_not_before():
    model = nn.Linear(3, 2)
    parts = ModuleParts(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    seen = []
    for step in range(7):
        parts.snapshot([0], step, every=3)
        seen.append(parts[0].good["step"])
    assert seen == [0, 0, 0, 3, 3, 3, 6]


def test_a_part_goes_back_with_its_moments_and_its_buffers():
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parts = ModuleParts(model, optimizer, None)
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


def test_what_an_optimizer_remembers_beside_tensors_goes_back_too():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = ModuleParts(model, optimizer, None)
    optimizer.state[model.weight] = {"steps": 3, "history": [1, 2]}
    parts.snapshot([0], 1, every=1)
    for _ in range(2):  # what is put back is a copy: it can be put back again
        optimizer.state[model.weight]["steps"] += 1
        optimizer.state[model.weight]["history"].append(9)
        optimizer.state[model.weight]["late"] = 1
        parts.restore(0)
        assert optimizer.state[model.weight] == {"steps": 3, "history": [1, 2]}


def test_after_a_state_was_loaded_a_sick_step_goes_back_to_the_buffers_of_then():
    model = nn.BatchNorm1d(3)
    parts = ModuleParts(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    model.running_mean.fill_(7.0)  # as the model's own checkpoint gave it
    parts.load_state_dict(parts.state_dict())
    model.running_mean.fill_(9.0)
    parts[0].buffers.put_back(parts[0].buffers.kept)
    assert (model.running_mean == 7).all()


def test_a_buffer_put_back_in_place_is_still_the_same_tensor():
    """Another module, or a compiled graph, may hold on to it."""
    model = nn.BatchNorm1d(3)
    parts = ModuleParts(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    before = model.running_mean
    model.running_mean.fill_(9.0)
    parts[0].buffers.put_back(parts[0].buffers.kept)
    assert model.running_mean is before and not before.any()


def test_a_buffer_that_a_step_took_away_is_put_back():
    model = nn.BatchNorm1d(3)
    parts = ModuleParts(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    model.running_mean.fill_(4.0)
    parts[0].buffers.keep()
    model.register_buffer("running_mean", None)
    parts[0].buffers.put_back(parts[0].buffers.kept)
    assert (model.running_mean == 4).all()
    model.running_mean.fill_(9.0)  # what was remembered is not what the module goes on with
    assert (parts[0].buffers.kept[0] == 4).all()


def test_a_part_is_finite_only_with_its_moments_and_buffers():
    for what in ("weight", "moment", "buffer"):
        model = nn.BatchNorm1d(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        parts = ModuleParts(model, optimizer, None)
        trained(model, optimizer)
        assert parts.finite() == [True]
        moment = optimizer.state[model.bias]["exp_avg"]
        tensors = {"weight": model.weight, "moment": moment, "buffer": model.running_var}
        with torch.no_grad():
            tensors[what][1] = torch.inf
        assert parts.finite() == [False], what


def test_a_complex_parameter_that_is_not_trained_is_no_obstacle():
    model = nn.ParameterDict({"wave": nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    model["real"] = nn.Parameter(torch.ones(2))
    parts = ModuleParts(model, torch.optim.SGD([model["real"]], lr=0.1), None)
    assert len(parts.weights()) == 1
