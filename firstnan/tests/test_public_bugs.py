"""Twenty-five bugs that people reported in public, each in a few lines: the operation is named.

Each is the kernel of the thread it names, alone in a model. `docs/nan.md` tells nine of them.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firstnan.watch import Watch

INF = torch.inf


class Bug(NamedTuple):
    thread: str
    forward: Callable[[Tensor], Tensor]
    x: Tensor
    op: str
    why: str
    backward: bool = False


class Kernel(nn.Module):
    """A weight of 1 before what the thread computes, so that there is something to train."""

    def __init__(self, forward, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=dtype))
        self.kernel = forward

    def forward(self, x):
        return self.kernel(x * self.weight if x.is_floating_point() else x)


def attention_of_padding(x):
    scores = x @ x.mT
    return (scores.masked_fill(torch.ones_like(scores) > 0, -INF).softmax(-1) @ x).mean()


def koleo(x):
    z = F.normalize(x, dim=-1, eps=1e-8)
    return -torch.log(F.pairwise_distance(z, z[[1, 0, 0]], eps=1e-8) + 1e-8).mean()


def clipped_ratio(x):
    ratio = x.exp()
    return -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()


def batch_norm_by_hand(x):
    return ((x - x.mean(0)) / x.var(0)).square().mean()


def ctc(x):
    lengths = torch.tensor([2])
    return F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 1, 2]]), lengths, torch.tensor([3]))


class Statistics(nn.Module):
    """Batch normalization in evaluation, whose statistics one bad batch has spoiled."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2).eval()
        self.norm.get_buffer("running_var")[0] = torch.nan

    def forward(self, x):
        return self.norm(x).mean()


HALF = torch.float16
EXPONENTIAL = "the exponential of"
ZERO_LOG = "logarithm was taken of an exact 0"
ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]])
LARGE = torch.tensor([[0.0, 30.0], [0.0, 20.0]], dtype=HALF)

BUGS = [
    Bug("pytorch#41508", attention_of_padding, ROWS, "_softmax", "every entry of a row is -inf"),
    Bug(
        "pytorch#187297",
        lambda x: torch.where(x > 0, x.sqrt(), x).mean(),
        torch.tensor([0.0, 1.0]),
        "div",
        "infinite at 0",
        backward=True,
    ),
    Bug("pytorch#46849", lambda x: (x * 1e30).square().sum(), ROWS, "pow", "float32 ends at"),
    Bug(
        "pytorch#70348",
        lambda x: F.cross_entropy(x, torch.full((3,), -100)),
        ROWS,
        "nll_loss_forward",
        "every label is ignored",
    ),
    Bug("FLIP#766", lambda x: (x * 0).sum() / (x * 0).sum(), ROWS, "div", "a mean over nothing"),
    Bug("dinov2#492", koleo, torch.ones(3, 4, dtype=HALF), "log", ZERO_LOG),
    Bug(
        "trl#5594",
        lambda x: (x.exp() * (x - torch.tensor([0.0, -INF]))).mean(),
        ROWS,
        "sub",
        "infinity",
    ),
    Bug(
        "pylate#239",
        lambda x: F.normalize(x, dim=-1, eps=1e-12).mean(),
        torch.zeros(2, 4, dtype=HALF),
        "div",
        "a vector's length is exactly 0",
    ),
    Bug(
        "apex#93",
        lambda x: (x + -1e20).float().softmax(-1).mean(),
        torch.ones(2, 3, dtype=HALF),
        "add",
        "float16 ends at",
    ),
    Bug("pytorch#29372", lambda x: x.std(), torch.ones(1), "std", "one value"),
    Bug(
        "piq#308",
        lambda x: x.square().sum(-1).sqrt().mean(),
        torch.zeros(2, 4),
        "div",
        "infinite at 0",
        backward=True,
    ),
    Bug("vamb#12", lambda x: -(x * x.log()).sum(), torch.tensor([0.0, 1.0]), "log", ZERO_LOG),
    Bug(
        "torch-vectorized#7",
        lambda x: x.acos().sum(),
        torch.ones(3),
        "rsqrt",
        "0",
        backward=True,
    ),
    Bug(
        "transformers#5651",
        lambda x: (x @ torch.full((2, 2), 3e4, dtype=HALF)).float().mean(),
        torch.ones(3, 2, dtype=HALF) * 3,
        "mm",
        "float16 ends at 6.55e+04",
    ),
    Bug(
        "transformers#17306",
        lambda x: (x + torch.finfo(HALF).min).float().softmax(-1).mean(),
        -20 * torch.ones(2, 3, dtype=HALF),
        "add",
        "float16 ends at",
    ),
    Bug("OpenRLHF#1293", clipped_ratio, torch.tensor([0.0, 200.0]), "exp", EXPONENTIAL),
    Bug("trl#3015", lambda x: (x.exp() - x - 1).mean(), ROWS * 60, "exp", EXPONENTIAL),
    Bug("apex#379", lambda x: -x.softmax(-1).log().mean(), LARGE, "log", ZERO_LOG),
    Bug("keras#377", lambda x: -(1 - x.sigmoid()).log().mean(), LARGE, "log", ZERO_LOG),
    Bug(
        "GLiNER2#155",
        lambda x: 1 - torch.log1p(-x.minimum(torch.tensor(1 - 1e-6, dtype=HALF))).exp().mean(),
        torch.ones(3, dtype=HALF),
        "div",
        ZERO_LOG,
        backward=True,
    ),
    Bug("wenet#2299", ctc, torch.ones(2, 1, 3), "_ctc_loss", "too short"),
    Bug("makemore#22", batch_norm_by_hand, torch.ones(1, 3), "var", "one value"),
    Bug(
        "speechbrain#493",
        lambda x: ((x - x.mean(0)) / x.std(0)).mean(),
        -100 * torch.ones(4, 2),
        "div",
        "a vector's length is exactly 0",
    ),
    Bug(
        "optax#1786",
        lambda x: torch.where(x == 0, 0, x * x.log()).sum(),
        torch.tensor([0.0, 0.5]),
        "log",
        ZERO_LOG,
    ),
    Bug(
        "InSPyReNet#36",
        lambda x: (x @ x.mT).softmax(-1).float().mean(),
        torch.full((2, 64), 40.0, dtype=HALF),
        "mm",
        "float16 ends at",
    ),
]


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.thread)
def test_the_operation_of_a_public_bug_is_named_with_its_cause(bug):
    watch = Watch(Kernel(bug.forward, bug.x.dtype))
    watch.model(bug.x).backward()
    found = watch.explain()
    assert found is not None and found.fault is not None
    assert found.fault.op.rpartition(".")[2] == bug.op and bug.why in found.why
    assert found.fault.backward == bug.backward and "test_public_bugs.py" in found.headline


def test_statistics_that_were_spoiled_before_are_named():
    """pytorch#1206: every output is NaN in evaluation, though all weights are fine."""
    model = Statistics()
    watch = Watch(model)
    model(ROWS).backward()
    assert "norm.running_var came in not finite" in watch.explain().why
