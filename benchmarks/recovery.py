"""Compare the guard with three common ways to handle failing heads, by what healthy heads lose.

    python -m benchmarks.recovery                          # the table: 2,000 steps on digits
    python -m benchmarks.recovery --picture docs/guard.png # one NaN at step 300, four curves

Fifty heads train on digits. Every 50 steps, one of the first ten gets a fault: NaN in a weight, an
infinite logit, or NaN or 1e30 in its gradient. The other forty are compared with a fault-free run:

- guard: this library's step. Uncoupled heads must be bit-identical to the fault-free run; heads
  coupled by the paper's instance weight, to a run in which the faulty head was removed from that
  step by hand.
- no guard: one global gradient clip over all heads, as in most training loops.
- skip the step: no update in a step with any non-finite value.
- nan_to_num: NaN in the gradient becomes 0, infinities become large; then the global clip.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.step_cost import without_guard
from benchmarks.turns import header, row
from firstnan import TooFewHealthyParts
from firstnan.faults import Observation, Stage
from firstnan.health import Health
from firstnan.recovery import Recovery
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.loop import run_loop
from ssl_kd.vision import evaluate
from ssl_kd.vision.cache import nearest_neighbors
from ssl_kd.vision.data import ArrayDataset, open_dataset
from ssl_kd.vision.fit import head_clusters, make_plan, make_trainer
from ssl_kd.vision.model_parts import Projection
from ssl_kd.vision.settings import VisionSettings
from ssl_kd.vision.train.heads import HeadBank
from ssl_kd.vision.train.learner import HeadsLearner, Plan
from ssl_kd.vision.train.rows import part_norms
from ssl_kd.vision.train.step import HeadTrainer

HEADS, STRUCK, EVERY = 50, 10, 50
Strike = tuple[int, str]  # head, kind of fault


class _Sick(torch.autograd.Function):
    """Passes logits through and sets one head's gradient to a value."""

    @staticmethod
    def forward(ctx, x: Tensor, head: int, value: float) -> Tensor:  # noqa: ANN001
        ctx.head, ctx.value = head, value
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):  # noqa: ANN001, ANN205  # type: ignore[override]
        grad = grad.clone()
        grad[ctx.head] = ctx.value
        return grad, None, None


class StruckBank(HeadBank):
    """A bank that corrupts one head in the next step if `strike` is set."""

    strike: Strike | None = None

    def __call__(self, parameters: dict[str, Tensor], x: Tensor, *, training: bool = False):
        logits = super().__call__(parameters, x, training=training)
        head, kind = self.strike or (0, "nothing")
        if kind == "infinite logit":
            return logits.index_fill(0, torch.tensor([head]), torch.inf)
        if training and kind in ("NaN gradient", "1e30 gradient"):
            return _Sick.apply(logits, head, torch.nan if kind == "NaN gradient" else 1e30)
        return logits


def strikes(steps: int, kinds: list[str], seed: int = 0) -> dict[int, Strike]:
    """Return the head to corrupt and the kind of fault, by step."""
    draw = random.Random(seed)
    return {s: (draw.randrange(STRUCK), draw.choice(kinds)) for s in range(EVERY, steps, EVERY)}


def global_norm(gradients: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradients).expand(len(gradients))


def cleaned_norm(gradients: Tensor) -> Tensor:
    torch.nan_to_num_(gradients)
    return global_norm(gradients)


@contextlib.contextmanager
def skip_the_step():
    find = Observation.stage

    def all_or_none(self: Observation):  # noqa: ANN202
        stage = find(self)
        bad = (stage != 0).any()
        return torch.where(bad, int(Stage.GRADIENT), 0).to(torch.int8).expand(len(stage)).clone()

    with (
        patch.object(Observation, "stage", all_or_none),
        patch.object(Health, "escalate", lambda self, *rest: ({}, "")),
        patch.object(Recovery, "restore_what_is_not_finite", lambda self, step: []),
        patch("ssl_kd.vision.train.step.part_norms", lambda g: torch.where(
            torch.isfinite(part_norms(g)).all(), global_norm(g), torch.nan)),
    ):  # fmt: skip
        yield


WAYS = {
    "guard": contextlib.nullcontext,
    "no guard": lambda: without_guard(global_norm),
    "skip the step": skip_the_step,
    "nan_to_num": lambda: without_guard(cleaned_norm),
}


