"""The first operation with a nonfinite result is named, in loops that are unchanged."""

import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from firstnan import Guard
from firstnan.watch import Watch
from tests.ranks import run_ranks


class Op(nn.Module):
    """A module of one expression."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, x):
        return self.compute(x)


LOG, DIVIDE = Op(lambda x: x.log()), Op(lambda x: x / x.norm(dim=-1, keepdim=True))


class Bypass(nn.Module):
    """An operation of a module's own, whose result only another one sees."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return {"out": [self.inner(torch.log(x.abs() - x.abs()[:1]))], "n": 3}


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant=False):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class WithLoss(nn.Module):
    """Returns its own loss with what the loss was computed from, as transformers' models do."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 5)

    def forward(self, x, labels):
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def network(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), *middle)


def explain(model, x, loss=lambda out: out.square().mean()):
    watch = Watch(model)
    loss(model(x)).backward()
    return watch.explain()


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
LAST = X.clone()
LAST[4] = 0


def test_the_rows_at_fault_are_named():
    found = explain(nn.Sequential(nn.Linear(4, 6, bias=False), DIVIDE, nn.Linear(6, 2)), LAST)
    assert found.module == "Sequential.1" and found.rows == (4,) and "row 4" in found.headline


def test_an_operation_of_the_backward_pass_is_named_with_its_module():
    found = explain(network(Op(lambda x: (x * (x > 0)).sqrt()), nn.Linear(6, 2)), X)
    assert found.fault.backward and found.module == "Sequential.2" and "sqrt" in found.headline


def test_a_model_may_return_an_object_that_holds_its_tensors():
    inner = network(Op(lambda x: (x * (x > 0)).sqrt()), nn.Linear(6, 2))
    model = nn.Sequential(inner, Op(lambda x: SimpleNamespace(scores=x)))
    found = explain(model, X, lambda out: out.scores.square().mean())
    assert found.fault.backward and found.module == "Sequential.0.2"


def test_operations_between_modules_belong_to_the_parent():
    found = explain(network(Bypass()), X, lambda out: out["out"][0].mean())
    assert found.module == "Sequential.2" and found.fault.op == "aten.log"


def test_a_checkpointed_module_is_named_as_without_checkpointing():
    for x, reentrant in ((X, False), (X.clone().requires_grad_(), True)):
        found = explain(Checkpointed(network(LOG), reentrant), x)
        assert found.module == "Checkpointed.inner.2" and found.fault.op == "aten.log"


def test_losses_inside_and_outside_the_model_are_distinguished():
    found = explain(network(nn.Linear(6, 2)), X, lambda out: (out * 0).log().sum())
    assert found.module is None and found.fault is None and "outputs are finite" in found.note
    assert "outside of the model" in found.headline


def test_a_model_that_returns_its_loss_with_the_logits_is_repeated_once():
    watch = Watch(WithLoss())
    watch.model(X, labels=torch.full((5,), -100))["loss"].backward()
    found = watch.explain()
    assert found.fault.op == "aten.nll_loss_forward" and "every label" in found.why


def test_a_pass_with_other_weights_is_repeated_with_them():
    watch = Watch(nn.Sequential(nn.Linear(4, 4), Op(torch.sqrt)))
    zero = {"0.weight": watch.model.get_parameter("0.weight") * 0, "0.bias": torch.zeros(4)}
    torch.func.functional_call(watch.model, zero, X).sum().backward()
    assert watch.explain().fault.backward and watch.explain().module == "Sequential.1"


def test_a_poisoned_weight_and_a_poisoned_row_are_distinguished():
    model = network(nn.Linear(6, 2))
    bad = X.clone()
    bad[2, 1] = math.nan
    assert explain(model, bad).diagnosis.cause.value == "poisoned input row"
    normalized = network(nn.BatchNorm1d(6))  # whose statistics the bad row makes NaN, too
    assert explain(normalized, bad).diagnosis.cause.value == "poisoned input row"
    with torch.no_grad():
        next(model[2].parameters())[0, 0] = math.inf
    found = explain(model, X)
    assert found.diagnosis.cause.value == "poisoned weight" and "2.weight" in found.why


def test_a_healthy_step_has_no_explanation_and_keeps_its_bits():
    def train(watched):
        torch.manual_seed(0)
        model = network(nn.BatchNorm1d(6), nn.Linear(6, 2))
        optimizer = torch.optim.Adam(model.parameters())
        watch = Watch(model, record=True) if watched else None
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            if watch is not None:
                assert watch.explain() is None
                watch.forget()
            optimizer.step()
        return [*model.state_dict().values(), torch.get_rng_state()]

    assert all(map(torch.equal, train(True), train(False)))


def test_each_pass_is_repeated_from_the_buffers_before_it():
    model = network(nn.BatchNorm1d(6))
    watch = Watch(model)
    before = []
    for _ in range(2):
        before.append(model[2].get_buffer("running_mean").clone())
        model(X)
    kept = [call.buffers["2.running_mean"] for call in watch.calls]
    assert all(map(torch.equal, kept, before)) and not torch.equal(*before)


def test_dropout_draws_the_same_numbers_again():
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), Op(lambda x: F.dropout(x * 0 + 1, 0.5).log()))
        watch = Watch(model)
        out = model(X)
        out.sum().backward()
        found = watch.explain()
        bad = (~out.isfinite()).any(1).nonzero().flatten().tolist()
        assert list(found.rows) == (bad if len(bad) < 5 else [])


def test_a_model_that_cannot_run_again_does_not_end_the_training():
    stream = iter([torch.log])
    once = Op(lambda x: next(stream)(x))
    found = explain(nn.Sequential(nn.Linear(4, 6), once), X)
    assert "not repeated: StopIteration" in found.note and "place unknown" in found.headline


def guarded(batches, locate=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), DIVIDE, nn.Linear(6, 2))
    guard = Guard(model, torch.optim.AdamW(model.parameters()), locate=locate)
    for x in batches:
        guard.optimizer.zero_grad()
        guard.backward(model(x).square().mean())
        guard.step()
    return guard


def test_the_guard_names_the_operation_of_the_first_bad_step_of_a_series():
    guard = guarded([X, LAST, LAST, X, LAST])
    assert sorted(guard.locator.findings) == [2, 5]
    located = [e for e in guard.events.events if e.stage == "origin"]
    assert [e.step for e in located] == [2, 5] and "aten.div" in located[0].reason
    assert "row 4" in located[0].reason and "zero norm" in guard.diagnosis()


def test_the_guard_trains_the_same_bits_with_it_and_without():
    with_it, without = guarded([X, LAST, X]), guarded([X, LAST, X], locate=False)
    assert all(map(torch.equal, with_it.model.parameters(), without.model.parameters()))
    assert not without.locator.findings and not without.locator.events


def locate_on(rank):
    guard = guarded([X, LAST if rank else X])
    return [e.reason for e in guard.events.events if e.stage == "origin"]


def test_every_rank_gets_the_finding_of_one():
    results = run_ranks(locate_on, 2)
    assert results[0] == results[1] and len(results[0]) == 1 and "rank 1" in results[0][0]


def test_token_ids_that_the_loader_has_overwritten_are_repeated():
    model = nn.Sequential(nn.Embedding(3, 4), LOG)
    watch, ids = Watch(model), torch.tensor([0, 2])
    model(ids).sum().backward()
    ids.fill_(99)  # nanochat's loader writes the next batch before the optimizer steps
    assert watch.explain().fault.op == "aten.log"
