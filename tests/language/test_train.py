"""The loop: which rows and learning rate a step has, what it logs, and going on after a stop."""

import copy
import math

import pytest
import torch

pytest.importorskip("transformers")

from ssl_kd.guard import TooFewHealthyParts  # noqa: E402
from ssl_kd.language.train import learning_rate_at, rows_of_step, train  # noqa: E402
from ssl_kd.teachers.frozen import FrozenTeacher  # noqa: E402
from tests.modes import MODES  # noqa: E402

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
def test_every_row_comes_once_a_pass_in_an_order_of_its_own(n, rows):
    steps = -(-4 * n // rows)
    stream = torch.cat([rows_of_step(step, rows, n, seed=3) for step in range(steps)])
    passes = [p.tolist() for p in stream[: 4 * n].split(n)]
    assert all(sorted(p) == list(range(n)) for p in passes)
    if n >= 7:
        assert len({tuple(p) for p in passes}) == 4
        other = torch.cat([rows_of_step(step, rows, n, seed=4) for step in range(steps)])
        assert not torch.equal(stream, other)


def test_the_rows_of_a_step_depend_on_nothing_else():
    torch.manual_seed(1)
    first = rows_of_step(7, 8, 50, 0)
    torch.rand(5)
    assert torch.equal(first, rows_of_step(7, 8, 50, 0))


def test_the_learning_rate_warms_up_then_falls_along_a_cosine():
    rates = [learning_rate_at(step, 100, 2.0, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == rates[10] == 2.0
    assert all(b > a for a, b in zip(rates[:9], rates[1:10], strict=True))
    assert all(b < a for a, b in zip(rates[10:-1], rates[11:], strict=True))
    assert rates[55] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(1 + math.cos(math.pi * 89 / 90))
    assert [learning_rate_at(0, 1, 2.0, 0.1), learning_rate_at(0, 5, 2.0, 0.0)] == [2.0, 2.0]


def test_the_loop_hands_rows_and_rate_of_each_step_to_the_student(tiny, monkeypatch):
    distiller = make(tiny, batch_size=3, gradient_accumulation_steps=2)
    blocks, seen = tiny.blocks(), []
    step = distiller.step

    def spy(batches, rate):
        seen.append((torch.cat([batch.rows for batch in batches]), len(batches), rate))
        return step(batches, rate)

    monkeypatch.setattr(distiller, "step", spy)
    train(distiller, blocks, 4)
    for at, (rows, batches, rate) in enumerate(seen):
        assert torch.equal(rows, rows_of_step(at, 6, len(blocks), 0)) and batches == 2
        assert rate == learning_rate_at(at, 4, 1e-2, 0.1)
    assert len(seen) == 4


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


def test_what_is_not_finite_is_left_out_of_the_means(tiny):
    distiller, log = make(tiny, log_every=4), Log()
    more = poisoned_after(distiller, 1)
    train(distiller, tiny.blocks(), 4, **{**log.callbacks(), "on_step": more})
    (row,), results = log.rows, more.results
    assert [r.updated for r in results] == [True, True, False, False]
    assert row["success_rate"] == 0.5 and row["consecutive_nans"] == 2
    assert row["ce_success_rate"] == row["kd_success_rate"] == 0.5
    assert row["ce"] == pytest.approx((results[0].ce + results[1].ce) / 2)
    assert row["grad_norm"] == pytest.approx((results[0].grad_norm + results[1].grad_norm) / 2)


def test_looks_and_checkpoints_come_when_they_are_due_and_at_the_end(tiny):
    log = Log()
    train(make(tiny, eval_every=3, checkpoint_every=4), tiny.blocks(), 10, **log.callbacks())
    assert log.evals == [3, 6, 9, 10] and log.saves == [4, 8, 10]
    assert [step for step, _ in log.steps] == list(range(10))


def test_why_a_training_stopped_is_said_though_no_checkpoint_can_be_written(tiny, caplog):
    def full(done):
        raise OSError(28, "No space left on device")

    distiller = make(tiny, stop_after=2, checkpoint_every=99)
    calls = {**Log().callbacks(), "on_checkpoint": full, "on_step": poisoned_after(distiller, 1)}
    with pytest.raises(TooFewHealthyParts, match="no part had a healthy step in the last 2"):
        train(distiller, tiny.blocks(), 9, **calls)
    assert "the last checkpoint, of step 4, could not be written: " in caplog.text


def test_looks_and_checkpoints_are_not_counted_as_time_of_learning(tiny, monkeypatch):
    now, log = [0.0], Log()
    monkeypatch.setattr("ssl_kd.training.loop.time.perf_counter", lambda: now[0])

    def later(seconds):
        now[0] += seconds

    calls = log.callbacks() | {
        "on_step": lambda step, result: (later(1), log.steps.append((step, result))),
        "on_eval": lambda done: later(100),
        "on_checkpoint": lambda done: later(1000),
    }
    options = {"log_every": 3, "eval_every": 2, "checkpoint_every": 4}
    train(make(tiny, **options), tiny.blocks(), 6, **calls)
    tokens = [result.tokens for _, result in log.steps]
    speeds = [row["tokens_per_second"] for row in log.rows]
    assert speeds == [sum(tokens[:3]) / 3, sum(tokens[3:]) / 3]


# --- stopping and going on ------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, 4, 5])
def test_stopped_anywhere_it_goes_on_with_the_same_numbers(tiny, stop):
    """Between two log lines, too."""
    blocks, whole, part = tiny.blocks(), Log(), Log()
    options = {"log_every": 3, "checkpoint_every": 100}

    def student():
        return tiny.model("GPT2", seed=1, resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)

    one = make(tiny, student=student(), **options)
    train(one, blocks, 8, **whole.callbacks())

    two = make(tiny, student=student(), **options)
    done = train(two, blocks, 8, should_stop=lambda: len(part.steps) == stop, **part.callbacks())
    assert done == stop and part.saves == [stop]
    three = make(tiny, student=student(), **options)
    three.load(copy.deepcopy(two.state()))
    torch.manual_seed(99)  # a new process has other random numbers
    assert train(three, blocks, 8, start=done, **part.callbacks()) == 8
    for (name, p), (_, q) in zip(
        one.student.named_parameters(), three.student.named_parameters(), strict=True
    ):
        assert torch.equal(p, q), name
    assert part.timeless() == whole.timeless()
    assert part.steps == whole.steps
    assert one.tokens == three.tokens


def test_a_run_that_is_given_up_saves_the_last_good_state(tiny):
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
