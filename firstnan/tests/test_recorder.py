"""A step that cannot run again is located by the ranges between its modules."""

import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from firstnan._recorder import floating
from firstnan.tests.test_watch import LOG, Op, X, network
from firstnan.watch import Watch

SQRT = Op(lambda x: (x * (x > 0)).sqrt())  # its gradient at 0 is infinite
BOXED = Op(lambda x: SimpleNamespace(scores=(x.log(), None), n=torch.ones(2).long()))
TIED = Op(lambda x: (x.abs() + 1).log() - 1)  # finite in both calls
FINITE = Op(lambda x: (x * 0).log_().fill_(1) * x.nan_to_num())
VIEW = Op(lambda x: (y := x * 1, y.view(-1)[:9].log_())[0])
INNER = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
INNER.forward = lambda x: INNER["b"]((-INNER["a"](x).square()).log())


def located(model, *inputs, loss=torch.mean, record=True):
    watch = Watch(model, record=record)
    for x in [x.clone() for x in inputs or [X, X]]:
        watch.forget()
        loss(model(x)).backward()
    x.zero_()  # so that it is not repeated
    found = watch.explain()
    assert "not repeated: the loop has overwritten the model's inputs" in found.note
    watch.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return found


@pytest.mark.parametrize(
    ("middle", "module", "place"),
    {
        "a gradient": ([SQRT, nn.Linear(6, 2)], 2, "gradient at the output of 1"),
        "a gradient of the last module": ([SQRT], 2, "gradient at the output of 1"),
        "between modules": ([INNER, nn.Linear(6, 2)], 2, "input of 2.b"),
        "in an object": ([BOXED, Op(lambda out: out.scores[0])], 2, "output of 2"),
        "after tied modules": ([TIED, Op(torch.neg), TIED, LOG], 5, "output of 5"),
        "in place": ([FINITE, Op(lambda x: x.sub_(2).log_())], 3, "output of 3"),
        "through a view": ([FINITE, FINITE, VIEW], 4, "output of 4"),
        "behind a mask": ([Op(lambda x: x - math.inf), FINITE, LOG], 4, "output of 4"),
    }.values(),
)
def test_the_producer_of_a_value_is_named_not_its_receiver(middle, module, place):
    found = located(network(*middle))
    assert found.note.replace("Sequential.", "").startswith(f"the {place} was the first value")
    assert found.module == f"Sequential.{module}"


def test_values_from_outside_the_model_are_distinguished():
    assert located(network(), loss=lambda out: SQRT(out * 0).mean()).module is None
    assert located(network(), X * math.nan).module is None
    assert located(network(LOG), record=False).module is None


def test_the_report_shows_how_the_magnitude_grew():
    report = str(located(network(Op(lambda x: (9 * x).exp())), X / 9, X, X * 99))
    assert report.startswith("first bad  in Sequential.2, step 4\nbefore     input of Sequential:")
    first, second, last = report.split("magnitude  ")[1].split(" (last")[0].split(", ")
    assert float(first) < float(second) < float(last) == math.inf


def test_integers_and_other_objects_are_ignored():
    bad, good = torch.tensor([math.nan]), torch.ones(2)
    tree = ({"a": [bad, None]}, SimpleNamespace(b=[good], c=3), good.long(), "text", torch.empty(0))
    assert list(map(id, floating(tree))) == [id(bad), id(good)]


def test_a_watch_leaves_nothing_behind_also_after_an_exception():
    model = network(Op(lambda x: x @ x))
    watch = Watch(model, record=True)
    with pytest.raises(RuntimeError):
        model(X)
    assert not watch.recorder._open and "not repeated: RuntimeError" in watch.explain().note
    kept = weakref.ref(model)
    del model, watch  # a cycle would keep it
    assert kept() is None


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler itself
@pytest.mark.parametrize("style", ["torch.compile", "model.compile", "block.compile"])
def test_compiled_graphs_stay_whole_and_a_step_is_repeated_without_them(style):
    torch._dynamo.reset()
    options = {"backend": (counter := CompileCounterWithBackend("aot_eager")), "fullgraph": True}
    model = network(nn.Sequential(nn.ReLU(), nn.Linear(6, 6)), nn.Linear(6, 2))
    compiled = torch.compile(model, **options) if style == "torch.compile" else model
    if compiled is model:
        (model if style == "model.compile" else model[2]).compile(**options)
    watch = Watch(compiled, record=True)
    for bad in (False, False, True):
        model.get_parameter("2.1.weight").data[0, 0] *= math.nan if bad else 1
        compiled(X).square().mean().backward()
        found = watch.explain()
    assert counter.frame_count == 1 and found.module == "Sequential.2.1"
    assert found.fault.op == "aten.addmm" and found.fault.place is None  # in torch's own code
