"""The loop: the rows and learning rate of each step, its log, and resuming."""

import copy
import math

import pytest
import torch

pytest.importorskip("transformers")

from firstnan import TooFewHealthyParts  # noqa: E402
from ssl_kd.language.models.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.language.train.loop import rows_of_step, train  # noqa: E402
from tests.torch_modes import MODES  # noqa: E402

TIMES = ("tokens_per_second",)


class Log:
    """Everything that the loop says."""

    def __init__(self):
        self.steps, self.rows, self.evals, self.saves = [], [], [], []

    def callbacks(self):
        return {
            "on_step": lambda step, result: self.steps.append((step, result)),
            "on_log": self.rows.append,
            "on_eval": self.evals.append,
            "on_checkpoint": self.saves.append,
        }

    def timeless(self):
        return [{k: v for k, v in row.items() if k not in TIMES} for row in self.rows]


def make(tiny, **changes):
    return tiny.distiller(FrozenTeacher(tiny.model(spread=0.3)), **changes)


def poisoned_after(distiller, last):
    """An `on_step` that notes the results; after step `last` the student gives NaN."""

    def on_step(step, result):
        on_step.results.append(result)
        if step == last:
            distiller.student.model.norm.register_forward_hook(lambda m, args, out: out * math.nan)

    on_step.results = []
    return on_step


# --- rows and rates -------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "rows"), [(10, 4), (7, 7), (5, 12), (64, 8), (1, 3)])
def test_every_pass_shuffles_all_rows(n, rows):
    steps = -(-4 * n // rows)
    stream = torch.cat([rows_of_step(step, rows, n, seed=3) for step in range(steps)])
    passes = [p.tolist() for p in stream[: 4 * n].split(n)]
    assert all(sorted(p) == list(range(n)) for p in passes)
    if n >= 7:
        assert len({tuple(p) for p in passes}) == 4
        other = torch.cat([rows_of_step(step, rows, n, seed=4) for step in range(steps)])
        assert not torch.equal(stream, other)


def test_it_learns_and_leaves_the_random_state_alone(tiny):
    distiller, log = make(tiny), Log()
    dice = torch.get_rng_state()
    assert train(distiller, tiny.blocks(), 30, **log.callbacks()) == 30
    assert torch.equal(dice, torch.get_rng_state())
    first, last = log.rows[0], log.rows[-1]
    assert last["ce"] < 0.8 * first["ce"]
    assert last["success_rate"] == 1.0 and last["consecutive_nans"] == 0
    assert all(row["tokens_per_second"] > 0 for row in log.rows)


# --- what is logged -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "meta"])
def test_the_callers_mode_of_torch_changes_no_bit(tiny, mode):
    plain, inside = make(tiny), make(tiny)
    train(plain, tiny.blocks(), 3)
    with MODES[mode]():
        train(inside, tiny.blocks(), 3)
    pairs = zip(plain.student.parameters(), inside.student.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_row_is_the_mean_of_the_steps_since_the_last(tiny):
    distiller, log = make(tiny, log_every=3), Log()
    train(distiller, tiny.blocks(), 8, **log.callbacks())
    assert [row["step"] for row in log.rows] == [3, 6, 8]
    results = [result for _, result in log.steps]
    for row, some in zip(log.rows, (results[:3], results[3:6], results[6:]), strict=True):
        for name, key in (("ce", "ce"), ("kd", "kd"), ("train_loss", "loss")):
            mean = sum(getattr(r, key) for r in some) / len(some)
            assert row[name] == pytest.approx(mean)
        assert row["train_loss"] == pytest.approx(0.5 * row["ce"] + 0.5 * row["kd"])
    names = "step train_loss kd ce grad_norm success_rate consecutive_nans gpu_memory_gb"
    names += " ce_success_rate kd_success_rate tokens_per_second learning_rate"
    assert set(names.split()) == set(log.rows[0])
    assert log.rows[0]["gpu_memory_gb"] is None


# --- stopping and going on ------------------------------------------------------------------------


def test_a_failed_run_saves_the_last_good_state(tiny):
    distiller = make(tiny, stop_after=2)
    before, saved = copy.deepcopy(distiller.student.state_dict()), []

    def save(step):
        saved.append((step, copy.deepcopy(distiller.student.state_dict())))

    calls = {"on_step": poisoned_after(distiller, 0), "on_checkpoint": save}
    with pytest.raises(TooFewHealthyParts):
        train(distiller, tiny.blocks(), 8, **calls)
    ((step, weights),) = saved
    assert step == 3 == distiller.guard.steps
    assert all(torch.equal(before[name], weights[name]) for name in before)