class Digits:
    """Projected pixels of digits with their neighbors, to train fifty heads on."""

    def __init__(self) -> None:
        dataset = open_dataset("digits", "train")
        assert isinstance(dataset, ArrayDataset)
        assert dataset.labels is not None
        x = torch.from_numpy(dataset.arrays).flatten(1).float() / 16
        self.labels = dataset.labels
        self.neighbors = nearest_neighbors(x, 20)
        projection = Projection.fit(x, None)
        self.x, self.dim = projection(x), projection.dim

    def run(
        self,
        steps: int,
        struck: dict[int, Strike],
        way: str = "guard",
        *,
        seed: int = 0,
        weight: str = "none",
        by_hand: bool = False,
        evaluate_every: int | None = None,
    ) -> tuple[HeadTrainer, list[tuple[int, list[float]]]]:
        """Train; return the trainer and the accuracy of every head at regular steps."""
        settings = VisionSettings(n_clusters=10, n_heads=HEADS, max_steps=steps, epochs=steps)
        settings = settings.replace(seed=seed, instance_weight=weight)
        trainer = make_trainer(settings, self.dim, 10, Precision.for_device("cpu"))
        bank = StruckBank(trainer.bank.make_head, HEADS)
        trainer.bank = bank
        curve: list[tuple[int, list[float]]] = []
        retired = trainer.state.health.retired

        def gather(rows: Tensor) -> Tensor:
            step = gather.step
            gather.step += 1
            if evaluate_every and step % evaluate_every == 0:
                curve.append((step, self.accuracies(trainer)))
            bank.strike = None
            if by_hand:
                retired.zero_()
            if step in struck:
                head, kind = struck[step]
                if by_hand:
                    retired[head] = True
                elif kind == "NaN weight":
                    trainer.state.student[head, 0] = torch.nan
                    trainer.state.teacher[head, 0] = torch.nan
                else:
                    bank.strike = struck[step]
            return self.x[rows]

        gather.step = 0
        sampler = make_plan(settings, trainer, self.neighbors, self.x.__getitem__).sampler
        one_chunk = patch(
            "ssl_kd.vision.train.step.head_chunks", lambda n, size, device: [slice(0, n)]
        )
        with one_chunk, WAYS[way](), contextlib.suppress(TooFewHealthyParts):
            learner = HeadsLearner(trainer, Plan(sampler, steps, None), gather)
            run_loop(learner, checkpoint_every=steps)
        bank.strike = None
        curve.append((steps, self.accuracies(trainer)))
        return trainer, curve

    def accuracies(self, trainer: HeadTrainer) -> list[float]:
        """Return the accuracy of every head; a non-finite head assigns all samples to cluster 0."""
        bank = trainer.bank
        assert isinstance(bank, StruckBank)
        bank.strike = None
        clusters = head_clusters(trainer, self.x.__getitem__, torch.arange(len(self.x)))
        return [100 * (evaluate.accuracy(self.labels, c) or 0.0) for c in clusters.numpy()]


def table(steps: int = 2000, seeds: int = 3) -> None:
    """Print what happened to the forty healthy heads after all faults in the other ten."""
    digits = Digits()
    kinds = ["NaN weight", "infinite logit", "NaN gradient", "1e30 gradient"]
    struck = strikes(steps, kinds)
    others = slice(STRUCK, HEADS)

    def equal(a: HeadTrainer, b: HeadTrainer) -> int:
        pairs = zip(a.state.owned().values(), b.state.owned().values(), strict=True)
        same = [torch.stack([(x[i] == y[i]).all() for i in range(HEADS)]) for x, y in pairs]
        return int(torch.stack(same).all(0)[others].sum())

    healthy = [digits.run(steps, {}, seed=seed) for seed in range(seeds)]
    clean = healthy[0][0]
    spread = [float(np.mean(curve[-1][1][others])) for _, curve in healthy]
    print(f"{len(struck)} faults in {steps} steps, in heads 0 to {STRUCK - 1} of {HEADS}\n")
    header("handling", "mean ACC of the other forty", "bit-identical to the fault-free run")
    interval = f"({min(spread):.1f} to {max(spread):.1f})"
    row(f"no fault, {seeds} seeds", f"{spread[0]:.1f} {interval}", "")
    for way in WAYS:
        trainer, curve = digits.run(steps, struck, way)
        row(way, f"{np.mean(curve[-1][1][others]):.1f}", f"{equal(clean, trainer)} of 40")

    # Instance weights couple the heads: compare with a run without the faulty head in its step.
    struck = strikes(steps, ["infinite logit"])
    guarded, _ = digits.run(steps, struck, weight="mean")
    twin, _ = digits.run(steps, struck, weight="mean", by_hand=True)
    print(f"\ncoupled by instance weights: {equal(guarded, twin)} of 40 bit-identical to the run")
    print("in which each faulty head was removed from its step by hand")


def picture(path: Path, steps: int = 800, at: int = 300) -> None:
    """Plot the accuracy after one NaN in a weight of one head at step `at`, for all four ways."""
    from matplotlib.figure import Figure

    digits = Digits()
    figure = Figure(figsize=(10, 3.6), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True)
    styles = zip(("#0072b2", "#d55e00", "#e69f00", "#009e73"), ("-", "-", "-", "--"), strict=True)
    for way, (color, line) in zip(WAYS, styles, strict=True):
        _, curve = digits.run(steps, {at: (0, "NaN weight")}, way, evaluate_every=10)
        done = [step for step, _ in curve]
        for axes, pick in ((left, slice(1, None)), (right, slice(0, 1))):
            means = [np.mean(accs[pick]) for _, accs in curve]
            axes.plot(done, means, label=way, color=color, linestyle=line)
            print(f"{way}: {means[-1]:.1f} after step {done[-1]}", flush=True)
    left.set(title="the other 49 heads, mean", ylabel="ACC", ylim=(0, 100))
    right.set_title("the faulty head")
    left.annotate("one NaN in one weight\nof one head", (at, 20), (8, 0),
                  textcoords="offset points", color="#555555")  # fmt: skip
    for axes in (left, right):
        axes.axvline(at, color="#999999", linewidth=1, linestyle=":")
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.4))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure healthy heads while others fail.")
    parser.add_argument("--picture", type=Path, help="file of the figure")
    args = parser.parse_args()
    if args.picture:
        picture(args.picture)
    else:
        table()


if __name__ == "__main__":
    main()
